"""A folder of files becomes a checkpoint and comes back equal byte by byte, whatever the files are; nothing leads outside."""

from __future__ import annotations

import filecmp
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import tierstore
from tierstore.errors import FormatError, IntegrityError, NotFoundError, RefusedError, UsageError, VersionError
from tierstore.state.folder import FOLDER, folder_state, list_folder
from tierstore.state.folder_ranks import _divide
from tierstore.state.folder_restore import restore_folder, same_folder, sweep_temporaries
from tierstore.storage.temporaries import temporary_name


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tierstore.Store]:
    with tierstore.open([str(tmp_path / "node"), str(tmp_path / "shared")], run="r") as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "sub" / "deep").mkdir(parents=True)
    save_file(
        {"a.b": torch.randn(30, 5), "half": torch.randn(7).bfloat16(), "none": torch.empty(0, 3), "one": torch.tensor(3.0)},
        made / "m.safetensors",
    )
    torch.save({"x": torch.arange(100)}, made / "sub" / "deep" / "optimizer.pt")
    (made / "empty").touch()
    (made / "grüße 1.json").write_text("{}")
    return made


def assert_equal_folders(left: Path, right: Path) -> None:
    files = [[str(p.relative_to(root)) for p in sorted(root.rglob("*")) if p.is_file()] for root in (left, right)]
    assert files[0] == files[1]
    assert filecmp.cmpfiles(left, right, files[0], shallow=False)[1:] == ([], [])


def there_and_back(store: tierstore.Store, folder: Path, to: Path, step: int = 1) -> None:
    store.save(step, folder_state(folder)).wait("durable", 60)
    with store.open_checkpoint(step) as checkpoint:
        assert restore_folder(checkpoint, to).path == to
        assert same_folder(checkpoint, to)
    assert_equal_folders(folder, to)


def test_every_kind_of_file_comes_back_byte_by_byte_and_safetensors_are_tensors(
    store: tierstore.Store, folder: Path, tmp_path: Path
) -> None:
    there_and_back(store, folder, tmp_path / "back")
    with store.open_checkpoint(1) as checkpoint:
        assert checkpoint["m.a.b"][2:4].shape == (2, 5)
        assert checkpoint["m.half"].dtype == torch.bfloat16
        assert "files.sub/deep/optimizer.pt" in checkpoint
        assert "files.m.safetensors" not in checkpoint


