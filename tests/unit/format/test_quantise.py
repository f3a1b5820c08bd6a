"""Quantised moments: the errors that are promised, on any input; sizes; what can't be quantised; foreign bytes."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import FormatError
from tierstore.format.packed.types import Quantised
from tierstore.format.quantise import (
    FIRST_TINY,
    SCHEMES,
    SECOND_TINY,
    TOO_LARGE,
    decode_moment,
    encode_moment,
    encoded_nbytes,
    update_errors,
)
from tierstore.format.quantise_groups import groups_of
from tierstore.format.quantise_log import LOWEST_PLACE, OCTAVE, PLACE_RATIO, numbers_at, places_of

Name = Literal["q8", "q4"]
Kind = Literal["first", "second"]

BOTH: tuple[Name, Name] = ("q8", "q4")


def how(scheme: Name, kind: Kind, columns: int, first_column: int = 0) -> Quantised:
    return Quantised(scheme=scheme, kind=kind, columns=columns, first_column=first_column)


def through(values: Any, q: Quantised, zero: Any = None) -> Any:
    data = encode_moment(values, q, zero)
    assert data is not None
    assert len(data) == encoded_nbytes(values.size, q)
    return decode_moment(data, values.size, q)


def group_of_each(count: int, q: Quantised) -> list[Any]:
    """The numbers that share a group, found one by one, by what the guide says."""
    size = SCHEMES[q.scheme].group
    groups: dict[tuple[int, int], list[int]] = {}
    for i in range(count):
        row, column = divmod(q.first_column + i, q.columns)
        groups.setdefault((row, column // size) if q.columns >= size else (0, i // size), []).append(i)
    return [np.array(members) for members in groups.values()]


def some_moment(seed: int, count: int, octaves: float, zeros: float, signed: bool) -> Any:
    """Numbers over so many octaves, some zeros among them, anywhere in what float32 has."""
    rng = np.random.default_rng(seed)
    with np.errstate(under="ignore"):
        values = np.exp2(rng.uniform(max(-149.0, -octaves), 0, count) + rng.uniform(min(0.0, octaves - 149), 123))
        values = np.minimum(values, TOO_LARGE * 0.99).astype(np.float32)
    values[rng.random(count) < zeros] = rng.choice([0.0, -0.0])
    return values * rng.choice([-1, 1], count).astype(np.float32) if signed else values


runs = st.tuples(
    st.integers(0, 2**32),
    st.integers(1, 700),
    st.sampled_from([0.0, 0.01, 3.0, 12.0, 30.0, 80.0, 280.0]),
    st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    st.sampled_from([1, 3, 31, 32, 33, 64, 127, 128, 129, 200, 256, 5000]),
    st.floats(0, 0.999),
)


@pytest.mark.parametrize("scheme", BOTH)
@given(run=runs)
def test_first_moments_are_within_the_promised_error_and_never_larger_by_more_and_stay_as_they_are(scheme: Name, run: Any) -> None:
    seed, count, octaves, zeros, columns, where = run
    facts = SCHEMES[scheme]
    q = how(scheme, "first", columns, int(where * columns))
    m = some_moment(seed, count, octaves, zeros, True)
    decoded = through(m, q)
    assert np.isfinite(decoded).all()
    exact, made = m.astype(np.float64), decoded.astype(np.float64)
    assert (made[exact == 0] == 0).all()
    assert (np.signbit(made) == np.signbit(exact))[made != 0].all()
    assert (np.abs(made) <= np.abs(exact) * (1 + facts.first_error)).all()
    for members in group_of_each(count, q):
        top = np.abs(exact[members]).max()
        if top < FIRST_TINY:
            continue
        off = np.abs(made - exact)[members]
        assert (off <= np.maximum(facts.first_error * np.abs(exact[members]), facts.first_floor * top)).all()
    assert np.array_equal(through(decoded, q).view(np.uint32), decoded.view(np.uint32))


@pytest.mark.parametrize("scheme", BOTH)
@given(run=runs)
def test_second_moments_are_never_smaller_and_within_the_promised_error_and_stay_as_they_are(scheme: Name, run: Any) -> None:
    seed, count, octaves, zeros, columns, where = run
    facts = SCHEMES[scheme]
    q = how(scheme, "second", columns, int(where * columns))
    v = some_moment(seed, count, octaves, zeros, False)
    decoded = through(v, q)
    assert np.isfinite(decoded).all()
    exact, made = v.astype(np.float64), decoded.astype(np.float64)
    assert ((made == 0) == (exact == 0)).all()
    assert (made >= exact).all()
    for members in group_of_each(count, q):
        here = exact[members]
        if not here.any():
            continue
        floor = max(facts.second_floor * here.max(), SECOND_TINY)
        spread = np.log2(here.max() / max(here[here > 0].min(), floor)) if here.max() > floor else 0.0
        error = facts.second_error_of(max(spread, 0.0))
        assert (np.sqrt(made[members]) <= np.sqrt(np.where(here > 0, np.maximum(here, floor), 0)) * (1 + error)).all()
    assert np.array_equal(through(decoded, q), decoded)


@pytest.mark.parametrize("scheme", BOTH)
def test_the_promised_errors_are_those_of_the_guide(scheme: Name) -> None:
    facts = SCHEMES[scheme]
    if scheme == "q8":
        assert facts.first_error < 0.035
        assert facts.first_floor < 2**-11.9
        assert facts.second_error < 0.057
        assert facts.second_floor < 2**-39
    assert facts.second_error_of(0) < 0.002 if scheme == "q8" else facts.second_error_of(0) < 0.02


@pytest.mark.parametrize("scheme", BOTH)
def test_a_step_is_never_amplified_by_more_than_the_first_moments_error(scheme: Name) -> None:
    rng = np.random.default_rng(3)
    v = some_moment(5, 4096, 40.0, 0.1, False) * np.float32(1e-25)
    m = (rng.normal(0, 1, 4096) * np.sqrt(v)).astype(np.float32)
    m_hat, v_hat = through(m, how(scheme, "first", 512), v == 0), through(v, how(scheme, "second", 512))
    exact, decoded = (np.abs(a) / (np.sqrt(b, dtype=np.float64) + 1e-8) for a, b in ((m, v), (m_hat, v_hat)))
    assert (decoded <= exact * (1 + SCHEMES[scheme].first_error)).all()


@pytest.mark.parametrize("scheme", BOTH)
def test_where_the_second_moment_is_zero_the_first_one_becomes_zero(scheme: Name) -> None:
    m, zero = np.full(300, 0.5, dtype=np.float32), np.arange(300) % 3 == 0
    m[zero] = 1000.0
    decoded = through(m, how(scheme, "first", 300), zero)
    assert (decoded[zero] == 0).all()
    assert np.allclose(decoded[~zero], 0.5, rtol=0.01)  # and what was dropped is nobody's scale


@pytest.mark.parametrize("scheme", BOTH)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, TOO_LARGE, -TOO_LARGE])
def test_a_run_with_a_number_that_has_no_code_is_not_quantised(scheme: Name, bad: float) -> None:
    values = np.ones(1000, dtype=np.float32)
    values[777] = bad
    assert encode_moment(values, how(scheme, "first", 100)) is None
    assert encode_moment(values, how(scheme, "second", 100)) is None
    assert encode_moment(values, how(scheme, "first", 100), np.arange(1000) == 777) is not None


@pytest.mark.parametrize("scheme", BOTH)
def test_a_negative_second_moment_is_not_quantised_and_a_negative_zero_is_zero(scheme: Name) -> None:
    q = how(scheme, "second", 64)
    assert encode_moment(np.array([1.0, -1e-40], dtype=np.float32), q) is None
    assert through(np.array([1.0, -0.0, 0.0], dtype=np.float32), q)[1:].tolist() == [0.0, 0.0]
    assert not np.signbit(through(np.array([-0.0], dtype=np.float32), how(scheme, "first", 64)))[0]


@given(
    st.integers(0, 400),
    st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 100, 128, 300, 10**9]),
    st.floats(0, 0.999),
    st.sampled_from([32, 64, 128]),
)
def test_groups_put_every_number_in_its_place_and_back(count: int, columns: int, where: float, size: int) -> None:
    groups = groups_of(count, columns, int(where * columns), size)
    values = np.arange(1, count + 1)
    padded = groups.pad(values)
    assert padded.shape == (groups.count, size)
    assert np.array_equal(groups.unpad(padded), values)
    firsts = [int(row[row > 0][0]) - 1 for row in padded]
    wanted: dict[tuple[int, int], int] = {}
    for i in range(count):
        row, column = divmod(int(where * columns) + i, columns)
        wanted.setdefault((row, column // size) if columns >= size else (0, i // size), i)
    assert firsts == list(wanted.values())


@pytest.mark.parametrize(("count", "columns", "first"), [(-1, 4, 0), (4, 0, 0), (4, 4, 4), (4, 4, -1)])
def test_a_run_that_can_not_be_is_refused(count: int, columns: int, first: int) -> None:
    with pytest.raises(ValueError, match="a run of"):
        groups_of(count, columns, first, 32)


def test_every_number_is_put_at_the_lowest_place_whose_number_is_not_smaller() -> None:
    mantissas = np.arange(0, 1 << 23, 61, dtype=np.uint32)
    bits = np.concatenate([mantissas | np.uint32(e << 23) for e in (1, 127, 250)])
    places = places_of(bits)
    assert (numbers_at(places) >= bits).all()
    assert (numbers_at(np.maximum(places - 1, LOWEST_PLACE)) < bits)[places > LOWEST_PLACE].all()
    exact, made = bits.view(np.float32).astype(np.float64), numbers_at(places).view(np.float32).astype(np.float64)
    assert (made < exact * PLACE_RATIO).all()


def test_every_place_has_a_number_of_its_own_and_the_tables_are_the_same_everywhere() -> None:
    places = np.arange(LOWEST_PLACE, 255 * OCTAVE, dtype=np.int32)
    numbers = numbers_at(places)
    assert np.array_equal(places_of(numbers), places)
    assert (np.diff(numbers.astype(np.int64)) > 0).all()
    digest = hashlib.sha256(numbers_at(np.arange(127 * OCTAVE, 128 * OCTAVE, dtype=np.int32)).astype("<u4").tobytes()).hexdigest()
    assert digest[:16] == "2c323096bc541dea"


@pytest.mark.parametrize("scheme", BOTH)
@pytest.mark.parametrize("kind", ["first", "second"])
@given(raw=st.binary(min_size=0, max_size=400), count=st.integers(0, 300))
def test_foreign_bytes_become_numbers_or_a_format_error(scheme: Name, kind: Kind, raw: bytes, count: int) -> None:
    q = how(scheme, kind, 50, 7)
    exact = (raw * 200)[: encoded_nbytes(count, q)]
    for data in (raw, exact):
        try:
            decoded = decode_moment(data, count, q)
        except FormatError:
            continue
        assert decoded.shape == (count,)
        assert np.isfinite(decoded).all()


@pytest.mark.parametrize("scheme", BOTH)
@pytest.mark.parametrize("kind", ["first", "second"])
def test_every_code_of_a_written_scale_is_a_finite_number(scheme: Name, kind: Kind) -> None:
    facts = SCHEMES[scheme]
    q = how(scheme, kind, facts.group)
    data = encode_moment(np.geomspace(1e-30, 1, facts.group).astype(np.float32), q)
    assert data is not None
    heads = data[: 2 if kind == "first" else 3]
    every = bytes(range(256))[: len(data) - len(heads)] if scheme == "q8" else bytes(range(len(data) - len(heads)))
    assert np.isfinite(decode_moment(heads + every, facts.group, q)).all()
    zero = decode_moment(bytes(len(heads)) + every, facts.group, q)
    assert not zero.any()  # a group without a scale is one of zeros


@pytest.mark.parametrize("scheme", BOTH)
def test_encoding_is_the_same_whatever_lies_beside_a_run(scheme: Name) -> None:
    rng = np.random.default_rng(0)
    v = (rng.normal(0, 1e-3, 5 * 1000) ** 2).astype(np.float32)
    whole = through(v, how(scheme, "second", 1000))
    part = through(v[1000:3000], how(scheme, "second", 1000))
    assert np.array_equal(whole[1000:3000], part)


def test_errors_of_steps_add_up_and_are_none_where_nothing_changed() -> None:
    rng = np.random.default_rng(0)
    m, v = rng.normal(0, 1e-3, 200_000).astype(np.float32), (rng.normal(0, 1e-3, 200_000) ** 2).astype(np.float32)
    none = update_errors(m, v, m, v)
    assert (none.mean, none.max, none.amplification) == (0.0, 0.0, 1.0)
    assert none.cosine == pytest.approx(1)
    m_hat = m * np.float32(1.5)
    whole = update_errors(m, v, m_hat, v)
    parts = update_errors(m[:70_000], v[:70_000], m_hat[:70_000], v[:70_000]).merged(
        update_errors(m[70_000:], v[70_000:], m_hat[70_000:], v[70_000:])
    )
    assert whole.mean == pytest.approx(0.5)
    assert whole.amplification == pytest.approx(1.5)
    assert parts.mean == pytest.approx(whole.mean)
    assert parts.max == pytest.approx(whole.max)
    assert parts.count == whole.count
    assert update_errors(m[:0], v[:0], m[:0], v[:0]).mean == 0.0


def test_a_step_where_there_was_none_is_an_error_without_measure() -> None:
    zeros, ones = np.zeros(3, dtype=np.float32), np.ones(3, dtype=np.float32)
    assert update_errors(ones, zeros, ones, zeros).mean == np.inf
    assert update_errors(ones, zeros, zeros, zeros).mean == 0.0


def test_unknown_schemes_are_refused() -> None:
    q: Any = Quantised(scheme="q9", kind="first", columns=4, first_column=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q9"):
        encoded_nbytes(4, q)
