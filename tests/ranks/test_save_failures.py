"""A rank that dies, hangs, fails or disagrees: a named error on every other rank within a deadline, and nothing half saved."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import die, run_ranks, wait_only_for

import tierstore
from tierstore.clock import SystemClock
from tierstore.errors import DeadlineError, IntegrityError, SaveError, TierFullError, TierStoreError
from tierstore.names import part_name
from tierstore.state.image_memory import Memory

LONG = "30m"
"""A deadline that a test does not wait for."""
TOGETHER = ("before the agreement", "before it is ready")
"""When a rank can die that the others still wait for in `save`."""


def open_in(folder: Path, *, commit: str = LONG, memory: bool = False, clock: SystemClock | None = None, **more: Any) -> tierstore.Store:
    node = {"name": "node", "uri": str(folder / "node"), "scope": "node", "durable": not memory}
    shared = {"name": "shared", "uri": str(folder / "shared"), "scope": "shared"}
    save = {"agreement_timeout": "60s", "commit_timeout": commit, **more.pop("save", {})}
    return tierstore.open({"version": 1, "run": "r", "tiers": [node, shared], "save": save, **more}, clock=clock)


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((64, 64), float(step)), "own": torch.full((8,), float(rank)), "step": step}


def told(error: BaseException | None) -> list[Any]:
    assert isinstance(error, TierStoreError)
    return [type(error).__name__, error.message, error.context.get("ranks", error.context.get("missing"))]


def save_or_tell(store: tierstore.Store, step: int, state: Any) -> Any:
    try:
        store.save(step, state).wait("durable", 120)
    except SaveError as error:
        return told(error.__cause__) if isinstance(error.__cause__, TierStoreError) else told(error)
    except TierStoreError as error:
        return told(error)
    return "saved"


def resumes(rank: int, world_size: int, folder: Path) -> Any:
    """The next run: where does it begin, and does saving work there?"""
    with open_in(folder) as store:
        resumed = store.resume({"w": torch.zeros(64, 64), "own": torch.zeros(8), "step": 0})
        assert resumed is not None
        assert torch.equal(resumed.state["w"], torch.full((64, 64), float(resumed.step)))
        after = save_or_tell(store, 9, state_of(rank, 9))
        return [resumed.step, after, [c.step for c in store.checkpoints()]]


# ---- death


class Ahead(SystemClock):
    """A clock that the test moves on: so that a deadline is over when the ranks that live have come, however long that took."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s

    def pass_commit_timeout(self, folder: Path, step: int, ranks: set[int]) -> None:
        """Moves on once the parts of `ranks` are there, and until the fate is: a part may be there before its own rank begins to wait."""
        run = folder / "shared" / "r"
        paths = [f"step-{step:010d}-*/{part_name(rank)}" for rank in ranks]
        poll(lambda: all(list(run.glob(path)) for path in paths))
        poll(lambda: list(run.glob(f".log/step-{step:010d}-*/000000.json")) or self.move_on())

    def move_on(self) -> None:
        self.ahead_s += 3 * 1800


def dies_in(rank: int, world_size: int, folder: Path, moment: str, dead: int = 1) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr("tierstore.state.agreement._GRACE_S", 1.0)  # how much longer the others wait for rank 0
    clock = Ahead()
    store = open_in(folder, clock=clock)
    first = save_or_tell(store, 1, state_of(rank, 1))
    assert store.agreement is not None
    store.agreement.share("all know of the first save", b"")
    if moment in TOGETHER:  # later nobody waits for the dead in an agreement
        store.agreement.deadline_s = 0.5
        wait_only_for(store.agreement, {dead}, folder / "died")
    if rank == dead:
        if moment == "before the agreement":
            die(folder / "died")
        target = {
            "before it is ready": "tierstore.state.ranks.JointSave.ready",
            "while it copies": "tierstore.state.stage.copy_all",
            "before its shard": "tierstore.tiers.persist.HashingSource",
            "before its part record": "tierstore.tiers.persist.encode_part",
        }[moment]
        patch.setattr(target, lambda *args, **kwargs: die(folder / "died"))
    elif moment not in TOGETHER:
        living = {0, 1, 2} - {dead}
        threading.Thread(target=clock.pass_commit_timeout, args=(folder, 2, living), daemon=True).start()
    return [first, save_or_tell(store, 2, state_of(rank, 2))]


