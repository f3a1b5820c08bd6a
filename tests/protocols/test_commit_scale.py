"""A commit of many ranks: each part is read once, nothing of it is held that can be told from the rest, and all of it comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers_kit import Hooked, SteppedClock, attempt_at, path_of, run, tiers_in

from tierstore.errors import CondemnedError
from tierstore.format.digest import block_digests
from tierstore.format.index import Extent, FileEntry, Index, TensorEntry, build_index
from tierstore.format.objects import TensorRef, decode_objects, encode_objects
from tierstore.format.part import Part, encode_part
from tierstore.names import OBJECTS, Attempt, part_name, shard_name
from tierstore.storage.contract import Storage
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.gathering import Gathering
from tierstore.tiers.replica import open_replica
from tierstore.tiers.tier import Tiers

RANKS = 120
TENSORS = 40
ROW = 32
BLOCK = 4096


def name_of(number: int) -> str:
    return f"layers.{number:03d}.weight"


def objects_of(rank: int) -> dict[str, Any]:
    return {
        "model": {name_of(i): TensorRef(name_of(i)) for i in range(TENSORS)},
        "optim": [{"step": 7.0, "betas": (0.9, 0.95), "m": TensorRef(name_of(i))} for i in range(TENSORS)],
        "rng": rank.to_bytes(2, "little") * 40,
        "rank": rank,
    }


def rank_index(rank: int, offset: int | None = None) -> Index:
    file = shard_name(rank, RANKS)
    row = rank if offset is None else offset
    return build_index(
        [
            TensorEntry(
                name=name_of(i),
                dtype="uint8",
                shape=(RANKS, ROW),
                extents=(Extent(file=file, begin=ROW * i, end=ROW * (i + 1), offsets=(row, 0), sizes=(1, ROW)),),
            )
            for i in range(TENSORS)
        ],
        [FileEntry(name=file, nbytes=ROW * TENSORS, block_digests=block_digests(bytes(ROW * TENSORS), BLOCK))],
        BLOCK,
    )


async def write_parts(storage: Storage, attempt: Attempt, moved: dict[int, int] | None = None) -> None:
    for rank in range(RANKS):
        part = Part(
            run=attempt.run,
            step=attempt.step,
            save_id=attempt.save_id,
            rank=rank,
            world_size=RANKS,
            index=rank_index(rank, (moved or {}).get(rank)),
            objects=encode_objects(objects_of(rank)),
        )
        await storage.put(attempt.path(shard_name(rank, RANKS)), bytes(ROW * TENSORS))
        await storage.put(attempt.path(part_name(rank)), encode_part(part))


def counted(folder: Path) -> tuple[Tiers, Hooked]:
    async def nothing(operation: str, path: str) -> None:
        return None

    hooked: list[Hooked] = []

    def wrap(storage: Storage) -> Storage:
        hooked.append(Hooked(storage, nothing))
        return hooked[0]

    return tiers_in(folder, ("shared",), wrap={"shared": wrap}), hooked[0]


def test_many_ranks_commit_with_one_read_of_each_part_and_come_back(tmp_path: Path) -> None:
    tiers, storage = counted(tmp_path)
    attempt = attempt_at(3)

    async def work() -> None:
        await write_parts(storage, attempt)
        storage.calls.clear()
        await commit(tiers, attempt, deadline_s=0, clock=SteppedClock())
        reads = [path for operation, path in storage.calls if operation == "read" and "/part-" in path]
        assert len(reads) == len(set(reads)) == RANKS

        info = (await scan(tiers, "run")).latest()
        assert info is not None
        replica = await open_replica(tiers, info)
        assert replica.index.extent_count == RANKS * TENSORS
        assert [e.offsets[0] for e in replica.index.find(name_of(7)).extents] == list(range(RANKS))
        for rank in (0, 1, RANKS // 2, RANKS - 1):
            assert decode_objects(await replica.objects(rank)) == objects_of(rank)
        assert len(set((await replica.object_ranks()).values())) == RANKS

    run(work())
    whole = len(encode_objects(objects_of(0)))
    own = len(json.dumps(objects_of(0)["rng"].hex()))
    assert path_of(tiers, "shared", attempt, OBJECTS).stat().st_size < whole + RANKS * (own + 100), "what is common is stored once"


def test_a_gathered_part_does_not_hold_on_to_the_bytes_that_it_was_read_from(tmp_path: Path) -> None:
    _, storage = counted(tmp_path)
    attempt = attempt_at(3)

    async def work() -> list[Any]:
        await write_parts(storage, attempt)
        gathering = Gathering(storage=storage, attempt=attempt, world_size=None)
        await gathering.look()
        assert gathering.complete
        return gathering.take()

    parts = run(work())
    assert [part.rank for part in parts] == list(range(RANKS))
    for column in (getattr(parts[5].index.columns, name) for name in ("names", "begins", "offsets", "digests")):
        assert isinstance(column, np.ndarray)
        assert column.flags.owndata
    assert len(parts[5].objects) < len(encode_objects(objects_of(5))) / 3


def test_a_rank_among_many_that_wrote_another_s_rows_is_named(tmp_path: Path) -> None:
    tiers, storage = counted(tmp_path)
    attempt = attempt_at(3)

    async def work() -> None:
        await write_parts(storage, attempt, moved={90: 40})
        await commit(tiers, attempt, deadline_s=0, clock=SteppedClock())

    with pytest.raises(CondemnedError, match=rf"{name_of(0)}.*{shard_name(40, RANKS)}.*overlaps.*{shard_name(90, RANKS)}"):
        run(work())
