"""Records that were read before: they are write-once, and need not be read again. In memory, and on this machine's disk."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tierstore.format.record import Record
from tierstore.storage.contract import FileInfo
from tierstore.tiers.record_store import RecordStore

__all__ = ["RecordCache", "stamp_of"]


def stamp_of(info: FileInfo) -> str:
    """What a listing says of a record's file, apart from its name. It differs where a log was lost and other records were written since."""
    return f"{info.nbytes}:{info.etag or (info.modified_at.timestamp() if info.modified_at else '')}"


class RecordCache:
    """Records by tier, log root of a run, and path, each as long as the listing says the same of its file. Also what was warned of.

    Args:
        store: What this machine kept from earlier processes; None: nothing.
    """

    def __init__(self, store: RecordStore | None = None) -> None:
        self._store = store
        self._roots: dict[tuple[str, str], dict[str, tuple[str, Record]]] = {}
        self._new: dict[tuple[str, str], set[str]] = {}
        self._loading: dict[tuple[str, str], asyncio.Future[dict[str, tuple[str, Record]]]] = {}
        self._warned: set[str] = set()

    async def load(self, tier: str, root: str, listed: Mapping[str, FileInfo]) -> None:
        """Takes in what the disk has of a run's log root, the first time that it is asked for. `listed`: the records' files by path."""
        if (tier, root) in self._roots:
            loading = self._loading.get((tier, root))
            if loading is not None and loading.get_loop() is asyncio.get_running_loop():
                await asyncio.wait([loading])  # two looks at once: the second is not to read from the tier what the first finds on the disk
            return
        records = self._roots[tier, root] = {}
        if self._store is None:
            return
        loading = self._loading[tier, root] = asyncio.ensure_future(asyncio.to_thread(_load, self._store, tier, root, listed))
        try:
            found = await loading
        finally:
            self._loading.pop((tier, root), None)
        records.update({path: one for path, one in found.items() if path not in records})

    async def save(self, tier: str, root: str, listed: Mapping[str, FileInfo]) -> None:
        """Keeps on the disk what was read since the last time below a run's log root; what is not listed any more is forgotten.

        What could not be kept, because another process held the file or the caller was cancelled, is kept the next time.
        """
        records = self._roots.get((tier, root), {})
        for path in [path for path in records if path not in listed]:
            del records[path]
        new = [(path, *records[path]) for path in self._new.pop((tier, root), ()) if path in records]
        if self._store is None or not new:
            return
        kept = False
        try:
            kept = await asyncio.to_thread(self._store.save, tier, root, new, listed)
        finally:
            if not kept:
                self._new.setdefault((tier, root), set()).update(path for path, *_ in new)

    def get(self, tier: str, root: str, info: FileInfo) -> Record | None:
        found = self._roots.get((tier, root), {}).get(info.path)
        return found[1] if found is not None and found[0] == stamp_of(info) else None

    def put(self, tier: str, root: str, info: FileInfo, record: Record) -> None:
        self._roots.setdefault((tier, root), {})[info.path] = (stamp_of(info), record)
        self._new.setdefault((tier, root), set()).add(info.path)

    def first_time(self, warning: str) -> bool:
        """Whether this text was not warned of before: a catalog is read many times, and says things once."""
        if warning in self._warned:
            return False
        self._warned.add(warning)
        return True

    def __len__(self) -> int:
        return sum(len(records) for records in self._roots.values())


def _load(store: RecordStore, tier: str, root: str, listed: Mapping[str, FileInfo]) -> dict[str, tuple[str, Record]]:
    stamps = {path: stamp_of(info) for path, info in listed.items()}
    return {path: (stamps[path], record) for path, record in store.load(tier, root, stamps).items()}
