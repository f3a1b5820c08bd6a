"""One process: what dcp.save writes either door loads, and what Store.save writes dcp.load loads."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, blank, causes, config, config_file, state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierstore
from tierstore.dcp import TierStorageReader, TierStorageWriter
from tierstore.errors import NotFoundError, SaveError, StateMismatchError, UnsupportedTypeError, UsageError
from tierstore.state.codecs import default_codecs
from tierstore.testing.equality import assert_same_state

pytestmark = pytest.mark.filterwarnings(IGNORED)


def dcp_load(reader: TierStorageReader, like: dict[str, Any], **options: Any) -> dict[str, Any]:
    into = blank(like)
    dcp.load(into, storage_reader=reader, no_dist=True, **options)
    return into


def test_a_state_saved_through_dcp_loads_through_dcp_and_through_the_store(tmp_path: Path) -> None:
    saved = state()
    writer = TierStorageWriter(config(tmp_path))
    dcp.save(saved, storage_writer=writer, checkpoint_id="step-5", no_dist=True)
    reader = TierStorageReader(config(tmp_path))
    assert_same_state(dcp_load(reader, saved), saved)
    with tierstore.open(config(tmp_path)) as store:
        loaded = store.load(5)
        assert_same_state(loaded, saved)
        assert loaded["model"]["embed.weight"] is loaded["model"]["head.weight"]
        into = blank(saved)
        into["progress"], into["pair"] = dict.fromkeys(saved["progress"]), (torch.zeros(3, dtype=torch.int64), "")
        into["optim"]["param_groups"] = [{"lr": 0.0, "betas": (0.0, 0.0), "params": [""]}]
        assert_same_state(store.load(5, into=into), saved)
    reader.close()
    writer.close()


def test_a_state_saved_through_the_store_loads_through_dcp(tmp_path: Path) -> None:
    saved = {**state(), "ints": {0: torch.ones(2), 1: {"lr": torch.tensor(3)}}}
    with tierstore.open(config(tmp_path)) as store:
        store.save(5, saved).wait(timeout=200)
    reader = TierStorageReader(config(tmp_path))
    assert_same_state(dcp_load(reader, saved), saved)
    reader.close()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_of_the_store_load_through_dcp_which_itself_can_save_none(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse_csr()
    with tierstore.open(config(tmp_path)) as store:
        store.save(5, {"s": sparse, "list": [sparse, torch.ones(2)]}).wait(timeout=200)
    reader = TierStorageReader(config(tmp_path))
    into = {"s": torch.ones(3, 3).to_sparse_csr(), "list": [torch.ones(3, 3).to_sparse_csr(), torch.zeros(2)]}
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert_same_state(into, {"s": sparse, "list": [sparse, torch.ones(2)]})
    reader.close()
    writer = TierStorageWriter(config(tmp_path))
    with pytest.raises(CheckpointException) as caught:  # torch's planner tells a sparse tensor as a dense one
        dcp.save({"s": sparse.to_dense().to_sparse()}, storage_writer=writer, checkpoint_id="step-6", no_dist=True)
    assert [error.hint for error in causes(caught.value)] == [
        "save it with Store.save, which stores its components; or as dense: .to_dense()"
    ]
    writer.close()


def test_a_saved_checkpoint_is_committed_when_save_returns(tmp_path: Path) -> None:
    writer = TierStorageWriter(config(tmp_path))
    dcp.save(state(), storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    [record] = (tmp_path / "shared" / "r" / ".log").glob("step-*/000000.json")
    assert '"committed"' in record.read_text()
    writer.close()


def test_get_state_dict_and_set_state_dict_work_unchanged(tmp_path: Path) -> None:
    def trainer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model, optimizer = trainer()
    train(model, optimizer)
    kept, optim = get_state_dict(model, optimizer)
    writer = TierStorageWriter(config(tmp_path))
    dcp.save({"model": kept, "optim": optim}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    expected = [train(model, optimizer) for _ in range(3)]
    model, optimizer = trainer()
    fresh, optim = get_state_dict(model, optimizer)
    into = {"model": fresh, "optim": optim}
    reader = TierStorageReader(config(tmp_path))
    dcp.load(into, storage_reader=reader, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    assert [train(model, optimizer) for _ in range(3)] == expected
    reader.close()
    writer.close()


def test_stateful_objects_are_loaded_in_place(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "at": torch.tensor(self.value)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert int(state_dict["at"]) == state_dict["value"]
            self.value = state_dict["value"]

    writer = TierStorageWriter(config(tmp_path))
    dcp.save({"counter": Counter(5)}, storage_writer=writer, checkpoint_id=3, no_dist=True)
    into = {"counter": Counter(0)}
    dcp.load(into, storage_reader=(reader := TierStorageReader(config(tmp_path))), no_dist=True)
    assert into["counter"].value == 5
    reader.close()
    writer.close()


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own, made a moment ago


@pytest.mark.parametrize("used", [False, True], ids=["before use", "after use"])
def test_writer_and_reader_survive_pickling_with_their_options(tmp_path: Path, used: bool) -> None:
    saved = {"a": torch.arange(4.0)}
    writer = TierStorageWriter(config(tmp_path), metrics={"loss": 1.5}, tags=["release"])
    reader = TierStorageReader(config(tmp_path), allow_cast=True)
    if used:
        dcp.save({"a": torch.zeros(4)}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
        dcp_load(reader, saved)
    writer2, reader2 = copied(writer), copied(reader)
    assert (writer2.checkpoint_id, reader2.checkpoint_id) == (writer.checkpoint_id, reader.checkpoint_id)
    dcp.save(saved, storage_writer=writer2, checkpoint_id="step-2", no_dist=True)
    assert dcp_load(reader2, {"a": torch.zeros(4, dtype=torch.float64)}, checkpoint_id="latest")["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with tierstore.open(config(tmp_path)) as store:
        info = store.latest()
        assert info is not None
        assert (info.metrics, info.tags) == ({"loss": 1.5}, ("release",))
    for each in (writer, writer2, reader, reader2):
        each.close()


def test_reset_keeps_configuration_and_options_and_changes_step_and_run_only(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    writer = TierStorageWriter(f"tier://{file}/r/step-1", tags=["kept"])
    assert writer.checkpoint_id == f"tier://{file}/r/step-1"
    for checkpoint_id, expected in [
        ("tier:///other/team/step-4", "other/team/step-4"),
        ("step-0000000009", "other/team/step-9"),
        ("12", "other/team/step-12"),
        (13, "other/team/step-13"),
        (f"tier://{file}/r/step-14", "r/step-14"),
    ]:
        writer.reset(checkpoint_id)  # type: ignore[arg-type]
        assert writer.checkpoint_id == f"tier://{file}/{expected}"
    assert writer.tags == ("kept",)
    writer.reset()
    assert writer.checkpoint_id == f"tier://{file}/r/step-14"
    with pytest.raises(UsageError, match="another configuration"):
        writer.reset("tier:///elsewhere.yaml/r/step-1")
    for bad in ("outputs/step-4", "", "s3://b/x", "-1", Path("a/b")):
        with pytest.raises(UsageError):
            writer.reset(bad)


def test_a_uri_that_pathlib_damaged_makes_no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES.md 85; NEIGHBOURS 1.2: stock DCP writes a local folder ``tier:``."""
    monkeypatch.chdir(tmp_path)
    damaged = Path("tier:///r/step-1")
    for act in (
        lambda: TierStorageWriter(damaged),
        lambda: TierStorageReader(damaged),
        lambda: TierStorageWriter.validate_checkpoint_id(damaged),
        lambda: TierStorageWriter(config(tmp_path)).reset(damaged),
    ):
        with pytest.raises(UsageError, match="pathlib"):
            act()
    assert list(tmp_path.iterdir()) == []


