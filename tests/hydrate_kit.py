"""What the tests of hydrated loads share: a node whose tier lacks what a farther tier has, and storages that count what leaves them."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from store_kit import unsynced
from tiers_kit import Hooked

import tierstore
from tierstore import crashpoints
from tierstore.storage.contract import Storage

NBYTES = 3 << 20
"""Of the checkpoint's only tensor, about."""

Hook = Callable[[str, str], Awaitable[None]]


async def nothing(operation: str, path: str) -> None:
    """A hook that lets everything pass."""


class Counted(Hooked):
    """Counts the bytes of shards that are read from it."""

    def __init__(self, inner: Storage, hook: Hook = nothing) -> None:
        super().__init__(inner, hook)
        self.nbytes: Counter[str] = Counter()

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        await super().read_into(path, offset, buffer)
        if "/shard-" in path:
            self.nbytes[path.rpartition("/")[2]] += buffer.nbytes


def state_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(NBYTES // 4 // 64, 64, generator=generator), "b": torch.full((7,), float(step))}


def config_of(root: Path, *, hydrate: str = "node", **config: Any) -> dict[str, Any]:
    tiers = [{"name": name, "uri": str(root / name), "scope": "node" if name == "node" else "shared"} for name in ("node", "far")]
    return {"version": 1, "run": "r", "tiers": tiers, "load": {"hydrate": hydrate}, "io": {"block_size": "64KiB"}, **config}


def make_store(root: Path, *steps: int) -> None:
    """Checkpoints on the far tier, and a node that has none of them: another node, or a new one."""
    with tierstore.open(config_of(root, hydrate="off")) as store:
        for step in steps or (1,):
            store.save(step, state_of(step))
    shutil.rmtree(root / "node")


def shards(root: Path, tier: str) -> dict[str, Path]:
    """A tier's shards, by step and name."""
    return {f"{path.parent.name[:15]}/{path.name}": path for path in sorted((root / tier).glob("r/step-*/shard-*"))}


def files_below(folder: Path) -> set[str]:
    """All files, but the lock of a run, which stays."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not p.name.startswith("reconcile-")}


def near_and_far(patch: Any, hooks: Mapping[str, Hook] | None = None) -> dict[str, Counted]:
    """Makes every store of this process count; the storages by their tiers' names, of the store that was opened last."""
    made: dict[str, Counted] = {}

    def make(uri: str, *_arguments: Any, **_settings: Any) -> Storage:
        name = Path(uri).name
        made[name] = Counted(unsynced(uri), (hooks or {}).get(name, nothing))
        return made[name]

    patch.setattr("tierstore.tiers.opening.open_storage", make)
    return made


def patiently(patch: Any) -> None:
    """What a load brought near is waited for in this process, and leases are removed, however long the machine stands still meanwhile."""
    patch.setattr("tierstore.store._SETTLE_S", 200.0)
    patch.setattr("tierstore.tiers.leased._RELEASE_S", 200.0)


class _Patch:
    def setattr(self, name: str, value: Any) -> None:
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)


def load_in_child(
    root: str,
    config: dict[str, Any],
    barrier: Any,
    results: Any,
    number: int,
    hold: str = "",
    environment: Mapping[str, str] | None = None,
) -> None:
    """A process that loads step 1 when all are there, and tells how many bytes it had from afar, or what went wrong.

    Args:
        root: The tiers' folder.
        config: The store's configuration.
        barrier: Where the processes meet before they load; None: nowhere.
        results: A queue for ``(number, bytes by tier, whether all is right, error)``.
        number: Which of them it is.
        hold: A file that it makes when it is in the middle of copying, and then it stands still; empty: nothing of the kind.
        environment: Variables: where to die.
    """
    os.environ.update(environment or {})
    importlib.reload(crashpoints)
    seen = 0

    async def stand_still(operation: str, path: str) -> None:
        nonlocal seen
        seen += operation == "read_into" and "/shard-" in path
        if seen == 1 and hold:
            Path(hold).write_text(str(os.getpid()))
            await asyncio.to_thread(threading.Event().wait, 120)

    try:
        patiently(_Patch())
        made = near_and_far(_Patch(), {"far": stand_still} if hold else None)
        with tierstore.open(config) as store:
            if barrier is not None:
                barrier.wait(60)
            state = store.load(1)
            right = all(torch.equal(state[name], value) for name, value in state_of(1).items())
        results.put((number, {name: sum(storage.nbytes.values()) for name, storage in made.items()}, right, ""))
    except BaseException:  # noqa: BLE001 - boundary of the process: told in the test's own failure
        results.put((number, {}, False, traceback.format_exc()))
