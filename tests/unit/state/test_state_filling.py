"""What is left out of a checkpoint on purpose, and what fills it when it is loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from state_kit import ImageReader, run

import tierstore
from tierstore.dcp.contents import contents_of
from tierstore.errors import FormatError, StateMismatchError, UsageError
from tierstore.format.objects import Opaque, encode_objects
from tierstore.state.differences import LoadOptions
from tierstore.state.filling import fill_rules
from tierstore.state.image import ImagePool
from tierstore.state.lazy import Checkpoint
from tierstore.state.load import load_state, read_tree
from tierstore.state.stage import stage
from tierstore.testing.equality import assert_same_state

OMIT = ("optim.master.*", "optim.groups.*")
FILL = ({"match": r"model\.(w|b)", "to": r"optim.master.\1"}, {"match": r"model\.w", "to": "optim.groups.0"})


def state() -> dict[str, Any]:
    """A model of 16 bits, and an optimizer with a master that differs from it by what was rounded away."""
    torch.manual_seed(3)
    master = {"w": torch.randn(40, 9), "b": torch.nn.Parameter(torch.randn(9))}
    model = {name: value.detach().bfloat16() for name, value in master.items()}
    return {"model": model, "optim": {"master": master, "groups": [master["w"].clone(), {"lr": 0.1}], "exp_avg": torch.ones(9)}, "step": 4}


def left_out(value: Any, omit: tuple[str, ...] = OMIT) -> ImageReader:
    """`value`, saved by one process without what `omit` names."""
    pool = ImagePool(None, max_nbytes=1 << 30)
    made = stage(value, pool=pool, omit=omit)
    try:
        return ImageReader([made])
    finally:
        made.release()
        pool.close()


def filled(value: dict[str, Any]) -> dict[str, Any]:
    """What a load with `FILL` makes of it: the master is the weights, widened."""
    wide = {name: weight.float() for name, weight in value["model"].items()}
    master = {"w": wide["w"], "b": torch.nn.Parameter(wide["b"])}
    return {**value, "optim": {**value["optim"], "master": master, "groups": [wide["w"], {"lr": 0.1}]}}


def test_what_is_left_out_takes_no_bytes_and_is_missed_by_name_with_a_way_on() -> None:
    reader = left_out(state())
    assert reader.index.names() == ["model.b", "model.w", "optim.exp_avg"]
    for into in (None, state(), {"model": None, "optim": None, "step": 0}):
        with pytest.raises(StateMismatchError, match=r"optim.master.w: float32 .*left out of the checkpoint on purpose") as caught:
            load_state(reader, run, into=into)
        assert caught.value.context["missing"] == ("optim.master.w", "optim.master.b", "optim.groups.0")
        assert "LoadOptions(fill=[{" in str(caught.value.hint)


@pytest.mark.parametrize("into", [None, "all", "optimizer afresh"])
def test_rules_fill_it_from_what_is_stored_converted_and_say_so(into: Any, caplog: pytest.LogCaptureFixture) -> None:
    truth, wanted = state(), None
    if into is not None:
        wanted = state()
        wanted["optim"]["master"]["w"].zero_()
        wanted["optim"] = wanted["optim"] if into == "all" else None
    with caplog.at_level(logging.WARNING):
        loaded = load_state(left_out(truth), run, into=wanted, options=LoadOptions(fill=FILL))
    assert_same_state(loaded, filled(truth))
    [told] = [r.getMessage() for r in caplog.records if r.name.startswith("tierstore.state")]
    assert "3 tensors that the checkpoint lacks were filled" in told
    assert "optim.master.w (float32 from bfloat16 model.w)" in told


def test_nothing_is_filled_that_is_stored() -> None:
    truth = state()
    reader = left_out(truth, ())
    assert_same_state(load_state(reader, run, into=state(), options=LoadOptions(fill=FILL)), truth)


def test_a_tensor_that_no_version_of_the_program_saved_is_filled_too() -> None:
    """`master_weight_compatible`: a checkpoint of a 16-bit run goes on in a run that keeps a master."""
    old = {"model": state()["model"]}
    into = {"model": state()["model"], "master": {"w": torch.zeros(40, 9)}}
    load_state(left_out(old, ()), run, into=into, options=LoadOptions(fill=[{"match": r"model\.(w)", "to": r"master.\1"}]))
    assert torch.equal(into["master"]["w"], old["model"]["w"].float())


def test_the_source_need_not_be_wanted_itself_and_may_be_split_or_transposed() -> None:
    stored = {"qkv": torch.arange(24.0).view(6, 4).bfloat16()}
    rules = [{"match": "qkv", "to": ["q", "k", "v"], "split": {"axis": 0}}, {"match": "qkv", "to": "t", "transpose": True}]
    into = {"q": torch.zeros(2, 4), "v": torch.zeros(2, 4), "t": torch.zeros(4, 6)}
    load_state(left_out(stored, ()), run, into=into, options=LoadOptions(fill=rules))
    assert torch.equal(into["v"], stored["qkv"][4:].float())
    assert torch.equal(into["t"], stored["qkv"].T.float())


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (torch.zeros(9, 40), r"master: is \[9, 40\] in `into`, \[40, 9\] in what is to fill it \(w\)"),
        (torch.zeros(40, 9, dtype=torch.int64), r"master: is int64 in `into`, and can't be filled from bfloat16 \(w\)"),
    ],
)
def test_what_does_not_fit_is_a_difference_and_changes_nothing(wanted: torch.Tensor, told: str) -> None:
    reader = left_out({"w": torch.ones(40, 9, dtype=torch.bfloat16), "x": torch.ones(2)}, ())
    into = {"w": torch.zeros(40, 9, dtype=torch.bfloat16), "x": torch.zeros(2), "master": wanted}
    with pytest.raises(StateMismatchError, match=told):
        load_state(reader, run, into=into, options=LoadOptions(fill=[{"match": "w", "to": "master"}]))
    assert not into["x"].any()


def test_missing_may_be_kept_and_is_none_where_nothing_was() -> None:
    reader, into = left_out(state()), state()
    before = into["optim"]["master"]["w"].clone()
    load_state(reader, run, into=into, options=LoadOptions(missing="keep"))
    assert torch.equal(into["optim"]["master"]["w"], before)
    fresh = load_state(reader, run, options=LoadOptions(missing="keep"))
    assert fresh["optim"]["groups"] == [None, {"lr": 0.1}]


def test_who_does_not_want_what_was_left_out_misses_nothing() -> None:
    into = state()
    del into["optim"]["master"]
    into["optim"]["groups"] = []
    with pytest.raises(StateMismatchError) as caught:
        load_state(left_out(state()), run, into=into)
    assert caught.value.context["unexpected"] == ("optim.groups.1",)


def test_the_tree_shows_it_to_those_who_look_and_other_doors_pass_it_over() -> None:
    reader = left_out(state())
    shown = Checkpoint(reader, run).objects
    assert shown["optim"]["master"]["w"] == Opaque("torch.omitted", {"dtype": "float32", "shape": (40, 9)})
    assert not [key for key in contents_of(read_tree(reader, run, 0)).paths if "master" in key]


@pytest.mark.parametrize("facts", [{"dtype": "float32"}, {"dtype": "floaty", "shape": (2,)}, {"dtype": "float32", "shape": (-2,)}, 3])
def test_a_malformed_mark_from_outside_is_a_format_error(facts: Any) -> None:
    reader = left_out(state())
    reader.trees[0] = encode_objects({"w": Opaque("torch.omitted", facts)})
    with pytest.raises(FormatError, match=r"malformed torch.omitted"):
        load_state(reader, run)


def test_a_rule_that_is_none_is_refused_when_it_is_read() -> None:
    with pytest.raises(UsageError, match=r"rule 1 .*drops tensors"):
        fill_rules([{"match": "a", "drop": True}])
    assert fill_rules(()) is None


def test_a_rule_may_name_what_is_stored_where_only_some_of_it_was_left_out() -> None:
    reader = left_out(state(), ("optim.master.w",))
    loaded = load_state(reader, run, options=LoadOptions(fill=({"match": r"model\.(w|b)", "to": r"optim.master.\1"},)))
    assert_same_state(
        loaded, {**state(), "optim": {**state()["optim"], "master": {**state()["optim"]["master"], "w": state()["model"]["w"].float()}}}
    )


class TestStore:
    def test_a_configuration_leaves_out_and_fills_and_the_manifest_says_what(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        truth = state()
        config = {"version": 1, "run": "r", "tiers": [{"name": "a", "uri": str(tmp_path / "tier")}], "save": {"omit": [*OMIT, "nothing.*"]}}
        with tierstore.open({**config, "load": {"fill": list(FILL)}}) as store:
            store.prepare(truth)
            store.save(1, truth).wait("durable", 60)
            assert "no tensor matches 'nothing.*'" in caplog.text
            assert_same_state(store.load(1), filled(truth))
            facts = store.open_checkpoint(1).replica.manifest.facts["omitted"]
            assert facts == {"patterns": [*OMIT, "nothing.*"], "tensors": 3, "nbytes": 4 * (40 * 9 * 2 + 9)}
            with pytest.raises(StateMismatchError):
                store.load(1, options=LoadOptions(fill=()))
            exported = store.export(1, tmp_path / "out" / "state.pt", tierstore.ExportOptions(format="torch"))
            assert exported.tensors == 3
            store.save(2, truth, omit=()).wait("durable", 60)
            assert_same_state(store.load(2), truth)
            with pytest.raises(UsageError, match="omit is a list of patterns"):
                store.save(3, truth, omit="optim.*")

    def test_rules_that_are_none_are_refused_when_the_store_is_opened(self, tmp_path: Path) -> None:
        config = {"version": 1, "run": "r", "tiers": [{"name": "a", "uri": str(tmp_path)}], "load": {"fill": [{"match": "("}]}}
        with pytest.raises(UsageError, match="rule 1"):
            tierstore.open(config)


def test_rules_that_match_nothing_are_named_with_what_is_near_where_a_load_fails() -> None:
    reader = left_out(state())
    fill = ({"match": r"modle\.(w|b)", "to": r"optim.master.\1"}, {"match": r"model\.w", "to": "optim.gruops.0"})
    for into in (None, state()):
        with pytest.raises(StateMismatchError, match=r"missing +optim.master.w") as caught:
            load_state(reader, run, into=into, options=LoadOptions(fill=fill))
        told = str(caught.value)
        assert r"rule 1 (modle\.(w|b)) matches nothing that is stored (nearest stored: model.b, model.w)" in told
        assert r"rule 2 (model\.w) makes optim.gruops.0, and nothing of that is lacking (nearest that is lacking: optim.groups.0)" in told


def test_rules_that_match_nothing_are_named_also_where_the_others_fill_all(caplog: pytest.LogCaptureFixture) -> None:
    reader = left_out(state())
    caplog.set_level(logging.WARNING, "tierstore.state")
    fill = (*FILL, {"match": r"ema\.(.*)", "to": r"optim.ema.\1"}, {"match": r"lora\.(.*)", "to": r"optim.lora.\1", "optional": True})
    assert_same_state(load_state(reader, run, options=LoadOptions(fill=fill)), filled(state()))
    assert r"rule 3 (ema\.(.*)) matches nothing that is stored" in caplog.text
    assert "rule 4" not in caplog.text
    assert "rule 1" not in caplog.text
    caplog.clear()
    kept = load_state(reader, run, into=state(), options=LoadOptions(fill=fill[2:], missing="keep"))
    assert_same_state(kept, state())
    assert r"rule 3 (ema\.(.*)) matches nothing that is stored" not in caplog.text  # it is number 1 here
    assert r"rule 1 (ema\.(.*)) matches nothing that is stored" in caplog.text
    caplog.clear()
    load_state(left_out(state(), omit=()), run, options=LoadOptions(fill=fill))
    assert not [r for r in caplog.records if r.name.startswith("tierstore.state")]  # nothing was lacking: no rule was needed


def test_a_long_list_of_stored_names_does_not_make_the_search_for_near_ones_long() -> None:
    reader = left_out({"model": {f"layers.{n}.w": torch.zeros(1) for n in range(3000)}, "master": torch.zeros(1)}, omit=("master",))
    with pytest.raises(StateMismatchError, match=r"nearest stored: model.layers.\d+.w, model.layers.\d+.w\)"):
        load_state(reader, run, options=LoadOptions(fill=({"match": r"modle\.layers\.(\d+)\.w", "to": "master"},)))
