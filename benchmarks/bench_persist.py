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
from measure import Table, Turns, fact, timed
from memory import fresh_memory, touch
from peers import distributed, files, limits, ours
from peers.base import Peer, State
from saving import Sessions, save_once

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
_SLOW_S = 10.0
"""Whoever takes longer in the turn that warms up is measured once."""


def run(nbytes: int, repeat: int, directory: Path | None, without: Mapping[str, str]) -> list[Table]:
    state = training_state(nbytes)
    flat = flattened(state)
    nbytes = sum(t.nbytes for t in flat.values())
    tables = []
    with scratch(directory) as root:
        for warm, peers in ((True, PEERS), (False, FRESH)):
            if not warm:
                fact("fresh memory", how_fresh(nbytes))
            turns = repeat if warm or repeat == 1 else repeat - 1
            tables += compete("warm" if warm else "fresh", peers, state, flat, nbytes, turns, root / f"warm-{warm}", without)
    return tables


def compete(
    memory: str,
    peers: Sequence[Peer],
    state: dict[str, dict[str, torch.Tensor]],
    flat: State,
    nbytes: int,
    repeat: int,
    root: Path,
    without: Mapping[str, str],
) -> list[Table]:
    base = f"{limits.RAW}, 4 threads"
    total = Table(f"From the call until synced on the disk, {memory} memory", nbytes, base, key=f"persist.{memory}")
    hashed = Table(f"The same followed by SHA-256 of the files, {memory} memory", nbytes, ours.OURS, key=f"persist.{memory}.hashed")
    sessions = Sessions(peers, root, [total, hashed], without)
    total.describe(ALONE, kind="ours", note="the same save less the time of the call; what the raw disk is to be compared with")
    slow: set[str] = set()
    turns = Turns(sessions.peers, repeat=repeat)
    for turn, order in turns:
        change(state)
        for name in order:
            if turn > 0 and name in slow:
                continue

            def measure(name: str = name, turn: int = turn) -> None:
                peer, session = sessions.get(name)
                if memory == "fresh" and turn >= 0:
                    gc.collect()
                    fresh_memory()
                ahead = wanted(peer) if memory == "warm" and turn >= 0 else 0
                saved = save_once(peer, session, flat, turn, warm_nbytes=int(ahead * nbytes))
                if saved.durable_s > _SLOW_S:
                    slow.add(name)
                if turn >= 0:
                    total.add(name, saved.durable_s)
                    if name == ours.OURS:
                        total.add(ALONE, saved.durable_s - saved.stall_s)
                    if peer.proves:
                        hashed.add(name, saved.durable_s)
                    elif peer.kind == "peer":
                        hashed.add(name, saved.durable_s + timed(limits.hash_files, session.files()))
                session.discard()

            turns.attempt(name, [total, hashed], measure)
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
    args = contest_arguments(__doc__ or "", nbytes="2GiB", repeat=3)
    for table in run(args.nbytes, args.repeat, args.directory, args.without):
        table.show()


if __name__ == "__main__":
    main()
