"""Foreign checkpoints taken into a store: the same bytes under the store's names, proved, promoted, verified, exported and loaded."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from adopt_kit import assert_bits, every_dtype, hugging_face, quietly, save_dcp
from fork_kit import run_tierstore
from ranks_kit import run_ranks
from safetensors.torch import load_file, save_file
from store_kit import open_over, unsynced
from typer.testing import CliRunner

import tierstore
from tierstore.cli.main import app
from tierstore.crashpoints import CRASH_EXIT
from tierstore.errors import IncompleteError, NotFoundError, SaveError, TierFullError, UnsupportedTypeError, UsageError
from tierstore.format.index import check_coverage
from tierstore.state.export.exporting import ExportOptions
from tierstore.state.passthrough import companions_of, read_companion
from tierstore.storage import _clone
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.verify import verify

PARTS = [{"model.a": torch.randn(300, 40), "model.b": torch.ones(3)}, {"model.c": torch.randn(2, 2), "model.zero": torch.tensor(1.5)}]
WHOLE = {**PARTS[0], **PARTS[1]}


def verified(store: tierstore.Store) -> None:
    """Every byte on every tier is what the manifest promises."""
    report = store._session.run(verify(store._session.tiers, store.run, level="full"))
    assert report.findings == ()
    assert report.files > 0


def opened(root: Path, *names: str) -> tierstore.Store:
    return tierstore.open([str(root / name) for name in names or ("node", "shared", "far")], run="r")


def shards_of(root: Path, step: int) -> list[Path]:
    return sorted(root.rglob(f"step-{step:010d}-*/shard-*.safetensors"))


def test_a_hugging_face_folder_becomes_shards_of_the_same_bytes(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", PARTS)
    (folder / "tokenizer.json").write_bytes(b"\x00\xfftok")
    with opened(tmp_path) as store:
        ticket = store.adopt(folder, step=7, metrics={"loss": 1.0}, tags=["base"])
        ticket.wait("durable", 200)
        store.sync()
        assert ticket.errors == ()
        assert_bits(store.load(7), WHOLE)
        nested = {"model": {name.removeprefix("model."): torch.zeros_like(t) for name, t in WHOLE.items()}}
        assert_bits(store.load("tag:base", into=nested)["model"], {name.removeprefix("model."): t for name, t in WHOLE.items()})
        assert torch.equal(store.open_checkpoint(7)["model.a"][10:20, 3], WHOLE["model.a"][10:20, 3])
        assert store.checkpoints()[0].metrics == {"loss": 1.0}
        replica = store.open_checkpoint(7).replica
        check_coverage(replica.index)
        found = companions_of(replica)
        assert set(found) == {"config.json", "tokenizer.json"}
        assert read_companion(replica, store._session.run, found["tokenizer.json"]) == b"\x00\xfftok"
        verified(store)
    for tier in ("node", "shared", "far"):
        first, second, companions = shards_of(tmp_path / tier, 7)
        assert first.read_bytes() == (folder / "model-00001-of-00002.safetensors").read_bytes()
        assert second.read_bytes() == (folder / "model-00002-of-00002.safetensors").read_bytes()
        assert set(load_file(companions)) == set(found)


@pytest.mark.parametrize("way", ["copy", "link", "clone"])
def test_a_local_file_is_taken_in_without_copying_where_that_was_asked_for_or_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A clone shares blocks until one of both is written, so it is always made; a hard link is one file under two names: only on demand."""
    folder = hugging_face(tmp_path / "hf", [WHOLE])
    source = folder / "model.safetensors"
    cloned: list[str] = []

    def clone(tree: Any, real: str, temporary: str) -> bool:
        """What FICLONE does, on a file system that may not have it."""
        if way == "clone":
            Path(temporary).write_bytes(Path(real).read_bytes())
            cloned.append(real)
        return way == "clone"

    monkeypatch.setattr(_clone, "_cloned", clone)
    with opened(tmp_path, "node", "shared") as store:
        store.adopt(folder, step=1, link=way == "link").wait("durable", 200)
        (near, _), (far, _) = shards_of(tmp_path / "node", 1), shards_of(tmp_path / "shared", 1)
        assert os.path.samefile(near, source) is (way == "link")
        assert not os.path.samefile(far, source)
        assert cloned == ([str(source)] if way == "clone" else [])
        assert_bits(store.load(1), WHOLE)
        verified(store)
        if way == "link":
            with source.open("r+b") as file:  # the reason why it is not the default
                file.seek(-4, os.SEEK_END)
                file.write(b"\xaa\xbb\xcc\xdd")
            report = store._session.run(verify(store._session.tiers, "r", level="full"))
            assert [(f.code, f.tier) for f in report.damage] == [("V103", "node")]
            assert_bits(store.load(1), WHOLE)  # from the next tier
    assert not list((tmp_path / "node" / ".tmp").glob("write*"))


