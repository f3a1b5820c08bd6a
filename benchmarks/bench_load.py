"""Loading from the local disk: cold (mincore says that nothing is in memory), in place and into fresh tensors, and warm."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from common import contest_arguments, flattened, scratch, training_state
from fitting import affordable, probe
from measure import Table, timed
from memory import make_cold, make_warm, settle, warm_memory
from peers import distributed, files, limits, ours
from peers.base import Peer, State
from saving import Sessions
from turns import Turns, part_of

PEERS: list[Peer] = [*limits.PEERS, *ours.LOADERS, *files.LOADERS, *distributed.LOADERS]
_WARM = ("tierstore", "safetensors", "torch.load", "fastsafetensors", "runai", "DCP FileSystem, 4", "DCP HuggingFace")
"""Whose names begin so are also measured from the page cache."""

_BASE = f"{limits.RAW}, 4 threads"
_FIRST = (limits.RAW, "tierstore", "torch.load", "safetensors load_file, touched", "fastsafetensors", "DCP HuggingFace")
"""Whose names begin so have their turns first: limits, those that targets are about, and the best peers as a rule."""

_COLD_PART, _TWO_TURNS = 0.7, 60
"""Of the time; from the page cache there are fewer, and nobody has to warm up again. Two turns of all, as in `bench_save`."""


def run(
    nbytes: int,
    repeat: int,
    directory: Path | None,
    without: Mapping[str, str],
    peers: Sequence[Peer] = PEERS,
    until: float | None = None,
) -> list[Table]:
    state = flattened(training_state(affordable("load", nbytes, directory, until, _TWO_TURNS, speed=probe)))
    nbytes = sum(t.nbytes for t in state.values())
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    cold = Table("Load from the local disk, cold, until every byte is in memory", nbytes, _BASE, key="load.cold")
    warm = Table("Load from the page cache, until every byte is in memory", nbytes, "safetensors load_file, touched", key="load.warm")
    tables = [cold, warm]
    with scratch(directory) as root:
        sessions = Sessions(peers, root, [cold], without)
        for name, peer in sessions.peers.items():
            if name.startswith(_WARM):
                warm.describe(name, kind=peer.kind, note=peer.note)
        saving = Turns(sessions.peers, repeat=1)
        for name in sessions.peers:
            saving.attempt(name, tables, lambda name=name: sessions.get(name)[1].save(state, 0)())
        saved = [name for name in sessions.peers if name not in saving.failed]
        once_more = [name for name in saved if name.startswith(_WARM)]
        for table, names, end in ((cold, saved, part_of(until, _COLD_PART)), (warm, once_more, until)):
            turns = Turns(names, repeat=repeat, warm_ups=int(table is cold), first=lambda name: name.startswith(_FIRST), until=end)
            for turn, order in turns:
                for name in order:

                    def measure(name: str = name, turn: int = turn, table: Table = table, turns: Turns = turns) -> None:
                        peer, session = sessions.get(name)
                        if turn < 0:
                            for tensor in into.values():
                                tensor.zero_()
                        settle()
                        if table is warm:
                            make_warm(session.files())
                        else:
                            make_cold(session.files())
                        warm_memory(int(2.2 * nbytes) if turn >= 0 else 0)
                        kept: list[State] = []
                        seconds = timed(lambda: kept.append(session.load(into)))
                        turns.took(name, seconds)
                        if turn >= 0:
                            table.add(name, seconds, turn)
                        elif peer.kind != "limit":
                            check(kept[0], state)

                    turns.attempt(name, [table], measure)
            turns.list_left_out([table])
        sessions.close()
    return tables


def check(loaded: State, state: State) -> None:
    """Every tensor is what was saved; once for each peer.

    Raises:
        ValueError: One is not.
    """
    wrong = [name for name, tensor in state.items() if name not in loaded or not torch.equal(loaded[name], tensor)]
    if wrong:
        raise ValueError(f"{len(wrong)} tensors are not what was saved, {wrong[0]} for one")


def main() -> None:
    warnings.simplefilter("ignore")
    args = contest_arguments(__doc__ or "", nbytes="1GiB", repeat=5)
    for table in run(args.nbytes, args.repeat, args.directory, args.without, until=args.until):
        table.show()


if __name__ == "__main__":
    main()
