"""The races of `models/model_gc.py`, with the real code: every storage operation of every actor is a point where another may go on.

For each pair of actors all schedules with one switch that can matter are run, and of those with two a choice (all with ``--long``); and
each actor is stopped for ever at each of its operations. After every run the promises hold, and one more collection leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from retention_kit import (
    AUTHORITY,
    HOUR_S,
    NAMES,
    Truth,
    check_alone,
    check_step,
    client_tiers,
    garbage,
    housekeeping,
    info_of,
    load_whole,
    persist_small,
    policy_of,
    save_id_at,
    save_small,
)
from stepping_kit import START, Call, MemoryStorage, Stage, Step, SteppingLoop, VirtualClock, run_virtually

from tierstore.errors import ConflictError, LockedError, NotFoundError, RefusedError, TierStoreError
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.tiers.commit import commit
from tierstore.tiers.decisions import hold, pin, undelete
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.leases import hold_lease
from tierstore.tiers.log import append, decide_fate
from tierstore.tiers.promote import promote, reconcile
from tierstore.tiers.tier import Tiers

RUN = "run"
POLICY = policy_of({"last": 1}, min_age_s=1.0, undelete_window_s=1.0, orphan_grace_s=HOUR_S, lease_ttl_s=100.0, max_clock_skew_s=1.0)
LATER_S = 10 * HOUR_S
"""When the actors act, after the checkpoints were made: every grace and window has passed."""

World = dict[str, dict[str, bytes]]


def attempt(step: int, number: int = 0) -> Attempt:
    return Attempt(run=RUN, step=step, save_id=save_id_at(START + timedelta(seconds=step), number))


VICTIM, NEWEST, ORPHAN = attempt(1), attempt(9), attempt(5)
AGAIN = Attempt(run=RUN, step=9, save_id=save_id_at(START + timedelta(seconds=LATER_S), 1))


@dataclass(slots=True)
class Client:
    """An actor's own process: its view of the tiers, its clock, its caches."""

    tiers: Tiers
    clock: VirtualClock

    def housekeeping(self) -> Any:
        return housekeeping(self.tiers, POLICY, self.clock)


Act = Callable[[Client], Awaitable[None]]


# ---- the actors


async def pinner(client: Client) -> None:
    await pin(client.tiers, VICTIM, clock=client.clock)


async def holder(client: Client) -> None:
    await hold(client.tiers, VICTIM, "debugging", clock=client.clock)


async def undeleter(client: Client) -> None:
    await undelete(client.tiers, VICTIM, clock=client.clock)


async def reader(client: Client) -> None:
    info = await info_of(client.tiers, VICTIM)
    async with hold_lease(client.tiers, VICTIM, ttl_s=100.0, clock=client.clock) as lease:
        assert lease.alive
        for _ in range(2):
            try:
                await load_whole(client.tiers, VICTIM, info=info)
            except TierStoreError as error:
                raise AssertionError(f"a reader under a lease lost a file: {error.message}") from error
        assert lease.alive


async def pruner(client: Client) -> None:
    await prune(client.housekeeping())


async def collector(client: Client) -> None:
    report = await collect(client.housekeeping())
    assert not report.failed, report.failed


async def decider(client: Client) -> None:
    """Decides and frees at once, as by `prune` and then `gc --now`."""
    await prune(client.housekeeping())
    await collect(client.housekeeping(), now=True)


def evictor(tier: str) -> Act:
    async def act(client: Client) -> None:
        await evict(client.housekeeping(), await info_of(client.tiers, VICTIM), tier, reason="by hand")

    return act


async def copier(client: Client) -> None:
    await promote(client.tiers, VICTIM, "far", clock=client.clock)


async def committer(client: Client) -> None:
    """The last rank of a save, after a very long while."""
    await persist_small(client.tiers, ORPHAN, 1, world_size=2)
    await commit(client.tiers, ORPHAN, deadline_s=0, clock=client.clock)


async def adopter(client: Client) -> None:
    await persist_small(client.tiers, ORPHAN, 1, tier="node", world_size=2)
    report = await reconcile(client.tiers, RUN, clock=client.clock, commit_only=True)
    for failure in report.failed:
        raise failure.error


async def saver(client: Client) -> None:
    """Saves the newest step once more: the attempt before is superseded."""
    await save_small(client.tiers, AGAIN)


# ---- the worlds


