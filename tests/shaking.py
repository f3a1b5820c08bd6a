"""Scheduling that is unkind on purpose: ``--shake`` lets threads, the event loop or system calls come late, early or in fits.

A test that holds only where a thread is quick enough fails here, sooner or later, instead of on somebody's busy machine. Each test is
shaken in one way (`WAYS`), chosen by its name and a seed; what it draws is seeded too, so that a seed finds nearly the same again.
Children that tests start are not shaken.

    make test ARGS="--shake 7 tests/protocols"            each test in one of the ways
    make test ARGS="--shake 7 --shake-way late_start tests/protocols"
"""

from __future__ import annotations

import asyncio.base_events
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage._threads import DaemonPool

WAYS = (
    "gil_long",  # a thread that computes keeps the others waiting for long
    "gil_short",  # threads take turns all the time
    "late_start",  # what a pool is given begins late
    "late_end",  # it is done, but nobody hears so yet
    "fast",  # it is done before who submitted it goes on
    "thread_late",  # a new thread's first step comes late
    "thread_fast",  # it gets far before who started it goes on
    "loop_stall",  # the event loop stands still now and then
    "hiccup",  # the same, rarely, and for a second
    "slow_io",  # a system call takes long now and then
)

_SWITCH_S = {"gil_long": 0.03, "gil_short": 2e-6}
_CALLS = ("open", "pread", "preadv", "pwrite", "link", "rename", "unlink", "mkdir", "rmdir", "fsync", "fsync_folder", "close")


class Shaking:
    """The plugin: what it replaces is replaced for the whole process, and acts while a test runs.

    Args:
        seed: Another one shakes every test otherwise.
        way: The way for all tests; None: each has its own.
    """

    def __init__(self, seed: int, way: str | None) -> None:
        self._seed = seed
        self._given = way
        self._way = ""
        self._draw = random.Random()
        self._sleep = time.sleep  # tests replace it
        self._usual_s = sys.getswitchinterval()

    def pytest_configure(self) -> None:
        for pool in (ThreadPoolExecutor, DaemonPool):
            pool.submit = self._submitting(pool.submit)  # type: ignore[method-assign,assignment]
        for name in _CALLS:
            setattr(OsSyscalls, name, self._slow(getattr(OsSyscalls, name)))
        threading.Thread.start = self._starting(threading.Thread.start)  # type: ignore[method-assign]
        asyncio.base_events.BaseEventLoop._run_once = self._turning(asyncio.base_events.BaseEventLoop._run_once)  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        number = zlib.crc32(f"{self._seed}:{item.nodeid}".encode())
        self._draw.seed(number)
        self._way = self._given or WAYS[number % len(WAYS)]
        sys.setswitchinterval(_SWITCH_S.get(self._way, self._usual_s))
        try:
            return (yield)
        finally:
            self._way = ""
            sys.setswitchinterval(self._usual_s)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            report.sections.append(("shaken", f"--shake {self._seed} --shake-way {self._way}"))
        return report

    # ---- inside

    def _pause(self, way: str, chance: float, most_s: float) -> None:
        if self._way == way and self._draw.random() < chance:
            self._sleep(self._draw.random() * most_s)

    def _submitting(self, submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
        def submit_shaken(pool: Any, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            def shaken(*args: Any, **kwargs: Any) -> Any:
                self._pause("late_start", 0.3, 0.03)
                try:
                    return work(*args, **kwargs)
                finally:
                    self._pause("late_end", 0.3, 0.03)

            future = submit(pool, shaken if self._way in ("late_start", "late_end") else work, *args, **kwargs)
            if self._way == "fast":
                end = time.perf_counter() + 0.02
                while not future.done() and time.perf_counter() < end:
                    self._sleep(0.0005)
            return future

        return submit_shaken

    def _starting(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def start_shaken(thread: threading.Thread) -> None:
            if self._way == "thread_late":
                run = thread.run

                def run_late() -> None:
                    self._pause("thread_late", 0.5, 0.05)
                    run()

                thread.run = run_late  # type: ignore[method-assign]
            start(thread)
            if self._way == "thread_fast":
                self._sleep(0.01)

        return start_shaken

    def _turning(self, run_once: Callable[[Any], None]) -> Callable[[Any], None]:
        def run_once_shaken(loop: Any) -> None:
            self._pause("loop_stall", 0.05, 0.06)
            self._pause("hiccup", 0.002, 1.5)
            run_once(loop)

        return run_once_shaken

    def _slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_slowly(*args: Any, **kwargs: Any) -> Any:
            self._pause("slow_io", 0.05, 0.02)
            return call(*args, **kwargs)

        return call_slowly
