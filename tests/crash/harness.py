"""What the crash tests share: running the child, killing it, and checking the promises on what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tierstore
from tierstore.testing.equality import assert_same_state

sys.path.insert(0, str(Path(__file__).parent))
from crash_child import state_of

CHILD = Path(__file__).parent / "crash_child.py"
NBYTES = 3_000_000


def start_child(tiers: Sequence[Any], *, steps: int, sync: bool, env: Mapping[str, str], nbytes: int = NBYTES) -> subprocess.Popen[str]:
    plan = {"tiers": list(tiers), "steps": steps, "sync": sync, "nbytes": nbytes}
    return subprocess.Popen(
        [sys.executable, str(CHILD), json.dumps(plan)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


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
        store.save(again, state_of(again, nbytes)).wait("durable", timeout=60)
        store.sync(timeout=60)
    names = [t if isinstance(t, dict) else {"uri": t} for t in tiers]
    for tier in names:  # after the next process has synced, every tier alone has every checkpoint
        alone = {**tier, "scope": "shared"}
        with tierstore.open([alone], run="crash") as store:
            assert {c.attempt.step for c in store.checkpoints()} == found | {again}, f"{tier} lacks checkpoints"
            assert_same_state(store.load(again), state_of(again, nbytes))
    return found
