"""A loop in plain PyTorch: saved when due, resumed to the last bit, the best one found, and mistakes told."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_kit import Loop, Process

import tierstore
from tierstore.checkpointer import Checkpointer
from tierstore.checkpointer.line import Line
from tierstore.errors import NotFoundError, RefusedError, StateMismatchError, TierFullError, UsageError


def tiers_of(folder: Path) -> list[str]:
    return [str(folder / "node"), str(folder / "shared")]


def run(folder: Path, total: int, **options: Any) -> tuple[Loop, list[int]]:
    """Trains to `total` steps; returns the loop and the steps that this call trained."""
    loop, trained = Loop(), []
    with loop.checkpointer(tiers_of(folder), run="r", **{"every": 10, **options}) as ckpt:
        for step in ckpt.steps(total):
            loss = loop.train()
            ckpt.values["seen"] = ckpt.values.get("seen", 0) + 8
            ckpt.step(step, {"loss": loss})
            trained.append(step)
        assert ckpt.values["seen"] == 8 * total
    return loop, trained


def steps_in(folder: Path) -> list[int]:
    with tierstore.open(tiers_of(folder), run="r") as store:
        return [c.step for c in store.checkpoints()]


def test_a_loop_that_ended_early_goes_on_bit_equal(tmp_path: Path) -> None:
    straight, trained = run(tmp_path / "straight", 25)
    expected = straight.digest()
    assert trained == list(range(25))
    run(tmp_path / "parts", 13)
    loop, trained = run(tmp_path / "parts", 25)
    assert trained == list(range(13, 25))
    assert loop.digest() == expected
    assert run(tmp_path / "parts", 25)[1] == []  # it is at its end
    assert steps_in(tmp_path / "parts") == [10, 12, 20, 24]
    with tierstore.open(tiers_of(tmp_path / "parts"), run="r") as store:
        assert [c.step for c in store.checkpoints() if c.final] == [12, 24]


def test_memory_that_cannot_be_made_beforehand_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise TierFullError("no room for an image")

    monkeypatch.setattr(tierstore.Store, "prepare", full)
    assert run(tmp_path, 3, prepare=True)[1] == [0, 1, 2]
    assert "nothing was prepared for saves: no room for an image" in caplog.text
    assert steps_in(tmp_path) == [2]


def test_the_long_form_with_resume_and_range(tmp_path: Path) -> None:
    for start, total in ((0, 4), (4, 6)):
        loop = Loop()
        with loop.checkpointer(tiers_of(tmp_path), run="r", every=2) as ckpt:
            assert ckpt.resume() == start
            saved = [step for step in range(start, total) if (loop.train(), ckpt.step(step))[1]]
            ckpt.save(total - 1, tags=("done",), final=True)
        assert saved == ([2] if start == 0 else [4])
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        assert [(c.step, c.tags, c.final) for c in store.checkpoints()][-1] == (5, ("done",), True)


def test_the_best_by_a_metric_is_found_and_loaded(tmp_path: Path) -> None:
    loop = Loop()
    losses = {0: 3.0, 1: 1.0, 2: float("nan"), 3: 2.0}
    with loop.checkpointer(tiers_of(tmp_path), run="r", every=100, best="val/loss") as ckpt:
        assert ckpt.best() is None
        with pytest.raises(NotFoundError):
            ckpt.load("best")
        weights = {}
        for step, loss in losses.items():
            loop.train()
            ckpt.save(step, {"val/loss": torch.tensor(loss)})
            weights[step] = loop.model[0].weight.detach().clone()
        best = ckpt.best()
        assert best is not None
        assert best.step == 1
        assert ckpt.load("best") == 1
        assert torch.equal(loop.model[0].weight, weights[1])
        assert ckpt.load("best:val/loss") == 1
        assert ckpt.load(3) == 3
        assert torch.equal(loop.model[0].weight, weights[3])
    with loop.checkpointer(tiers_of(tmp_path), run="r", best={"metric": "val/loss", "mode": "max"}) as ckpt:
        assert (found := ckpt.best()) is not None
        assert found.step == 0
    with loop.checkpointer(tiers_of(tmp_path), run="r") as ckpt, pytest.raises(UsageError, match="no metric"):
        ckpt.best()


def test_who_forgets_to_resume_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run(tmp_path, 3)
    loop = Loop()
    with loop.checkpointer(tiers_of(tmp_path), run="r", every=1) as ckpt:
        with pytest.raises(RefusedError, match="has checkpoints up to step 2, and this training did not resume"):
            ckpt.step(0)
        with pytest.raises(RefusedError, match="call `start"):
            ckpt.save(0)
        assert ckpt.resume() == 3
        assert not ckpt.step(0)
    assert steps_in(tmp_path) == [2]


def test_a_model_of_another_shape_is_named(tmp_path: Path) -> None:
    run(tmp_path, 3)
    loop = Loop(width=8)
    with loop.checkpointer(tiers_of(tmp_path), run="r") as ckpt, pytest.raises(StateMismatchError, match=r"model\.0\.weight"):
        ckpt.resume()


@pytest.mark.parametrize("kinds", [("SGD", "AdamW"), ("AdamW", "SGD")])
def test_an_optimizer_of_another_kind_is_told_and_not_filled_with_foreign_state(tmp_path: Path, kinds: tuple[str, str]) -> None:
    """Its groups were set without a word, and the next step failed with a KeyError, or went on with half a state."""
    model = torch.nn.Linear(4, 4)
    saved, other = (getattr(torch.optim, kind)(model.parameters(), lr=0.1) for kind in kinds)
    with Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=saved) as ckpt:
        ckpt.save(0)
    with (
        Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=other) as ckpt,
        pytest.raises(StateMismatchError, match=f"of another kind than this {kinds[1]}"),
    ):
        ckpt.resume()


def test_an_optimizer_over_other_parameters_is_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=sgd) as ckpt:
        ckpt.save(0)
    part = torch.optim.SGD([model.weight], lr=0.1)
    with (
        Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=part) as ckpt,
        pytest.raises(StateMismatchError, match="the saved one had bias"),
    ):
        ckpt.resume()
    apart = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with (
        Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=apart) as ckpt,
        pytest.raises(StateMismatchError, match="has 2 groups"),
    ):
        ckpt.resume()


def test_the_order_in_which_an_optimizer_has_its_parameters_does_not_matter(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    first = torch.optim.AdamW([model.weight, model.bias])
    model(torch.ones(1, 4)).sum().backward()
    first.step()
    with Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=first) as ckpt:
        ckpt.save(0)
    other = torch.optim.AdamW([model.bias, model.weight])
    with Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=other) as ckpt:
        assert ckpt.resume() == 1
    assert torch.equal(other.state[model.weight]["exp_avg"], first.state[model.weight]["exp_avg"])
    assert torch.equal(other.state[model.bias]["exp_avg"], first.state[model.bias]["exp_avg"])


def test_parameters_outside_of_the_model_are_kept_too(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer]:
        model, scale = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
        return model, scale, torch.optim.Adam([{"params": model.parameters()}, {"params": [scale]}])

    model, scale, optimizer = make()
    (model(torch.ones(1, 2)).sum() * scale).backward()
    optimizer.step()
    with Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=optimizer) as ckpt:
        ckpt.save(0)
    model, other, again = make()
    with Checkpointer(tiers_of(tmp_path), run="r", model=model, optimizer=again) as ckpt:
        ckpt.resume()
    assert torch.equal(again.state[other]["exp_avg"], optimizer.state[scale]["exp_avg"])


def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")  # nothing is compiled before it is called
    optimizer = torch.optim.Adam(compiled.parameters())
    with Checkpointer(tiers_of(tmp_path), run="r", model=compiled, optimizer=optimizer) as ckpt:
        ckpt.save(0)
    other = torch.nn.Linear(2, 2)
    with Checkpointer(tiers_of(tmp_path), run="r", model=other, optimizer=torch.optim.Adam(other.parameters())) as ckpt:
        assert ckpt.resume() == 1
    assert torch.equal(other.weight, model.weight)


def test_what_a_program_saved_with_a_store_is_resumed(tmp_path: Path) -> None:
    """Somebody moves on from Store.save: numbers for parameters, a bare random state, nothing of ours."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(7, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()})
    expected = torch.rand(3)
    other = torch.nn.Linear(2, 2)
    again = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    with Checkpointer(tiers_of(tmp_path), run="r", model=other, optimizer=again) as ckpt:
        assert ckpt.resume() == 8
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(again.state[other.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])
    assert again.param_groups[0]["lr"] == 0.1


