"""What the proofs of retention and garbage collection share: small real checkpoints, clients, and the promises, checked on raw bytes.

The promises (DESIGN.md §8, PROTOCOLS.md §6) are read off the files themselves, as nothing of the code under test would: only the formats
are decoded with the library.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from stepping_kit import tiers_over
from tiers_kit import SteppedClock, persist_rank, shard_of

from tierstore.clock import Clock
from tierstore.config_retention import GcConfig, KeepRule, ProtectConfig, RetentionConfig
from tierstore.errors import NotFoundError
from tierstore.format.manifest import Manifest, decode_manifest
from tierstore.format.record import Record, decode_record
from tierstore.names import MANIFEST, Attempt, attempt_of_log_path
from tierstore.storage.contract import Storage
from tierstore.tiers.catalog import CheckpointInfo, RecordCache, scan
from tierstore.tiers.commit import commit
from tierstore.tiers.copying import Proof
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.leases import LeaseWatch
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.replica import Want, open_replica
from tierstore.tiers.retention.plan import Reason
from tierstore.tiers.tier import Tier, Tiers

RUN = "run"
NAMES = ("node", "shared", "far")
AUTHORITY = "shared"
DURABLE = ("shared", "far")
"""The tiers whose copies count: not the node's."""
HOUR_S = 3600.0
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

Files = Mapping[str, Mapping[str, bytes]]
"""Tier → path → bytes."""


def save_id_at(at: datetime, number: int) -> str:
    """A ULID that says `at` and `number`: what `new_save_id` makes, without the dice."""
    value = (int(at.timestamp() * 1000) << 80) | number
    return "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))


async def persist_small(tiers: Tiers, attempt: Attempt, rank: int, *, tier: str = AUTHORITY, world_size: int = 1, **facts: Any) -> None:
    """One rank's part of a checkpoint of some kilobytes, onto `tier`."""
    shard = shard_of(rank, world_size, seed=attempt.step, rows=1, columns=64)
    await persist_rank(tiers, attempt, tiers.get(tier), rank=rank, world_size=world_size, shard=shard, **facts)


async def save_small(tiers: Tiers, attempt: Attempt, *, tier: str = AUTHORITY, clock: Clock | None = None, **facts: Any) -> Attempt:
    """A real checkpoint of one rank: its part onto `tier`, and, on the authority, the commit."""
    await persist_small(tiers, attempt, 0, tier=tier, **facts)
    if tier == AUTHORITY:
        await commit(tiers, attempt, deadline_s=0, clock=clock or SteppedClock())
    return attempt


def policy_of(
    *keep: dict[str, Any], min_copies: int = 1, min_keep: int = 1, min_age_s: float = 60.0, tiers: dict[str, Any] | None = None, **gc: Any
) -> RetentionConfig:
    """A policy from its `keep` rules; by default last 1, minutes of age and an hour's window."""
    times = {
        "undelete_window_s": HOUR_S,
        "orphan_grace_s": HOUR_S,
        "lease_ttl_s": 600.0,
        "max_clock_skew_s": 60.0,
        "max_delete_fraction": 1.0,
    }
    return RetentionConfig(
        keep=tuple(KeepRule.model_validate(rule) for rule in keep or ({"last": 1},)),
        protect=ProtectConfig(min_copies=min_copies, min_keep=min_keep, min_age_s=min_age_s),
        gc=GcConfig(**{**times, "max_delete_fraction": 1.0, "max_deletes_per_s": 10**9, **gc}),
        **({"tiers": tiers} if tiers else {}),
    )


def housekeeping(
    tiers: Tiers,
    policy: RetentionConfig | None,
    clock: Clock,
    *,
    cache: RecordCache | None = None,
    leases: LeaseWatch | None = None,
    protected: Mapping[Attempt, Reason] | None = None,
) -> Housekeeping:
    """A client's housekeeping, as a fresh process would have it."""
    return Housekeeping(
        tiers=tiers,
        run=RUN,
        policy=policy,
        clock=clock,
        cache=cache or RecordCache(),
        leases=leases or LeaseWatch(clock),
        protected=lambda: protected or {},
    )


async def files_of_storages(storages: Mapping[str, Storage]) -> dict[str, dict[str, bytes]]:
    """Everything that lies on the tiers."""
    found: dict[str, dict[str, bytes]] = {}
    for name, storage in storages.items():
        found[name] = {info.path: await storage.read(info.path) for info in await storage.list("")}
    return found


