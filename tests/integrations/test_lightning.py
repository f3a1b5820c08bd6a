"""The door for Lightning: real trainers, killed and resumed; pointers, what is saved once, what is removed, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the packages warn of while they are imported
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
    from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

import tierstore
from tierstore.errors import ConfigError, DeadlineError, FormatError, NotFoundError, SaveError, UnsupportedTypeError, UsageError
from tierstore.integrations.lightning import TierCheckpointIO, TierModelCheckpoint, TierModelParallelStrategy, lightning_codecs
from tierstore.integrations.lightning_parts.pointers import Pointer, read_pointer, write_pointer
from tierstore.integrations.lightning_parts.publishing import Publisher
from tierstore.names import Attempt, new_save_id
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.ticket import Ticket

sys.path.insert(0, str(Path(__file__).parent))
import lightning_child
from fork_kit import SERVER, FrameworkServer
from lightning_child import Tiny, data, trainer_of, whole_state

pytestmark = [
    pytest.mark.timeout(600),  # a child that does not come is told of before
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*without a model:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is an instance of `nn.Module`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*you defined a `validation_step` but have no:UserWarning"),
]

# A process that has imported Lightning, which takes seconds; each child is a fork of it.
LIGHTNINGS = FrameworkServer(["pytest", "lightning.pytorch", "torch._dynamo", "tierstore.integrations.lightning"])


@pytest.fixture
def tiers(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "near"), str(tmp_path / "far")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def fit_killed_at(root: Path, step: int | None, *, steps: int, every: int) -> dict[str, torch.Tensor]:
    """Trains in a process that is killed when it tells of `step`; returns the state at the end where it gets there."""
    pipe, theirs = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=lightning_child.fit_to_the_end, args=(str(root), theirs, steps, every, step))
    LIGHTNINGS.start(process)
    theirs.close()
    last: Any = {}
    try:
        while pipe.poll(250):
            last = pipe.recv()
            if last == step:
                process.kill()
    except EOFError:
        pass
    process.join(120)
    assert process.exitcode == (0 if step is None else -9)
    return {name: torch.from_numpy(value) for name, value in last.items()} if isinstance(last, dict) else {}


def saved(tiers: list[str], run: str = "r") -> list[int]:
    with tierstore.open(tiers, run=run, rank=0, world_size=1) as store:
        return [info.attempt.step for info in store.checkpoints()]


def attempts(tiers: list[str], run: str = "r") -> int:
    """How many saves were made, superseded ones too."""
    return len([name for name in os.listdir(Path(tiers[-1]) / run) if name.startswith("step-")])


def pointers(folder: Path) -> dict[str, int]:
    """The step of each pointer of a folder."""
    found = {}
    for path in sorted(folder.glob("*.ckpt")):
        pointer = read_pointer(str(path))
        assert pointer is not None
        found[path.name] = pointer.step
    return found


def fit(io: Any, callbacks: list[Any], root: Path, *, model: Any = None, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    trainer = trainer_of(root, plugins=[io], callbacks=callbacks, **options)
    torch.manual_seed(3)
    trainer.fit(model or Tiny(), data(), data(), ckpt_path=ckpt_path)
    return trainer


# ---- a fit, killed and resumed


def test_a_fit_that_is_killed_resumes_from_last_and_ends_bit_equal_with_one_that_was_not(tmp_path: Path, long_run: bool) -> None:
    whole = fit_killed_at(tmp_path / "whole", None, steps=20, every=4)
    root = tmp_path / "killed"
    for step in (1, 4, 5, 6, 7, 9, 12, 13, 14, 15, 16, 17, 18, 19) if long_run else (7, 16):  # between saves; while one is under way
        fit_killed_at(root, step, steps=20, every=4)
    assert_same_state(fit_killed_at(root, None, steps=20, every=4), whole)
    assert pointers(root / "ckpt")["last.ckpt"] == 20


def test_what_is_loaded_is_what_lightning_would_have_loaded(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    kept: dict[str, Any] = {}

    class Both(TierCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            TorchCheckpointIO().save_checkpoint(checkpoint, tmp_path / "stock" / Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    io = Both(tiers, run="r")
    callbacks = [ModelCheckpoint(folder, monitor="val/loss", save_last=True), EarlyStopping("val/loss"), Timer()]
    fit(io, callbacks, tmp_path, max_epochs=2, model=Tiny(extra={"path": Path("/data"), "sizes": (1, 2), "none": None}))
    for path in folder.iterdir():
        ours, theirs = io.load_checkpoint(path), TorchCheckpointIO().load_checkpoint(tmp_path / "stock" / path.name, weights_only=False)
        assert list(ours) == list(theirs)
        assert_same_state(ours, theirs)
        kept[path.name] = ours
    io.teardown()
    state = next(value for key, value in kept["last.ckpt"]["callbacks"].items() if key.startswith("ModelCheckpoint"))
    assert state["last_model_path"] == str(folder / "last.ckpt")


# ---- one save at a step, whatever points to it


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "async"])
def test_last_beside_the_best_is_saved_once(tmp_path: Path, tiers: list[str], folder: Path, wrapped: bool) -> None:
    io = TierCheckpointIO(tiers, run="r", wait="committed" if wrapped else "staged")
    callbacks = [ModelCheckpoint(folder, monitor="val/loss", save_top_k=2, save_last=True), Timer()]
    trainer = fit(AsyncCheckpointIO(io) if wrapped else io, callbacks, tmp_path, max_epochs=3)
    assert attempts(tiers) == 3
    assert pointers(folder)["last.ckpt"] == 18
    loaded = io.load_checkpoint(folder / "last.ckpt")["state_dict"]
    assert_same_state(dict(loaded), dict(trainer.lightning_module.state_dict()))  # AsyncCheckpointIO copies without the module's _metadata
    io.teardown()


def test_a_save_after_the_fit_is_a_pointer_to_the_last_one(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    io = TierCheckpointIO(tiers, run="r")
    trainer = fit(io, [ModelCheckpoint(folder)], tmp_path, max_epochs=1)
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    io.teardown()
    assert attempts(tiers) == 1
    assert "optimizer_states" in io.load_checkpoint(folder / "end.ckpt")
    weights = io.load_checkpoint(folder / "weights.ckpt")
    assert "optimizer_states" not in weights
    assert_same_state(weights["state_dict"], trainer.lightning_module.state_dict())
    io.teardown()


def test_a_whole_save_takes_the_place_of_the_weights_alone_and_their_pointer_stays_true(
    tmp_path: Path, tiers: list[str], folder: Path
) -> None:
    io = TierCheckpointIO(tiers, run="r")
    trainer = fit(io, [ModelCheckpoint(folder, save_weights_only=True, filename="weights")], tmp_path, max_epochs=1)
    trainer.save_checkpoint(folder / "whole.ckpt")
    io.teardown()
    assert saved(tiers) == [6]
    assert {read_pointer(str(path)).save_id for path in folder.iterdir()} == {read_pointer(str(folder / "whole.ckpt")).save_id}  # type: ignore[union-attr]
    assert "optimizer_states" not in io.load_checkpoint(folder / "weights.ckpt")
    assert "optimizer_states" in io.load_checkpoint(folder / "whole.ckpt")
    io.teardown()


def test_other_weights_at_one_step_never_take_the_place_of_those_that_were_saved(
    tmp_path: Path, tiers: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = TierCheckpointIO(tiers, run="r")
    trainer = fit(io, [ModelCheckpoint(folder, filename="raw")], tmp_path, max_epochs=1, model=Tiny(width=20000))
    raw = whole_state(trainer)
    for parameter in trainer.lightning_module.parameters():
        parameter.data.mul_(0.5)  # as weight averaging swaps: behind the version counters
    trainer.save_checkpoint(folder / "averaged.ckpt", weights_only=True)
    io.teardown()
    assert "averaged.ckpt is a plain file" in caplog.text
    name = "net.2.weight"
    assert torch.equal(io.load_checkpoint(folder / "raw.ckpt")["state_dict"][name], raw[name])
    assert torch.equal(io.load_checkpoint(folder / "averaged.ckpt")["state_dict"][name], raw[name] * 0.5)
    io.teardown()


def test_weights_alone_do_not_supersede_the_whole_checkpoint_of_an_earlier_process(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    fit(TierCheckpointIO(tiers, run="r"), [ModelCheckpoint(folder, save_last=True)], tmp_path, max_epochs=1)
    io = TierCheckpointIO(tiers, run="r")
    whole = io.load_checkpoint(folder / "last.ckpt")
    io.save_checkpoint({key: value for key, value in whole.items() if key != "optimizer_states"}, folder / "weights.ckpt")
    io.teardown()
    assert "optimizer_states" in io.load_checkpoint(folder / "last.ckpt")
    assert "optimizer_states" not in io.load_checkpoint(folder / "weights.ckpt")
    io.teardown()


def test_a_training_that_was_not_resumed_says_what_it_supersedes(
    tmp_path: Path, tiers: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [ModelCheckpoint(folder, save_last=True)]
    fit(TierCheckpointIO(tiers, run="r"), callbacks, tmp_path, max_epochs=1)
    fit(TierCheckpointIO(tiers, run="r"), callbacks, tmp_path, max_epochs=2, ckpt_path=folder / "last.ckpt")
    assert "already" not in caplog.text
    fit(TierCheckpointIO(tiers, run="r"), [ModelCheckpoint(tmp_path / "other")], tmp_path, max_epochs=1, ckpt_path="last")
    assert 'run=r has step 12 already, and this training, which was not resumed, saves step 6. fit(ckpt_path="@latest")' in caplog.text


def test_a_mistake_in_the_configuration_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*absent\.yaml"):
        TierCheckpointIO(tmp_path / "absent.yaml")


# ---- pointers: pruned, replaced, followed


def test_top_k_prunes_pointers_as_lightning_prunes_files_and_retention_keeps_what_is_pointed_to(
    tmp_path: Path, tiers: list[str], folder: Path
) -> None:
    def callbacks(where: Path) -> list[Any]:
        return [ModelCheckpoint(where, monitor="val/loss", save_top_k=2, save_last=True)]

    fit(TorchCheckpointIO(), callbacks(tmp_path / "stock"), tmp_path, max_epochs=5)
    fit(TierCheckpointIO(tiers, run="r"), callbacks(folder), tmp_path, max_epochs=5)
    assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "stock"))
    with tierstore.open(
        tiers, run="r", retention={"keep": [{"tags": ["lightning"]}], "protect": {"min_age": "1ms"}}, rank=0, world_size=1
    ) as store:
        assert [c.attempt.step for c in store.checkpoints()][:3] == [6, 12, 18]
        assert {c.attempt.step for c in store.checkpoints() if "lightning" in c.tags} == set(pointers(folder).values())
        store.retention.prune(max_delete_fraction=1.0)
        assert {c.attempt.step for c in store.checkpoints()} == set(pointers(folder).values())


def test_the_monitored_metric_is_the_checkpoints_own(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    checkpoint = ModelCheckpoint(folder, monitor="val/loss", save_top_k=1, save_last=True)
    trainer = fit(TierCheckpointIO(tiers, run="r"), [checkpoint], tmp_path, max_epochs=3)
    best = read_pointer(checkpoint.best_model_path)
    assert best is not None
    with tierstore.open(tiers, run="r", rank=0, world_size=1) as store:
        assert store.open_checkpoint("best:val/loss").replica.info.attempt.step == best.step  # type: ignore[attr-defined]
        metrics = {c.attempt.step: dict(c.metrics) for c in store.checkpoints()}
    assert metrics[best.step] == {"val/loss": float(checkpoint.best_model_score)}  # type: ignore[arg-type]
    for path in ("best", "@best:val/loss", f"@{best.step}"):
        found = trainer.validate(Tiny(), data(), ckpt_path=path, verbose=False)[0]["val/loss"]
        assert found == pytest.approx(metrics[best.step]["val/loss"])


def ticket_of(step: int) -> Ticket:
    from tierstore.clock import SystemClock

    return Ticket(Attempt(run="r", step=step, save_id=new_save_id(SystemClock().now())), tiers=["far"])


def test_the_old_pointer_stays_until_the_new_save_is_committed(folder: Path) -> None:
    """Lightning-AI/pytorch-lightning#1150: the old checkpoint was removed before the new one was safe."""

    def pointer(step: int) -> Pointer:
        return Pointer(run="r", step=step, save_id=ticket_of(step).attempt.save_id)

    publisher = Publisher(write=write_pointer, remove=os.remove)
    first, failing, third = ticket_of(1), ticket_of(2), ticket_of(3)
    publisher.publish(first, {str(folder / "1.ckpt"): pointer(1)})
    first.reach("staged", "committed")
    publisher.publish(failing, {str(folder / "2.ckpt"): pointer(2)})
    publisher.remove(str(folder / "1.ckpt"))
    assert not publisher.flush(0.2)
    assert pointers(folder) == {"1.ckpt": 1}  # step 2 is under way: nothing is removed
    failing.fail(OSError("the disk is gone"))
    assert publisher.flush(30)
    assert pointers(folder) == {"1.ckpt": 1}
    assert publisher.held_back() == [str(folder / "1.ckpt")]
    publisher.publish(third, {str(folder / "3.ckpt"): pointer(3)})
    third.reach("staged", "committed")
    assert publisher.flush(30)
    assert pointers(folder) == {"3.ckpt": 3}


