"""kill -9 at random moments, again and again in one store: every acknowledged save loads, bit for bit (PROTOCOLS.md §9.4)."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from harness import Child, acknowledged, check_promises, events_of


@pytest.mark.timeout(3600)
def test_every_acknowledged_save_survives_kill_9(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    tiers = [str(tmp_path / "node"), str(tmp_path / "shared"), {"name": "far", "uri": str(tmp_path / "far"), "scope": "shared"}]
    long_run = pytestconfig.getoption("--long")
    moments = random.Random(int.from_bytes(os.urandom(4), "big") if long_run else 1)
    acked: set[int] = set()
    for turn in range(200 if long_run else 2):
        child = Child(tiers, steps=10_000, sync=False, env={}, errors=tmp_path / "errors")
        lines: list[str] = []
        for line in child.lines():
            lines.append(line)
            if '"saving"' in line:  # it is training now
                break
        else:
            pytest.fail(child.errors)
        delay = moments.uniform(0.0, 0.8)
        time.sleep(delay)
        child.kill()
        status, rest = child.end(60)
        assert status == -9
        events = events_of("".join([*lines, rest]))
        acked |= acknowledged(events)
        found = check_promises(tiers, acked, acknowledged(events, "staged"))
        acked |= {max(found, default=0) + 1}  # the save that check_promises made and saw durable
        print(f"turn {turn}: killed {delay:.3f} s into training, {len(acked)} acknowledged steps all load")