async def info_of(tiers: Tiers, attempt: Attempt) -> CheckpointInfo:
    """The catalog's entry of a checkpoint that exists."""
    found = [c for c in (await scan(tiers, attempt.run)).checkpoints if c.attempt == attempt]
    if not found:
        raise NotFoundError(f"{attempt.folder} is no checkpoint", run=attempt.run, step=attempt.step)
    return found[0]


async def load_whole(tiers: Tiers, attempt: Attempt, *, info: CheckpointInfo | None = None) -> None:
    """A reader's way: the catalog (unless it was read before: `info`), the chain of digests, every byte; raises what a load would raise."""
    replica = await open_replica(tiers, info or await info_of(tiers, attempt))
    for file in replica.manifest.files:
        if file.kind == "shard":
            await replica.read([Want(file.name, 0, memoryview(bytearray(file.nbytes)))])
        else:
            await replica.document(file.name)


@functools.lru_cache(maxsize=4096)
def _digest(data: bytes, block_nbytes: int | None) -> str:
    return Proof(digest="", block_nbytes=block_nbytes).digest_of(data)


@functools.lru_cache(maxsize=4096)
def _manifest(data: bytes) -> Manifest:
    return decode_manifest(data)


@functools.lru_cache(maxsize=4096)
def _record(data: bytes) -> Record:
    return decode_record(data)


class Truth:
    """What the bytes on the tiers say, read without the code that is to be proved. `files` must not change."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._logs: dict[str, dict[Attempt, dict[int, Record]]] = {}
        self._facts: dict[Attempt, LogFacts] | None = None

    def logs(self, tier: str = AUTHORITY) -> dict[Attempt, dict[int, Record]]:
        """Attempt → number → record on a tier."""
        if tier not in self._logs:
            found = self._logs[tier] = {}
            for path, data in self.files[tier].items():
                split = attempt_of_log_path(path)
                if split and re.fullmatch(r"\d{6}\.json", split[1]):
                    record = _record(data)
                    found.setdefault(split[0], {})[record.seq] = record
        return self._logs[tier]

    def facts(self) -> dict[Attempt, LogFacts]:
        """What the authority's logs say."""
        if self._facts is None:
            self._facts = {attempt: fold([records[seq] for seq in sorted(records)]) for attempt, records in self.logs().items()}
        return self._facts

    def whole(self, attempt: Attempt, tier: str, fate: Record) -> bool:
        """Whether the tier has all bytes that the commit record stands for."""
        here = self.files[tier]
        data = here.get(attempt.path(MANIFEST))
        if data is None or _digest(data, None) != fate.data["manifest"]:
            return False
        manifest = _manifest(data)
        for file in manifest.files:
            held = here.get(attempt.path(file.name))
            if held is None or len(held) != file.nbytes or _digest(held, manifest.block_nbytes) != file.digest:
                return False
        return True

    def copies(self, attempt: Attempt, fate: Record) -> frozenset[str]:
        """The tiers that have it whole."""
        return frozenset(tier for tier in self.files if self.whole(attempt, tier, fate))

    def existing(self) -> dict[Attempt, LogFacts]:
        """The checkpoints: committed and not swept."""
        return {attempt: facts for attempt, facts in self.facts().items() if facts.committed and not facts.swept}

    def swept(self) -> frozenset[Attempt]:
        return frozenset(attempt for attempt, facts in self.facts().items() if facts.swept)

    def living(self) -> list[Attempt]:
        """What a reader is offered: existing, not hidden, the last attempt of its step; oldest step first."""
        last: dict[int, Attempt] = {}
        for attempt in self.existing():
            last[attempt.step] = max(attempt, last.get(attempt.step, attempt))
        return sorted(a for a, facts in self.existing().items() if last[a.step] == a and not facts.hidden)

    def newest(self) -> frozenset[Attempt]:
        """The highest step, and the latest save: after a rewind both matter."""
        living = self.living()
        return frozenset({living[-1], max(living, key=lambda a: a.save_id)} if living else ())


def check_state(truth: Truth, *, leased: Collection[Attempt] = ()) -> None:
    """The promises that hold at every instant, whatever happened before.

    Args:
        truth: The bytes.
        leased: Checkpoints whose reader holds a living lease since before any `swept`: their files stay, whatever was decided.
    """
    for attempt, records in truth.logs().items():
        numbers = sorted(records)
        trimmed = records[numbers[-1]].kind == "swept" and numbers[0] == 0
        assert trimmed or numbers == list(range(len(numbers))), f"{attempt.name}: the log has the numbers {numbers}"
    for attempt, facts in truth.facts().items():
        if facts.committed and (not facts.swept or attempt in leased):
            assert facts.fate is not None
            assert truth.copies(attempt, facts.fate), f"{attempt.name} exists, and no tier has it whole; its log says {facts}"


