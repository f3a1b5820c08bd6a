"""Sizes, rates, durations and percentages: units are required, zero is refused, what is written is read back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import UsageError
from tierstore.units import (
    format_duration,
    format_rate,
    format_size,
    format_some,
    parse_duration,
    parse_percent,
    parse_rate,
    parse_size,
)

BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512B", 512),
        ("96GiB", 96 * 2**30),
        ("1.5GiB", 3 * 2**29),
        (" 2 TiB ", 2**41),
        ("200MB", 200_000_000),
        ("0.5KiB", 512),
        ("1PB", 10**15),
    ],
)
def test_sizes_are_read_exactly(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("96", "no unit"),
        (96, "no unit"),
        (0, "no unit"),
        (float("nan"), "no unit"),
        ("96G", "no unit that is known: 'G'"),
        ("96gib", "no unit that is known: 'gib'"),
        ("0GiB", "at least one byte"),
        ("0.1B", "at least one byte"),
        ("9EiB", "less than 8EiB"),
        ("-1GiB", "not a size"),
        ("nanGiB", "not a size"),
        ("1e3MiB", "not a size"),
        ("1,5GiB", "not a size"),
        ("1_000MiB", "not a size"),
        ("٣GiB", "not a size"),
        ("", "not a size"),
        ("GiB", "not a size"),
        ("9" * 400 + "GiB", "not a size"),
        (True, "not a size"),
        (None, "not a size"),
        ([1], "not a size"),
    ],
)
def test_a_size_without_unit_zero_negative_or_nonsense_is_refused(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_size(value)


@pytest.mark.parametrize(("text", "hint"), [("96G", "96GiB or 96GB"), ("96gb", "96GiB or 96GB"), ("96", "96GiB"), ("5x", "5GiB")])
def test_the_hint_of_a_wrong_size_can_be_pasted(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.hint == f"write {hint}"
    assert parse_size(hint.split(" or ")[0]) > 0


def test_a_rate_is_a_size_per_second() -> None:
    assert parse_rate("2GiB/s") == 2**31
    assert parse_rate("100 MB/s") == 100_000_000


@pytest.mark.parametrize("value", ["2GiB", "2GiB/h", "/s", "0B/s", "2/s", 5, None, "2gb/s"])
def test_a_rate_without_its_unit_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"rate|unit|byte"):
        parse_rate(value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12h", 43200.0),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("30s", 30.0),
        ("7d", 604800.0),
        ("500ms", 0.5),
        ("2w", 1209600.0),
        ("1.5h", 5400.0),
        ("1h 30m", 5400.0),
        ("1d12h", 129600.0),
    ],
)
def test_durations_are_read_exactly(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("12", "no unit"),
        (600, "no unit"),
        ("10min", "no unit 'min'"),
        ("1H", "no unit 'H'"),
        ("30m1h", "out of order"),
        ("1h1h", "repeated"),
        ("0s", "more than nothing"),
        ("1000000000d", "century"),
        ("-5m", "not a duration"),
        ("1h-5m", "not a duration"),
        ("", "more than nothing"),
        ("inf", "not a duration"),
        (None, "not a duration"),
    ],
)
def test_a_duration_without_unit_zero_negative_or_nonsense_is_refused(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_duration(value)


def test_percentages_are_shares() -> None:
    assert parse_percent("85%") == 0.85
    assert parse_percent("100 %") == 1.0
    assert parse_percent("0.5%") == 0.005


@pytest.mark.parametrize("value", ["85", 85, 0.85, "0%", "101%", "-5%", "nan%", "", None])
def test_a_percentage_out_of_range_or_without_sign_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"percentage|range|unit"):
        parse_percent(value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0B"),
        (1, "1B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (2**20 - 1, "1MiB"),
        (812 * 2**30, "812GiB"),
        (150 * 2**20 + 2**19, "150MiB"),
        (2**70, "1024EiB"),
    ],
)
def test_sizes_are_written_short(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_a_negative_size_is_not_written() -> None:
    with pytest.raises(ValueError, match="negative"):
        format_size(-1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0004, "0s"),
        (0.5, "500ms"),
        (0.9996, "1s"),
        (45, "45s"),
        (59.7, "1m"),
        (300, "5m"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (3599.9, "1h"),
        (3600 * 24 - 20, "1d"),
        (259200, "3d"),
        (100_000, "1d4h"),
        (-300, "-5m"),
    ],
)
def test_durations_are_written_with_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_rates_are_written_per_second() -> None:
    assert format_rate(1.5 * 2**30) == "1.5GiB/s"


@given(st.integers(1, 1023), st.sampled_from(sorted(BINARY)))
def test_a_whole_number_of_binary_units_survives_a_round_trip(count: int, unit: str) -> None:
    nbytes = count * BINARY[unit]
    assert format_size(nbytes) == f"{count}{unit}"
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.integers(1, 999), st.sampled_from(sorted(DECIMAL)))
def test_decimal_units_are_powers_of_a_thousand(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * DECIMAL[unit]


@given(st.integers(1, 2**62))
def test_a_written_size_is_within_five_percent(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes / 20


@given(st.integers(1, 10**9))
def test_a_written_duration_is_within_five_percent(seconds: int) -> None:
    assert abs(parse_duration(format_duration(seconds)) - seconds) <= seconds / 20


@given(st.integers(0, 99), st.integers(0, 23))
def test_days_and_hours_survive_a_round_trip(days: int, hours: int) -> None:
    seconds = (days * 24 + hours) * 3600
    if seconds:
        assert parse_duration(format_duration(seconds)) == seconds


@given(st.text(max_size=20), st.sampled_from([parse_size, parse_rate, parse_duration, parse_percent]))
def test_any_text_is_read_or_refused_with_a_hint(text: str, parse: Callable[[object], float]) -> None:
    try:
        value, hint = parse(text), "read"
    except UsageError as refused:
        value, hint = 1, refused.hint
    assert value > 0
    assert hint


def test_long_lists_are_cut_and_say_how_much_is_left_out() -> None:
    assert format_some([], 2) == ""
    assert format_some(["a", "b"], 2) == "a, b"
    assert format_some(range(1234), 2) == "0, 1 and 1,232 more"
