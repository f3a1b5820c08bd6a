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
from dataclasses import dataclass, field

from tierstore.config import StoreConfig
from tierstore.errors import SaveError
from tierstore.names import Attempt
from tierstore.state.stage import StagedState
from tierstore.store import Store
from tierstore.tiers.ticket import Ticket

__all__ = ["WriterStore", "close_stores", "note_generation", "shared_store"]

Key = tuple[str, str, int, int]


@dataclass(slots=True, kw_only=True)
class WriterStore:
    """A store, and the failures of saves that their callers were told of already: the store's next call is not to tell them again."""

    store: Store
    _told: set[str] = field(default_factory=set)

    def told(self, attempt: Attempt) -> None:
        """Whoever saved `attempt` gets its failure from the call itself."""
        self._told.add(attempt.save_id)

    def submit(
        self,
        attempt: Attempt,
        staged: StagedState,
        *,
        metrics: dict[str, float],
        tags: tuple[str, ...],
        final: bool,
        omit: tuple[str, ...],
    ) -> Ticket:
        """`Store.submit`, after failures that were told already are put aside."""
        try:
            self.raise_errors()
        except SaveError:
            staged.release()
            raise
        self.store.goes_back_to(_REGISTRY.generation)
        return self.store.submit(attempt, staged, metrics=metrics, tags=tags, final=final, omit=omit)

    def raise_errors(self) -> None:
        """`Store.raise_errors`, but for failures that were told already."""
        while True:
            try:
                self.store.raise_errors()
            except SaveError as error:
                if not self._knows(error):
                    raise
                continue
            return

    def close(self) -> None:
        """Drains and closes the store; raises its errors but those that were told already."""
        try:
            self.store.close()
        except SaveError as error:
            if not self._knows(error):
                raise

    def _knows(self, error: SaveError) -> bool:
        return error.context.get("save_id") in self._told


class _Registry:
    """The open stores of this process; a forked child begins with none, whatever its parent was at."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.generation = 0
        self.lock = threading.Lock()
        self.open: dict[Key, WriterStore] = {}


_REGISTRY = _Registry()


def shared_store(config: StoreConfig, *, rank: int, world_size: int) -> tuple[Key, WriterStore]:
    """This process's store for `config` (with its run) as `rank` of `world_size`; opened if it is not yet; errors as `tierstore.open`."""
    key = (config.fingerprint, config.run or "", rank, world_size)
    with _REGISTRY.lock:
        known = _REGISTRY.open.get(key)
        if known is None or not known.store.usable:
            known = _REGISTRY.open[key] = WriterStore(store=Store(config, rank=rank, world_size=world_size))
        return key, known


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
