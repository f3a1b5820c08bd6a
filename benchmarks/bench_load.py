"""Loading from the local disk: cold (mincore says that nothing is in memory), in place and into fresh tensors, and warm."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from common import contest_arguments, flattened, scratch, training_state
from measure import Table, Turns, timed
from memory import make_cold, make_warm, settle, warm_memory
from peers import distributed, files, limits, ours
from peers.base import Peer, State
from saving import Sessions

PEERS: list[Peer] = [*limits.PEERS, *ours.LOADERS, *files.LOADERS, *distributed.LOADERS]
_WARM = ("tierstore", "safetensors", "torch.load", "fastsafetensors", "runai", "DCP FileSystem, 4", "DCP HuggingFace")
"""Whose names begin so are also measured from the page cache."""

_BASE = f"{limits.RAW}, 4 threads"
_SLOW_S = 8.0
"""Whoever takes longer in the turn that warms up is measured once."""


def run(nbytes: int, repeat: int, directory: Path | None, without: Mapping[str, str], peers: Sequence[Peer] = PEERS) -> list[Table]:
    state = flattened(training_state(nbytes))
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
        turns = Turns(sessions.peers, repeat=repeat)
        slow: set[str] = set()
        for name in sessions.peers:
            turns.attempt(name, tables, lambda name=name: sessions.get(name)[1].save(state, 0)())
        for table in tables:
            turns.warm_ups, turns.repeat = (1, repeat) if table is cold else (0, max(1, repeat - 1))
            for turn, order in turns:
                for name in order:
                    if (turn > 0 and name in slow) or (table is warm and not name.startswith(_WARM)):
                        continue

                    def measure(name: str = name, turn: int = turn, table: Table = table) -> None:
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
                        if seconds > _SLOW_S:
                            slow.add(name)
                        if turn >= 0:
                            table.add(name, seconds)
                        elif peer.kind != "limit":
                            check(kept[0], state)

                    turns.attempt(name, [table], measure)
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
    args = contest_arguments(__doc__ or "", nbytes="1GiB", repeat=3)
    for table in run(args.nbytes, args.repeat, args.directory, args.without):
        table.show()


if __name__ == "__main__":
    main()