@pytest.mark.parametrize("moment", TOGETHER)
def test_a_rank_that_dies_before_all_are_ready_is_named_and_nothing_is_begun(moment: str, tmp_path: Path) -> None:
    found = run_ranks(3, dies_in, tmp_path, moment=moment, may_die={1: -9})
    expected = ["DeadlineError", "the save of step 2: rank 1 of 3 did not come within 0.5 s", [1]]
    assert found == [["saved", expected], None, ["saved", expected]]
    assert len(list((tmp_path / "shared" / "r").glob("step-*"))) == 1
    assert run_ranks(2, resumes, tmp_path) == [[1, "saved", [1, 9]]] * 2


@pytest.mark.parametrize("moment", ["while it copies", "before its shard", "before its part record"])
def test_the_part_of_a_rank_that_dies_later_is_missed_by_name_and_the_step_never_exists(moment: str, tmp_path: Path) -> None:
    found = run_ranks(3, dies_in, tmp_path, moment=moment, may_die={1: -9})
    for first, (kind, message, missing) in (found[0], found[2]):
        assert (first, kind, missing) == ("saved", "CondemnedError", [1])
        assert "no part of rank 1 of 3" in message
    assert run_ranks(2, resumes, tmp_path) == [[1, "saved", [1, 9]]] * 2


def test_the_others_do_not_depend_on_rank_0(tmp_path: Path) -> None:
    found = run_ranks(3, dies_in, tmp_path / "a", moment="before the agreement", dead=0, may_die={0: -9})
    expected = ["DeadlineError", "the save of step 2: rank 0 of 3 did not answer within 1.5 s", [0]]
    assert found == [None, ["saved", expected], ["saved", expected]]
    found = run_ranks(3, dies_in, tmp_path / "b", moment="before its part record", dead=0, may_die={0: -9})
    for first, (kind, _, missing) in found[1:]:
        assert (first, kind, missing) == ("saved", "CondemnedError", [0])
    assert run_ranks(2, resumes, tmp_path / "b") == [[1, "saved", [1, 9]]] * 2


# ---- failure of one rank, and what comes after it


def fails_once(rank: int, world_size: int, folder: Path, how: str, failing: int) -> Any:
    patch = pytest.MonkeyPatch()
    with open_in(folder, memory=how == "memory") as store:
        results = [save_or_tell(store, 1, state_of(rank, 1))]
        state = state_of(rank, 2)
        state["new"] = torch.full((2 << 20,), float(rank))  # each rank's own, and larger than the image that it has
        if rank == failing:
            if how == "type":
                state["thing"] = object()
            elif how == "memory":

                def full(*args: Any) -> None:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

                patch.setattr(os, "posix_fallocate", full)
                patch.setattr(Memory, "anonymous", full)  # the memory that stands in while the tier holds what was saved before
            elif how == "background":
                store._worker._queue.surface(SaveError("step 1 was not written", hint="free space"))
            elif how == "interrupt":
                patch.setattr("tierstore.state.stage.flatten", interrupted)
        results.append(save_or_tell(store, 2, state) if how != "interrupt" or rank != failing else save_interrupted(store, state))
        patch.undo()
        return [*results, save_or_tell(store, 3, state_of(rank, 3)), [c.step for c in store.checkpoints()]]


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt("Ctrl-C")


def save_interrupted(store: tierstore.Store, state: Any) -> Any:
    with pytest.raises(KeyboardInterrupt):
        store.save(2, state)
    return ["KeyboardInterrupt", "", None]


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("type", "UnsupportedTypeError", "state['thing'] is a builtins.object"),
        ("memory", "TierFullError", "a staging image of"),
        ("background", "SaveError", "step 1 was not written"),
        ("interrupt", "KeyboardInterrupt", "Ctrl-C"),
    ],
)
def test_what_keeps_one_rank_from_saving_is_raised_on_all_and_the_next_save_works(
    how: str, kind: str, text: str, failing: int, tmp_path: Path
) -> None:
    found = run_ranks(3, fails_once, tmp_path, how=how, failing=failing)
    for rank, (first, (error, message, ranks), third, steps) in enumerate(found):
        assert (first, third, steps) == ("saved", "saved", [1, 3])
        assert error == (kind if rank == failing else "RankError")
        if rank != failing:
            assert ranks == [failing]
            assert message.startswith(f"the save of step 2: rank {failing} of 3 failed: {kind}: ")
            assert text in message
    assert len(list((tmp_path / "shared" / "r").glob("step-*"))) == 2


