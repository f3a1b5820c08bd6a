"""The races of `model_references.py`, with the real code: whoever copies, collects, drops, brings back and reads checkpoints whose files
on a packed tier take unchanged bytes from each other, in every order of their operations that can matter, and dying at each of them.

After every run no file that anybody is offered lacks bytes, and when everything is collected nothing is left that serves nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import test_interleavings as races
from packed_kit import PackedMemory, packed_tiers, persist_lora, save_lora
from retention_kit import HOUR_S, Truth, garbage, housekeeping, info_of, load_whole
from stepping_kit import MemoryStorage, SteppingLoop, VirtualClock, run_virtually
from test_interleavings import NEWEST, POLICY, VICTIM, Client, Race, Ran, Schedule, World, attempt, collector, decider, explore

from tierstore.errors import NotFoundError, TierStoreError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.tiers.bring import BRING, bring
from tierstore.tiers.commit import commit
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.leases import hold_lease
from tierstore.tiers.log import append
from tierstore.tiers.log_facts import LogFacts
from tierstore.tiers.promote import promote, reconcile
from tierstore.tiers.referrers import attempt_of

MIDDLE = attempt(5)
PACKED = ("far",)


def _open(files: Mapping[str, Mapping[str, bytes]], packed: tuple[str, ...]) -> dict[str, Storage]:
    return {name: (PackedMemory if name in packed else MemoryStorage)(f"memory://{name}", data) for name, data in files.items()}


async def build(
    *,
    packed: tuple[str, ...] = PACKED,
    expired: bool = False,
    copied: tuple[Attempt, ...] = (VICTIM,),
    near: bool = False,
    unsaved: bool = False,
    unlike: tuple[Attempt, ...] = (),
) -> World:
    """Three checkpoints that share all but an adapter, but for those in `unlike`; those of `copied` are on the further tier. `expired`:
    what is not the last one has. `near`: the one in the middle is on the node only, not committed. `unsaved`: it is nowhere."""
    storages = _open({name: {} for name in ("node", "shared", "far")}, packed)
    tiers = packed_tiers(storages)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppingLoop)
    clock = VirtualClock(loop)
    for made in (VICTIM, MIDDLE, NEWEST):
        if made == MIDDLE and (near or unsaved):
            continue
        await save_lora(tiers, made, seed=9 if made in unlike else 0)
    context = CopyContext.make(tiers, clock)
    for made in copied:
        await promote(tiers, made, "far", clock=clock, context=context)
    loop.now_s = HOUR_S
    if expired:
        await prune(housekeeping(tiers, POLICY, clock))
    if near:
        await persist_lora(tiers, MIDDLE, tier="node")
    return {name: dict(storage.files) for name, storage in storages.items() if isinstance(storage, MemoryStorage)}


# ---- the actors


def copier(of: Attempt) -> Any:
    async def act(client: Client) -> None:
        await promote(client.tiers, of, "far", clock=client.clock)

    return act


def evictor(of: Attempt) -> Any:
    async def act(client: Client) -> None:
        await evict(client.housekeeping(), await info_of(client.tiers, of), "far", reason="by hand")

    return act


async def bringer(client: Client) -> None:
    """Copies the newest one, drops the copy, and brings it back."""
    await promote(client.tiers, NEWEST, "far", clock=client.clock)
    await evict(client.housekeeping(), await info_of(client.tiers, NEWEST), "far", reason="by hand")
    lease = hold_lease(client.tiers, NEWEST, ttl_s=100.0, clock=client.clock, kind=BRING)
    await bring(CopyContext.make(client.tiers, client.clock), NEWEST, client.tiers.get("far"), lease=lease)


def reader(of: Attempt) -> Any:
    async def act(client: Client) -> None:
        info = await info_of(client.tiers, of)
        async with hold_lease(client.tiers, of, ttl_s=100.0, clock=client.clock):
            for _ in range(2):
                try:
                    await load_whole(client.tiers, of, info=replace(info, replicas={"far": "complete"}))
                except TierStoreError as error:
                    raise AssertionError(f"a reader under a lease lost a file: {error.message}") from error

    return act


async def carrier(client: Client) -> None:
    """Carries what the node has to the packed authority, and commits it."""
    report = await reconcile(client.tiers, races.RUN, clock=client.clock, commit_only=True)
    for failure in report.failed:
        raise failure.error


async def saver(client: Client) -> None:
    """Saves straight to the packed authority, as if it had begun long ago, and commits."""
    context = CopyContext.make(client.tiers, client.clock)
    await persist_lora(client.tiers, MIDDLE, context=context)
    await commit(client.tiers, MIDDLE, deadline_s=0, clock=client.clock)


# ---- the truth


class RawTruth(Truth):
    """What can be read of the tiers' files, and what lies there as it is."""

    def __init__(self, storages: Mapping[str, Any]) -> None:
        files = {name: storage.raw() if isinstance(storage, PackedMemory) else dict(storage.files) for name, storage in storages.items()}
        super().__init__(files)
        self.dangling = {name: s.dangling() for name, s in storages.items() if isinstance(s, PackedMemory)}


