"""What the tests of the ``tier://`` file system share: tiers on folders, quick where nobody pulls the plug."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tierstore.tiers.opening
from tierstore.fs.filesystem import TierFileSystem
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage


@contextmanager
def unsynced_tiers() -> Iterator[None]:
    """Folders without their fsyncs, as long as this lasts."""
    real = tierstore.tiers.opening.open_storage

    def make(uri: str, *args: Any, **settings: Any) -> Storage:
        return real(uri, *args, **settings) if "://" in uri else PosixStorage(Path(uri), durable=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierstore.tiers.opening.open_storage", make)
        yield


@contextmanager
def file_system(*tiers: Any, **options: Any) -> Iterator[TierFileSystem]:
    """A file system over `tiers`, closed at the end."""
    with unsynced_tiers():
        fs = TierFileSystem(tiers=[str(tier) if isinstance(tier, Path) else tier for tier in tiers], **options)
        yield fs
        fs.close()


def two_tiers(root: Path) -> list[Any]:
    """A node's tier, and one that all nodes see."""
    return [str(root / "node"), str(root / "shared")]
