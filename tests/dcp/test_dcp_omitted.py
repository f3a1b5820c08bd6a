"""What is left out on purpose and what fills it, through torch's own door: as `Store.save` and `Store.load` do it, both ways."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, blank, causes, config
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import tierstore
from tierstore.dcp import TierStorageReader, TierStorageWriter
from tierstore.errors import StateMismatchError, UsageError
from tierstore.testing.equality import assert_same_state

pytestmark = pytest.mark.filterwarnings(IGNORED)

WEIGHTS = [{"match": r"optim\.master\.(.*)", "to": r"model.\1"}]
MASTERS = [{"match": r"model\.(.*)", "to": r"optim.master.\1"}]
OMIT = ["model.*"]


def trained() -> dict[str, Any]:
    """Weights of 16 bits that are their masters, rounded; one tied, one in a list, one a parameter."""
    torch.manual_seed(3)
    master = {"w": torch.randn(40, 9), "b": torch.randn(9), "layers": [torch.randn(3), torch.randn(4)]}
    model: dict[str, Any] = {"w": master["w"].bfloat16(), "b": torch.nn.Parameter(master["b"].bfloat16())}
    model["layers"] = [layer.bfloat16() for layer in master["layers"]]
    return {"model": model, "optim": {"master": master, "exp_avg": torch.ones(9)}, "step": 4}


def save(folder: Path, step: int, state: dict[str, Any], *, door: str, omit: list[str], **more: Any) -> Any:
    """Saves through one door; returns what `dcp.save` returns."""
    if door == "store":
        with tierstore.open(config(folder, **more)) as store:
            store.save(step, state, omit=omit).wait("committed", 60)
        return None
    writer = TierStorageWriter(config(folder, **more), omit=omit)
    made = dcp.save(state, storage_writer=writer, checkpoint_id=step, no_dist=True)
    writer.close()
    return made


def load(folder: Path, into: dict[str, Any], *, fill: Any = None, planner: Any = None, step: int = 1, **more: Any) -> Any:
    reader = TierStorageReader(config(folder, **more), fill=fill)
    try:
        dcp.load(into, storage_reader=reader, checkpoint_id=step, no_dist=True, planner=planner)
    finally:
        reader.close()
    return into


def wrong(folder: Path, into: dict[str, Any], **how: Any) -> BaseException:
    before = copy.deepcopy(into)
    with pytest.raises(CheckpointException) as caught:
        load(folder, into, **how)
    assert_same_state(into, before)
    return causes(caught.value)[0]


@pytest.mark.parametrize("door", ["store", "dcp"])
def test_a_weight_that_was_left_out_is_its_master_rounded_through_either_door(
    tmp_path: Path, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    truth = trained()
    save(tmp_path, 1, truth, door=door, omit=OMIT)
    found = load(tmp_path, blank(trained()), fill=WEIGHTS)
    assert "model.w (bfloat16 from float32 optim.master.w)" in caplog.text
    assert_same_state({**found, "model": {**found["model"], "b": truth["model"]["b"]}}, truth)
    assert torch.equal(found["model"]["b"], truth["model"]["b"])
    with tierstore.open(config(tmp_path)) as store:
        assert all(not name.startswith("model.") for name in store.open_checkpoint(1))
        into = blank(trained())
        assert_same_state(store.load(1, into, options=tierstore.LoadOptions(fill=WEIGHTS))["model"], found["model"])
        assert_same_state(store.load(1, options=tierstore.LoadOptions(fill=WEIGHTS)), truth)


def test_both_doors_say_the_same_of_what_they_left_out(tmp_path: Path) -> None:
    truth = trained()
    metadata = save(tmp_path, 1, truth, door="dcp", omit=[*OMIT, "*.exp_avg"])
    save(tmp_path, 2, truth, door="store", omit=[*OMIT, "*.exp_avg"])
    assert sorted(metadata.state_dict_metadata) == [f"optim.master.{name}" for name in ("b", "layers.0", "layers.1", "w")] + ["step"]
    with tierstore.open(config(tmp_path)) as store:
        one, two = (store.open_checkpoint(step).replica for step in (1, 2))
        assert one.manifest.facts["omitted"] == two.manifest.facts["omitted"]
        assert one.manifest.facts["omitted"]["tensors"] == 5
        assert store._session.run(one.objects(0)) == store._session.run(two.objects(0))


def test_the_configuration_says_it_for_both_and_an_argument_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = {"save": {"omit": ["optim.master.*", "nothing.*"]}, "load": {"fill": MASTERS}}
    truth = trained()
    writer = TierStorageWriter(config(tmp_path, **said))
    dcp.async_save(truth, storage_writer=copy.deepcopy(writer), checkpoint_id=1, no_dist=True).result()
    assert "no tensor matches 'nothing.*'" in caplog.text
    writer.close()
    save(tmp_path, 2, truth, door="dcp", omit=[], **said)
    wide = {"w": truth["model"]["w"].float(), "b": truth["model"]["b"].detach().float()}
    found = load(tmp_path, blank(truth), **said)["optim"]["master"]
    assert torch.equal(found["w"], wide["w"])
    assert torch.equal(found["b"], wide["b"])
    assert torch.equal(load(tmp_path, blank(truth), step=2, **said)["optim"]["master"]["w"], truth["optim"]["master"]["w"])
    assert isinstance(wrong(tmp_path, blank(truth), fill=(), **said), StateMismatchError)
    with pytest.raises(UsageError, match="omit is a list of patterns"):
        TierStorageWriter(config(tmp_path), omit="model.*")
    with pytest.raises(UsageError, match="rule 1"):
        TierStorageReader(config(tmp_path), fill=[{"match": "("}])


def test_what_is_left_out_is_not_copied_before_an_asynchronous_save(tmp_path: Path) -> None:
    truth = {"model": [torch.randn(500, 40).bfloat16(), {"b": torch.ones(2)}], "master": torch.randn(500, 40)}
    writer = TierStorageWriter(config(tmp_path), omit=["model.0"])
    staged = writer.stage(truth)
    taken = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*staged["model"][:1], staged["master"])}
    assert sum(taken.values()) < 500 * 40 * 4 + 100
    assert staged["model"][0].shape == (500, 40)
    assert_same_state(staged["model"][1], truth["model"][1])
    dcp.async_save(truth, storage_writer=writer, checkpoint_id=1, no_dist=True).result()
    writer.close()
    into = {**blank(truth), "model": [torch.zeros(500, 40).bfloat16(), {"b": torch.zeros(2)}]}
    found = load(tmp_path, into, fill=[{"match": "master", "to": "model.0"}])
    assert torch.equal(found["model"][0], truth["master"].bfloat16())


def test_what_nothing_fills_is_an_error_that_says_so_unless_the_planner_allows_it(tmp_path: Path) -> None:
    truth = trained()
    save(tmp_path, 1, truth, door="dcp", omit=OMIT)
    for planner in (None, DefaultLoadPlanner()):
        error = wrong(tmp_path, blank(truth), planner=planner)
        assert isinstance(error, StateMismatchError)
        assert "model.w (bfloat16 [40, 9], left out of the checkpoint on purpose)" in error.message
        assert "4 tensors" in error.message
        assert "fill=[{" in error.hint
    into = blank(truth)
    into["model"]["w"].fill_(5)
    load(tmp_path, into, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (into["model"]["w"] == 5).all()
    assert torch.equal(into["optim"]["master"]["w"], truth["optim"]["master"]["w"])
    missing = wrong(tmp_path, {"never": torch.zeros(2)})
    assert "Missing key in checkpoint state_dict: never" in str(missing)


def test_what_a_rule_makes_of_another_kind_or_shape_is_refused_also_for_a_planner_that_allows_gaps(tmp_path: Path) -> None:
    save(tmp_path, 1, {"count": torch.arange(3), "w": torch.ones(3, dtype=torch.bfloat16)}, door="dcp", omit=["w"])
    partial = DefaultLoadPlanner(allow_partial_load=True)
    error = wrong(tmp_path, {"w": torch.zeros(3, dtype=torch.bfloat16)}, fill=[{"match": "count", "to": "w"}], planner=partial)
    assert "is bfloat16 in the state, and can't be filled from int64 (count)" in str(error)
    save(tmp_path, 1, {"other": torch.ones(5), "w": torch.ones(3, dtype=torch.bfloat16)}, door="dcp", omit=["w"])
    error = wrong(tmp_path, {"w": torch.zeros(3, dtype=torch.bfloat16)}, fill=[{"match": "other", "to": "w"}])
    assert "is [3], [5] in what is to fill it (other)" in str(error)


def test_what_was_never_there_is_made_by_a_rule_when_it_is_asked_for_and_listed_for_nobody(tmp_path: Path) -> None:
    truth = {"model": {"w": torch.randn(4, 3).bfloat16()}, "step": 1}
    save(tmp_path, 1, truth, door="dcp", omit=[])
    into = {"model": {"w": torch.zeros(4, 3).bfloat16()}, "optim": {"master": {"w": torch.ones(4, 3)}}}
    assert torch.equal(load(tmp_path, into, fill=MASTERS)["optim"]["master"]["w"], truth["model"]["w"].float())
    reader = TierStorageReader(config(tmp_path), fill=MASTERS)
    keys = reader.read_metadata().state_dict_metadata
    assert list(keys) == ["model.w", "step"]
    assert "optim.master.w" in keys
    assert keys.get("optim.master.v") is None
    assert type(copy.copy(keys)) is dict
    reader.close()


def test_a_load_that_makes_its_state_of_the_metadata_gets_what_is_filled_and_nothing_that_is_not(tmp_path: Path) -> None:
    truth = trained()
    save(tmp_path, 1, truth, door="store", omit=["model.w", "optim.exp_avg"])
    reader = TierStorageReader(config(tmp_path), fill=WEIGHTS)
    reader.reset("step-1")
    found: dict[str, Any] = {}
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    reader.close()
    assert torch.equal(found["model"]["w"], truth["model"]["w"])
    assert list(found["optim"]) == ["master"]


def test_tensors_within_objects_are_left_out_and_filled_too(tmp_path: Path) -> None:
    truth = {"pair": (torch.randn(3).bfloat16(), "label"), "wide": torch.arange(3.0)}
    save(tmp_path, 1, truth, door="dcp", omit=["pair.0"])
    found = load(tmp_path, {"pair": None, "wide": torch.zeros(3)}, fill=[{"match": "wide", "to": "pair.0"}])
    assert_same_state(found["pair"], (torch.arange(3).bfloat16(), "label"))
    assert "pair.0 (bfloat16 [3], left out" in str(wrong(tmp_path, {"pair": None, "wide": torch.zeros(3)}))
    kept = load(tmp_path, {"pair": 3, "wide": torch.zeros(3)}, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert kept["pair"] == 3
    assert torch.equal(kept["wide"], truth["wide"])


def test_one_of_two_tied_tensors_can_be_left_out(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    for step, omit in ((1, ["a"]), (2, ["b"])):
        save(tmp_path, step, {"a": weight, "b": weight}, door="dcp", omit=omit)
        with tierstore.open(config(tmp_path)) as store:
            [name] = store.open_checkpoint(step)
            assert torch.equal(store.load(step, {name: torch.zeros(3, 2)})[name], weight)


def test_a_planner_that_caches_its_plans_leaves_out_the_same_each_time(tmp_path: Path) -> None:
    class Caching(DefaultSavePlanner):
        pass

    truth = trained()
    writer = TierStorageWriter(config(tmp_path), omit=OMIT)
    for step in (1, 2, 3):
        dcp.save(truth, storage_writer=writer, checkpoint_id=step, planner=Caching(enable_plan_caching=True), no_dist=True)
    other = TierStorageWriter(config(tmp_path), omit=[])
    with pytest.raises(CheckpointException) as caught:
        dcp.save(truth, storage_writer=other, checkpoint_id=4, planner=Caching(enable_plan_caching=True), no_dist=True)
    assert r"the planner's cache has a plan that leaves out ['model.*']" in str(causes(caught.value)[0])
    writer.close()
    other.close()
    assert torch.equal(load(tmp_path, blank(trained()), step=3, fill=WEIGHTS)["model"]["w"], truth["model"]["w"])


def test_nothing_is_told_where_nothing_is_lacking(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    truth = trained()
    save(tmp_path, 1, truth, door="dcp", omit=[])
    with caplog.at_level(logging.WARNING, "tierstore.state.filling"):
        load(tmp_path, blank(trained()), fill=[*WEIGHTS, *MASTERS])
    assert "filled" not in caplog.text
