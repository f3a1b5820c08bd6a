"""A truncated, bit-flipped, foreign, misplaced or missing file in each place: the next tier, or a typed error, and never wrong data.

And what a hostile or newer hand may have written: manifests and indexes whose chain of digests is right, so that the parser must refuse.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_kit import run_forked

import tierstore
from tierstore.crashpoints import CRASH_EXIT
from tierstore.errors import ConfigError, FormatError, IntegrityError, NotFoundError, TierStoreError, UsageError, VersionError
from tierstore.format.digest import block_count, block_digests, digest_of, file_digest
from tierstore.format.index import Extent, FileEntry, Index, TensorEntry, build_index, decode_index, encode_index
from tierstore.testing.equality import assert_same_state

STEP = 2
BOTH = ("node", "shared")

PLACES = {
    "shard": f"r/step-{STEP:010d}-*/shard-00000-of-00001.safetensors",
    "part": f"r/step-{STEP:010d}-*/part-00000.safetensors",
    "objects": f"r/step-{STEP:010d}-*/objects.json",
    "index": f"r/step-{STEP:010d}-*/index.safetensors",
    "manifest": f"r/step-{STEP:010d}-*/manifest.json",
    "record": f"r/.log/step-{STEP:010d}-*/000000.json",
    "receipt": f"r/.log/step-{STEP:010d}-*/receipt-00000.json",
    "descriptor": "tierstore.json",
}


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.arange(400_000.0).reshape(-1, 8) * value, "b": torch.full((5,), value), "step": value}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"sha256:") + 20 if path.suffix == ".json" and b"sha256:" in data else -20] ^= 1
    path.write_bytes(data)


def foreign(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes((b"PK\x03\x04" * (size // 4 + 1))[:size])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def misplace(path: Path) -> None:
    """The good file of that name, of another checkpoint."""
    others = [p for p in path.parent.parent.glob(f"step-*/{path.name}") if p.parent != path.parent]
    path.write_bytes(others[0].read_bytes() if others else b"{}")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "foreign": foreign,
    "empty": empty,
    "misplaced": misplace,
    "missing": Path.unlink,
}


def tiers_in(folder: Path) -> list[str]:
    return [str(folder / name) for name in BOTH]


def place_in(folder: Path, tier: str, place: str) -> Path | None:
    return next(iter((folder / tier).glob(PLACES[place])), None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with steps 1 and 2 on both tiers."""
    folder = tmp_path_factory.mktemp("base")
    with tierstore.open(tiers_in(folder), run="r") as store:
        for step in (1, STEP):
            store.save(step, state_of(float(step)))
        store.sync(200)
    return folder


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose trainer died when step 2 was complete on the node's tier, and nowhere else."""
    folder = tmp_path_factory.mktemp("staged")
    config = {"version": 1, "run": "r", "tiers": [{"name": n, "uri": str(folder / n), "scope": n} for n in BOTH]}
    plan = json.dumps({"config": config, "steps": [STEP], "nbytes": 2_000_000})
    done = run_forked("import trainer_child; trainer_child.main()", plan, env={"TIERSTORE_CRASH_AT": "persist.after-receipt"})
    assert done.returncode == CRASH_EXIT, done.stderr
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", [p for p in PLACES if p != "descriptor"])
def test_damage_in_any_place_ends_in_the_next_tier_or_in_a_typed_error(
    place: str, damage: str, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for where in (("node",), ("shared",), BOTH):
        folder = tmp_path / "-".join(where)
        shutil.copytree(base, folder)
        hurt = [path for tier in where if (path := place_in(folder, tier, place))]
        for path in hurt:
            DAMAGES[damage](path)
        caplog.clear()
        with caplog.at_level(logging.WARNING), tierstore.open(tiers_in(folder), run="r") as store:
            everywhere = where == BOTH and place not in ("part", "receipt")
            recommitted = everywhere and (place, damage) == ("record", "missing")  # the payload is complete: it is committed again
            wrong_promise = place == "record" and damage == "misplaced" and "shared" in where  # the authority's word decides
            if (everywhere and not recommitted) or wrong_promise:
                with pytest.raises(IntegrityError) as caught:
                    store.resume()
                told = "manifest.json" if wrong_promise else hurt[0].name
                assert told in str(caught.value)
                assert "hint:" in str(caught.value)
                assert all(tier in str(caught.value) for tier in where) or place == "record"
                with pytest.raises((IntegrityError, NotFoundError)):
                    store.load(STEP)
                resumed = store.resume(fallback=True)
                assert resumed is not None
                assert (resumed.step, resumed.skipped) == (1, (STEP,))
                assert_same_state(resumed.state, state_of(1.0))
            else:
                resumed = store.resume()
                assert resumed is not None
                assert resumed.step == STEP
                assert_same_state(resumed.state, state_of(float(STEP)))
                assert_same_state(store.load(STEP), state_of(float(STEP)))
                if where == ("node",) and place not in ("part", "receipt", "record"):
                    assert hurt[0].name in caplog.text
            store.save(3, state_of(3.0)).wait("durable", 200)
            assert_same_state(store.load(3), state_of(3.0))
            assert_same_state(store.load(1), state_of(1.0))
        shutil.rmtree(folder)


def test_an_unreadable_commit_record_is_no_reason_to_begin_anew(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(base, folder)
    for path in list(folder.rglob("step-0000000001-*")):
        shutil.rmtree(path)
    for path in folder.rglob("000000.json"):
        truncate(path)
    with tierstore.open(tiers_in(folder), run="r") as store:
        with pytest.raises(IntegrityError, match=r"commit record of step 2 can't be read.*000000\.json"):
            store.resume()
        with pytest.raises(NotFoundError, match=r"no committed step 2 that can be read: .*000000\.json"):
            store.load(STEP)


def test_who_loads_in_its_own_way_finds_what_a_dead_process_left_whole(staged: Path, tmp_path: Path) -> None:
    """DeepSpeed's and Megatron's doors: `find_resumable` commits it first, as `resume` does."""
    folder = tmp_path / "copy"
    shutil.copytree(staged, folder)
    with tierstore.open(tiers_in(folder), run="r") as store:
        assert store.latest() is None
        found = store.find_resumable()
        assert found is not None
        assert found.step == STEP


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", ["shard", "part", "receipt"])
def test_a_damaged_attempt_of_a_dead_process_is_never_committed(place: str, damage: str, staged: Path, tmp_path: Path) -> None:
    from trainer_child import state_of as child_state

    folder = tmp_path / "copy"
    shutil.copytree(staged, folder)
    path = place_in(folder, "node", place)
    assert path is not None
    DAMAGES[damage](path)
    with tierstore.open(tiers_in(folder), run="r") as store:
        try:
            resumed = store.resume()
        except TierStoreError as error:
            assert isinstance(error, IntegrityError | NotFoundError)  # noqa: PT017 - either end is right
            resumed = None
        if resumed is not None:
            assert_same_state(resumed.state, child_state(STEP, 2_000_000))
        if place == "shard":
            assert resumed is None
        store.save(3, state_of(3.0)).wait("durable", 200)
        assert [c.attempt.step for c in store.checkpoints()] == ([3] if resumed is None else [STEP, 3])
        assert_same_state(store.load(3), state_of(3.0))


@pytest.mark.parametrize("tier", BOTH)
@pytest.mark.parametrize("damage", [d for d in DAMAGES if d != "missing"])
def test_a_damaged_descriptor_is_told_and_never_written_over(damage: str, tier: str, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(base, folder)
    path = folder / tier / PLACES["descriptor"]
    DAMAGES[damage](path)
    before = path.read_bytes()
    with pytest.raises((FormatError, ConfigError)) as caught:  # a flipped id is that of another store
        tierstore.open(tiers_in(folder), run="r")
    assert damage == "flipped" or tier in str(caught.value)
    assert "hint:" in str(caught.value)
    assert path.read_bytes() == before
    path.unlink()
    with tierstore.open(tiers_in(folder), run="r") as store:
        assert_same_state(store.load(STEP), state_of(float(STEP)))


def test_names_in_the_log_that_are_not_ours_are_left_alone(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(base, folder)
    garbage = []
    for tier in BOTH:
        log = folder / tier / "r/.log"
        (attempt,) = log.glob(f"step-{STEP:010d}-*")
        garbage += [
            log / "garbage",
            log / "step-2-x" / "000000.json",
            log / "step-0000000009-short" / "000000.json",
            attempt / "000001.json.tmp",
            attempt / "0.json",
            attempt / "receipt-x.json",
            attempt / "-00001.json",
            attempt / "deeper" / "000001.json",
            folder / tier / "r" / "step-0000000009-nonsense" / "manifest.json",
            folder / tier / "r" / f"step-{STEP:010d}" / "x",
        ]
    for path in garbage:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not ours")
    with tierstore.open(tiers_in(folder), run="r") as store:
        resumed = store.resume()
        assert resumed is not None
        assert resumed.step == STEP
        assert_same_state(resumed.state, state_of(float(STEP)))
        store.save(3, state_of(3.0)).wait("durable", 200)
        store.sync(200)
        assert [c.attempt.step for c in store.checkpoints()] == [1, STEP, 3]
    assert all(path.read_bytes() == b"not ours" for path in garbage)


@pytest.mark.parametrize("content", [b"not ours", b""])
@pytest.mark.parametrize("name", ["000001.json", "999999.json"])
def test_a_foreign_record_is_warned_of_and_does_not_hide_the_checkpoint(
    name: str, content: bytes, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(base, folder)
    (attempt,) = (folder / "shared" / "r/.log").glob(f"step-{STEP:010d}-*")
    (attempt / name).write_bytes(content)
    with tierstore.open(tiers_in(folder), run="r") as store:
        resumed = store.resume()
        assert resumed is not None
        assert resumed.step == STEP
        assert_same_state(resumed.state, state_of(float(STEP)))
        assert name in caplog.text
        store.save(3, state_of(3.0)).wait("durable", 200)


# What a foreign or newer hand may have written, with a chain of digests that holds


def rewrite(
    folder: Path,
    *,
    manifest: Callable[[dict[str, Any]], None] = lambda document: None,
    index: Callable[[bytes], bytes] | None = None,
    record: Callable[[dict[str, Any]], None] = lambda document: None,
) -> None:
    """Rewrites step 2 on both tiers: index, then the manifest that vouches for it, then the record that vouches for the manifest."""
    for tier in BOTH:
        paths = {name: place_in(folder, tier, name) for name in ("index", "manifest", "record")}
        assert paths["index"] is not None
        assert paths["manifest"] is not None
        assert paths["record"] is not None
        document = json.loads(paths["manifest"].read_bytes())
        entries = {file["name"]: file for file in document["files"]}
        if index is not None:
            data = index(paths["index"].read_bytes())
            paths["index"].write_bytes(data)
            for field in ("head_nbytes", "head_digest"):  # as older versions wrote it: the index is read as a whole
                del entries["index.safetensors"][field]
            entries["index.safetensors"].update(nbytes=len(data), digest=file_digest(block_digests(data, document["block_nbytes"])))
        manifest(document)
        document["nbytes"] = sum(file["nbytes"] for file in document["files"])
        body = json.dumps(document).encode()
        paths["manifest"].write_bytes(body)
        committed = json.loads(paths["record"].read_bytes())
        del committed["self_digest"]  # whoever forges a record can seal it; here it is the rest that is tested
        committed["data"].update(manifest=digest_of(body), manifest_nbytes=len(body), nbytes=document["nbytes"])
        record(committed)
        paths["record"].write_text(json.dumps(committed))


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copy"))


def refused(folder: Path, kind: type[TierStoreError], match: str) -> None:
    """Every way to step 2 is refused, and what is good still works."""
    with tierstore.open(tiers_in(folder), run="r") as store:
        for way in (lambda: store.load(STEP), store.resume, lambda: store.open_checkpoint(STEP)["w"][:1]):
            with pytest.raises(kind, match=match):
                way()
        assert_same_state(store.load(1), state_of(1.0))
        resumed = store.resume(fallback=True)
        assert resumed is not None
        assert resumed.step == 1


def test_rewriting_nothing_changes_nothing(copy: Path) -> None:
    rewrite(copy, index=lambda data: encode_index(decode_index(data)[0]))
    with tierstore.open(tiers_in(copy), run="r") as store:
        assert_same_state(store.load(STEP), state_of(float(STEP)))


def test_a_manifest_of_a_newer_major_version_is_refused_with_the_remedy(copy: Path) -> None:
    rewrite(copy, manifest=lambda document: document.update(format_version="2.0"))
    refused(copy, VersionError, r"(?s)manifest has format version 2\.0.*pip install -U tierstore")


def test_an_index_of_a_newer_major_version_is_refused_with_the_remedy(copy: Path) -> None:
    rewrite(copy, index=lambda data: data.replace(rb"format_version\":\"1.0", rb"format_version\":\"2.0"))
    refused(copy, VersionError, r"(?s)index has format version 2\.0.*pip install -U tierstore")


def test_a_newer_minor_version_is_read(copy: Path) -> None:
    rewrite(copy, manifest=lambda document: document.update(format_version="1.7", new_field=[1]))
    with tierstore.open(tiers_in(copy), run="r") as store:
        assert_same_state(store.load(STEP), state_of(float(STEP)))


def test_a_descriptor_of_a_newer_major_version_is_refused_with_the_remedy(copy: Path) -> None:
    for tier in BOTH:
        path = copy / tier / PLACES["descriptor"]
        path.write_text(path.read_text().replace('"1.0"', '"2.0"'))
    with pytest.raises(VersionError, match=r"(?s)tierstore\.json.*version 2\.0.*pip install -U tierstore"):
        tierstore.open(tiers_in(copy), run="r")


UNSAFE = ["../../../secret", "..", "/etc/passwd", "a/../../secret", "a\x00b", "a\nb", "a\x1b[2Jb", "a\\b", ".", "", "x" * 1000]


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_file_name_in_a_manifest_is_never_followed(name: str, copy: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        next(file for file in document["files"] if file["kind"] == "shard")["name"] = name

    rewrite(copy, manifest=change)
    refused(copy, FormatError, "unsafe file name|name")


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_file_name_in_an_index_is_never_followed(name: str, copy: Path) -> None:
    def change(data: bytes) -> bytes:
        made, metadata = decode_index(data)
        return encode_index(Index(columns=replace(made.columns, file_names=(name,)), block_nbytes=made.block_nbytes), metadata)

    rewrite(copy, index=change)
    refused(copy, FormatError, "unsafe file name")


@pytest.mark.parametrize("nbytes", [1 << 40, (1 << 62) - 1, 1 << 70, -1])
@pytest.mark.parametrize("kind", ["shard", "index", "objects"])
def test_an_absurd_file_size_in_a_manifest_is_refused_without_allocating_it(kind: str, nbytes: int, copy: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        next(file for file in document["files"] if file["kind"] == kind)["nbytes"] = nbytes

    rewrite(copy, manifest=change)
    with tierstore.open(tiers_in(copy), run="r") as store:
        with pytest.raises(IntegrityError):
            store.load(STEP)
        assert_same_state(store.load(1), state_of(1.0))


@pytest.mark.parametrize("nbytes", [1 << 40, (1 << 62) - 1, 1 << 70, -1, "many", None])
def test_an_absurd_manifest_size_in_a_commit_record_is_refused_or_proved_wrong(nbytes: Any, copy: Path) -> None:
    rewrite(copy, record=lambda document: document["data"].update(manifest_nbytes=nbytes))
    with tierstore.open(tiers_in(copy), run="r") as store:
        try:
            assert_same_state(store.load(STEP), state_of(float(STEP)))  # where it says nothing usable, the digest decides alone
        except IntegrityError as error:
            assert "manifest" in str(error)  # noqa: PT017 - either end is right


@pytest.mark.parametrize("nbytes", [0, 1, 101 << 20, 1 << 40, (1 << 64) - 1])
def test_an_index_whose_header_claims_an_absurd_size_is_refused(nbytes: int, copy: Path) -> None:
    rewrite(copy, index=lambda data: nbytes.to_bytes(8, "little") + data[8:])
    refused(copy, FormatError, "header|safetensors|index")


def test_a_tensor_of_absurd_size_is_an_error_of_ours_and_fills_no_memory(copy: Path) -> None:
    """Everything agrees that the shard has a PiB: index, manifest and commit record."""
    huge, block = 1 << 50, 1 << 30
    digests = bytes(32 * block_count(huge, block))
    shard = "shard-00000-of-00001.safetensors"
    whole = Extent(file=shard, begin=0, end=huge, offsets=(0,), sizes=(huge // 4,))
    small = Extent(file=shard, begin=0, end=20, offsets=(0,), sizes=(5,))
    tensors = [
        TensorEntry(name="w", dtype="float32", shape=(huge // 4,), extents=(whole,)),
        TensorEntry(name="b", dtype="float32", shape=(5,), extents=(small,)),
    ]
    made = build_index(tensors, [FileEntry(name=shard, nbytes=huge, block_digests=digests)], block_nbytes=block)

    def change(document: dict[str, Any]) -> None:
        document["block_nbytes"] = block
        entries = {file["name"]: file for file in document["files"]}
        entries[shard].update(nbytes=huge, digest=file_digest(digests))
        data = encode_index(made)
        entries["index.safetensors"]["digest"] = file_digest(block_digests(data, block))

    rewrite(copy, index=lambda _: encode_index(made), manifest=change)
    with tierstore.open(tiers_in(copy), run="r") as store:
        with pytest.raises(UsageError, match="no memory for a tensor of 1PiB"):
            store.load(STEP)
        with pytest.raises(IntegrityError, match="short"):
            store.open_checkpoint(STEP)["b"].full()
