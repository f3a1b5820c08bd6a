"""Records that were read before: they are write-once, so what was read once need not be read again. In memory."""

from __future__ import annotations

from tierstore.format.record import Record
from tierstore.storage.contract import FileInfo

__all__ = ["RecordCache", "stamp_of"]


def stamp_of(info: FileInfo) -> str:
    """What a listing says of a record's file, apart from its name. It differs where a log was lost and other records were written since."""
    return f"{info.nbytes}:{info.etag or (info.modified_at.timestamp() if info.modified_at else '')}"


class RecordCache:
    """Records by tier and path, each as long as the listing says the same of its file. Also what was warned of."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], tuple[str, Record]] = {}
        self._warned: set[str] = set()

    def get(self, tier: str, info: FileInfo) -> Record | None:
        found = self._records.get((tier, info.path))
        return found[1] if found is not None and found[0] == stamp_of(info) else None

    def put(self, tier: str, info: FileInfo, record: Record) -> None:
        self._records[tier, info.path] = (stamp_of(info), record)

    def first_time(self, warning: str) -> bool:
        """Whether this text was not warned of before: a catalog is read many times, and says things once."""
        if warning in self._warned:
            return False
        self._warned.add(warning)
        return True

    def __len__(self) -> int:
        return len(self._records)
