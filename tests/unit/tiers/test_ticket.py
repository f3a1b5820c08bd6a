"""The ticket of a save: truthful levels, callbacks once each, errors to whoever waits (CASES 15, 16, 50)."""

from __future__ import annotations

import logging
import threading

import pytest

from tierstore.clock import SystemClock
from tierstore.errors import DeadlineError, SaveError, TierFullError, UsageError
from tierstore.names import Attempt, new_save_id
from tierstore.tiers.ticket import Ticket, TicketEvent

ATTEMPT = Attempt(run="run", step=7, save_id=new_save_id(SystemClock().now()))


def ticket() -> Ticket:
    return Ticket(ATTEMPT, tiers=("node", "object"))


def test_levels_are_reached_once_and_in_the_order_of_their_events() -> None:
    made = ticket()
    assert not made.staged
    made.reach("staged", "node")
    made.reach("node")
    assert made.staged
    assert made.done("node")
    assert not made.done("committed")
    assert [e.level for e in made.events] == ["staged", "node"]
    made.wait("staged", timeout=0)


def test_a_callback_runs_once_and_at_once_when_it_comes_late() -> None:
    made = ticket()
    seen: list[TicketEvent] = []
    made.on("committed", seen.append)
    made.on("object", seen.append)
    made.reach("committed")
    made.reach("committed")
    made.on("committed", seen.append)
    assert [(e.level, e.attempt) for e in seen] == [("committed", ATTEMPT)] * 2


def test_an_error_in_a_callback_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made = ticket()
    seen: list[str] = []

    def broken(event: TicketEvent) -> None:
        raise RuntimeError("the caller's own fault")

    made.on("committed", broken)
    made.on("committed", lambda event: seen.append(event.level))
    with caplog.at_level(logging.ERROR):
        made.reach("committed")
        made.on("committed", broken)
    assert seen == ["committed"]
    assert [r.getMessage() for r in caplog.records] == ["run=run step=7 the callback for committed failed"] * 2


def test_a_waiter_in_another_thread_is_woken() -> None:
    made = ticket()
    waiter = threading.Thread(target=made.wait, args=("durable",), daemon=True)
    waiter.start()
    made.reach("committed", "durable")
    waiter.join(120)
    assert not waiter.is_alive()


def test_a_failed_save_raises_its_error_to_everyone_who_waits_for_what_it_did_not_reach() -> None:
    made = ticket()
    made.reach("staged")
    reason = TierFullError("tier 'node' is full", hint="free space")
    made.fail(reason)
    made.fail(RuntimeError("a second error does not hide the first"))
    made.wait("staged")
    for level in ("committed", "durable", "object"):
        with pytest.raises(SaveError, match=r"step 7.*TierFullError: tier 'node' is full") as caught:
            made.wait(level)
        assert caught.value.__cause__ is reason
        assert caught.value.hint == "free space"
    assert (made.failure, made.errors) == (reason, (reason,))


def test_one_level_can_fail_alone_and_be_mended_later() -> None:
    made = ticket()
    made.fail(TierFullError("overtaken by a newer checkpoint"), levels=["object"])
    with pytest.raises(SaveError, match="overtaken"):
        made.wait("object")
    made.reach("committed")
    made.wait("committed")
    made.reach("object")
    made.wait("object")
    assert made.failure is None


def test_a_failure_that_is_retried_is_told_and_waited_out() -> None:
    made = ticket()
    made.report("object", TierFullError("bucket quota"))
    assert not made.done("object")
    with pytest.raises(DeadlineError, match="bucket quota"):
        made.wait("object", timeout=0)
    made.reach("object")
    made.wait("object")
    assert [str(e) for e in made.errors] == ["bucket quota"]


def test_a_deadline_names_what_is_pending() -> None:
    made = ticket()
    made.reach("staged")
    with pytest.raises(DeadlineError, match=r"'durable' within 0 s: reached staged, pending committed, durable, node, object"):
        made.wait("durable", timeout=0)


@pytest.mark.parametrize("use", ["wait", "done", "on", "reach", "report", "fail"])
def test_an_unknown_level_is_answered_with_the_known_ones(use: str) -> None:
    made = ticket()
    calls = {
        "wait": lambda: made.wait("pfs"),
        "done": lambda: made.done("pfs"),
        "on": lambda: made.on("pfs", lambda event: None),
        "reach": lambda: made.reach("pfs"),
        "report": lambda: made.report("pfs", ValueError()),
        "fail": lambda: made.fail(ValueError(), levels=["pfs"]),
    }
    with pytest.raises(UsageError, match="'pfs'") as caught:
        calls[use]()
    assert "staged, committed, durable, node, object" in caught.value.hint


def test_callbacks_of_many_threads_each_run_exactly_once() -> None:
    made = ticket()
    counted: list[int] = []
    start = threading.Barrier(9)

    def register(number: int) -> None:
        start.wait(120)
        for _ in range(50):
            made.on("committed", lambda event: counted.append(number))

    threads = [threading.Thread(target=register, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    start.wait(120)
    made.reach("committed")
    for thread in threads:
        thread.join(120)
    assert len(counted) == 8 * 50
