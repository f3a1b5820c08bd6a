"""Shards that lie packed: what is shown of them, what is read of them, and what becomes of damaged ones."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_kit import MIB, SHARD, rounded, run, shard_of_tensors, stored, training_shard

from tierstore.errors import IntegrityError, NotFoundError, TemporaryError
from tierstore.format.packed.footer import decode_footer, encode_footer, footer_nbytes
from tierstore.format.packed.types import packed_name
from tierstore.storage.contract import PackHints, Unchanged
from tierstore.storage.packed import PACKED_MARKER, PackedStorage, Packing, QuantiseRule
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.testing.bucket import Bucket
from tierstore.testing.sources import FailingSource, PatternSource, pattern

OTHER = "run/other/shard-00000-of-00001.safetensors"
PLAIN = Packing(codec="raw")
MASTERS = Packing(master_once=True)


class CountingBucket(Bucket):
    """Knows how many bytes of it were read."""

    read_nbytes = 0

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.read_nbytes += buffer.nbytes
        await super().read_into(path, offset, buffer)

    def data(self, path: str) -> bytes:
        return self._files[path]

    def replace(self, path: str, data: bytes) -> None:
        self._set(path, data)


async def written(bucket: Bucket, data: bytes, packing: Packing = MASTERS, path: str = SHARD, hints: PackHints | None = None) -> str:
    """Writes a shard with a storage of its own; returns the packed file's name."""
    storage = PackedStorage(bucket, packing)
    try:
        await storage.write_packed(path, BytesSource(data), hints or PackHints())
    finally:
        await storage.close()
    return packed_name(path, len(data))


async def read(bucket: Bucket, path: str = SHARD) -> bytes:
    storage = PackedStorage(bucket, None)
    try:
        return await storage.read(path)
    finally:
        await storage.close()


# Names


def test_a_packed_shard_is_shown_by_its_raw_name_and_length() -> None:
    async def body() -> None:
        bucket, data = Bucket(), training_shard(rows=30)
        name = await written(bucket, data)
        storage = PackedStorage(bucket, None)
        await storage.put("run/step/manifest.json", b"{}")
        taken = (await bucket.stat(name)).nbytes
        assert taken < len(data)
        level = await storage.children("run/step")
        for infos in (level.files, await storage.list("run")):
            assert sorted((info.path, info.nbytes, info.taken_nbytes) for info in infos) == [
                ("run/step/manifest.json", 2, 2),
                (SHARD, len(data), taken),
            ]
        info = await storage.stat(SHARD)
        assert (info.path, info.nbytes, info.stored_nbytes, info.etag) == (SHARD, len(data), taken, (await bucket.stat(name)).etag)
        assert await stored(bucket) == ["run/step/manifest.json", name]
        assert (await bucket.stat(PACKED_MARKER)).nbytes
        assert storage.local_path(SHARD) is None
        with pytest.raises(NotFoundError, match="shard-00001"):
            await storage.stat("run/step/shard-00001-of-00002.safetensors")

    run(body)


def test_a_plain_tier_becomes_packed_and_plain_again() -> None:
    async def body() -> None:
        bucket, data = Bucket(), training_shard(rows=20)
        plain, packed = PackedStorage(bucket, None), PackedStorage(bucket, MASTERS)
        for writer, names in ((plain, [SHARD]), (packed, [packed_name(SHARD, len(data))]), (plain, [SHARD])):
            await writer.list()  # as everybody does who looks what is there
            await writer.write(SHARD, BytesSource(data))
            assert await stored(bucket) == names
            for reader in (plain, packed):
                assert await reader.read(SHARD) == data
                assert [info.nbytes for info in await reader.list("run")] == [len(data)]

    run(body)