def test_only_tier_uris_are_valid_checkpoint_ids() -> None:
    for kind in (TierStorageWriter, TierStorageReader):
        assert kind.validate_checkpoint_id("tier:///run/step-1")
        assert not any(kind.validate_checkpoint_id(other) for other in ("/local", "s3://b/x", Path("/local")))


def test_without_a_step_nothing_is_saved_and_the_error_says_how(tmp_path: Path) -> None:
    writer = TierStorageWriter(config(tmp_path))
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": torch.ones(1)}, storage_writer=writer, no_dist=True)
    [error] = causes(caught.value)
    assert isinstance(error, UsageError)
    assert "step-N" in error.hint
    assert not (tmp_path / "shared").exists()


def test_what_cannot_be_stored_is_refused_with_its_path_and_nothing_is_committed(tmp_path: Path) -> None:
    class Strange:
        pass

    writer = TierStorageWriter(config(tmp_path))
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": {"b": Strange()}, "t": torch.ones(2)}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    [error] = causes(caught.value)
    assert isinstance(error, UnsupportedTypeError)
    assert "state['a']['b']" in error.message
    dcp.save({"t": torch.ones(2)}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    writer.close()


class Version:
    def __init__(self, text: str) -> None:
        self.text = text


def test_codecs_of_the_callers_types_reach_dcp(tmp_path: Path) -> None:
    codecs = default_codecs()
    codecs.register(Version, "test.Version", lambda v: v.text, Version)
    writer, reader = TierStorageWriter(config(tmp_path), codecs=codecs), TierStorageReader(config(tmp_path), codecs=codecs)
    dcp.save({"v": {"version": Version("1.2"), "n": torch.ones(1)}}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    with tierstore.open(config(tmp_path), codecs=codecs) as store:
        assert store.load()["v"]["version"].text == "1.2"
    assert dcp_load(reader, {"v": {"version": None}})["v"]["version"].text == "1.2"
    reader.close()
    writer.close()


def test_another_dtype_is_an_error_unless_casting_is_asked_for(tmp_path: Path) -> None:
    """NEIGHBOURS 1.5: stock DCP casts without a word."""
    writer = TierStorageWriter(config(tmp_path))
    dcp.save({"a": torch.arange(4.0), "b": torch.ones(2)}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    into = {"a": torch.full((4,), 7, dtype=torch.int32), "b": torch.zeros(2)}
    strict, casting = TierStorageReader(config(tmp_path)), TierStorageReader(config(tmp_path), allow_cast=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(into, storage_reader=strict, no_dist=True)
    [error] = causes(caught.value)
    assert isinstance(error, StateMismatchError)
    assert "a (stored float32, wanted int32)" in error.message
    assert into["a"].tolist() == [7] * 4
    assert into["b"].tolist() == [0, 0]
    dcp.load(into, storage_reader=casting, no_dist=True)
    assert into["a"].tolist() == [0, 1, 2, 3]
    for each in (writer, strict, casting):
        each.close()


def test_keys_load_without_a_state_to_compare_with(tmp_path: Path) -> None:
    """NEIGHBOURS 1.6: needs planner_data, which stock's Hugging Face reader lacks."""
    saved = state()
    with tierstore.open(config(tmp_path)) as store:
        store.save(5, saved).wait(timeout=200)
    reader = TierStorageReader(config(tmp_path))
    loaded = _load_state_dict_from_keys("optim", storage_reader=reader)
    assert_same_state(loaded, {"optim": saved["optim"]})
    assert_same_state(_load_state_dict_from_keys(storage_reader=reader)["progress"], saved["progress"])
    reader.close()


def test_a_missing_checkpoint_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tierstore.open(config(tmp_path)) as store:
        store.save(5, {"a": torch.ones(1)}).wait(timeout=200)
    reader = TierStorageReader(config(tmp_path))
    reader.reset("step-6")
    with pytest.raises(NotFoundError, match="6"):
        reader.read_metadata()
    with caplog.at_level(logging.CRITICAL), pytest.raises(CheckpointException, match="step 6"):
        dcp.load({"a": torch.zeros(1)}, storage_reader=reader, no_dist=True)
    reader.close()


def test_a_planner_that_casts_is_stored_as_it_casts(tmp_path: Path) -> None:
    """Whether the plan says so or not: the layout follows what the planner gives."""

    class Half(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            made = super().resolve_data(write_item)
            return made.half() if isinstance(made, torch.Tensor) else made

    writer = TierStorageWriter(config(tmp_path))
    saved = {"a": torch.arange(5.0), "b": {"c": torch.ones(3, 3)}, "n": {"x": (1, 2)}}
    dcp.save(saved, storage_writer=writer, checkpoint_id="step-1", planner=Half(), no_dist=True)
    with tierstore.open(config(tmp_path)) as store:
        loaded = store.load()
    assert loaded["a"].dtype is torch.float16
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["n"] == {"x": (1, 2)}
    writer.close()


def test_a_planner_without_flattening_keeps_the_nested_value(tmp_path: Path) -> None:
    writer = TierStorageWriter(config(tmp_path))
    saved = {"a": torch.arange(5.0), "b": {"c": torch.ones(3, 3), "d": 4}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(saved, storage_writer=writer, checkpoint_id="step-1", planner=planner, no_dist=True)
    with tierstore.open(config(tmp_path)) as store:
        assert_same_state(store.load(), saved)
    writer.close()


def test_a_given_store_is_used_and_stays_open(tmp_path: Path) -> None:
    with tierstore.open(config(tmp_path)) as store:
        writer = TierStorageWriter(store=store)
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id="step-4", no_dist=True)
        writer.close()
        assert store.load(4)["a"].tolist() == [1, 1]
        with pytest.raises(CheckpointException, match="the given store is of run 'r'"):
            dcp.save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id="tier:///other/step-4", no_dist=True)
        with pytest.raises(UsageError, match="not both"):
            TierStorageWriter(config(tmp_path), store=store)


def test_a_background_failure_is_told_once_by_the_save_that_failed(tmp_path: Path) -> None:
    """Not again by the next save, which would fail for the other's reason."""
    writer = TierStorageWriter(config(tmp_path))
    other = torch.ones(2)
    dcp.save({"a": other}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)

    class Losing(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return [type(plan)(items=plan.items[:1], planner_data=plan.planner_data) for plan in plans], metadata

    with pytest.raises(CheckpointException, match="1 of 2 planned items were written by no rank"):
        dcp.save({"a": other, "b": other}, storage_writer=writer, checkpoint_id="step-2", planner=Losing(), no_dist=True)
    for step in (3, 4, 5):
        dcp.save({"a": other}, storage_writer=writer, checkpoint_id=step, no_dist=True)
    with tierstore.open(config(tmp_path)) as store:
        assert [info.step for info in store.checkpoints()] == [1, 3, 4, 5]
    try:
        writer.close()
    except SaveError as error:  # pragma: no cover - the failure's text, if it is told twice
        raise AssertionError("told twice") from error
