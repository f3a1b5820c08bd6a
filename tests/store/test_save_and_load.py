"""The public API as a trainer uses it: what was saved comes back, from wherever it lies, and mistakes are answered."""

from __future__ import annotations

import logging
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fork_kit import run_forked

import tierstore
from tierstore.errors import (
    ClosedError,
    IntegrityError,
    NotFoundError,
    RefusedError,
    StateMismatchError,
    UnsupportedTypeError,
    UsageError,
)
from tierstore.testing.equality import assert_same_state


def tiers_of(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "node"), str(tmp_path / "shared")]


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((64, 8), value), "b": torch.arange(3)}, "step": int(value), "lr": 1e-3}


def flip_a_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def shard_of(tier: Path, step: int) -> Path:
    return next(tier.glob(f"*/step-{step:010d}-*/shard-*.safetensors"))


def test_a_training_state_comes_back_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        schedule.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.default_rng(3).bit_generator.state},
    }
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(3, state, metrics={"loss": 0.5}).wait("durable", timeout=200)
        assert_same_state(store.load(), state)
        into = {"model": torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)).state_dict()}
        places = [t.data_ptr() for t in into["model"].values()]
        with pytest.raises(StateMismatchError, match="optimizer"):
            store.load(into=into)
        store.load(into=into, options=tierstore.LoadOptions(unexpected="ignore"))
        assert [t.data_ptr() for t in into["model"].values()] == places
        assert all(torch.equal(into["model"][k], v) for k, v in state["model"].items())


def test_changing_the_state_after_save_changes_nothing(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        state = small_state(1.0)
        ticket = store.save(1, state)
        state["model"]["w"].add_(1)
        state["lr"] = 99.0
        ticket.wait("durable", timeout=200)
        assert_same_state(store.load(1), small_state(1.0))


def test_overlapping_saves_keep_their_own_values(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        weight = torch.zeros(1 << 20)
        tickets = []
        for step in range(5):
            weight.fill_(step)
            tickets.append(store.save(step, {"w": weight}))
        for ticket in tickets:
            ticket.wait("durable", timeout=200)
        for step in range(5):
            assert torch.equal(store.load(step)["w"], torch.full((1 << 20,), float(step)))


def test_any_one_tier_alone_is_enough(tmp_path: Path) -> None:
    """Without the log that decides, it can be loaded at once; to go on from it, somebody has to say that the log is lost for good."""
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(7, small_state(7.0)).wait("durable", timeout=200)
        store.sync(timeout=200)
    for keep, lose in (("node", "shared"), ("shared", "node")):
        copy = tmp_path.parent / f"{tmp_path.name}-{keep}"
        shutil.copytree(tmp_path, copy)
        shutil.rmtree(copy / lose)
        with tierstore.open(tiers_of(copy), run="r") as store:
            assert_same_state(store.load(), small_state(7.0))
            if lose == "node":
                resumed = store.resume()
                assert resumed is not None
                assert resumed.step == 7
            else:
                with pytest.raises(RefusedError, match="'shared'") as refused:
                    store.resume()
                assert "tierstore recover" in refused.value.hint
        shutil.rmtree(copy)


def test_a_flipped_bit_on_the_nearest_tier_is_passed_over_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(1, small_state()).wait("durable", timeout=200)
        store.sync(timeout=200)
        shard = shard_of(tmp_path / "node", 1)
        flip_a_bit(shard, shard.stat().st_size - 1)
        with caplog.at_level(logging.WARNING):
            assert_same_state(store.load(1), small_state())
    assert "node" in caplog.text
    assert shard.name in caplog.text


def test_damage_on_every_tier_is_an_error_or_a_loud_step_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        for step in (10, 20):
            store.save(step, small_state(float(step))).wait("durable", timeout=200)
        store.sync(timeout=200)
        for tier in ("node", "shared"):
            shard = shard_of(tmp_path / tier, 20)
            flip_a_bit(shard, shard.stat().st_size - 1)
        with pytest.raises(IntegrityError) as caught:
            store.resume()
        assert "node" in str(caught.value)
        assert "shared" in str(caught.value)
        resumed = store.resume(fallback=True)
        assert resumed is not None
        assert (resumed.step, resumed.skipped) == (10, (20,))
        assert "step=20" in caplog.text


@pytest.mark.parametrize("cut", [0, 10, 4096])
def test_a_truncated_shard_is_passed_over(tmp_path: Path, cut: int) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(1, small_state()).wait("durable", timeout=200)
        store.sync(timeout=200)
        with shard_of(tmp_path / "node", 1).open("r+b") as file:
            file.truncate(cut)
        assert_same_state(store.load(1), small_state())


def test_a_step_saved_twice_is_superseded_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(5, small_state(1.0)).wait("durable", timeout=200)
        store.save(5, small_state(2.0)).wait("durable", timeout=200)
        assert "supersedes" in caplog.text
        assert [c.attempt.step for c in store.checkpoints()] == [5]
        assert_same_state(store.load(5), small_state(2.0))
        with pytest.raises(UsageError, match="committed already"):
            store.save(5, small_state(3.0), if_exists="refuse")
        with pytest.raises(UsageError, match="if_exists"):
            store.save(6, small_state(3.0), if_exists="overwrite")  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 1.5, "7", None, True, 10**15])
