"""The catalog: which checkpoints of a run exist, and where, computed from the tiers' logs and nothing else (PROTOCOLS.md §2).

Step numbers are integers, file times are never looked at, and there is no pointer that could go stale. The authority's log decides;
where it is lost or can't be reached, the copies of the records beside the replicas are read instead, with a warning.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tierstore.errors import IntegrityError, NotFoundError, TierStoreError, UsageError
from tierstore.names import Attempt, Reference
from tierstore.tiers.checkpoint import CheckpointInfo, IncompleteAttempt, Reduced, ReplicaState
from tierstore.tiers.listing import runs
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.referrers import Known, fold_references, kept_text
from tierstore.tiers.scanning import scan_attempts
from tierstore.tiers.tier import Tiers

__all__ = ["Catalog", "CheckpointInfo", "IncompleteAttempt", "RecordCache", "ReplicaState", "runs", "scan"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """One run, as the tiers that were reached tell it.

    `checkpoints` are committed and not swept, oldest step first, attempts of one step by age. `incomplete` and `condemned` are no
    checkpoints. `swept` are gone for everybody; of those of them that are in `reduced` shards stay somewhere, for others refer to them.
    `remains`: those swept or condemned of which tiers still have something, and which tiers: a payload folder, or more of a log than
    stays. `behind`: checkpoints beside whose copies, on these tiers, some records of the log do not lie yet. `known`: how many
    attempts have a first record on the authority, whatever it says; 0 where that was not reached. `unreachable` maps a tier's name to
    why it could not be asked. `foreign` lists paths that are not of our grammar: they are ignored, and never touched. `warnings` repeats
    what was logged.
    """

    run: str
    checkpoints: tuple[CheckpointInfo, ...] = ()
    incomplete: tuple[IncompleteAttempt, ...] = ()
    condemned: tuple[IncompleteAttempt, ...] = ()
    swept: tuple[Attempt, ...] = ()
    reduced: Mapping[Attempt, Reduced] = field(default_factory=dict)
    remains: Mapping[Attempt, tuple[str, ...]] = field(default_factory=dict)
    behind: Mapping[Attempt, tuple[str, ...]] = field(default_factory=dict)
    known: int = 0
    unreachable: Mapping[str, TierStoreError] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    authority: str = ""
    other_runs: tuple[str, ...] = ()
    """The store's runs, filled in only where this run has nothing: for suggestions."""

    def latest(self) -> CheckpointInfo | None:
        """The highest committed step that is not hidden or superseded and has a whole copy on a tier that was reached.

        Raises:
            IntegrityError: A newer step has a commit record that no tier has a readable copy of: to go back to an older one is for the
                caller to decide (``resume(fallback=True)``).
            StorageError: There is none, but the authority was not reached: "no checkpoint" would be a guess, and training would
                begin anew over the run.
        """
        found = self._newest_loadable()
        for attempt in self.out_of_reach():
            raise self.unreadable_error(attempt)
        if found is None and self.authority in self.unreachable:
            raise self.unreachable[self.authority]
        return found

    def offered(self) -> CheckpointInfo | None:
        """What `latest` gives; None also where it raises: for listings, which go on."""
        return None if self.out_of_reach() else self._newest_loadable()

    def out_of_reach(self) -> tuple[IncompleteAttempt, ...]:
        """Attempts later than all that can be loaded, with a commit record that can't be read: while there is one, nothing is `latest`."""
        found = self._newest_loadable()
        return tuple(a for a in self.incomplete if a.unreadable and a.attempt.step > (-1 if found is None else found.attempt.step))

    def _newest_loadable(self) -> CheckpointInfo | None:
        return next((info for info in reversed(self.checkpoints) if _offered(info) and info.loadable), None)

    def unreadable_error(self, attempt: IncompleteAttempt) -> IntegrityError:
        """The error for an attempt with a commit record that can't be read."""
        return IntegrityError(
            f"run {self.run!r}: the commit record of step {attempt.attempt.step} can't be read: {attempt.unreadable}",
            hint="restore the record from a backup, name an older step, or pass this one over with resume(fallback=True)",
            run=self.run,
            step=attempt.attempt.step,
        )

    def find(self, step: int) -> CheckpointInfo | None:
        """The checkpoint of a step: of several attempts the one that is not superseded; also a hidden one."""
        found = [c for c in self.checkpoints if c.attempt.step == step]
        return next((c for c in reversed(found) if not c.superseded), found[-1] if found else None)

    def resolve(self, reference: Reference, *, modes: Mapping[str, Literal["min", "max"]] | None = None) -> CheckpointInfo:
        """Finds what a person named.

        Args:
            reference: ``latest``, a step, the best by a metric, or a tag (of several checkpoints with it: the newest).
            modes: Whether less or more of a metric is better; ``min`` where it says nothing. NaN ranks worst.

        Raises:
            NotFoundError: There is no such thing; names the nearest.
            StorageError: There is none, but the authority was not reached.
        """
        if reference.run and reference.run != self.run:
            raise UsageError(f"this catalog is of run {self.run!r}, not {reference.run!r}", hint="scan the run that is meant")
        if reference.selector == "step" and reference.step is not None:
            found = self.find(reference.step)
        elif reference.selector == "best":
            found = self._best(reference.argument, (modes or {}).get(reference.argument, "min"))
        elif reference.selector == "tag":
            found = next((c for c in reversed(self.checkpoints) if _offered(c) and reference.argument in c.tags), None)
        else:
            found = self.latest()
        if found is None:
            if self.authority in self.unreachable:
                raise self.unreachable[self.authority]
            raise self._not_found(reference)
        return found

    def _best(self, metric: str, mode: Literal["min", "max"]) -> CheckpointInfo | None:
        ranked = [c for c in self.checkpoints if _offered(c) and c.loadable and metric in c.metrics]

        def rank(info: CheckpointInfo) -> tuple[bool, float, int]:
            value = info.metrics[metric]
            return math.isnan(value), -value if mode == "max" else value, -info.attempt.step

        return min(ranked, key=rank, default=None)

    def _not_found(self, reference: Reference) -> NotFoundError:
        shown = {"step": f"step {reference.step}", "best": f"metric {reference.argument!r}", "tag": f"tag {reference.argument!r}"}
        what = shown.get(reference.selector, "checkpoint")
        steps = sorted({c.attempt.step for c in self.checkpoints})
        if not steps:
            return self._no_checkpoint(what)
        hint = f"committed steps: {_some(steps)}"
        detail = ""
        if reference.selector == "step" and reference.step is not None:
            wanted = reference.step
            near = sorted(sorted(steps, key=lambda s: abs(s - wanted))[:3])
            hint = f"the nearest committed steps are {', '.join(map(str, near))}"
            detail = self._fate_of(wanted)
        elif reference.selector == "best":
            hint = _suggest(reference.argument, {m for c in self.checkpoints for m in c.metrics}, "metrics")
        elif reference.selector == "tag":
            hint = _suggest(reference.argument, {t for c in self.checkpoints for t in c.tags}, "tags")
        return NotFoundError(f"run {self.run!r} has no committed {what}{detail}", hint=hint, run=self.run, step=reference.step)

    def _no_checkpoint(self, what: str) -> NotFoundError:
        unreadable = [a for a in self.incomplete if a.unreadable]
        if unreadable:
            message = f"run {self.run!r} has no committed {what} that can be read: {unreadable[-1].unreadable}"
            return NotFoundError(message, hint="restore that record from a backup", run=self.run, step=unreadable[-1].attempt.step)
        if self.incomplete or self.condemned:
            attempts = sorted({a.attempt.step for a in (*self.incomplete, *self.condemned)})
            message = f"run {self.run!r} has no committed checkpoint, only attempts at steps {_some(attempts)} that did not commit"
            return NotFoundError(message, hint="`tierstore recover` finishes an attempt whose parts are all there", run=self.run)
        hint = _suggest(self.run, set(self.other_runs), "runs") if self.other_runs else "the store has no run yet"
        return NotFoundError(f"run {self.run!r} has no committed {what}: the run does not exist in this store", hint=hint, run=self.run)

    def _fate_of(self, step: int) -> str:
        for attempt in (*self.incomplete, *self.condemned):
            if attempt.attempt.step == step:
                if attempt.unreadable:
                    return f" that can be read: {attempt.unreadable}"
                missing = f"; rank {_some(list(attempt.missing))} missing" if attempt.missing else ""
                return f" (an attempt was condemned: {attempt.condemned})" if attempt.condemned else f" (an attempt is incomplete{missing})"
        if kept := [text for a, reduced in self.reduced.items() if a.step == step and (text := kept_text(reduced.serves))]:
            return f" (it was deleted; {kept[-1]})"
        return " (it was deleted)" if any(a.step == step for a in self.swept) else ""


