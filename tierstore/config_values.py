"""The kinds of value that a configuration holds, and the base of its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from tierstore.units import parse_duration, parse_percent, parse_rate, parse_size

__all__ = ["Count", "Duration", "Model", "Percent", "Rate", "Size", "Text", "Texts", "Whole", "one_of"]

_T = TypeVar("_T", int, float)


class Model(BaseModel):
    """Immutable, knows its keys, and shows no input in its errors (it may hold credentials).

    In a document a field goes by its alias, which has no unit (``within: 12h``); in Python by its name, which has one (``within_s``).
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        validate_by_alias=True,
        validate_by_name=True,
        defer_build=True,  # most models are parts of another, whose validator holds theirs: a start need not build them all
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Only what is set: a keep rule has eleven fields that are not."""
        return (item for item in super().__repr_args__() if item[1] is not None)


def _with_unit(parse: Callable[[object], _T]) -> BeforeValidator:
    """Documents must say units (validation has a context there); Python code may pass plain bytes, seconds and shares."""

    def read(value: Any, info: ValidationInfo) -> Any:
        if info.context is None and isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        return parse(value)

    return BeforeValidator(read)


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("it must be a whole number, not true or false")
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)  # what ${NAME} expanded to
    if isinstance(value, (str, float)):
        raise ValueError("it must be a whole number")
    return value


Size = Annotated[int, _with_unit(parse_size), Field(gt=0, examples=["96GiB"])]
"""Bytes."""

Rate = Annotated[int, _with_unit(parse_rate), Field(gt=0, examples=["2GiB/s"])]
"""Bytes per second."""

Duration = Annotated[float, _with_unit(parse_duration), Field(gt=0, allow_inf_nan=False, examples=["12h"])]
"""Seconds."""

Percent = Annotated[float, _with_unit(parse_percent), Field(gt=0, le=1, examples=["85%"])]
"""A share above 0 and up to 1."""

Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0, examples=[0])]
"""A whole number from 0."""

Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10**9, examples=[5])]
"""A whole number from 1."""

Text = Annotated[str, Field(min_length=1, max_length=1000)]
"""Text that is not empty."""

Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
"""A list of texts that is not empty."""


def one_of(model: Model, noun: str) -> str:
    """The name of the one field of `model` that is set.

    Raises:
        ValueError: None or several are; the message names the keys that there are.
    """
    fields = type(model).model_fields
    given = [name for name in fields if getattr(model, name) is not None]
    if len(given) == 1:
        return given[0]
    keys = ", ".join(field.alias or name for name, field in fields.items())
    if not given:
        raise ValueError(f"{noun} has exactly one of the keys {keys}; it has none")
    told = " and ".join(fields[name].alias or name for name in given)
    raise ValueError(f"{noun} has exactly one key, not {told} together")
