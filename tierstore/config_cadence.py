"""When to save, as it is written under ``save.every``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from tierstore.config_values import Count, Duration, Model, Percent, Text, one_of
from tierstore.errors import UsageError
from tierstore.units import parse_duration

__all__ = ["AutoEvery", "BetterEvery", "DynamicEvery", "SaveEvery", "parse_every"]

_WRITTEN = "write a number of steps (500), a time ('10m'), or what stands under save.every: {'auto': {'mtbf': '3h'}}"


class AutoEvery(Model):
    """An interval computed from the measured cost of a save and the mean time between failures, in seconds."""

    mtbf_s: Duration | None = Field(None, alias="mtbf")
    """Mean time between failures of the whole job; None: observed from the run's own history."""
    least_s: Duration | None = Field(None, alias="least")
    """Never more often than this."""
    most_s: Duration | None = Field(None, alias="most")
    """Never less often than this."""

    @model_validator(mode="after")
    def _is_an_interval(self) -> AutoEvery:
        if self.least_s is not None and self.most_s is not None and self.least_s > self.most_s:
            raise ValueError("least is longer than most")
        return self


class BetterEvery(Model):
    """A save is due when a metric is better than it was at any save before."""

    metric: Text
    mode: Literal["min", "max"]
    by: Annotated[float, Field(ge=0, allow_inf_nan=False, examples=[0.01])] = 0.0
    """How much better it has to be, in the metric's own unit."""


class DynamicEvery(Model):
    """Denser while a loss moves, sparser while it is flat: due when it has moved by `change` since the last save, in steps between."""

    metric: Text
    change: Percent = 0.02
    """Share of the metric's size at the last save."""
    least: Count = 1
    """Never sooner than so many steps after the last save."""
    most: Count
    """Never later."""

    @model_validator(mode="after")
    def _is_an_interval(self) -> DynamicEvery:
        if self.least > self.most:
            raise ValueError("least is more than most")
        return self


class SaveEvery(Model):
    """When a save is due: exactly one field is set."""

    steps: Count | None = None
    seconds: Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False, examples=[600])] | None = None
    better: BetterEvery | None = None
    dynamic: DynamicEvery | None = None
    auto: AutoEvery | None = None
    any: Annotated[tuple[SaveEvery, ...], Field(min_length=1, examples=["[{steps: 500}, {seconds: 600}]"])] | None = None
    """Due when any of these rules says so."""

    @model_validator(mode="after")
    def _has_one_key(self) -> SaveEvery:
        one_of(self, "every")
        return self

    @property
    def rules(self) -> tuple[SaveEvery, ...]:
        """The single rules: itself, or those of `any`."""
        return tuple(rule for one in self.any for rule in one.rules) if self.any is not None else (self,)

    @property
    def by_step_alone(self) -> bool:
        """Whether the step number alone decides, so that all ranks decide alike without a word."""
        return all(rule.steps is not None for rule in self.rules)


def parse_every(value: SaveEvery | Mapping[str, Any] | int | str) -> SaveEvery:
    """Reads a rule that was given as an argument: as in the configuration, or a number of steps, or a time.

    Raises:
        UsageError: It is no such rule.
    """
    if isinstance(value, SaveEvery):
        return value
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return SaveEvery(steps=value)
        if isinstance(value, str):
            return SaveEvery(seconds=parse_duration(value))
        return SaveEvery.model_validate(value)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}".removeprefix(": ") for e in error.errors())
        raise UsageError(f"every={value!r} is no rule: {told}", hint=_WRITTEN) from error
    except UsageError as error:
        raise UsageError(f"every={value!r} is no rule: {error.message}", hint=_WRITTEN) from error
