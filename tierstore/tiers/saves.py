"""The worker's own saves: the queue of images with its backlog rule, the tickets, and the errors that wait to be raised."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from tierstore.errors import ClosedError, DeadlineError, SaveError, TierStoreError
from tierstore.names import Attempt
from tierstore.storage.sources import BytesSource
from tierstore.tiers.jobs import SaveJob, WorkerOptions
from tierstore.tiers.ticket import Ticket

__all__ = ["Save", "SaveQueue", "closed_before_written", "closed_on_the_way", "save_error"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Save:
    """One save on its way: the job, and the ticket that its caller holds."""

    job: SaveJob
    ticket: Ticket
    writing: bool = False
    """Its image is being written now: it can't be skipped."""
    dropped: bool = False
    hidden: bool = False
    """A lane saw that it expired."""
    released: bool = False
    reason: str = "its turn"
    refused: str = ""
    """What each tier said when it was last offered to all of them; empty while it was not refused by all."""
    failing_since: float | None = None
    """When every tier refused it for the first time, in seconds of `time.monotonic`; None while none did."""
    reported: str = ""

    def release(self) -> None:
        """Frees the image, and forgets all that is large: a save may wait for a dead bucket for days."""
        if not self.released:
            self.released = True
            release = self.job.release
            self.job = replace(self.job, shard=_GONE, tensors=(), objects=b"", facts={}, release=_nothing)
            release()


def _nothing() -> None:
    """There is nothing left to release."""


_GONE = BytesSource(b"")


