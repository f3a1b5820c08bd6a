"""Megatron-Core saves into a store and loads from it: its own functions on the CPU over gloo, one and two ranks (see `megatron_kit`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # of which each scenario has a part, and says so where it hangs

KIT = Path(__file__).with_name("megatron_kit.py")
WHOLE = [[float(row * 12 + column) for column in range(12)] for row in range(8)]
COMMON = {
    "iteration": 5,
    "optimizer": {"step": 3, "param_groups": [{"betas": [0.9, 0.95]}]},
}
ERROR = "MegatronMismatchError StateMismatchError"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario's ranks returned. All run in one process's forks, for Megatron takes many seconds to import."""
    folder = tmp_path_factory.mktemp("megatron")
    done = subprocess.run([sys.executable, str(KIT), str(folder)], capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return result


@pytest.fixture(scope="module")
def layouts(told: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = told["layouts"]
    return found


def _columns(rank: int) -> list[list[float]]:
    return [row[rank * 6 : rank * 6 + 6] for row in WHOLE]


def _model(rank: int) -> dict[str, Any]:
    """What a rank gets of the tensors that do not change their layout."""
    rows = WHOLE[:3] if rank == 0 else WHOLE[3:]
    return {"bias": [0.0, 1.0, 2.0, 3.0, 4.0], "uneven": rows, "stacked": WHOLE[rank * 4 : rank * 4 + 4]}


@pytest.mark.parametrize("way", ["other axis", "registered"])
def test_every_tensor_object_and_common_value_comes_back_in_another_layout(layouts: list[dict[str, Any]], way: str) -> None:
    for rank, found in enumerate(layouts):
        loaded = found[way]
        assert loaded["model"] == {**_model(rank), "w": _columns(rank)}
        assert {key: loaded[key] for key in COMMON} == COMMON
        assert loaded["args"] == "Namespace(lr=0.1, backend=<AttnBackend.flash: 1>, dtype=torch.bfloat16)"


def test_each_rank_gets_its_own_objects_back(layouts: list[dict[str, Any]]) -> None:
    """MLM#6858: random states of all ranks came from one."""
    assert [found["other axis"]["rng"] for found in layouts] == [[{"random": [rank] * 4, "rank": rank}] for rank in (0, 1)]


def test_a_fully_parallel_save_stores_the_same(layouts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(layouts):
        assert found["fully parallel"] == {**_model(rank), "w": WHOLE[rank * 4 : rank * 4 + 4]}


def test_one_rank_loads_what_two_saved_and_other_doors_see_whole_tensors(told: dict[str, Any]) -> None:
    found = told["alone"][0]
    assert found["loaded"]["model"]["w"] == found["loaded"]["model"]["uneven"] == WHOLE
    assert found["direct"]["sharded"]["model.w"] == WHOLE
    assert found["direct"]["sharded"]["stacked"] == [WHOLE[:4], WHOLE[4:]]
    assert found["direct"]["common"]["content_metadata"] == {"version": 2}
    assert found["dcp"] == WHOLE


def test_a_gpt_model_changes_its_tensor_parallelism(told: dict[str, Any]) -> None:
    for found in told["gpt"]:
        assert found["equal"] is True
        assert found["tensors"] > 20
        assert found["sharded"] == [16, 16]  # half of a layer's 32 rows


def test_megatrons_own_functions_work_with_one_local_file(layouts: list[dict[str, Any]]) -> None:
    for found in layouts:
        assert found["local"] == ["metadata.json"]  # no common.pt: nothing is there to be unpickled
        assert found["is one"] is True
        assert found["metadata"] == {"version": 3}
        assert {key: found["common"][key] for key in COMMON} == COMMON
        assert found["plain tensors"] == WHOLE
        assert found["checkpoints"] == [[1, {}], [2, {}], [3, {"loss": 0.25}]]
    assert layouts[0]["stock"] == {"iteration": 9}


def test_strict_handling_knows_what_is_stored(layouts: list[dict[str, Any]]) -> None:
    for found in layouts:
        assert found["strict"] == [["model.bias", "rng"], []]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("missing", ("the tensor 'model.x' is not stored", "the tensor 'model.y' is not stored")),
        ("shape", ("'model.w' has the shape [8, 12], wanted [10, 12]",)),
        ("dtype", ("'model.bias' is bfloat16, wanted float32",)),
    ],
)
def test_differences_are_all_named_and_nothing_is_changed(layouts: list[dict[str, Any]], case: str, said: tuple[str, ...]) -> None:
    for found in layouts:
        kinds, message, other = found[case]
        assert kinds.startswith(ERROR)
        assert all(each in message for each in said)
        assert other == "-1.0"


def test_casting_and_padding_are_for_who_asks(layouts: list[dict[str, Any]]) -> None:
    for found in layouts:
        assert found["cast"] == ["nothing raised", [0.0, 1.0, 2.0, 3.0, 4.0]]
        assert found["padded"] == ["nothing raised", [*WHOLE, [0.0] * 12, [0.0] * 12]]


def test_the_common_state_is_never_left_out_of_the_store(layouts: list[dict[str, Any]]) -> None:
    assert "call register(…) once before" in layouts[0]["by itself"][1]
    assert layouts[0]["steps"] == [1, 2, 3]  # nothing of the saves that failed


def test_what_one_rank_can_t_save_all_ranks_raise(layouts: list[dict[str, Any]]) -> None:
    assert layouts[0]["unstorable"][0].startswith("RankError")
    assert layouts[1]["unstorable"][0].startswith("UnsupportedTypeError")
    assert "rng/shard_1_2" in layouts[1]["unstorable"][1]


def test_what_megatron_refuses_on_rank_0_alone_the_others_hear(layouts: list[dict[str, Any]]) -> None:
    assert layouts[0]["overlap"][0].startswith("CheckpointingException")
    assert layouts[1]["overlap"][0].startswith("RankError")
    assert "Invalid access pattern" in layouts[1]["overlap"][1]


def test_a_step_that_is_not_committed_is_named(layouts: list[dict[str, Any]]) -> None:
    for found in layouts:
        assert found["gone"][0].startswith("NotFoundError")


def test_an_async_save_keeps_the_values_of_its_call_and_is_visible_when_it_is_finalised(told: dict[str, Any]) -> None:
    """MLM#1713: NaN after an async resume; MLM#1763: told as saved too early; MLM#2422: the fork hangs on the parent's clients."""
    for rank, found in enumerate(told["after_death"]):
        assert found["local before"] == []
        assert found["exit code"] == 0
        assert found["local after"] == ["metadata.json"]
        assert found["loaded"]["model"] == {**_model(rank), "w": _columns(rank)}


def test_after_ranks_died_in_a_save_the_one_before_is_found_without_local_files(told: dict[str, Any]) -> None:
    for rank, found in enumerate(told["after_death"]):
        assert found["place"] == "iter_0000001"
        assert found["tracker"] == "1"
        assert found["local fresh"] == ["iter_0000001/metadata.json", "latest_checkpointed_iteration.txt"]
        assert found["again"]["model"]["w"] == _columns(rank)
        assert found["nothing"] is None


def test_the_guides_scripts_run_word_for_word(told: dict[str, Any]) -> None:
    expected = [["a_save_and_load.py", "loaded in another layout\n"], ["b_register.py", "loaded through Megatron's own functions\n"]]
    assert told["guide"] == [expected, expected]
