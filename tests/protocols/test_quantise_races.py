"""Two processes with different `quantise` for one tier copy a checkpoint at the same time: the log says what the bytes are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packed_tiers_kit import Place, adam_state

from tierstore.testing.equality import assert_same_state
from tierstore.tiers import copies
from tierstore.tiers.catalog import scan
from tierstore.tiers.copies import Copied, copy_checkpoint, copy_payload, record_replica
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.log import append
from tierstore.tiers.log_copies import copy_records
from tierstore.tiers.quantised import Shards, look_at_shards
from tierstore.tiers.session import Session
from tierstore.tiers.verify import verify
from tierstore.tiers.view import observe


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


class Process:
    """One that copies step 1 to the far tier, by its own configuration of that."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._context = CopyContext.make(session.tiers, session.clock)
        self._far = session.tiers.get("far")
        info = session.run(scan(session.tiers, "r")).find(1)
        assert info is not None
        self._view = session.run(observe(session.tiers, info.attempt))

    async def write(self) -> Copied:
        copied = await copy_payload(self._context, self._view, self._far)
        await copy_records(self._context.tiers.authority, self._far, self._view.attempt, self._view.records)
        return copied

    def write_after(self, other: Process, monkeypatch: pytest.MonkeyPatch) -> tuple[Copied, Copied]:
        """Writes once it has seen that nothing is there, and the other one has written then; what the other wrote, and what it did."""
        copied: list[Copied] = []

        async def look(*args: Any) -> Shards:
            found = await look_at_shards(*args)
            monkeypatch.undo()
            copied.append(await other.write())
            return found

        monkeypatch.setattr(copies, "look_at_shards", look)
        own = self._session.run(self.write())
        return copied[0], own

    def record(self, copied: Copied) -> bool:
        return self._session.run(record_replica(self._context, self._view, self._far, copied))

    def note(self) -> None:
        """A further record in the authority's log."""
        storage, clock = self._session.tiers.authority.storage, self._session.clock
        self._session.run(append(storage, self._view.attempt, "tagged", {"tags": ["meanwhile"]}, clock=clock))

    def copy_exact(self) -> None:
        """What `copy_checkpoint` goes on with after a copy that is not as it was recorded."""
        self._session.run(copy_checkpoint(self._context, self._view, self._far, exact=True))


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(params=["zstd"])
def both(request: pytest.FixtureRequest, place: Place) -> Iterator[tuple[Process, Process]]:
    """One that quantises on the far tier, and one that does not; step 1 is not there yet."""
    quantises, exact = place.config(codec="zstd", quantise="q8"), place.config(codec=request.param)
    with place.open({**exact, "tiers": exact["tiers"][:2]}) as store:
        store.save(1, adam_state(1)).wait("committed", timeout=200)
    with place.session(quantises) as first, place.session(exact) as second:
        yield Process(first), Process(second)


def test_what_was_recorded_while_a_copy_was_quantised_lies_beside_it_too(place: Place) -> None:
    """Two tiers that are copied to at the same time, say: the archive alone has then a log without gaps."""
    config = place.config(codec="zstd", quantise="q8")
    with place.open({**config, "tiers": config["tiers"][:2]}) as store:
        store.save(1, adam_state(1)).wait("committed", timeout=200)
    with place.session(config) as session:
        process = Process(session)
        copied = session.run(process.write())
        process.note()
        assert process.record(copied)
    assert [name[-11:] for name in sorted(place.names("/.log/")) if name[-11:-5].isdigit()] == ["000000.json", "000001.json", "000002.json"]
    place.lose_exact_shards()
    with place.session(config) as session:
        info = session.run(scan(session.tiers, "r")).find(1)
        assert info is not None
        assert not info.damaged


def is_exact(place: Place) -> bool:
    """What the log says of the copy on the far tier, which is what its bytes are."""
    config = place.config(codec="zstd")
    with place.session(config) as session:
        assert session.run(verify(session.tiers, "r", level="full")).damage == ()
        info = session.run(scan(session.tiers, "r")).find(1)
        assert info is not None
        exact = info.quantised_on("far") is None
        assert info.replicas["far"] == ("complete" if exact else "quantised")
    place.lose_exact_shards()
    if exact:
        with place.open(config) as store:
            assert_same_state(store.load(1), adam_state(1))
    return exact


def test_bytes_that_were_quantised_over_are_not_recorded_as_exact(
    place: Place, both: tuple[Process, Process], patch: pytest.MonkeyPatch
) -> None:
    quantises, exact = both
    copied, quantised = quantises.write_after(exact, patch)
    assert quantises.record(quantised)
    assert not exact.record(copied)
    assert not is_exact(place)


def test_who_quantised_over_an_exact_copy_writes_it_exact_again(
    place: Place, both: tuple[Process, Process], patch: pytest.MonkeyPatch
) -> None:
    quantises, exact = both
    copied, quantised = quantises.write_after(exact, patch)
    assert exact.record(copied)  # nobody can know yet
    assert not quantises.record(quantised)
    quantises.copy_exact()
    assert place.names("quantised.json") == []
    assert is_exact(place)


def test_exact_bytes_over_quantised_ones_count_once_both_are_recorded(
    place: Place, both: tuple[Process, Process], patch: pytest.MonkeyPatch
) -> None:
    quantises, exact = both
    quantised, copied = exact.write_after(quantises, patch)
    assert quantises.record(quantised)
    assert exact.record(copied)
    assert place.names("quantised.json") == []
    assert is_exact(place)


@pytest.mark.parametrize("both", ["raw"], indirect=True)
def test_who_opened_the_tier_before_it_had_packed_files_records_nothing_beside_one(
    place: Place, both: tuple[Process, Process], patch: pytest.MonkeyPatch
) -> None:
    quantises, exact = both
    quantised, copied = exact.write_after(quantises, patch)
    assert quantises.record(quantised)
    assert not exact.record(copied)
