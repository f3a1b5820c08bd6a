"""The retention policy as it is written: what is kept, where, and how carefully the rest goes. Parsed here, executed elsewhere."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, get_args
from zoneinfo import ZoneInfo, available_timezones

from pydantic import AfterValidator, Field, field_validator, model_validator

from tierstore.config_values import Count, Duration, Model, Percent, Size, Text, Texts, Whole, one_of
from tierstore.errors import UsageError

__all__ = [
    "BestRule",
    "EveryRule",
    "EvictConfig",
    "GcConfig",
    "KeepRule",
    "Match",
    "Override",
    "ProtectConfig",
    "RetentionConfig",
    "RetentionOverride",
    "RuleKind",
    "TierRetention",
]

RuleKind = Literal["last", "every", "within", "hourly", "daily", "weekly", "monthly", "yearly", "best", "steps", "tags", "final"]
"""What a keep rule goes by."""

_DAY_S = 86400.0


class EveryRule(Model):
    """Keeps steps that are a multiple of `steps`."""

    steps: Count


class BestRule(Model):
    """Keeps the `count` best by a metric; NaN ranks worst.

    `missing` says what becomes of checkpoints without the metric: ``keep`` (it may arrive later) or ``worst``.
    """

    metric: Text
    mode: Literal["min", "max"]
    count: Count = 1
    missing: Literal["keep", "worst"] = "keep"


class KeepRule(Model):
    """One rule: exactly one field is set, and `kind` names it. A checkpoint is kept if any rule matches."""

    last: Count | None = None
    every: EveryRule | None = None
    within_s: Duration | None = Field(None, alias="within")
    """Age in seconds, counted from the newest checkpoint, not from now."""
    hourly: Count | None = None
    daily: Count | None = None
    weekly: Count | None = None
    monthly: Count | None = None
    yearly: Count | None = None
    best: BestRule | None = None
    steps: Annotated[tuple[Whole, ...], Field(min_length=1, examples=[[0, 1000]])] | None = None
    tags: Annotated[Texts, Field(examples=[["release/*"]])] | None = None
    """Patterns; any of them matches, and in one pattern ``a+b`` means both."""
    final: Literal[True] | None = None

    @model_validator(mode="after")
    def _has_one_key(self) -> KeepRule:
        one_of(self, "a rule")
        return self

    @field_validator("tags")
    @classmethod
    def _no_empty_tag(cls, tags: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for pattern in tags or ():
            if not all(part.strip() for part in pattern.split("+")):
                raise ValueError(f"the pattern {pattern!r} has an empty tag")
        return tags

    @property
    def kind(self) -> RuleKind:
        """Which rule it is."""
        name = one_of(self, "a rule").removesuffix("_s")
        return next(kind for kind in get_args(RuleKind) if kind == name)


Keep = Annotated[tuple[KeepRule, ...], Field(min_length=1, examples=["[{last: 5}]"])]


class EvictConfig(Model):
    """When a tier makes room before its rules ask for it. Shares are of the tier's capacity."""

    high_watermark: Percent | None = None
    low_watermark: Percent | None = None
    min_free_nbytes: Size | None = Field(None, alias="min_free")

    @model_validator(mode="after")
    def _is_an_interval(self) -> EvictConfig:
        if (self.high_watermark is None) != (self.low_watermark is None):
            raise ValueError("high_watermark and low_watermark go together: one starts evicting, the other ends it")
        if self.high_watermark is not None and self.low_watermark is not None and self.low_watermark >= self.high_watermark:
            raise ValueError("low_watermark must be below high_watermark")
        if self.high_watermark is None and self.min_free_nbytes is None:
            raise ValueError("it says nothing: give high_watermark and low_watermark, or min_free")
        return self


class TierRetention(Model):
    """What one tier may drop earlier than the store does, never below `ProtectConfig`."""

    keep: Keep | None = None
    evict: EvictConfig | None = None
    max_nbytes: Size | None = Field(None, alias="max_bytes")

    @model_validator(mode="after")
    def _says_something(self) -> TierRetention:
        if self.keep is None and self.evict is None and self.max_nbytes is None:
            raise ValueError("it says nothing: give keep, evict or max_bytes, or leave the tier out")
        return self


class ProtectConfig(Model):
    """What no rule gets below."""

    min_copies: Count = 1
    min_keep: Count = 1
    min_age_s: Duration = Field(3600.0, alias="min_age")


class GcConfig(Model):
    """How carefully what expired is freed (PROTOCOLS.md §6)."""

    undelete_window_s: Duration = Field(_DAY_S, alias="undelete_window")
    orphan_grace_s: Duration = Field(_DAY_S, alias="orphan_grace")
    lease_ttl_s: Duration = Field(600.0, alias="lease_ttl")
    max_clock_skew_s: Duration = Field(300.0, alias="max_clock_skew")
    max_delete_fraction: Percent = 0.5
    multipart_grace_s: Duration = Field(_DAY_S, alias="multipart_grace")
    max_deletes_per_s: Count = 200
    """Files a second and a tier: deletion stays out of the way of saves."""


def _check_group_by(keys: tuple[str, ...]) -> tuple[str, ...]:
    if keys not in (("run",), ("run", "tags")):
        raise ValueError("write [run], or [run, tags] for series of their own within a run")
    return keys


GroupBy = Annotated[tuple[Literal["run", "tags"], ...], Field(min_length=1, examples=[["run"]]), AfterValidator(_check_group_by)]
TierPolicies = Annotated[dict[str, TierRetention], Field(min_length=1)]


def _check_timezone(name: str | None) -> str | None:
    if name is None or name == "UTC":  # UTC needs no time zone database
        return name
    try:
        ZoneInfo(name)
    except (ValueError, OSError, LookupError) as error:
        near = difflib.get_close_matches(name, available_timezones(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "write a name such as UTC or Europe/Berlin"
        raise UsageError(f"no time zone {name!r} is known on this machine", hint=hint) from error
    return name


class RetentionConfig(Model):
    """The policy of a store. Without one, nothing is ever deleted."""

    group_by: GroupBy = ("run",)
    """What ranks among each other: the checkpoints of a run, or those of a run that have the same tags."""
    timezone: Text = "UTC"
    """Where the days and weeks of the calendar rules begin."""
    keep: Keep
    tiers: TierPolicies | None = None
    protect: ProtectConfig = ProtectConfig()
    gc: GcConfig = GcConfig()

    _timezone_exists = field_validator("timezone")(_check_timezone)


class RetentionOverride(Model):
    """What differs for some runs: each key that is given replaces the store's, whole."""

    group_by: GroupBy | None = None
    timezone: Text | None = None
    keep: Keep | None = None
    tiers: TierPolicies | None = None
    protect: ProtectConfig | None = None
    gc: GcConfig | None = None

    _timezone_exists = field_validator("timezone")(_check_timezone)

    @model_validator(mode="after")
    def _says_something(self) -> RetentionOverride:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError("it says nothing: give keep or another key of retention")
        return self


class Match(Model):
    """Which runs: a shell pattern of the run's name, where ``*`` also matches ``/``."""

    run: Text


class Override(Model):
    """Another policy for matching runs; of several that match, the first counts."""

    match: Match
    retention: RetentionOverride
