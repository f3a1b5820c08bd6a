"""A trainer to be killed: saves deterministic states through the tiers, and prints each level as it is reached, one JSON line each.

python trainer_child.py '{"config": {...}, "steps": [1, 2], "nbytes": 20000000}'
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


def main() -> None:
    plan = json.loads(sys.argv[1])
    with tierstore.open(plan["config"]) as store:
        for step in plan["steps"]:
            ticket = store.save(step, state_of(step, plan["nbytes"]))
            for level in ("staged", "committed", "durable"):
                ticket.on(level, lambda event: print(json.dumps({"event": event.level, "step": event.attempt.step}), flush=True))


if __name__ == "__main__":
    main()
