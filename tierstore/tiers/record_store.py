"""Records on this machine's disk, so that the next process need not read them again: a disposable cache, one file a store.

Nothing rests on it. Whatever is wrong with it (no home, read-only, full, locked, damaged, another program's file) costs time only: it is
said once at debug level, and the records are read from the tiers. An entry counts only where a listing says the same of the record's
file as when it was read, and where its own checksum is right.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import sys
import threading
from collections.abc import Container, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from tierstore.errors import FormatError
from tierstore.format.record import Record

__all__ = ["RecordStore"]

log = logging.getLogger(__name__)

_SCHEMA = 1
"""Another layout is another file."""
_PAGE_NBYTES = 4096
_MAX_NBYTES = 1 << 30
_BUSY_S = 0.2
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_DAMAGE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


class RecordStore:
    """The cached records of one store. Blocking; safe from several threads and processes, also after a fork.

    Args:
        folder: Where the caches of all stores lie; made at the first use, for its owner only.
        store_id: Whose records.
    """

    def __init__(self, folder: Path, store_id: str) -> None:
        name = hashlib.sha256(store_id.encode()).hexdigest()[:32]
        self._path = folder / f"records-{_SCHEMA}-{name}.sqlite"
        self._store_id = store_id
        self._lock = threading.Lock()
        self._given_up = False

    def load(self, tier: str, folder: str, stamps: Mapping[str, str]) -> dict[str, Record]:
        """The records below a folder of a tier, by path, as far as they are here as the listing shows them.

        Args:
            tier: Its name.
            folder: A run's log root.
            stamps: What the listing says of each file, by path.
        """
        found: dict[str, Record] = {}
        for path, stamp, body, check in self._rows(tier, folder):
            if stamps.get(path) != stamp or not isinstance(body, bytes) or check != _check(self._store_id, tier, path, stamp, body):
                continue
            try:
                found[path] = _decode(body)
            except (*_DAMAGE, FormatError) as error:
                log.debug("cache=%s path=%s is passed over: %s", self._path, path, error)
        return found

    def save(self, tier: str, folder: str, new: Iterable[tuple[str, str, Record]], listed: Container[str]) -> bool:
        """Keeps what was read, as (path, stamp, record), and forgets the paths that are not listed any more.

        Returns:
            False where another process held the file for too long: to be tried again. True where it was done, or never will be.
        """
        rows = []
        for path, stamp, record in new:
            body = _encode(record)
            rows.append((tier, path, stamp, body, _check(self._store_id, tier, path, stamp, body)))

        def work(cache: sqlite3.Connection) -> list[Any]:
            known = cache.execute("SELECT path FROM records WHERE tier = ? AND path > ? AND path < ?", _span(tier, folder))
            gone = [(tier, path) for (path,) in known if path not in listed]
            cache.execute("BEGIN IMMEDIATE")
            cache.executemany("DELETE FROM records WHERE tier = ? AND path = ?", gone)
            cache.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", rows)
            cache.execute("COMMIT")
            return []

        return self._with(work) is not None

    def _rows(self, tier: str, folder: str) -> list[Any]:
        query = "SELECT path, stamp, body, sum FROM records WHERE tier = ? AND path > ? AND path < ?"
        return self._with(lambda cache: cache.execute(query, _span(tier, folder)).fetchall()) or []

    def _with(self, work: Any) -> list[Any] | None:
        """Does something with the cache's file, opened for it alone: a connection lives in no other thread or process.

        Returns:
            What came of it; nothing where the file can't be used; None where another process holds it just now.
        """
        with self._lock:
            if self._given_up:
                return []
            try:
                return self._opened(work)
            except (sqlite3.Error, OSError, *_DAMAGE) as error:
                log.debug("cache=%s is not used: %s", self._path, error)
                busy = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
                self._given_up = not busy
                if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                    self._remove()
                return None if busy else []

    def _opened(self, work: Any) -> list[Any]:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._path.exists():
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
        cache = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        try:
            cache.execute("PRAGMA synchronous = OFF")  # what a power failure damages is thrown away
            cache.execute(f"PRAGMA max_page_count = {_MAX_NBYTES // _PAGE_NBYTES}")
            cache.execute(
                "CREATE TABLE IF NOT EXISTS records "
                "(tier TEXT, path TEXT, stamp TEXT, body BLOB, sum BLOB, PRIMARY KEY (tier, path)) WITHOUT ROWID"
            )
            done: list[Any] = work(cache)
            return done
        finally:
            cache.close()

    def _remove(self) -> None:
        """What is no database any more is made anew by the next process."""
        try:
            self._path.unlink()
        except OSError as error:
            log.debug("cache=%s can't be removed: %s", self._path, error)


def _span(tier: str, folder: str) -> tuple[str, str, str]:
    return tier, f"{folder}/", f"{folder}0"  # '0' follows '/'


def _check(store_id: str, tier: str, path: str, stamp: str, body: bytes) -> bytes:
    head = f"{store_id}\0{tier}\0{path}\0{stamp}\0".encode()
    return hashlib.blake2b(head + body, digest_size=16).digest()


def _encode(record: Record) -> bytes:
    at = (record.at - _EPOCH) // _MICROSECOND
    fields = [record.seq, record.kind, at, record.nonce, record.actor, record.data]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _decode(body: bytes) -> Record:
    seq, kind, at, nonce, actor, data = json.loads(body, object_pairs_hook=_interned)
    if not isinstance(data, dict):
        raise FormatError("no record", hint="the cache is damaged, and passed over")
    return Record(seq=seq, kind=sys.intern(kind), at=_EPOCH + timedelta(microseconds=at), nonce=nonce, actor=sys.intern(actor), data=data)


def _interned(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The same few keys come again and again."""
    return {sys.intern(key): value for key, value in pairs}
