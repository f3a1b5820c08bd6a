"""The demo's training processes as their parent sees them: started, listened to, killed."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tierstore.errors import SaveError

__all__ = ["Tally", "Trainee"]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the training processes of one story reported."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    """Step → its loss, as often as it was computed."""
    step_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    levels: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step → level or tier → seconds after its last save began; ``stall``: how long training waited."""
    digests: dict[int, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def note(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.losses.setdefault(event["step"], []).append(event["loss"])
            self.step_s.append(event["seconds"])
        elif kind == "save":
            self.stall_s.append(event["stall_s"])
            self.levels[event["step"]] = {"stall": event["stall_s"]}
        elif kind == "level":
            self.levels.setdefault(event["step"], {})[event["level"]] = event["seconds"]
        elif kind == "digest":
            self.digests.setdefault(event["step"], []).append(event["sha256"])
        elif kind == "warning":
            self.warnings.append(event["text"])


class Trainee:
    """One training process, started by its ``with`` block; leaving the block ends it, whatever happened.

    Args:
        command: What to run.
        log: Where its stderr goes.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._killed = False
        self._started: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def _process(self) -> subprocess.Popen[str]:
        assert self._started is not None, "a training process is started by its with block"
        return self._started

    def __enter__(self) -> Trainee:
        try:
            with _interrupts_wait(), open(self._log, "wb") as stderr:
                # A session of its own: Ctrl-C reaches the demo alone, which then ends it by its id.
                self._started = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
                )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._started is None:
            return
        if self._started.poll() is None:
            self._started.kill()
        self._started.wait()
        if self._started.stdout is not None:
            self._started.stdout.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """What it reports, as it happens, until it ends.

        Raises:
            SaveError: It ended badly, and not because it was killed from here; the message has the end of its log.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # a killed process may leave half a line
                yield json.loads(line)
        code = self._process.wait()
        if code != 0 and not self._killed:
            tail = self._log.read_text(errors="replace").strip()[-2000:]
            raise SaveError(f"the training process ended with code {code}: {tail or 'it said nothing'}", hint=f"its log is {self._log}")

    def kill(self) -> None:
        """SIGKILL: no handler runs, no buffer is written out."""
        self._killed = True
        self._process.send_signal(signal.SIGKILL)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Holds Ctrl-C back until the block is over: one in the middle of starting a process would leave a child that nobody knows."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (None, signal.SIG_IGN):
        yield  # only the main thread is interrupted, and nobody is where the shell started it in the background
        return
    waiting = []
    before = signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        raise KeyboardInterrupt
