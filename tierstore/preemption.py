"""Signals that say that the machine will be taken away: noted when they arrive, answered at the next step of training.

A handler of Python's runs between two instructions of whatever the main thread is at, so it only writes down what came and when. The loop
asks `Preemption.requested` where its state is whole.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tierstore.errors import UsageError

__all__ = ["Preemption", "Request"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A signal that came."""

    name: str
    """``SIGTERM``."""
    stop: bool
    """Whether training is to end; otherwise a save is enough."""
    at_s: float
    """When it came, of `time.monotonic`."""


class Preemption:
    """Handles signals from `install` to `restore`; handlers that were there before are called too, and put back.

    The first signal of a kind is noted. What comes after it goes where it would go without this class, so that a second SIGTERM ends the
    process: nobody has to wait for a save that he does not want. A signal that only asks for a save is noted each time.

    Handlers can be set in the main thread only; elsewhere `install` says so and signals do what they did before. A child that the
    process forks gets the handlers with its memory, but not their meaning: there a signal does what it would do without them.

    Args:
        stop: Names of signals that end training.
        save: Names of signals that ask for a save.

    Raises:
        UsageError: There is no such signal, or it can't be handled.
    """

    def __init__(self, *, stop: Sequence[str] = ("SIGTERM",), save: Sequence[str] = ("SIGUSR1",)) -> None:
        self._kinds = {**dict.fromkeys(map(_number, save), False), **dict.fromkeys(map(_number, stop), True)}
        self._before: dict[int, Any] = {}
        self._stop: Request | None = None
        self._save: Request | None = None
        self._pid = os.getpid()

    @property
    def installed(self) -> bool:
        return bool(self._before)

    @property
    def requested(self) -> Request | None:
        """What came and was not answered: a request to stop before one to save."""
        return self._stop or self._save

    def saved(self) -> None:
        """The save that was asked for is taken. A request to stop stays."""
        self._save = None

    def install(self) -> bool:
        """Sets the handlers; returns whether they could be set."""
        if self._before or not self._kinds:
            return self.installed
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "signals can be handled in the main thread only, and this is %r: %s will do what they did before, and a preempted job "
                "loses the steps since its last save. Make the Checkpointer in the main thread",
                threading.current_thread().name,
                ", ".join(signal.Signals(number).name for number in self._kinds),
            )
            return False
        self._pid = os.getpid()
        for number in self._kinds:
            before = signal.getsignal(number)
            # None: a handler that Python did not set. It can't be called from here, nor put back, so it is left alone.
            if before is None:
                log.warning("%s has a handler that was not set by Python, and is left to it", signal.Signals(number).name)
                continue
            self._before[number] = before
            signal.signal(number, self._note)
        return self.installed

    def restore(self) -> None:
        """Puts the handlers back that were there before; a handler that was set meanwhile stays."""
        if not self._before or os.getpid() != self._pid:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning("the handlers of signals stay: they were set in the main thread, and only there they can be put back")
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        stop = self._kinds[number]
        if os.getpid() != self._pid or (stop and self._stop is not None):
            _pass_on(number, before, frame)
            return
        request = Request(name=signal.Signals(number).name, stop=stop, at_s=time.monotonic())
        if stop:
            self._stop = request
        else:
            self._save = request
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _pass_on(number: int, before: Any, frame: FrameType | None) -> None:
    """Does what the signal would do without our handler."""
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _number(name: str) -> int:
    found = getattr(signal, name, None)
    if not isinstance(found, signal.Signals):
        raise UsageError(f"there is no signal {name!r}", hint="name it as in `kill -l`: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP")
    if found in (getattr(signal, "SIGKILL", None), getattr(signal, "SIGSTOP", None)):
        raise UsageError(f"{name} can't be handled by any process", hint="SIGTERM comes before SIGKILL where a job is preempted")
    return int(found)