async def scan(tiers: Tiers, run: str, cache: RecordCache | None = None) -> Catalog:
    """Reads the catalog of a run from all tiers that can be reached.

    One listing of the run's logs and one of its folder for each tier; records are write-once, and those that `cache` has are not
    read again.

    Raises:
        StorageError: No tier that could know can be reached.
    """
    cache = cache if cache is not None else RecordCache()
    scanned = await scan_attempts(tiers, run, cache)
    empty = not (scanned.checkpoints or scanned.incomplete or scanned.condemned or scanned.swept)
    others = await runs(tiers) if empty and len(scanned.unreachable) < len(tiers) else []
    catalog = Catalog(
        run=run,
        checkpoints=_supersede(scanned.checkpoints),
        incomplete=tuple(sorted(scanned.incomplete, key=lambda a: a.attempt)),
        condemned=tuple(sorted(scanned.condemned, key=lambda a: a.attempt)),
        swept=tuple(sorted(scanned.swept)),
        reduced=scanned.reduced,
        remains=scanned.remains,
        behind=scanned.behind,
        known=scanned.known,
        unreachable=scanned.unreachable,
        warnings=tuple(scanned.warnings),
        foreign=tuple(sorted(scanned.foreign)),
        authority=tiers.authority.name,
        other_runs=tuple(others),
    )
    return _warn_unusable(_with_referrers(catalog), cache)


