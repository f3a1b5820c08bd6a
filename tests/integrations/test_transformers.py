"""The Transformers door, with a real Trainer: killed and resumed bit-equal, no half folder ever picked, several processes, rotation."""

from __future__ import annotations

import filecmp
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import tierstore
from tierstore.crashpoints import CRASH_EXIT
from tierstore.errors import IntegrityError, NotFoundError, SaveError, UsageError
from tierstore.integrations.transformers import TierCheckpointCallback, resume_from_checkpoint
from tierstore.testing.equality import assert_same_state

sys.path.insert(0, str(Path(__file__).parent))
from fork_kit import SERVER, FrameworkServer
from ranks_kit import run_ranks
from trainer_hf import RUN, STEPS, Draw, Stop, Wait, life, tiers_under, train, trainer_of, weights

# deepspeed, where it is installed, is imported when a Trainer is made: once here instead of once a process.
_TRAINERS = FrameworkServer(
    [
        "pytest",
        "torch",
        "torch._dynamo",
        "deepspeed",
        "tierstore.store",
        "transformers.trainer",
        "transformers.models.gpt2.modeling_gpt2",
        "tierstore.integrations.transformers",
    ]
)


def run_life(folder: Path, output_dir: Path, *, kill_at: str = "", crash_at: str = "") -> int:
    """A life in a process of its own; returns how it ended."""
    process = SERVER.Process(target=life, args=(str(folder), str(output_dir), kill_at, crash_at))
    _TRAINERS.start(process)
    process.join(250)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError("the Trainer hung")
    assert process.exitcode is not None
    return process.exitcode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after all steps, of a Trainer that knows nothing of tierstore."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on it
    trainer = trainer_of(tmp_path_factory.mktemp("plain"), [], save_strategy="no")
    trainer.train()
    torch.set_num_threads(before)
    return weights(trainer)


def folders(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


def steps_of(folder: Path) -> list[int]:
    with tierstore.open(tiers_under(folder), run=RUN) as store:
        return [info.step for info in store.checkpoints()]


@pytest.mark.parametrize(
    ("how", "ended", "resumes_at", "half"),
    [
        # Neither the optimizer's nor the RNG's file of step 4 is there.
        ({"kill_at": "checkpoint-4/optimizer.pt"}, -9, 2, True),
        # All of step 4 is in its folder, but the store did not commit it; its node tier may have it whole.
        ({"crash_at": "commit.before-record:2"}, CRASH_EXIT, None, False),
        ({"crash_at": "persist.before-part:2"}, CRASH_EXIT, 2, False),
    ],
    ids=["in-the-trainers-save", "in-the-commit", "in-the-stores-save"],
)
def test_a_trainer_killed_in_mid_save_resumes_to_the_very_weights_of_an_uninterrupted_run(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor], how: dict[str, str], ended: int, resumes_at: int | None, half: bool
) -> None:
    """HF#35580, #35782: a folder that was half written is not picked as the latest."""
    output_dir, result = tmp_path / "out", tmp_path / "weights.pt"
    assert run_life(tmp_path, output_dir, **how) == ended
    if half:
        picked = get_last_checkpoint(str(output_dir))
        assert picked is not None
        assert Path(picked).name == "checkpoint-4", "Transformers' own search picks the half one"
    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        path = resume_from_checkpoint(store, output_dir)
    assert path is not None
    if resumes_at is not None:
        assert Path(path).name == f"checkpoint-{resumes_at}"
        assert not (output_dir / "checkpoint-4").exists()
        assert (output_dir / "aside-checkpoint-4").exists(), "moved aside, not deleted"
    assert Path(path) == Path(str(get_last_checkpoint(str(output_dir)))), "now the Trainer's own search finds the whole one"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    train(tmp_path, output_dir, result)
    torch.set_num_threads(before)
    assert_same_state(torch.load(result), uninterrupted)
    assert steps_of(tmp_path) == [2, 4, 6]


