"""Two clients of one store, each with a clock that is wrong by hours and changes: whatever they do, the promises hold (PROTOCOLS.md §9.6).

Each client is a process of its own in all but name: its view of the tiers, its caches, its observer of leases. A client may die at any of
its storage operations; the next one in its place knows nothing. After every step the bytes on the tiers are checked (`retention_kit`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from retention_kit import (
    AUTHORITY,
    HOUR_S,
    NAMES,
    RUN,
    Truth,
    check_alone,
    check_step,
    client_tiers,
    files_of_storages,
    garbage,
    housekeeping,
    load_whole,
    persist_small,
    policy_of,
    save_id_at,
    save_small,
)
from stepping_kit import START, InlinePool, MemoryStorage, SteppingLoop, VirtualClock

from tierstore.config_retention import RetentionConfig
from tierstore.errors import LockedError, NotFoundError, RefusedError, StorageError, TemporaryError, TierStoreError
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.catalog import RecordCache, scan
from tierstore.tiers.decisions import hold, pin, release, set_metrics, tag, undelete, unpin, untag
from tierstore.tiers.gc.collect import collect, tend
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.leases import Lease, LeaseWatch, hold_lease
from tierstore.tiers.log_facts import LogFacts
from tierstore.tiers.promote import reconcile
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify

TTL_S = HOUR_S
POLICIES: tuple[RetentionConfig, ...] = (
    policy_of({"last": 1}),
    policy_of({"last": 2}, {"every": {"steps": 4}}, min_copies=2, min_keep=2),
    policy_of({"best": {"metric": "loss", "mode": "min", "missing": "worst"}}, {"tags": ["good"]}, undelete_window_s=1.0),
    policy_of({"last": 1}, tiers={"shared": {"keep": [{"last": 1}]}, "node": {"keep": [{"last": 1}]}}),
    policy_of({"last": 3}, tiers={"far": {"keep": [{"last": 2}]}}, min_copies=1, min_age_s=2 * HOUR_S),
)
SKEWS = (0.0, -3 * HOUR_S, 3 * HOUR_S, 30.0, -20 * HOUR_S, 26 * HOUR_S)


class Dead(Exception):
    """The client died where it was told to."""


@dataclass(slots=True)
class Client:
    """One process: dies after `left` storage operations more (None: lives)."""

    machine: Clients
    number: int
    clock: VirtualClock
    policy: RetentionConfig | None
    frozen: bool = False
    left: int | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)
    tiers: Tiers = field(init=False)
    cache: RecordCache = field(default_factory=RecordCache)
    leases: LeaseWatch = field(init=False)

    def __post_init__(self) -> None:
        self.tiers = client_tiers(self.machine.storages, self._hook)
        self.leases = LeaseWatch(self.clock)

    async def _hook(self, tier: str, operation: str, path: str) -> None:
        if self.frozen:
            await asyncio.Event().wait()  # killed from outside: its tasks are heard of no more
        if self.died.is_set():
            raise asyncio.CancelledError("this process is dead")
        if self.left is not None:
            if self.left == 0:
                self.died.set()
                await asyncio.Event().wait()
            self.left -= 1
        if tier in self.machine.down:
            raise TemporaryError(f"injected: {tier} is down", tier=tier)

    def housekeeping(self) -> Any:
        return housekeeping(self.tiers, self.policy, self.clock, cache=self.cache, leases=self.leases)


@dataclass(slots=True)
class Reading:
    """A reader with a lease, in a process of its own."""

    lease: Lease
    client: Client
    attempt: Attempt


class Clients(RuleBasedStateMachine):
    """See the module's docstring. `make` gives the storages of a fresh store."""

    readings = Bundle("readings")
    seen: Counter[str]
    """What happened in all runs: a machine that never sweeps proves nothing."""

    @staticmethod
    def make() -> Mapping[str, Storage]:
        return {name: MemoryStorage(f"memory://{name}") for name in NAMES}

    def __init__(self) -> None:
        super().__init__()
        self.loop = SteppingLoop()
        self.storages = self.make()
        self.down: set[str] = set()
        self.pinned: dict[Attempt, set[str]] = {}
        self.held: dict[Attempt, set[str]] = {}
        self.reading: list[Reading] = []
        self.saves = 0
        self.step = 0
        self.acknowledged: set[Attempt] = set()
        self.clients = [self._client(0, 0.0, 0), self._client(1, 0.0, 1)]
        self.truth = Truth({name: {} for name in NAMES})
        self.actor: Client | None = None

    def teardown(self) -> None:
        try:
            self.end()
        finally:
            self.loop.finish()

    def end(self) -> None:
        """The last process of all: everything comes up again, and what was decided is finished; then every checkpoint loads."""
        self.down.clear()
        for reading in self.reading:
            self._kill(reading.client)
        self.reading.clear()
        last = self._client(9, 0.0, 0)
        last.policy = None  # decides nothing new

        async def finish() -> None:
            for _ in range(3):
                report = await collect(last.housekeeping())
                assert not report.failed, report.failed
                await asyncio.sleep(100 * HOUR_S)

        self._do(last, finish())
        self.check()
        report = self.loop.run_until_complete(verify(client_tiers(self.storages), RUN, level="full"))
        assert not report.damage, report.damage
        assert not garbage(self.truth), f"left behind: {garbage(self.truth)}"
        for attempt in self.truth.existing():
            self.loop.run_until_complete(load_whole(client_tiers(self.storages), attempt))

    # ---- inside

    def _client(self, number: int, skew_s: float, policy: int) -> Client:
        return Client(self, number, VirtualClock(self.loop, skew_s=skew_s), POLICIES[policy])

    def _kill(self, client: Client) -> None:
        client.frozen = True

    def _do(
        self, client: Client, work: Coroutine[Any, Any, Any], *, expect: tuple[type[TierStoreError], ...] = (), dies: int | None = None
    ) -> bool:
        """Lets a client do something; True if it came to its end well. It dies after `dies` operations; another takes its place."""
        client.left = dies
        self.actor = client

        async def act() -> bool:
            task = asyncio.ensure_future(work)
            dying = asyncio.ensure_future(client.died.wait())
            await asyncio.wait({task, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()
                return False
            dying.cancel()
            await asyncio.wait({dying})
            if task.cancelled():
                return False
            error = task.exception()
            if error is None:
                return True
            may = (*expect, *((StorageError, NotFoundError, RefusedError) if self.down else ()))
            if not isinstance(error, may):
                raise error
            return False

        well = self.loop.run_until_complete(act())
        client.left = None
        self.seen["died"] += client.died.is_set()
        if client.died.is_set() and client in self.clients:
            fresh = self._client(client.number, client.clock.skew_s, 0)
            fresh.policy = client.policy
            self.clients[client.number] = fresh
        return well and not client.died.is_set()

    # ---- rules

    dies = st.one_of(st.none(), st.none(), st.integers(5, 100))
    which = st.integers(0, 1)
    numbers = st.integers(0, 9)

    def _chosen(self, number: int) -> Attempt:
        """Mostly a checkpoint that exists, now and then one of all that there ever were."""
        existing, known = sorted(self.truth.existing()), sorted(self.truth.facts())
        return (existing if number < 8 else known)[number % len(existing if number < 8 else known)]

    @initialize()
    def first(self) -> None:
        """A run that has been going for a while: there is something to decide about."""
        client = self.clients[0]
        for loss in (2.0, 1.0, 3.0, 2.5):
            self._save(client, 1, AUTHORITY, loss, None)
        self._save(client, 1, "node", None, None)
        self._do(client, reconcile(client.tiers, RUN, clock=client.clock))
        self.loop.run_until_complete(asyncio.sleep(3 * HOUR_S))
        self.truth = Truth(self.loop.run_until_complete(files_of_storages(self.storages)))

    def _save(self, client: Client, ahead: int, tier: str, loss: float | None, dies: int | None) -> None:
        self.saves += 1
        self.step = max(0, self.step + ahead)
        at = START + timedelta(seconds=self.loop.now_s + client.clock.skew_s)
        newest = max((a.save_id for a in self.truth.facts()), default="") if self.saves > 1 else ""
        save_id = max(save_id_at(at, self.saves), newest[:10] + save_id_at(at, self.saves)[10:])
        attempt = Attempt(run=RUN, step=self.step, save_id=save_id)
        facts = {"metrics": {"loss": loss}} if loss is not None else {}

        async def work() -> None:
            await save_small(client.tiers, attempt, tier=tier, clock=client.clock, **facts)
            if tier == "node":
                await reconcile(client.tiers, RUN, clock=client.clock, commit_only=True)

        if self._do(client, work(), dies=dies) and tier == AUTHORITY:
            self.acknowledged.add(attempt)

    @rule(
        who=which,
        ahead=st.sampled_from([1, 1, 1, 2, 0, -1]),
        tier=st.sampled_from(["node", AUTHORITY]),
        loss=st.sampled_from([None, 1.0, 2.0, 3.0, float("nan")]),
        dies=dies,
    )
    def save(self, who: int, ahead: int, tier: str, loss: float | None, dies: int | None) -> None:
        self._save(self.clients[who], ahead, tier, loss, dies)

    @rule(who=which, dies=dies)
    def promote(self, who: int, dies: int | None) -> None:
        client = self.clients[who]
        self._do(client, reconcile(client.tiers, RUN, clock=client.clock), dies=dies, expect=(LockedError,))

    @rule(
        who=which,
        number=numbers,
        what=st.sampled_from(["pin", "unpin", "hold", "release", "tag", "untag", "metrics", "undelete"]),
        name=st.sampled_from(["a", "b"]),
        loss=st.sampled_from([0.5, 2.5, float("nan")]),
    )
    def decide(self, who: int, number: int, what: str, name: str, loss: float) -> None:
        client, attempt = self.clients[who], self._chosen(number)
        tiers, clock = client.tiers, client.clock
        kept = self.pinned if what in ("pin", "unpin") else self.held
        if what in ("unpin", "release"):
            kept.get(attempt, set()).discard(name)
        works: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "pin": lambda: pin(tiers, attempt, name, clock=clock),
            "unpin": lambda: unpin(tiers, attempt, name, clock=clock),
            "hold": lambda: hold(tiers, attempt, name, clock=clock, reason="why"),
            "release": lambda: release(tiers, attempt, name, clock=clock),
            "tag": lambda: tag(tiers, attempt, ["good"], clock=clock),
            "untag": lambda: untag(tiers, attempt, ["good"], clock=clock),
            "metrics": lambda: set_metrics(tiers, attempt, {"loss": loss}, clock=clock),
            "undelete": lambda: undelete(tiers, attempt, clock=clock),
        }
        if self._do(client, works[what](), expect=(RefusedError, NotFoundError)) and what in ("pin", "hold"):
            kept.setdefault(attempt, set()).add(name)

    @rule(who=which, what=st.sampled_from(["both", "prune", "collect", "tend", "collect later"]), dies=dies)
    def keep_house(self, who: int, what: str, dies: int | None) -> None:
        client = self.clients[who]

        async def work() -> None:
            keeper = client.housekeeping()
            if what == "tend":
                await tend(keeper)
            if what in ("prune", "both"):
                await prune(keeper)
            if what in ("collect", "collect later", "both"):
                await collect(keeper, now=what != "collect later")

        self._do(client, work(), dies=dies)

    @rule(who=which, dies=st.one_of(st.none(), st.integers(20, 140)))
    def prune_and_collect(self, who: int, dies: int | None) -> None:
        self.keep_house(who, "both", dies)

    @rule(who=which, number=numbers, tier=st.sampled_from(NAMES), dies=dies)
    def evict(self, who: int, number: int, tier: str, dies: int | None) -> None:
        client, attempt = self.clients[who], self._chosen(number)

        async def work() -> None:
            info = next((c for c in (await scan(client.tiers, RUN, client.cache)).checkpoints if c.attempt == attempt), None)
            if info is not None:
                await evict(client.housekeeping(), info, tier, reason="by hand")

        self._do(client, work(), dies=dies, expect=(RefusedError, LockedError, NotFoundError))

    @rule(target=readings, number=numbers, skew_s=st.sampled_from(SKEWS))
    def begin_to_read(self, number: int, skew_s: float) -> Any:
        client, attempt = self._client(7, skew_s, 0), self._chosen(number)
        lease = hold_lease(client.tiers, attempt, ttl_s=TTL_S, clock=client.clock)

        async def begin() -> None:
            lease.begin()
            await lease.settled()

        exists = attempt in self.truth.existing()
        well = self._do(client, begin(), expect=(NotFoundError,))
        assert well or not exists or self.down
        if not (well and exists and lease.alive):
            lease.let_go()
            return multiple()
        reading = Reading(lease, client, attempt)
        self.reading.append(reading)
        return reading

    @rule(reading=readings, well=st.booleans())
    def end_reading(self, reading: Reading, well: bool) -> None:
        if reading in self.reading:
            self.reading.remove(reading)
            if well:
                self._do(reading.client, reading.lease.release())
            else:
                self._kill(reading.client)

    @rule(seconds=st.sampled_from([3 * HOUR_S, 60.0, TTL_S, 30 * HOUR_S]))
    def time_passes(self, seconds: float) -> None:
        self.actor = None
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(
        who=which,
        what=st.sampled_from(["clock", "policy", "tier", "orphan"]),
        skew_s=st.sampled_from(SKEWS),
        policy=st.integers(0, len(POLICIES) - 1),
        tier=st.sampled_from([None, None, *NAMES]),
    )
    def the_world_changes(self, who: int, what: str, skew_s: float, policy: int, tier: str | None) -> None:
        """A clock is set, a policy is edited, a tier goes down or all come up, a save loses its second rank for ever."""
        self.actor = None
        client = self.clients[who]
        if what == "clock":
            client.clock.skew_s = skew_s
        elif what == "policy":
            client.policy = POLICIES[policy]
        elif what == "orphan":
            self.saves += 1
            attempt = Attempt(run=RUN, step=self.step + 1, save_id=save_id_at(client.clock.now(), self.saves))
            self._do(client, persist_small(client.tiers, attempt, 0, world_size=2))
        elif tier is None:
            self.down.clear()
        elif not (self.reading and tier == AUTHORITY):  # a reader whose authority is down for long has no lease any more
            self.down.add(tier)

    # ---- the promises

    @invariant()
    def check(self) -> None:
        before, self.truth = self.truth, Truth(self.loop.run_until_complete(files_of_storages(self.storages)))
        self._count(before)
        leased = {reading.attempt for reading in self.reading if reading.lease.alive}
        protect = self.actor.policy.protect if self.actor is not None and self.actor.policy is not None else None
        keeping = {a for named in (self.pinned, self.held) for a, names in named.items() if names}
        check_step(
            before,
            self.truth,
            min_copies=protect.min_copies if protect else 1,
            min_keep=protect.min_keep if protect else 1,
            keeping=keeping,
            leased=leased,
        )
        lost = self.acknowledged - self.truth.facts().keys()
        assert not lost, f"acknowledged, and their logs are gone: {lost}"
        if self.actor is not None and self.actor.policy is not None:
            self._check_ages(before)
        self.loop.run_until_complete(check_alone(self.storages, self.truth))

    def _count(self, before: Truth) -> None:
        for attempt, facts in self.truth.facts().items():
            was = before.facts().get(attempt, LogFacts())
            self.seen["swept"] += facts.swept and not was.swept
            self.seen["condemned"] += facts.condemned and not was.condemned
            self.seen["evicted"] += len(facts.evicted - was.evicted)
            self.seen["expired"] += facts.expired is not None and was.expired is None
            self.seen["taken back"] += facts.revived is not None and facts.revived != was.revived
        self.seen["stayed for its reader"] += any(r.lease.alive and self.truth.facts()[r.attempt].expired for r in self.reading)

    def _check_ages(self, before: Truth) -> None:
        """What expired in this step was old enough by the clock of who decided."""
        assert self.actor is not None
        now = self.actor.clock.now()
        for attempt, facts in self.truth.facts().items():
            was = before.facts().get(attempt)
            if facts.expired is not None and was is not None and was.expired is None and facts.fate is not None:
                age = (now - facts.fate.at).total_seconds()
                assert age >= self.actor.policy.protect.min_age_s, f"{attempt.name} expired at the age of {age} s"


def run_machine(machine: type[Clients], *, examples: int, steps: int, long_run: bool) -> None:
    machine.seen = Counter()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * (100 if long_run else 1),
            stateful_step_count=steps * (2 if long_run else 1),
            derandomize=not long_run,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(machine.seen))


def test_two_clients_keep_the_promises(long_run: bool) -> None:
    run_machine(Clients, examples=10, steps=30, long_run=long_run)
    for what in ("died", "swept", "evicted", "expired"):
        assert Clients.seen[what], f"it never came to this: {what}"


def test_two_clients_keep_the_promises_on_real_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: bool) -> None:
    monkeypatch.setattr("tierstore.storage._calls.DaemonPool", InlinePool)

    class OnFolders(Clients):
        @staticmethod
        def make() -> Mapping[str, Storage]:
            root = Path(tempfile.mkdtemp(dir=tmp_path))
            return {name: PosixStorage(root / name, durable=False) for name in NAMES}

    run_machine(OnFolders, examples=2, steps=20, long_run=long_run)
