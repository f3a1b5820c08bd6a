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
FRESH = [
    *(peer for peer in limits.PEERS if peer.name.startswith(f"{limits.RAW}, ")),
    ours.PEERS[0],
    *(peer for peer in files.SAVERS if peer.name in ("torch.save", "safetensors save_file")),
    *(
        peer
        for peer in distributed.SAVERS
        if peer.name in ("DCP FileSystem, 4 threads", "DCP async_save, thread, stager kept", "torchsnapshot async_take")
    ),
]
_FIRST = (limits.RAW, "DCP async_save, thread")
"""Whose names begin so have their turns first, and tierstore on the disk alone: limits, and who is the best peer as a rule."""

_WARM_PART, _TWO_TURNS = 0.6, 65
"""Of the time, what warm memory gets: it has twice as many contenders. Two turns of all, as in `bench_save`."""


def run(nbytes: int, repeat: int, directory: Path | None, without: Mapping[str, str], until: float | None = None) -> list[Table]:
    state = training_state(affordable("persist", nbytes, directory, until, _TWO_TURNS, speed=probe))
    flat = flattened(state)
    nbytes = sum(t.nbytes for t in flat.values())
    tables: list[Table] = []
    with scratch(directory) as root:
        for memory, peers, end in (("warm", PEERS, part_of(until, _WARM_PART)), ("fresh", FRESH, until)):
            if memory == "fresh":
                fact("fresh memory", how_fresh(nbytes))
            tables += compete(memory, peers, state, flat, repeat, root / memory, without, end)
    return tables


def compete(
    memory: str,
    peers: Sequence[Peer],
    state: dict[str, dict[str, torch.Tensor]],
    flat: State,
    repeat: int,
    root: Path,
    without: Mapping[str, str],
    until: float | None,
) -> list[Table]:
    base, nbytes = f"{limits.RAW}, 4 threads", sum(t.nbytes for t in flat.values())
    total = Table(f"From the call until synced on the disk, {memory} memory", nbytes, base, key=f"persist.{memory}")
    hashed = Table(f"The same followed by SHA-256 of the files, {memory} memory", nbytes, ours.OURS, key=f"persist.{memory}.hashed")
    sessions = Sessions(peers, root, [total, hashed], without)
    total.describe(ALONE, kind="ours", note="the same save less the time of the call; what the raw disk is to be compared with")
    turns = Turns(sessions.peers, repeat=repeat, first=lambda name: name == ours.OURS or name.startswith(_FIRST), until=until)
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

            turns.attempt(name, [total, hashed], measure)
    turns.list_left_out([total, hashed])
    sessions.close()
    return [total, hashed]


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
