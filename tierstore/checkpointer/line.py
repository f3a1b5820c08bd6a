"""One line at the foot of a terminal: the step, where the last save has got to, what it cost, when the next one is due."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from tierstore.tiers.ticket import Ticket

__all__ = ["Line"]

_PAUSE_S = 0.1


class Line:
    """Written over itself at most ten times a second; nothing at all where the stream is no terminal.

    Args:
        run: The run's name.
        tiers: The names of the tiers, nearest first.
        why: The rule by which saves are due, in words.
        shown: True or False; None: where the stream is a terminal.
        stream: Where to; standard error.
    """

    def __init__(
        self, run: str, tiers: Sequence[str], why: Callable[[], str], *, shown: bool | None = None, stream: IO[str] | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty() if shown is None else shown
        self._run, self._tiers, self._why = run, tuple(tiers), why
        self._total: int | None = None
        self._ticket: Ticket | None = None
        self._drawn_at = 0.0
        self._drawn = False

    def of(self, total: int) -> None:
        """How many steps there will be."""
        self._total = total

    def saved(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def at(self, step: int) -> None:
        """Draws it anew, if it is time to."""
        if not self._shown or (now := time.monotonic()) - self._drawn_at < _PAUSE_S:
            return
        self._drawn_at = now
        self._draw(self.text(step))

    def text(self, step: int) -> str:
        parts = [f"{self._run}  step {step}" + (f"/{self._total}" if self._total is not None else "")]
        if self._ticket is not None:
            there = " ".join(f"{name} {'ok' if self._ticket.done(name) else '…'}" for name in self._tiers)
            trouble = f"  {type(self._ticket.errors[-1]).__name__}" if self._ticket.errors and not self._ticket.done("durable") else ""
            parts.append(f"saved {self._ticket.attempt.step}: {there}{trouble}")
            parts.append(f"kept waiting {1000 * self._ticket.stall_s:.0f} ms")
        parts.append(f"due {self._why().partition(':')[0]}")
        return "  |  ".join(parts)

    def end(self) -> None:
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = False

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[K{text[:width]}")
        self._stream.flush()
        self._drawn = True
