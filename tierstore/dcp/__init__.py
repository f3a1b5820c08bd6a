"""torch.distributed.checkpoint over tierstore: a storage writer and reader, and ``save``, ``load`` and ``async_save`` that know ``tier://``."""

from __future__ import annotations

from tierstore.dcp.entry import async_save, close, disable_auto_detection, enable_auto_detection, load, save
from tierstore.dcp.planners import TierLoadPlanner, TierSavePlanner
from tierstore.dcp.reader import TierStorageReader
from tierstore.dcp.writer import TierStorageWriter

__all__ = [
    "TierLoadPlanner",
    "TierSavePlanner",
    "TierStorageReader",
    "TierStorageWriter",
    "async_save",
    "close",
    "disable_auto_detection",
    "enable_auto_detection",
    "load",
    "save",
]
