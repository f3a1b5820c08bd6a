"""A lane: the task that brings attempts onto one tier, newest first, and keeps trying for as long as the process lives.

Every tier has its own lane, so that a dead bucket holds up nothing but copies to that bucket: commits on the authority go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from tierstore.errors import AccessError, LockedError, SaveError, TierStoreError
from tierstore.names import Attempt
from tierstore.tiers.advance import Outcome, advance
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.jobs import PendingCopy, WorkerOptions
from tierstore.tiers.locks import RunLock
from tierstore.tiers.retry import Backoff, Verdict, judge
from tierstore.tiers.tier import Tier, ensure_tier, still_there
from tierstore.tiers.together import happens, only_ours_to_cancel
from tierstore.tiers.view import AttemptView

__all__ = ["Entry", "Lane", "LaneReports"]

log = logging.getLogger(__name__)

_FOREIGN_LOOKS = 4
"""How often a lane looks at an attempt of another process that waits for something, before the next rescan has to find it again."""

_HELD_UP_S = 10.0
"""How long another process may have the node's lock before that is said: `tierstore sync` and its like are done sooner."""


class LaneReports(Protocol):
    """Who is told what a lane finds."""

    def seen(self, attempt: Attempt, tier: Tier, view: AttemptView) -> None:
        """What the tiers hold of an attempt, after the lane of `tier` looked at it."""

    def retrying(self, attempt: Attempt, tier: Tier, error: TierStoreError, *, needs_help: bool) -> None:
        """A step failed and is tried again; told once for each kind of failure. `needs_help`: it will hardly pass by itself."""

    def failed(self, attempt: Attempt, tier: Tier, error: TierStoreError) -> None:
        """A step failed for good in this process."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """An attempt that waits for, or is being brought onto, a lane's tier."""

    attempt: Attempt
    own: bool
    """Whether this process saved it, and so answers for it."""
    nbytes: int = 0
    world_size: int | None = None
    give_up_at: float | None = None
    """By the injected clock: when the authority's lane condemns the attempt if ranks are still missing."""
    reason: str = "its turn"
    not_before: float = 0.0
    pause_s: float = 0.0
    looks: int = 0
    working: bool = False
    put_off: bool = False
    """Whether it was said that this one is put off."""
    reported: str = ""
    held_up_at: float | None = None
    """Since when another process has the node's lock, by the injected clock; None: it was free the last time."""