def test_an_argument_wins_over_the_configuration_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"version": 1, "run": "r", "tiers": tiers_of(tmp_path), "save": {"every": {"steps": 100}}}
    with caplog.at_level(logging.WARNING), Loop().checkpointer(config, every={"any": [{"steps": 2}, {"seconds": 1000}]}) as ckpt:
        assert "wins over save.every of the configuration, {'steps': 100}" in caplog.text
        assert ckpt.store.why_save() == "every 2 steps; or every 16m40s"
        assert [ckpt.step(step) for step in range(5)] == [False, False, True, False, True]
    caplog.clear()
    with caplog.at_level(logging.WARNING), Loop().checkpointer(config) as ckpt:
        assert ckpt.store.why_save() == "every 100 steps"
    with Loop().checkpointer(tiers_of(tmp_path), run="r", every="10m") as ckpt:
        assert ckpt.store.why_save() == "every 10m"
    with Loop().checkpointer(tiers_of(tmp_path), run="r") as ckpt:
        assert "least is lost with a save every" in ckpt.store.why_save()
    assert not caplog.text


def test_an_open_store_stays_its_callers(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        with Loop().checkpointer(store, every=1) as ckpt:
            ckpt.save(0)
        with pytest.raises(UsageError, match="closed"):
            ckpt.step(1)
        assert store.usable
        with pytest.raises(UsageError, match="the store is of run 'r'"):
            Checkpointer(store, run="other")
        assert store.usable
    assert steps_in(tmp_path) == [0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scheduler": 3}, "scheduler is a int, which has no state_dict"),
        ({"extra": {"model": torch.nn.Linear(1, 1)}}, "extra has model"),
        ({"every": 0}, "every=0 is no rule"),
        ({"every": "often"}, "'often' is not a duration"),
        ({"on_preempt": "panic"}, "on_preempt is 'panic'"),
        ({"on_warning": "panic"}, "on_warning is 'panic'"),
        ({"deadline": 0}, "deadline is 0"),
        ({"best": {"metric": "x", "mode": "most"}}, "best is"),
    ],
)
def test_mistakes_are_told_before_anything_is_opened(tmp_path: Path, options: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Checkpointer(tiers_of(tmp_path), run="r", **options)
    assert not list(tmp_path.iterdir())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_says_where_the_last_save_is_and_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("tierstore.checkpointer.line.time", SimpleNamespace(monotonic=lambda: 1000.0))
    stream = _Terminal()
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        line = Line("r", ["node", "shared"], lambda: "every 10 steps: because", stream=stream)
        line.of(50)
        ticket = store.save(10, {"x": torch.zeros(3)})
        ticket.wait("durable")
        line.saved(ticket)
        text = line.text(12)
        line.at(12)
        line.at(13)  # at once again: not drawn
        line.end()
    assert text.startswith("r  step 12/50  |  saved 10: node ok shared ok  |  kept waiting ")
    assert text.endswith("|  due every 10 steps")
    assert stream.getvalue() == f"\r\x1b[K{text[:59]}\n"
    quiet = io.StringIO()
    Line("r", ["node"], lambda: "", stream=quiet).at(1)
    assert quiet.getvalue() == ""


def quietly(say: Any, tiers: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with Checkpointer(tiers, run="r", model=torch.nn.Linear(1, 1), every=2) as ckpt:
        for step in ckpt.steps(4):
            ckpt.step(step)
    say("done")


def test_without_a_terminal_nothing_is_drawn_and_each_save_is_logged(tmp_path: Path) -> None:
    with Process(quietly, tmp_path, tiers=tiers_of(tmp_path)) as process:
        assert list(process.told()) == ["done"]
    lines = process.errors.read_text().splitlines()
    saved = [line.partition(", training waited")[0] for line in lines if "training waited" in line]
    assert saved == ["run=r step=2 saved", "run=r step=3 saved"]
    assert not any("\r" in line for line in lines)
