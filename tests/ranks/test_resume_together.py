"""Ranks resume from the same step or all raise: whatever each one sees, whoever is damaged, late or dead (CASES 8, 31, MC#2146)."""

from __future__ import annotations

import logging
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import die, run_ranks, wait_only_for

import tierstore
from tierstore.clock import SystemClock
from tierstore.errors import TierStoreError


def config(folder: Path, rank: int, *, per_node: int = 1, deadline: str = "60s") -> dict[str, Any]:
    """One node's tier for `per_node` ranks, and the shared one."""
    return {
        "version": 1,
        "run": "r",
        "tiers": [
            {"name": "node", "uri": str(folder / f"node{rank // per_node}"), "scope": "node"},
            {"name": "shared", "uri": str(folder / "shared"), "scope": "shared"},
        ],
        "save": {"agreement_timeout": deadline},
    }


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"own": torch.full((1000,), float(100 * step + rank)), "step": step, "rank": rank}


class Skewed(SystemClock):
    """A rank whose clock is hours off."""

    def __init__(self, hours: float) -> None:
        self._off = timedelta(hours=hours)

    def now(self) -> Any:
        return super().now() + self._off


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("tierstore").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def saves(rank: int, world_size: int, folder: Path, steps: list[int], skew: bool = False) -> Any:
    clock = Skewed(rank * 7.0) if skew else None
    with tierstore.open(config(folder, rank), rank=rank, world_size=world_size, clock=clock) as store:
        for step in steps:
            store.save(step, state_of(rank, step)).wait("durable", 60)
    return None


def resumes(rank: int, world_size: int, folder: Path, fallback: bool = False, skew: bool = False) -> Any:
    """What came of it: [step, skipped, what is loaded, warnings], or [the error's name and message]."""
    told = Told()
    clock = Skewed(rank * -5.0) if skew else None
    with tierstore.open(config(folder, rank), rank=rank, world_size=world_size, clock=clock) as store:
        try:
            resumed = store.resume(into=state_of(-1, -1), fallback=fallback)
        except TierStoreError as error:
            return [type(error).__name__, error.message]
        if resumed is None:
            return None
        state = resumed.state
        right = bool(torch.equal(state["own"], state_of(rank, resumed.step)["own"]))
        return [resumed.step, list(resumed.skipped), right, state["rank"] == rank, told.lines]


def steps_of(found: list[Any]) -> list[Any]:
    return [one[0] for one in found]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1, 2 and 3 of two ranks, each a node of its own, committed and on all tiers."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, saves, folder, steps=[1, 2, 3], skew=True)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    return folder


def hurt(folder: Path, step: int, pattern: str = "shard-*", tiers: str = "*") -> None:
    paths = list(folder.glob(f"{tiers}/r/step-{step:010d}-*/{pattern}"))
    assert paths
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)


def test_all_ranks_resume_from_the_newest_step_whatever_their_clocks_say(copy: Path) -> None:
    found = run_ranks(2, resumes, copy, skew=True)
    assert [one[:4] for one in found] == [[3, [], True, True]] * 2


def test_a_node_whose_tier_is_lost_takes_the_rest_from_the_shared_tier(copy: Path) -> None:
    shutil.rmtree(copy / "node1")
    hurt(copy, 3, tiers="node0")
    found = run_ranks(2, resumes, copy)
    assert [one[:4] for one in found] == [[3, [], True, True]] * 2
    assert any("passed over for the next tier" in line for line in found[0][4])


def test_damage_that_one_rank_meets_is_raised_on_all_of_them(copy: Path) -> None:
    hurt(copy, 3, "shard-00001-of-*")
    found = run_ranks(2, resumes, copy)
    assert steps_of(found) == ["IntegrityError"] * 2
    assert all("step 3" in message for _, message in found)
    assert "no tier has a good copy" in found[1][1]
    assert "rank 1 of 2 failed: IntegrityError: no tier has a good copy" in found[0][1]


@pytest.mark.parametrize("pattern", ["shard-00001-of-*", "manifest.json", "objects.json"])
def test_with_fallback_all_ranks_go_back_together_and_all_say_so(pattern: str, copy: Path) -> None:
    hurt(copy, 3, pattern)
    found = run_ranks(2, resumes, copy, fallback=True)
    assert [one[:4] for one in found] == [[2, [3], True, True]] * 2
    for *_, lines in found:
        assert any("step=3 can't be loaded and is passed over" in line for line in lines)


def test_with_fallback_and_nothing_good_left_all_ranks_raise(copy: Path) -> None:
    for step in (1, 2, 3):
        hurt(copy, step)
    found = run_ranks(2, resumes, copy, fallback=True)
    assert steps_of(found) == ["IntegrityError"] * 2
    assert all("none of the committed steps [3, 2, 1] can be loaded" in message for _, message in found)


def test_a_run_without_checkpoints_is_none_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, resumes, tmp_path) == [None, None]


def mismatches(rank: int, world_size: int, folder: Path) -> Any:
    into = state_of(-1, -1)
    if rank == 1:
        into["own"] = torch.zeros(7)
    with tierstore.open(config(folder, rank), rank=rank, world_size=world_size) as store:
        try:
            store.resume(into=into, fallback=True)
        except TierStoreError as error:
            return [type(error).__name__, error.message, bool((into["own"] < 0).all() if rank == 0 else (into["own"] == 0).all())]
    return None


def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(copy: Path) -> None:
    found = run_ranks(2, mismatches, copy)
    assert steps_of(found) == ["RankError", "StateMismatchError"]
    assert "rank 1 of 2 failed: StateMismatchError" in found[0][1]
    assert [one[2] for one in found] == [True, True]