def _kept(truth: Truth, of: Attempt, facts: LogFacts, tier: str, path: str) -> bool:
    """Whether a file that is left of a deleted checkpoint serves one that is not."""
    if facts.reduced is None or tier not in facts.reduced:
        return False
    if path.startswith(of.log_folder):
        return True
    referrers = [found for folder in facts.referenced.get(tier, ()) if (found := attempt_of(folder)) is not None]
    return "/shard-" in path and any(_may_read(truth, referrer, tier) for referrer in referrers)


def _may_read(truth: Truth, referrer: Attempt, tier: str) -> bool:
    facts = truth.facts().get(referrer)
    ended = facts is not None and (facts.swept or facts.condemned)
    return not ended or any(p.startswith(f"{referrer.folder}/shard-") for p in truth.files[tier])


def check(race: Race, before: Truth, ran: Ran, settled: Truth) -> None:
    for name, end in ran.ends.items():
        if end is not None and not isinstance(end, race.refusals):
            raise AssertionError(f"{name} ended with {type(end).__name__}: {end}") from end
    for truth in (ran.truth, settled):
        assert isinstance(truth, RawTruth)
        for made, facts in truth.existing().items():
            assert facts.fate is not None
            assert "shared" in truth.copies(made, facts.fate), f"{made.name} is not whole on the authority"
            for tier in facts.replicated:
                assert truth.whole(made, tier, facts.fate), f"{made.name} is not whole on {tier}: {truth.dangling}"
        for tier, found in truth.dangling.items():
            for path in found:
                owner = attempt_of(path.rpartition("/")[0])
                assert owner is not None
                state = truth.facts().get(owner)
                ended = state is not None and (state.swept or state.condemned)
                assert ended, f"{path} on {tier} lacks {found[path]}"
    facts = settled.facts()
    left = {
        tier: kept
        for tier, paths in garbage(settled).items()
        if (
            kept := [
                p
                for p in paths
                if not any(_kept(settled, a, f, tier, p) or (f.reduced is not None and _log(a, p)) for a, f in facts.items())
            ]
        )
    }
    assert not left, f"left behind: {left}"


def _log(of: Attempt, path: str) -> bool:
    return path.startswith(f"{of.log_folder}/")


def race(actors: Mapping[str, Any], *, refusals: tuple[type[TierStoreError], ...] = (TierStoreError,), **world: Any) -> Race:
    packed = world.get("packed", PACKED)
    return Race(
        world=world,
        actors=actors,
        refusals=refusals,
        make=build,
        open=lambda files: _open(files, packed),
        view=packed_tiers,
        look=RawTruth,
        check=check,
    )


