"""Shards on their way onto packed tiers: hashed by a save, proved by a copy, in as little memory as there is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from packing_kit import MIB, run, training_shard
from tiers_kit import SteppedClock, attempt_at

from tierstore.errors import IntegrityError
from tierstore.format.digest import block_digests
from tierstore.format.header import header_nbytes, parse_header
from tierstore.format.index import FileEntry
from tierstore.format.shard import shard_entries
from tierstore.names import shard_name
from tierstore.storage.contract import PackHints, Source
from tierstore.storage.packed import PackedStorage, Packing, QuantiseRule
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.testing.bucket import Bucket
from tierstore.testing.sources import PatternSource
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.copying import CopyContext, VerifiedSource, copy_file
from tierstore.tiers.persist import persist
from tierstore.tiers.quantised import QuantisedReader, lossy_files, put_document
from tierstore.tiers.tier import Tier, Tiers

ATTEMPT = attempt_at(7)
NAME = shard_name(0, 1)
PACKING = Packing(master_once=True)


def entry_of(data: bytes, block_nbytes: int = MIB) -> FileEntry:
    return FileEntry(name=NAME, nbytes=len(data), block_digests=block_digests(data, block_nbytes))


@pytest.mark.parametrize("block_nbytes", [MIB, 4 * MIB])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_save_onto_a_packed_tier_hashes_every_block_of_the_raw_shard(block_nbytes: int, in_memory: bool) -> None:
    data = training_shard(rows=900)

    async def body() -> None:
        storage = PackedStorage(Bucket(), PACKING)
        shard: Source = BytesSource(data) if in_memory else PatternSource(data)
        header = parse_header(data[: header_nbytes(data[:8], len(data))], len(data))
        part = await persist(
            Tier(name="packed", storage=storage, scope="shared"),
            ATTEMPT,
            rank=0,
            world_size=1,
            shard=shard,
            tensors=shard_entries(header, NAME),
            objects=b"",
            facts={},
            clock=SteppedClock(),
            authority=True,
            block_nbytes=block_nbytes,
            reserve_nbytes=0,
        )
        assert part.index.files()[0].block_digests == block_digests(data, block_nbytes)
        found = await storage.stat(ATTEMPT.path(NAME))
        assert (found.nbytes, found.taken_nbytes < 0.75 * len(data)) == (len(data), True)
        same = await storage.read(ATTEMPT.path(NAME)) == data
        assert same
        await storage.close()

    run(body)


@pytest.mark.parametrize("quantise", [None, QuantiseRule(scheme="q8")])
def test_a_copy_gets_on_with_the_least_memory(tmp_path: Path, quantise: QuantiseRule | None) -> None:
    data = training_shard(layers=2, rows=1500)

    async def body() -> None:
        near, bucket = PosixStorage(tmp_path / "near", durable=False), Bucket()
        await near.write(ATTEMPT.path(NAME), BytesSource(data))
        budget = ByteBudget(8 * MIB, patience_s=10**6)  # nobody is let through over it
        target = PackedStorage(bucket, Packing(master_once=True, quantise=quantise))
        source = VerifiedSource(near, ATTEMPT.path(NAME), entry_of(data), MIB, budget, lambda nbytes: None)
        info = await asyncio.wait_for(target.write_packed(ATTEMPT.path(NAME), source, PackHints()), 250)
        assert info.nbytes == len(data)
        assert budget.peak <= 8 * MIB
        if quantise is None:
            same = await target.read(ATTEMPT.path(NAME)) == data
            assert same
        await target.close()
        await near.close()

    run(body)


def test_a_damaged_source_is_passed_over_and_the_next_one_copied(tmp_path: Path) -> None:
    data = training_shard(rows=900)
    hurt = bytearray(data)
    hurt[len(hurt) // 2] ^= 1

    async def body() -> None:
        bad, good = (PosixStorage(tmp_path / name, durable=False) for name in ("bad", "good"))
        target = PackedStorage(PosixStorage(tmp_path / "target", durable=False), PACKING)
        await bad.write(ATTEMPT.path(NAME), BytesSource(bytes(hurt)))
        await good.write(ATTEMPT.path(NAME), BytesSource(data))
        tiers = [Tier(name=name, storage=storage, scope="shared") for name, storage in (("bad", bad), ("good", good), ("target", target))]
        together = Tiers(tiers=tuple(tiers), authority=tiers[0], durable_at=tiers[0], store_id="kit")
        context = CopyContext.make(together, SteppedClock())
        damaged: list[Any] = []

        async def note(tier: Tier, name: str, what: str) -> None:
            damaged.append((tier.name, name))

        info = await copy_file(context, ATTEMPT, tiers[2], tiers[:2], entry_of(data), MIB, note)
        assert damaged == [("bad", NAME)]
        assert info.nbytes == len(data)
        same = await target.read(ATTEMPT.path(NAME)) == data
        assert same
        again = await copy_file(context, ATTEMPT, tiers[2], [], entry_of(data), MIB, note)  # it is there: nothing is copied
        assert again.nbytes == len(data)
        # And back: read from the packed tier, proved there.
        await bad.delete([ATTEMPT.path(NAME)])
        await copy_file(context, ATTEMPT, tiers[0], [tiers[2]], entry_of(data), MIB, note)
        same = await bad.read(ATTEMPT.path(NAME)) == data
        assert same
        other = bytearray(block_digests(data, MIB))
        other[0] ^= 1
        await bad.delete([ATTEMPT.path(NAME)])
        wrong = FileEntry(name=NAME, nbytes=len(data), block_digests=bytes(other))
        with pytest.raises(IntegrityError, match="do not match their SHA-256"):
            await copy_file(context, ATTEMPT, tiers[0], [tiers[2]], wrong, MIB, note)
        for storage in (bad, good, target):
            await storage.close()

    run(body)


def test_a_shard_that_was_written_anew_exactly_is_proved_by_its_digests_from_then_on() -> None:
    data = training_shard(rows=60)

    async def body() -> None:
        bucket = Bucket()
        storage = PackedStorage(bucket, Packing(quantise=QuantiseRule(scheme="q8")))
        tier = Tier(name="far", storage=storage, scope="shared")
        await storage.write_packed(ATTEMPT.path(NAME), BytesSource(data), PackHints())
        told = await put_document(tier, ATTEMPT, await lossy_files(tier, ATTEMPT, [NAME]), scheme="q8", generation=1)
        reader = QuantisedReader(tier, ATTEMPT, told, MIB)
        assert await reader.lossy(NAME)
        other = PackedStorage(bucket, Packing())
        await other.write(ATTEMPT.path(NAME), BytesSource(data))
        await storage.children(ATTEMPT.folder)
        assert not await reader.lossy(NAME)
        await storage.close()
        await other.close()

    run(body)
