"""A training loop that leaves its master out of checkpoints, and fills it when it resumes: nothing but configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tierstore
from tierstore.cli.main import app
from tierstore.errors import StateMismatchError


class Master:
    """The float32 twins of a model's weights, as an optimizer wrapper would keep them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensors = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = dict(state)


def config(folder: Path, **more: Any) -> dict[str, Any]:
    tiers = [
        {"name": "node", "uri": str(folder / "node"), "scope": "node"},
        {"name": "shared", "uri": str(folder / "shared"), "scope": "shared"},
    ]
    return {"version": 1, "run": "r", "tiers": tiers, "save": {"omit": ["master.*"]}, **more}


FILL = {"fill": [{"match": r"model\.(.*)", "to": r"master.\1"}]}


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(6, 4).bfloat16()


def test_a_master_that_is_not_saved_is_the_weights_when_training_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = model(0)
    master = Master(net)
    master.tensors["weight"] += 1e-4  # what rounding takes away
    with tierstore.Checkpointer(config(tmp_path), model=net, extra={"master": master}, signals=False, progress=False) as first:
        assert first.resume() == 0
        first.save(0).wait("durable", 200)

    def resumed(**more: Any) -> Master:
        other = model(1)
        twins = Master(other)
        with tierstore.Checkpointer(
            config(tmp_path, **more), model=other, extra={"master": twins}, signals=False, progress=False
        ) as checkpointer:
            assert checkpointer.resume() == 1
        assert torch.equal(other.weight, net.weight)
        return twins

    with pytest.raises(StateMismatchError, match=r"master\.weight: .*left out of the checkpoint on purpose"):
        resumed()
    caplog.clear()
    assert torch.equal(resumed(load=FILL).tensors["weight"], net.weight.detach().float())
    assert "master.weight (float32 from bfloat16 model.weight)" in caplog.text
    result = CliRunner().invoke(app, ["--tier", str(tmp_path / "shared"), "--run", "r", "show"])
    assert "2 tensors, 112B, on purpose (omit: master.*)" in " ".join(result.output.split())
