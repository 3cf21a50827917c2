"""Which source a figure is of: a version number stays the same from one change to the next."""

from __future__ import annotations

import hashlib
from pathlib import Path

import truemfu


def source_id() -> str:
    """Eight characters that change with any module of the package."""
    folder = Path(truemfu.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]
