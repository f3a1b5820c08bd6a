"""The threads that a store keeps for its saves: few, the same ones each time, none left behind, none of the parent's in a child."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tierstore.state.copy_threads import CopyThreads


@pytest.fixture
def named() -> Callable[[], list[threading.Thread]]:
    """The threads that copy, without those that a store of another test may have left in this process."""

    def found() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("tierstore-copy") and t not in before]

    before = set(threading.enumerate())
    return found


def test_all_of_the_work_is_done_once_by_no_more_than_so_many_threads(named: Callable[[], list[threading.Thread]]) -> None:
    threads = CopyThreads(3)
    done: list[int] = []
    by: set[int] = set()
    for round_ in range(20):
        threads.run([lambda n=n: (done.append(n), by.add(threading.get_ident())) for n in range(round_ * 50, round_ * 50 + 50)])  # type: ignore[misc]
    assert sorted(done) == list(range(1000))
    assert len(by) <= 3
    assert len(named()) <= 2
    threads.close()
    assert named() == []


def test_little_work_starts_no_thread(named: Callable[[], list[threading.Thread]]) -> None:
    threads = CopyThreads(4)
    threads.run([])
    threads.run([lambda: None])
    assert named() == []
    threads.close()


def test_started_threads_wait_for_the_first_save(named: Callable[[], list[threading.Thread]]) -> None:
    threads = CopyThreads(3)
    threads.start()
    assert len(named()) == 2
    threads.start()
    assert len(named()) == 2
    threads.close()


def test_the_caller_does_what_is_its_own_while_the_others_work() -> None:
    threads = CopyThreads(2)
    met = threading.Barrier(2)
    own: list[int] = []

    def meanwhile() -> None:
        own.append(threading.get_ident())
        met.wait(60)

    threads.run([lambda: met.wait(60) and None], meanwhile)
    assert own == [threading.get_ident()]
    threads.close()


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_ends_the_rest_and_reaches_the_caller_when_nobody_works_any_more(count: int) -> None:
    threads = CopyThreads(count)
    running: set[int] = set()

    def work(number: int) -> None:
        running.add(number)
        try:
            if number == 7:
                raise IndexError("device lost")
        finally:
            running.discard(number)

    with pytest.raises(IndexError, match="device lost"):
        threads.run([lambda n=n: work(n) for n in range(100)])  # type: ignore[misc]
    assert not running
    threads.run([lambda: None] * 10)
    threads.close()


def test_after_close_the_caller_does_it_alone() -> None:
    threads = CopyThreads(3)
    threads.start()
    threads.close()
    threads.close()
    by: set[int] = set()
    threads.run([lambda: by.add(threading.get_ident())] * 20)
    assert by == {threading.get_ident()}


def test_who_was_asked_to_help_before_the_threads_were_closed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = CopyThreads(3)
    asked, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    caller, submit = threading.get_ident(), ThreadPoolExecutor.submit
    submitted: list[object] = []

    def once(pool: ThreadPoolExecutor, *given: Any) -> Any:
        if submitted:
            raise RuntimeError("cannot schedule new futures after shutdown")
        submitted.append(given)
        return submit(pool, *given)

    def work() -> None:
        if threading.get_ident() == caller:
            asked.wait(60)  # the helper has some of it
            may_end.set()
        else:
            asked.set()
            may_end.wait(60)
            ended.set()

    monkeypatch.setattr(ThreadPoolExecutor, "submit", once)
    threads.run([work] * 2)
    assert ended.is_set()
    monkeypatch.undo()
    threads.close()


def test_a_child_that_ends_its_parents_threads_waits_for_no_lock_of_theirs() -> None:
    threads = CopyThreads(2)
    with threads._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            threads.close()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_starts_threads_of_its_own() -> None:
    threads = CopyThreads(2)
    threads.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forking beside threads, which is what is tested
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            met = threading.Barrier(2)
            threads.run([lambda: met.wait(60) and None] * 2)
            threads.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    threads.run([lambda: None] * 4)
    threads.close()
