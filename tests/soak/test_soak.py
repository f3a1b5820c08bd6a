"""Saves, promotions, prunes, collections and kill -9 at random, in one store on folders and a real S3 server; promises after each round."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fork_kit import SERVER
from retention_kit import RUN, Truth, check_alone, check_step, files_of_storages
from soak_child import main, state_of

import tierstore
from tierstore.errors import NotFoundError
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.storage.opening import open_storage
from tierstore.storage.posix import PosixStorage
from tierstore.testing.equality import assert_same_state

ROUND_S = 1.5
"""How long a child lives at most after it has told that it goes on, or of the first thing that it did then."""
RETENTION = {
    "keep": [{"last": 2}, {"every": {"steps": 10}}, {"best": {"metric": "loss", "mode": "min"}}, {"tags": ["good"]}],
    "tiers": {"node": {"keep": [{"last": 1}]}, "shared": {"keep": [{"last": 4}]}},
    "protect": {"min_age": "100ms", "min_keep": 2},
    "gc": {
        "undelete_window": "200ms",
        "orphan_grace": "5s",
        "lease_ttl": "2s",
        "max_clock_skew": "50ms",
        "max_delete_fraction": "100%",
    },
}


def config_of(root: Path, bucket: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": 1,
        "run": RUN,
        "tiers": [
            {"name": "node", "uri": str(root / "node"), "scope": "node"},
            {"name": "shared", "uri": str(root / "shared"), "scope": "shared"},
            {"name": "far", "uri": bucket, "scope": "shared", "options": dict(options)},
        ],
        "retention": RETENTION,
    }


class Child:
    """A trainer in a process of its own."""

    def __init__(self, config: Mapping[str, Any], seed: int, errors: Path) -> None:
        self.errors = errors
        reader, writer = SERVER.Pipe(duplex=False)
        self._process = SERVER.Process(target=main, args=(dict(config), seed, writer, str(errors)))
        self._process.start()
        writer.close()
        self._output = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    def lines(self) -> Iterator[str]:
        while line := self._output.readline():
            yield line

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> tuple[int | None, str]:
        output = self._output.read()
        self._process.join()
        self._output.close()
        status = self._process.exitcode
        self._process.close()
        return status, output


def live_for(config: Mapping[str, Any], seed: int, seconds: float, errors: Path, *, told_first: int) -> list[dict[str, Any]]:
    """One life of a trainer: what it was promised until it was killed, `seconds` after it had told of so many things."""
    child = Child(config, seed, errors)
    told = list(itertools.islice(child.lines(), told_first))
    killer = threading.Timer(seconds if told else 0.0, child.kill)
    killer.start()
    status, rest = child.end()
    killer.cancel()
    assert status == -9, f"it ended by itself with {status}: {errors.read_text()[-4000:]}"
    whole = f"{''.join(told)}{rest}".split("\n")[:-1]  # a line that the kill cut off is no promise
    return [json.loads(line) for line in whole]


def storages_of(config: Mapping[str, Any]) -> dict[str, Storage]:
    made: dict[str, Storage] = {}
    for tier in config["tiers"]:
        folder = tier["uri"].startswith("/")
        made[tier["name"]] = (
            PosixStorage(Path(tier["uri"]), durable=False) if folder else open_storage(tier["uri"], options=tier["options"])
        )
    return made


async def look(config: Mapping[str, Any]) -> Truth:
    """The bytes on all tiers, and what each durable tier alone shows of them.

    What a dead trainer had asked of the server may be carried out after its death: nothing counts that was seen while files came and went.
    """
    storages = storages_of(config)
    end = time.monotonic() + 120
    try:
        while True:
            before = [await storage.list("") for storage in storages.values()]
            seen: Truth | Exception
            try:
                seen = Truth(await files_of_storages(storages))
                await check_alone(storages, seen)
            except (NotFoundError, AssertionError) as error:
                seen = error
            if [await storage.list("") for storage in storages.values()] == before:
                if isinstance(seen, Exception):
                    raise seen
                return seen
            assert time.monotonic() < end, "files come and go, though nobody lives"
    finally:
        for storage in storages.values():
            await storage.close()


def last_of(truth: Truth, step: int) -> Attempt:
    """The attempt that a step's number stands for."""
    return max(a for a, facts in truth.facts().items() if a.step == step and facts.committed)


@pytest.mark.s3
@pytest.mark.timeout(3600)
def test_promises_hold_through_saves_prunes_collections_and_kills(
    tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], long_run: bool
) -> None:
    config = config_of(tmp_path, s3_bucket, s3_options)
    seed = int.from_bytes(os.urandom(4), "big") if long_run else 1
    print(f"seed {seed}")
    dice = random.Random(seed)
    committed: set[int] = set()
    pinned: set[int] = set()
    before = asyncio.run(look(config))
    ends = time.monotonic() + (300.0 if long_run else 8.0)
    turn = swept = 0
    while turn < 3 or time.monotonic() < ends or (not swept and turn < 50):
        turn += 1
        # Every second life gets somewhere on a slow machine, too; the others may end in the first thing that they do.
        events = live_for(config, dice.getrandbits(32), dice.uniform(0.1, ROUND_S), tmp_path / "errors", told_first=1 + turn % 2)
        for event in events:
            if event["event"] == "committed":
                committed.add(event["step"])
            elif event["event"] == "pinned":
                pinned.add(event["step"])
            elif event["event"] == "unpinned":
                pinned.discard(event["step"])
        truth = asyncio.run(look(config))
        check_step(before, truth, keeping={last_of(truth, step) for step in pinned}, several=True)
        lost = committed - {attempt.step for attempt, facts in truth.facts().items() if facts.committed}
        assert not lost, f"acknowledged as committed, but there is no such record: {lost}"
        with tierstore.open({key: value for key, value in config.items() if key != "retention"}) as store:
            for info in store.checkpoints()[-4:]:
                assert_same_state(store.load(info.step), state_of(info.step))
        before, swept = truth, len(truth.swept())
        counts = {kind: sum(e["event"] == kind for e in events) for kind in ("committed", "pinned", "refused")}
        print(f"turn {turn}: {counts}, {len(truth.existing())} checkpoints, {swept} swept")
    assert swept, "nothing was ever deleted"