# ---- hot resume: what is staged on the nodes and not committed


def uncommit(folder: Path, step: int) -> None:
    """As if all ranks had died when step `step` lay whole on their nodes, and nowhere else."""
    for path in folder.glob(f"shared/r/step-{step:010d}-*"):
        shutil.rmtree(path)
    for path in folder.glob(f"shared/r/.log/step-{step:010d}-*"):
        shutil.rmtree(path)
    for path in folder.glob(f"node*/r/.log/step-{step:010d}-*/0*.json"):
        path.unlink()


def test_an_attempt_that_is_staged_on_all_nodes_is_committed_and_resumed_from(copy: Path) -> None:
    uncommit(copy, 3)
    found = run_ranks(2, resumes, copy)
    assert [one[:4] for one in found] == [[3, [], True, True]] * 2


def test_an_attempt_of_which_a_node_is_lost_never_was_a_checkpoint_and_all_go_on_from_the_one_before(copy: Path) -> None:
    uncommit(copy, 3)
    shutil.rmtree(copy / "node1")
    found = run_ranks(2, resumes, copy)
    assert [one[:4] for one in found] == [[2, [], True, True]] * 2
    for *_, lines in found:
        assert any("newer attempts at steps [3] never became whole" in line for line in lines)


def test_a_staged_attempt_that_can_not_be_carried_is_no_reason_to_go_back_silently(copy: Path, tmp_path: Path) -> None:
    uncommit(copy, 3)
    hurt(copy, 3, tiers="node1")
    again = tmp_path / "again"
    shutil.copytree(copy, again)
    found = run_ranks(2, resumes, copy)
    assert steps_of(found) == ["IntegrityError"] * 2
    for _, message in found:
        assert "step 3 is staged on the nodes, and could not be committed, so that resuming would go back to step 2" in message
        assert "on rank 1" in message
    found = run_ranks(2, resumes, again, fallback=True)
    assert [one[:4] for one in found] == [[2, [3], True, True]] * 2
    for *_, lines in found:
        assert any("step=3 is out of reach and is passed over" in line for line in lines)


# ---- ranks that see different things, and ranks that are gone


def resumes_while_a_commit_lands(rank: int, world_size: int, folder: Path, late: int) -> Any:
    """The rank `late` lists before step 3 is committed, the others after; see `hide`."""
    with tierstore.open(config(folder, rank), rank=rank, world_size=world_size) as store:
        real = store._catalog

        def catalog(*args: Any) -> Any:
            found = real(*args)
            if rank != late:
                return found
            kept = tuple(c for c in found.checkpoints if c.step < 3)
            return type(found)(**{**{name: getattr(found, name) for name in found.__slots__}, "checkpoints": kept})

        store._catalog = catalog  # type: ignore[method-assign]
        resumed = store.resume(into=state_of(-1, -1))
        assert resumed is not None
        step = store.load("latest", into=state_of(-1, -1))["step"]
        return [resumed.step, resumed.state["rank"], step, float(resumed.state["own"][0])]


@pytest.mark.parametrize("late", [0, 1])
def test_a_commit_that_lands_between_two_listings_is_seen_by_all_or_by_none(late: int, copy: Path) -> None:
    found = run_ranks(2, resumes_while_a_commit_lands, copy, late=late)
    assert [one[0] for one in found] == [3, 3]
    assert [one[3] for one in found] == [300.0, 301.0]
    assert [one[1] for one in found] == [0, 1]
    assert [one[2] for one in found] == ([2, 2] if late == 0 else [3, 3]), "rank 0 says which is the latest"


def one_dies(rank: int, world_size: int, folder: Path, where: str) -> Any:
    with tierstore.open(config(folder, rank), rank=rank, world_size=world_size) as store:
        assert store.agreement is not None
        store.agreement.share("all are there", b"")
        store.agreement.deadline_s = 0.5
        died = folder / "died"
        wait_only_for(store.agreement, {1}, died)
        if rank == 1:
            if where == "before":
                die(died)
            store._session.open_replica = lambda info, **options: die(died)  # type: ignore[method-assign]
        try:
            store.resume(into=state_of(-1, -1), fallback=True)
        except TierStoreError as error:
            return [type(error).__name__, error.message, error.context["ranks"]]
    return None


@pytest.mark.parametrize("where", ["before", "in the middle"])
def test_a_rank_that_dies_during_resume_is_named_and_nobody_hangs(where: str, copy: Path) -> None:
    found = run_ranks(3, one_dies, copy, where=where, may_die={1: -9})
    for rank in (0, 2):
        assert found[rank][0] == "DeadlineError"
        assert found[rank][2] == [1]
        assert "rank 1 of 3 did not come within 0.5 s" in found[rank][1]


def loads_what_is_not_there(rank: int, world_size: int, folder: Path) -> Any:
    with tierstore.open(config(folder, rank), rank=rank, world_size=world_size) as store:
        told = []
        for which in (9, "best:loss", "tag:none"):
            try:
                store.load(which)
            except TierStoreError as error:
                told.append([type(error).__name__, error.message])
        return [*told, store.load(2)["rank"]]


def test_what_rank_0_does_not_find_is_the_same_error_on_all_ranks(copy: Path) -> None:
    first, second = run_ranks(2, loads_what_is_not_there, copy)
    assert first[:3] == second[:3]
    assert [kind for kind, _ in first[:3]] == ["NotFoundError"] * 3
    assert (first[3], second[3]) == (0, 1)
