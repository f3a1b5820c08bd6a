"""Foreign files that lie: refused by name, nothing outside the folder is touched, nothing runs, nothing absurd is allocated."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adopt_kit import INDEX, assert_bits, hugging_face, quietly, save_dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import tierstore
from tierstore.errors import FormatError, IncompleteError, IntegrityError, UnsupportedTypeError, UsageError


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def header_of(tensors: dict[str, Any], data: int, *, claims: int | None = None) -> bytes:
    raw = json.dumps(tensors).encode()
    return struct.pack("<Q", len(raw) if claims is None else claims) + raw + bytes(data)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (header_of({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 8, claims=1 << 60), "claims"),
        (header_of({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}}, 8), "outside"),
        (header_of({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 8), "can't have"),
        (header_of({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 4), "outside"),
        (header_of({n: {"dtype": "U8", "shape": [2], "data_offsets": [b, b + 2]} for b, n in enumerate("xy")}, 3), "overlap"),
        (header_of({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 9), "the file has"),
        (header_of({"x": {"dtype": "U8", "shape": [0, 1 << 61], "data_offsets": [0, 0]}}, 0), "absurd size"),
        (header_of({"__metadata__": {"tierstore": "{}"}}, 0), "no valid format_version"),
        (b"", "at least 8 bytes; this one has 0"),
        (b"abc", "at least 8 bytes; this one has 3"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "header claims"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused_by_file(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=rf"{re.escape(str(tmp_path))}.*{why}") as refused:
        tierstore.open_foreign(tmp_path / "model.safetensors")
    assert "model.safetensors" in refused.value.message
    assert "tierstore verify" not in refused.value.hint  # it checks stores


@pytest.mark.parametrize(
    ("source", "kind", "why"),
    [
        ("", UsageError, "empty"),
        ("a\0b", UsageError, "control characters"),
        (7, UsageError, "text, not int"),
        (None, UsageError, "text, not NoneType"),
        ("s3://", UsageError, "names no bucket"),
        ("s3://key:secret@bucket/x", UsageError, "must not hold credentials"),
        ("tier:///run/step-1", UsageError, "a checkpoint within a store"),
    ],
)
def test_what_is_no_place_is_refused_as_source_and_as_target(tmp_path: Path, source: Any, kind: type[Exception], why: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(kind, match=why):
        tierstore.open_foreign(source)
    with tierstore.open_foreign(tmp_path) as checkpoint:
        for format in ("hf", "torch"):
            with pytest.raises(kind, match=why):
                checkpoint.export(source, tierstore.ExportOptions(format=format))


def test_what_is_missing_in_a_folder_is_said_as_it_is(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x"}}))
    with pytest.raises(UsageError, match=r"several index files: a\.safetensors\.index\.json, b\.safetensors\.index\.json"):
        tierstore.open_foreign(tmp_path)
    with pytest.raises(UsageError, match=r"holds no torch\.save file"):
        tierstore.open_foreign(tmp_path, format="torch")


@pytest.mark.parametrize("shapes", [{"a": "x"}, {"a": 3}, [1]])
def test_shapes_that_are_none_are_refused(tmp_path: Path, shapes: Any) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="shape"):
        tierstore.open_foreign(tmp_path, shapes=shapes)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a/../../b.safetensors", "x\x00.safetensors", ""])
def test_an_index_that_names_files_outside_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = hugging_face(tmp_path / "hf", [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="unsafe file name"):
        tierstore.open_foreign(folder)


@pytest.mark.parametrize(
    "body", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "x", "a": "y"}}', "{"]
)
def test_a_malformed_index_is_refused(tmp_path: Path, body: str) -> None:
    folder = hugging_face(tmp_path / "hf", [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    (folder / INDEX).write_text(body)
    with pytest.raises(FormatError):
        tierstore.open_foreign(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    lost = "model-00002-of-00002.safetensors"
    (folder / lost).rename(tmp_path / "kept")
    with pytest.raises(IncompleteError, match=rf"lacks the file '{lost}', which {re.escape(INDEX)} names"):
        tierstore.open_foreign(folder)
    (folder / INDEX).unlink()  # without an index the files' own numbers tell
    with pytest.raises(IncompleteError, match=f"lacks '{lost}'"):
        tierstore.open_foreign(folder)


def test_two_shards_with_the_same_tensor_are_named(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    save_file({"b": torch.ones(1), "a": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(IncompleteError, match=r"'a' is in two files: 'model-00001-of-00002\.safetensors' and 'model-00002"):
        tierstore.open_foreign(folder)


def test_a_shard_without_the_tensor_that_the_index_places_there_is_named(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    save_file({"c": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(IncompleteError, match=r"says that 'model-00002-of-00002\.safetensors' has the tensor 'b'"):
        tierstore.open_foreign(folder)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = hugging_face(tmp_path / "hf", [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises((IntegrityError, PermissionError), match=r"model-00002|leads out"):
        tierstore.open_foreign(folder)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_bomb_in_dcp_s_metadata_is_refused_and_never_runs(tmp_path: Path, protocol: int) -> None:
    folder = save_dcp({"a": torch.ones(2)}, tmp_path / "dcp")
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # noqa: S301 - our own
    metadata.planner_data = Bomb(tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    for work in (lambda: tierstore.open_foreign(folder), lambda: tierstore.open_foreign(folder, skip_objects=True)):
        with pytest.raises(FormatError, match=r"names posix\.system.*refused, nothing was executed"):
            work()
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - the proof that it is one
    assert (tmp_path / "ran").exists()


def test_a_bomb_in_an_object_never_runs(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": Bomb(tmp_path / "ran")}, tmp_path / "s.pt")
    folder = save_dcp({"a": torch.ones(2), "b": Bomb(tmp_path / "ran")}, tmp_path / "dcp")
    (tmp_path / "ran").unlink(missing_ok=True)  # DCP itself pickles and loads it while it saves
    with pytest.raises(UnsupportedTypeError, match=r"state\['b'\] is a posix\.system"):
        tierstore.open_foreign(tmp_path / "s.pt")
    for place in (tmp_path / "s.pt", folder):
        with tierstore.open_foreign(place, skip_objects=True) as checkpoint:
            assert_bits(checkpoint.state(), {"a": torch.ones(2)})
    assert not (tmp_path / "ran").exists()


def _edited(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    with path.open("rb") as file:
        metadata = pickle.load(file)  # noqa: S301 - our own
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _without_item(metadata: Any) -> None:
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "w"}


def _outside(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/passwd"


def _beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 1 << 50


def _uncovered(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([9, 3])


def _other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.float64


def _swapped(metadata: Any) -> None:
    one, two = (k for k in metadata.storage_data)
    metadata.storage_data[one], metadata.storage_data[two] = metadata.storage_data[two], metadata.storage_data[one]


def _huge(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 61])
    metadata.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1 << 61]))]
    metadata.storage_data = {k if k.fqn != "w" else MetadataIndex("w", [0]): v for k, v in metadata.storage_data.items()}


def _compressed(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (_without_item, IncompleteError, "tensor 'w' is listed in .metadata, but no file of it is"),  # NEIGHBOURS E1
        (_outside, FormatError, "unsafe file name"),
        (_beyond, IncompleteError, "__0_0.distcp has .* bytes; .metadata places '[vw]'"),
        (_uncovered, IncompleteError, "tensor 'w' of shape .9, 3.: no file holds"),  # NEIGHBOURS E23
        (_other_dtype, IncompleteError, "__0_0.distcp: for tensor 'w' .metadata promises float64"),
        (_swapped, IncompleteError, "__0_0.distcp: for tensor '[vw]' .metadata promises"),
        (
            _huge,
            IncompleteError,
            r"__0_0.distcp has .* bytes; .metadata claims 9,223,372,036,854,775,8\d\d bytes of tensors in it, up to 'w'",
        ),
        (_compressed, FormatError, "compressed by the DCP extension stream.zstd/1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_metadata_that_lie_are_refused_by_tensor_and_file(tmp_path: Path, change: Any, error: type[Exception], why: str) -> None:
    folder = save_dcp({"w": torch.ones(4, 3), "v": torch.ones(5)}, tmp_path / "dcp")
    _edited(folder, change)
    with pytest.raises(error, match=why), tierstore.open_foreign(folder) as checkpoint:
        checkpoint.state()


def test_a_dcp_directory_whose_save_did_not_end_is_told_from_one_that_is_none(tmp_path: Path) -> None:
    folder = save_dcp({"w": torch.ones(4)}, tmp_path / "dcp")
    (folder / "__0_0.distcp").rename(tmp_path / "kept")
    with pytest.raises(IncompleteError, match=r"lacks the file '__0_0\.distcp', which \.metadata names"):
        tierstore.open_foreign(folder)
    (tmp_path / "kept").rename(folder / "__0_0.distcp")
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-100])
    with pytest.raises(IncompleteError, match=r"__0_0\.distcp has"):
        tierstore.open_foreign(folder)
    (folder / ".metadata").rename(folder / ".metadata.tmp")  # NEIGHBOURS E8b
    with pytest.raises(IncompleteError, match=r"has no \.metadata, but \.metadata\.tmp"):
        tierstore.open_foreign(folder)


def _archive(tmp_path: Path, change: Callable[[str, bytes], bytes | None], *, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file of torch.save, with members changed, or left out (None)."""
    stream = io.BytesIO()
    torch.save({"w": torch.arange(8.0), "v": torch.ones(3)}, stream)
    path = tmp_path / "s.pt"
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(path, "w", compression) as target:
        for name in source.namelist():
            data = change(name.partition("/")[2], source.read(name))
            if data is not None:
                target.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda name, data: None if name == "data/0" else data, "no member 'data/0'"),
        (lambda name, data: data[:-4] if name == "data/0" else data, r"'w' of shape \(8,\) reaches beyond its storage of 28"),
        (lambda name, data: b"big" if name == "byteorder" else data, "big-endian"),
        (lambda name, data: None if name == "data.pkl" else data, "none of torch.save"),
        (lambda name, data: data[: len(data) // 2] if name == "data.pkl" else data, "pickle that can't be read"),
    ],
)
def test_an_archive_that_lies_is_refused(tmp_path: Path, change: Any, why: str) -> None:
    path = _archive(tmp_path, change)
    with pytest.raises(FormatError, match=why):
        tierstore.open_foreign(path)