def differs(rank: int, world_size: int, folder: Path, what: str) -> Any:
    with open_in(folder) as store:
        first = save_or_tell(store, 5 + (rank == 1) if what == "step" else 5, state_of(rank, 5))
        return [first, save_or_tell(store, 7, state_of(rank, 7))]


def test_ranks_that_save_different_steps_hear_both_numbers(tmp_path: Path) -> None:
    found = run_ranks(3, differs, tmp_path, what="step")
    assert [told[0] for (told, _) in found] == ["UsageError", "RankError", "RankError"]
    assert {told[1] for (told, _) in found} == {"rank 0 saves step 5, rank 1 saves step 6"}
    assert [after for _, after in found] == ["saved"] * 3


def opened_wrongly(rank: int, world_size: int, folder: Path) -> Any:
    config = [str(folder / "node"), str(folder / "shared")]
    with tierstore.open(config, run="r", rank=rank, world_size=3) as store, pytest.raises(TierStoreError) as caught:
        store.save(1, {"w": torch.ones(1)})
    with pytest.raises(TierStoreError, match="was given with a process group in which this is rank"):
        tierstore.open(config, run="r", rank=0, world_size=3, process_group=torch.distributed.group.WORLD)
    return caught.value.args[0]


def test_another_world_size_than_the_group_s_is_refused(tmp_path: Path) -> None:
    found = run_ranks(2, opened_wrongly, tmp_path)
    assert found == [f"the store was opened as rank {r} of 3, the process group says {r} of 2" for r in range(2)]


def refuses_a_second_attempt(rank: int, world_size: int, folder: Path) -> Any:
    with open_in(folder) as store:
        first = save_or_tell(store, 1, state_of(rank, 1))
        try:
            store.save(1, state_of(rank, 1), if_exists="refuse")
        except TierStoreError as error:
            return [first, type(error).__name__, error.message]
        return None


def test_a_step_that_exists_is_refused_by_all_ranks(tmp_path: Path) -> None:
    text = "step 1 of run 'r' is committed already"
    assert run_ranks(2, refuses_a_second_attempt, tmp_path) == [["saved", "UsageError", text], ["saved", "RankError", text]]


# ---- failure in the background


def gives_up_in_background(rank: int, world_size: int, folder: Path, how: str) -> Any:
    patch = pytest.MonkeyPatch()
    store = open_in(folder)
    state = state_of(rank, 2)
    if rank == 1:
        if how == "damage":

            def damaged(*args: Any, **kwargs: Any) -> Any:
                raise IntegrityError("block 0 changed while it was written")

            patch.setattr("tierstore.tiers.persist.HashingSource.finish", damaged)
        elif how == "copy":

            def broken(*args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("CUDA error: device-side assert triggered")

            patch.setattr("tierstore.state.stage.copy_all", broken)
    try:
        result = save_or_tell(store, 2, state)
    except RuntimeError as error:
        result = ["RuntimeError", str(error), None]
    close_at_last(store)
    return result


def full_disk(patch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise TierFullError("tier 'shared' has 0 bytes left")

    patch.setattr("tierstore.tiers.persist.check_room_to_save", full)


def close_at_last(store: tierstore.Store) -> None:
    with contextlib.suppress(SaveError, DeadlineError):
        store.close(10)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("damage", "rank 1 of 2 gave its part up: IntegrityError: block 0 changed while it was written"),
        ("copy", "rank 1 could not save its part: RuntimeError: CUDA error: device-side assert triggered"),
    ],
)
def test_a_rank_that_gives_its_part_up_says_so_to_the_others_at_once(how: str, text: str, tmp_path: Path) -> None:
    """`commit_timeout` is half an hour here: nobody waits for that."""
    first, second = run_ranks(2, gives_up_in_background, tmp_path, how=how)
    assert first[0] == "CondemnedError"
    assert text in first[1]
    assert second[0] == ("IntegrityError" if how == "damage" else "RuntimeError")