async def build(*, expired: bool = False, far: bool = False, orphan: str = "") -> World:
    """Two checkpoints, the older of which no rule keeps."""
    storages: dict[str, MemoryStorage] = {name: MemoryStorage(f"memory://{name}") for name in NAMES}
    tiers = client_tiers(storages)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppingLoop)
    clock = VirtualClock(loop)
    await save_small(tiers, VICTIM)
    await save_small(tiers, NEWEST)
    if orphan:
        await persist_small(tiers, ORPHAN, 0, tier=orphan, world_size=2)
    if far:
        await promote(tiers, VICTIM, "far", clock=clock)
        await promote(tiers, NEWEST, "far", clock=clock)
    if expired:
        loop.now_s = HOUR_S
        await prune(housekeeping(tiers, POLICY, clock))
    return {name: dict(storage.files) for name, storage in storages.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Actors on one world. `refusals`: the errors that an actor may end with, where it came too late. `make` builds the world, from
    `world`; `open` makes storages of its files, and `view` a client's tiers of these; `look` says what lies there, and `check` what must
    be true of it."""

    world: Mapping[str, Any]
    actors: Mapping[str, Act]
    refusals: tuple[type[TierStoreError], ...] = (RefusedError, NotFoundError)
    make: Callable[..., Coroutine[Any, Any, World]] = build
    open: Callable[[World], dict[str, Storage]] = field(
        default=lambda world: {n: MemoryStorage(f"memory://{n}", f) for n, f in world.items()}
    )
    view: Callable[..., Tiers] = client_tiers
    look: Callable[[Mapping[str, Any]], Truth] = field(default=lambda storages: _look(storages))
    check: Callable[[Race, Truth, Ran, Truth], None] = field(default=lambda *told: _check(*told))


RACES = {
    "the orphan collector and the committer": Race(
        world={"orphan": AUTHORITY}, actors={"collector": collector, "committer": committer}, refusals=(TierStoreError,)
    ),
    "the orphan collector and who adopts from the node": Race(
        world={"orphan": "node"}, actors={"collector": collector, "adopter": adopter}, refusals=(TierStoreError,)
    ),
    "the pruner and the pinner": Race(world={}, actors={"pruner": pruner, "pinner": pinner}, refusals=()),
    "two pruners": Race(world={}, actors={"pruner": pruner, "another": pruner}, refusals=()),
    "the pruner and who saves the step again": Race(world={}, actors={"decider": decider, "saver": saver}, refusals=()),
    "the sweeper and the pinner": Race(world={"expired": True}, actors={"collector": collector, "pinner": pinner}),
    "the sweeper and the holder": Race(world={"expired": True, "far": True}, actors={"collector": collector, "holder": holder}),
    "the sweeper and who takes back": Race(world={"expired": True}, actors={"collector": collector, "undeleter": undeleter}),
    "the sweeper and the reader": Race(
        world={"expired": True, "far": True}, actors={"collector": collector, "reader": reader}, refusals=(NotFoundError,)
    ),
    "two sweepers": Race(world={"expired": True, "far": True}, actors={"collector": collector, "another": collector}),
    "the sweeper and the copier": Race(world={}, actors={"decider": decider, "copier": copier}, refusals=(TierStoreError,)),
    "two evictors of two tiers": Race(world={"far": True}, actors={"far": evictor("far"), "shared": evictor("shared")}),
    "two evictors of one tier": Race(world={"far": True}, actors={"one": evictor("far"), "other": evictor("far")}),
    "the evictor and the reader": Race(
        world={"far": True}, actors={"evictor": evictor(AUTHORITY), "reader": reader}, refusals=(RefusedError, LockedError)
    ),
    "the evictor and the copier": Race(world={}, actors={"evictor": evictor(AUTHORITY), "copier": copier}, refusals=(TierStoreError,)),
    "the evictor and the sweeper": Race(world={"expired": True, "far": True}, actors={"evictor": evictor("far"), "collector": collector}),
    "the evictor and the holder": Race(world={"far": True}, actors={"evictor": evictor("far"), "holder": holder}),
}


# ---- running one schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Who begins, who takes over at which step, and after how many of its own operations an actor is never heard of again."""

    order: tuple[str, ...]
    switches: tuple[tuple[int, str], ...] = ()
    dies: tuple[str, int] | None = None


@dataclass(slots=True, kw_only=True)
class Ran:
    """What came of a schedule: the steps, each actor's end (None: well; absent: it died), and what lies on the tiers then."""

    steps: Sequence[Step]
    ends: dict[str, BaseException | None] = field(default_factory=dict)
    truth: Truth


def perform(race: Race, world: World, schedule: Schedule) -> Ran:
    """Runs the actors under a schedule; then, alone, whoever comes next, until nothing is left to do. Checks everything on the way."""
    loop = SteppingLoop()
    try:
        loop.now_s = LATER_S
        storages = race.open(world)
        before = race.look(storages)
        stage = Stage(loop=loop, order=schedule.order, switches=dict(schedule.switches))
        if schedule.dies is not None:
            stage.lives = {schedule.dies[0]: schedule.dies[1]}
        loop.idle = stage.idle
        tasks: dict[str, asyncio.Task[None]] = {}

        async def play() -> None:
            for name, act in race.actors.items():
                client = Client(race.view(storages, stage.hook(name)), VirtualClock(loop))
                tasks[name] = asyncio.ensure_future(act(client))
            alive = [task for name, task in tasks.items() if schedule.dies is None or name != schedule.dies[0]]
            await asyncio.wait(alive)

        loop.run_until_complete(play())
        loop.idle = None
        ran = Ran(steps=tuple(stage.steps), truth=Truth({}))
        for name, task in tasks.items():
            if task.done():
                ran.ends[name] = task.exception()
            else:
                task.cancel()
        stage.close()
        loop.run_until_complete(asyncio.gather(*tasks.values(), return_exceptions=True))
        ran.truth = race.look(storages)
        loop.run_until_complete(_settle(race.view(storages), loop))
        race.check(race, before, ran, race.look(storages))
        loop.run_until_complete(check_alone(storages, race.look(storages)))
        return ran
    finally:
        loop.finish()


def _look(storages: Mapping[str, Any]) -> Truth:
    return Truth({name: dict(storage.files) for name, storage in storages.items()})


async def _settle(tiers: Tiers, loop: SteppingLoop) -> None:
    """The next processes: one sees a dead reader's lease for the first time, and again when its TTL has passed."""
    keeper = housekeeping(tiers, None, VirtualClock(loop))
    for _ in range(3):
        report = await collect(keeper)
        assert not report.failed, report.failed
        await asyncio.sleep(HOUR_S)


def _check(race: Race, before: Truth, ran: Ran, settled: Truth) -> None:
    for name, end in ran.ends.items():
        if end is not None and not isinstance(end, race.refusals):
            raise AssertionError(f"{name} ended with {type(end).__name__}: {end}") from end
    ends = ran.ends
    keeping = {VICTIM for name in ("pinner", "undeleter", "holder") if name in ends and ends[name] is None}
    for truth in (ran.truth, settled):
        check_step(before, truth, keeping=keeping, serial=False)
    if "reader" in ends and isinstance(ends["reader"], NotFoundError):
        assert VICTIM in ran.truth.swept(), f"the reader was told {ends['reader']}, but it was not swept"
    for name in {"committer", "adopter"} & ends.keys():
        fate = settled.facts()[ORPHAN]
        assert fate.condemned or (fate.committed and ends[name] is None), f"{name}: {ends[name]}"
        assert fate.committed or name == "adopter" or ends[name] is not None, "the commit was acknowledged, and it was condemned"
    if ends.get("saver", ConflictError("")) is None:
        assert settled.facts()[AGAIN].committed
        assert AGAIN in settled.living()
    left = garbage(settled)
    assert not left, f"left behind: {left}"


# ---- all schedules that can matter


class Explorer:
    """Enumerates the schedules of a race by the number of their switches."""

    def __init__(self, race: Race, world: World) -> None:
        self.race, self.world = race, world
        self.calls: dict[str, set[Call]] = {name: set() for name in race.actors}
        self.runs = 0

    def run(self, schedule: Schedule) -> Ran:
        self.runs += 1
        try:
            ran = perform(self.race, self.world, schedule)
        except BaseException as error:
            error.add_note(f"schedule: {schedule}") if hasattr(error, "add_note") else print(schedule)
            raise
        for step in ran.steps:
            self.calls[step.call.actor].add(step.call)
        return ran

    def serial(self) -> list[tuple[Schedule, Ran]]:
        """One after the other, in each order."""
        schedules = [Schedule(order=order) for order in itertools.permutations(self.race.actors)]
        return [(schedule, self.run(schedule)) for schedule in schedules]

    def further(self, schedule: Schedule, ran: Ran) -> Iterator[Schedule]:
        """The schedules with one switch more, later than the last one. A switch before a call that no call of the other could conflict
        with comes to the same as the switch after it, and is left out."""
        first = schedule.switches[-1][0] + 1 if schedule.switches else 1
        for number in range(first, len(ran.steps)):
            call = ran.steps[number].call
            for other in ran.steps[number].others:
                if any(call.conflicts(theirs) for theirs in self.calls[other.actor]):
                    yield Schedule(order=schedule.order, switches=(*schedule.switches, (number, other.actor)))

    def deaths(self, serial: Sequence[tuple[Schedule, Ran]]) -> Iterator[Schedule]:
        """Each actor, going first, stops for ever at each of its operations."""
        for schedule, ran in serial:
            actor = schedule.order[0]
            for number in range(sum(step.call.actor == actor for step in ran.steps)):
                yield Schedule(order=schedule.order, dies=(actor, number))


def choice(schedules: Sequence[Schedule], many: int | None) -> list[Schedule]:
    """A random choice, the same in each run; all for None."""
    return list(schedules) if many is None or len(schedules) <= many else random.Random(1).sample(schedules, many)


def explore(race: Race, many: Mapping[int, int | None]) -> Explorer:
    """Runs the race; `many`: how many of the schedules with so many switches, and (0) of those in which somebody dies."""
    world = run_virtually(race.make(**race.world))
    explorer = Explorer(race, world)
    serial = explorer.serial()
    for schedule in choice(list(explorer.deaths(serial)), many[0]):
        explorer.run(schedule)
    level = serial
    for switches in sorted(many)[1:]:
        found = [later for schedule, ran in level for later in explorer.further(schedule, ran)]
        chosen = choice(found, many[switches])
        print(f"{switches} switches: {len(chosen)} of {len(found)} schedules")
        level = [(schedule, explorer.run(schedule)) for schedule in chosen]
    print(f"{explorer.runs} runs")
    return explorer


@pytest.mark.parametrize("name", RACES)
def test_no_interleaving_breaks_a_promise(name: str, long_run: bool) -> None:
    explore(RACES[name], {0: None, 1: None, 2: None, 3: 5000} if long_run else {0: 3, 1: 5, 2: 3})


async def _no_look(self: Any) -> None:
    """A reader that makes its lease and does not look at the log again."""


async def _nobody(*_: Any, **__: Any) -> dict[Any, Any]:
    """A collector that does not ask who reads."""
    return {}


def _appending_anyhow(append: Any) -> Any:
    """An append that does not mind what was decided since the log was read."""

    async def act(*args: Any, after: int | None = None, allow: Any = None, **more: Any) -> Any:
        return await append(*args, **more)

    return act


async def _condemning_anyhow(h: Any, found: Any) -> bool:
    """An orphan collector that has scanned for "no commit" and deletes."""
    await decide_fate(h.tiers.authority.storage, found.attempt, "condemned", {"reason": "scanned"}, h.clock)
    return True


async def _confirming_anyhow(h: Any, attempt: Attempt) -> None:
    """And does not look again."""


SHORTCUTS: dict[str, tuple[str, Sequence[tuple[str, Any]]]] = {
    "a lease without a look at the log after it": ("the sweeper and the reader", [("tierstore.tiers.leases.Lease._look", _no_look)]),
    "a sweep that asks for no leases": ("the sweeper and the reader", [("tierstore.tiers.gc.collect.readers_of", _nobody)]),
    "an eviction that is not won by number": (
        "two evictors of two tiers",
        [("tierstore.tiers.gc.evict.append", _appending_anyhow(append))],
    ),
    "a sweep that is not won by number": ("the sweeper and the pinner", [("tierstore.tiers.gc.sweep.append", _appending_anyhow(append))]),
    "an orphan that was not condemned first": (
        "the orphan collector and the committer",
        [
            ("tierstore.tiers.gc.collect.condemn", _condemning_anyhow),
            ("tierstore.tiers.gc.collect.confirm_condemned", _confirming_anyhow),
        ],
    ),
}
"""What `models/model_gc.py` shows to lose something: the same races find it in the real code."""


@pytest.mark.parametrize("name", SHORTCUTS)
def test_each_of_the_usual_shortcuts_would_be_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    race, changes = SHORTCUTS[name]
    for place, change in changes:
        monkeypatch.setattr(place, change)
    with pytest.raises(AssertionError) as found:
        explore(RACES[race], {0: 0, 1: None, 2: 200})
    print(found.value)
