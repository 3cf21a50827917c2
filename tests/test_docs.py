"""The documentation site: pages in the navigation, tables as in the code, links that lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command_line import COMMANDS

import truemfu
from truemfu import TrainingMonitor
from truemfu.hardware.specs import DEVICES
from truemfu.monitor.config import SCHEMA, MonitorConfig, load_config
from truemfu.sweep.config import FIELDS

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def in_navigation() -> list[str]:
    """The pages that `nav` of mkdocs.yml names."""
    nav = re.search(r"^nav:\n((?:  .+\n)+)", read("mkdocs.yml"), re.MULTILINE)
    assert nav is not None

    def pages(entries: Any) -> Iterator[str]:
        if isinstance(entries, str):
            yield entries
        else:
            for entry in entries.values() if isinstance(entries, dict) else entries:
                yield from pages(entry)

    return list(pages(yaml.safe_load(nav[1])))


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = re.split(rf"^## {re.escape(heading)}$", read(page), flags=re.MULTILINE)[1]
    rows = re.findall(r"^\|(.+)\|$", section.split("\n## ")[0], re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in rows[2:]]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = in_navigation()
    assert len(pages) == len(set(pages))
    assert {path.name for path in DOCS.glob("*.md")} == {page for page in pages if "/" not in page}
    outside = [page.removeprefix("repository/") for page in pages if "/" in page]
    assert [path for path in outside if not (ROOT / path).is_file()] == []


def test_the_configuration_table_has_every_key_with_its_default() -> None:
    rows = {key.strip("`"): default.strip("`") for key, default, _ in table("docs/configuration.md", "Keys")}
    assert rows.keys() == SCHEMA.keys()
    defaults = dataclasses.asdict(MonitorConfig())
    for key, default in rows.items():
        assert yaml.safe_load(default) == defaults[SCHEMA[key][0]], key


def test_the_example_of_a_configuration_is_valid(tmp_path: Path) -> None:
    block = read("docs/configuration.md").partition("```yaml\n")[2].partition("```")[0]
    content = yaml.safe_load(block)
    content["monitoring"]["performance_monitoring"]["hybrid_mode"]["audit"] = None  # a file of the reader's
    assert load_config(content).mode == "hybrid"


def documented_metrics() -> set[str]:
    page = read("docs/metrics.md").partition("## When a row is written")[0]
    rows = [row.partition(" | ")[0] for row in re.findall(r"^\| (`.+)$", page, re.MULTILINE)]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def pattern(name: str) -> re.Pattern[str]:
    """Matches what a documented name stands for: `<name>` and `<n>` are any text without a slash."""
    return re.compile(re.sub(r"<\w+>", "[^/]+", name))


@functools.cache
def names_in_the_code() -> tuple[set[str], set[str]]:
    """The metric names in the monitor's source: whole ones, and f-strings with {} for their values."""
    whole, made = set(), set()
    files = [*(ROOT / "src/truemfu/monitor").rglob("*.py")]
    files += [ROOT / "src/truemfu" / name for name in ("waterfall.py", "crosscheck.py")]
    files += (ROOT / "src/truemfu/private").glob("*.py")
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                name, found = "".join(map(str, parts)), made
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                name, found = node.value, whole
            else:
                continue
            if re.fullmatch(r"(perf|training|dataset|privacy)/[\w/{}]*[\w}]|global_step", name):
                found.add(name)
    return whole, made


def way(name: str) -> re.Pattern[str]:
    """Matches what the code may make of an f-string; rates also have a form for one GPU."""
    return re.compile(re.escape(name).replace(r"\{\}", "[^/]+") + "(_per_gpu)?")


def test_every_metric_in_the_code_is_in_the_table() -> None:
    known = [pattern(name) for name in documented_metrics()]
    whole, made = names_in_the_code()
    assert len(whole) > 40
    assert sorted(name for name in whole if not any(p.fullmatch(name) for p in known)) == []
    samples = {re.sub(r"<\w+>", "1", name) for name in documented_metrics()}
    assert sorted(name for name in made if not any(way(name).fullmatch(known) for known in samples)) == []