def _with_referrers(catalog: Catalog) -> Catalog:
    """The same, with what each checkpoint's shards serve."""
    referring = {info.attempt: found for info in catalog.checkpoints if (found := fold_references(info.records))}
    if not (referring or catalog.reduced):
        return catalog
    known = Known(
        gone=frozenset(catalog.swept).union(item.attempt for item in catalog.condemned),
        remains=catalog.remains,
        keep={attempt: reduced.keep for attempt, reduced in catalog.reduced.items()},
    )
    return replace(
        catalog,
        checkpoints=tuple(
            replace(info, serves=known.serving(referring[info.attempt])) if info.attempt in referring else info
            for info in catalog.checkpoints
        ),
        reduced={
            attempt: replace(reduced, serves=known.serving(fold_references(reduced.records), reduced.keep))
            for attempt, reduced in catalog.reduced.items()
        },
    )


def _supersede(found: Sequence[CheckpointInfo]) -> tuple[CheckpointInfo, ...]:
    """Of several committed attempts at one step the later one wins; one whose log can't be read wins over nothing."""
    winners: dict[int, Attempt] = {}
    for info in found:
        if not info.damaged:
            step = info.attempt.step
            winners[step] = max(winners.get(step, info.attempt), info.attempt)
    ordered = sorted(found, key=lambda c: (c.attempt.step, c.attempt.save_id))

    def is_superseded(attempt: Attempt) -> bool:
        winner = winners.get(attempt.step)
        return winner is not None and winner.save_id > attempt.save_id

    return tuple(replace(c, superseded=True) if is_superseded(c.attempt) else c for c in ordered)


def _warn_unusable(catalog: Catalog, cache: RecordCache) -> Catalog:
    extra = []
    for info in catalog.checkpoints:
        if _offered(info) and not info.usable:
            down = f"; not reached: {', '.join(catalog.unreachable)}" if catalog.unreachable else ""
            lossy = ", ".join(tier for tier, state in info.replicas.items() if state == "quantised")
            what = f"the only copies that were found are quantised, on {lossy}" if lossy else "no tier that was reached has a complete copy"
            extra.append(f"run={catalog.run} step={info.attempt.step} is committed, but {what}{down}")
    for text in extra:
        if cache.first_time(text):
            log.warning("%s", text)
    return replace(catalog, warnings=(*catalog.warnings, *extra)) if extra else catalog


def _offered(info: CheckpointInfo) -> bool:
    return not (info.hidden or info.superseded)


def _some(numbers: Sequence[int]) -> str:
    return (
        ", ".join(map(str, numbers)) if len(numbers) <= 10 else f"{', '.join(map(str, numbers[:3]))} … {', '.join(map(str, numbers[-3:]))}"
    )


def _suggest(wanted: str, known: set[str], kind: str) -> str:
    if not known:
        return f"there are no {kind}"
    near = difflib.get_close_matches(wanted, sorted(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"the {kind} are {', '.join(sorted(known)[:10])}"
