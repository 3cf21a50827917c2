"""The text of a page without what only its looks and its script need."""

from __future__ import annotations

import re

SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def bare(page: str) -> str:
    """Tables without attributes, sort buttons and places to break a word; no script."""
    page = SCRIPT.sub("", page, count=1)
    page = re.sub(r"</?button[^>]*>|<wbr>", "", page)
    return re.sub(r"<(td|th|tr|table)( [^>]*)>", r"<\1>", page)