def test_a_compressed_archive_is_refused_and_a_plain_one_of_another_tool_is_read(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="compressed"):
        tierstore.open_foreign(_archive(tmp_path, lambda name, data: data, compression=zipfile.ZIP_DEFLATED))
    with tierstore.open_foreign(_archive(tmp_path, lambda name, data: data)) as checkpoint:
        assert_bits(checkpoint.state(), {"w": torch.arange(8.0), "v": torch.ones(3)})


def test_every_truncation_of_an_archive_is_an_error_of_ours(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.arange(8.0)}, stream)
    whole = stream.getvalue()
    for length in range(0, len(whole), 61):
        (tmp_path / "s.pt").write_bytes(whole[:length])
        with pytest.raises(IntegrityError):
            tierstore.open_foreign(tmp_path / "s.pt")


def test_a_shard_of_the_hugging_face_writer_with_nonsense_for_offsets_is_refused(tmp_path: Path) -> None:
    for info in ("[]", "{", '{"w": {"saved_offsets": [1]}}', '{"w": {"saved_offsets": [-1, 0]}}', '{"w": {}}'):
        save_file({"w": torch.ones(2, 2)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", metadata={"DCP_SHARDING_INFO": info})
        with pytest.raises(FormatError, match="DCP_SHARDING_INFO"):
            tierstore.open_foreign(tmp_path)


def test_what_the_hugging_face_writer_makes_of_an_object_is_refused_by_file(tmp_path: Path) -> None:
    """NEIGHBOURS E2: its own reader says "header too large"."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    quietly(dcp.save, {"w": torch.ones(2), "step": 3}, storage_writer=writer, no_dist=True)
    with pytest.raises(FormatError, match=r"shard-00001-model-00001-of-00001\.safetensors"):
        tierstore.open_foreign(tmp_path)
