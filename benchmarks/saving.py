"""One measured save of any peer, for the suites `save` and `persist`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import Table, tell
from memory import Peak, fsync_all, settle, warm_memory
from peers.base import Peer, Session, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Seconds from the call until training may go on, and until the bytes are synced on the disk; bytes of memory beyond what there was."""

    stall_s: float
    durable_s: float
    extra_nbytes: int


def save_once(peer: Peer, session: Session, state: State, turn: int, *, warm_nbytes: int = 0) -> Saved:
    """Saves and waits; first the disk writes out what is dirty, and `warm_nbytes` of memory are touched and freed."""
    gc.collect()
    settle()
    warm_memory(warm_nbytes)
    with Peak() as peak:
        began = time.perf_counter()
        wait = session.save(state, turn)
        stall_s = time.perf_counter() - began
        wait()
        if not peer.syncs:
            fsync_all(session.files())
        durable_s = time.perf_counter() - began
    return Saved(stall_s=stall_s, durable_s=durable_s, extra_nbytes=peak.extra_nbytes)


class Sessions:
    """The sessions of those who run here; the others are listed in all tables.

    Args:
        peers: Who takes part.
        root: Where their files lie, each in a folder of its own.
        tables: Where those who can't are listed.
        without: Who must not be tried, and why: a run before this one ended because of them.
    """

    def __init__(self, peers: Sequence[Peer], root: Path, tables: Sequence[Table], without: Mapping[str, str]) -> None:
        self.tables = tables
        self.peers: dict[str, Peer] = {}
        self._folders: dict[str, Path] = {}
        self._sessions: dict[str, Session] = {}
        for number, peer in enumerate(peers):
            reason = without.get(peer.name)
            if reason is None:
                tell({"doing": peer.name})
                reason = peer.unavailable()
                tell({"doing": None})
            if reason is not None:
                for table in tables:
                    table.fail(peer.name, reason)
                continue
            for table in tables:
                table.describe(peer.name, kind=peer.kind, note=peer.note)
            self.peers[peer.name] = peer
            self._folders[peer.name] = root / f"{number:02}"
            self._folders[peer.name].mkdir(parents=True)

    def get(self, name: str) -> tuple[Peer, Session]:
        """Opens it at the first call, so that what it does then is part of its first measurement, which only warms up."""
        if name not in self._sessions:
            self._sessions[name] = self.peers[name].open(self._folders[name])
        return self.peers[name], self._sessions[name]

    def close(self, which: Callable[[Peer], bool] = lambda peer: True) -> None:
        """Ends them, all or some; what can't be ended is left to the end of the process."""
        for name in [name for name in self._sessions if which(self.peers[name])]:
            session = self._sessions.pop(name)
            try:
                session.close()
            except Exception as error:  # noqa: BLE001  the measurements are done
                print(f"{type(session).__name__}: {error}")