def body_ddp(rank: int, world_size: int, folder: Path, *, output_dir: str, steps: int, shared: bool) -> Any:
    """A rank: its own folder where nothing is shared between nodes."""
    own = Path(output_dir) if shared else Path(output_dir) / f"node-{rank}"
    trainer = trainer_of(own, [Stop(steps), Draw(rank)])
    with tierstore.open(tiers_under(folder), run=RUN) as store:
        callback = TierCheckpointCallback(store)
        trainer.add_callback(callback)
        path = resume_from_checkpoint(store, own)
        trainer.train(resume_from_checkpoint=path)
        result = {name: tensor.tolist() for name, tensor in weights(trainer).items()}
    return {"weights": result, "path": path, "draw": torch.rand(4).tolist(), "tickets": sorted(callback.tickets)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes come to that are not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return run_ranks(2, body_ddp, folder, output_dir=str(folder / "a"), steps=STEPS, shared=True, server=_TRAINERS)


@pytest.mark.parametrize("shared", [True, False], ids=["one-folder", "a-folder-a-node"])
def test_two_processes_store_one_checkpoint_with_the_random_state_of_each(tmp_path: Path, whole: list[Any], shared: bool) -> None:
    first = run_ranks(2, body_ddp, tmp_path / "parts", output_dir=str(tmp_path / "b"), steps=4, shared=shared, server=_TRAINERS)
    assert [r["path"] for r in first] == [None, None]
    with tierstore.open(tiers_under(tmp_path / "parts"), run=RUN) as store:
        names = set(store.open_checkpoint(4))
        assert {"files.rng_state_0.pth", "files.rng_state_1.pth", "files.optimizer.pt", "safetensors.model.safetensors"} <= names
        assert not any("@rank" in name for name in names), "each file is stored by one rank"
    shutil.rmtree(tmp_path / "b")  # other machines
    second = run_ranks(2, body_ddp, tmp_path / "parts", output_dir=str(tmp_path / "b"), steps=STEPS, shared=shared, server=_TRAINERS)
    assert [Path(r["path"]).name for r in second] == ["checkpoint-4"] * 2
    for before, after in zip(whole, second, strict=True):
        assert before["weights"] == after["weights"]
        assert before["draw"] == after["draw"], "each rank's random state went on"
    assert second[0]["draw"] != second[1]["draw"]


def test_a_restored_folder_has_the_files_of_the_saved_one_byte_by_byte_and_its_tensors_have_names(tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    train(tmp_path, output_dir, max_steps=2)
    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        path = resume_from_checkpoint(store, tmp_path / "other")
        assert path == str(tmp_path / "other" / "checkpoint-2")
        compared = filecmp.dircmp(output_dir / "checkpoint-2", path)
        assert (compared.left_only, compared.right_only, compared.funny_files) == ([], [], [])
        assert filecmp.cmpfiles(output_dir / "checkpoint-2", path, compared.common_files, shallow=False)[1:] == ([], [])
        with store.open_checkpoint(2) as checkpoint:
            assert checkpoint["model.transformer.wte.weight"][3:5].shape == (2, 16)
        info = store.latest()
        assert info is not None
        assert {"loss", "eval_loss", "grad_norm", "learning_rate"} <= info.metrics.keys()
        assert info.final


def test_a_local_folder_that_is_equal_stays_and_one_that_differs_is_moved_aside(tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    train(tmp_path, output_dir, max_steps=2)
    kept = (output_dir / "checkpoint-2" / "optimizer.pt").stat().st_ino
    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        assert resume_from_checkpoint(store, output_dir) == str(output_dir / "checkpoint-2")
        assert (output_dir / "checkpoint-2" / "optimizer.pt").stat().st_ino == kept, "nothing was written"
        with open(output_dir / "checkpoint-2" / "optimizer.pt", "r+b") as file:
            file.seek(100)
            file.write(b"\xff\xfe")
        resume_from_checkpoint(store, output_dir)
        (output_dir / "checkpoint-2" / "checkpoint-is-incomplete.txt").write_text("what the SIGTERM checkpoint leaves (HF#41723)")
        resume_from_checkpoint(store, output_dir)
    assert folders(output_dir) == ["aside-checkpoint-2", "aside-checkpoint-2-1", "checkpoint-2"]


def test_old_folders_of_a_directory_used_again_are_neither_picked_nor_in_the_way(tmp_path: Path) -> None:
    """HF#28862: new saves of lower steps were deleted for old ones of higher steps. HF#27138: the order is the steps', not the times'."""
    output_dir = tmp_path / "out"
    train(tmp_path, output_dir, max_steps=4)
    shutil.copytree(output_dir / "checkpoint-2", output_dir / "checkpoint-100")
    shutil.copytree(output_dir / "checkpoint-2", output_dir / "checkpoint-100-notes")
    os.utime(output_dir / "checkpoint-4", (1, 1))
    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        assert resume_from_checkpoint(store, output_dir) == str(output_dir / "checkpoint-4")
    assert folders(output_dir) == ["aside-checkpoint-100", "checkpoint-100-notes", "checkpoint-2", "checkpoint-4"]
    shutil.rmtree(output_dir / "checkpoint-100-notes")
    train(tmp_path, output_dir, save_total_limit=1)
    assert "checkpoint-6" in folders(output_dir)
    assert steps_of(tmp_path) == [2, 4, 6], "the store's own policy decides about the store: here there is none"


def test_with_a_limit_of_one_and_another_best_the_store_keeps_both(tmp_path: Path) -> None:
    """HF#25129: everything was deleted. The best one is put back for load_best_model_at_end on a new machine."""
    policy = {"keep": [{"last": 1}, {"best": {"metric": "eval_loss", "mode": "max"}}]}
    output_dir = tmp_path / "out"
    settings: dict[str, Any] = {
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,
        "metric_for_best_model": "loss",
    }
    with tierstore.open(tiers_under(tmp_path), run=RUN, retention=policy) as store:
        trainer = trainer_of(output_dir, [TierCheckpointCallback(store)], max_steps=4, **settings)
        trainer.train()
        store.retention.prune()
        kept = [info.step for info in store.checkpoints()]
        best = int(str(trainer.state.best_global_step))
        assert kept == sorted({best, 4})
        shutil.rmtree(output_dir)
        path = resume_from_checkpoint(store, output_dir)
        assert {Path(str(path)).name, f"checkpoint-{best}"} == set(folders(output_dir))
        again = trainer_of(output_dir, [TierCheckpointCallback(store)], **settings)
        again.train(resume_from_checkpoint=path)
        assert [info.step for info in store.checkpoints()][-1] == STEPS


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_local_folders_go_when_they_are_durable_and_never_the_best_one(tmp_path: Path, keep: int) -> None:
    output_dir = tmp_path / "out"

    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        callback = TierCheckpointCallback(store, keep_local=keep)
        settings: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
        trainer = trainer_of(output_dir, [callback, Wait(callback, "durable")], **settings)
        trainer.train()
        best = trainer.state.best_global_step
        assert [info.step for info in store.checkpoints()] == [2, 4, 6]
    newest = ["checkpoint-2", "checkpoint-4", "checkpoint-6"][max(0, 3 - keep) :]
    assert folders(output_dir) == sorted({f"checkpoint-{best}", *newest})


def test_what_is_not_durable_yet_stays_in_the_local_folder(tmp_path: Path) -> None:
    class Never(dict[int, Any]):
        """Tickets of saves that are still under way."""

        def done(self, level: str) -> bool:
            return False

    output_dir = tmp_path / "out"
    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        callback = TierCheckpointCallback(store, keep_local=0)
        trainer = trainer_of(output_dir, [callback], max_steps=2)
        callback._tickets[2] = Never()  # type: ignore[assignment]
        (output_dir / "checkpoint-2").mkdir(parents=True)
        trainer.state.global_step = 2
        callback._clean(trainer.args, trainer.state)
        assert folders(output_dir) == ["checkpoint-2"]


def test_the_checkpoint_that_the_trainer_saves_on_sigterm_is_stored_before_training_ends(tmp_path: Path) -> None:
    """HF#41723. The Trainer calls no on_save for it."""
    output_dir = tmp_path / "out"

    class Terminate(TrainerCallback):  # type: ignore[misc]
        """What the handler of SIGTERM does after its three seconds."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 3:
                jit = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "JITCheckpointCallback")
                jit.jit_manager._enable_checkpoint()

    shutil.copytree(_a_whole_folder(tmp_path), output_dir / "checkpoint-1")
    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        trainer = trainer_of(output_dir, [TierCheckpointCallback(store), Terminate()], enable_jit_checkpoint=True, save_steps=5)
        trainer.train()
        assert trainer.state.global_step == 4, "the Trainer saves before a step, and stops after it"
        assert [info.step for info in store.checkpoints()] == [3], "neither nothing, nor what an earlier life left"
        assert resume_from_checkpoint(store, tmp_path / "other") == str(tmp_path / "other" / "checkpoint-3")


def _a_whole_folder(folder: Path) -> Path:
    trainer_of(folder / "earlier", [], max_steps=2).train()
    return folder / "earlier" / "checkpoint-2"


def test_a_save_that_failed_in_the_background_is_raised_by_the_next_one(tmp_path: Path) -> None:
    class Fail(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 3:
                store.sync(60)
                for image in (tmp_path / "shared").glob(f"{RUN}/.log"):
                    shutil.rmtree(image)
                    image.write_text("a file in the way")

    with pytest.raises((SaveError, tierstore.TierStoreError)):
        with tierstore.open({"version": 1, "run": RUN, "tiers": tiers_under(tmp_path), "save": {"patience": "1s"}}) as store:
            trainer_of(tmp_path / "out", [TierCheckpointCallback(store), Fail()]).train()


def test_a_damaged_newest_checkpoint_is_an_error_and_passed_over_only_where_that_is_asked_for(tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    train(tmp_path, output_dir, max_steps=4)
    for shard in tmp_path.glob(f"*/{RUN}/step-*4-*/shard-*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        with pytest.raises(IntegrityError):
            resume_from_checkpoint(store, tmp_path / "other")
        assert folders(tmp_path / "other") == [], "nothing of it is left"
        assert resume_from_checkpoint(store, tmp_path / "other", fallback=True) == str(tmp_path / "other" / "checkpoint-2")


def test_without_a_checkpoint_there_is_nothing_to_resume_from_and_a_wrong_step_is_named(tmp_path: Path) -> None:
    with tierstore.open(tiers_under(tmp_path), run=RUN) as store:
        assert resume_from_checkpoint(store, tmp_path / "out") is None
        with pytest.raises(NotFoundError, match="no step 7"):
            resume_from_checkpoint(store, tmp_path / "out", which=7)
        store.save(1, {"w": torch.zeros(2)}).wait("durable", 60)
        with pytest.raises(UsageError, match="not saved from a folder"):
            resume_from_checkpoint(store, tmp_path / "out")


def test_a_source_is_opened_when_training_begins_and_closed_when_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = TierCheckpointCallback(tiers_under(tmp_path), run=RUN, tags=["nightly"])
    with pytest.raises(UsageError, match="opened when training begins"):
        callback.store  # noqa: B018
    trainer_of(tmp_path / "out", [callback], max_steps=2).train()
    with pytest.raises(UsageError, match="opened when training begins"):
        callback.store  # noqa: B018
    path = resume_from_checkpoint(tiers_under(tmp_path), tmp_path / "out", run=RUN)
    assert json.loads((Path(str(path)) / "trainer_state.json").read_text())["global_step"] == 2
    with caplog.at_level(logging.WARNING, "tierstore.integrations.transformers"):
        trainer_of(tmp_path / "new", [callback], max_steps=2, save_strategy="no").train()
    assert "has step 2 already, and training begins at step 0" in caplog.text


@pytest.mark.parametrize("keep", [-1, True, "2"])
def test_a_number_of_folders_that_makes_no_sense_is_refused(keep: Any) -> None:
    with pytest.raises(UsageError, match="keep_local"):
        TierCheckpointCallback(["a"], keep_local=keep)


def test_a_store_of_other_ranks_and_a_hyperparameter_search_are_refused(tmp_path: Path) -> None:
    with tierstore.open(tiers_under(tmp_path), run=RUN, rank=1, world_size=2) as store:
        with pytest.raises(UsageError, match="rank 1 of 2, the Trainer is rank 0 of 1"):
            trainer_of(tmp_path / "out", [TierCheckpointCallback(store)]).train()
    trainer = trainer_of(tmp_path / "out", [])
    trainer.state.is_hyper_param_search = True
    with pytest.raises(UsageError, match="hyperparameter search"):
        TierCheckpointCallback(tiers_under(tmp_path), run=RUN).on_train_begin(trainer.args, trainer.state, trainer.control)
