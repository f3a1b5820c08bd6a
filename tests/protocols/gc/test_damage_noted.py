"""Damage that a verify or a load finds is noted in the log: no tier drops its good copy because a damaged one seems to stand."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gc_kit import World, policy_of, run
from tiers_kit import Hooked, flip, path_of

from tierstore.errors import AccessError, TemporaryError
from tierstore.names import OBJECTS, Attempt, shard_name
from tierstore.tiers import leased
from tierstore.tiers.gc.reports import CollectReport
from tierstore.tiers.leased import Leases
from tierstore.tiers.log import read_log
from tierstore.tiers.log_facts import fold
from tierstore.tiers.reads import Want
from tierstore.tiers.repair import repair
from tierstore.tiers.tier import make_descriptor
from tierstore.tiers.verify import verify

SHARD = shard_name(0, 1)
KEEP_ONE_ON_NODE = policy_of({"last": 9}, tiers={"node": {"keep": [{"last": 1}]}})


@pytest.fixture(autouse=True)
def notes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing gives up a note that takes 5 s: so long a machine may stand still."""
    monkeypatch.setattr(leased, "_RELEASE_S", 240.0)


async def world_in(folder: Path, **options: Any) -> tuple[World, Attempt]:
    """Steps 1 and 2 on the node and on the authority; the node is to keep the newer one only."""
    world = World(folder, policy=KEEP_ONE_ON_NODE, names=("node", "shared"), **options)
    for tier in world.tiers:
        await make_descriptor(tier, world.tiers.store_id)
    old, _ = await world.save(1, 2, near=True)
    return world, old


async def noted(world: World, attempt: Attempt) -> set[tuple[str, str]]:
    return set(fold(await read_log(world.tiers.authority.storage, attempt)).quarantined)


def leases_of(world: World) -> Leases:
    return Leases(world.tiers, world.clock, lambda _: 600.0)


async def load(world: World, attempt: Attempt, leases: Leases, *, first: str = "shared") -> None:
    """Reads all of a checkpoint, from the tier `first` before the others."""
    info = await world.info(attempt)
    order = sorted(world.tiers, key=lambda tier: tier.name != first)
    leases._tiers = replace(world.tiers, tiers=tuple(order))
    replica = await leases.open(info, objects=True)
    nbytes = replica.index.file_nbytes(SHARD)
    await replica.read([Want(file=SHARD, offset=0, buffer=memoryview(bytearray(nbytes)))])
    replica.let_go()


def node_keeps(world: World, attempt: Attempt, report: CollectReport) -> None:
    assert report.freed == ()
    assert SHARD in "".join(world.files("node", attempt))


def damage(world: World, attempt: Attempt, how: str, file: str = SHARD) -> None:
    path = path_of(world.tiers, "shared", attempt, file)
    if how == "flip":
        flip(path)
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-7])


def test_without_damage_the_node_drops_its_copy(tmp_path: Path) -> None:
    async def work() -> None:
        world, old = await world_in(tmp_path)
        assert (await verify(world.tiers, "run", level="full", clock=world.clock, note_damage=True)).findings == ()
        leases = leases_of(world)
        await load(world, old, leases)
        await leases.close()
        assert await noted(world, old) == set()
        assert [(f.attempt, f.tier) for f in (await world.collect()).freed] == [(old, "node")]

    run(work())


@pytest.mark.parametrize("how", ["flip", "missing", "short"])
def test_what_verify_found_damaged_lets_no_other_copy_go(tmp_path: Path, how: str) -> None:
    async def work() -> None:
        world, old = await world_in(tmp_path)
        damage(world, old, how)
        report = await verify(world.tiers, "run", level="full", clock=world.clock)
        assert await noted(world, old) == set()
        for _ in range(2):
            assert (await verify(world.tiers, "run", level="full", clock=world.clock, note_damage=True)).findings == report.findings
        assert await noted(world, old) == {("shared", SHARD)}
        assert [r.kind for r in await read_log(world.tiers.authority.storage, old)] == ["committed", "quarantined"]
        node_keeps(world, old, await world.collect())
        assert (await world.catalog()).latest() is not None
        assert (await repair(world.tiers, "run", clock=world.clock)).proved == ((old, "shared"),)
        assert [(f.attempt, f.tier) for f in (await world.collect()).freed] == [(old, "node")]

    run(work())


