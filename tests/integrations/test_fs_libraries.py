"""Real libraries on ``tier://`` URIs: torch, its distributed checkpoints, pandas, datasets, numpy, zarr, simplecache, universal_pathlib."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fork_kit import SERVER
from fs_kit import two_tiers, unsynced_tiers

from tierstore.fs.filesystem import TierFileSystem


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The path of a configuration, which stands in all URIs of this module."""
    root = tmp_path_factory.mktemp("store")
    (root / "store.yaml").write_text(f"version: 1\ntiers: {two_tiers(root)}\n")
    with unsynced_tiers():
        yield str(root / "store.yaml")
        fsspec.filesystem("tier", config=str(root / "store.yaml")).close()


@pytest.fixture
def uri(config: str, request: pytest.FixtureRequest) -> str:
    """A folder of the test's own."""
    return f"tier://{config}/{request.node.name}"


@pytest.fixture
def fs(config: str) -> Any:
    return fsspec.filesystem("tier", config=config)


def test_torch_save_and_load(uri: str) -> None:
    state = {"w": torch.arange(100_000, dtype=torch.bfloat16), "step": 3}
    with fsspec.open(f"{uri}/model.pt", "wb") as file:
        torch.save(state, file)
    with fsspec.open(f"{uri}/model.pt", "rb") as file:
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["step"] == 3
    with fsspec.open(f"{uri}/legacy.pt", "wb") as file:
        torch.save(state, file, _use_new_zipfile_serialization=False)
    with fsspec.open(f"{uri}/legacy.pt", "rb") as file:
        assert torch.equal(torch.load(file, weights_only=True)["w"], state["w"])


