"""``UPath("tier://…")``: universal_pathlib's class for this file system; it finds it by the entry point ``tier``."""

from __future__ import annotations

from fsspec import get_filesystem_class
from upath import UPath

from tierstore.fs.places import outer

__all__ = ["TierPath"]

get_filesystem_class("tier")  # universal_pathlib asks fsspec how URIs are split only where the class is loaded already


class TierPath(UPath):
    """A path in a store's tiers. Its text is a URI that leads there again, wherever it is taken."""

    __slots__ = ()

    def __str__(self) -> str:
        text = super().__str__()
        return outer(self.path, self.storage_options) if text.startswith("tier://") else text