def test_both_forms_of_a_shard_are_one_entry_and_deleted_together() -> None:
    async def body() -> None:
        bucket, data = Bucket(), training_shard(rows=20)
        name = await written(bucket, data)
        await bucket.put(SHARD, data)
        storage = PackedStorage(bucket, None)
        assert [info.path for info in await storage.list("run")] == [SHARD]
        bucket.requests.clear()
        await storage.delete([SHARD, "run/step/missing"])
        assert bucket.total == 1
        assert await stored(bucket) == []
        await written(bucket, data)
        await PackedStorage(bucket, None).delete([SHARD])  # one that has never looked
        assert await stored(bucket) == []
        assert name

    run(body)


def test_many_shards_of_a_folder_are_found_by_one_listing() -> None:
    async def body() -> None:
        bucket = Bucket()
        paths = [f"run/step/shard-{rank:05d}-of-00006.safetensors" for rank in range(6)]
        for path in paths:
            await written(bucket, training_shard(layers=1, rows=5), PLAIN, path)
        storage = PackedStorage(bucket, None)
        bucket.requests.clear()
        await asyncio.gather(*(storage.read(path, 0, 100) for path in paths))
        assert bucket.requests["list"] == 1
        assert bucket.requests["read"] == 12  # a footer and a frame of each

    run(body)


def test_nothing_but_shards_is_packed() -> None:
    async def body() -> None:
        bucket = Bucket()
        storage = PackedStorage(bucket, MASTERS)
        for path in ("manifest.json", "run/step/index.safetensors", "run/step/part-00000.safetensors", ".files/shard"):
            await storage.write(path, PatternSource(pattern(1000)))
            assert await storage.packed_facts(path) is None
        assert sorted(info.path for info in await bucket.list()) == sorted(info.path for info in await storage.list())
        assert PACKED_MARKER not in [info.path for info in await bucket.list()]

    run(body)


def test_a_local_file_is_not_taken_in_where_it_is_to_be_packed(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "origin").write_bytes(b"12345")
        inner = PosixStorage(tmp_path / "root", durable=False)
        assert await PackedStorage(inner, MASTERS).clone(SHARD, tmp_path / "origin", hard=True) is None
        assert await PackedStorage(inner, MASTERS).clone("a/document", tmp_path / "origin", hard=True) is not None
        assert await PackedStorage(inner, None).clone(SHARD, tmp_path / "origin", hard=True) is not None
        assert await PackedStorage(inner, None).read(SHARD) == b"12345"
        assert not hasattr(PackedStorage(Bucket(), None), "clone")
        await inner.close()

    run(body)


# Bytes


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "packing",
    [PLAIN, Packing(), Packing(level=3, threads=1), MASTERS, Packing(codec="raw", master_once=True)],
    ids=lambda p: f"{p.codec}{p.level}{p.master_once}",
)
def test_any_slice_is_what_it_was(packing: Packing, kind: str) -> None:
    data = training_shard(kind=kind)
    chance = random.Random(7)

    async def body() -> None:
        bucket = Bucket()
        await written(bucket, data, packing)
        storage = PackedStorage(bucket, None)
        assert await storage.read(SHARD) == data
        for _ in range(30):
            begin = chance.randrange(len(data))
            end = min(len(data), begin + chance.choice((1, 3, 1000, MIB, 3 * MIB)))
            same = await storage.read(SHARD, begin, end - begin) == data[begin:end]
            assert same, (begin, end)
        assert await storage.read(SHARD, len(data) - 5) == data[-5:]
        with pytest.raises(IntegrityError, match="step/shard"):
            await storage.read(SHARD, len(data) - 5, 6)
        await storage.close()

    run(body)


DTYPES = (("F64", 8), ("F32", 4), ("BF16", 2), ("F16", 2), ("I8", 1), ("BOOL", 1), ("I64", 8), ("F8_E4M3", 1))


