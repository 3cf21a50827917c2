"""A self-contained HTML page for light and dark mode, without external assets.

The page's content security policy only allows its styles and, by its hash, the one script that all pages
share (`templates/page.js`): no other script, no request. All text in it is escaped, printable and at most
`LONGEST_TEXT` characters long, since a browser takes very long to wrap a line of tens of thousands.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ...text import printable, shortened

LONGEST_TEXT = 2000
_TEMPLATES = Path(__file__).parent / "templates"
_INSIDE_NAME = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=_)(?=\w)")


def write_template(path: Path, template: str, **values: Any) -> Path:
    """Fill a template of this folder, write it to `path` (its folder is created) and return the path."""
    environment = Environment(
        loader=PackageLoader("truemfu.report.drawing", "templates"),
        autoescape=True,
        trim_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"code": _code, "broken": _broken}
    style, script = (Markup((_TEMPLATES / name).read_text("utf-8")) for name in ("page.css", "page.js"))
    page = environment.get_template(template).render(
        **values, style=style, script=script, policy=_policy(script)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path.resolve()


def _policy(script: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Markup(
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )


def _shown(value: Any) -> Any:
    """Applied to every value in a template; `Markup` is trusted, such as the paths of charts."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return shortened(printable(value), LONGEST_TEXT)
    return value


def _code(text: str) -> Markup:
    """Text in which `backticks` mark code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(_shown(text)))))


def _broken(text: str) -> Markup:
    """Text that may be broken inside of long names such as `DPGhostClippingTrainer_bs4`."""
    return Markup(_INSIDE_NAME.sub("<wbr>", str(escape(_shown(text)))))
