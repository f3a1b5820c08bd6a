"""What the crash tests share: starting the child in milliseconds, killing it, and checking the promises on what it left."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tierstore
from tierstore.testing.equality import assert_same_state

sys.path.insert(0, str(Path(__file__).parent))
import crash_child
from crash_child import state_of
from fork_kit import SERVER

NBYTES = 3_000_000


class Child:
    """A trainer in a process of its own.

    Args:
        tiers: The tiers, nearest first.
        steps: How many steps it saves.
        sync: Whether it waits for each save to be durable before the next.
        env: Environment variables: where to die.
        errors: The file that takes its standard error.
        nbytes: The size of its state, in bytes.
    """

    def __init__(self, tiers: Sequence[Any], *, steps: int, sync: bool, env: Mapping[str, str], errors: Path, nbytes: int = NBYTES) -> None:
        plan = {"tiers": list(tiers), "steps": steps, "sync": sync, "nbytes": nbytes}
        self._errors = errors
        reader, writer = SERVER.Pipe(duplex=False)
        self._process = SERVER.Process(target=crash_child.main, args=(plan, dict(env), writer, str(errors)))
        self._process.start()
        writer.close()  # the child's copy is the only one now: its death ends the output
        self._output = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    def lines(self) -> Iterator[str]:
        """What it prints, line by line, until it is dead."""
        while line := self._output.readline():
            yield line

    def kill(self) -> None:
        self._process.kill()

    def end(self, timeout: float) -> tuple[int | None, str]:
        """Waits for its death, or kills it after `timeout` seconds; returns the exit status and all that `lines` did not give."""
        watchdog = threading.Timer(timeout, self.kill)
        watchdog.start()
        try:
            output = self._output.read()
            self._process.join()
        finally:
            watchdog.cancel()
            self._output.close()
        status = self._process.exitcode
        self._process.close()
        return status, output

    @property
    def errors(self) -> str:
        """Its complaints."""
        return self._errors.read_text() if self._errors.exists() else ""


def events_of(output: str) -> list[dict[str, Any]]:
    """The child's complete lines; a line that the kill cut off is not an acknowledgement."""
    return [json.loads(line) for line in output.split("\n")[:-1]]


def acknowledged(events: Sequence[Mapping[str, Any]], level: str = "committed") -> set[int]:
    return {e["step"] for e in events if e["event"] == level}


def check_promises(tiers: Sequence[Any], acked: set[int], staged: set[int], *, nbytes: int = NBYTES) -> set[int]:
    """Opens what a dead process left, as the next one would, and proves promises 1 to 3 and 6; returns the committed steps."""
    with tierstore.open(tiers, run="crash") as store:
        before = {c.attempt.step for c in store.checkpoints()}
        assert acked <= before, f"acknowledged as committed, but gone: {sorted(acked - before)}"
        resumed = store.resume()
        found = {c.attempt.step for c in store.checkpoints()}
        assert acked | staged <= found, f"staged before the crash, but not adopted: {sorted(staged - found)}"
        if found:
            assert resumed is not None
            assert resumed.step == max(found)
        for step in sorted(found):
            assert_same_state(store.load(step), state_of(step, nbytes))
        again = max(found, default=0) + 1
        store.save(again, state_of(again, nbytes)).wait("durable", timeout=200)
        store.sync(timeout=200)
    names = [t if isinstance(t, dict) else {"uri": t} for t in tiers]
    for tier in names:  # after the next process has synced, every tier alone has every checkpoint
        alone = {**tier, "scope": "shared"}
        with tierstore.open([alone], run="crash") as store:
            assert {c.attempt.step for c in store.checkpoints()} == found | {again}, f"{tier} lacks checkpoints"
            assert_same_state(store.load(again), state_of(again, nbytes))
    return found
