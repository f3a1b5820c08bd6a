"""The stores that this process's writers have opened: one for each configuration, run and rank.

torch pickles the writer for every save with the process executor, and trainers make a new one for every save: a `Store` of each writer's
own would leave its background work behind each time. So a process keeps what
its writers opened, until one of them is closed or the process ends (the store drains then).

`_REGISTRY` is state in a module. It can't be otherwise: ``dcp.save(…, checkpoint_id="tier://…")`` and the process
executor of ``async_save`` give us no object that lives from one save to the next, and promotion outlives a save. Its keys say all that
makes two stores differ; a store that was closed, or that belongs to the parent of a fork, is opened anew.
"""

from __future__ import annotations

import contextlib
import os
import threading

from tierstore.config import StoreConfig
from tierstore.errors import SaveError
from tierstore.names import Attempt
from tierstore.state.stage import StagedState
from tierstore.store import Store
from tierstore.tiers.ticket import Ticket

__all__ = ["close_stores", "note_generation", "shared_store", "submit"]

Key = tuple[str, str, int, int]


class _Registry:
    """The open stores of this process; a forked child begins with none, whatever its parent was at."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.generation = 0
        self.lock = threading.Lock()
        self.open: dict[Key, Store] = {}


_REGISTRY = _Registry()


def shared_store(config: StoreConfig, *, rank: int, world_size: int) -> tuple[Key, Store]:
    """This process's store for `config` (with its run) as `rank` of `world_size`; opened if it is not yet; errors as `tierstore.open`."""
    key = (config.fingerprint, config.run or "", rank, world_size)
    with _REGISTRY.lock:
        known = _REGISTRY.open.get(key)
        if known is None or not known.usable:
            known = _REGISTRY.open[key] = Store(config, rank=rank, world_size=world_size)
        return key, known


def submit(
    store: Store,
    attempt: Attempt,
    staged: StagedState,
    *,
    metrics: dict[str, float],
    tags: tuple[str, ...],
    final: bool,
    omit: tuple[str, ...],
) -> Ticket:
    """`Store.submit`, after what went wrong before; tells what the readers of this process loaded goes back to."""
    try:
        store.raise_errors()
    except SaveError:
        staged.release()
        raise
    store.goes_back_to(_REGISTRY.generation)
    return store.submit(attempt, staged, metrics=metrics, tags=tags, final=final, omit=omit)


def note_generation(generation: int) -> None:
    """A reader of this process read what goes back to so many quantised copies: later saves of its writers tell."""
    with _REGISTRY.lock:
        _REGISTRY.generation = max(_REGISTRY.generation, generation)


def close_stores(keys: set[Key] | None = None) -> None:
    """Drains and closes the stores of `keys` (None: all) that are still open; raises an error after all were closed."""
    with _REGISTRY.lock:
        stores = _REGISTRY.open
        found = [stores.pop(key) for key in sorted(stores if keys is None else keys) if key in stores]
    with contextlib.ExitStack() as closing:  # each is closed, whatever the others raise
        for each in found:
            closing.callback(each.close)  # a store that belongs to the parent of a fork does nothing
