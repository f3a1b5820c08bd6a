"""tierstore: tiered, verified checkpoints for large training runs.

The names below are the public API. They are loaded when first used, so that ``import tierstore`` costs nothing and
the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.checkpointer import Checkpointer
    from tierstore.config import StoreConfig, load_config
    from tierstore.errors import TierStoreError
    from tierstore.format.objects import ObjectCodecs
    from tierstore.retention import Retention
    from tierstore.state.export.exporting import Exported, ExportOptions
    from tierstore.state.foreign.opening import open_foreign
    from tierstore.state.lazy import Checkpoint, LazyTensor
    from tierstore.state.load import LoadOptions
    from tierstore.state.rank_values import RankValues, keep_modulo, keep_rank_0, require_same
    from tierstore.store import Store, open
    from tierstore.tiers.ticket import Ticket

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "ExportOptions",
    "Exported",
    "LazyTensor",
    "LoadOptions",
    "ObjectCodecs",
    "RankValues",
    "Retention",
    "Store",
    "StoreConfig",
    "Ticket",
    "TierStoreError",
    "__version__",
    "keep_modulo",
    "keep_rank_0",
    "load_config",
    "open",
    "open_foreign",
    "require_same",
]

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "tierstore.state.lazy",
    "Checkpointer": "tierstore.checkpointer",
    "ExportOptions": "tierstore.state.export.exporting",
    "Exported": "tierstore.state.export.exporting",
    "LazyTensor": "tierstore.state.lazy",
    "LoadOptions": "tierstore.state.load",
    "ObjectCodecs": "tierstore.format.objects",
    "RankValues": "tierstore.state.rank_values",
    "Retention": "tierstore.retention",
    "Store": "tierstore.store",
    "StoreConfig": "tierstore.config",
    "Ticket": "tierstore.tiers.ticket",
    "TierStoreError": "tierstore.errors",
    "keep_modulo": "tierstore.state.rank_values",
    "keep_rank_0": "tierstore.state.rank_values",
    "load_config": "tierstore.config",
    "open": "tierstore.store",
    "open_foreign": "tierstore.state.foreign.opening",
    "require_same": "tierstore.state.rank_values",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
