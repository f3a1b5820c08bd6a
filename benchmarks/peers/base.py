"""The one interface of all ways to save and load."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from measure import reason_of

from peers import installed

State = Mapping[str, torch.Tensor]
"""A flat state: names and tensors."""

Wait = Callable[[], object]
"""Returns when a save is on the disk, synced."""


class Session(Protocol):
    """One way to save and load, with what it keeps from one save to the next.

    Not every session can do both: one that can't has `None` in place of the method, which `can` tells.
    """

    def save(self, state: State, turn: int) -> Wait:
        """Saves into a folder of its own for each turn; returns when training may go on."""

    def load(self, into: State) -> State:
        """Loads the newest save: into these tensors where it can, else into memory of its own. Every byte is in memory when it returns."""

    def files(self) -> Path:
        """The folder where the newest save lies."""

    def discard(self) -> None:
        """Removes what was saved, as far as it would be in the way of the disk."""

    def close(self) -> None:
        """Ends what it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A way to save and load that may or may not run here.

    Attributes:
        name: Its row in the tables.
        note: What it does and leaves out, in one line.
        kind: `ours`, `peer` or `limit`.
        open: Makes a session whose files lie below a folder.
        needs: Modules that must be importable.
        asynchronous: Its save returns before the bytes are on the disk.
        proves: It hashes what it writes, and checks it when loading.
        syncs: It returns with its files synced; the others' files are synced after their save, and that counts.
    """

    name: str
    note: str
    open: Callable[[Path], Session]
    kind: str = "peer"
    needs: tuple[str, ...] = ()
    asynchronous: bool = False
    proves: bool = False
    syncs: bool = False

    def unavailable(self) -> str | None:
        """Why it can't run here; None if nothing is known to be in its way."""
        for module in self.needs:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001  whatever a package raises at import is the reason
                return installed.why_not(module) or f"import {module}: {reason_of(error)}"
        return None


def touched(state: State) -> State:
    """The same; every page of it has been read, so that what is mapped is in memory."""
    for tensor in state.values():
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()
    return state


def nothing() -> None:
    """What is waited for where a save is done when it returns."""
