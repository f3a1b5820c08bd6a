"""What a request costs: as configured, else as measured, robustly and within bounds; and the same plan every time for short loads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import load_config
from tierstore.tiers.costs import LOCAL_COST, MAX_GAP_NBYTES, MIN_GAP_NBYTES, REMOTE_COST, ReadSpeed, Speed, cost_of
from tierstore.tiers.session import Session

MIB = 1 << 20


def measured(speed: ReadSpeed, reads: list[tuple[int, float]], *, local: bool = False) -> Speed:
    for nbytes, seconds in reads:
        speed.note(nbytes, seconds)
    return speed.speed(local=local)


def reads_at(latency_s: float, bandwidth: float, sizes: list[int], *, count: int = 64) -> list[tuple[int, float]]:
    return [(sizes[i % len(sizes)], latency_s + sizes[i % len(sizes)] / bandwidth) for i in range(count)]


def test_a_gap_is_worth_what_passes_while_a_request_waits() -> None:
    assert cost_of(Speed(latency_s=0.010, bandwidth=100 * MIB), local=False).gap_nbytes == MIB
    assert cost_of(Speed(latency_s=0.004, bandwidth=50 * MIB), local=True).gap_nbytes == MIB // 5
    assert (LOCAL_COST.gap_nbytes, LOCAL_COST.concurrency, LOCAL_COST.pitch_nbytes) == (268_435, 4, 0)
    assert (REMOTE_COST.gap_nbytes, REMOTE_COST.concurrency, REMOTE_COST.pitch_nbytes) == (MIB, 32, 8 * MIB)


@given(st.floats(1e-9, 60), st.floats(1, 1e12), st.booleans())
def test_whatever_the_numbers_the_cost_stays_within_its_bounds(latency_s: float, bandwidth: float, local: bool) -> None:
    cost = cost_of(Speed(latency_s=latency_s, bandwidth=bandwidth), local=local)
    assert MIN_GAP_NBYTES <= cost.gap_nbytes <= MAX_GAP_NBYTES
    assert 4 <= cost.concurrency <= 64
    assert cost.pitch_nbytes == (
        0 if local else cost.span_nbytes // 2
    )  # a bucket's requests are counted however fast it is, a disk's never


def test_before_there_are_enough_reads_a_load_is_planned_as_ever() -> None:
    """Else the number of requests of a short load would depend on the weather."""
    few, small = ReadSpeed(), ReadSpeed()
    assert measured(few, [(8 * MIB, 9.0)] * 15) == measured(ReadSpeed(), [])
    assert measured(small, [(MIB, 9.0)] * 31) == measured(ReadSpeed(), [])
    assert small.cost(local=False) == REMOTE_COST
    assert small.cost(local=True) == LOCAL_COST


def test_latency_and_bandwidth_are_found_from_reads_of_several_lengths() -> None:
    found = measured(ReadSpeed(), reads_at(0.040, 50 * MIB, [MIB, 3 * MIB, 8 * MIB, 12 * MIB]))
    assert found.latency_s == pytest.approx(0.040, rel=0.01)
    assert found.bandwidth == pytest.approx(50 * MIB, rel=0.01)


def test_reads_that_hung_or_were_served_from_a_cache_say_nothing() -> None:
    reads = reads_at(0.040, 50 * MIB, [MIB, 3 * MIB, 8 * MIB, 12 * MIB])
    reads[3::9] = [(nbytes, 30.0) for nbytes, _ in reads[3::9]]
    reads[5::9] = [(nbytes, 1e-6) for nbytes, _ in reads[5::9]]
    random.Random(1).shuffle(reads)
    found = measured(ReadSpeed(), reads)
    assert found.latency_s == pytest.approx(0.040, rel=0.3)
    assert found.bandwidth == pytest.approx(50 * MIB, rel=0.3)


def test_from_reads_of_one_length_only_the_bandwidth_is_learned() -> None:
    found = measured(ReadSpeed(), reads_at(0.010, 25 * MIB, [8 * MIB]))
    assert found.latency_s == 0.010
    assert found.bandwidth == pytest.approx(25 * MIB, rel=0.01)


def test_what_is_configured_is_believed_and_the_rest_measured() -> None:
    reads = reads_at(0.050, 50 * MIB, [MIB, 8 * MIB])
    assert measured(ReadSpeed(latency_s=0.020, bandwidth=1.0), reads) == Speed(latency_s=0.020, bandwidth=1.0)
    assert measured(ReadSpeed(latency_s=0.050), reads).bandwidth == pytest.approx(50 * MIB, rel=0.01)
    assert measured(ReadSpeed(bandwidth=50 * MIB), reads).latency_s == pytest.approx(0.050, rel=0.01)
    assert ReadSpeed(latency_s=0.5).speed(local=True).latency_s == 0.5


def test_a_tier_that_changes_is_measured_anew() -> None:
    speed = ReadSpeed()
    assert measured(speed, reads_at(0.001, 400 * MIB, [MIB, 8 * MIB])).latency_s == pytest.approx(0.001, rel=0.01)
    assert measured(speed, reads_at(0.100, 20 * MIB, [MIB, 8 * MIB])).latency_s == pytest.approx(0.100, rel=0.01)


def test_times_that_do_not_grow_with_the_length_are_taken_for_latency_as_usual() -> None:
    found = measured(ReadSpeed(), [(nbytes, 0.05) for nbytes in (MIB, 8 * MIB)] * 32)
    assert found.latency_s == REMOTE_LATENCY_S
    assert found.bandwidth > 0


REMOTE_LATENCY_S = 0.010


def test_the_configuration_reaches_the_tier(tmp_path: Path) -> None:
    config = load_config(
        {
            "run": "r",
            "tiers": [{"uri": str(tmp_path / "a"), "read": {"latency": "3ms", "bandwidth": "10MiB/s"}}, str(tmp_path / "b")],
            "io": {"max_scratch": "64MiB"},
        }
    )
    with Session.open(config) as session:
        near, far = session.tiers
        assert near.speed.speed(local=True) == Speed(latency_s=0.003, bandwidth=10 * MIB)
        assert far.speed.cost(local=True) == LOCAL_COST
        assert session.tiers.scratch_nbytes == 64 * MIB