def check_step(
    before: Truth,
    after: Truth,
    *,
    min_copies: int = 1,
    min_keep: int = 1,
    keeping: Collection[Attempt] = (),
    leased: Collection[Attempt] = (),
    several: bool = False,
    serial: bool = True,
) -> None:
    """The promises about one step of anybody, crashed or not.

    Args:
        before: The bytes before it.
        after: The bytes after it.
        min_copies: What the policy of who acted protects.
        min_keep: How many checkpoints it keeps whatever the rules say.
        keeping: Those that were promised to stay: pinned, held.
        leased: As `check_state`.
        several: It was more than one step: what was newest or pinned before may have gone by right.
        serial: Nobody else acted meanwhile; else a record that counts for nothing may stand where one was trimmed.
    """
    check_state(after, leased=leased)
    assert before.swept() <= after.swept(), "a swept checkpoint came back"
    gone = after.swept() - before.swept()
    assert not gone & set(keeping), f"promised to stay, but swept: {sorted(a.name for a in gone & set(keeping))}"
    if not several:
        _check_sweeps(before, after, gone, serial=serial)
    living = len(before.living())
    assert len(after.living()) >= min(living, min_keep), f"{len(after.living())} of {living} are left"
    for attempt, facts in after.existing().items():
        assert facts.fate is not None
        was = len([t for t in before.copies(attempt, facts.fate) if t in DURABLE])
        now = len([t for t in after.copies(attempt, facts.fate) if t in DURABLE])
        assert now >= min(was, min_copies), f"{attempt.name} had {was} durable copies, and has {now}"


def _check_sweeps(before: Truth, after: Truth, gone: Collection[Attempt], *, serial: bool) -> None:
    """What one step swept was neither pinned, held nor the newest before it, and had expired."""
    kept = {a for a, facts in before.existing().items() if facts.pins or any(h.until is None for h in facts.holds)}
    newest = {a for a in before.newest() if not any(b.step == a.step and b > a for b in after.existing())}
    for what, those in (("pinned or held", kept), ("the newest", newest)):
        assert not those & set(gone), f"{what}, but swept: {sorted(a.name for a in those & set(gone))}"
    for attempt in gone:
        records = after.logs()[attempt]
        if serial and len(records) == max(records) + 1:  # not trimmed yet
            earlier = fold([records[seq] for seq in sorted(records)[:-1]])
            assert earlier.expired is not None, f"{attempt.name} was swept, but had not expired"


async def check_alone(storages: Mapping[str, Storage], truth: Truth, names: Collection[str] = DURABLE) -> None:
    """Without the authority: what a tier alone lists as a checkpoint is whole."""
    for name in names:
        tier = Tier(name=name, storage=storages[name], scope="shared")
        alone = Tiers(tiers=(tier,), authority=tier, durable_at=tier, store_id="kit")
        for info in (await scan(alone, RUN)).checkpoints:
            if info.usable:
                assert truth.whole(info.attempt, name, info.records[0]), f"{name} alone shows {info.attempt.name}, which is not whole there"


def garbage(truth: Truth) -> dict[str, list[str]]:
    """What is left of swept and condemned attempts, beyond ``000000`` and ``swept`` on the authority; by tier."""
    facts = truth.facts()
    ended = {a for a, f in facts.items() if f.swept or f.condemned}
    left: dict[str, list[str]] = {}
    for tier, files in truth.files.items():
        for path in files:
            split = attempt_of_log_path(path)
            attempt = split[0] if split else Attempt.parse(RUN, path.split("/")[1]) if path.count("/") >= 2 else None
            if attempt in ended and not (split and tier == AUTHORITY and _stays(truth, attempt, split[1])):
                left.setdefault(tier, []).append(path)
    return left


def _stays(truth: Truth, attempt: Attempt, leaf: str) -> bool:
    records = truth.logs()[attempt]
    return leaf == "000000.json" or (leaf == f"{max(records):06d}.json" and records[max(records)].kind == "swept")


def client_tiers(storages: Mapping[str, Storage], hook: Any = None) -> Tiers:
    """One client's view of the store on `NAMES`."""
    return tiers_over({name: storages[name] for name in storages}, hook)