@dataclass(slots=True, kw_only=True)
class Lane:
    """The work for one tier. Everything here runs on the event loop's thread."""

    context: CopyContext
    tier: Tier
    options: WorkerOptions
    lock: RunLock
    reports: LaneReports
    trouble: TierStoreError | None = None
    """The last failure, while it lasts."""
    last_error: str = ""
    failing_since: float | None = None
    _entries: dict[Attempt, Entry] = field(default_factory=dict)
    _backoff: Backoff = field(default_factory=Backoff)
    _not_before: float = 0.0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _lockless: bool = False
    _held_up: bool = False
    """Whether it was said that another process is in the way."""

    def __post_init__(self) -> None:
        self._backoff = Backoff(base_s=self.options.retry_first_s, cap_s=self.options.retry_most_s)

    # ---- from outside

    @property
    def idle(self) -> bool:
        return not self._entries

    @property
    def attempts(self) -> Collection[Attempt]:
        return self._entries.keys()

    @property
    def working(self) -> Collection[Attempt]:
        """What is being brought onto the tier now."""
        return [attempt for attempt, entry in self._entries.items() if entry.working]

    def add(self, entry: Entry) -> None:
        """Takes an attempt in. One of our own replaces what a scan had found of it."""
        known = self._entries.get(entry.attempt)
        if known is None or (entry.own and not known.own):
            self._entries[entry.attempt] = entry
            self._announce_put_off()
        self._wake.set()

    def kick(self) -> None:
        """Tries everything now, whatever it waits for."""
        self._not_before = 0.0
        for entry in self._entries.values():
            entry.not_before, entry.pause_s = 0.0, 0.0
        self._wake.set()

    def nudge(self, attempt: Attempt) -> None:
        """Looks at one attempt now: what it waited for has happened."""
        entry = self._entries.get(attempt)
        if entry is not None:
            entry.not_before, entry.pause_s = 0.0, 0.0
            self._wake.set()

    def disown(self, attempt: Attempt) -> None:
        """This process answers for an attempt no more: it is waited for no longer than others' are."""
        entry = self._entries.get(attempt)
        if entry is not None:
            entry.own = False
            self.nudge(attempt)

    @property
    def failing_s(self) -> float:
        """For how long every try on this tier has failed, in seconds; 0 while it works."""
        return 0.0 if self.failing_since is None else asyncio.get_running_loop().time() - self.failing_since

    def pending(self, commits_failing_s: float = 0.0) -> Iterator[PendingCopy]:
        """What is not on this tier yet. `commits_failing_s`: for how long the authority has been failing.

        What waits for a commit gets on no sooner than the authority does, however well its own tier is.
        """
        waiting = 0
        for entry in self._newest_first():
            if entry.working:
                reason = "being copied" if self.failing_since is None else f"being tried again: {self.last_error}"
            else:
                reason = "put off: newer checkpoints go first" if self._is_put_off(waiting) else entry.reason
                waiting += 1
            stuck = not entry.working and entry.reason == "waiting for the commit"
            failing = max(self.failing_s, commits_failing_s) if stuck else self.failing_s
            yield PendingCopy(attempt=entry.attempt, tier=self.tier.name, nbytes=entry.nbytes, reason=reason, failing_s=failing)

    # ---- the task

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            now = asyncio.get_running_loop().time()
            entry = next((e for e in self._newest_first() if e.not_before <= now), None) if now >= self._not_before else None
            if entry is not None:
                await self._work(entry)
                continue
            due = max(self._not_before, min((e.not_before for e in self._entries.values()), default=now))
            self._wake.clear()
            await happens(self._wake, due - now if self._entries else None)

    def _newest_first(self) -> list[Entry]:
        return sorted(self._entries.values(), key=lambda e: e.attempt, reverse=True)

    def _is_put_off(self, newer: int) -> bool:
        """Whether a backlog pushes an entry back that `newer` others wait before: until this lane has nothing else to do.

        Newest first is the order anyway, so there is nothing to move, only to say.
        """
        return self.options.backlog == "skip_oldest" and newer >= self.options.max_waiting

    def _announce_put_off(self) -> None:
        for newer, entry in enumerate(e for e in self._newest_first() if not e.working):
            if self._is_put_off(newer) and not entry.put_off:
                entry.put_off = True
                log.info("tier=%s checkpoint=%s put off: newer checkpoints go first", self.tier.name, entry.attempt.folder)

    async def _work(self, entry: Entry) -> None:
        entry.working = True
        try:
            outcome = await only_ours_to_cancel(self._advance(entry))
        except TierStoreError as error:
            self._failed(entry, error)
        except Exception as error:  # boundary: a fault in the program ends this copy, not the lane
            log.exception("tier=%s checkpoint=%s unexpected failure", self.tier.name, entry.attempt.folder)
            failure = SaveError(f"unexpected {type(error).__name__} while copying to {self.tier.name!r}: {error}", hint="report this fault")
            failure.__cause__ = error
            self._failed(entry, failure)
        else:
            self._moved(entry, outcome)
        finally:
            entry.working = False

    async def _advance(self, entry: Entry) -> Outcome:
        """Under the lock; while another process has it, only looks at how far that one has come."""
        await ensure_tier(self.context.tiers, self.tier)
        await still_there(self.context.tiers, self.tier)
        try:
            return await self._advance_locked(entry)
        except TierStoreError:
            for tier in self.context.tiers:  # what a source lacks that was unmounted meanwhile is away, not damaged
                await still_there(self.context.tiers, tier)
            raise

    async def _advance_locked(self, entry: Entry) -> Outcome:
        due = entry.give_up_at is not None and self.context.clock.monotonic() >= entry.give_up_at
        locked = False
        try:
            self.lock.acquire()
            locked = True
        except LockedError as error:
            self._tell_held_up(entry, error)
            return await advance(self.context, entry.attempt, self.tier, act=False, world_size=entry.world_size)
        except AccessError as error:  # a node tier that is broken must not keep what lies elsewhere from being committed
            if not self._lockless:
                log.warning("tier=%s working without a lock: %s", self.tier.name, error.message)
            self._lockless = True
        self._goes_on(entry)
        try:
            return await advance(self.context, entry.attempt, self.tier, world_size=entry.world_size, give_up=due)
        finally:
            if locked:
                self.lock.release()

    def _tell_held_up(self, entry: Entry, error: LockedError) -> None:
        """Says, once, that a process of another job is in the way of a commit; ranks of one job wait for each other without a word."""
        now = self.context.clock.monotonic()
        entry.held_up_at = now if entry.held_up_at is None else entry.held_up_at
        alone = entry.own and entry.world_size == 1 and self.context.tiers.is_authority(self.tier)
        if alone and not self._held_up and now - entry.held_up_at >= _HELD_UP_S:
            self._held_up = True
            log.warning(
                "tier=%s checkpoint=%s is not committed yet: process %s works on copies of run %r on this node, and has for %.0f s; it is "
                "waited for. If that is another trainer of the run, end one of the two",
                self.tier.name,
                entry.attempt.folder,
                error.context.get("pid") or "unknown",
                entry.attempt.run,
                now - entry.held_up_at,
            )

    def _goes_on(self, entry: Entry) -> None:
        entry.held_up_at = None
        if self._held_up:
            self._held_up = False
            log.warning("tier=%s checkpoint=%s goes on: the other process let this node's tiers go", self.tier.name, entry.attempt.folder)

    def _moved(self, entry: Entry, outcome: Outcome) -> None:
        if outcome.done:  # else nothing was done on this tier, which tells nothing of its health
            if self.trouble is not None:
                log.warning("tier=%s works again", self.tier.name)
            self.trouble, self.failing_since, self._not_before = None, None, 0.0
            self._backoff.reset()
            del self._entries[entry.attempt]
        else:
            entry.reason = f"waiting for {outcome.waiting}"
            self._pause(entry)
            entry.looks += 1
            if not entry.own and entry.looks >= _FOREIGN_LOOKS:
                del self._entries[entry.attempt]
        self.reports.seen(entry.attempt, self.tier, outcome.view)

    def _failed(self, entry: Entry, error: TierStoreError) -> None:
        verdict = judge(error)
        self.last_error = f"{type(error).__name__}: {error.message}"
        if verdict is Verdict.WAIT:
            self._pause(entry)
            return
        if verdict is Verdict.FAIL:
            del self._entries[entry.attempt]
            self.reports.failed(entry.attempt, self.tier, error)
            return
        now = asyncio.get_running_loop().time()
        if self.trouble is None or type(self.trouble) is not type(error):
            log.warning("tier=%s checkpoint=%s will be tried again: %s", self.tier.name, entry.attempt.folder, error.message)
        self.trouble = error
        self.failing_since = now if self.failing_since is None else self.failing_since
        self._not_before = now + self._backoff.next_s()
        entry.not_before = self._not_before + self.options.poll_s  # others get their turn first: the fault may be this one's alone
        entry.reason = f"failed, tried again: {self.last_error}"
        if entry.reported != type(error).__name__:
            entry.reported = type(error).__name__
            self.reports.retrying(entry.attempt, self.tier, error, needs_help=verdict is Verdict.REPORT)

    def _pause(self, entry: Entry) -> None:
        entry.pause_s = min(max(self.options.poll_s, entry.pause_s * 1.5), 20 * self.options.poll_s)
        entry.not_before = asyncio.get_running_loop().time() + entry.pause_s
