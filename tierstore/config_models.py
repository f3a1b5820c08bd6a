"""The configuration as values: saving, loading, resources, all of it together, and the checks across the tiers."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tierstore.config_cadence import SaveEvery
from tierstore.config_mistakes import Mistake, MistakesError, redact
from tierstore.config_retention import Override, RetentionConfig
from tierstore.config_tiers import TierConfig
from tierstore.config_uris import is_local, overlaps
from tierstore.config_values import Count, Duration, Model, Size, Text, Texts, Whole
from tierstore.errors import UsageError
from tierstore.names import check_run

__all__ = ["FilesConfig", "IoConfig", "LoadConfig", "SaveConfig", "StoreConfig", "hydrate_tier", "why_not_hydrated"]

_MIN_BLOCK, _MAX_BLOCK = 4096, 8 * 2**20


class SaveConfig(Model):
    """How saving behaves."""

    every: SaveEvery | None = None
    on_error: Literal["raise", "warn"] = "raise"
    backlog: Literal["block", "skip_oldest"] = "block"
    commit_timeout_s: Duration = Field(1800.0, alias="commit_timeout")
    """How long the committer waits for every rank's part before it condemns the attempt."""
    agreement_timeout_s: Duration = Field(600.0, alias="agreement_timeout")
    """How long ranks that save together wait for each other before the call fails on all of them."""
    patience_s: Duration = Field(60.0, alias="patience")
    """How long a tier may keep failing before a close or a sync without a deadline gives up waiting for it."""
    omit: Annotated[Texts, Field(max_length=100, examples=['["optim.*.master"]'])] | None = None
    """Patterns of names of tensors that are left out of checkpoints on purpose; None: none is."""