def test_who_waits_for_a_pointer_is_not_kept_for_ever_by_a_save_that_never_commits(folder: Path) -> None:
    """The last save before SLURM ends a job waited without end while a tier was down."""
    publisher = Publisher(write=write_pointer, remove=os.remove)
    stuck = ticket_of(1)
    path = str(folder / "hpc_ckpt_1.ckpt")
    publisher.publish(stuck, {path: Pointer(run="r", step=1, save_id=stuck.attempt.save_id)})
    with pytest.raises(DeadlineError, match=r"hpc_ckpt_1\.ckpt is not committed after 0\.05 s"):
        publisher.settle(path, 0.05)
    stuck.reach("staged", "committed")
    publisher.settle(path, 30)
    assert pointers(folder) == {"hpc_ckpt_1.ckpt": 1}


def test_names_that_do_not_tell_steps_apart_get_versions_though_pointers_come_later(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    checkpoint = TierModelCheckpoint(folder, filename="same", monitor="val/loss", save_top_k=-1)
    fit(TierCheckpointIO(tiers, run="r"), [checkpoint], tmp_path, max_epochs=3)
    assert pointers(folder) == {"same.ckpt": 6, "same-v1.ckpt": 12, "same-v2.ckpt": 18}


def test_a_pointer_whose_checkpoint_is_gone_or_never_was_gives_the_newest_before_it_with_a_warning(
    tmp_path: Path, tiers: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning-AI/pytorch-lightning#18865: a `last` that points to nothing."""
    fit(TierCheckpointIO(tiers, run="r"), [ModelCheckpoint(folder, save_top_k=-1, save_last=True)], tmp_path, max_epochs=3)
    with tierstore.open(
        tiers, run="r", retention={"keep": [{"steps": [6, 12]}], "protect": {"min_age": "1ms"}}, rank=0, world_size=1
    ) as store:
        store.save(24, {"w": torch.zeros(2)}).wait("durable")  # newer than all pointers: never taken in their place
        store.retention.untag(18, ["lightning"])
        store.retention.prune(max_delete_fraction=1.0)
    io = TierCheckpointIO(tiers, run="r")
    assert io.load_checkpoint(folder / "last.ckpt")["global_step"] == 12
    assert "points to step 18" in caplog.text
    assert "step 12 is loaded" in caplog.text
    write_pointer(str(folder / "lost.ckpt"), Pointer(run="r", step=3, save_id=ticket_of(3).attempt.save_id))
    with pytest.raises(NotFoundError, match="remove the file to begin anew"):
        io.load_checkpoint(folder / "lost.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(folder / "nothing.ckpt")
    assert io.latest() == "@latest"
    assert io.load_checkpoint("@12")["global_step"] == 12
    io.teardown()


def test_what_training_was_resumed_from_is_not_removed(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    """Lightning-AI/pytorch-lightning#21813: a new run deletes the remote checkpoint that it resumed from."""
    fit(TierCheckpointIO(tiers, run="r"), [ModelCheckpoint(folder)], tmp_path, max_epochs=1)
    (before,) = folder.iterdir()
    io = TierCheckpointIO(tiers, run="r")
    whole = io.load_checkpoint(str(before))
    io.save_checkpoint({**whole, "global_step": 7}, folder / "next.ckpt")
    io.remove_checkpoint(str(before))
    io.teardown()
    assert set(pointers(folder)) == {before.name, "next.ckpt"}


def test_plain_files_of_lightning_load_and_are_removed(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    trainer = fit(TorchCheckpointIO(), [ModelCheckpoint(folder, save_last=True)], tmp_path, max_epochs=1)
    resumed = fit(TierCheckpointIO(tiers, run="r"), [ModelCheckpoint(folder, save_last=True)], tmp_path, max_epochs=2, ckpt_path="last")
    assert resumed.global_step == 2 * trainer.global_step
    assert set(pointers(folder)) == {"last.ckpt", "epoch=1-step=12.ckpt"}  # of Lightning's own files none is left


# ---- what is refused, and errors


@pytest.mark.parametrize(
    ("value", "remedy"), [(torch.nn.ReLU(), r"save_hyperparameters\(ignore=\['extra'\]\)"), ({"f": print}, r"ignore=\['extra'\]")]
)
def test_a_hyper_parameter_that_needs_pickle_is_named_with_the_remedy(
    tmp_path: Path, tiers: list[str], folder: Path, value: Any, remedy: str
) -> None:
    io = TierCheckpointIO(tiers, run="r")
    with pytest.raises(UnsupportedTypeError, match=remedy) as caught:
        fit(io, [ModelCheckpoint(folder)], tmp_path, max_epochs=1, model=Tiny(extra=value))
    assert "hyper_parameters" in str(caught.value)
    assert not folder.exists()


def test_a_pointer_that_cannot_be_written_is_told_at_the_next_save_and_at_teardown(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    io = TierCheckpointIO(tiers, run="r")
    trainer = fit(io, [], tmp_path, max_epochs=1, enable_checkpointing=False)
    (folder / "taken.ckpt").mkdir(parents=True)
    trainer.save_checkpoint(folder / "taken.ckpt")
    with pytest.raises(SaveError, match=r"taken\.ckpt could not be written"):
        io.teardown()
    trainer.save_checkpoint(folder / "taken.ckpt")
    assert io.body._publisher.flush(30)
    with pytest.raises(SaveError, match=r"taken\.ckpt could not be written"):
        trainer.save_checkpoint(folder / "other.ckpt")
    io.teardown()


def test_a_save_that_fails_in_the_background_is_told_at_the_end_of_the_fit_and_the_old_pointer_stays(
    tmp_path: Path, tiers: list[str], folder: Path
) -> None:
    config: dict[str, Any] = {"tiers": [{"uri": uri, "scope": scope} for uri, scope in zip(tiers, ("node", "shared"), strict=True)]}
    fit(TierCheckpointIO(config, run="r"), [ModelCheckpoint(folder)], tmp_path, max_epochs=1)
    before = pointers(folder)
    config["save"] = {"patience": "1s"}
    os.rename(tmp_path / "far" / "r", tmp_path / "aside")
    (tmp_path / "far" / "r").write_text("no folder", encoding="utf-8")  # the shared tier takes nothing any more
    with pytest.raises((SaveError, DeadlineError)):
        fit(TierCheckpointIO(config, run="r"), [ModelCheckpoint(folder, filename="next-{step}")], tmp_path, max_epochs=1)
    assert pointers(folder) == before


def test_a_uri_that_pathlib_has_damaged_is_refused_and_nothing_is_made(
    tmp_path: Path, tiers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning-AI/pytorch-lightning#18786: a Path of a URI silently becomes a local folder."""
    monkeypatch.chdir(tmp_path)
    io = TierCheckpointIO(tiers, run="r")
    for path in (Path("tier:///a/last.ckpt"), os.path.normpath("tier:///a/last.ckpt")):
        for call in (lambda p: io.save_checkpoint({}, p), io.load_checkpoint, io.remove_checkpoint):
            with pytest.raises(UsageError, match="damaged"):
                call(path)
    assert not list(tmp_path.iterdir())


# ---- what people pass


def test_an_open_store_is_used_and_stays_open(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    with tierstore.open(tiers, run="r", rank=0, world_size=1, codecs=lightning_codecs()) as store:
        trainer = fit(TierCheckpointIO(store), [ModelCheckpoint(folder)], tmp_path, max_epochs=1)
        assert store.usable
        assert [c.attempt.step for c in store.checkpoints()] == [6]
        trainer.save_checkpoint(folder / "x.ckpt", storage_options={"tags": ["release/1"], "metrics": {"mmlu": 0.5}})
        trainer.strategy.checkpoint_io.teardown()
        assert "release/1" in store.checkpoints()[0].tags
        assert store.checkpoints()[0].metrics["mmlu"] == 0.5
        with pytest.raises(UsageError, match="storage_options"):
            trainer.save_checkpoint(folder / "x.ckpt", storage_options={"speed": 1})


def test_at_the_end_of_the_interpreter_what_is_saved_is_committed_and_has_its_pointer(
    tmp_path: Path, tiers: list[str], folder: Path
) -> None:
    process = SERVER.Process(target=lightning_child.fit_and_leave, args=(str(tmp_path),))
    LIGHTNINGS.start(process)
    process.join(250)
    assert process.exitcode == 0
    assert pointers(folder) == {"x.ckpt": 6}
    assert saved(tiers) == [6]


def test_it_can_be_pickled_and_made_before_anything_exists(tiers: list[str]) -> None:
    io = pickle.loads(pickle.dumps(TierCheckpointIO(tiers, run="r")))  # noqa: S301 our own bytes
    assert isinstance(io, CheckpointIO)
    assert not any(Path(tier).exists() for tier in tiers)
    io.teardown()


def test_tensors_come_where_map_location_says(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    io = TierCheckpointIO(tiers, run="r")
    trainer = fit(io, [ModelCheckpoint(folder, filename="x")], tmp_path, max_epochs=1)
    expected = trainer.lightning_module.state_dict()
    for place in ("cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, location: storage):
        assert_same_state(io.load_checkpoint(folder / "x.ckpt", map_location=place, weights_only=True)["state_dict"], expected)
    assert io.load_checkpoint(folder / "x.ckpt", map_location="meta")["state_dict"]["net.0.weight"].device.type == "meta"
    io.teardown()


def test_a_model_is_made_from_a_pointer(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    io = TierCheckpointIO(tiers, run="r")
    trainer = fit(io, [ModelCheckpoint(folder, filename="x")], tmp_path, max_epochs=1, model=Tiny(width=5))
    model = Tiny.load_from_checkpoint(io.as_file(folder / "x.ckpt"))
    io.teardown()
    assert_same_state(dict(model.state_dict()), dict(trainer.lightning_module.state_dict()))


def test_what_slurm_saves_at_the_end_is_committed_when_the_call_returns(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    io = TierCheckpointIO(tiers, run="r")
    trainer = fit(io, [], tmp_path, max_epochs=1, enable_checkpointing=False)
    trainer.save_checkpoint(folder / "hpc_ckpt_1.ckpt")
    assert pointers(folder) == {"hpc_ckpt_1.ckpt": 6}
    io.teardown()


# ---- many ranks


def run_ranks(root: Path, strategy: str, steps: int) -> dict[str, torch.Tensor]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent; nobody can take its port first
    pipe, theirs = SERVER.Pipe(duplex=False)
    plan = {"strategy": strategy, "steps": steps}
    ranks = [SERVER.Process(target=lightning_child.be_rank, args=(rank, store.port, str(root), plan, theirs)) for rank in range(2)]
    for process in ranks:
        LIGHTNINGS.start(process)
    theirs.close()
    state = pipe.recv() if pipe.poll(250) else {}
    for process in ranks:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    return {name: torch.from_numpy(value) for name, value in state.items()}


def test_ddp_saves_on_rank_0_and_all_ranks_resume(tmp_path: Path) -> None:
    run_ranks(tmp_path, "ddp", 3)
    state = run_ranks(tmp_path, "ddp", 6)
    io = TierCheckpointIO([str(tmp_path / "near"), str(tmp_path / "far")], run="ranks")
    loaded = io.load_checkpoint(tmp_path / "ckpt" / "last.ckpt")
    io.teardown()
    assert loaded["global_step"] == 6
    assert torch.equal(loaded["state_dict"]["net.0.weight"], state["net.0.weight"])
    assert attempts([str(tmp_path / "far")], "ranks") == 2


def test_a_sharded_model_saves_on_two_ranks_resumes_on_one_and_again_on_two(tmp_path: Path) -> None:
    """FSDP2 over gloo on the CPU: `TierModelParallelStrategy`."""
    tiers = [str(tmp_path / "near"), str(tmp_path / "far")]
    two = run_ranks(tmp_path, "fsdp2", 3)
    io = TierCheckpointIO(tiers, run="ranks")
    loaded = io.load_checkpoint(tmp_path / "ckpt" / "last.ckpt")
    assert torch.equal(loaded["state_dict"]["net.0.weight"], two["net.0.weight"])
    assert attempts(tiers, "ranks") == 1
    one = fit(io, [ModelCheckpoint(tmp_path / "ckpt", save_last=True, every_n_train_steps=3)], tmp_path, max_steps=6,
              ckpt_path="last", model=lightning_child.Sharded(), limit_val_batches=0)  # fmt: skip
    alone = whole_state(one)
    again = run_ranks(tmp_path, "fsdp2", 6)  # nothing is left to train: what it resumed from is what it ends with
    assert_same_state(again, alone)
    assert isinstance(TierModelParallelStrategy(), pl.strategies.ModelParallelStrategy)


def test_the_pointer_is_json_that_a_person_can_read(tmp_path: Path, tiers: list[str], folder: Path) -> None:
    fit(TierCheckpointIO(tiers, run="r"), [ModelCheckpoint(folder, filename="x")], tmp_path, max_epochs=1)
    body = json.loads((folder / "x.ckpt").read_text(encoding="utf-8"))
    assert (body["run"], body["step"]) == ("r", 6)


# ---- dirpath="tier://..."


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A folder of the tiers' files, by URI."""
    config = tmp_path / "store.yaml"
    config.write_text(f"tiers:\n  - {{uri: {tmp_path}/near, scope: node}}\n  - {{uri: {tmp_path}/far, durable: true}}\n", encoding="utf-8")
    return f"tier://{config}/ckpt"


@pytest.mark.parametrize("kind", ["pointers", "plain files"])
def test_dirpath_may_be_a_tier_uri_and_last_is_found_there(tmp_path: Path, uri: str, kind: str) -> None:
    def io() -> Any:
        return TorchCheckpointIO() if kind == "plain files" else TierCheckpointIO(tmp_path / "store.yaml", run="r")

    def callbacks() -> list[Any]:
        return [TierModelCheckpoint(uri, monitor="val/loss", save_top_k=1, save_last=True, filename="{epoch}-{step}")]

    fit(io(), callbacks(), tmp_path, max_epochs=2)
    fs, place = fsspec.core.url_to_fs(uri)
    assert sorted(os.path.basename(path) for path in fs.ls(place, detail=False)) == ["epoch=1-step=12.ckpt", "last.ckpt"]
    second = callbacks()
    trainer = fit(io(), second, tmp_path, max_epochs=3, ckpt_path="last")
    assert trainer.global_step == 18
    assert second[0].best_model_path == f"{uri}/epoch=2-step=18.ckpt"
    assert sorted(os.path.basename(path) for path in fs.ls(place, detail=False)) == ["epoch=2-step=18.ckpt", "last.ckpt"]
    assert trainer.validate(Tiny(), data(), ckpt_path="best", verbose=False, weights_only=False)
    fs.close()


def test_stock_callbacks_take_a_tier_uri_too(tmp_path: Path, uri: str) -> None:
    trainer = fit(TorchCheckpointIO(), [ModelCheckpoint(uri, filename="x")], tmp_path, max_epochs=1)
    fs, place = fsspec.core.url_to_fs(f"{uri}/x.ckpt")
    with fs.open(place, "rb") as file:
        loaded = torch.load(file, weights_only=True)
    assert_same_state(loaded["state_dict"], trainer.lightning_module.state_dict())
    model = Tiny.load_from_checkpoint(f"{uri}/x.ckpt")
    assert torch.equal(model.net[0].weight, trainer.lightning_module.net[0].weight)
    fs.close()


def test_a_fit_with_the_package_of_the_other_name(tmp_path: Path, long_run: bool) -> None:
    """`pytorch_lightning` has classes of its own, and its trainer takes only what is made of those."""
    if not long_run:
        pytest.skip("imports a second Lightning, which takes seconds: --long")
    pipe, theirs = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=lightning_child.fit_with_the_other_package, args=(str(tmp_path), theirs))
    LIGHTNINGS.start(process)
    theirs.close()
    assert pipe.poll(120)
    assert pipe.recv() == ["last.ckpt", "step=4.ckpt"]
    process.join(60)


@pytest.mark.parametrize("data", [b"", b'{"half', b'{"foreign": 1}'], ids=["empty", "half", "foreign"])
def test_a_damaged_pointer_is_told_by_its_name_and_not_by_torch(tmp_path: Path, tiers: list[str], folder: Path, data: bytes) -> None:
    io = TierCheckpointIO(tiers, run="r")
    fit(io, [ModelCheckpoint(folder, filename="here")], tmp_path, max_epochs=1)
    (folder / "here.ckpt").write_bytes(data)
    with pytest.raises(FormatError, match=r"(?s)here.ckpt is .*'@latest' for the newest of the run"):
        io.load_checkpoint(folder / "here.ckpt")
    fit(io, [ModelCheckpoint(folder, filename="here", enable_version_counter=False)], tmp_path, max_epochs=2, ckpt_path="@latest")
    assert pointers(folder) == {"here.ckpt": 12}  # and is replaced
    io.teardown()
