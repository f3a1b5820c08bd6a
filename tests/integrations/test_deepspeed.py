"""DeepSpeed saves into a store and resumes from it: real engines on the CPU over gloo, with one and two ranks (see `deepspeed_kit`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # of which each scenario has a part, and says so where it hangs

KIT = Path(__file__).with_name("deepspeed_kit.py")
STAGES = ("0", "1", "2", "3")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario's ranks returned. All run in one process's forks, for DeepSpeed takes many seconds to import."""
    folder = tmp_path_factory.mktemp("deepspeed")
    done = subprocess.run([sys.executable, str(KIT), str(folder)], capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_bit_by_bit_after_a_load(told: dict[str, Any], stage: str) -> None:
    for rank in told["stages"]:
        later, again = rank[stage]["losses"]
        assert later == again


@pytest.mark.parametrize("stage", STAGES)
def test_every_file_comes_back_as_deepspeed_would_have_written_it(told: dict[str, Any], stage: str) -> None:
    report = told["stages"][0][stage]
    assert report["files"] == dict.fromkeys(report["names"], "")  # equal by value and type: tensors, loss scalers, stages, OrderedDicts
    assert report["client"] == {"args": "Namespace(lr=0.1, name='run')", "seen": "{1, 2}", "epoch": "1"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_tag_is_one_checkpoint_of_real_tensors_and_only_latest_is_local(told: dict[str, Any], stage: str) -> None:
    report = told["stages"][0][stage]
    assert report["local"] == ["latest"]
    assert report["steps"] == [[3, []]]
    own = "zero_pp_rank_0_mp_rank_00_optim_states.optimizer_state_dict"
    expected = {
        "0": ("mp_rank_00_model_states.module.0.weight", [16, 8]),
        "1": ("mp_rank_00_model_states.module.0.weight", [16, 8]),
        "2": (f"{own}.single_partition_of_fp32_groups.0", [102]),
        "3": (f"{own}.fp32_flat_groups.0", [101]),
    }[stage]
    assert report["tensors"][expected[0]] == expected[1]
    model = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == "3" else "mp_rank_00_model_states.pt"
    assert report["path"] == f"global_step3/{model}"


def test_zero_3_puts_the_weights_together_without_the_optimizer(told: dict[str, Any]) -> None:
    loaded, trained = told["stages"][0]["3"]["weights"]
    assert loaded == trained


def test_deepspeeds_own_tool_makes_the_same_weights_of_files_that_were_written_back(told: dict[str, Any]) -> None:
    found = told["one_rank"][0]
    assert [found[f"fp32 {stage}"] for stage in (1, 2, 3)] == ["", "", ""]


def test_another_number_of_ranks_loads_whole_or_is_refused(told: dict[str, Any]) -> None:
    """DS#3810, DS#2898, DS#6503: never silently wrong."""
    found = told["one_rank"][0]
    assert found["stage 0"][0] == "nothing raised"
    assert found["steps 0"] == 3
    assert found["stage 1"][0] == "ZeRORuntimeException"


def test_pipeline_stages_resume_bit_by_bit(told: dict[str, Any]) -> None:
    for rank in told["pipeline"]:
        assert rank["losses"][0] == rank["losses"][1]
        assert [name for name in rank["layers"] if name.endswith("weight")] == [f"layer_0{n}-model_states.weight" for n in (0, 2, 3)]


def test_experts_on_different_ranks_resume_bit_by_bit(told: dict[str, Any]) -> None:
    for rank in told["experts"]:
        assert rank["losses"][0] == rank["losses"][1]


def test_a_script_killed_in_the_middle_of_a_save_goes_on_as_if_nothing_had_happened(told: dict[str, Any]) -> None:
    """The guide's script, word for word, on two ranks: one dies before its part is written, the other with SIGKILL while it waits."""
    found = told["guide"]
    assert found["whole"][0] == found["killed"][0] == [0, 0]
    codes, latest, output = found["when killed"]
    assert codes == [-9, 86]
    assert latest == "global_step10"
    whole, resumed = (_steps(found[name][1]) for name in ("whole", "killed"))
    assert len(whole) == 20
    assert _steps(output) == whole[:15]
    assert resumed == whole[10:]


def _steps(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step ")]


# ---- tags, latest, and what is refused


@pytest.fixture(scope="module")
def tags(told: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = told["tags"]
    return found


def test_an_empty_store_loads_nothing(tags: list[dict[str, Any]]) -> None:
    assert [rank["nothing yet"] for rank in tags] == [[None, None]] * 2


def test_a_tag_of_ones_own_is_a_label_and_outlives_another_save_of_the_step(tags: list[dict[str, Any]]) -> None:
    for rank in tags:
        assert rank["checkpoints"] == [[1, [], {"loss": 0.5}], [2, ["best"], {}]]
        assert rank["latest"] == "best"
        assert rank["by tag"][:2] == ["best/mp_rank_00_model_states.pt", 2]
        assert rank["by step"][:2] == ["global_step1/mp_rank_00_model_states.pt", 1]
        assert rank["by latest"][:2] == ["best/mp_rank_00_model_states.pt", 2]


def test_a_view_of_much_memory_is_stored_as_little(tags: list[dict[str, Any]]) -> None:
    """DS#3303, DS#2389, DS#3348: saved with the whole storage behind it."""
    assert tags[0]["nbytes"] < 200_000  # the view's storage has 4 MB


def test_latest_that_names_nothing_committed_means_the_newest_with_a_warning(tags: list[dict[str, Any]]) -> None:
    path, step, _, warnings = tags[0]["latest uncommitted"]
    assert (path, step) == ("global_step2/mp_rank_00_model_states.pt", 2)
    assert len(warnings) == 1
    assert "'global_step9', which is not committed" in warnings[0]
    assert [rank["latest uncommitted"][1] for rank in tags] == [2, 2]


def test_latest_that_names_an_older_checkpoint_is_obeyed_and_told(tags: list[dict[str, Any]]) -> None:
    assert [rank["latest older"][:2] for rank in tags] == [["global_step1/mp_rank_00_model_states.pt", 1]] * 2
    assert "global_step2 is newer" in tags[0]["latest older"][3][0]


def test_a_training_that_loaded_nothing_says_what_it_supersedes(tags: list[dict[str, Any]]) -> None:
    first, second = (rank["begun anew"] for rank in tags)
    assert len(first) == 1
    assert "run=tags has step 5 already, and this training, which loaded nothing, saves step 1" in first[0]
    assert second == []


@pytest.mark.parametrize("case", ["latest lost", "latest cut short"])
def test_without_latest_the_newest_committed_is_taken(tags: list[dict[str, Any]], case: str) -> None:
    assert [rank[case][1] for rank in tags] == [2, 2]


def test_an_unknown_tag_is_an_error_on_all_ranks_that_names_those_that_are_there(tags: list[dict[str, Any]]) -> None:
    assert tags[0]["unknown tag"][0] == "NotFoundError"
    assert "committed are best, global_step2, global_step1" in tags[0]["unknown tag"][1]
    assert tags[1]["unknown tag"][0] == "RankError"
    assert "global_step7" in tags[1]["unknown tag"][1]


def test_training_does_not_begin_anew_where_latest_names_something_and_the_store_is_empty(tags: list[dict[str, Any]]) -> None:
    assert tags[0]["store lost"][0] == "NotFoundError"
    assert "to begin anew remove the file `latest`" in tags[0]["store lost"][1]
    assert tags[1]["store lost"][0] == "RankError"


def test_what_one_rank_can_t_store_all_ranks_raise_and_the_next_save_works(tags: list[dict[str, Any]]) -> None:
    assert tags[0]["unstorable"][0] == "RankError"
    kind, message = tags[1]["unstorable"]
    assert kind == "UnsupportedTypeError"
    assert "['hook']" in message
    assert "register a codec" in message
    assert [rank["after it"] for rank in tags] == [[True, 3]] * 2


def test_the_16_bit_model_is_a_file_and_no_checkpoint(tags: list[dict[str, Any]]) -> None:
    assert tags[0]["16 bit"] == [True, 2, True]


def test_a_staged_save_writes_latest_when_it_commits(tags: list[dict[str, Any]]) -> None:
    assert tags[0]["latest after staged"] == "global_step5"


def test_what_can_t_be_is_refused(tags: list[dict[str, Any]]) -> None:
    assert tags[0]["installed twice"][0] == "UsageError"
    assert tags[0]["a URI as folder"][0] == "UsageError"
    assert "pass a local folder" in tags[0]["a URI as folder"][1]


def test_the_engine_takes_what_this_deepspeed_gives(tags: list[dict[str, Any]]) -> None:
    """DS#7678: the commit's arguments changed from one version to the next."""
    assert tags[0]["interface"] == []
