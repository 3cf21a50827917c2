"""What the documentation site adds to the pages of docs/ when it is built.

    docs/*.md ── a link to a file outside docs/ ─► a page with that file: repository/<path>
              ── <!-- device table -->         ─► the table of `truemfu.hardware.specs`
              ── a script from a server        ─► one of docs/assets/: no request leaves a page

The same Markdown is read on a code host, where `../benchmarks/results/x.txt` is a file of the repository. On
the site such a link leads to a page with the file's content: the site is complete without the repository.
A link to a file that does not exist is left as it is, and the strict build fails on it.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from truemfu.hardware.specs import DEVICES, DTYPES, DeviceSpec  # noqa: E402

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_DEVICE_TABLE = "<!-- device table -->"
_NO_SEARCH = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n"
_FETCHED_WORKER = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
_WIDE = ["toc"]
_HIDDEN = {
    "index.md": ["navigation", "toc"],
    "device_table.md": _WIDE,
    "configuration.md": _WIDE,
    "accuracy.md": _WIDE,
}
_LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page for every file outside docs/ that the navigation or a page links to."""
    wanted = list(_linked_from_docs()) + list(_in_navigation(config["nav"]))
    added: set[str] = set()
    while wanted:
        path = wanted.pop()
        uri = _uri(path)
        if path.startswith("docs/") or uri in added or not (ROOT / path).exists():
            continue
        added.add(uri)
        files.append(File.generated(config, uri, content=_page(path)))
        if path.endswith(".md"):
            wanted += _links(path)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to the added pages, and insert the table of devices."""
    uri = page.file.src_uri
    page.meta.setdefault("hide", _HIDDEN.get(uri, []))
    if not uri.startswith("repository/"):
        markdown = _rewritten(markdown, f"docs/{uri}")
    return markdown.replace(_DEVICE_TABLE, device_table())


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Replace the script that the theme would fetch from a server when a page is opened as a file."""
    own = get_relative_url("assets/file_worker.js", page.url)
    return output.replace(_FETCHED_WORKER, f'<script src="{own}"></script>')


def on_post_template(output: str, **_: Any) -> str:
    """The same for the page of a wrong address."""
    return output.replace(_FETCHED_WORKER, "")


def device_table() -> str:
    """The table of devices as HTML, with the field that filters it."""
    heads = "".join(f"<th>{name}</th>" for name in ("device", *DTYPES, "memory", "GB/s", "source"))
    rows = "\n".join(_device_row(spec) for spec in DEVICES)
    return (
        '<p><label>Filter: <input id="device-filter" type="search" placeholder="H100, MI300, 24 GB …" '
        'autocomplete="off"></label> <span id="device-count" role="status"></span></p>\n'
        f'<table id="device-table"><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>\n'
    )


def _device_row(spec: DeviceSpec) -> str:
    peaks = [spec.peak(dtype) for dtype in DTYPES]
    memory, bandwidth = spec.memory_bytes, spec.memory_bandwidth_bytes_per_s
    cells = [
        spec.name,
        *("" if peak is None else _tflops(peak) for peak in peaks),
        "" if memory is None else f"{memory / 1e9:g} GB",
        "" if bandwidth is None else f"{bandwidth / 1e9:,.0f}",
        spec.source,
    ]
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _tflops(flops_per_s: float) -> str:
    tflops = flops_per_s / 1e12
    return f"{tflops:,.0f}" if tflops >= 1000 else f"{tflops:.4g}"


def _linked_from_docs() -> Iterator[str]:
    for page in sorted((ROOT / "docs").glob("*.md")):
        yield from _links(f"docs/{page.name}")


def _links(path: str) -> Iterator[str]:
    """The files that a Markdown file of the repository links to, by their paths in it."""
    for match in _LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
        yield _target(match[1], path)


def _in_navigation(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        if entries.startswith("repository/"):
            yield entries.removeprefix("repository/")
        return
    for entry in entries.values() if isinstance(entries, dict) else entries:
        yield from _in_navigation(entry)


def _target(link: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _uri(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _rewritten(markdown: str, path: str) -> str:
    here = posixpath.dirname(_uri(path))

    def rewrite(match: re.Match[str]) -> str:
        target = _target(match[1], path)
        if not (ROOT / target).exists():
            return match[0]
        return posixpath.relpath(_uri(target), here or ".") + (match[2] or "")

    return _LINK.sub(rewrite, markdown)


def _page(path: str) -> str:
    """The Markdown of a page with one file or folder of the repository."""
    file = ROOT / path
    if path.endswith(".md"):
        return _rewritten(file.read_text(encoding="utf-8"), path)
    if file.is_dir():
        names = sorted(inner.relative_to(file).as_posix() for inner in file.rglob("*") if inner.is_file())
        listed = "\n".join(f"- `{name}`" for name in names if "__pycache__" not in name)
        return f"{_NO_SEARCH}# {path}\n\nA folder of the repository:\n\n{listed}\n"
    language = _LANGUAGES.get(file.suffix, "text")
    content = file.read_text(encoding="utf-8").rstrip("\n")
    return f"{_NO_SEARCH}# {path}\n\n`````{language}\n{content}\n`````\n"