def skips_a_save(rank: int, world_size: int, folder: Path) -> Any:
    patch = pytest.MonkeyPatch()
    store = open_in(folder, save={"backlog": "skip_oldest"}, io={"max_inflight": "64KiB"})
    if rank == 1:
        full_disk(patch)
    states = [{"w": torch.full((5000,), float(step)), "own": torch.full((5000,), float(rank))} for step in (1, 2)]
    one = store.save(1, states[0])
    if rank == 0:
        one.wait("node", 120)  # what is still in memory would be skipped here too
    two = store.save(2, states[1])  # on rank 1 it pushes the first one out of memory
    if rank == 1:
        patch.undo()
    with pytest.raises(SaveError) as caught:
        one.wait("committed", 120)
    two.wait("durable", 120)
    close_at_last(store)
    cause = caught.value.__cause__
    assert isinstance(cause, TierStoreError)
    return [type(cause).__name__, cause.message]


def test_a_save_that_one_rank_skips_is_given_up_on_all_and_newer_ones_commit(tmp_path: Path) -> None:
    (kind0, text0), (kind1, text1) = run_ranks(2, skips_a_save, tmp_path)
    assert (kind0, kind1) == ("CondemnedError", "SaveError")
    assert "rank 1 of 2 gave its part up: SaveError: step 1 of run 'r' was skipped" in text0
    assert "was skipped" in text1
    with tierstore.open([str(tmp_path / "node"), str(tmp_path / "shared")], run="r") as store:
        assert [c.step for c in store.checkpoints()] == [2]


def has_a_full_disk(rank: int, world_size: int, folder: Path) -> Any:
    patch = pytest.MonkeyPatch()
    clock = Ahead()
    store = open_in(folder, clock=clock)
    if rank == 1:
        full_disk(patch)
    else:
        threading.Thread(target=clock.pass_commit_timeout, args=(folder, 1, {0}), daemon=True).start()
    first = save_or_tell(store, 1, state_of(rank, 1)) if rank == 0 else waits_for_space(store, state_of(rank, 1), folder)
    (folder / "heard").touch()
    patch.undo()
    tries: list[Any] = []
    while "saved" not in tries and len(tries) < 3:  # they raise what went wrong in the background since, sooner or later
        tries.append(save_or_tell(store, 2 + len(tries), state_of(rank, 2)))
    close_at_last(store)
    return [first, tries]


def waits_for_space(store: tierstore.Store, state: Any, folder: Path) -> Any:
    ticket = store.save(1, state)
    poll(lambda: ticket.errors and (folder / "heard").exists())
    return [type(error).__name__ for error in ticket.errors][:1]


def poll(condition: Any, deadline_s: float = 200.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_with_a_full_disk_is_named_when_the_others_stop_waiting_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    (first, tries), (full, others) = run_ranks(2, has_a_full_disk, tmp_path)
    assert first[0] == "CondemnedError"
    assert first[2] == [1]
    assert full == ["TierFullError"]
    assert tries[0][0] == "CondemnedError"
    assert len(tries) == len(others)
    assert (tries[-1], others[-1]) == ("saved", "saved")
    # Rank 1 may have heard by then that step 1 was condemned, or hears of it a moment later: then the next save says so, on both.
    assert {kind for kind, *_ in tries[1:-1]} <= {"RankError"}
    assert {kind for kind, *_ in others[:-1]} <= {"TierFullError", "CondemnedError", "RankError"}


def comes_late(rank: int, world_size: int, folder: Path) -> Any:
    with open_in(folder) as store:
        assert store.agreement is not None
        store.agreement.deadline_s = 0.5
        wait_only_for(store.agreement, {1})
        if rank == 1:
            poll(lambda: (folder / "missed").exists())
        first = save_or_tell(store, 1, state_of(rank, 1))
        (folder / "missed").touch()
        store.agreement.deadline_s = 60
        return [first[:2], save_or_tell(store, 2, state_of(rank, 2)), [c.step for c in store.checkpoints()]]


def test_a_slow_rank_hears_that_it_was_missed_and_takes_part_in_the_next_save(tmp_path: Path) -> None:
    missed = ["DeadlineError", "the save of step 1: rank 1 of 3 did not come within 0.5 s"]
    assert run_ranks(3, comes_late, tmp_path) == [[missed, "saved", [2]]] * 3
