"""Typed access to a decoded document's fields: each mistake is a FormatError that names the document and the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tierstore.clock import parse_utc
from tierstore.errors import FormatError, UsageError
from tierstore.format.digest import check_digest
from tierstore.names import MAX_STEP, check_run

__all__ = ["MAX_RANKS", "Fields"]

MAX_RANKS = 10_000_000
MAX_NBYTES = (1 << 62) - 1
_SAVE_ID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of one document or of an object within it.

    Attributes:
        what: The document's name, for messages.
        body: The decoded JSON object.
    """

    what: str
    body: Mapping[str, Any]

    def error(self, field: str, problem: str) -> FormatError:
        return FormatError(f"{self.what}: field {field!r} {problem}", hint="the file is foreign or damaged: run `tierstore verify`")

    def get(self, field: str) -> Any:
        if field not in self.body:
            raise self.error(field, "is missing")
        return self.body[field]

    def text(self, field: str, *, max_chars: int = 1000, pattern: re.Pattern[str] | None = None) -> str:
        value = self.get(field)
        if not isinstance(value, str) or len(value) > max_chars or not (value.isascii() or _is_unicode(value)):
            raise self.error(field, f"is not a text of at most {max_chars} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise self.error(field, f"has the malformed value {value[:100]!r}")
        return value

    def integer(self, field: str, *, low: int = 0, high: int = MAX_NBYTES) -> int:
        value = self.get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.error(field, f"is not an integer from {low} to {high}: {str(value)[:60]}")
        return value

    def number(self, field: str) -> float:
        value = self.get(field)
        if type(value) not in (int, float):
            raise self.error(field, "is not a number")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.get(field)
        if type(value) is not bool:
            raise self.error(field, "is neither true nor false")
        return value

    def items(self, field: str, *, max_count: int) -> list[Any]:
        value = self.get(field)
        if not isinstance(value, list) or len(value) > max_count:
            raise self.error(field, f"is not a list of at most {max_count:,} items")
        return value

    def mapping(self, field: str) -> dict[str, Any]:
        value = self.get(field)
        if not isinstance(value, dict):
            raise self.error(field, "is not an object")
        return value

    def at(self, field: str) -> datetime:
        try:
            return parse_utc(self.text(field, max_chars=40))
        except ValueError as error:
            raise self.error(field, f"is not a time like 2026-11-29T16:30:00.000000Z: {error}") from error

    def digest(self, field: str) -> str:
        return check_digest(self.get(field), f"{self.what}: field {field!r}")

    def run(self, field: str = "run") -> str:
        try:
            return check_run(self.text(field))
        except UsageError as error:
            raise self.error(field, f"can't name a run: {error.message}") from error

    def step(self, field: str = "step") -> int:
        return self.integer(field, high=MAX_STEP)

    def save_id(self, field: str = "save_id") -> str:
        return self.text(field, pattern=_SAVE_ID)

    def within(self, field: str, value: object) -> Fields:
        """The fields of an object inside a list."""
        if not isinstance(value, dict):
            raise self.error(field, "holds something that is not an object")
        return Fields(what=f"{self.what}: {field}", body=value)


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogates."""
    return not any(0xD800 <= ord(c) <= 0xDFFF for c in text)
