"""Colours and shapes of the pictures on the front page, for a light and a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH = 880

COLOURS = {
    "light": {
        "page": "#ffffff",
        "text": "#1f2328",
        "soft": "#59636e",
        "track": "#f1f3f5",
        "peak": "#aab4bf",
        "loss": "#dfa35f",
        "largest": "#cf4f14",
        "gain": "#1f8f84",
        "hfu": "#1f6fb2",
        "mfu": "#2c8a4e",
    },
    "dark": {
        "page": "#0d1117",
        "text": "#e6edf3",
        "soft": "#9198a1",
        "track": "#1b222b",
        "peak": "#5b6672",
        "loss": "#9c7440",
        "largest": "#e8763b",
        "gain": "#45b3a6",
        "hfu": "#5aa9ea",
        "mfu": "#45b06c",
    },
}
SCHEMES = tuple(COLOURS)
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"


def picture(drawn: Sequence[str], height: float, scheme: str, *, title: str, described: str) -> str:
    """An SVG with a background of its own, its title and its description for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" font-family="{_FONT}" font-size="14">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(described)}</desc>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{COLOURS[scheme]["page"]}"/>',
            *drawn,
            "</svg>",
            "",
        ]
    )


def text(
    x: float, y: float, content: str, fill: str, *, size: int = 14, bold: bool = False, anchor: str = "start"
) -> str:
    """A line of text."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}"{weight} text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 3) -> str:
    """A filled rectangle."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="{radius:g}" fill="{fill}"/>'