def test_a_dcp_directory_of_four_ranks_is_streamed_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_open_foreign import _save_sharded

    run_ranks(4, _save_sharded, tmp_path, rows=10)
    monkeypatch.setattr("tierstore.state.adopt_plan._SHARD_NBYTES", 400)  # several shards
    whole = torch.arange(60.0).view(10, 6)
    wanted = {"rows": whole, "columns": whole, "same": whole, "plain": torch.arange(4)}
    with opened(tmp_path) as store:
        store.adopt(tmp_path / "dcp", step=1).wait("durable", 200)
        store.adopt(tmp_path / "hf", step=2, shapes=wanted).wait("durable", 200)
        assert_bits(store.load(1)["model"], wanted)
        assert_bits(store.load(2), wanted)
        assert len(store.open_checkpoint(1).replica.index.find("model.rows").extents) == 4
        assert len(shards_of(tmp_path / "shared", 1)) > 1
        assert len(shards_of(tmp_path / "shared", 2)) == 4
        store.sync()
        verified(store)


def test_a_torch_save_file_and_a_dcp_directory_keep_objects_ties_strides_and_every_dtype(tmp_path: Path) -> None:
    weight = torch.randn(8, 4)
    state: dict[str, Any] = {
        "model": {
            "emb": weight,
            "head": weight,
            "t": torch.arange(6.0).view(2, 3).t(),
            "empty": torch.zeros(0, 3),
            "zero": torch.tensor(2),
        },
        "every": every_dtype(safetensors=False),
        "optim": {"lr": [0.1, 0.2], "step": 12, "size": torch.Size([3])},
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    torch.save(state, tmp_path / "s.pt")
    dcp = save_dcp(state, tmp_path / "dcp")
    with opened(tmp_path) as store:
        store.adopt(tmp_path / "s.pt", step=1).wait("durable", 200)
        store.adopt(dcp, step=2).wait("durable", 200)
        loaded = store.load(1)
        assert_same_state(loaded, state)
        assert loaded["model"]["emb"] is loaded["model"]["head"]
        again = store.load(2)
        assert_bits(again["every"], state["every"])
        assert_bits(again["model"], state["model"])
        assert again["optim"] == state["optim"]
        store.sync()
        verified(store)
        index = store.open_checkpoint(1).replica.index
        assert index.find("model.emb").extents == index.find("model.head").extents
    (shard,) = shards_of(tmp_path / "far", 1)
    assert_bits({n: t for n, t in quietly(load_file, shard).items() if n.startswith("model.emb")}, {"model.emb": weight})


def test_renaming_rules_change_the_index_and_no_byte(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", PARTS)
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {match: 'model\\.b', drop: true}\n  - {match: 'model\\.(.*)', to: 'net.\\1'}\n")
    state = {"model": {"a": torch.ones(2), "n": 5}, "epoch": 3}
    torch.save(state, tmp_path / "s.pt")
    with opened(tmp_path) as store:
        store.adopt(folder, step=1, rename=str(rules)).wait("durable", 200)
        wanted = {"net.a": WHOLE["model.a"], "net.c": WHOLE["model.c"], "net.zero": WHOLE["model.zero"]}
        assert_bits(store.load(1), wanted)
        assert shards_of(tmp_path / "shared", 1)[0].read_bytes() == (folder / "model-00001-of-00002.safetensors").read_bytes()
        store.adopt(tmp_path / "s.pt", step=2, rename=[{"match": r"model\.(.*)", "to": r"\1"}]).wait("durable", 200)
        loaded = store.load(2)
        assert torch.equal(loaded.pop("a"), torch.ones(2))
        assert loaded == {"model.n": 5, "epoch": 3}
        with pytest.raises(UsageError, match="only names can be changed here"):
            store.adopt(folder, step=3, rename=[{"match": ".*a", "transpose": True}])
        with pytest.raises(UsageError, match="drop every tensor"):
            store.adopt(folder, step=3, rename=[{"match": ".*", "drop": True}])
        assert [c.step for c in store.checkpoints()] == [1, 2]


def test_what_can_t_be_taken_in_leaves_nothing_behind(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "args": argparse.Namespace(x=1)}, tmp_path / "s.pt")
    folder = hugging_face(tmp_path / "hf", PARTS)
    with opened(tmp_path, "shared") as store:
        with pytest.raises(UnsupportedTypeError, match=r"state\['args'\] is a argparse\.Namespace.*|--skip-objects"):
            store.adopt(tmp_path / "s.pt", step=1)
        with pytest.raises(NotFoundError):
            store.adopt(tmp_path / "nothing", step=1)
        with pytest.raises(IncompleteError, match=r"model\.d"):
            store.adopt(folder, step=1, shapes={**WHOLE, "model.d": torch.ones(1)})
        assert not list(tmp_path.rglob("step-*"))
        store.adopt(tmp_path / "s.pt", step=1, skip_objects=True).wait("durable", 200)
        assert_bits(store.load(1), {"a": torch.ones(2)})
        with pytest.raises(UsageError, match="committed already"):
            store.adopt(folder, step=1, if_exists="refuse")
        store.adopt(folder, step=1).wait("durable", 200)
        assert_bits(store.load(1), WHOLE)
    with (
        tierstore.open([str(tmp_path / "shared")], run="r", rank=0, world_size=2) as ranked,
        pytest.raises(UsageError, match="several ranks"),
    ):
        ranked.adopt(folder, step=2)


@pytest.mark.parametrize("last", [False, True], ids=["a file before", "the file that the worker takes"])
def test_a_source_that_is_cut_off_while_it_is_read_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    folder = hugging_face(tmp_path / "hf", PARTS)
    name = f"model-0000{1 if last else 2}-of-00002.safetensors"
    plan = tierstore.state.adopt.plan_adoption

    async def cut(*args: Any, **kwargs: Any) -> Any:
        adoption = await plan(*args, **kwargs)
        os.truncate(folder / name, (folder / name).stat().st_size - 8)
        return adoption

    monkeypatch.setattr("tierstore.state.adopt.plan_adoption", cut)
    store = opened(tmp_path, "shared")
    if last:
        ticket = store.adopt(folder, step=1)
        with pytest.raises(SaveError, match=name):
            ticket.wait("committed", 200)
        with pytest.raises(SaveError, match=name):
            store.close()
    else:
        with pytest.raises(tierstore.TierStoreError, match=name):
            store.adopt(folder, step=1)
        store.close()
    with opened(tmp_path, "shared") as again:
        assert again.checkpoints() == []
        if not last:
            assert again._catalog().condemned[0].condemned.startswith("adopting")


def test_a_full_nearest_tier_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        async def write(self, path: str, source: Any) -> Any:
            raise TierFullError("no room")

        async def clone(self, path: str, origin: Path, *, hard: bool = False) -> Any:
            return None

    folder = hugging_face(tmp_path / "hf", PARTS)

    def make(uri: str) -> Any:
        return Full(unsynced(uri)) if uri.endswith("node") else unsynced(uri)

    with open_over(monkeypatch, make, tmp_path) as store:
        monkeypatch.undo()
        store.adopt(folder, step=1).wait("durable", 200)
        assert_bits(store.load(1), WHOLE)


def cli(root: Path, *args: str) -> Any:
    tiers = [word for name in ("node", "shared") for word in ("--tier", str(root / name))]
    return CliRunner().invoke(app, [*args, *tiers, "--run", "r"])


def test_the_verb_shows_what_it_would_do_does_it_and_says_so(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", PARTS)
    shown = cli(tmp_path, "adopt", str(folder), "--step", "5", "-n")
    assert shown.exit_code == 0, shown.output
    assert "model-00001-of-00002.safetensors" in shown.output
    assert "would adopt" in shown.output
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]  # no store was needed, and none was made
    told = cli(tmp_path, "adopt", str(folder), "--step", "5", "-n", "--json")
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["shard", "shard", "shard", "adoption"]
    assert (lines[-1]["tensors"], lines[-1]["companions"], lines[-1]["format"]) == (4, ["config.json"], "safetensors")

    done = cli(tmp_path, "adopt", str(folder), "--step", "5", "--tag", "base")
    assert done.exit_code == 0, done.output
    assert "as r@5" in " ".join(done.output.split())  # a long path of the folder breaks the line
    again = cli(tmp_path, "adopt", str(folder), "--step", "5")
    assert again.exit_code == 2
    assert "--supersede" in again.output
    assert cli(tmp_path, "adopt", str(folder), "--step", "5", "--supersede").exit_code == 0
    assert "model.zero" in cli(tmp_path, "tensors", "r@5").output
    assert cli(tmp_path, "verify", "--level", "full").exit_code == 0
    assert cli(tmp_path, "adopt", str(tmp_path / "nothing"), "--step", "6").exit_code == 4
    torch.save({"a": torch.ones(2), "args": argparse.Namespace()}, tmp_path / "s.pt")
    refused = cli(tmp_path, "adopt", str(tmp_path / "s.pt"), "--step", "6")
    assert refused.exit_code == 2
    assert "--skip-objects" in refused.output
    assert cli(tmp_path, "adopt", str(tmp_path / "s.pt"), "--step", "6", "--skip-objects").exit_code == 0


@pytest.mark.parametrize("more", [[], ["-n"]])
def test_adopting_without_a_run_says_how_to_name_one(tmp_path: Path, more: list[str]) -> None:
    folder = hugging_face(tmp_path / "hf", PARTS)
    told = CliRunner().invoke(app, ["adopt", str(folder), "--step", "5", "--tier", str(tmp_path / "node"), *more])
    assert told.exit_code == 2
    assert "--run RUN" in told.stderr


def test_cat_writes_the_files_that_came_with_an_adopted_checkpoint(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", PARTS)
    assert cli(tmp_path, "adopt", str(folder), "--step", "5").exit_code == 0
    written = cli(tmp_path, "cat", "r@5", "config.json")
    assert written.exit_code == 0, written.output
    assert written.stdout_bytes == (folder / "config.json").read_bytes()
    assert "did you mean config.json" in cli(tmp_path, "cat", "r@5", "confg.json").stderr
    assert "config.json" in [line.split()[0] for line in cli(tmp_path, "show", "r@5").stdout.splitlines() if line]


def test_an_adopted_checkpoint_is_exported_as_it_came(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", PARTS)
    opened(tmp_path, "node", "shared").close()
    assert cli(tmp_path, "adopt", str(folder), "--step", "5").exit_code == 0
    out = tmp_path / "out"
    exported = cli(tmp_path, "export", "r@5", str(out))
    assert exported.exit_code == 0, exported.output
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert_bits(load_file(out / "model.safetensors"), WHOLE)
    with tierstore.open_foreign(out) as checkpoint:
        assert_bits(checkpoint.state(), WHOLE)


def test_training_goes_on_from_an_adopted_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = torch.nn.Linear(4, 3)
    with opened(tmp_path / "store") as store:
        store.adopt(tmp_path / "model.safetensors", step=0).wait("durable", 200)
        resumed = store.resume(into=other.state_dict())
        assert resumed is not None
        assert_bits(other.state_dict(), model.state_dict())
        store.save(1, other.state_dict()).wait("durable", 200)
        assert_bits(store.load(1), model.state_dict())


def test_a_foreign_checkpoint_is_converted_without_a_store(tmp_path: Path) -> None:
    with tierstore.open_foreign(hugging_face(tmp_path / "hf", PARTS)) as checkpoint:
        checkpoint.renamed([{"match": r"model\.(.*)", "to": r"net.\1"}]).export(tmp_path / "dcp", ExportOptions(format="dcp"))
    with tierstore.open_foreign(tmp_path / "dcp") as checkpoint:
        assert_bits({name: checkpoint[name].full() for name in checkpoint}, {n.replace("model.", "net."): t for n, t in WHOLE.items()})


@pytest.mark.parametrize("point", ["persist.before-part", "persist.after-receipt", "commit.before-record"])
def test_a_process_that_dies_while_it_adopts_leaves_no_half_of_a_checkpoint(tmp_path: Path, point: str) -> None:
    folder = hugging_face(tmp_path / "hf", PARTS)
    words = ["adopt", str(folder), "--step", "5", "--run", "r", "--tier", str(tmp_path / "node"), "--tier", str(tmp_path / "shared")]
    died = run_tierstore(*words, env={"TIERSTORE_CRASH_AT": point})
    assert died.returncode == CRASH_EXIT, died.stderr
    with opened(tmp_path, "node", "shared") as store:
        assert store.latest() is None
        resumed = store.resume()  # commits what is complete
        assert (resumed is not None) is (point == "commit.before-record")
        if resumed is None:
            store.adopt(folder, step=5).wait("durable", 200)
        assert_bits(store.load(5), WHOLE)
        assert store._session.run(verify(store._session.tiers, "r", level="full")).damage == ()


def test_what_no_tier_has_room_for_is_refused_at_once_and_the_attempt_is_condemned(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1 << 46)}, tmp_path / "bomb.pt")  # 256 TiB by its shape, a few hundred bytes as a file
    with opened(tmp_path) as store:
        with pytest.raises(TierFullError, match="bytes free"):
            store.adopt(tmp_path / "bomb.pt", step=1)
        assert store.checkpoints() == []
        torch.save({"a": torch.ones(3)}, tmp_path / "good.pt")
        store.adopt(tmp_path / "good.pt", step=2).wait("durable", 200)
        assert [c.step for c in store.checkpoints()] == [2]
