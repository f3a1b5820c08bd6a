"""A save as training sees it: how long the call takes, until the bytes are on the disk, and the memory that it takes beside its image."""

from __future__ import annotations

import ctypes
import gc
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from common import change, contest_arguments, flattened, scratch, training_state
from fitting import affordable, probe
from measure import Table, fact, timed
from memory import fresh_memory
from peers import distributed, files, ours
from peers.base import State
from saving import Sessions, save_once
from turns import Turns

import tierstore
from tierstore.units import format_size

MEMCPY = "warm memcpy, 1 thread"
PEERS = [
    *ours.PEERS,
    *(peer for peer in distributed.SAVERS if peer.asynchronous),
    *(peer for peer in distributed.SAVERS if peer.name == "DCP FileSystem, 4 threads"),
    *(peer for peer in files.SAVERS if peer.name == "torch.save"),
]
_FIRST = (ours.OURS, "DCP async_save, thread")
"""Whose names begin so have their turns first; `torch.save` is in a target, too, but so slow that two turns say it."""

_TWO_TURNS = 25
"""How many times what `probe` takes for as many bytes two turns of all took, in a slow hour of the machine of docs/performance.md."""


def run(nbytes: int, repeat: int, directory: Path | None, without: Mapping[str, str], until: float | None = None) -> list[Table]:
    state = training_state(affordable("save", nbytes, directory, until, _TWO_TURNS, speed=probe))
    flat = flattened(state)
    nbytes = sum(t.nbytes for t in flat.values())
    stall = Table("Stall: how long the call to save takes, second and later saves", nbytes, MEMCPY, key="save.stall")
    total = Table("From the call until the bytes are synced on the disk", nbytes, ours.OURS, key="save.durable")
    extra = Table("Memory of the process beyond what it had before the save, peak", 0, "", key="save.extra", unit="MiB")
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    memcpy(flat, buffer)
    fact("state", f"{len(flat)} tensors, {format_size(nbytes)}; {torch.get_num_threads()} torch threads, {os.cpu_count()} cores")
    stall.describe(MEMCPY, kind="limit", note="into memory that was touched before")
    with scratch(directory) as root:
        first_saves(flat, root / "first")
        sessions = Sessions(PEERS, root, [stall, total, extra], without)
        # Two turns warm up: two images take turns where the tier keeps one.
        turns = Turns(sessions.peers, repeat=repeat, warm_ups=2, first=lambda name: name.startswith(_FIRST), until=until)
        for turn, order in turns:
            change(state)
            if turn >= 0:
                stall.add(MEMCPY, timed(memcpy, flat, buffer), turn)
            for name in order:
                if turn < -1 and not name.startswith(ours.OURS):
                    continue

                def measure(name: str = name, turn: int = turn) -> None:
                    peer, session = sessions.get(name)
                    saved = save_once(peer, session, flat, turn)
                    turns.took(name, saved.durable_s)
                    session.discard()
                    if turn >= 0:
                        stall.add(name, saved.stall_s, turn)
                        total.add(name, saved.durable_s, turn)
                        extra.add(name, saved.extra_nbytes / 2**20, turn)

                turns.attempt(name, [stall, total, extra], measure)
        turns.list_left_out([stall, total, extra])
        sessions.close()
    return [stall, total, extra]


def first_saves(flat: State, root: Path) -> None:
    """What the first save costs, which gets its image's memory from the host, and what is left of it after `store.prepare`."""
    for prepared in (False, True):
        gc.collect()
        fresh_memory()
        with tierstore.open([str(root / str(prepared))], run="bench") as store:
            if prepared and not hasattr(store, "prepare"):
                continue
            before_s = timed(store.prepare, dict(flat)) if prepared else 0.0
            ticket = store.save(1, dict(flat))
            told = f" (prepare itself: {before_s:.3f} s)" if prepared else ""
            fact("first save after prepare" if prepared else "first save", f"stall {ticket.stall_s:.3f} s{told}")
            ticket.wait("durable", timeout=600)


def memcpy(state: State, buffer: torch.Tensor) -> None:
    """One thread, whatever torch would take."""
    at = buffer.data_ptr()
    for tensor in state.values():
        ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
        at += tensor.nbytes


def main() -> None:
    warnings.simplefilter("ignore")
    args = contest_arguments(__doc__ or "", nbytes="2GiB", repeat=5)
    for table in run(args.nbytes, args.repeat, args.directory, args.without, args.until):
        table.show()


if __name__ == "__main__":
    main()
