"""`Store.retention`: what stays, what goes, and why, from Python. It only composes: decisions, the plan, the collector (`tiers/`)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any

from tierstore.errors import UsageError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers import decisions
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.gc.collect import CollectReport, collect
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.housekeeping import Housekeeping, look, plan_of
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.gc.reports import Freed, PruneReport
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.retention import Plan, Reason, Word, explain
from tierstore.tiers.session import Session

__all__ = ["Retention"]

Which = int | str
"""A checkpoint as a caller names it: a step, ``latest``, ``best:METRIC``, ``tag:TAG``, or ``RUN@…`` of these."""


class Retention:
    """What is decided about the checkpoints of a store. `Store.retention` has it; safe from several threads.

    Decisions are records in a checkpoint's log: they hold for every process, at once, and survive this one. Of several ranks any one may
    make them; no other rank need make the same call.
    """

    def __init__(
        self,
        session: Session,
        run: str,
        *,
        resolve: Callable[[Which], CheckpointInfo],
        cache: RecordCache,
        protected: Callable[[], Mapping[Attempt, Reason]],
        busy: Callable[[], bool],
    ) -> None:
        self._session = session
        self._run = run
        self._resolve = resolve
        self._cache = cache
        self._protected = protected
        self._busy = busy
        self._leases = session.new_watch()  # kept: it believes only what it has seen for a while

    # ---- decisions

    def pin(self, which: Which, name: str = "pin", *, reason: str = "") -> bool:
        """Pins a checkpoint: it is never deleted while it has a pin; copies of it may leave nearer tiers. One that has expired comes back.

        Args:
            which: A step, ``latest``, ``best:METRIC``, ``tag:TAG`` or a full reference.
            name: Pins of different names are independent of each other.
            reason: For people.

        Returns:
            False where it was so already; so do all decisions here.

        Raises:
            NotFoundError: No such checkpoint.
            RefusedError: It was deleted meanwhile; says when, and by whom.
            IntegrityError: Its log can't be read.
            StorageError: The authority can't be written.
        """
        return self._say(which, decisions.pin, name, reason=reason)

    def unpin(self, which: Which, name: str = "pin") -> bool:
        """Takes one pin off. Raises as `pin`."""
        return self._say(which, decisions.unpin, name)

    def tag(self, which: Which, tags: Sequence[str]) -> bool:
        """Adds tags, which references and rules know. A checkpoint that has expired comes back. Raises as `pin`."""
        return self._say(which, decisions.tag, tags)

    def untag(self, which: Which, tags: Sequence[str]) -> bool:
        """Takes tags off, those that it has. Raises as `pin`."""
        return self._say(which, decisions.untag, tags)

    def hold(self, which: Which, name: str, *, reason: str = "", until: datetime | None = None) -> bool:
        """Holds a checkpoint: while it lasts it is not deleted, and no tier drops its copy. One that has expired comes back.

        Args:
            which: As `pin`.
            name: A hold of the same name is replaced.
            reason: For people.
            until: When it ends by itself, an aware time; None: when it is released.

        Raises:
            UsageError: `until` has passed, or says no time zone.
            NotFoundError, RefusedError, IntegrityError, StorageError: As `pin`.
        """
        return self._say(which, decisions.hold, name, reason=reason, until=until)

    def release(self, which: Which, name: str) -> bool:
        """Ends a hold before its time. Raises as `pin`."""
        return self._say(which, decisions.release, name)

    def set_metrics(self, which: Which, metrics: Mapping[str, float]) -> bool:
        """Adds metrics that came after the save, or corrects some; the others stay.

        Raises:
            UsageError: A value is no number, or a name can't be shown.
            NotFoundError, RefusedError, IntegrityError, StorageError: As `pin`.
        """
        return self._say(which, decisions.set_metrics, metrics)

    def undelete(self, which: Which) -> bool:
        """Takes an expired checkpoint back, as long as it has not been freed. Name it by its step. Raises as `pin`."""
        return self._say(which, decisions.undelete)

    # ---- the policy

    def plan(self) -> Plan:
        """What the policy would do to each checkpoint of the run, and every reason. Changes nothing.

        Raises:
            RefusedError: There is no policy.
            StorageError: No tier can be reached.
        """
        h = self._housekeeping(self._run)
        return plan_of(h, self._session.run(look(h)))

    def explain(self, which: Which) -> tuple[Word, ...]:
        """Every rule's word on one checkpoint: also of the rules that do not keep it, and why not.

        Raises:
            NotFoundError: No such checkpoint.
            RefusedError: There is no policy.
        """
        attempt = self._resolve(which).attempt
        h = self._housekeeping(attempt.run)
        return explain(plan_of(h, self._session.run(look(h))), attempt)

    def prune(self, plan: Plan | None = None, *, max_delete_fraction: float | None = None, dry_run: bool = False) -> PruneReport:
        """Decides by the policy which checkpoints go: they are hidden, can be taken back for a while, and `collect` frees them after it.

        Args:
            plan: A plan that was read and agreed to: of it only what is still so is done. None: all that the policy says now.
            max_delete_fraction: How much may go at once, above 0 and up to 1, in place of the policy's.
            dry_run: Only say what would be decided.

        Raises:
            UsageError: `max_delete_fraction` is no such share.
            RefusedError: There is no policy, a log can't be read, the authority is not reached or was lost, or too much would go at once.
            StorageError: The authority failed; calling again continues.
        """
        if max_delete_fraction is not None and not 0 < max_delete_fraction <= 1:
            raise UsageError(f"max_delete_fraction is {max_delete_fraction!r}, no share", hint="write e.g. 0.9 for 90%; 1 is all")
        h = self._housekeeping(self._run)
        return self._session.run(prune(h, plan, max_delete_fraction=max_delete_fraction, dry_run=dry_run))

    def collect(self, *, now: bool = False, wait_s: float = 0.0, dry_run: bool = False) -> CollectReport:
        """Frees what is due: what has expired and was not taken back, copies that tiers drop, orphans, what was left half done.

        Args:
            now: Do not wait until the time for taking back has passed.
            wait_s: Seconds to wait for readers of what goes; what is still read then is left for the next time.
            dry_run: Only say what would go.

        Raises:
            RefusedError: A log can't be read, or the authority is not reached or was lost.
            StorageError: The authority failed; calling again continues.
        """
        return self._session.run(collect(self._housekeeping(self._run), now=now, wait_s=wait_s, dry_run=dry_run))

    def evict(self, which: Which, tier: str, *, reason: str = "", dry_run: bool = False) -> Freed:
        """Drops one tier's copy of a checkpoint, now, where enough verified copies stand elsewhere; never the last one.

        Args:
            which: As `pin`.
            tier: The tier's name.
            reason: For people.
            dry_run: Only say what would go.

        Raises:
            RefusedError: Too few copies stand elsewhere, or it is held.
            LockedError: It is being read, saved or copied.
            NotFoundError: No such checkpoint, or the tier has nothing of it.
            StorageError: A tier failed; calling again continues.
        """
        info = self._resolve(which)
        return self._session.run(evict(self._housekeeping(info.attempt.run), info, tier, reason=reason, dry_run=dry_run))

    # ---- inside

    def _say(self, which: Which, decision: Callable[..., Coroutine[Any, Any, Record | None]], *what: Any, **more: Any) -> bool:
        attempt, session = self._resolve(which).attempt, self._session
        return session.run(decision(session.tiers, attempt, *what, clock=session.clock, **more)) is not None

    def _housekeeping(self, run: str) -> Housekeeping:
        return Housekeeping(
            tiers=self._session.tiers,
            run=run,
            policy=self._session.config.retention_for(run),
            clock=self._session.clock,
            cache=self._cache,
            leases=self._leases,
            protected=self._protected,
            busy=self._busy,
        )
