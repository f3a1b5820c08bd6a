"""Sizes, rates, durations and percentages as people write them: always with a unit, never zero."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

from tierstore.errors import UsageError

__all__ = [
    "format_duration",
    "format_rate",
    "format_size",
    "format_some",
    "parse_duration",
    "parse_percent",
    "parse_rate",
    "parse_size",
]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SIZES: Mapping[str, int] = {
    **{unit: 1024**power for power, unit in enumerate(_BINARY)},
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB", "PB", "EB"), start=1)},
}
_DURATIONS: Mapping[str, Fraction] = {
    "w": Fraction(604800),
    "d": Fraction(86400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 1000),
}
_MAX_NBYTES = 2**63 - 1
_MAX_DURATION_S = 100 * 366 * 86400  # a century: anything longer is a slip of the keyboard

_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([A-Za-zµ]*)")
_PERCENT = re.compile(rf"({_NUMBER})\s*%")


def parse_size(value: object) -> int:
    """Reads ``96GiB``, ``1.5 TiB``, ``200MB`` or ``512B`` as bytes (a fraction of a byte is dropped).

    Raises:
        UsageError: No or an unknown unit, zero, negative, or not a number (also a ValueError).
    """
    return _size(value, "a size", "96GiB")


def parse_rate(value: object) -> int:
    """Reads ``2GiB/s`` as bytes per second.

    Raises:
        UsageError: As for `parse_size`, or without ``/s``.
    """
    text = _text(value, "a rate", "2GiB/s")
    if not text.endswith("/s"):
        raise UsageError(
            f"{text!r} is not a rate: it does not end in '/s'", hint=f"write {text}/s" if text[-1:] == "B" else "write e.g. 2GiB/s"
        )
    return _size(text[:-2], "a rate", "2GiB/s", shown=text)


def parse_duration(value: object) -> float:
    """Reads ``12h``, ``1h30m``, ``30s``, ``7d``, ``2w`` or ``500ms`` as seconds; larger units stand first.

    Raises:
        UsageError: No or an unknown unit, zero, negative, out of order, or longer than a century.
    """
    text = _text(value, "a duration", "12h or 1h30m")
    rest, total, allowed = text, Fraction(0), list(_DURATIONS)
    while rest:
        found = _QUANTITY.match(rest)
        if not found:
            raise UsageError(f"{text!r} is not a duration", hint="write e.g. 12h, 1h30m or 30s")
        unit = found[2]
        if unit not in _DURATIONS:
            what = f"has no unit {unit!r} that is known" if unit else "has no unit"
            raise UsageError(f"{text!r} {what}", hint=f"units are {', '.join(_DURATIONS)}: write e.g. {_plain(found[1])}m")
        if unit not in allowed:
            raise UsageError(f"{text!r} is not a duration: {unit!r} is repeated or out of order", hint="write e.g. 1h30m")
        del allowed[: allowed.index(unit) + 1]
        total += Fraction(found[1]) * _DURATIONS[unit]
        rest = rest[found.end() :].lstrip()
    if not 0 < total <= _MAX_DURATION_S:
        raise UsageError(f"{text!r} must be more than nothing and less than a century", hint="write e.g. 12h, 1h30m or 30s")
    return float(total)


def parse_percent(value: object) -> float:
    """Reads ``85%`` as 0.85; above 0 % and up to 100 %.

    Raises:
        UsageError: No ``%``, or out of range.
    """
    text = _text(value, "a percentage", "85%")
    found = _PERCENT.fullmatch(text)
    if not found:
        raise UsageError(f"{text!r} is not a percentage", hint="write e.g. 85%")
    share = Fraction(found[1]) / 100
    if not 0 < share <= 1:
        raise UsageError(f"{text!r} is out of range", hint="percentages go from above 0% to 100%")
    return float(share)


def format_size(nbytes: int) -> str:
    """Writes bytes in binary units with about three digits: ``812GiB``, ``1.5MiB``, ``0B``."""
    if nbytes < 0:
        raise ValueError(f"a size is not negative: {nbytes}")
    power = max(0, (nbytes.bit_length() - 1) // 10)
    power = min(power, len(_BINARY) - 1)
    tenths = round(Fraction(nbytes * 10, 1024**power))
    if tenths >= 10240 and power < len(_BINARY) - 1:
        tenths, power = 10, power + 1
    whole, tenth = divmod(tenths, 10)
    if tenth and whole < 100:
        return f"{whole}.{tenth}{_BINARY[power]}"
    return f"{round(Fraction(tenths, 10))}{_BINARY[power]}"


def format_rate(nbytes_per_s: float) -> str:
    """Writes bytes per second: ``1.5GiB/s``."""
    return f"{format_size(round(nbytes_per_s))}/s"


def format_duration(seconds: float) -> str:
    """Writes seconds with at most two units: ``500ms``, ``45s``, ``1h30m``, ``3d``; ``0s`` for nothing, ``-`` in front of the past."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 0.9995:
        millis = round(seconds * 1000)
        return f"{millis}ms" if millis else "0s"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    # Rounding to the second of the two units first lets 59m59.9s become 1h, not 60m.
    large, small = (3600, 60) if total >= 3600 else (60, 1)
    if total >= 86400:
        large, small = 86400, 3600
    names = {86400: "d", 3600: "h", 60: "m", 1: "s"}
    first, second = divmod(round(total / small) * small, large)
    if large < 86400 and first * large >= large * (24 if large == 3600 else 60):
        return format_duration(first * large)
    return f"{first}{names[large]}" + (f"{second // small}{names[small]}" if second else "")


def format_some(items: Iterable[object], most: int) -> str:
    """The first `most` of `items` and how many more there are: ``a, b and 3 more``."""
    texts = list(map(str, items))
    return ", ".join(texts[:most]) + (f" and {len(texts) - most:,} more" if len(texts) > most else "")


def _size(value: object, what: str, example: str, shown: str = "") -> int:
    text = _text(value, what, example)
    shown = shown or text
    found = _QUANTITY.fullmatch(text)
    if not found:
        raise UsageError(f"{shown!r} is not {what}", hint=f"write e.g. {example}")
    number, unit = found[1], found[2]
    if unit not in _SIZES:
        near = [known for known in _SIZES if unit and known[0].upper() == unit[0].upper()]
        tail = "/s" if what == "a rate" else ""
        hint = " or ".join(f"{_plain(number)}{known}{tail}" for known in near) or f"{_plain(number)}GiB{tail}"
        raise UsageError(f"{shown!r} has no unit" + (f" that is known: {unit!r}" if unit else ""), hint=f"write {hint}")
    nbytes = int(Fraction(number) * _SIZES[unit])
    if not 0 < nbytes <= _MAX_NBYTES:
        raise UsageError(f"{shown!r} must be at least one byte and less than 8EiB", hint=f"write e.g. {example}")
    return nbytes


def _text(value: object, what: str, example: str) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise UsageError(f"{value!r} has no unit", hint=f"write {what} with its unit, e.g. {example}")
    raise UsageError(f"{value!r} is not {what}", hint=f"write e.g. {example}")


def _plain(number: str) -> str:
    return number if len(number) <= 12 else "1"
