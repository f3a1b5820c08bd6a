"""Which checkpoint of the store a pointer stands for, also where the one that it names is gone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tierstore.errors import NotFoundError
from tierstore.integrations.lightning_parts.pointers import Pointer
from tierstore.store import Store
from tierstore.tiers.catalog import CheckpointInfo

__all__ = ["find_named", "find_pointed"]

log = logging.getLogger(__name__)


def find_named(store: Store, name: str) -> Pointer:
    """The checkpoint that ``@latest``, ``@12000``, ``@best:METRIC`` or ``@tag:TAG`` names.

    Raises:
        NotFoundError: There is none.
    """
    which = name.removeprefix("@")
    with store.open_checkpoint(int(which) if which.isascii() and which.isdigit() else which) as opened:
        replica: Any = opened.replica
        attempt = replica.info.attempt
    return Pointer(run=attempt.run, step=attempt.step, save_id=attempt.save_id)


def find_pointed(store: Store, pointer: Pointer, path: str) -> Pointer:
    """A pointer to what is to be loaded: the checkpoint that is named, else, with a warning, the newest that is not newer.

    Raises:
        NotFoundError: There is none.
    """
    if pointer.run != store.run:
        return pointer  # of another run of the store: that one or none
    found = _choose(store.checkpoints(), pointer, path).attempt
    if found.save_id == pointer.save_id:
        return pointer
    units = pointer.units if found.step == pointer.step else None
    return Pointer(run=pointer.run, step=found.step, save_id=found.save_id, units=units)


def _choose(checkpoints: Sequence[CheckpointInfo], pointer: Pointer, path: str) -> CheckpointInfo:
    older = [info for info in checkpoints if info.attempt.step <= pointer.step]
    for info in older:
        if (info.attempt.step, info.attempt.save_id) == (pointer.step, pointer.save_id):
            return info
    if not older:
        have = ", ".join(str(info.attempt.step) for info in checkpoints[-5:]) or "none"
        raise NotFoundError(
            f"{path} points to step {pointer.step} of run {pointer.run!r}, which is not in the store, and neither is an older one "
            f"(newest: {have})",
            hint="is it the store that was saved to? Else pass another path, '@latest', or remove the file to begin anew",
            run=pointer.run,
            step=pointer.step,
        )
    found = max(older, key=lambda info: (info.attempt.step, info.attempt.save_id))
    if found.attempt.step == pointer.step:
        log.warning("%s points to a save of step %d that a later one of the step has superseded: that is loaded", path, pointer.step)
    else:
        log.warning(
            "%s points to step %d of run %r, which is gone or was never committed: step %d is loaded, the newest before it",
            path,
            pointer.step,
            pointer.run,
            found.attempt.step,
        )
    return found
