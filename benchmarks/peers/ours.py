"""tierstore itself."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tierstore
from peers.base import Peer, State, Wait

OURS = "tierstore"
OURS_MEMORY = "tierstore, memory tier before the disk"


class Ours:
    """A store on one folder, or with a tier in memory before it.

    Args:
        folder: Where the tier on the disk lies.
        memory: With a tier on `/dev/shm` before it, which keeps one checkpoint.
        in_place: Loads fill the tensors that are there; else they come in memory of their own.
    """

    def __init__(self, folder: Path, *, memory: bool = False, in_place: bool = True) -> None:
        self.folder, self.in_place = folder, in_place
        self.memory = Path(tempfile.mkdtemp(prefix=f"tierstore-bench-{os.getpid()}-", dir="/dev/shm")) if memory else None
        tiers: list[Any] = [{"name": "disk", "uri": str(folder / "disk"), "scope": "shared"}]
        retention: dict[str, Any] = {}
        if self.memory:
            tiers.insert(0, {"name": "memory", "uri": str(self.memory), "scope": "node", "durable": False})
            retention = {
                "retention": {"keep": [{"last": 1000}], "tiers": {"memory": {"keep": [{"last": 1}]}}, "protect": {"min_age": "1s"}}
            }
        self.store = tierstore.open({"version": 1, "run": "bench", "tiers": tiers, **retention})
        self.step = 0

    def save(self, state: State, turn: int) -> Wait:
        self.step += 1
        ticket = self.store.save(self.step, dict(state))
        return lambda: ticket.wait("durable", timeout=600)

    def load(self, into: State) -> State:
        if self.in_place:
            self.store.load(into=dict(into))
            return into
        loaded = self.store.load()
        assert isinstance(loaded, Mapping)
        return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}

    def files(self) -> Path:
        return self.folder

    def discard(self) -> None:
        """Nothing: a store removes what its retention says, in the background; here it keeps all."""

    def close(self) -> None:
        self.store.close()
        if self.memory:
            shutil.rmtree(self.memory, ignore_errors=True)


PEERS = [
    Peer(
        name=OURS,
        kind="ours",
        note="SHA-256 of every block, synced",
        open=Ours,
        asynchronous=True,
        proves=True,
        syncs=True,
    ),
    Peer(
        name=OURS_MEMORY,
        kind="ours",
        note="the same through /dev/shm, from which the copy on the disk is made",
        open=lambda folder: Ours(folder, memory=True),
        asynchronous=True,
        proves=True,
        syncs=True,
    ),
]
LOADERS = [
    Peer(name=f"{OURS}, in place", kind="ours", note="load(into=…): every block proved", open=Ours, proves=True, syncs=True),
    Peer(
        name=f"{OURS}, fresh tensors",
        kind="ours",
        note="load(): every block proved, memory of its own",
        open=lambda folder: Ours(folder, in_place=False),
        proves=True,
        syncs=True,
    ),
]