@pytest.mark.parametrize(("how", "file"), [("flip", SHARD), ("missing", SHARD), ("short", SHARD), ("flip", OBJECTS), ("missing", OBJECTS)])
def test_what_a_load_found_damaged_lets_no_other_copy_go(tmp_path: Path, how: str, file: str) -> None:
    async def work() -> None:
        world, old = await world_in(tmp_path)
        damage(world, old, how, file)
        leases = leases_of(world)
        await load(world, old, leases)
        await load(world, old, leases)
        await leases.close()
        assert await noted(world, old) == {("shared", file)}
        assert [r.kind for r in await read_log(world.tiers.authority.storage, old)] == ["committed", "quarantined"]
        node_keeps(world, old, await world.collect())

    run(work())


def test_a_load_waits_for_no_note_and_fails_with_none(tmp_path: Path) -> None:
    """The authority takes the record only after the load has returned; one that takes none costs no load either."""
    gate = asyncio.Event()
    refuse: list[Exception] = []

    async def hook(operation: str, path: str) -> None:
        if operation == "create" and path.endswith("000001.json"):
            await gate.wait()
            if refuse:
                raise refuse.pop()

    async def work() -> None:
        world, old = await world_in(tmp_path, wrap={"shared": lambda inner: Hooked(inner, hook)})
        damage(world, old, "flip")
        leases = leases_of(world)
        refuse.append(AccessError("it is read-only", hint="none"))
        await load(world, old, leases)
        assert await noted(world, old) == set()
        gate.set()
        await leases.close()
        assert (await noted(world, old), refuse) == (set(), [])
        await load(world, old, leases)
        await leases.close()
        assert await noted(world, old) == {("shared", SHARD)}

    run(work())


@pytest.mark.parametrize("error", [TemporaryError, AccessError, None])
def test_what_proves_no_damage_is_not_noted(tmp_path: Path, error: type[Exception] | None) -> None:
    """A tier that does not answer or refuses; and one that is only not mounted: there no file is, and no descriptor either."""
    failing = False

    async def hook(operation: str, path: str) -> None:
        if failing and error is not None and operation in ("read", "read_into") and path.endswith(SHARD):
            raise error("not now", hint="none")  # type: ignore[call-arg]

    async def work() -> None:
        nonlocal failing
        world, old = await world_in(tmp_path, wrap={"shared": lambda inner: Hooked(inner, hook)})
        leases = leases_of(world)
        failing = True
        if error is None:
            damage(world, old, "missing")
            (tmp_path / "shared" / "tierstore.json").unlink()
        await load(world, old, leases)
        await leases.close()
        assert await noted(world, old) == set()

    run(work())


def test_a_node_s_own_damage_is_not_noted(tmp_path: Path) -> None:
    async def work() -> None:
        world, old = await world_in(tmp_path)
        flip(path_of(world.tiers, "node", old, SHARD))
        leases = leases_of(world)
        await load(world, old, leases, first="node")
        await leases.close()
        assert (await verify(world.tiers, "run", level="full", clock=world.clock, note_damage=True)).damage != ()
        assert await noted(world, old) == set()

    run(work())


def test_what_verify_can_not_note_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def hook(operation: str, path: str) -> None:
        if operation == "create" and path.endswith("000001.json"):
            raise AccessError("it is read-only", hint="none")

    async def work() -> None:
        world, old = await world_in(tmp_path, wrap={"shared": lambda inner: Hooked(inner, hook)})
        for attempt in (old, (await world.catalog()).checkpoints[-1].attempt):
            damage(world, attempt, "flip")
        with caplog.at_level(logging.WARNING, logger="tierstore.tiers.verify"):
            assert len((await verify(world.tiers, "run", level="full", clock=world.clock, note_damage=True)).damage) == 2

    run(work())
    (warned,) = [r for r in caplog.records if r.name == "tierstore.tiers.verify"]
    assert "can't be noted" in warned.message
    assert "read-only" in warned.message
