"""A trainer to be killed: saves deterministic states through the tiers and prints what was acknowledged, one JSON line each.

The harness forks it from a server that has imported torch, and tells it where to die.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from fork_kit import set_out

import tierstore


def state_of(step: int, nbytes: int) -> dict[str, Any]:
    """The state that step `step` has, to the last bit."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn((nbytes // 4 // 64, 64), generator=generator)
    return {"model": {"weight": weight, "half": weight[:16].to(torch.bfloat16)}, "step": step, "rng": generator.get_state()}


def say(**facts: Any) -> None:
    os.write(1, (json.dumps(facts) + "\n").encode())  # at once: the background thread says things too


def train(plan: Mapping[str, Any]) -> None:
    with tierstore.open(plan["tiers"], run="crash") as store:
        resumed = store.resume()
        first = resumed.step + 1 if resumed else 1
        say(event="resumed", step=first - 1)
        for step in range(first, first + plan["steps"]):
            ticket = store.save(step, state_of(step, plan["nbytes"]))
            say(event="saving", step=step)
            for level in ("staged", "committed"):
                ticket.on(level, lambda event: say(event=event.level, step=event.attempt.step))
            if plan["sync"]:
                ticket.wait("durable", timeout=200)
        store.sync(timeout=200)
    say(event="end")


def main(plan: Mapping[str, Any], environment: Mapping[str, str], output: Connection, errors: str) -> None:
    """The process: what it prints goes to `output`, its complaints to the file `errors`."""
    os.dup2(output.fileno(), 1)
    set_out(environment, errors)
    torch.set_num_threads(1)
    train(plan)
