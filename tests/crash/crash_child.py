"""A trainer to be killed: saves deterministic states through the tiers and prints what was acknowledged, one JSON line each.

python crash_child.py '{"tiers": [...], "steps": 3, "nbytes": 3000000, "sync": true}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import tierstore


def state_of(step: int, nbytes: int) -> dict[str, Any]:
    """The state that step `step` has, to the last bit."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn((nbytes // 4 // 64, 64), generator=generator)
    return {"model": {"weight": weight, "half": weight[:16].to(torch.bfloat16)}, "step": step, "rng": generator.get_state()}


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    plan = json.loads(sys.argv[1])
    with tierstore.open(plan["tiers"], run="crash") as store:
        resumed = store.resume()
        first = resumed.step + 1 if resumed else 1
        say(event="resumed", step=first - 1)
        for step in range(first, first + plan["steps"]):
            ticket = store.save(step, state_of(step, plan["nbytes"]))
            say(event="saving", step=step)
            for level in ("staged", "committed", *plan.get("wait", [])):
                ticket.on(level, lambda event: say(event=event.level, step=event.attempt.step))
            if plan["sync"]:
                ticket.wait("durable", timeout=60)
        store.sync(timeout=60)
    say(event="end")


if __name__ == "__main__":
    main()
