"""At which step all ranks answer a signal that one of them got, without a word between them at any other step.

A signal reaches ranks at different times, or only one of them; but a save is a call that all ranks make at the same step, and a rank that
stops while others are in a collective of the next step leaves them hanging. So they agree on the next step that none of them has passed:

1. Who got a signal writes it down in the rendezvous store (``asked``). A thread of each rank looks there twice a second.
2. A rank that sees it reports how many times it will have called `arrive` when it calls it next, and from then on waits there.
3. Rank 0 takes the largest number for the answer. Who is behind it goes on training until it gets there; nobody is past it.

The rank that is behind has to train on with ranks that have reported too; as they wait at a step that it has yet to reach, or reach the
same one, its collectives find all their partners. The threads talk over a connection of their own, and use no collective.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from tierstore.preemption import Preemption, Request

__all__ = ["Answer", "Stopping"]

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_JOIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What to do at this step, on all ranks."""

    request: Request
    rank: int
    """Who got the signal."""
    alone: bool = False
    """The ranks did not agree in time: a save, which takes all of them, can't be."""


class Stopping:
    """Asked at each step by `arrive`. Of several ranks each has one, made in the same order of calls.

    Args:
        signals: What came to this process.
        place: Where the ranks of a job write to each other (`Agreement.aside`); None: a process alone.
        rank: This process's.
        world_size: How many.
        deadline_s: How long after the signal a rank waits for the others' word.
    """

    def __init__(self, signals: Preemption, place: Any, *, rank: int, world_size: int, deadline_s: float) -> None:
        self._signals = signals
        self._place = place
        self._rank, self._world_size = rank, world_size
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._round = 0
        self._arrived = 0
        self._reported: int | None = None
        self._answer_at: int | None = None
        self._asked: Answer | None = None
        self._ended = threading.Event()
        self._look_now = threading.Event()
        self._thread: threading.Thread | None = None
        if place is not None:
            self._thread = threading.Thread(target=self._watch, name="tierstore-signals", daemon=True)
            self._thread.start()

    def arrive(self) -> Answer | None:
        """This rank has finished a step; returns what all ranks do now, if anything. A save that was asked for counts as taken then."""
        request = self._signals.requested
        if self._place is None:
            if request is not None and not request.stop:
                self._signals.saved()
            return None if request is None else Answer(request=request, rank=self._rank)
        if request is not None:
            self._look_now.set()
        with self._changed:
            self._arrived += 1
            if self._reported is None:
                return None
            answer = self._wait()
            if answer is not None:
                if not (answer.alone or answer.request.stop):
                    self._signals.saved()  # before the thread sees the next round: it would ask there for what is answered here
                self._round, self._reported, self._answer_at, self._asked = self._round + 1, None, None, None
                if answer.request.stop:
                    self._ended.set()
            return answer

    def close(self) -> None:
        self._ended.set()
        self._look_now.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)  # it may hang in a call to a rank 0 that is not to be reached; it ends with the process
            self._thread = None

    # ---- inside

    def _wait(self) -> Answer | None:
        """The answer at this step, or None: the answer's step is a later one. Holds the lock."""
        assert self._asked is not None
        left = self._asked.request.at_s + self._deadline_s - time.monotonic()
        if not self._changed.wait_for(lambda: self._answer_at is not None, max(left, 0.0)):
            return Answer(request=self._asked.request, rank=self._asked.rank, alone=True)
        assert self._answer_at is not None
        return self._asked if self._arrived >= self._answer_at else None

    def _watch(self) -> None:
        """The thread: one look after the other, until the end."""
        said: int | None = None  # the round in which this rank has asked
        while not self._ended.is_set():
            self._look_now.wait(_LOOK_S)
            self._look_now.clear()
            try:
                with self._changed:
                    number, reported, answered = self._round, self._reported, self._answer_at
                request = self._signals.requested
                if request is not None and said != number and reported is None:
                    age_s = time.monotonic() - request.at_s
                    asked = {"rank": self._rank, "name": request.name, "stop": request.stop, "age_s": age_s}
                    if self._place.add(f"{number}/askers", 1) == 1:
                        self._place.set(f"{number}/asked", json.dumps(asked))
                    said = number
                if reported is None:
                    self._report(number)
                elif answered is None:
                    self._hear(number, reported)
            except RuntimeError as error:  # what the rendezvous raises; the launcher is gone, and this process soon
                if not self._ended.is_set():
                    log.warning("signals of other ranks can't be heard of any more: %s", str(error).splitlines()[0][:200])
                return

    def _report(self, number: int) -> None:
        if not self._place.check([f"{number}/asked"]):
            return
        told = json.loads(self._place.get(f"{number}/asked"))
        request = Request(name=told["name"], stop=told["stop"], at_s=time.monotonic() - told["age_s"])
        with self._changed:
            self._asked = Answer(request=request, rank=told["rank"])
            self._reported = self._arrived + 1  # who is within `arrive` now has passed it: no report was made yet
            reported = self._reported
        self._place.set(f"{number}/at/{self._rank}", str(reported))
        self._look_now.set()

    def _hear(self, number: int, reported: int) -> None:
        if self._rank == 0 and not self._place.check([f"{number}/answer"]):
            keys = [f"{number}/at/{rank}" for rank in range(self._world_size)]
            if self._place.check(keys):
                self._place.set(f"{number}/answer", str(max(int(self._place.get(key)) for key in keys)))
        if self._place.check([f"{number}/answer"]):
            answer_at = int(self._place.get(f"{number}/answer"))
            with self._changed:
                if self._round == number:  # else this rank went on alone meanwhile
                    self._answer_at = answer_at
                    self._changed.notify_all()
        else:
            self._ended.wait(0.02)  # somebody waits for this word
            self._look_now.set()
