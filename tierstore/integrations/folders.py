"""What the doors of frameworks that write folders have in common: the store, and the newest checkpoint that is a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tierstore.errors import NotFoundError, StateMismatchError, UsageError
from tierstore.state.folder import FOLDER
from tierstore.state.load import LoadOptions
from tierstore.store import Store
from tierstore.store import open as open_store
from tierstore.tiers.catalog import CheckpointInfo

__all__ = ["committed_step", "newest_folders", "opened"]


@contextmanager
def opened(store: Any, run: str | None) -> Iterator[Store]:
    """`store` itself where it is open, else a store of its own that is closed at the end."""
    if isinstance(store, Store):
        yield store
        return
    with open_store(store, run=run) as made:
        yield made


def newest_folders(store: Store, *, fallback: bool = False) -> list[CheckpointInfo]:
    """The newest committed checkpoint, with `fallback` the older ones after it; the same on all ranks. Empty: the run has none.

    What a dead process left whole on this node is committed first.

    Raises:
        UsageError: The newest was not saved from a folder.
        TierStoreError: As `Store.resume`.
    """
    try:
        # It commits what is staged, and agrees with the other ranks; of the state only this one number is wanted yet.
        resumed = store.resume(into={FOLDER: {"version": 0}}, options=LoadOptions(unexpected="ignore"), fallback=fallback)
    except StateMismatchError as error:
        raise UsageError(
            f"the newest checkpoint of run {store.run!r} was not saved from a folder, so not by this framework",
            hint="load it with Store.resume or Store.load; give each program a run of its own",
            run=store.run,
        ) from error
    if resumed is None:
        return []
    if not fallback:
        return [resumed.checkpoint]
    older = [info.step for info in reversed(store.checkpoints()) if info.step < resumed.step]
    if store.agreement is not None:
        older = json.loads(store.agreement.share("the older checkpoints", json.dumps(older).encode()))
    return [resumed.checkpoint, *(committed_step(store, step) for step in older)]


def committed_step(store: Store, step: Any) -> CheckpointInfo:
    """The checkpoint of a step.

    Raises:
        NotFoundError: There is none.
    """
    steps = {info.step: info for info in store.checkpoints()}
    if step not in steps:
        raise NotFoundError(f"run {store.run!r} has no step {step!r}", hint=f"it has {sorted(steps) or 'none'}", run=store.run)
    return steps[step]
