"""The keep rules: which checkpoints of a series each of them keeps, and what it says of the others. Pure, and O(n log n) for each rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar, cast

from tierstore.config_retention import BestRule, KeepRule
from tierstore.names import Attempt
from tierstore.tiers.retention.calendar import Calendar, period_of
from tierstore.units import format_duration, format_some

__all__ = ["Candidate", "Series", "Verdict", "grouped", "judge", "rule_text", "series_of"]


class Candidate(Protocol):
    """What the rules go by; a checkpoint of the catalog and an entry of a plan are such."""

    @property
    def attempt(self) -> Attempt: ...
    @property
    def committed_at(self) -> datetime: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def tags(self) -> tuple[str, ...]: ...
    @property
    def final(self) -> bool: ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The checkpoints that rank among each other.

    `by_step` begins with the highest step, `by_saving` with the latest save (after a rewind these differ), `by_time` with the latest
    commit; what is dated in the future is not in `by_time`: one wrong clock must not move the window of the others.
    """

    by_step: tuple[Candidate, ...]
    by_saving: tuple[Candidate, ...]
    by_time: tuple[Candidate, ...]
    zone: tzinfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One rule's word on a series: why it keeps which, and what it says of one that it does not keep."""

    kind: str
    rule: str
    kept: Mapping[Attempt, str]
    missed: Callable[[Candidate], str]


def grouped(candidates: Iterable[C], group_by: Sequence[str]) -> list[list[C]]:
    """The candidates by what the policy groups them by, within one run, in the order in which they come."""
    if "tags" not in group_by:
        return [list(candidates)]
    groups: dict[tuple[str, ...], list[C]] = {}
    for candidate in candidates:
        groups.setdefault(tuple(sorted(set(candidate.tags))), []).append(candidate)
    return list(groups.values())


def series_of(candidates: Iterable[Candidate], *, zone: tzinfo, future: Collection[Attempt]) -> Series:
    """Ranks candidates; the order in which they come does not matter."""
    by_step = sorted(candidates, key=lambda c: (c.attempt.step, c.attempt.save_id), reverse=True)
    dated = [c for c in by_step if c.attempt not in future] if future else by_step
    return Series(
        by_step=tuple(by_step),
        by_saving=tuple(sorted(by_step, key=lambda c: c.attempt.save_id, reverse=True)),
        by_time=tuple(sorted(dated, key=lambda c: c.committed_at, reverse=True)),
        zone=zone,
    )


def rule_text(rule: KeepRule) -> str:
    """The rule as a person would say it: ``last 5``, ``every 5000``, ``best val/loss (min) 3``."""
    if rule.every is not None:
        return f"every {rule.every.steps}"
    if rule.within_s is not None:
        return f"within {format_duration(rule.within_s)}"
    if rule.best is not None:
        return f"best {rule.best.metric} ({rule.best.mode}) {rule.best.count}"
    if rule.steps is not None:
        return f"steps {format_some(rule.steps, 5)}"
    if rule.tags is not None:
        return f"tags {format_some(rule.tags, 5)}"
    return rule.kind if rule.final else f"{rule.kind} {getattr(rule, rule.kind)}"


def judge(rule: KeepRule, series: Series) -> Verdict:
    """What one rule says of a series."""
    if rule.last is not None:
        kept, missed = _last(rule.last, series)
    elif rule.within_s is not None:
        kept, missed = _within(rule.within_s, series)
    elif rule.best is not None:
        kept, missed = _best(rule.best, series)
    elif rule.every is not None:
        kept, missed = _every(rule.every.steps, series)
    elif rule.steps is not None:
        kept, missed = _steps(frozenset(rule.steps), series)
    elif rule.tags is not None:
        kept, missed = _tags(rule.tags, series)
    elif rule.final:
        kept, missed = _final(series)
    else:
        kept, missed = _calendar(cast("Calendar", rule.kind), getattr(rule, rule.kind), series)
    return Verdict(kind=rule.kind, rule=rule_text(rule), kept=kept, missed=missed)


_Word = tuple[dict[Attempt, str], Callable[[Candidate], str]]


def _last(count: int, series: Series) -> _Word:
    kept = {c.attempt: f"last #{place} by time of saving" for place, c in enumerate(series.by_saving[:count], start=1)}
    kept.update({c.attempt: f"last #{place}" for place, c in enumerate(series.by_step[:count], start=1)})

    def missed(candidate: Candidate) -> str:
        by_step, by_saving = _place(candidate, series.by_step), _place(candidate, series.by_saving)
        return f"it is #{by_step}" if by_step == by_saving else f"it is #{by_step} by step and #{by_saving} by time of saving"

    return kept, missed