class SaveQueue:
    """Images in memory, oldest first, bounded in bytes. Thread-safe: callers put, the event loop takes.

    Args:
        options: Rule and bound.
        wake: Called after each change that the taker should look at.
    """

    def __init__(self, options: WorkerOptions, wake: Callable[[], None]) -> None:
        self._options = options
        self._wake = wake
        self._changed = threading.Condition()
        self._queue: deque[Save] = deque()
        self._errors: list[TierStoreError] = []
        self._told: set[str] = set()
        self._skipped: list[tuple[SaveJob, SaveError]] = []
        self._closed = False
        self.in_flight_nbytes = 0
        self.peak_nbytes = 0

    # ---- for callers

    def make_room(self, nbytes: int, *, timeout_s: float | None = None) -> None:
        """Returns when an image of `nbytes` bytes fits into the bound, by the backlog rule.

        Raises:
            DeadlineError: It does not fit within `timeout_s` seconds, or no tier has taken the saves in the way for
                `WorkerOptions.patience_s`; names them and the reason.
            ClosedError: The worker was closed meanwhile.
        """
        with self._changed:
            self._make_room(nbytes, timeout_s)

    def put(self, save: Save, *, timeout_s: float | None = None) -> None:
        """Takes a save in, when its image fits; errors as `make_room`."""
        with self._changed:
            self._make_room(save.job.nbytes, timeout_s)
            self._queue.append(save)
            self.in_flight_nbytes += save.job.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.in_flight_nbytes)
        self._wake()

    def close(self) -> None:
        """Lets no more saves in; callers that wait get ClosedError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def told(self, attempt: Attempt) -> None:
        """Whoever saved `attempt` got its failure from another call: `raise_errors` passes it over, also where it is yet to be surfaced."""
        with self._changed:
            self._told.add(attempt.save_id)

    def raise_errors(self) -> None:
        """Raises what went wrong in the background since the last call, each error once: the first one, and logs the others.

        Raises:
            SaveError: Its ``__cause__`` is the reason.
        """
        with self._changed:
            errors, self._errors = [error for error in self._errors if error.context.get("save_id") not in self._told], []
        if not errors:
            return
        for further in errors[1:]:
            log.error("reported with an earlier error: %s", further.message)
        raise errors[0]

    def surface(self, error: TierStoreError) -> None:
        """Keeps an error for the caller's next call, or only logs it, as the configuration says."""
        log.error("%s", error.message)
        if self._options.on_error == "raise":
            with self._changed:
                self._errors.append(error)

    def failing_s(self) -> float:
        """For how long no tier has taken the image that is to be written, in seconds; those behind it wait for it. 0 if one did."""
        with self._changed:
            return self._failing_s()

    # ---- for the taker

    def waiting(self) -> list[Save]:
        """The saves whose image is in memory, oldest first."""
        with self._changed:
            return list(self._queue)

    def writing(self) -> bool:
        """Whether an image is being written now; not while one waits to be tried again."""
        with self._changed:
            return any(save.writing for save in self._queue)

    def take(self) -> Save | None:
        """The oldest save, marked as being written; it stays in the queue until `finish`."""
        with self._changed:
            if not self._queue:
                return None
            self._queue[0].writing = True
            return self._queue[0]

    @property
    def has_skipped(self) -> bool:
        with self._changed:
            return bool(self._skipped)

    def take_skipped(self) -> list[tuple[SaveJob, SaveError]]:
        """Saves that were skipped since the last call, whose other ranks are to hear of it."""
        with self._changed:
            taken, self._skipped = self._skipped, []
        return taken

    def yield_turn(self, save: Save) -> None:
        """The write failed and will be tried again: until then the save may be skipped."""
        with self._changed:
            save.writing = False
            if save.failing_since is None:
                save.failing_since = time.monotonic()
            self._changed.notify_all()

    def resume_turn(self, save: Save) -> bool:
        """Takes the turn again; False if the save was skipped meanwhile."""
        with self._changed:
            save.writing = not save.dropped
            return save.writing

    def finish(self, save: Save) -> None:
        """The image is durable, or given up: its memory is free."""
        with self._changed:
            if save in self._queue:
                self._queue.remove(save)
                self.in_flight_nbytes -= save.job.nbytes
            self._changed.notify_all()
        save.release()

    # ---- inside, under the lock

    def _make_room(self, nbytes: int, timeout_s: float | None) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._closed:
                raise _closed()
            if self._options.backlog == "skip_oldest":  # each time: the one that was being written may have been refused meanwhile
                while not self._fits(nbytes) and (victim := next((s for s in self._queue if not s.writing), None)) is not None:
                    self._skip(victim)
            if self._fits(nbytes):
                return
            left = None if end is None else end - time.monotonic()
            # With skip_oldest the image in the way is skipped as soon as it is refused again: nobody has to be told.
            patience = None if self._options.backlog == "skip_oldest" else self._options.patience_s - self._failing_s()
            stuck = patience is not None and patience <= 0
            if stuck or (left is not None and left <= 0):
                raise self._no_room(nbytes, timeout_s, stuck=stuck)
            self._changed.wait(min((s for s in (left, patience) if s is not None), default=None))

    def _no_room(self, nbytes: int, timeout_s: float | None, *, stuck: bool) -> DeadlineError:
        steps = ", ".join(str(s.job.attempt.step) for s in self._queue)
        if stuck:
            return DeadlineError(
                f"no room for an image of {nbytes} bytes: the saves of steps {steps} are still in memory, and no tier has taken "
                f"step {self._queue[0].job.attempt.step} for {self._options.patience_s:g} s: {self._queue[0].reason}",
                hint="bring a tier back or free space on one: they are tried again all the time; save.patience is how long a save waits",
            )
        return DeadlineError(
            f"no room for an image of {nbytes} bytes within {timeout_s:g} s: the saves of steps {steps} are still in memory",
            hint="save less often, raise io.max_inflight, or set save.backlog: skip_oldest",
        )

    def _failing_s(self) -> float:
        since = self._queue[0].failing_since if self._queue else None
        return 0.0 if since is None else time.monotonic() - since

    def _fits(self, nbytes: int) -> bool:
        return self.in_flight_nbytes == 0 or self.in_flight_nbytes + nbytes <= self._options.max_inflight

    def _skip(self, save: Save) -> None:
        self._queue.remove(save)
        self.in_flight_nbytes -= save.job.nbytes
        save.dropped = True
        save.release()
        attempt = save.job.attempt
        error = SaveError(
            f"step {attempt.step} of run {attempt.run!r} was skipped: newer saves came before it was written (backlog: skip_oldest)",
            hint="save less often, raise io.max_inflight, or set save.backlog: block",
            run=attempt.run,
            step=attempt.step,
        )
        log.warning("%s", error.message)
        save.ticket.fail(error)
        if save.job.world_size > 1:
            self._skipped.append((save.job, error))
            self._wake()


def save_error(save: Save, where: str, reason: TierStoreError) -> SaveError:
    """A background failure as its caller gets it: names step and tier, and keeps the reason as its cause."""
    attempt = save.job.attempt
    error = SaveError(
        f"step {attempt.step} of run {attempt.run!r}: {where} failed: {type(reason).__name__}: {reason.message}",
        hint=reason.hint,
        run=attempt.run,
        step=attempt.step,
        save_id=attempt.save_id,
    )
    error.__cause__ = reason
    return error


def closed_before_written() -> ClosedError:
    """Why a save that is on no tier yet will get nowhere."""
    return ClosedError("the worker was closed before this save was written", hint="give close() a longer deadline")


def closed_on_the_way() -> ClosedError:
    """Why nobody here hears any more of a save that lies on a tier, but not yet on all that should have it."""
    return ClosedError("the worker was closed before this save was everywhere", hint="the next process or `tierstore sync` goes on with it")


def _closed() -> ClosedError:
    return ClosedError("the background worker is closed", hint="open the store again with tierstore.open(...)")