@pytest.mark.parametrize("plain", [False, True], ids=["writer", "plain"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_distributed_checkpoints_by_torchs_own_writer_and_by_uri_alone(uri: str, fs: TierFileSystem, plain: bool, monkeypatch: Any) -> None:
    """Nothing of tierstore is imported by the program; the auto-detection of `tierstore.dcp` is off."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    monkeypatch.setattr("os.sync", lambda: None)  # torch asks the whole host to sync where a file has no descriptor
    state = {"w": torch.randn(300, 1000), "b": {"c": torch.arange(9)}, "step": 5}
    options: Any = {"checkpoint_id": uri} if plain else {"storage_writer": FsspecWriter(uri, sync_files=False)}
    dcp.save(state, **options)
    assert {path.rpartition("/")[2] for path in fs.find(uri)} == {".metadata", "__0_0.distcp"}
    fs.sync_tiers(200)
    loaded = {"w": torch.zeros(300, 1000), "b": {"c": torch.zeros(9, dtype=torch.int64)}, "step": 0}
    dcp.load(loaded, **({"checkpoint_id": uri} if plain else {"storage_reader": FsspecReader(uri)}))
    assert torch.equal(loaded["w"], state["w"])
    assert torch.equal(loaded["b"]["c"], state["b"]["c"])
    assert loaded["step"] == 5


def test_pandas_parquet_and_csv(uri: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(1000), "b": [f"text {n}" for n in range(1000)]})
    frame.to_parquet(f"{uri}/x.parquet")
    pandas.testing.assert_frame_equal(pandas.read_parquet(f"{uri}/x.parquet"), frame)
    assert pandas.read_parquet(f"{uri}/x.parquet", columns=["a"])["a"].sum() == 499_500
    frame.to_csv(f"{uri}/x.csv.gz", index=False)
    pandas.testing.assert_frame_equal(pandas.read_csv(f"{uri}/x.csv.gz"), frame)


def test_pyarrow_datasets(uri: str, fs: TierFileSystem) -> None:
    table = pytest.importorskip("pyarrow").table({"year": [2025, 2026, 2026], "n": [1, 2, 3]})
    from pyarrow import dataset, parquet

    parquet.write_to_dataset(table, f"{uri}/parts", partition_cols=["year"], filesystem=fs)
    found = dataset.dataset(fs._strip_protocol(f"{uri}/parts"), filesystem=fs, partitioning="hive")
    assert sorted(found.to_table(filter=dataset.field("year") == 2026)["n"].to_pylist()) == [2, 3]


def test_datasets_save_to_disk_and_load_from_disk(uri: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"text": [f"line {n}" for n in range(500)], "n": list(range(500))})
    made.save_to_disk(f"{uri}/one", num_shards=2)
    assert datasets.load_from_disk(f"{uri}/one")[499] == {"text": "line 499", "n": 499}
    both = datasets.DatasetDict({"train": made, "test": made.select(range(5))})
    both.save_to_disk(f"{uri}/both")
    assert datasets.load_from_disk(f"{uri}/both")["test"].num_rows == 5
    made.to_parquet(f"{uri}/x.parquet")
    monkeypatch.setenv("TIERSTORE_CONFIG", config)  # of the URIs of data files datasets keeps the path alone
    read = datasets.load_dataset("parquet", data_files=f"{uri}/x.parquet", split="train", cache_dir=str(tmp_path))
    assert read["n"] == made["n"]


def test_numpy(uri: str) -> None:
    array = np.arange(50_000).reshape(50, 1000)
    with fsspec.open(f"{uri}/a.npy", "wb") as file:
        np.save(file, array)
    with fsspec.open(f"{uri}/a.npy", "rb") as file:
        assert np.array_equal(np.load(file), array)
    with fsspec.open(f"{uri}/a.npz", "wb") as file:
        np.savez_compressed(file, array=array, other=array[0])
    with fsspec.open(f"{uri}/a.npz", "rb") as file:
        assert np.array_equal(np.load(file)["array"], array)


def test_zarr(uri: str, fs: TierFileSystem) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    group = zarr.open_group(f"{uri}/x.zarr", mode="w")
    array = group.create_array("a", shape=(200, 300), chunks=(50, 100), dtype="float32")
    values = np.random.default_rng(0).random((200, 300), dtype=np.float32)
    array[:] = values
    array[:10] = 0
    again = zarr.open_group(f"{uri}/x.zarr", mode="r")["a"]
    assert np.array_equal(again[5:60, 250:], np.vstack([np.zeros((5, 50), np.float32), values[10:60, 250:]]))
    assert list(zarr.open_group(f"{uri}/x.zarr", mode="r").array_keys()) == ["a"]
    zarr.open_group(f"{uri}/x.zarr", mode="w")
    assert not fs.exists(f"{uri}/x.zarr/a")


def test_simplecache_keeps_whole_files(uri: str, fs: TierFileSystem, tmp_path: Path) -> None:
    fs.pipe_file(f"{uri}/f", b"cached" * 1000)
    for _ in range(2):
        with fsspec.open(f"simplecache::{uri}/f", "rb", simplecache={"cache_storage": str(tmp_path)}) as file:
            assert file.read() == b"cached" * 1000
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [6000]
    with fsspec.open(f"simplecache::{uri}/written", "wb") as file:
        file.write(b"through the cache")
    assert fs.cat_file(f"{uri}/written") == b"through the cache"
    with fsspec.open(f"filecache::{uri}/f", "rb", filecache={"cache_storage": str(tmp_path / "second"), "check_files": True}) as file:
        assert file.read(6) == b"cached"
    fs.pipe_file(f"{uri}/f", b"changed")
    with fsspec.open(f"filecache::{uri}/f", "rb", filecache={"cache_storage": str(tmp_path / "second"), "check_files": True}) as file:
        assert file.read() == b"changed", "a ukey tells versions apart"


def test_universal_pathlib(uri: str, fs: TierFileSystem) -> None:
    upath = pytest.importorskip("upath")
    folder = upath.UPath(uri)
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "f.txt").write_text("text")
    assert (folder / "deep" / "f.txt").read_text() == "text"
    assert [path.name for path in folder.iterdir()] == ["deep"]
    assert [path.name for path in folder.rglob("*.txt")] == ["f.txt"]
    assert (folder / "deep").is_dir()
    assert (folder / "deep" / "f.txt").stat().st_size == 4
    (folder / "deep" / "f.txt").rename(folder / "deep" / "g.txt")
    assert (folder / "deep" / "g.txt").exists()
    assert fs.cat_file(f"{uri}/deep/g.txt") == b"text"
    with fsspec.open(str(folder / "deep" / "g.txt"), "rb") as file:
        assert file.read() == b"text", "its text is a URI with the configuration in it"
    assert upath.UPath(str(folder)) == folder
    (folder / "deep" / "g.txt").unlink()
    assert not (folder / "deep" / "g.txt").exists()


class Lines(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Opened in the parent, read in the workers."""

    def __init__(self, uri: str) -> None:
        self.fs, self.path = fsspec.url_to_fs(uri)
        self.fs.pipe({f"{self.path}/{n}": b"%d" % n for n in range(8)})

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        return int(self.fs.cat_file(f"{self.path}/{number}"))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), SERVER], ids=["fork", "forkserver"])
def test_the_workers_of_a_data_loader_read(uri: str, context: Any) -> None:
    loader = torch.utils.data.DataLoader(Lines(uri), num_workers=2, batch_size=2, multiprocessing_context=context)
    assert sorted(int(n) for batch in loader for n in batch) == list(range(8))
