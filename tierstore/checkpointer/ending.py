"""The end of a loop, within the deadline where a signal asks for it: the last save, and draining."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from tierstore.checkpointer.stopping import Answer
from tierstore.errors import DeadlineError, RankError, SaveError, UsageError, reason_of
from tierstore.preemption import Preemption
from tierstore.store import Store
from tierstore.units import parse_duration

__all__ = ["Ending", "OnPreempt", "seconds_of"]

log = logging.getLogger(__name__)

OnPreempt = Literal["save", "finish", "abandon"]
_LOOK_S = 0.1


def seconds_of(deadline: float | str) -> float:
    """Reads a deadline: seconds, or a duration.

    Raises:
        UsageError: It is neither, or not positive.
    """
    found = parse_duration(deadline) if isinstance(deadline, str) else float(deadline)
    if not found > 0:
        raise UsageError(f"deadline is {deadline!r}", hint="give seconds, or a duration such as '25s'")
    return found


class Ending:
    """What is done when the machine is about to be taken away.

    Args:
        store: The store.
        signals: What came.
        policy: What to do with the step, and with the saves under way.
        deadline_s: From the signal on, in seconds.
    """

    def __init__(self, store: Store, signals: Preemption, *, policy: OnPreempt, deadline_s: float) -> None:
        self._store, self._signals = store, signals
        self._policy = policy
        self.deadline_s = deadline_s
        self._by_s: float | None = None
        self.stopped_by = ""

    def stop(self, answer: Answer, step: int, prepare: Callable[[], Callable[[], object]]) -> bool:
        """Answers a request to stop, on all ranks after the same step; returns whether the step was saved.

        Args:
            answer: What the ranks agreed on.
            step: The step.
            prepare: Returns the call that saves the step; called only if it is to be saved.
        """
        name = f"{answer.request.name} on rank {answer.rank}" if self._store.world_size > 1 else answer.request.name
        self.stopped_by = answer.request.name
        self._begin(answer.request.at_s)
        if answer.alone:
            log.error("%s: not all ranks came to a step within %g s, so step %d is not saved", name, self.deadline_s, step)
            return False
        saved = False
        if self._policy == "save":
            log.warning("%s: step %d is saved, and training stops; %.1f s are left", name, step, self._left_s())
            saved = self._save_in_time(step, prepare())
        else:
            log.warning("%s: training stops after step %d without a save (on_preempt=%r)", name, step, self._policy)
        if self._policy != "abandon":
            self.in_time(self._store.sync)
        return saved

    def in_time(self, call: Callable[[], object]) -> bool:
        """Calls what may wait for tiers or ranks: a signal to stop that comes meanwhile limits it. Returns whether it ended by itself.

        Raises:
            DeadlineError: Only where no signal came.
        """
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended,), name="tierstore-hurry", daemon=True)
        watcher.start()
        try:
            call()
            return True
        except DeadlineError as error:
            if self._by_s is None:
                raise
            log.error("the deadline of %g s is over: %s", self.deadline_s, error)
            return False
        finally:
            ended.set()
            watcher.join()

    # ---- inside

    def _save_in_time(self, step: int, save: Callable[[], object]) -> bool:
        """A save may wait for memory or for other ranks, longer than there is time: it is made on a thread that nobody waits for then."""
        failures: list[BaseException] = []
        done = threading.Event()
        if (agreement := self._store.agreement) is not None:
            agreement.deadline_s = max(self._left_s(), 1.0)

        def work() -> None:
            for last_try in (False, True):
                try:
                    save()
                    done.set()
                    return
                except (SaveError, RankError) as error:  # an earlier save's failure is told once: this one has not begun yet
                    failures.append(error)
                    if not last_try:
                        log.error("%s", error)
                except BaseException as error:  # noqa: BLE001 - boundary of the thread: told below
                    failures.append(error)
                    return

        thread = threading.Thread(target=work, name="tierstore-last-save", daemon=True)
        thread.start()
        thread.join(max(self._left_s(), 0.0))
        if done.is_set():
            return True
        why = "the save did not begin in time" if thread.is_alive() else reason_of(failures[-1])
        log.error(
            "run=%s step %d is not saved: %s. The next start resumes from the newest committed checkpoint", self._store.run, step, why
        )
        return False

    def _begin(self, at_s: float) -> None:
        self._by_s = at_s + self.deadline_s
        self._store.hurry(0.0 if self._policy == "abandon" else self._left_s())

    def _left_s(self) -> float:
        return 0.0 if self._by_s is None else self._by_s - time.monotonic()

    def _watch(self, ended: threading.Event) -> None:
        while self._by_s is None and not ended.wait(_LOOK_S):
            request = self._signals.requested
            if request is not None and request.stop:
                log.warning("%s: what is not done in %g s is left to the next process", request.name, self.deadline_s)
                self._begin(request.at_s)
