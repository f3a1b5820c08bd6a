"""An observer of leases: which readers hold what, and whose lease is dead (PROTOCOLS.md §6). The holder's side is `leases.py`."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.clock import Clock
from tierstore.errors import IntegrityError, NotFoundError
from tierstore.format.digest import digest_of
from tierstore.format.document import decode_document
from tierstore.format.fields import Fields
from tierstore.names import Attempt
from tierstore.tiers.lease_store import LeaseStore, Sighting
from tierstore.tiers.tier import Tiers
from tierstore.tiers.together import together

__all__ = ["LEASE_DOCUMENT", "LeaseSeen", "LeaseWatch", "lease_path", "lease_root"]

log = logging.getLogger(__name__)

LEASE_DOCUMENT = "tierstore.lease"
_MAX_NBYTES = 64 << 10
_LEAF = re.compile(r"([0-9a-f]{32})\.json")
_UNREADABLE_TTL_S = 600.0
_MAX_TTL_S = 7 * 86400.0


def lease_root(run: str) -> str:
    """The folder of all leases of a run."""
    return f"{run}/.leases"


def lease_path(attempt: Attempt, lease_id: str) -> str:
    return f"{lease_root(attempt.run)}/{attempt.name}/{lease_id}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSeen:
    """A lease as an observer read it. `holder` is a host and process, for people; `ttl_s` is in seconds."""

    attempt: Attempt
    lease_id: str
    holder: str
    kind: str
    beat: int
    ttl_s: float


class LeaseWatch:
    """An observer of leases: it believes nothing but what this machine saw itself, by its own monotonic clock.

    Wall clocks, a file's times and what a lease says of its time count for nothing. A new observer holds every lease for alive, unless
    earlier processes of this machine watched it (`kept`).

    A lease is dead when two looks, at least its whole TTL apart, found the same content. Nobody need have looked in between: every
    beat has another number and every lease another nonce, so equal content means that no beat was written between the looks, while a
    living holder writes one every quarter of a TTL. It does not matter either which process looked, as long as both read one clock: the
    first look counts from when its reading had ended, the second until its reading began, so that the span can only be measured too
    short (the clock also stands still while the machine sleeps). The holder counts from before its last beat was written, and ends
    itself at three quarters: before anybody could call it dead. That is all that `models/model_gc.py` takes for granted of a lease:
    while its reader goes on it is listed; that a collector lists leases only after ``swept`` does not rest on how they are watched.

    Args:
        clock: Its monotonic reading must be the machine's where `kept` is given.
        kept: What this machine's processes saw before, and where to keep what this one sees; None: only this observer's own looks.
    """

    def __init__(self, clock: Clock, kept: LeaseStore | None = None) -> None:
        self._clock = clock
        self._kept = kept
        self._watched: dict[str, dict[str, Sighting]] = {}
        self._dead: dict[str, set[str]] = {}

    async def living(self, tiers: Tiers, run: str) -> Mapping[Attempt, tuple[LeaseSeen, ...]]:
        """The leases of a run that are not dead, by checkpoint. Changes nothing on the tiers.

        Raises:
            StorageError: The authority can't be asked: then nothing may be freed.
        """
        before = await self._seen_before(run)
        storage, root = tiers.authority.storage, f"{lease_root(run)}/"
        began = self._clock.monotonic()
        named = {info.path: ours for info in await storage.list(lease_root(run)) if (ours := _parse_path(root, info.path)) is not None}

        async def read(path: str) -> bytes | None:
            for _ in range(2):
                try:
                    return await storage.read(path)
                except NotFoundError:
                    return None  # released meanwhile
                except IntegrityError:
                    continue  # rewritten while it was read: a sign of life, and no content to know again
            return b""  # it can't be read

        paths = sorted(named)
        read_at_once = zip(paths, await together(read, paths), strict=True)
        now = self._clock.monotonic()
        watched: dict[str, Sighting] = {}
        alive: dict[Attempt, list[LeaseSeen]] = {}
        dead: set[str] = set()
        for path, data in read_at_once:
            if data is None:
                continue
            seen, digest = _seen(*named[path], data), digest_of(data)
            known = before.get(path)
            one = watched[path] = known if known is not None and known.digest == digest else Sighting(digest=digest, since=now)
            if began - one.since >= seen.ttl_s:
                log.info("run=%s the lease of %s on step %d is dead: no beat for %g s", run, seen.holder, seen.attempt.step, seen.ttl_s)
                dead.add(path)
            else:
                alive.setdefault(seen.attempt, []).append(seen)
        self._watched[run], self._dead[run] = watched, dead
        if self._kept is not None and watched != before:
            await asyncio.to_thread(self._kept.save, run, watched)
        return {attempt: tuple(found) for attempt, found in alive.items()}

    async def remove_dead(self, tiers: Tiers, run: str) -> None:
        """Removes the leases that the last look found dead: nobody would ever name them again.

        Raises:
            StorageError: The authority can't delete them.
        """
        if dead := self._dead.pop(run, None):
            await tiers.authority.storage.delete(sorted(dead))

    async def _seen_before(self, run: str) -> Mapping[str, Sighting]:
        if run not in self._watched:
            loaded = await asyncio.to_thread(self._kept.load, run, self._clock.monotonic()) if self._kept is not None else {}
            self._watched.setdefault(run, loaded)
        return self._watched[run]


def _parse_path(root: str, path: str) -> tuple[Attempt, str] | None:
    """The checkpoint and the lease's id; None for a name that is not of our grammar, which is left alone and holds nothing."""
    folder, _, leaf = path.removeprefix(root).rpartition("/")
    attempt, found = Attempt.parse(root.removesuffix("/.leases/"), folder), _LEAF.fullmatch(leaf)
    return (attempt, found[1]) if attempt is not None and found is not None else None


def _seen(attempt: Attempt, lease_id: str, data: bytes) -> LeaseSeen:
    """What a lease says; one that can't be read holds all the same, with the default TTL."""
    try:
        fields = Fields(what=LEASE_DOCUMENT, body=decode_document(data, LEASE_DOCUMENT, max_nbytes=_MAX_NBYTES))
        ttl_s = fields.number("ttl_s")
        if not 0 < ttl_s < math.inf:
            raise fields.error("ttl_s", "is no duration")
        return LeaseSeen(
            attempt=attempt,
            lease_id=lease_id,
            holder=fields.text("holder"),
            kind=fields.text("kind"),
            beat=fields.integer("beat"),
            ttl_s=min(ttl_s, _MAX_TTL_S),
        )
    except IntegrityError as error:
        log.debug("checkpoint=%s lease=%s can't be read: %s", attempt.folder, lease_id, error.message)
        return LeaseSeen(attempt=attempt, lease_id=lease_id, holder="unknown", kind="unreadable", beat=0, ttl_s=_UNREADABLE_TTL_S)
