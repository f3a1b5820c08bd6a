"""Publishing: a thread of its own that writes pointers once their saves are committed, and removes old ones after newer are there."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierstore.errors import DeadlineError, SaveError, TierStoreError, reason_of
from tierstore.integrations.lightning_parts.pointers import Pointer
from tierstore.tiers.ticket import Ticket

__all__ = ["Publisher"]

log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""How often a wait for a commit looks whether it was told to end, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Publish:
    ticket: Ticket
    pointers: Mapping[str, Pointer]
    then: Callable[[], None] | None


_Item = _Publish | str | Callable[[], None]
"""Pointers to write, a path to remove, or something to call."""


class Publisher:
    """Works off pointers and removals in the order in which they were asked for.

    A removal waits until everything that was saved before it is committed; where that failed, until a later save is
    (https://github.com/Lightning-AI/pytorch-lightning/issues/1150).

    Args:
        write: Writes a pointer at a path.
        remove: Removes what is at a path.
    """

    def __init__(self, *, write: Callable[[str, Pointer], None], remove: Callable[[str], None]) -> None:
        self._write = write
        self._remove = remove
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._given_up = False
        self._held: list[str] = []
        self._last_failed = False
        self._error: SaveError | None = None
        self._thread: threading.Thread | None = None

    def publish(self, ticket: Ticket, pointers: Mapping[str, Pointer], *, then: Callable[[], None] | None = None) -> None:
        """Writes the pointers, then calls `then`, once the ticket's save is committed."""
        self._put(_Publish(ticket=ticket, pointers=dict(pointers), then=then))

    def remove(self, path: str) -> None:
        """Removes what is at `path` once everything that was saved so far is committed."""
        self._put(path)

    def call(self, work: Callable[[], None]) -> None:
        """Calls `work` on this thread, in its turn."""
        self._put(work)

    def pending(self, path: str) -> bool:
        """Whether a pointer is to be written at `path`."""
        with self._changed:
            return any(isinstance(item, _Publish) and path in item.pointers for item in self._queue)

    def settle(self, path: str, timeout_s: float) -> None:
        """Returns when nothing is to be written at `path` any more.

        Raises:
            DeadlineError: Not within `timeout_s` seconds.
        """
        end = time.monotonic() + timeout_s
        while self.pending(path):
            if time.monotonic() >= end:
                raise DeadlineError(
                    f"the save for {path} is not committed after {timeout_s:g} s",
                    hint="`tierstore status` says which tier it waits for; the save goes on, and the pointer comes when it is committed",
                    path=path,
                )
            with self._changed:
                self._changed.wait(_LOOK_S)

    def flush(self, timeout_s: float) -> bool:
        """Returns when all is done, or after `timeout_s` seconds; whether all is done."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, max(0.0, deadline - time.monotonic()))

    def give_up(self, timeout_s: float) -> None:
        """Waits for no commit any more: for the end of a store that could not drain."""
        self._given_up = True
        try:
            self.flush(timeout_s)
        finally:
            self._given_up = False

    def raise_error(self) -> None:
        """Raises the first failure to write a pointer that was not raised yet."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def held_back(self) -> list[str]:
        """Paths that were to be removed, and stay because the save that was to replace them failed."""
        with self._changed:
            return list(self._held)

    def _put(self, item: _Item) -> None:
        with self._changed:
            self._queue.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tierstore-lightning", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        """Ends when the queue is empty; `_put` begins anew."""
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    return
                item = self._queue[0]  # it stays in sight of `pending` until it is done
            try:
                self._do(item)
            except Exception as error:  # noqa: BLE001 boundary: file systems raise anything; the next save or teardown raises it
                self._note(item, error)
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _do(self, item: _Item) -> None:
        if isinstance(item, str):
            self._held.append(item)
            if not self._last_failed:
                self._remove_held()
            return
        if not isinstance(item, _Publish):
            item()
            return
        if not self._committed(item.ticket):  # the store tells of it; what it was to replace stays
            self._last_failed = True
            log.error("step=%d is not committed: no pointer is written at %s", item.ticket.attempt.step, ", ".join(item.pointers))
            return
        self._last_failed = True
        for path, pointer in item.pointers.items():
            self._write(path, pointer)
            log.debug("step=%d pointer=%s", pointer.step, path)
        self._last_failed = False
        self._held = [path for path in self._held if path not in item.pointers]
        self._remove_held()
        if item.then is not None:
            item.then()

    def _committed(self, ticket: Ticket) -> bool:
        while True:
            try:
                ticket.wait("committed", timeout=_LOOK_S)
                return True
            except DeadlineError:
                if self._given_up:
                    return False
            except SaveError as error:
                log.error("step=%d %s", ticket.attempt.step, error.message)
                return False

    def _remove_held(self) -> None:
        held, self._held = self._held, []
        for path in held:
            self._remove(path)

    def _note(self, item: _Item, error: Exception) -> None:
        if not isinstance(item, _Publish):  # a pointer, or a lease, too many does no harm
            log.error("%s: %s", f"{item} could not be removed" if isinstance(item, str) else "a lease could not be ended", reason_of(error))
            return
        what = f"the pointer {', '.join(item.pointers)} could not be written"
        log.error("%s: %s", what, reason_of(error))
        step = item.ticket.attempt.step
        with self._changed:
            if self._error is None:
                self._error = SaveError(
                    f"step {step} is committed, but {what}: {reason_of(error)}",
                    hint=error.hint if isinstance(error, TierStoreError) else "resume with ckpt_path='@latest'; mend the path's folder",
                    step=step,
                )
                self._error.__cause__ = error
