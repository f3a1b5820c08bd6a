"""kill -9 at random moments, again and again in one store: every acknowledged save loads, bit for bit (PROTOCOLS.md §9.4)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from harness import acknowledged, check_promises, events_of, start_child


@pytest.mark.timeout(3600)
def test_every_acknowledged_save_survives_kill_9(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    tiers = [str(tmp_path / "node"), str(tmp_path / "shared"), {"name": "far", "uri": str(tmp_path / "far"), "scope": "shared"}]
    moments = random.Random(int.from_bytes(os.urandom(4), "big"))
    acked: set[int] = set()
    for turn in range(200 if pytestconfig.getoption("--long") else 5):
        child = start_child(tiers, steps=10_000, sync=False, env={})
        assert child.stdout is not None
        lines: list[str] = []
        while '"saving"' not in (line := child.stdout.readline()):  # it is training now
            assert line, child.communicate()[1]
            lines.append(line)
        delay = moments.uniform(0.0, 1.5)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate(timeout=60)
        events = events_of("".join([*lines, line, rest]))
        acked |= acknowledged(events)
        found = check_promises(tiers, acked, acknowledged(events, "staged"))
        acked |= {max(found, default=0) + 1}  # the save that check_promises made and saw durable
        print(f"turn {turn}: killed {delay:.3f} s into training, {len(acked)} acknowledged steps all load")
