"""The event loop: results, errors, cancellation, deadlines, forks, exits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest

from tierstore.errors import ClosedError, DeadlineError, UsageError
from tierstore.storage.loop import EventLoop


async def _double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def _fail() -> None:
    raise LookupError("mine")


async def _cancelled() -> None:
    raise asyncio.CancelledError


async def _for_ever() -> None:
    await asyncio.Event().wait()


def test_runs_coroutines_of_many_threads_on_one_loop() -> None:
    loop = EventLoop()
    loops: set[asyncio.AbstractEventLoop] = set()

    async def note(number: int) -> int:
        loops.add(asyncio.get_running_loop())
        return await _double(number)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: loop.run(note(number)), range(20))) == list(range(0, 40, 2))
    assert len(loops) == 1
    loop.close()


def test_errors_come_out_as_they_are() -> None:
    loop = EventLoop()
    with pytest.raises(LookupError, match="mine"):
        loop.run(_fail())
    loop.close()


def test_a_cancelled_coroutine_raises_and_never_returns_none() -> None:
    loop = EventLoop()
    with pytest.raises(concurrent.futures.CancelledError):
        loop.run(_cancelled())
    loop.close()


def test_past_the_timeout_the_coroutine_is_cancelled() -> None:
    loop = EventLoop()
    begun, ended = threading.Event(), threading.Event()

    async def patient() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    while not begun.is_set():  # one that the loop has not come to has nothing to end
        with pytest.raises(DeadlineError):
            loop.run(patient(), timeout=0.01)
    assert ended.wait(120)
    loop.close()


def test_the_coroutines_own_timeout_error_is_not_a_deadline() -> None:
    loop = EventLoop()

    async def slow() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own") as caught:
        loop.run(slow(), timeout=120)
    assert not isinstance(caught.value, DeadlineError)
    loop.close()


def test_a_call_from_the_loops_own_thread_is_refused() -> None:
    loop = EventLoop()

    async def reenter() -> int:
        return loop.run(_double(1))

    with pytest.raises(UsageError, match="own event loop"):
        loop.run(reenter())
    loop.close()


def test_close_cancels_lets_clean_up_and_joins() -> None:
    before = threading.enumerate()  # another test's loop may still be there
    loop = EventLoop()
    steps: list[str] = []

    async def careful() -> None:
        try:
            steps.append("started")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned")

    future = loop.submit(careful())
    loop.run(_double(1))
    loop.close()
    assert steps == ["started", "cleaned"]
    assert future.cancelled()
    assert not [thread for thread in threading.enumerate() if thread.name == "tierstore-loop" and thread not in before]
    loop.close()
    with pytest.raises(ClosedError):
        loop.run(_double(1))


def test_a_child_gets_a_loop_of_its_own() -> None:
    loop = EventLoop()
    assert loop.run(_double(1)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork with threads is what is tested
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if loop.run(_double(21), timeout=120) == 42 else 2
            loop.close()
        finally:
            os._exit(status)
    deadline = time.monotonic() + 200
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 0
    assert loop.run(_double(2)) == 4
    loop.close()


def test_a_process_that_forgets_to_close_still_ends() -> None:
    code = (
        "import asyncio\n"
        "from tierstore.storage.loop import EventLoop\n"
        "loop = EventLoop()\n"
        "async def for_ever(): await asyncio.Event().wait()\n"
        "async def now(): return 'done'\n"
        "loop.submit(for_ever())\n"
        "print(loop.run(now()))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_what_coroutines_compute_runs_in_so_many_threads_and_no_more() -> None:
    loop = EventLoop(threads=3, nice=2)
    seen: set[tuple[str, int]] = set()
    together = threading.Barrier(3)

    def compute() -> None:
        together.wait(120)
        seen.add((threading.current_thread().name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    async def many() -> None:
        await asyncio.gather(*[asyncio.to_thread(compute) for _ in range(30)])

    loop.run(many())
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == {(f"tierstore-work_{number}", min(own + 2, 19)) for number in range(3)}
    loop.close()


def test_a_thread_that_is_no_nicer_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError("a sandbox without setpriority")

    monkeypatch.setattr(os, "setpriority", refused)
    loop = EventLoop()
    loop.run(asyncio.to_thread(_double, 1)).close()
    loop.close()
