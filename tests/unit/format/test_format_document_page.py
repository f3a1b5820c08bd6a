"""docs/design/format.md: its reader, taken from the page, reads what tierstore writes and notices damage."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.format.digest import block_digests, digest_of, file_digest
from tierstore.format.document import FORMAT_VERSION
from tierstore.format.dtypes import DTYPES
from tierstore.format.index import FileEntry, build_index, check_coverage, encode_index, merge_indexes
from tierstore.format.index_codec import LAYOUT
from tierstore.format.index_groups import HEAD_LAYOUT
from tierstore.format.manifest import FileRecord, Manifest, encode_manifest
from tierstore.format.objects import encode_objects, merge_objects
from tierstore.format.objects_codecs import BUILTIN_TAGS
from tierstore.format.part import Part, encode_part
from tierstore.format.record import KINDS, Record, encode_record
from tierstore.format.shard import ChunkSpec, plan_shard, tensor_entries
from tierstore.names import Attempt

PAGE = Path(__file__).parents[3] / "docs" / "design" / "format.md"
ATTEMPT = Attempt(run="team/llama", step=7, save_id="01ARZ3NDEKTSV4RRFFQ69G5FAV")
AT = datetime(2026, 11, 29, tzinfo=timezone.utc)
BLOCK = 1 << 12
DTYPE_OF = {"w": "bfloat16", "scalar": "float64", "c": "complex128", "empty": "float32", "tied": "bfloat16"}


def bits(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    itemsize = DTYPES[DTYPE_OF[name]].itemsize
    return np.random.default_rng(len(name)).integers(0, 256, (*shape, itemsize), dtype=np.uint8)


def objects_of(rank: int) -> dict[str, Any]:
    return {"epoch": 1, "order": list(range(100)), "loader": [{"rank": rank, "at": 3}]}


TENSORS = {"w": bits("w", (6, 1000)), "scalar": bits("scalar", ()), "c": bits("c", (5,)), "empty": bits("empty", (0, 3))}


def write_checkpoint(root: Path) -> Path:
    """A checkpoint of two ranks, as a store leaves it: `w` is cut along axis 0, the rest is on rank 0."""
    folder = root / ATTEMPT.folder
    folder.mkdir(parents=True)
    parts = []
    for rank in range(2):
        rows = slice(3 * rank, 3 * rank + 3)
        specs = [ChunkSpec(name="w", dtype="bfloat16", shape=(3, 1000), global_shape=(6, 1000), offsets=(3 * rank, 0))]
        for name, value in TENSORS.items():
            if rank == 0 and name != "w":
                shape = value.shape[:-1]
                specs.append(ChunkSpec(name=name, dtype=DTYPE_OF[name], shape=shape, global_shape=shape, offsets=(0,) * len(shape)))
        plan = plan_shard(specs, aliases={"tied": "w"})
        file = f"shard-{rank:05d}-of-00002.safetensors"
        local = {**TENSORS, "w": TENSORS["w"][rows]}
        data = plan.header + b"".join(local[p.spec.name].tobytes() for p in plan.placements)
        (folder / file).write_bytes(data)
        digests = block_digests(data, BLOCK)
        index = build_index(tensor_entries(plan, file), [FileEntry(name=file, nbytes=len(data), block_digests=digests)], BLOCK)
        objects = encode_objects(objects_of(rank))
        parts.append(Part(run=ATTEMPT.run, step=7, save_id=ATTEMPT.save_id, rank=rank, world_size=2, index=index, objects=objects))
        (folder / f"part-{rank:05d}.safetensors").write_bytes(encode_part(parts[-1]))
    merged = merge_indexes([part.index for part in parts])
    check_coverage(merged)
    (folder / "index.safetensors").write_bytes(encode_index(merged))
    (folder / "objects.json").write_bytes(merge_objects({part.rank: part.objects for part in parts}))
    files = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        digest = file_digest(block_digests(data, BLOCK))
        files.append(FileRecord(name=path.name, nbytes=len(data), digest=digest, kind=re.split(r"[-.]", path.name)[0]))
    document = encode_manifest(
        Manifest(
            store_id="s",
            run=ATTEMPT.run,
            step=7,
            save_id=ATTEMPT.save_id,
            world_size=2,
            block_nbytes=BLOCK,
            created_at=AT,
            files=tuple(files),
            tensors=len(merged),
            extents=merged.extent_count,
            nbytes=sum(f.nbytes for f in files),
        )
    )
    (folder / "manifest.json").write_bytes(document)
    record = Record(seq=0, kind="committed", at=AT, nonce="0" * 32, actor="test", data={"manifest": digest_of(document)})
    log = root / ATTEMPT.record_path(0)
    log.parent.mkdir(parents=True)
    log.write_bytes(encode_record(record))
    return folder


def reader() -> Any:
    (source,) = re.findall(r"```python\n((?:(?!```).)*?def read_checkpoint.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), scope)
    return scope["read_checkpoint"]


def test_the_reader_of_the_page_reads_and_proves_a_checkpoint(tmp_path: Path) -> None:
    tensors, objects = reader()(write_checkpoint(tmp_path))
    assert set(tensors) == {*TENSORS, "tied"}
    for name, (dtype, value) in tensors.items():
        assert dtype == DTYPE_OF[name]
        assert np.array_equal(value, TENSORS["w" if name == "tied" else name])
    assert objects == {rank: objects_of(rank) for rank in range(2)}
    assert "changes" in json.loads((tmp_path / ATTEMPT.folder / "objects.json").read_bytes())


def test_the_reader_of_the_page_notices_a_flipped_bit_in_any_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    read = reader()
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
        with pytest.raises(AssertionError):
            read(folder)
        path.write_bytes(good)
    read(folder)


def test_the_page_names_every_column_tag_kind_dtype_and_the_version() -> None:
    page = PAGE.read_text("utf-8")
    for word in (*LAYOUT, *HEAD_LAYOUT, *KINDS, *DTYPES, *(f"${tag}" for tag in BUILTIN_TAGS), f"`{FORMAT_VERSION}`"):
        assert word in page, word