@st.composite
def foreign_files(draw: st.DrawFn) -> bytes:
    """safetensors files as anybody may write them: numbers at any address, of any bytes, some of them roundings of others."""
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    header: dict[str, Any] = {}
    body = b""
    for number in range(draw(st.integers(0, 8))):
        dtype, size = draw(st.sampled_from(DTYPES))
        numel = draw(st.sampled_from((0, 1, 3, 5000, 9000, 9001)))
        data = chance.choice((chance.randbytes(size * numel), bytes(size * numel)))
        if draw(st.booleans()):
            master = np.random.default_rng(number).standard_normal(numel).astype(np.float32)
            dtype, data = "BF16", rounded(master).tobytes()
            header[f"m{number}"] = {"dtype": "F32", "shape": [numel], "data_offsets": [len(body), len(body) + 4 * numel]}
            body += master.tobytes()
        header[f"t{number}"] = {"dtype": dtype, "shape": [numel], "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode() + b" " * draw(st.integers(0, 5))
    whole = struct.pack("<Q", len(text)) + text + body
    return whole[: draw(st.sampled_from((len(whole), len(whole), len(whole) // 2, 0)))]


@settings(max_examples=30)
@given(foreign_files(), st.sampled_from((PLAIN, Packing(), MASTERS)), st.data())
def test_whatever_file_is_read_as_it_was(data: bytes, packing: Packing, more: st.DataObject) -> None:
    async def body() -> None:
        bucket = Bucket()
        await written(bucket, data, packing)
        storage = PackedStorage(bucket, None)
        same = await storage.read(SHARD) == data
        assert same
        begin = more.draw(st.integers(0, len(data)))
        end = more.draw(st.integers(begin, len(data)))
        same = await storage.read(SHARD, begin, end - begin) == data[begin:end]
        assert same
        await storage.close()

    run(body)


def test_the_same_shard_becomes_the_same_bytes() -> None:
    data = training_shard()

    async def body() -> None:
        made = set()
        for threads in (1, 2, 5):
            bucket = CountingBucket()
            made.add(bucket.data(await written(bucket, data, Packing(master_once=True, threads=threads))))
        assert len(made) == 1

    run(body)


def test_proofs_see_every_byte_once_and_their_error_passes() -> None:
    data = training_shard()

    async def body() -> None:
        bucket = Bucket()
        await written(bucket, data)
        storage = PackedStorage(bucket, None)
        for offset, nbytes, unit in ((0, len(data), MIB), (MIB, 2 * MIB, MIB), (12_345, 2_000_001, 4096)):
            seen: list[tuple[int, bytes]] = []
            buffer = bytearray(nbytes)

            def note(at: int, piece: memoryview, seen: list[tuple[int, bytes]] = seen) -> None:
                seen.append((at, bytes(piece)))

            await storage.read_proved(SHARD, offset, memoryview(buffer), note, unit=unit)
            assert b"".join(piece for _, piece in sorted(seen)) == buffer == data[offset : offset + nbytes]
            assert all((at - offset) % unit == 0 for at, _ in seen)

        def refuse(at: int, piece: memoryview) -> None:
            raise IntegrityError("not this one")

        with pytest.raises(IntegrityError, match="not this one"):
            await storage.read_proved(SHARD, 0, memoryview(bytearray(len(data))), refuse)
        await storage.close()

    run(body)


def test_a_source_that_fails_leaves_nothing_and_its_error_passes() -> None:
    data = training_shard()

    async def body() -> None:
        bucket = Bucket()
        storage = PackedStorage(bucket, MASTERS)
        for at in (0, len(data) // 2, len(data) - 1):
            with pytest.raises(IntegrityError, match=f"damaged at byte {at}"):
                await storage.write(SHARD, FailingSource(data, at=at))
        assert await stored(bucket) == []
        await storage.close()

    run(body)


def test_every_block_is_pulled_once_and_in_whole_blocks() -> None:
    data = training_shard(layers=6, rows=1000)  # several pulls

    async def body() -> None:
        bucket = Bucket()
        storage = PackedStorage(bucket, PLAIN)
        source = PatternSource(data)
        await storage.write(SHARD, source)
        assert source.covered()
        assert sum(nbytes for _, nbytes in source.pulls) == len(data) > 16 * MIB
        assert all(offset % MIB == 0 for offset, _ in source.pulls)
        await storage.close()

    run(body)


# Masters


def facts_of(data: bytes) -> Any:
    return decode_footer(data[len(data) - footer_nbytes(data[-64:], len(data)) :], len(data))


def test_weights_that_are_their_masters_rounding_are_not_stored() -> None:
    data = training_shard()

    async def body() -> None:
        bucket = CountingBucket()
        with_masters = facts_of(bucket.data(await written(bucket, data, MASTERS)))
        weights = sum(run.end - run.begin for run in with_masters.runs)
        assert weights == 2 * 300 * 700 * 2
        assert {run.kind for run in with_masters.runs} == {"bfloat16"}
        without = facts_of(bucket.data(await written(bucket, data, Packing())))
        assert with_masters.frame_ends[-1] < without.frame_ends[-1] - weights // 2

    run(body)


@pytest.mark.parametrize("special", [np.nan, np.inf, -0.0, 3.4e38, 1e-40])
def test_a_weight_that_is_no_rounding_is_stored_where_it_is_not(special: float) -> None:
    chance = np.random.default_rng(3)
    master = chance.standard_normal((3000, 1024)).astype(np.float32)  # weights: 6 blocks
    master[700, :5] = special
    weight = rounded(master).copy()
    weight[2500, 7] ^= 1
    if np.isnan(special):
        weight[700, :5] = 0x7FC1
    data = shard_of_tensors({"w": weight, "zz.master": master}, {"w": "bfloat16"})

    async def body() -> None:
        bucket = CountingBucket()
        footer = facts_of(bucket.data(await written(bucket, data)))
        covered = sum(run.end - run.begin for run in footer.runs)
        assert weight.nbytes - (2 if np.isnan(special) else 1) * MIB <= covered < weight.nbytes
        same = await read(bucket) == data
        assert same

    run(body)


def test_a_tensor_that_only_begins_like_its_master_is_given_up() -> None:
    chance = np.random.default_rng(3)
    master = chance.standard_normal((20_000, 1024)).astype(np.float32)
    weight = rounded(master).copy()
    weight[:, 0] ^= 1
    weight[10_000] = rounded(master[10_000])
    weight[9_999] = rounded(master[9_999])  # what samples look at
    data = shard_of_tensors({"w": weight, "zz.master": master}, {"w": "bfloat16"})

    class Pulls(PatternSource):
        pass

    async def body() -> None:
        bucket = CountingBucket()
        storage = PackedStorage(bucket, Packing(codec="raw", master_once=True))
        source = Pulls(data)
        await storage.write(SHARD, source)
        again = sum(nbytes for _, nbytes in source.pulls) - len(data)
        assert again < 60 * MIB < master.nbytes  # it was not compared to its end
        assert facts_of(bucket.data(packed_name(SHARD, len(data)))).runs == ()
        await storage.close()

    run(body)


def test_many_small_tensors_are_not_read_many_times_over() -> None:
    data = training_shard(layers=60, rows=64, columns=200)

    async def body() -> None:
        bucket = CountingBucket()
        storage = PackedStorage(bucket, Packing(codec="raw", master_once=True))
        source = PatternSource(data)
        await storage.write(SHARD, source)
        assert sum(nbytes for _, nbytes in source.pulls) < 3 * len(data)
        footer = facts_of(bucket.data(packed_name(SHARD, len(data))))
        assert sum(run.end - run.begin for run in footer.runs) == 60 * 64 * 200 * 2
        same = await storage.read(SHARD) == data
        assert same
        await storage.close()

    run(body)


def test_a_weight_and_its_master_read_together_fetch_the_master_once() -> None:
    data = training_shard(layers=1, rows=1000)

    async def body() -> None:
        bucket = CountingBucket()
        name = await written(bucket, data)
        storage = PackedStorage(bucket, None)
        assert await storage.read(SHARD) == data
        assert bucket.read_nbytes < 1.2 * len(bucket.data(name))
        await storage.close()

    run(body)


# Unchanged


def unchanged(begin: int, end: int, path: str = OTHER) -> PackHints:
    return PackHints(unchanged=(Unchanged(begin=begin, end=end, path=path, source=begin),))


def test_unchanged_blocks_are_taken_from_the_other_file() -> None:
    base = training_shard()
    data = base[: 2 * MIB] + bytes(len(base) - 2 * MIB)

    async def body() -> None:
        for packing in (MASTERS, PLAIN):
            bucket = CountingBucket()
            await written(bucket, base, packing, OTHER)
            name = await written(bucket, data, Packing(), SHARD, unchanged(0, 2 * MIB))
            assert len(bucket.data(name)) < 10_000
            same = await read(bucket) == data
            assert same
            storage = PackedStorage(bucket, None)
            facts = await storage.packed_facts(SHARD)
            assert facts is not None
            assert (facts.refers_to, facts.stored_nbytes, facts.lossy) == ((OTHER,), len(bucket.data(name)), frozenset())
            assert list(await storage.origins(SHARD, MIB, len(data))) == [
                Unchanged(begin=MIB, end=2 * MIB, path=OTHER, source=MIB),
            ]
            await storage.delete([OTHER])
            with pytest.raises(IntegrityError, match=r"run/step/shard.*run/other/shard.*is not there"):
                await read(bucket)
            same = await storage.read(SHARD, 2 * MIB) == data[2 * MIB :]
            assert same
            await storage.close()

    run(body)


def test_a_plain_file_can_be_what_others_are_made_of() -> None:
    base = training_shard()

    async def body() -> None:
        bucket = Bucket()
        await bucket.put(OTHER, base)
        await written(bucket, base, PLAIN, SHARD, unchanged(0, len(base)))
        same = await read(bucket) == base
        assert same

    run(body)


def test_files_that_are_made_of_each_other_are_refused_in_time() -> None:
    data = training_shard()

    async def body() -> None:
        bucket = Bucket()
        await written(bucket, data, PLAIN, SHARD, unchanged(0, len(data), OTHER))
        await written(bucket, data, PLAIN, OTHER, unchanged(0, len(data), SHARD))
        storage = PackedStorage(bucket, None)
        ends = await asyncio.wait_for(asyncio.gather(storage.read(SHARD), storage.read(OTHER), return_exceptions=True), 60)
        assert [type(end) for end in ends] == [IntegrityError, IntegrityError]
        await storage.close()

    run(body)


def test_a_file_that_takes_bytes_from_what_is_no_shard_is_refused() -> None:
    data = training_shard(layers=1, rows=400)

    async def body() -> None:
        bucket = Bucket()
        await bucket.put("run/step/manifest.json", data)
        await written(bucket, data, PLAIN, SHARD, unchanged(0, len(data), "run/step/manifest.json"))
        with pytest.raises(IntegrityError, match=r"run/step/manifest\.json, which is no shard"):
            await read(bucket)

    run(body)


def test_a_few_files_deep_is_not_too_deep() -> None:
    data = training_shard(layers=1, rows=400)
    paths = [f"run/{number}/shard-00000-of-00001.safetensors" for number in range(6)]

    async def body() -> None:
        bucket = Bucket()
        await written(bucket, data, MASTERS, paths[0])
        for before, path in pairwise(paths):
            await written(bucket, data, MASTERS, path, unchanged(0, len(data), before))
        same = await read(bucket, paths[-1]) == data
        assert same

    run(body)


def test_a_forked_process_waits_for_no_lock_of_its_parent() -> None:
    data = training_shard(layers=1, rows=60)

    async def use(storage: PackedStorage) -> None:
        await storage.stat(SHARD)
        storage.forget(SHARD)
        await storage.write(SHARD, BytesSource(data))
        assert await storage.read(SHARD) == data
        await storage.delete([SHARD])

    async def body() -> PackedStorage:
        bucket = Bucket()
        await written(bucket, data)
        storage = PackedStorage(bucket, MASTERS)
        await storage.read(SHARD)
        return storage

    storage = run(body)
    with storage._unpacking().footers._lock:  # as a thread that reads may hold it
        child = os.fork()
        if not child:
            try:
                signal.alarm(30)
                asyncio.run(use(storage))
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    run(storage.close)


# Quantised


def moments(storage_bytes: bytes) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors.numpy import load

    return {name: value for name, value in load(storage_bytes).items() if "exp_avg" in name}


Q8 = Packing(master_once=True, quantise=QuantiseRule(scheme="q8"))


def test_moments_are_quantised_and_everything_else_is_exact() -> None:
    data = training_shard(kind="float16")

    async def body() -> None:
        bucket = CountingBucket()
        exact = len(bucket.data(await written(bucket, data)))
        name = await written(bucket, data, Q8)
        assert len(bucket.data(name)) < 0.6 * exact
        found = await read(bucket)
        assert len(found) == len(data)
        before, after = moments(data), moments(found)
        masked = bytearray(data)
        for key, value in before.items():
            if key.endswith("_sq"):
                assert ((value == 0) == (after[key] == 0)).all()
                assert (after[key] >= value).all()
            else:
                assert np.abs(after[key] - value).max() < 0.04 * np.abs(value).max()
                assert (after[key][before[f"{key}_sq"] == 0] == 0).all()
            at = data.index(value.tobytes())
            masked[at : at + value.nbytes] = after[key].tobytes()
        assert bytes(masked) == found
        storage = PackedStorage(bucket, None)
        facts = await storage.packed_facts(SHARD)
        assert facts is not None
        assert facts.quantised.keys() == before.keys()
        assert facts.lossy
        for key, told in facts.quantised.items():
            assert told["scheme"] == "q8"
            assert told["kind"] == ("second" if key.endswith("_sq") else "first")
            assert ("mean_error" in told) == (told["kind"] == "first")
            assert 0 < told.get("mean_error", 0.01) < 0.05
        await storage.close()

    run(body)


@pytest.mark.parametrize("verb", ["write", "write_on", "put"])
def test_who_knows_nothing_of_packing_never_writes_a_shard_that_is_not_exact(verb: str) -> None:
    data = training_shard(rows=30)

    async def body() -> None:
        bucket = Bucket()
        storage = PackedStorage(bucket, Q8)
        await getattr(storage, verb)(SHARD, data if verb == "put" else BytesSource(data))
        facts = await storage.packed_facts(SHARD)
        assert facts is not None
        assert not facts.lossy
        assert await storage.read(SHARD) == data
        await storage.close()

    run(body)


def test_the_writer_may_ask_for_exact_bytes_or_another_scheme() -> None:
    data = training_shard(kind="float16")

    async def body() -> None:
        bucket = CountingBucket()
        eight = len(bucket.data(await written(bucket, data, Q8)))
        four = len(bucket.data(await written(bucket, data, Q8, hints=PackHints(scheme="q4"))))
        assert four < 0.9 * eight
        await written(bucket, data, Q8, hints=PackHints(exact=True))
        same = await read(bucket) == data
        assert same
        rule = QuantiseRule(scheme="q8", exclude=("*exp_avg",))
        await written(bucket, data, replace(Q8, quantise=rule))
        after = moments(await read(bucket))
        for key, value in moments(data).items():
            assert (value.tobytes() == after[key].tobytes()) == (not key.endswith("_sq"))

    run(body)


@pytest.mark.parametrize("special", [np.nan, np.inf, -1.0])
def test_what_can_not_be_quantised_is_exact(special: float) -> None:
    chance = np.random.default_rng(5)
    second = (chance.standard_normal((2000, 512)) ** 2).astype(np.float32)  # 4 blocks
    first = chance.standard_normal((2000, 512)).astype(np.float32)
    second[700, 5] = special
    data = shard_of_tensors({"a.exp_avg": first, "a.exp_avg_sq": second})

    async def body() -> None:
        bucket = Bucket()
        await written(bucket, data, Q8)
        after = moments(await read(bucket))["a.exp_avg_sq"]
        assert after[700].tobytes() == second[700].tobytes()
        assert after[1900].tobytes() != second[1900].tobytes()

    run(body)


# Damage


@pytest.mark.parametrize("packing", [PLAIN, MASTERS, Q8], ids=["raw", "masters", "quantised"])
def test_damage_is_an_integrity_error_or_for_the_digests_to_find(packing: Packing) -> None:
    data = training_shard(layers=1, rows=100)
    chance = random.Random(11)

    async def body() -> None:
        bucket = CountingBucket()
        name = await written(bucket, data, packing)
        whole = bucket.data(name)
        good = await read(bucket)
        frames = len(whole) - footer_nbytes(whole[-64:], len(whole))
        places = [chance.randrange(len(whole)) for _ in range(40)] + [chance.randrange(frames, len(whole)) for _ in range(20)]
        refused = 0
        for at in places:
            hurt = bytearray(whole)
            hurt[at] ^= 1 << chance.randrange(8)
            bucket.replace(name, bytes(hurt))
            found = (await asyncio.gather(read(bucket), return_exceptions=True))[0]
            if isinstance(found, BaseException):
                assert isinstance(found, IntegrityError)
                assert SHARD in found.message
                refused += 1
            else:
                assert at < frames
                assert packing.quantise is None or found != good
        assert refused >= 20
        for cut in (0, 10, frames // 2, frames, len(whole) - 1):
            bucket.replace(name, whole[:cut])
            with pytest.raises(IntegrityError, match="damaged"):
                await read(bucket)

    run(body)


def test_a_damaged_frame_that_is_not_exact_is_never_used() -> None:
    data = training_shard(layers=1, rows=2000)

    async def body() -> None:
        bucket = CountingBucket()
        name = await written(bucket, data, Q8)
        whole = bucket.data(name)
        footer = facts_of(whole)
        for block in sorted(footer.lossy)[:3]:
            hurt = bytearray(whole)
            hurt[int(footer.frame_ends[block]) - 20] ^= 1
            bucket.replace(name, bytes(hurt))
            with pytest.raises(IntegrityError, match=f"block {block} "):
                await read(bucket)

    run(body)


def test_a_footer_of_another_length_is_refused() -> None:
    data = training_shard(layers=1, rows=20)

    async def body() -> None:
        bucket = CountingBucket()
        whole = bucket.data(await written(bucket, data, PLAIN))
        footer = facts_of(whole)
        bucket.replace(packed_name(OTHER, footer.nbytes + 1), whole[: footer.frame_ends[-1]] + encode_footer(footer))
        with pytest.raises(IntegrityError, match="as its name says"):
            await read(bucket, OTHER)

    run(body)


def test_a_shard_that_another_process_packed_anew_is_read_on() -> None:
    data = training_shard()

    async def body() -> None:
        bucket = Bucket()
        await written(bucket, data, Packing())
        reader = PackedStorage(bucket, None)
        assert await reader.read(SHARD, 0, 10) == data[:10]
        await written(bucket, data, Packing(level=3, master_once=True))
        for begin in range(0, len(data), 700_000):
            same = await reader.read(SHARD, begin, min(700_000, len(data) - begin)) == data[begin : begin + 700_000]
            assert same
        await reader.close()

    run(body)


@pytest.mark.parametrize("first", [Packing(), PLAIN])
@pytest.mark.parametrize("then", [Packing(level=9, master_once=True), None])
@pytest.mark.parametrize("what", [OTHER, SHARD])
def test_a_reader_that_remembers_goes_on_when_a_shard_or_its_source_was_written_anew(
    first: Packing, then: Packing | None, what: str
) -> None:
    data = training_shard(layers=1)

    async def body() -> None:
        bucket = Bucket()
        await written(bucket, data, first, OTHER)
        await written(bucket, data, first, SHARD, unchanged(0, 2 * MIB))
        reader, writer = PackedStorage(bucket, None), PackedStorage(bucket, then)
        assert await reader.read(SHARD, 0, 10) == data[:10]
        await writer.list()
        await writer.write(what, BytesSource(data))
        proved: dict[int, bytes] = {}

        def prove(at: int, piece: memoryview) -> None:
            if data[at : at + piece.nbytes] != piece:
                raise IntegrityError("not what it was")
            proved[at] = bytes(piece)

        buffer = bytearray(len(data) - 10)
        await reader.read_proved(SHARD, 10, memoryview(buffer), prove)
        assert buffer == data[10:] == b"".join(piece for _, piece in sorted(proved.items()))
        await writer.close()
        await reader.close()

    run(body)


def test_damage_of_a_source_is_seen_once_a_shard_is_to_be_looked_at_anew() -> None:
    data = training_shard(layers=1)

    async def body() -> None:
        bucket = CountingBucket()
        source = await written(bucket, data, PLAIN, OTHER)
        await written(bucket, data, PLAIN, SHARD, unchanged(0, len(data)))
        storage = PackedStorage(bucket, None)
        assert await storage.read(SHARD) == data
        hurt = bytearray(bucket.data(source))
        hurt[MIB // 2] ^= 1
        bucket.replace(source, bytes(hurt))
        storage.forget(SHARD)
        assert await storage.read(SHARD) != data
        await storage.close()

    run(body)


def test_what_a_packed_file_says_is_that_of_the_file_that_a_listing_showed() -> None:
    data = training_shard()

    async def body() -> None:
        bucket = Bucket()
        reader = PackedStorage(bucket, None)
        quantising = Packing(quantise=QuantiseRule(scheme="q8"))
        for packing, lossy in ((quantising, True), (Packing(), False)):
            await written(bucket, data, packing)
            await reader.children("run/step")
            facts = await reader.packed_facts(SHARD)
            assert facts is not None
            assert bool(facts.lossy) is lossy
        await reader.close()

    run(body)


def test_an_unpacking_reader_of_a_folder_gives_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = training_shard()

    class Wanted:
        path = SHARD
        ranges: Sequence[tuple[int, int]] = ((0, MIB), (2 * MIB, 3 * MIB))
        unit = MIB

        def __init__(self) -> None:
            self.found: dict[int, bytes] = {}
            self.failures: list[Exception] = []

        def place(self, begin: int, end: int) -> memoryview | None:
            return None

        def take(self, begin: int, piece: memoryview, placed: bool) -> None:
            self.found[begin] = bytes(piece)

        def failed(self, begin: int, end: int, error: Exception) -> None:
            self.failures.append(error)

    async def body() -> None:
        storage = PackedStorage(PosixStorage(tmp_path / "root", durable=False), MASTERS)
        await storage.write(SHARD, BytesSource(data))
        await storage.write(OTHER, BytesSource(data))
        wanted, missing, plain, locked = Wanted(), Wanted(), Wanted(), Wanted()
        locked.path = "run/locked/shard-00000-of-00001.safetensors"
        find = storage._names.find

        async def failing_find(path: str) -> Any:
            if path == locked.path:
                raise TemporaryError("the folder can't be listed", hint="")
            return await find(path)

        monkeypatch.setattr(storage._names, "find", failing_find)
        missing.path = "run/nowhere/shard-00000-of-00001.safetensors"
        plain.path = "document"
        await storage.put("document", data)
        await storage.read_pieces([locked, wanted, missing, plain])
        assert wanted.found == {begin: data[begin:end] for begin, end in wanted.ranges}
        assert b"".join(piece for _, piece in sorted(plain.found.items())) == data[:MIB] + data[2 * MIB : 3 * MIB]
        assert missing.failures
        assert all(isinstance(error, NotFoundError) for error in missing.failures)
        assert [type(error) for error in locked.failures] == [TemporaryError] * 2
        await storage.close()

    run(body)
