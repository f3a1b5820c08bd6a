"""Reads under damage: every byte from the nearest good copy, each bad copy named, and an error only where no copy is left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiers_kit import (
    BLOCK,
    Hooked,
    attempt_at,
    copy_to,
    failing,
    files_of,
    flip,
    path_of,
    persist_rank,
    run,
    save,
    shard_of,
    tiers_in,
)

from tierstore.errors import FormatError, IntegrityError, NotFoundError, TemporaryError, VersionError
from tierstore.format.digest import digest_of
from tierstore.format.objects import decode_objects
from tierstore.names import INDEX, MANIFEST, OBJECTS, Attempt, part_name, shard_name
from tierstore.storage.contract import Capabilities, Storage
from tierstore.tiers.catalog import CheckpointInfo, scan
from tierstore.tiers.replica import Replica, Want, open_replica
from tierstore.tiers.tier import Tiers

NEAR, SHARED, FAR = "node", "shared", "far"


def info_of(tiers: Tiers, step: int = 5) -> CheckpointInfo:
    info = run(scan(tiers, "run")).find(step)
    assert info is not None
    return info


def saved_everywhere(folder: Path, world_size: int = 2) -> tuple[Tiers, Attempt]:
    tiers = tiers_in(folder)
    attempt = run(save(tiers, 5, world_size=world_size))
    for name in (NEAR, FAR):
        run(copy_to(tiers, attempt, name))
    return tiers, attempt


async def load(
    tiers: Tiers, info: CheckpointInfo, world_size: int = 2, *, verify: bool = True
) -> tuple[list[bytes], list[object], Replica]:
    """All shards as wholes, and all objects."""
    replica = await open_replica(tiers, info)
    buffers = [bytearray(replica.index.file(shard_name(rank, world_size)).nbytes) for rank in range(world_size)]
    wants = [Want(shard_name(rank, world_size), 0, memoryview(buffer)) for rank, buffer in enumerate(buffers)]
    await replica.read(wants)
    objects = [decode_objects(await replica.objects(rank)) for rank in range(world_size)]
    return [bytes(b) for b in buffers], objects, replica


def expect_whole(tiers: Tiers, info: CheckpointInfo | None = None) -> Replica:
    shards, objects, replica = run(load(tiers, info or info_of(tiers)))
    assert shards == [shard_of(rank, 2).data for rank in range(2)]
    assert objects == [{"rank": rank, "seed": 0, "step": 5} for rank in range(2)]
    return replica


def test_the_nearest_tier_serves_everything(tmp_path: Path) -> None:
    tiers, _ = saved_everywhere(tmp_path)
    replica = expect_whole(tiers)
    assert set(replica.bytes_fetched) == {NEAR}
    assert replica.bad_copies == []


@pytest.mark.parametrize("name", [NEAR, SHARED, FAR])
def test_any_one_tier_alone_is_enough(tmp_path: Path, name: str) -> None:
    """A replica is complete in itself, the log's copies included."""
    tiers, _ = saved_everywhere(tmp_path)
    for other in (NEAR, SHARED, FAR):
        if other != name:
            (tmp_path / other).rename(tmp_path / f"gone-{other}")
    replica = expect_whole(tiers)
    assert set(replica.bytes_fetched) == {name}


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "foreign"])
@pytest.mark.parametrize("file", files_of(2))
@pytest.mark.parametrize("bad", [(NEAR,), (NEAR, SHARED)])
def test_a_bad_copy_of_any_file_is_named_and_the_next_tier_is_used(
    tmp_path: Path, damage: str, file: str, bad: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """CASES 3, 98, Megatron-LM#5281: each kind of damage, in each kind of file, on one tier or two."""
    tiers, attempt = saved_everywhere(tmp_path)
    info = info_of(tiers)
    for name in bad:
        spoil(path_of(tiers, name, attempt, file), damage)
    with caplog.at_level(logging.WARNING):
        replica = expect_whole(tiers, info)
    for name in bad:
        assert [r.message for r in caplog.records if f"tier={name} file={attempt.path(file)}" in r.message], caplog.text
    assert [(b.tier, b.file) for b in replica.bad_copies] == [(name, file) for name in bad]


def spoil(path: Path, damage: str) -> None:
    if damage == "flip":
        flip(path)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(b"\x80\x04PK" * (path.stat().st_size // 4 + 1))


@pytest.mark.parametrize("file", files_of(2))
def test_with_no_good_copy_left_the_error_lists_every_tier_and_its_reason(tmp_path: Path, file: str) -> None:
    tiers, attempt = saved_everywhere(tmp_path)
    info = info_of(tiers)
    flip(path_of(tiers, NEAR, attempt, file))
    path_of(tiers, SHARED, attempt, file).write_bytes(b"")
    path_of(tiers, FAR, attempt, file).unlink()
    with pytest.raises(IntegrityError) as caught:
        run(load(tiers, info))
    message = caught.value.message
    assert file in message
    assert "node: IntegrityError" in message
    assert "shared: IntegrityError" in message
    assert "far: NotFoundError" in message
    assert "fallback" in caught.value.hint


def test_only_the_bad_block_is_fetched_from_the_next_tier(tmp_path: Path) -> None:
    """CASES (loading) 15: one of many blocks is bad: exactly that one comes from elsewhere."""
    tiers, attempt = saved_everywhere(tmp_path)
    file = shard_name(0, 2)
    path = path_of(tiers, NEAR, attempt, file)
    flip(path, 3 * BLOCK + 17)
    flip(path, path.stat().st_size - 1)
    replica = expect_whole(tiers)
    last = path.stat().st_size % BLOCK
    assert replica.bytes_fetched[SHARED] == BLOCK + last
    assert replica.requests[SHARED] == 2


def test_a_flipped_bit_outside_the_wanted_blocks_does_not_matter(tmp_path: Path) -> None:
    """CASES 98: a slice that touches the flipped bit is refused, one that does not is read."""
    tiers, attempt = tiers_in(tmp_path), attempt_at(5)
    run(save(tiers, 5, attempt=attempt))
    path = path_of(tiers, SHARED, attempt, shard_name(0, 1))
    whole = path.read_bytes()
    flip(path, 2 * BLOCK + 1)
    replica = run(open_replica(tiers, info_of(tiers)))

    def read(offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        run(replica.read([Want(shard_name(0, 1), offset, memoryview(buffer))]))
        return bytes(buffer)

    assert read(BLOCK + 5, 700) == whole[BLOCK + 5 : BLOCK + 705]
    assert read(3 * BLOCK, 100) == whole[3 * BLOCK : 3 * BLOCK + 100]
    with pytest.raises(IntegrityError, match="block 2 is damaged"):
        read(2 * BLOCK + 2000, 10)


def test_without_verification_exactly_the_wanted_bytes_are_read(tmp_path: Path) -> None:
    tiers, attempt = saved_everywhere(tmp_path)
    flip(path_of(tiers, NEAR, attempt, shard_name(0, 2)), BLOCK + 10)
    replica = run(open_replica(tiers, info_of(tiers)))
    before = replica.bytes_fetched[NEAR]
    buffer = bytearray(100)
    run(replica.read([Want(shard_name(0, 2), BLOCK, memoryview(buffer))], verify=False))
    assert replica.bytes_fetched[NEAR] - before == 100
    assert bytes(buffer) != shard_of(0, 2).data[BLOCK : BLOCK + 100]


def test_wants_of_any_shape_and_overlap_are_filled(tmp_path: Path) -> None:
    tiers, _ = saved_everywhere(tmp_path)
    replica = run(open_replica(tiers, info_of(tiers)))
    data = [shard_of(rank, 2).data for rank in range(2)]
    ranges = [
        (0, 0, 10),
        (0, 5, 9000),
        (1, 4095, 2),
        (1, 4096, 4096),
        (0, len(data[0]) - 1, 1),
        (1, 0, len(data[1])),
        (0, 77, 0),
        (0, 5, 9000),
    ]
    buffers = [bytearray(n) for _, _, n in ranges]
    run(replica.read([Want(shard_name(r, 2), o, memoryview(b)) for (r, o, _), b in zip(ranges, buffers, strict=True)]))
    for (rank, offset, nbytes), buffer in zip(ranges, buffers, strict=True):
        assert bytes(buffer) == data[rank][offset : offset + nbytes]


def test_a_want_outside_its_file_and_an_unknown_file_are_refused(tmp_path: Path) -> None:
    tiers, _ = saved_everywhere(tmp_path)
    replica = run(open_replica(tiers, info_of(tiers)))
    with pytest.raises(IntegrityError, match="which has"):
        run(replica.read([Want(shard_name(0, 2), 10**9, memoryview(bytearray(1)))]))
    with pytest.raises(NotFoundError, match="no file"):
        run(replica.read([Want("shard-00009-of-00009.safetensors", 0, memoryview(bytearray(1)))]))


def test_a_tier_that_goes_down_in_mid_read_is_left_for_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_everywhere(tmp_path)
    left = [3]

    async def hook(operation: str, path: str) -> None:
        if operation.startswith("read") and path.startswith("run/step"):
            left[0] -= 1
            if left[0] < 0:
                raise TemporaryError("connection reset")

    tiers = tiers_in(tmp_path, wrap={NEAR: lambda s: Hooked(s, hook)})
    replica = expect_whole(tiers)
    assert replica.bytes_fetched[SHARED] > 0
    assert "connection reset" in caplog.text


def test_when_all_tiers_are_down_the_error_says_so_and_not_damage(tmp_path: Path) -> None:
    plain, _ = saved_everywhere(tmp_path)
    info = info_of(plain)
    down = failing(TemporaryError("endpoint down"))
    tiers = tiers_in(tmp_path, wrap={NEAR: down, SHARED: down, FAR: down})
    with pytest.raises(TemporaryError, match=r"node: .*shared: .*far: "):
        run(open_replica(tiers, info))


def test_a_document_is_given_out_proved(tmp_path: Path) -> None:
    tiers, attempt = saved_everywhere(tmp_path)
    info = info_of(tiers)
    wanted = {name: path_of(tiers, SHARED, attempt, name).read_bytes() for name in (MANIFEST, INDEX, OBJECTS, part_name(1))}
    for name in wanted:
        flip(path_of(tiers, NEAR, attempt, name))
    replica = run(open_replica(tiers, info))
    assert {name: run(replica.document(name)) for name in wanted} == wanted
    with pytest.raises(NotFoundError, match="no file 'x'"):
        run(replica.document("x"))


def test_a_node_serves_its_own_ranks_and_the_rest_comes_from_further_away(tmp_path: Path) -> None:
    """A node tier with a receipt has no manifest: it comes from elsewhere, its shards from here."""
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.nearest, rank=1, world_size=2))
    run(save(tiers, 5, world_size=2, attempt=attempt))
    replica = expect_whole(tiers)
    assert replica.bytes_fetched[NEAR] == len(shard_of(1, 2).data)
    assert replica.bad_copies == []
    flip(path_of(tiers, NEAR, attempt, shard_name(1, 2)))
    assert [(b.tier, b.file) for b in expect_whole(tiers).bad_copies] == [(NEAR, shard_name(1, 2))]


def test_a_copy_without_its_record_is_a_last_resort_that_is_proved_like_any_other(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5, world_size=2))
    run(copy_to(tiers, attempt, FAR, record=False))
    flip(path_of(tiers, SHARED, attempt, shard_name(0, 2)))
    expect_whole(tiers)


def test_bytes_go_straight_into_a_buffer_that_holds_whole_blocks(tmp_path: Path) -> None:
    """The want's own memory is handed to the storage; scratch memory is used for edges only."""
    saved_everywhere(tmp_path)
    seen: list[tuple[int, int]] = []

    class Noting(Hooked):
        async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
            seen.append((offset, id(buffer.obj)))
            await super().read_into(path, offset, buffer)

    async def nothing(operation: str, path: str) -> None:
        return

    tiers = tiers_in(tmp_path, wrap={NEAR: lambda s: Noting(s, nothing)})
    replica = run(open_replica(tiers, info_of(tiers)))
    whole, edge = bytearray(2 * BLOCK), bytearray(100)
    run(replica.read([Want(shard_name(0, 2), BLOCK, memoryview(whole)), Want(shard_name(1, 2), 50, memoryview(edge))]))
    assert (BLOCK, id(whole)) in seen
    assert (0, id(edge)) not in seen


def test_reads_are_bounded_and_nothing_runs_on_after_an_error(tmp_path: Path) -> None:
    saved_everywhere(tmp_path)
    running: list[int] = [0, 0]

    async def hook(operation: str, path: str) -> None:
        if operation == "read_into":
            running[0] += 1
            running[1] = max(running[1], running[0])
            try:
                await asyncio.sleep(0.001)
            finally:
                running[0] -= 1

    def slow(storage: Storage) -> Storage:
        return Hooked(storage, hook)

    tiers = tiers_in(tmp_path, wrap={NEAR: slow, SHARED: slow, FAR: slow})
    info = info_of(tiers)
    for name in (NEAR, SHARED, FAR):
        flip(path_of(tiers, name, info.attempt, shard_name(0, 2)), 3)

    async def work() -> None:
        replica = await open_replica(tiers, info)
        wants = [Want(shard_name(rank, 2), at, memoryview(bytearray(1))) for rank in (1, 0) for at in range(0, 32_000, 10)]
        with pytest.raises(IntegrityError):
            await replica.read(wants)
        assert running[0] == 0
        assert 1 <= running[1] <= 4

    run(work())


# what a foreign or newer hand may have written


def commit_manifest(tiers: Tiers, attempt: Attempt, change: Callable[[dict[str, object]], None]) -> CheckpointInfo:
    """Commits an attempt whose manifest says what `change` makes of it: a chain of trust around absurd claims."""
    path = path_of(tiers, SHARED, attempt, MANIFEST)
    document = json.loads(path.read_bytes())
    change(document)
    data = json.dumps(document).encode()
    path.write_bytes(data)
    return replace(info_of(tiers), manifest_digest=digest_of(data), manifest_nbytes=len(data))


def test_a_manifest_of_a_newer_major_version_is_refused_by_name(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    info = commit_manifest(tiers, attempt, lambda d: d.update(format_version="2.0"))
    with pytest.raises(VersionError, match=r"2\.0"):
        run(open_replica(tiers, info))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "a\x00b", "a\nb", "a\\b", "", "."])
