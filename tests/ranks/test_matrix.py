"""Saved in one layout, loaded in every other: each tensor bit-equal with the unsharded truth, and training goes on with the same loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, Trainer
from ranks_kit import run_ranks

import tierstore

SAVED_AT = 2


def open_store(folder: Path, layout: str) -> tierstore.Store:
    tiers: list[dict[str, Any]] = [{"name": "node", "uri": str(folder / "node"), "scope": "node"}]
    return tierstore.open({"version": 1, "run": layout, "tiers": [*tiers, {"name": "shared", "uri": str(folder / "shared")}]})


def save(rank: int, world_size: int, folder: Path, layout: str) -> Any:
    trainer = Trainer(layout, world_size)
    trainer.train(SAVED_AT)
    with open_store(folder, layout) as store:
        state = {**trainer.state(), "progress": {"step": SAVED_AT, "lr": [0.05]}}
        store.save(SAVED_AT, state).wait("durable", 60)
    truth = trainer.whole_state()
    loss = trainer.train()
    if rank == 0:
        torch.save({"truth": truth, "loss": loss}, folder / f"{layout}.pt")
    return loss


def load(rank: int, world_size: int, folder: Path, layout: str, sources: list[str]) -> Any:
    """Loads what each of these layouts has saved; returns what was wrong."""
    wrong: list[str] = []
    for source in sources:
        told = torch.load(folder / f"{source}.pt", weights_only=False)
        trainer = Trainer(layout, world_size, seed=1)
        with open_store(folder, source) as store:
            state = {**trainer.state(), "progress": {"step": 0, "lr": [0.0]}}
            resumed = store.resume(into=state)
            assert resumed is not None
            assert resumed.step == SAVED_AT
        if state["progress"] != {"step": SAVED_AT, "lr": [0.05]}:
            wrong.append(f"{source}: progress is {state['progress']}")
        trainer.restore(state)
        whole = trainer.whole_state()
        loss = trainer.train()
        if rank == 0:
            wrong += [f"{source}: {difference}" for difference in differences(told["truth"], whole, "")]
        if abs(loss - told["loss"]) > 1e-5:
            wrong.append(f"{source}: the next loss is {loss}, it was {told['loss']}")
    return wrong


def differences(wanted: Any, found: Any, place: str) -> list[str]:
    if isinstance(wanted, dict):
        if wanted.keys() != found.keys():
            return [f"{place} has {sorted(found)}, not {sorted(wanted)}"]
        return [d for key in wanted for d in differences(wanted[key], found[key], f"{place}.{key}")]
    if isinstance(wanted, list):
        return [d for i, item in enumerate(wanted) for d in differences(item, found[i], f"{place}.{i}")]
    if isinstance(wanted, torch.Tensor):
        same = wanted.dtype == found.dtype and torch.equal(wanted, found)
        return [] if same else [f"{place} is not bit-equal"]
    return [] if wanted == found else [f"{place} is {found!r}, not {wanted!r}"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    for layout, ranks in LAYOUTS.items():
        losses = run_ranks(ranks, save, folder, layout=layout)
        assert max(losses) - min(losses) < 1e-6
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_what_every_layout_saved(saved: Path, layout: str, long_run: bool) -> None:
    """Without ``--long`` each loads those of three others, so chosen that every two layouts meet and each is loaded by three."""
    names = list(LAYOUTS)
    assert len(names) == 7, "1, 2 and 4 are a difference set of 7: choose another for another number"
    sources = names if long_run else [names[(names.index(layout) + further) % 7] for further in (1, 2, 4)]
    found = run_ranks(LAYOUTS[layout], load, saved, layout=layout, sources=sources)
    problems = [w for wrong in found for w in wrong]
    assert problems == [], "\n".join(problems)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_reads_whole_tensors_of_every_layout(saved: Path, layout: str) -> None:
    truth = torch.load(saved / f"{layout}.pt", weights_only=False)["truth"]["model"]
    with open_store(saved, layout) as store:
        opened = store.open_checkpoint()
        for name, tensor in truth.items():
            stored = opened[f"model.{name}"]
            assert torch.equal(stored.full(), tensor), name
            if tensor.ndim == 2:
                assert torch.equal(stored[1:7, 2:9], tensor[1:7, 2:9]), name
        shards = {extent.file for entry in opened.replica.index for extent in entry.extents}
        assert len(shards) <= LAYOUTS[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_stored_once(saved: Path, layout: str) -> None:
    """Replicated tensors are written by one rank, so that each layout takes what one process would."""

    def nbytes(run: str) -> int:
        with open_store(saved, run) as store:
            index = store.open_checkpoint().replica.index
            return sum(e.end - e.begin for e in {e for entry in index for e in entry.extents})

    assert nbytes(layout) == nbytes("alone")
