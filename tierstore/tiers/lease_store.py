"""What observers of leases saw, on this machine's disk: so that short commands, one after the other, watch as one long process does.

A disposable cache as `record_store`: whatever is wrong with it is said at debug level, and costs only that watching begins anew. What
it says counts only in the boot in which it was seen, for `since` is a reading of the machine's monotonic clock, which on Linux is one
for all processes of a boot (CLOCK_MONOTONIC; a time namespace may shift it, so its offsets are part of the boot's name) and begins
again with the next. Where the system does not name its boot, nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierstore.storage.temporaries import this_process

__all__ = ["LeaseStore", "Sighting", "boot_name"]

log = logging.getLogger(__name__)

_SCHEMA = 1
"""Another layout is another file."""
_MAX_NBYTES = 16 << 20
_TROUBLE = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """That a lease had this content: first seen at `since`, in seconds of the machine's monotonic clock, and at every look after it."""

    digest: str
    since: float


def boot_name() -> str:
    """Names the running boot and the clock that this process has of it; empty where the system says neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    try:
        offsets = " ".join(Path("/proc/self/timens_offsets").read_text(encoding="ascii").split())
    except FileNotFoundError:
        offsets = ""  # a kernel without time namespaces
    except (OSError, ValueError):
        return ""
    return f"{boot} {offsets}" if boot else ""


class LeaseStore:
    """The kept sightings of one store's leases. Blocking; safe from several threads and processes: the last one that saves wins.

    What is lost by that is a sighting, and never one is made up: the same lease with the same content may be called dead later.

    Args:
        folder: Where the caches of all stores lie; made at the first use, for its owner only.
        store_id: Whose leases.
        boot: The running boot; None: as the system says (`boot_name`). Empty: nothing is kept.
    """

    def __init__(self, folder: Path, store_id: str, *, boot: str | None = None) -> None:
        self._folder = folder
        self._store_id = store_id
        self._boot = boot_name() if boot is None else boot

    def load(self, run: str, now: float) -> dict[str, Sighting]:
        """What was seen of a run's leases in this boot, by path. `now`: the monotonic clock; what was seen after it counts for nothing."""
        if not self._boot:
            return {}
        path = self._path(run)
        try:
            if path.stat().st_size > _MAX_NBYTES:
                raise ValueError("too large")
            check, _, body = path.read_bytes().partition(b"\n")
            if check != _check(body):
                raise ValueError("damaged")
            said = json.loads(body)
            if (said["store"], said["run"], said["boot"]) != (self._store_id, run, self._boot):
                return {}
            return {
                lease: Sighting(digest=digest, since=since)
                for lease, (digest, since) in said["seen"].items()
                if isinstance(digest, str) and isinstance(since, float) and 0 <= since <= now
            }
        except FileNotFoundError:
            return {}
        except _TROUBLE as error:
            log.debug("cache=%s is passed over: %s", path, error)
            return {}

    def save(self, run: str, seen: Mapping[str, Sighting]) -> None:
        """Keeps what was seen of a run's leases, in place of what was kept before."""
        if not self._boot:
            return
        path = self._path(run)
        try:
            if not seen:
                path.unlink(missing_ok=True)
                return
            leases = {lease: (one.digest, one.since) for lease, one in seen.items()}
            said = {"store": self._store_id, "run": run, "boot": self._boot, "seen": leases}
            body = json.dumps(said).encode()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(path, _check(body) + b"\n" + body)
        except _TROUBLE as error:
            log.debug("cache=%s is not kept: %s", path, error)

    def _path(self, run: str) -> Path:
        """A file for each run and machine: a home may be shared by machines, and each has its own clock."""
        name = hashlib.sha256("\0".join((self._store_id, run, this_process().host)).encode()).hexdigest()[:32]
        return self._folder / f"leases-{_SCHEMA}-{name}.json"


def _replace(path: Path, data: bytes) -> None:
    number, temporary = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)  # for its owner only
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()
