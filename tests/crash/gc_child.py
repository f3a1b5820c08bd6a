"""A collector to be killed: takes every path of deletion once, on folders that its parent has filled.

The harness forks it from a server that has imported the library, and tells it where to die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from collection_kit import tidy
from fork_kit import set_out
from retention_kit import NAMES, client_tiers

from tierstore.storage.posix import PosixStorage
from tierstore.tiers.tier import Tiers


def tiers_on(root: Path) -> Tiers:
    return client_tiers({name: PosixStorage(root / name, durable=False) for name in NAMES})


def main(root: str, environment: Mapping[str, str], errors: str) -> None:
    """The process."""
    set_out(environment, errors)
    told = asyncio.run(tidy(tiers_on(Path(root))))
    assert not told, told