class LoadConfig(Model):
    """How loading behaves."""

    hydrate: Text = Field("off", examples=["off"])
    """``off``, or the name of a tier of this node: shard files that a load wants at least half of are copied there first, once a node."""

    fill: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=100)] | None = Field(
        None, examples=[r"[{match: 'model\.(.*)', to: 'optim.master.\1'}]"]
    )
    """Rules by which a wanted tensor that a checkpoint lacks is filled from others that it has; None: an error, as any difference is."""

    @field_validator("hydrate", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if value is False:
            return "off"  # what YAML makes of `off`
        if value is True:
            raise ValueError("it must be the name of a tier, or off")
        return value


class IoConfig(Model):
    """What background work may use."""

    threads: Annotated[Count, Field(le=256)] = 4
    """Threads that read or write local files, for each tier; as many that compute (hash, encode), for all; also how many files are
    copied between tiers at once."""
    nice: Annotated[Whole, Field(le=19)] = 0
    """How much lower than the process's own the priority of those threads is (Linux): training keeps its cores."""
    concurrency: Annotated[Count, Field(le=1024)] = 16
    """Requests in flight to one remote storage."""
    block_nbytes: Size = Field(2**20, alias="block_size")
    """The unit of hashing and verified reading: a power of two from 4 KiB to 8 MiB."""
    max_inflight: Size = 2**30
    """Bytes of saves that may wait in memory."""
    max_scratch: Size = Field(2**28, examples=["256MiB"])
    """Bytes that one load may use beside the memory that it fills."""
    request_timeout_s: Duration = Field(30.0, alias="request_timeout")
    """How long one request may take to connect or to answer."""
    stall_timeout_s: Duration = Field(60.0, alias="stall_timeout")
    """How long a transfer may make no progress before it is broken off and tried again."""

    @field_validator("max_scratch")
    @classmethod
    def _room_for_requests(cls, nbytes: int) -> int:
        if nbytes < 64 * 2**20:
            raise ValueError("requests are up to 16MiB long, and several go at once: they need 64MiB at least")
        return nbytes

    @field_validator("block_nbytes")
    @classmethod
    def _power_of_two(cls, nbytes: int) -> int:
        if nbytes & (nbytes - 1) or not _MIN_BLOCK <= nbytes <= _MAX_BLOCK:
            raise ValueError("a block is a power of two from 4KiB to 8MiB")
        return nbytes


class FilesConfig(Model):
    """How the files of ``tier://`` behave that are no checkpoints."""

    ack: Literal["auto", "nearest", "authority", "durable"] = "auto"
    """When closing a written file returns: once it is on the nearest tier, on the first tier that all nodes see, or on `durable_at`.
    ``auto``: nearest, but authority where the job spans several nodes."""


class StoreConfig(Model):
    """What one configuration names: the tiers, nearest first, and the policies on them. Valid as a whole once it exists."""

    version: Literal[1] = 1
    run: Text | None = None
    tiers: Annotated[tuple[TierConfig, ...], Field(min_length=1, max_length=16)]
    durable_at: Text | None = None
    """As written; `durable_tier` is what it means."""
    save: SaveConfig = SaveConfig()
    retention: RetentionConfig | None = None
    overrides: Annotated[tuple[Override, ...], Field(min_length=1)] | None = None
    io: IoConfig = IoConfig()
    load: LoadConfig = LoadConfig()
    files: FilesConfig = FilesConfig()

    @field_validator("run")
    @classmethod
    def _usable_run(cls, run: str | None) -> str | None:
        return None if run is None else check_run(run)

    @model_validator(mode="after")
    def _fits_together(self) -> StoreConfig:
        mistakes = [
            *_tier_mistakes(self),
            *_durable_mistakes(self),
            *_quantise_mistakes(self),
            *_load_mistakes(self),
            *_retention_mistakes(self),
        ]
        if mistakes:
            raise MistakesError(mistakes)
        return self

    @property
    def authority(self) -> TierConfig:
        """The tier whose log decides: the first of scope ``shared``; with none, the first durable one (PROTOCOLS.md §2)."""
        shared = [t for t in self.tiers if t.scope == "shared"]
        return (shared or [t for t in self.tiers if t.durable])[0]

    @property
    def durable_tier(self) -> TierConfig:
        """The tier on which a verified copy makes a checkpoint durable: `durable_at`, by default the authority."""
        return self.tier(self.durable_at) if self.durable_at else self.authority

    def tier(self, name: str) -> TierConfig:
        """The tier of that name; raises KeyError."""
        return {t.name: t for t in self.tiers}[name]

    def retention_for(self, run: str) -> RetentionConfig | None:
        """The policy for `run`: the first override that matches, laid over the store's own; None if there is no policy."""
        for override in self.overrides or ():
            if fnmatchcase(run, override.match.run):
                given = {
                    name: value
                    for name in type(override.retention).model_fields
                    if (value := getattr(override.retention, name)) is not None
                }
                return self.retention.model_copy(update=given) if self.retention else RetentionConfig(**given)
        return self.retention

    @property
    def fingerprint(self) -> str:
        """Equal for equal configurations, however they were made, secrets included; tells nothing of them.

        A pickle of the whole would not do: it depends on which of its equal strings are one object.
        """
        told = json.dumps(self.model_dump(), sort_keys=True, default=lambda value: pickle.dumps(value).hex())
        return hashlib.sha256(told.encode()).hexdigest()

    def redacted(self) -> dict[str, Any]:
        """All values as JSON can hold them, with every secret in `options` replaced by ``***``."""
        dumped = self.model_dump(mode="json", exclude={"tiers"}, exclude_none=True)
        shown = [{**t.model_dump(mode="json", exclude={"options"}, exclude_none=True), "options": redact(t.options)} for t in self.tiers]
        return {**dumped, "tiers": shown}


def _tier_mistakes(config: StoreConfig) -> Iterator[Mistake]:
    seen_shared = ""
    for i, tier in enumerate(config.tiers):
        for j, earlier in enumerate(config.tiers[:i]):
            if tier.name == earlier.name:
                yield Mistake(
                    path=("tiers", i, "name"), value=tier.name, reason=f"tiers[{j}] has this name too", remedy="give each tier its own name"
                )
            if overlaps(tier.uri, earlier.uri):
                reason = f"it is the same place as tiers[{j}], or one lies inside the other"
                yield Mistake(path=("tiers", i, "uri"), value=tier.uri, reason=reason, remedy="give each tier a place of its own")
        if tier.options and is_local(tier.uri):
            told = ", ".join(map(str, tier.options))
            yield Mistake(path=("tiers", i, "options"), reason=f"a local path takes no options ({told})", remedy="remove them")
        if tier.scope == "shared":
            seen_shared = seen_shared or tier.name
        elif seen_shared:
            reason = f"a node tier stands after the shared tier {seen_shared!r}"
            yield Mistake(path=("tiers", i, "scope"), value="node", reason=reason, remedy="list the tiers from the nearest to the farthest")


def _durable_mistakes(config: StoreConfig) -> Iterator[Mistake]:
    shared = [(i, t) for i, t in enumerate(config.tiers) if t.scope == "shared"]
    remedy = "add a durable tier, or say `durable: true` on one whose loss you accept"
    if not any(t.durable for t in config.tiers):
        yield Mistake(path=("tiers",), reason="no tier is durable: nothing would survive a power loss", remedy=remedy)
        return
    if shared and not shared[0][1].durable:
        i, tier = shared[0]
        reason = f"the first shared tier, {tier.name!r}, decides what is committed, and it is not durable"
        yield Mistake(path=("tiers", i, "durable"), value=False, reason=reason, remedy=remedy)
    if config.durable_at is None:
        return
    named = [t for t in config.tiers if t.name == config.durable_at]
    names = ", ".join(t.name for t in config.tiers if t.durable and (t.scope == "shared" or not shared))
    if not named:
        yield Mistake(path=("durable_at",), value=config.durable_at, reason="no tier has this name", remedy=f"name one of {names}")
    elif not named[0].durable or (shared and named[0].scope == "node"):
        what = "is lost with the node" if named[0].durable else "is not durable"
        yield Mistake(path=("durable_at",), value=config.durable_at, reason=f"this tier {what}", remedy=f"name one of {names}")


def _quantise_mistakes(config: StoreConfig) -> Iterator[Mistake]:
    """Only a tier that no ordinary resume reads, and that nothing else depends on, may hold what is not exact."""
    if not any(t.durable for t in config.tiers) or (config.durable_at and config.durable_at not in [t.name for t in config.tiers]):
        return  # which tier that is can't be told yet
    able = [t.name for t in config.tiers if t.scope == "shared" and t.name not in (config.authority.name, config.durable_tier.name)]
    remedy = f"quantise on {' or '.join(able)}" if able else "add a tier behind them for it, or leave quantise out"
    for i, tier in enumerate(config.tiers):
        if tier.quantise is None:
            continue
        if tier.name == config.authority.name:
            reason = "this tier decides what is committed: its copy must be exact"
        elif tier.name == config.durable_tier.name:
            reason = "this tier is durable_at: its copy must be exact"
        elif tier.scope == "node":
            reason = "a node's own tier is what an ordinary resume reads: its copy must be exact"
        else:
            continue
        yield Mistake(path=("tiers", i, "quantise"), value=tier.quantise.scheme, reason=reason, remedy=remedy)


def why_not_hydrated(config: StoreConfig, name: str) -> tuple[str, str] | None:
    """Why loads can't be hydrated onto the tier `name`, and what to write instead; None where they can.

    It must be a disk of the node, reached through the operating system (its processes agree there by a lock), and stand before the tier
    that decides: what loads bring there comes and goes, and must never be what a checkpoint's life depends on.
    """
    before = config.tiers[: [t.name for t in config.tiers].index(config.authority.name)]
    able = [t.name for t in before if t.scope == "node" and is_local(t.uri)]
    if name in able:
        return None
    remedy = f"name {' or '.join(able)}, or write off" if able else "put a folder of the node's own before the other tiers, or write off"
    tier = next((t for t in config.tiers if t.name == name), None)
    if tier is None:
        return "no tier has this name", remedy
    if tier.scope != "node":
        return "all nodes see this tier: there is nothing to bring nearer to one of them", remedy
    if tier.name == config.authority.name:
        return "this tier decides what is committed, and holds every checkpoint by itself", remedy
    if not is_local(tier.uri):
        return "it is no path: the node's processes could not agree there who copies", remedy
    return "it stands behind the tier that decides what is committed", remedy


def hydrate_tier(config: StoreConfig, wanted: str | Literal[False] | None = None) -> str | None:
    """The tier that a load hydrates onto, if it does: `wanted`, or (None) what the configuration says.

    Raises:
        UsageError: `wanted` is no tier for that.
    """
    name = config.load.hydrate if wanted is None else wanted
    if name is False or name == "off":
        return None
    if (found := why_not_hydrated(config, name)) is not None:
        raise UsageError(f"nothing can be hydrated onto {name!r}: {found[0]}", hint=found[1], tier=name)
    return name


def _load_mistakes(config: StoreConfig) -> Iterator[Mistake]:
    name = config.load.hydrate
    if name != "off" and (found := why_not_hydrated(config, name)) is not None:
        yield Mistake(path=("load", "hydrate"), value=name, reason=found[0], remedy=found[1])


def _retention_mistakes(config: StoreConfig) -> Iterator[Mistake]:
    names = [t.name for t in config.tiers]
    durable = sum(t.durable and t.quantise is None for t in config.tiers)
    policies: list[tuple[tuple[str | int, ...], Any]] = [(("retention",), config.retention)] if config.retention else []
    policies += [(("overrides", i, "retention"), o.retention) for i, o in enumerate(config.overrides or ())]
    for path, policy in policies:
        for name in policy.tiers or ():
            if name not in names:
                yield Mistake(path=(*path, "tiers", name), reason="no tier has this name", remedy=f"the tiers are {', '.join(names)}")
        if policy.protect is not None and policy.protect.min_copies > durable:
            exact = " with exact copies" if any(t.quantise is not None for t in config.tiers) else ""
            reason = f"there are only {durable} durable tiers{exact}: nothing could ever be evicted or kept to this"
            yield Mistake(
                path=(*path, "protect", "min_copies"), value=policy.protect.min_copies, reason=reason, remedy=f"write at most {durable}"
            )
    if config.retention is None:
        for i, override in enumerate(config.overrides or ()):
            if override.retention.keep is None:
                yield Mistake(
                    path=("overrides", i, "retention", "keep"),
                    reason="missing, and there is no retention that it could come from",
                    remedy="say what is kept, e.g. keep: [{last: 5}]",
                )
