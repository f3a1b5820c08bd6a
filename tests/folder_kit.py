"""Looking into a folder while somebody else deletes in it: `Path.rglob` raises where a folder goes while it is listed."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path


def files_below(folder: Path, pattern: str = "*") -> list[Path]:
    """The files below `folder` whose names match, sorted; passes over what goes just now."""
    return sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names if fnmatchcase(name, pattern))
