"""``save``, ``load`` and ``async_save`` that know ``tier://``, and the opt-in that teaches torch's own ones.

Torch has no registry of storages: ``_storage_utils._storage_setup`` tries its two built-in ones in turn. So the choice is made here, before
torch is called; or, where code that can't be changed calls ``torch.distributed.checkpoint`` itself, `enable_auto_detection` puts
a function around that one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from tierstore.dcp.planners import TierLoadPlanner, TierSavePlanner
from tierstore.dcp.reader import TierStorageReader
from tierstore.dcp.stores import close_stores
from tierstore.dcp.writer import TierStorageWriter
from tierstore.tier_uri import is_tier_uri

__all__ = ["async_save", "close", "disable_auto_detection", "enable_auto_detection", "load", "save"]

CheckpointId = str | os.PathLike[str] | None
_HOLDERS: tuple[Any, ...] = (saver, loader)
"""The modules that have `_storage_setup` by name."""
_MARK = "_tierstore_wraps"


def save(
    state_dict: dict[str, Any], *, checkpoint_id: CheckpointId = None, storage_writer: StorageWriter | None = None, **options: Any
) -> Metadata:
    """``torch.distributed.checkpoint.save``, with a `TierStorageWriter` where `checkpoint_id` is a ``tier://`` URI and none is given.

    Args:
        state_dict: The state.
        checkpoint_id: ``tier://[NAME]/[config.yaml/]RUN/step-N``, or what torch knows.
        storage_writer: A writer to use instead.
        **options: What torch's ``save`` takes beside: ``planner``, ``process_group``, ``no_dist`` …

    Raises:
        CheckpointException: Torch's; ``failures`` has each rank's error.
    """
    writer = _writer(storage_writer, checkpoint_id)
    if isinstance(writer, TierStorageWriter) and options.get("planner") is None:
        options["planner"] = TierSavePlanner()
    metadata: Metadata = saver.save(state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **options)
    return metadata


def async_save(
    state_dict: dict[str, Any], *, checkpoint_id: CheckpointId = None, storage_writer: StorageWriter | None = None, **options: Any
) -> Future[Any] | AsyncSaveResponse:
    """``torch.distributed.checkpoint.async_save``, likewise; with both executors. The future is done when the checkpoint is committed."""
    writer = _writer(storage_writer, checkpoint_id)
    if isinstance(writer, TierStorageWriter) and options.get("planner") is None:
        options["planner"] = TierSavePlanner()
    answer: Future[Any] | AsyncSaveResponse = saver.async_save(state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **options)
    return answer


def load(
    state_dict: dict[str, Any], *, checkpoint_id: CheckpointId = None, storage_reader: StorageReader | None = None, **options: Any
) -> None:
    """``torch.distributed.checkpoint.load``, with a `TierStorageReader` where `checkpoint_id` is a ``tier://`` URI and none is given.

    Args:
        state_dict: Filled in place.
        checkpoint_id: ``tier://[NAME]/[config.yaml/]RUN[/step-N | @REFERENCE]``, or what torch knows.
        storage_reader: A reader to use instead.
        **options: What torch's ``load`` takes beside.

    Raises:
        CheckpointException: Torch's; ``failures`` has each rank's error.
    """
    with contextlib.ExitStack() as stack:
        if storage_reader is None and is_tier_uri(checkpoint_id):
            storage_reader = TierStorageReader(checkpoint_id)
            stack.callback(storage_reader.close)
        if isinstance(storage_reader, TierStorageReader) and options.get("planner") is None:
            options["planner"] = TierLoadPlanner()
        loader.load(state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **options)


def close() -> None:
    """Drains and closes every store that this process's writers opened, those of `save` and `async_save` too; the next save opens anew.

    Without it they stay open for further saves, and drain when the interpreter ends.

    Raises:
        SaveError: A background save or promotion failed and was not reported before.
    """
    close_stores()


def enable_auto_detection() -> None:
    """Makes ``torch.distributed.checkpoint.save``, ``load`` and ``async_save`` find the storage of ``tier://`` checkpoint ids themselves.

    It wraps a private function of torch in this process: all other ids go to torch's own. A `Path` made of a ``tier://`` URI is refused
    then, where torch would make a local folder ``tier:``. In the process executor of ``async_save`` torch runs in another process, which
    knows nothing of this: pass ``storage_writer=`` there, or call `async_save` of this package. Calling it again does nothing.
    """
    for module in _HOLDERS:
        stock = module._storage_setup
        if not hasattr(stock, _MARK):
            module._storage_setup = _wrapped(stock)


def disable_auto_detection() -> None:
    """Undoes `enable_auto_detection`."""
    for module in _HOLDERS:
        module._storage_setup = getattr(module._storage_setup, _MARK, module._storage_setup)


def _wrapped(stock: Callable[..., Any]) -> Callable[..., Any]:
    def _storage_setup(storage: Any, checkpoint_id: CheckpointId, reader: bool = False) -> Any:
        if storage is None and is_tier_uri(checkpoint_id):
            return TierStorageReader(checkpoint_id) if reader else TierStorageWriter(checkpoint_id)
        return stock(storage, checkpoint_id, reader)

    setattr(_storage_setup, _MARK, stock)
    return _storage_setup


def _writer(given: StorageWriter | None, checkpoint_id: CheckpointId) -> StorageWriter | None:
    return TierStorageWriter(checkpoint_id) if given is None and is_tier_uri(checkpoint_id) else given