def test_a_large_tensor_and_a_large_file_go_window_by_window(
    store: tierstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.state.folder_restore._WINDOW_NBYTES", 4096)
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"w": torch.randn(33, 7, 19), "v": torch.randn(5000)}, folder / "m.safetensors")
    (folder / "data").write_bytes(os.urandom(50_001))
    told: list[tuple[int, int]] = []
    store.save(1, folder_state(folder)).wait("durable", 60)
    with store.open_checkpoint(1) as checkpoint:
        restored = restore_folder(checkpoint, tmp_path / "back", progress=lambda done, total: told.append((done, total)))
    assert_equal_folders(folder, tmp_path / "back")
    assert told == sorted(told)
    assert told[-1] == (restored.nbytes, restored.nbytes)
    assert len(told) > 10


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 64, (10).to_bytes(8, "little") + b"{}        " + b"rest", (2).to_bytes(8, "little") + b"{}"],
    ids=["empty", "short", "absurd", "with-a-rest", "of-nothing"],
)
def test_a_file_that_only_says_that_it_is_safetensors_is_stored_as_it_is(store: tierstore.Store, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_bytes(content)
    there_and_back(store, tmp_path / "folder", tmp_path / "back")


def test_names_that_clash_are_stored_apart(store: tierstore.Store, tmp_path: Path) -> None:
    """Files of two precisions, tensors called as our own keys, and two files that have one tensor."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, (name, key) in enumerate(
        [
            ("model", "fp16.w"),
            ("model.fp16", "w"),
            ("files", "w"),
            ("folder", "w"),
            ("safetensors.x", "w"),
            ("m-00001-of-00002", "w"),
            ("m-00002-of-00002", "w"),
        ]
    ):
        save_file({key: torch.full((3,), float(number))}, folder / f"{name}.safetensors")
    there_and_back(store, folder, tmp_path / "back")


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    files=st.lists(
        st.tuples(
            st.sampled_from(["a", "b.safetensors", "c/d", "c/e.safetensors", "ä/ö", "x@y", "files", "safetensors"]), st.binary(max_size=200)
        ),
        max_size=6,
        unique_by=lambda item: item[0],
    )
)
def test_any_folder_comes_back(store: tierstore.Store, tmp_path_factory: pytest.TempPathFactory, files: Any) -> None:
    root = tmp_path_factory.mktemp("any")
    (root / "folder").mkdir()
    for path, content in files:
        (root / "folder" / path).parent.mkdir(exist_ok=True)
        (root / "folder" / path).write_bytes(content)
    there_and_back(store, root / "folder", root / "back", step=len(list(root.parent.iterdir())))


def test_links_sockets_and_names_that_cant_be_stored_are_named(tmp_path: Path) -> None:
    for number, (make, told) in enumerate(
        [
            (lambda path: path.symlink_to("/etc/passwd"), "'x' in .* is a symbolic link"),
            (lambda path: os.mkfifo(path), "'x' in .* is no regular file"),
            (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "'x' in .* is no regular file"),
            (lambda path: (path.parent / "a@rank1").touch(), "'a@rank1' in .* can't be stored"),
            (lambda path: (path.parent / "a\nb").touch(), "can't be stored"),
            (lambda path: open(os.fsencode(path.parent) + b"/\xff", "w").close(), "can't be stored"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.warns(ResourceWarning) if number == 2 else _nothing():
            make(folder / "x")  # type: ignore[no-untyped-call]
        with pytest.raises(UsageError, match=told):
            folder_state(folder)
    with pytest.raises(NotFoundError, match="no folder"):
        list_folder(tmp_path / "absent")


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_a_file_that_changes_or_goes_after_it_was_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    files = list_folder(tmp_path)
    (tmp_path / "a").write_bytes(b"123")
    with pytest.raises(UsageError, match="has changed"):
        folder_state(tmp_path, files)
    (tmp_path / "a").unlink()
    with pytest.raises(NotFoundError, match="is gone"):
        folder_state(tmp_path, files)


def _hostile(path: str) -> dict[str, Any]:
    return {FOLDER: {"version": 1}, "files": {path: torch.zeros(3, dtype=torch.uint8)}}


@pytest.mark.parametrize("path", ["../outside", "/tmp/outside", "a/../../outside", "a//b", ".", "a\\b"])
def test_a_stored_name_that_leads_outside_is_refused_and_nothing_is_written(store: tierstore.Store, tmp_path: Path, path: str) -> None:
    store.save(1, _hostile(path)).wait("durable", 60)
    with store.open_checkpoint(1) as checkpoint:
        with pytest.raises(FormatError, match="unsafe file name"):
            restore_folder(checkpoint, tmp_path / "new" / "back")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("state", "error", "told"),
    [
        ({"files": {"a": torch.zeros(2)}}, UsageError, "not saved from a folder"),
        ({FOLDER: {"version": 99}, "files": {}}, VersionError, "version 99"),
        ({FOLDER: {"version": 1}, "files": {"a": torch.zeros(2)}}, FormatError, "no sensible file 'a'"),
        (
            {FOLDER: {"version": 1}, "files": {"a": torch.zeros(2, dtype=torch.uint8), "a/b": torch.zeros(1, dtype=torch.uint8)}},
            FormatError,
            "a file and a folder",
        ),
        ({FOLDER: {"version": 1}, "safetensors": {"m.safetensors": torch.zeros(20, dtype=torch.uint8)}}, FormatError, "header"),
    ],
)
def test_a_checkpoint_that_is_no_folder_or_lies_is_refused(
    store: tierstore.Store, tmp_path: Path, state: Any, error: type[Exception], told: str
) -> None:
    store.save(1, {"x": torch.zeros(1), **state}).wait("durable", 60)
    with store.open_checkpoint(1) as checkpoint, pytest.raises(error, match=told):
        restore_folder(checkpoint, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_header_that_says_something_else_than_is_stored_is_refused(store: tierstore.Store, folder: Path, tmp_path: Path) -> None:
    state = folder_state(folder)
    state["m"]["a.b"] = torch.zeros(5, 30)
    store.save(1, state).wait("durable", 60)
    with store.open_checkpoint(1) as checkpoint, pytest.raises(FormatError, match="is not what the header"):
        restore_folder(checkpoint, tmp_path / "back")


def test_damage_on_every_tier_leaves_nothing_and_what_is_there_is_never_overwritten(
    store: tierstore.Store, folder: Path, tmp_path: Path
) -> None:
    store.save(1, folder_state(folder)).wait("durable", 60)
    for shard in tmp_path.glob("*/r/step-*/shard-*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    (tmp_path / "new").mkdir()
    with store.open_checkpoint(1) as checkpoint:
        with pytest.raises(IntegrityError):
            restore_folder(checkpoint, tmp_path / "new" / "back")
        assert list((tmp_path / "new").iterdir()) == []
        with pytest.raises(RefusedError, match="exists already"):
            restore_folder(checkpoint, folder)


def test_a_folder_that_differs_in_a_byte_a_name_or_a_length_is_not_the_same(store: tierstore.Store, folder: Path) -> None:
    store.save(1, folder_state(folder)).wait("durable", 60)
    with store.open_checkpoint(1) as checkpoint:
        assert same_folder(checkpoint, folder)
        (folder / "more").touch()
        assert not same_folder(checkpoint, folder)
        (folder / "more").unlink()
        with open(folder / "m.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        assert not same_folder(checkpoint, folder)
        assert not same_folder(checkpoint, folder / "absent")


def test_temporaries_of_dead_processes_are_swept_and_no_others(tmp_path: Path) -> None:
    mine, dead = f".{temporary_name('restoring')}", temporary_name("restoring").split("-")
    dead[4], dead[5] = str(2**22 - 1), "1"
    for name in (mine, "." + "-".join(dead), ".restoring-notes"):
        (tmp_path / name).mkdir()
    sweep_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine, ".restoring-notes"])


def test_the_files_that_several_ranks_see_are_divided_by_bytes_and_those_of_two_nodes_are_both_kept() -> None:
    def told(*files: tuple[str, int, str]) -> bytes:
        return json.dumps([list(file) for file in files]).encode()

    shared = [("model.safetensors", 100, "a"), ("optimizer.pt", 200, "a"), ("rng_0", 5, "a"), ("rng_1", 5, "a")]
    verdict = json.loads(_divide([told(*shared), told(*shared)]))
    assert verdict["files"] == [["model.safetensors", "rng_0", "rng_1"], ["optimizer.pt"]]
    apart = [told(("part_rank0", 7, "a"), ("x", 1, "a")), told(("part_rank0", 7, "a"), ("x", 1, "a")), told(("part_rank0", 7, "b"))]
    files = json.loads(_divide(apart))["files"]
    assert "part_rank0" in files[0]
    assert "part_rank0" in files[2], "another node's file of the same name is another file"
    assert sorted(name for names in files for name in names) == ["part_rank0", "part_rank0", "x"]


def test_mapping_a_folder_reads_nothing_into_python(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 32)  # sparse
    state = folder_state(tmp_path)
    assert state["files"]["large"].numel() == 1 << 32
    assert np.asarray(state["files"]["large"][:3]).tolist() == [0, 0, 0]