RACES = {
    "the copier and the sweeper of the base": race({"copier": copier(NEWEST), "decider": decider}),
    "the copier and who drops the base's copy": race({"copier": copier(NEWEST), "evictor": evictor(VICTIM)}),
    "two copiers and the sweeper of the base": race({"copier": copier(NEWEST), "another": copier(NEWEST), "decider": decider}),
    "the sweeper and the reader of the referrer": race(
        {"collector": collector, "reader": reader(MIDDLE)}, copied=(VICTIM, MIDDLE), expired=True, refusals=(NotFoundError,)
    ),
    "the sweeper and the reader of the newest": race(
        {"collector": collector, "reader": reader(NEWEST)}, copied=(VICTIM, MIDDLE, NEWEST), expired=True, refusals=(NotFoundError,)
    ),
    "two sweepers of base and referrer": race(
        {"collector": collector, "other": collector}, copied=(VICTIM, MIDDLE), unlike=(NEWEST,), expired=True
    ),
    "the sweeper and the copier of the last referrer": race({"decider": decider, "copier": copier(NEWEST)}, copied=(VICTIM, MIDDLE)),
    "a late copier and who drops and brings back the referrer": race(
        {"bringer": bringer, "copier": copier(NEWEST), "decider": decider},
        copied=(VICTIM,),
    ),
    "who drops the base and who drops the referrer": race({"base": evictor(MIDDLE), "referrer": evictor(NEWEST)}, copied=(MIDDLE, NEWEST)),
    "the saver on a packed authority and the sweeper of the base": race(
        {"carrier": carrier, "decider": decider}, packed=("shared",), copied=(), near=True
    ),
    "who saves straight to a packed authority and the sweeper of the base": race(
        {"saver": saver, "decider": decider}, packed=("shared",), copied=(), unsaved=True
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_no_interleaving_lets_bytes_go_that_somebody_refers_to(name: str, long_run: bool) -> None:
    explore(RACES[name], {0: None, 1: None, 2: None, 3: 3000} if long_run else {0: 2, 1: 4, 2: 1})


async def _dead(*_: Any, **__: Any) -> tuple[Attempt, ...]:
    return ()


async def _unrecorded(tiers: Any, owner: Attempt, tier: Any, by: Attempt, **_: Any) -> tuple[tuple[Record, ...], str]:
    """A writer that records nothing."""
    return (), ""


_refused = LogFacts.refused_reference


def _never_dropped(self: LogFacts, tier: str, authority: str) -> str:
    return "" if tier in self.dropped else _refused(self, tier, authority)


def _appending_anyhow(append: Any) -> Any:
    async def act(*args: Any, after: int | None = None, **more: Any) -> Any:
        return await append(*args, **more)

    return act


SHORTCUTS: dict[str, tuple[str, str, Any]] = {
    "a collector that takes every referrer for dead": (
        "the sweeper and the reader of the newest",
        "tierstore.tiers.gc.referring.living_on",
        _dead,
    ),
    "a writer that records nothing": ("the copier and the sweeper of the base", "tierstore.tiers.references.record_reference", _unrecorded),
    "a saver that records nothing": (
        "who saves straight to a packed authority and the sweeper of the base",
        "tierstore.tiers.references.record_reference",
        _unrecorded,
    ),
    "a writer that does not mind what was let go": (
        "the copier and who drops the base's copy",
        "tierstore.tiers.log_facts.LogFacts.refused_reference",
        _never_dropped,
    ),
}


@pytest.mark.parametrize("name", SHORTCUTS)
def test_each_shortcut_would_be_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, place, change = SHORTCUTS[name]
    monkeypatch.setattr(place, change)
    with pytest.raises(AssertionError) as found:
        explore(RACES[which], {0: 0, 1: None, 2: 100})
    print(found.value)


def test_an_end_that_is_not_won_by_number_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector has looked for referrers, and is about to write ``swept``: then one comes, and is published."""
    race_of = RACES["the copier and the sweeper of the base"]
    world = run_virtually(race_of.make(**race_of.world))

    def step_of(ran: Ran, actor: str, operation: str) -> int:
        """The actor's last such operation on the base's log."""
        calls = [step.call for step in ran.steps]
        found = [n for n, c in enumerate(calls) if c.actor == actor and c.operation == operation and c.path.startswith(VICTIM.log_folder)]
        return found[-1]

    serial = Schedule(order=("copier", "decider"))
    first = step_of(races.perform(race_of, world, serial), "copier", "create") - 3  # the log, its records, their end: before it looks
    once = replace(serial, switches=((first, "decider"),))
    second = step_of(races.perform(race_of, world, once), "decider", "create")
    late = [replace(once, switches=(*once.switches, (at, "copier"))) for at in range(second - 8, second + 1)]
    for schedule in late:
        races.perform(race_of, world, schedule)
    monkeypatch.setattr("tierstore.tiers.gc.sweep.append", _appending_anyhow(append))
    broken = 0
    for schedule in late:
        try:
            races.perform(race_of, world, schedule)
        except AssertionError as error:
            broken += "is not whole on" in str(error)
    assert broken
