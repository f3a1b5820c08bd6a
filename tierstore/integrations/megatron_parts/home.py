"""The store that Megatron's strategies save into and load from, and what a checkpoint's folder stands for."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException

from tierstore.config import load_config
from tierstore.dcp.stores import shared_store
from tierstore.errors import StateMismatchError, UsageError
from tierstore.integrations.megatron_parts.layout import ABOUT
from tierstore.integrations.plain_types import register_megatron, register_plain
from tierstore.state.lazy import Checkpoint
from tierstore.store import Store

__all__ = ["BACKEND", "VERSION", "Home", "MegatronMismatchError", "step_of"]

BACKEND, VERSION = "tierstore", 1

_STEP = re.compile(r"(?:.*\D)?(\d{1,15})")


class MegatronMismatchError(StateMismatchError, CheckpointingException):
    """What Megatron wants and what is stored differ; also a `CheckpointingException`, which its callers expect."""


class Home:
    """The store that strategies save into and load from, opened when it is first used.

    Args:
        source: An open store (it stays the caller's to close), or what `tierstore.open` takes.
        run: The run, where `source` does not say it.
    """

    def __init__(self, source: Any, run: str | None = None) -> None:
        self._given = source if isinstance(source, Store) else None
        self._config = source.config if isinstance(source, Store) else load_config(source, run=run)
        if self._given is not None:
            _add_codecs(self._given)

    @property
    def store(self) -> Store:
        """The store, as one of this process's rank in Megatron's ranks."""
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._given is not None:
            store = self._given
            if (store.rank, store.world_size) != (rank, world_size):
                raise UsageError(
                    f"the given store is of rank {store.rank} of {store.world_size}, Megatron's of rank {rank} of {world_size}",
                    hint="open it after torch.distributed is initialised, without rank and world_size",
                )
            return store
        _, found = shared_store(self._config, rank=rank, world_size=world_size)
        _add_codecs(found)
        return found

    @contextlib.contextmanager
    def opened(self, checkpoint_dir: Any) -> Any:
        """The checkpoint that a folder's name stands for, and the tree of all ranks; under a lease while it lasts."""
        step = step_of(checkpoint_dir)
        checkpoint: Checkpoint
        with self.store.open_checkpoint(step) as checkpoint:
            tree = checkpoint.trees().united()[0]
            if not isinstance(tree, dict) or ABOUT not in tree:
                raise MegatronMismatchError(
                    f"step {step} of run {self.store.run!r} was not saved by Megatron", hint="load it with tierstore.open(…).load()"
                )
            yield checkpoint, tree


def step_of(checkpoint_dir: Any) -> int:
    """The step that a folder's name ends with: ``iter_0000100``, ``step-100``.

    Raises:
        UsageError: It ends with no number.
    """
    name = os.path.basename(os.path.normpath(os.fspath(checkpoint_dir)))
    found = _STEP.fullmatch(name)
    if found is None:
        raise UsageError(f"{name!r} names no step", hint="name checkpoint_dir iter_0000100, or tier:///RUN/step-100")
    return int(found[1])


def _add_codecs(store: Store) -> None:
    register_plain(store.codecs)
    register_megatron(store.codecs)