def test_every_metric_in_the_table_is_in_the_code() -> None:
    whole, made = names_in_the_code()
    ways = [way(name) for name in whole | made]
    samples = {re.sub(r"<\w+>", "1", name) for name in documented_metrics()}
    assert sorted(name for name in samples if not any(known.fullmatch(name) for known in ways)) == []


def test_every_key_of_a_real_row_is_in_the_table(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    monitor = TrainingMonitor(
        tmp_path, model=model, config={"monitoring": {"peak_tflops": 1, "detailed_log_freq": 1}}, trackers=[]
    )
    for step in range(1, 6):
        loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        monitor.log_step(step, 0, loss, loss, 0.1)
    monitor.close()
    row = monitor.last
    assert "perf/mfu" in row
    known = [pattern(name) for name in documented_metrics()]
    assert [name for name in row if not any(p.fullmatch(name) for p in known)] == []


def test_the_sweep_table_has_every_key() -> None:
    rows = table("docs/sweep.md", "The matrix")
    named = {key for row in rows for key in re.findall(r"`(\w+)`", row[0])}
    assert named == set(FIELDS)


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: truemfu\.(\w+)$", read("docs/reference.md"), re.MULTILINE)
    assert sorted(named) == sorted(set(truemfu.__all__) - {"__version__"})


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")))])
def test_every_command_that_a_page_shows_exists(page: str) -> None:
    shown = re.findall(r"^(?:    )?(?:\$ )?(?:\w+=\S+ )?truemfu ([a-z]\w*)(.*)$", read(page), re.MULTILINE)
    for name, rest in shown:
        assert name in COMMANDS, f"{page}: truemfu {name}"
        own = rest.partition(" -- ")[0].partition("#")[0]
        if name == "run":  # options after the script are its own
            own = own.partition(".py")[0]
        options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        options |= {option for parameter in COMMANDS[name].params for option in parameter.secondary_opts}
        used = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", own))
        assert used <= options, f"{page}: truemfu {name} has no {used - options}"


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", target]
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    markdown, rendering = pytest.importorskip("markdown"), pytest.importorskip("mkdocstrings")
    if sys.version_info < (3, 11):
        try:
            rendering.Highlighter(markdown.Markdown())
        except TypeError:
            pytest.skip("this mkdocstrings lacks an argument that this pymdown-extensions needs")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_built_and_complete_in_itself(site: Path) -> None:
    devices = (site / "device_table.html").read_text(encoding="utf-8")
    assert devices.count("<tr><td>") == len(DEVICES)
    assert "log_step" in (site / "reference.html").read_text(encoding="utf-8")
    assert (site / "repository/benchmarks/results/gpu_peak.txt.html").is_file()
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?https?://[^>]+>")
    pages = list(site.rglob("*.html"))
    assert {str(p): found for p in pages if (found := fetched.findall(p.read_text(encoding="utf-8")))} == {}


def test_the_site_filters_its_devices_in_a_browser(site: Path, tmp_path: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no Chromium here")
    page = (site / "device_table.html").read_text(encoding="utf-8")
    typed = """<script>addEventListener("load", () => {
      const field = document.getElementById("device-filter");
      field.value = "h200"; field.dispatchEvent(new Event("input"));
    });</script></body>"""
    (site / "filtered.html").write_text(page.replace("</body>", typed), encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--dump-dom", "--virtual-time-budget=5000", (site / "filtered.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "<html" not in done.stdout:
        pytest.skip("Chromium does not start here")
    fitting = sum("h200" in f"{spec.name} {spec.source}".lower() for spec in DEVICES)
    assert f"{fitting} of {len(DEVICES)} devices" in done.stdout
    assert len(re.findall(r"<tr><td>", done.stdout)) == fitting


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    """The rules of mkdocs.yml, on one page with three links that lead nowhere."""
    settings = read("mkdocs.yml")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[a](no.md) [b](#no) [c](../benchmarks/no.txt)\n")
    validation = settings[settings.index("validation:") :]
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: x\nhooks: [{ROOT / 'website/hooks.py'}]\nnav: [index.md]\n{validation}")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert [name for name in ("no.md", "#no", "no.txt") if name not in done.stdout + done.stderr] == []
