"""Loads from local copies: each block is hashed once and copied at most once, and a bad one alone is fetched from elsewhere."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from posix_kit import BrokenShards
from tiers_kit import BLOCK, attempt_at, copy_to, flip, path_of, run, save, shard_of, tiers_in

from tierstore.errors import IntegrityError
from tierstore.names import shard_name
from tierstore.storage.posix import PosixStorage
from tierstore.tiers import nearby
from tierstore.tiers.catalog import CheckpointInfo, scan
from tierstore.tiers.reads import Handover, Want
from tierstore.tiers.replica import Replica, open_replica
from tierstore.tiers.tier import Tiers

FILE = shard_name(0, 1)
DATA = shard_of(0, 1).data


class Counts:
    """What the reading of local files does with its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashed: list[bytes] = []
        self.copied = 0
        copy = nearby.copy_bytes

        class Hashing:
            @staticmethod
            def sha256(data: Any) -> Any:
                self.hashed.append(bytes(data))
                return hashlib.sha256(data)

        def counted(target: memoryview, source: memoryview) -> None:
            self.copied += source.nbytes
            copy(target, source)

        monkeypatch.setattr(nearby, "hashlib", Hashing)
        monkeypatch.setattr(nearby, "copy_bytes", counted)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    """One checkpoint on three tiers."""
    made = tiers_in(tmp_path)
    attempt = run(save(made, 5, attempt=attempt_at(5)))
    for name in ("node", "far"):
        run(copy_to(made, attempt, name))
    return made


def info_of(tiers: Tiers) -> CheckpointInfo:
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    return info


def read(tiers: Tiers, wants: list[Want | Handover]) -> Replica:
    async def work() -> Replica:
        replica = await open_replica(tiers, info_before)
        await replica.read(wants)
        return replica

    info_before = info_of(tiers)
    return run(work())


def test_each_block_is_hashed_once_and_one_that_lies_in_one_want_is_not_copied(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, buffer = Counts(monkeypatch), bytearray(len(DATA))
    replica = read(tiers, [Want(FILE, 0, memoryview(buffer))])
    assert buffer == DATA
    assert sorted(counts.hashed) == sorted(DATA[at : at + BLOCK] for at in range(0, len(DATA), BLOCK))
    assert counts.copied == 0
    assert replica.requests["node"] - 3 <= 1  # manifest, index, and perhaps objects; then one for all of the file


def test_what_several_want_is_copied_once_out_of_the_cache(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    cuts = [0, 10, 700, 2 * BLOCK + 3, 2 * BLOCK + 4, len(DATA)]
    buffers = [bytearray(end - begin) for begin, end in pairwise(cuts)]
    read(tiers, [Want(FILE, begin, memoryview(buffer)) for begin, buffer in zip(cuts[:-1], buffers, strict=True)])
    assert b"".join(buffers) == DATA
    assert len(counts.hashed) == -(-len(DATA) // BLOCK)
    assert counts.copied <= len(DATA)


def test_wants_that_overlap_are_all_filled(tiers: Tiers) -> None:
    ranges = [(0, 9000), (100, 200), (150, 8200), (8192, 8193), (0, len(DATA)), (len(DATA) - 1, len(DATA))]
    buffers = [bytearray(end - begin) for begin, end in ranges]
    read(tiers, [Want(FILE, begin, memoryview(buffer)) for (begin, _), buffer in zip(ranges, buffers, strict=True)])
    assert [bytes(buffer) for buffer in buffers] == [DATA[begin:end] for begin, end in ranges]


def test_a_handover_is_taken_in_the_thread_that_read_it_without_memory_of_its_own(tiers: Tiers) -> None:
    taken: list[bytes] = []
    handover = Handover(FILE, 100, 3 * BLOCK, lambda memory: taken.append(bytes(memory)))
    read(tiers, [handover])
    assert taken == [DATA[100 : 100 + 3 * BLOCK]]
    assert handover._memory is None


def test_exactly_the_bad_blocks_come_from_the_next_tier_each_hashed_once_more(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    info = info_of(tiers)
    for at in (BLOCK + 1, 4 * BLOCK, 5 * BLOCK - 1):
        flip(path_of(tiers, "node", info.attempt, FILE), at)
    counts, buffer = Counts(monkeypatch), bytearray(len(DATA))
    replica = read(tiers, [Want(FILE, 0, memoryview(buffer))])
    assert buffer == DATA
    assert len(counts.hashed) == -(-len(DATA) // BLOCK)
    assert [(bad.tier, bad.file) for bad in replica.bad_copies] == [("node", FILE)]
    assert "block 1 is damaged" in replica.bad_copies[0].reason
    assert replica.requests["shared"] == 2
    assert replica.bytes_fetched["shared"] == 2 * BLOCK


def test_a_handover_gets_its_good_parts_and_its_mended_ones_once(tiers: Tiers) -> None:
    info = info_of(tiers)
    flip(path_of(tiers, "node", info.attempt, FILE), 2 * BLOCK + 1)
    taken: list[bytes] = []
    read(tiers, [Handover(FILE, 100, 5 * BLOCK, lambda memory: taken.append(bytes(memory)))])
    assert taken == [DATA[100 : 100 + 5 * BLOCK]]


def test_bad_everywhere_is_an_error_that_names_each_tier(tiers: Tiers) -> None:
    info = info_of(tiers)
    for name in ("node", "shared", "far"):
        flip(path_of(tiers, name, info.attempt, FILE), BLOCK + 1)
    with pytest.raises(IntegrityError, match=r"node: .*block 1.*shared: .*block 1.*far: .*block 1"):
        read(tiers, [Want(FILE, 0, memoryview(bytearray(len(DATA))))])


def test_what_a_disk_fails_to_read_is_noted_once_and_read_elsewhere(tmp_path: Path, tiers: Tiers) -> None:
    broken, buffers = BrokenShards(), [bytearray(10) for _ in range(8)]
    storage = PosixStorage(tmp_path / "node", durable=False, threads=1, syscalls=broken)
    object.__setattr__(tiers.tiers[0], "storage", storage)
    far_apart = [Want(FILE, at * BLOCK, memoryview(buffer)) for at, buffer in enumerate(buffers)]
    replica = read(tiers, [*far_apart])
    assert [bytes(buffer) for buffer in buffers] == [DATA[at * BLOCK : at * BLOCK + 10] for at in range(8)]
    assert replica.bytes_fetched["shared"] > 0
    assert [(bad.tier, bad.file) for bad in replica.bad_copies] == [("node", FILE)]
    assert broken.reads == 1