def test_a_step_that_is_none_is_refused(tmp_path: Path, step: Any) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store, pytest.raises(UsageError, match="step"):
        store.save(step, small_state())


def test_what_can_not_be_stored_is_refused_by_its_place(tmp_path: Path) -> None:
    class Mine:
        pass

    bad: list[tuple[Any, str]] = [
        (torch.empty(3, device="meta"), "meta"),
        (Mine(), "Mine"),
        (lambda: None, "function"),
    ]
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        for value, named in bad:
            with pytest.raises(UnsupportedTypeError) as caught:
                store.save(1, {"outer": [{"inner": value}]})
            assert "inner" in str(caught.value)
            assert named in str(caught.value)
        with pytest.warns(UserWarning, match="deprecated"):
            quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        with pytest.raises(UnsupportedTypeError, match=r"[Qq]uant"):
            store.save(1, {"q": quantised})
        sparse = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse()
        store.save(2, {"s": sparse}).wait("durable", timeout=200)
        assert torch.equal(store.load(2)["s"].to_dense(), sparse.to_dense())
        assert [c.attempt.step for c in store.checkpoints()] == [2]


def test_what_does_not_exist_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="llama-sft") as store:
        assert store.resume() is None
        assert store.latest() is None
        with pytest.raises(NotFoundError):
            store.load()
        store.save(100, small_state()).wait("durable", timeout=200)
        with pytest.raises(NotFoundError, match="100"):
            store.load(101)
        with pytest.raises(NotFoundError, match=r"model\.w"):
            store.open_checkpoint(100)["model.ww"]
        with pytest.raises(NotFoundError, match="tag"):
            store.load("tag:release")
    with tierstore.open(tiers_of(tmp_path), run="lama-sft") as store, pytest.raises(NotFoundError, match="llama-sft"):
        store.load()


def test_references_find_the_best_and_the_tagged(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        for step, loss in ((1, 2.0), (2, float("nan")), (3, 1.0), (4, 1.5)):
            store.save(step, small_state(float(step)), metrics={"val/loss": loss}, tags=["release/1"] if step == 1 else None)
        store.sync(timeout=200)
        assert store.load("best:val/loss")["step"] == 3
        assert store.load("tag:release/1")["step"] == 1
        assert store.load("r@latest")["step"] == 4


def test_saves_from_several_threads_all_commit(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        threads = [threading.Thread(target=lambda s=s: store.save(s, small_state(float(s)))) for s in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.sync(timeout=200)
        for step in range(8):
            assert_same_state(store.load(step), small_state(float(step)))


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = tierstore.open(tiers_of(tmp_path), run="r")
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.save(1, small_state())
    with pytest.raises(ClosedError):
        store.load()


def test_a_store_travels_by_pickle(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(1, small_state()).wait("durable", timeout=200)
        with pickle.loads(pickle.dumps(store)) as other:  # noqa: S301 - our own bytes
            assert_same_state(other.load(1), small_state())


def test_a_script_that_dies_of_an_exception_right_after_save_loses_nothing(tmp_path: Path) -> None:
    """One that just ends: tests/protocols/test_exit.py."""
    code = "import sys, torch, tierstore; s = tierstore.open(sys.argv[1:], run='r'); s.save(1, {'w': torch.ones(1 << 22)}); sys.exit(3)"
    done = subprocess.run([sys.executable, "-c", code, *tiers_of(tmp_path)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 3, done.stderr
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        assert torch.equal(store.load(1)["w"], torch.ones(1 << 22))


def test_a_forked_child_is_told_to_open_its_own_store(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import os, sys, torch, tierstore
        tiers = sys.argv[1:]
        store = tierstore.open(tiers, run='r')
        store.save(1, {'w': torch.ones(8)}).wait('durable', timeout=60)
        store.sync(timeout=200)  # no thread has a lock of the interpreter's, or of a library's, at the fork
        pid = os.fork()
        if pid == 0:
            try:
                store.save(2, {'w': torch.ones(8)})
            except tierstore.TierStoreError as error:
                print('child:', error.kind, flush=True)
            with tierstore.open(tiers, run='r') as own:
                print('child loads', own.load(1)['w'].sum().item(), flush=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        store.save(3, {'w': torch.ones(8)}).wait('durable', timeout=60)
        store.close()
    """)
    done = run_forked(code, *tiers_of(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "child: closed" in done.stdout
    assert "child loads 8.0" in done.stdout


def test_should_save_follows_the_configuration(tmp_path: Path) -> None:
    tiers = [{"uri": str(tmp_path / "a")}]
    with tierstore.open({"version": 1, "run": "r", "tiers": tiers, "save": {"every": {"steps": 500}}}) as store:
        assert [s for s in range(0, 2001, 250) if store.should_save(s)] == [500, 1000, 1500, 2000]
    with tierstore.open({"version": 1, "run": "r", "tiers": tiers}) as store:
        assert not store.should_save(500)


def test_an_open_checkpoint_says_which_it_is(tmp_path: Path) -> None:
    with tierstore.open([str(tmp_path)], run="sft") as store:
        store.save(7, {"a": torch.ones(2), "b": torch.zeros(2)}).wait()
        assert repr(store.open_checkpoint()) == "Checkpoint(2 tensors, step 7 of run 'sft')"


def test_a_store_without_a_run_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run is named") as caught:
        tierstore.open([str(tmp_path)])
    assert "run='NAME'" in caught.value.hint
