"""The periods of the calendar rules: hours, days, weeks, months and years as a clock on the wall of a time zone shows them. Pure."""

from __future__ import annotations

from datetime import datetime, timezone, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo

__all__ = ["Calendar", "period_of", "zone_of"]

Calendar = Literal["hourly", "daily", "weekly", "monthly", "yearly"]


def zone_of(name: str) -> tzinfo:
    """The time zone of that name; UTC needs no database."""
    return timezone.utc if name == "UTC" else ZoneInfo(name)


def period_of(at: datetime, kind: Calendar, zone: tzinfo) -> str:
    """The period that `at` lies in: equal texts are one period.

    When the clock is put back, the hour that comes twice is two; a day has 23 or 25 hours then, and is one day. Weeks are those of
    ISO 8601, which begin on Monday and belong to the year of their Thursday.
    """
    try:
        local = at.astimezone(zone)
    except OverflowError:  # the first or the last day that a datetime can tell
        local = at.astimezone(timezone.utc)
    if kind == "hourly":
        return f"{local.year:04d}-{local.month:02d}-{local.day:02d} {local.hour:02d}h" + (" again" if local.fold else "")
    if kind == "daily":
        return f"{local.year:04d}-{local.month:02d}-{local.day:02d}"
    if kind == "weekly":
        iso = local.isocalendar()
        return f"{iso.year:04d}-W{iso.week:02d}"
    if kind == "monthly":
        return f"{local.year:04d}-{local.month:02d}"
    return f"{local.year:04d}"