def _place(candidate: Candidate, ranked: Sequence[Candidate]) -> int:
    return next(place for place, c in enumerate(ranked, start=1) if c.attempt == candidate.attempt)


def _within(seconds: float, series: Series) -> _Word:
    if not series.by_time:
        return {}, lambda _: "all are dated in the future"
    newest = series.by_time[0]

    def age_s(candidate: Candidate) -> float:
        return (newest.committed_at - candidate.committed_at).total_seconds()

    def missed(candidate: Candidate) -> str:
        if age_s(candidate) < 0:
            return "it is dated in the future"
        return f"it is {format_duration(age_s(candidate))} older than the newest, step {newest.attempt.step}"

    text = f"within {format_duration(seconds)}"
    return {c.attempt: text for c in series.by_time if age_s(c) <= seconds}, missed


def _calendar(kind: Calendar, count: int, series: Series) -> _Word:
    newest: dict[str, Candidate] = {}  # of each period, the newest period first
    for candidate in series.by_time:
        newest.setdefault(period_of(candidate.committed_at, kind, series.zone), candidate)
    kept = {c.attempt: f"{kind} #{place} ({period})" for place, (period, c) in enumerate(newest.items(), start=1) if place <= count}

    def missed(candidate: Candidate) -> str:
        period = period_of(candidate.committed_at, kind, series.zone)
        stands = newest.get(period)
        if stands is None or stands.committed_at < candidate.committed_at:
            return "it is dated in the future"
        if stands.attempt != candidate.attempt:
            return f"step {stands.attempt.step} stands for {period}"
        return f"{period} is #{list(newest).index(period) + 1} of the periods that have one"

    return kept, missed


def _best(rule: BestRule, series: Series) -> _Word:
    ranked = [c for c in series.by_step if rule.missing == "worst" or rule.metric in c.metrics]
    ranked.sort(key=lambda c: _worth(rule, c))  # stable: of equals the newer one stands first
    kept = {}
    if rule.missing == "keep":
        kept = {c.attempt: f"no {rule.metric} yet" for c in series.by_step if rule.metric not in c.metrics}
    kept.update({c.attempt: f"best {rule.metric} #{place} ({_shown(rule, c)})" for place, c in enumerate(ranked[: rule.count], start=1)})
    return kept, lambda c: f"it is #{_place(c, ranked)} of {len(ranked)} ({_shown(rule, c)})"


def _worth(rule: BestRule, candidate: Candidate) -> tuple[int, float]:
    """Sorts the best first; behind all numbers NaN, behind that what has none."""
    value = candidate.metrics.get(rule.metric)
    if value is None:
        return 2, 0.0
    if math.isnan(value):
        return 1, 0.0
    return 0, -value if rule.mode == "max" else value


def _shown(rule: BestRule, candidate: Candidate) -> str:
    value = candidate.metrics.get(rule.metric)
    return "missing" if value is None else f"{value:.6g}"


def _every(steps: int, series: Series) -> _Word:
    kept = {c.attempt: f"every {steps}" for c in series.by_step if c.attempt.step % steps == 0}
    return kept, lambda c: f"{c.attempt.step} is no multiple of {steps}"


def _steps(steps: frozenset[int], series: Series) -> _Word:
    kept = {c.attempt: f"step {c.attempt.step} is named" for c in series.by_step if c.attempt.step in steps}
    return kept, lambda c: f"{c.attempt.step} is not among them"


def _tags(patterns: tuple[str, ...], series: Series) -> _Word:
    kept = {}
    for candidate in series.by_step:
        pattern = next((p for p in patterns if candidate.tags and _matches(candidate.tags, p)), None)
        if pattern is not None:
            kept[candidate.attempt] = f"tags {pattern}"

    def missed(candidate: Candidate) -> str:
        return f"none of its tags matches ({format_some(candidate.tags, 5)})" if candidate.tags else "it has no tag"

    return kept, missed


def _matches(tags: tuple[str, ...], pattern: str) -> bool:
    return all(any(fnmatchcase(tag, part.strip()) for tag in tags) for part in pattern.split("+"))


def _final(series: Series) -> _Word:
    return {c.attempt: "final" for c in series.by_step if c.final}, lambda _: "it was not saved as the final one"
