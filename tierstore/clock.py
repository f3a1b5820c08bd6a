"""The clock, injected everywhere: wall time steers policy, monotonic time steers deadlines, neither steers safety."""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone
from typing import Protocol

__all__ = ["Clock", "SystemClock", "parse_utc", "utc_text", "when_text"]

_WRITTEN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")


class Clock(Protocol):
    """What the code may know about time."""

    def now(self) -> datetime:
        """The aware UTC wall time."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def monotonic(self) -> float:
        return time.monotonic()


def utc_text(at: datetime) -> str:
    """Writes an aware time as ``2026-11-29T16:30:00.123456Z``."""
    if at.tzinfo is None:
        raise ValueError("times are aware UTC")
    return at.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def when_text(at: datetime, now: datetime | None = None) -> str:
    """A time as people read it, everywhere: ``30 Nov 14:02Z``; with the year where it is not that of `now`, or `now` is not known."""
    utc = at.astimezone(timezone.utc)
    return utc.strftime("%d %b %H:%MZ" if now is not None and utc.year == now.year else "%d %b %Y %H:%MZ").lstrip("0")


def parse_utc(text: str) -> datetime:
    """Reads what `utc_text` wrote; raises ValueError on anything else."""
    if _WRITTEN.fullmatch(text):  # many times faster than strptime, of which a long catalog has many
        return datetime.fromisoformat(f"{text[:-1]}+00:00")
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
