"""A trainer that does everything at once, to be killed: saves, promotes, prunes, collects, pins, evicts, loads, at random.

It prints one JSON line for each promise that it was given. The test forks it from a server that has imported torch.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

import tierstore
from tierstore.errors import LockedError, NotFoundError, PartialError, RefusedError, TierStoreError
from tierstore.testing.equality import assert_same_state


def state_of(step: int) -> dict[str, Any]:
    """The state that step `step` has, to the last bit; some tens of kilobytes."""
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn((100, 64), generator=generator), "step": step, "rng": generator.get_state()}


def say(**facts: Any) -> None:
    os.write(1, (json.dumps(facts) + "\n").encode())  # at once: the background thread says things too


def some_step(store: tierstore.Store, dice: random.Random) -> int | None:
    steps = [info.step for info in store.checkpoints()]
    return dice.choice(steps) if steps else None


def act(store: tierstore.Store, dice: random.Random, step: int) -> int:
    """Does one thing; returns the newest step."""
    what = dice.choices(["save", "pin", "unpin", "tag", "evict", "prune", "collect", "load", "undelete"], [8, 2, 1, 1, 1, 2, 3, 2, 1])[0]
    if what == "save":
        step += 1
        ticket = store.save(step, state_of(step), metrics={"loss": dice.random()})
        ticket.on("committed", lambda event: say(event="committed", step=event.attempt.step))
        if dice.random() < 0.3:
            ticket.wait(dice.choice(["staged", "committed", "durable"]), timeout=200)
        return step
    if what == "prune":
        store.retention.prune()
    elif what == "collect":
        store.retention.collect(now=dice.random() < 0.5)
    elif (which := some_step(store, dice)) is None:
        return step
    elif what == "pin":
        store.retention.pin(which, "soak")
        say(event="pinned", step=which)
    elif what == "unpin":
        say(event="unpinned", step=which)
        store.retention.unpin(which, "soak")
    elif what == "tag":
        store.retention.tag(which, ["good"])
    elif what == "evict":
        store.retention.evict(which, dice.choice(["node", "shared", "far"]))
    elif what == "undelete":
        store.retention.undelete(which)
    elif what == "load":
        assert_same_state(store.load(which), state_of(which))
    return step


def main(config: Mapping[str, Any], seed: int, output: Connection, errors: str) -> None:
    """The process: acts until it is killed."""
    os.dup2(output.fileno(), 1)
    fd = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    logging.getLogger("tierstore").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dice = random.Random(seed)
    with tierstore.open(dict(config)) as store:
        resumed = store.resume()
        step = resumed.step if resumed else 0
        if resumed:
            assert_same_state(resumed.state, state_of(step))
        say(event="resumed", step=step)
        for _ in range(100_000):
            try:
                step = act(store, dice, step)
            except (RefusedError, NotFoundError, LockedError) as error:  # too late, the last copy, deleted meanwhile: all as promised
                say(event="refused", what=type(error).__name__)
            except PartialError as error:
                say(event="partial", what=str(error))
            except TierStoreError as error:
                say(event="error", what=f"{type(error).__name__}: {error}")
                raise