def test_unsafe_names_in_a_manifest_are_refused(tmp_path: Path, name: str) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))

    def change(document: dict[str, object]) -> None:
        files = document["files"]
        assert isinstance(files, list)
        files[-1]["name"] = name

    with pytest.raises(FormatError):
        run(open_replica(tiers, commit_manifest(tiers, attempt, change)))


@pytest.mark.parametrize("field", ["nbytes", "digest"])
def test_an_index_that_the_manifest_does_not_bear_out_is_refused(tmp_path: Path, field: str) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))

    def change(document: dict[str, object]) -> None:
        files = document["files"]
        assert isinstance(files, list)
        shard = next(f for f in files if f["kind"] == "shard")
        shard[field] = shard[field] + 1 if field == "nbytes" else "sha256:" + "0" * 64
        document["nbytes"] = sum(f["nbytes"] for f in files)

    with pytest.raises(IntegrityError, match="disagree about shard-00000-of-00001"):
        run(open_replica(tiers, commit_manifest(tiers, attempt, change)))


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    with pytest.raises(IntegrityError, match="is that of run@6"):
        run(open_replica(tiers, commit_manifest(tiers, attempt, lambda d: d.update(step=6))))


@pytest.mark.parametrize("kind", ["cut", "short", "flip"])
def test_the_nth_read_fails_for_every_n_and_the_load_is_right_or_an_error(tmp_path: Path, kind: str) -> None:
    """PROTOCOLS §9.3 over reads with one tier: a result, or a typed error, never wrong bytes and never silence."""
    plain = tiers_in(tmp_path, [SHARED])
    run(save(plain, 5, world_size=2))
    info = info_of(plain)
    for number in range(1, 40):
        counter = [number]

        async def hook(operation: str, path: str) -> None:
            return

        class Failing(Hooked):
            def fails(self) -> bool:
                counter[0] -= 1  # noqa: B023
                return counter[0] == 0  # noqa: B023

            async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
                data = bytearray(await self.inner.read(path, offset, nbytes))
                return bytes(self.spoil(memoryview(data)))

            async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
                await self.inner.read_into(path, offset, buffer)
                self.spoil(buffer)

            def spoil(self, data: memoryview) -> memoryview:
                if not self.fails():
                    return data
                if kind == "cut":
                    raise TemporaryError("cut")
                if kind == "short":
                    raise IntegrityError("short")
                data[len(data) // 2] ^= 4
                return data

        tiers = tiers_in(tmp_path, [SHARED], wrap={SHARED: lambda s: Failing(s, hook)})
        try:
            expect_whole(tiers, info)
        except (IntegrityError, TemporaryError):
            assert counter[0] <= 0, "an error without a fault"
        else:
            if counter[0] > 0:
                return
    pytest.fail("no run met no fault")


@pytest.mark.parametrize("damaged", [None, MANIFEST, INDEX, OBJECTS])
def test_from_far_away_manifest_index_and_objects_are_asked_for_at_once(tmp_path: Path, damaged: str | None) -> None:
    """Each is held back until all three are asked for. What is asked ahead is proved as ever, and the next tier helps."""
    plain = tiers_in(tmp_path)
    attempt = run(save(plain, 1))
    run(copy_to(plain, attempt, "far"))
    if damaged is not None:
        flip(path_of(plain, "shared", attempt, damaged), 40)

    async def work() -> None:
        asked: set[str] = set()
        together = asyncio.Event()

        async def hold(operation: str, path: str) -> None:
            if operation == "read" and (name := path.rpartition("/")[2]) in (MANIFEST, INDEX, OBJECTS):
                asked.add(name)
                if len(asked) == 3:
                    together.set()
                await asyncio.wait_for(together.wait(), 120)

        class FarAway(Hooked):
            @property
            def capabilities(self) -> Capabilities:
                return replace(self.inner.capabilities, local=False)

        tiers = tiers_in(tmp_path, names=("node", "shared", "far"), wrap={"shared": lambda s: FarAway(s, hold)})
        info = (await scan(tiers, "run")).latest()
        assert info is not None
        replica = await open_replica(tiers, info, objects=True)
        assert await replica.objects() == await (await open_replica(plain, info)).objects()
        assert [copy.file for copy in replica.bad_copies] == ([] if damaged is None else [damaged])

    run(work())
