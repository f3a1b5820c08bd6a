"""torch.distributed.checkpoint over tierstore: a storage writer and reader, and ``save``, ``load`` and ``async_save`` that know ``tier://``."""

from __future__ import annotations

from tierstore.dcp.reader import TierStorageReader
from tierstore.dcp.writer import TierStorageWriter

__all__ = ["TierStorageReader", "TierStorageWriter"]
