"""A save until its bytes are synced on the disk, digests included, against the raw disk and the peers, with warm and with fresh memory.

A virtual machine gets untouched memory from its host several times slower than memory that it has touched before. `warm`: as much as a
save may take is touched and freed just before each. `fresh`: the page cache is dropped and free memory given back before each. Each peer
that hashes nothing has a second figure, with its files hashed after they are written: that is what SHA-256 costs there.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from common import change, contest_arguments, flattened, scratch, training_state
from fitting import affordable, probe
from measure import Table, fact, timed
from memory import fresh_memory, touch
from peers import distributed, files, limits, ours
from peers.base import Peer, State
from saving import Sessions, save_once
from turns import Turns, part_of

from tierstore.units import format_size

ALONE = "tierstore, persist alone (image to disk)"
PEERS = [
    *limits.PEERS,
    *ours.PEERS,
    *files.SAVERS,
    *(peer for peer in distributed.SAVERS if peer.name != "DCP async_save, process"),
]
FRESH = (
    f"{limits.RAW}, 1 thread",
    f"{limits.RAW}, 4 threads",
    ours.OURS,
    "torch.save",
    "safetensors save_file",
    "DCP FileSystem, 4 threads",
    "DCP async_save, thread, stager kept",
    "torchsnapshot async_take",
)
"""Who is measured again with fresh memory."""

_FIRST = (limits.RAW, "DCP async_save, thread")
"""Whose names begin so have their turns first, and tierstore on the disk alone: limits, and who is the best peer as a rule."""

_WARM_PART, _TWO_TURNS = 0.6, 65
"""Of the time, what warm memory gets: it has twice as many contenders. Two turns of all, as in `bench_save`."""

_FRESH_S = 4.0
"""What giving memory back takes each time, to begin with."""


def run(nbytes: int, repeat: int, directory: Path | None, without: Mapping[str, str], until: float | None = None) -> list[Table]:
    state = training_state(affordable("persist", nbytes, directory, until, _TWO_TURNS, speed=probe))
    flat = flattened(state)
    nbytes = sum(t.nbytes for t in flat.values())
    warm, fresh = tables_of("warm", nbytes), tables_of("fresh", nbytes)
    with scratch(directory) as root:
        sessions = Sessions(PEERS, root, warm, without)
        turns = compete("warm", sessions, list(sessions.peers), state, flat, repeat, warm, part_of(until, _WARM_PART))
        sessions.close(lambda peer: peer.kind != "limit" and peer.name not in FRESH)
        fact("fresh memory", how_fresh(nbytes))
        for table in fresh:
            for name, reason in warm[0].failed.items():
                if name in FRESH:
                    table.fail(name, reason)
        again = [name for name in turns.able() if name in FRESH and name not in warm[0].failed]
        for table in fresh:
            for name in again:
                table.describe(name, kind=sessions.peers[name].kind, note=sessions.peers[name].note)
        costs = {name: turns.costs[name] + _FRESH_S for name in again}
        compete("fresh", sessions, again, state, flat, repeat, fresh, until, costs)
        sessions.close()
    return [*warm, *fresh]


def tables_of(memory: str, nbytes: int) -> list[Table]:
    """Until synced, and until hashed, too."""
    base = f"{limits.RAW}, 4 threads"
    return [
        Table(f"From the call until synced on the disk, {memory} memory", nbytes, base, key=f"persist.{memory}"),
        Table(f"The same followed by SHA-256 of the files, {memory} memory", nbytes, ours.OURS, key=f"persist.{memory}.hashed"),
    ]


def compete(
    memory: str,
    sessions: Sessions,
    names: Sequence[str],
    state: dict[str, dict[str, torch.Tensor]],
    flat: State,
    repeat: int,
    tables: list[Table],
    until: float | None,
    costs: Mapping[str, float] | None = None,
) -> Turns:
    """Measures the saves of those named; with `costs`, which say what they took before, nobody has to warm up."""
    (total, hashed), nbytes = tables, sum(t.nbytes for t in flat.values())
    total.describe(ALONE, kind="ours", note="the same save less the time of the call; what the raw disk is to be compared with")
    turns = Turns(
        names,
        repeat=repeat,
        warm_ups=0 if costs else 1,
        first=lambda name: name == ours.OURS or name.startswith(_FIRST),
        until=until,
        costs=costs,
    )
    for turn, order in turns:
        change(state)
        for name in order:

            def measure(name: str = name, turn: int = turn) -> None:
                peer, session = sessions.get(name)
                if memory == "fresh" and turn >= 0:
                    gc.collect()
                    fresh_memory()
                ahead = wanted(peer) if memory == "warm" and turn >= 0 else 0
                saved = save_once(peer, session, flat, turn, warm_nbytes=int(ahead * nbytes))
                turns.took(name, saved.durable_s)
                if turn >= 0:
                    total.add(name, saved.durable_s, turn)
                    if name == ours.OURS:
                        total.add(ALONE, saved.durable_s - saved.stall_s, turn)
                    if peer.proves:
                        hashed.add(name, saved.durable_s, turn)
                    elif peer.kind == "peer":
                        hashed.add(name, saved.durable_s + timed(limits.hash_files, session.files()), turn)
                session.discard()

            turns.attempt(name, tables, measure)
    turns.list_left_out(tables)
    return turns


def wanted(peer: Peer) -> float:
    """How much new memory a save takes, relative to its state: none, the page cache, or a copy of the state beside it."""
    return 0 if peer.kind == "limit" else 2.2 if peer.asynchronous and peer.kind == "peer" else 1.2


def how_fresh(nbytes: int) -> str:
    """Touches memory after it was given back, and again at once: what fresh memory costs here."""
    gc.collect()
    how = fresh_memory()
    time.sleep(0.1)
    first = touch(nbytes)
    again = touch(nbytes)
    return f"{how}; {format_size(nbytes)} touched at {first / 1e9:.2f} GB/s, again at {again / 1e9:.2f} GB/s"


def main() -> None:
    warnings.simplefilter("ignore")
    args = contest_arguments(__doc__ or "", nbytes="2GiB", repeat=5)
    for table in run(args.nbytes, args.repeat, args.directory, args.without, args.until):
        table.show()


if __name__ == "__main__":
    main()
