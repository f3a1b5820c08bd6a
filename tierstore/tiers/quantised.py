"""Quantised copies of checkpoints: when a tier gets one, what it records, and what proves it when it is read.

The chain of trust: ``replicated`` record → ``quantised.json`` beside the tier's copies of the log → the footer of each packed shard → its
frames, which the storage proves. Blocks that are exact are proved by their digests, as everywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from tierstore.config_packing import Scheme
from tierstore.errors import IntegrityError, NotFoundError
from tierstore.format.digest import digest_of
from tierstore.format.manifest import LOSSY_GENERATION, QUANTISE
from tierstore.format.packed.types import packable, parse_packed_name
from tierstore.format.quantised import QuantisedCopy, QuantisedFile, decode_quantised, encode_quantised
from tierstore.names import QUANTISED, Attempt
from tierstore.storage.contract import PackedFacts, PackHints, WritesPacked
from tierstore.storage.packed import PackedStorage
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together

__all__ = [
    "EXACT",
    "Lossy",
    "QuantisedReader",
    "Quantising",
    "Shards",
    "are_lossy_now",
    "generation_of",
    "known_scheme",
    "look_at_shards",
    "lossy_blocks",
    "lossy_files",
    "put_document",
    "quantising",
    "told_by_document",
]

log = logging.getLogger(__name__)

_SCHEMES = get_args(Scheme)
_ANEW = "run `tierstore repair`: the copy is written anew from an exact one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantising:
    """How one checkpoint is to be stored on one tier.

    Attributes:
        scheme: By which scheme; empty: exact.
        generation: How many lossy copies would stand behind one another with this one.
        why_exact: Why a tier that quantises gets an exact copy; empty where it does not quantise, or gets none.
    """

    scheme: str = ""
    generation: int = 1
    why_exact: str = ""

    @property
    def hints(self) -> PackHints:
        """For the storage that packs its shards."""
        return PackHints(exact=not self.scheme, scheme=self.scheme or None)


EXACT = Quantising()


def generation_of(facts: Mapping[str, Any]) -> int:
    """How many quantised copies stand behind one another in what the training was resumed from, by a manifest's facts."""
    told = facts.get(LOSSY_GENERATION)
    return told if type(told) is int and told > 0 else 0


def quantising(tier: Tier, facts: Mapping[str, Any], *, exact: bool = False) -> Quantising:
    """How a tier stores a checkpoint.

    Args:
        tier: Where to.
        facts: Those of its manifest.
        exact: Somebody asks for an exact copy.
    """
    if tier.quantise is None or not isinstance(tier.storage, WritesPacked):
        return EXACT
    wanted, generation = str(facts.get(QUANTISE)), generation_of(facts)
    if exact or wanted == "exact":
        return Quantising(why_exact="it was asked for")
    if generation >= tier.quantise.max_generation:
        what = "a quantised copy" if generation == 1 else f"{generation} quantised copies, one behind the other"
        return Quantising(why_exact=f"the training was resumed from {what}, and max_generation is {tier.quantise.max_generation}")
    return Quantising(scheme=wanted if wanted in _SCHEMES else tier.quantise.scheme, generation=generation + 1)


@dataclass(slots=True, kw_only=True)
class Shards:
    """What a tier's packed shards say of themselves: those that are not exact, and those whose footers are damaged, with what is wrong."""

    lossy: dict[str, PackedFacts] = field(default_factory=dict)
    damaged: dict[str, IntegrityError] = field(default_factory=dict)


async def look_at_shards(tier: Tier, attempt: Attempt, names: Sequence[str]) -> Shards:
    """Asks a tier's shards what they are; one that is not there is left out.

    Raises:
        StorageError: The tier can't be read.
    """
    storage, found = tier.storage, Shards()
    if not isinstance(storage, WritesPacked):
        return found

    async def one(name: str) -> None:
        try:
            facts = await storage.packed_facts(attempt.path(name))
        except NotFoundError:
            return
        except IntegrityError as error:
            found.damaged[name] = error
            return
        if facts is not None and facts.lossy:
            found.lossy[name] = facts

    await together(one, names)
    return found


async def are_lossy_now(tier: Tier, attempt: Attempt) -> bool:
    """Whether any of a tier's shards is not exact, or has a damaged footer, by what lies there now, whatever is remembered of them.

    A storage that was opened before the tier had packed files can't tell what such a one is: it may be not exact.

    Raises:
        StorageError: The tier can't be read.
    """
    names = [info.path.rpartition("/")[2] for info in (await tier.storage.children(attempt.folder)).files]
    if not isinstance(tier.storage, PackedStorage):
        return any(parse_packed_name(name) for name in names)
    for name in names:
        tier.storage.forget(attempt.path(name))
    found = await look_at_shards(tier, attempt, [name for name in names if packable(name)])
    return bool(found.lossy or found.damaged)


async def lossy_files(tier: Tier, attempt: Attempt, names: Sequence[str]) -> dict[str, PackedFacts]:
    """Those of a tier's shards that are not exact, and what they say of themselves.

    Raises:
        IntegrityError: A footer is damaged.
        StorageError: The tier can't be read.
    """
    found = await look_at_shards(tier, attempt, names)
    for error in found.damaged.values():
        raise error
    return found.lossy


async def put_document(tier: Tier, attempt: Attempt, lossy: Mapping[str, PackedFacts], *, scheme: str, generation: int) -> dict[str, Any]:
    """Writes what proves a quantised copy; returns what its ``replicated`` record says of it."""
    files = [
        QuantisedFile(name=name, footer=facts.digest, stored_nbytes=facts.stored_nbytes, tensors=facts.quantised)
        for name, facts in lossy.items()
    ]
    copy = QuantisedCopy.of(attempt.run, attempt.step, attempt.save_id, generation=generation, scheme=scheme, files=files)
    data = await asyncio.to_thread(encode_quantised, copy)
    await tier.storage.put(attempt.quantised_path, data)
    return _told(copy, data)


async def told_by_document(tier: Tier, attempt: Attempt) -> dict[str, Any]:
    """What a record is to say of a quantised copy whose own was lost with the log: the document is taken as it is.

    Raises:
        IntegrityError: It is missing, damaged, or that of another checkpoint.
        StorageError: It can't be read.
    """
    copy = await QuantisedReader(tier, attempt, {}, 1).document()
    return _told(copy, await tier.storage.read(attempt.quantised_path))


def _told(copy: QuantisedCopy, data: bytes) -> dict[str, Any]:
    return {
        "digest": digest_of(data),
        "scheme": copy.scheme,
        "generation": copy.generation,
        "max_error": copy.max_error,
        "mean_error": copy.mean_error,
    }


def known_scheme(told: Mapping[str, Any]) -> str | None:
    """The scheme of a quantised copy, where it has one; None: it has several, or none that this version knows."""
    scheme = told.get("scheme")
    return str(scheme) if scheme in _SCHEMES else None


def lossy_blocks(facts: PackedFacts, block_nbytes: int) -> frozenset[int]:
    """The blocks of `block_nbytes` bytes that are not exact, by number; the file may be packed in blocks of another size."""
    size = facts.block_nbytes
    if size == block_nbytes:
        return facts.lossy
    return frozenset(
        block for number in facts.lossy for block in range(number * size // block_nbytes, -(-(number + 1) * size // block_nbytes))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossy:
    """What of a shard is not exact.

    Attributes:
        footer: The digest of its footer; empty where all of it is exact.
        blocks: The blocks that are not, by number.
    """

    footer: str = ""
    blocks: frozenset[int] = frozenset()


class QuantisedReader:
    """One quantised copy, for who reads it: which blocks are not exact, once their file's footer is proved.

    Args:
        tier: Where it lies.
        attempt: Whose copy.
        told: What its ``replicated`` record says; empty where that is lost with the log: then the document is taken as it is.
        block_nbytes: The block size of the checkpoint's digests.
    """

    def __init__(self, tier: Tier, attempt: Attempt, told: Mapping[str, Any], block_nbytes: int) -> None:
        self.tier = tier
        self.told = told
        self._attempt = attempt
        self._block_nbytes = block_nbytes
        self._files: dict[str, QuantisedFile] | None = None
        self._proved: dict[str, str] = {}
        self._turn = asyncio.Lock()

    async def document(self) -> QuantisedCopy:
        """What proves the copy.

        Raises:
            IntegrityError: It is missing, damaged, or not the one that the record names.
            StorageError: It can't be read.
        """
        path = self._attempt.quantised_path
        try:
            data = await self.tier.storage.read(path)
        except NotFoundError as error:
            raise IntegrityError(f"{QUANTISED}, which proves this quantised copy, is missing", hint=_ANEW, file=path) from error
        if "digest" in self.told and digest_of(data) != self.told["digest"]:
            raise IntegrityError(f"{QUANTISED} is not the one that the copy's record names", hint=_ANEW, file=path)
        copy = await asyncio.to_thread(decode_quantised, data)
        if (copy.run, copy.step, copy.save_id) != (self._attempt.run, self._attempt.step, self._attempt.save_id):
            raise IntegrityError(f"{QUANTISED} is that of {copy.run}@{copy.step} ({copy.save_id})", hint=_ANEW, file=path)
        return copy

    async def lossy(self, name: str) -> frozenset[int]:
        """The blocks of a shard that are not exact, by number; raises as `document`, and where the shard's footer is not proved by it."""
        return (await self.look(name)).blocks

    async def look(self, name: str) -> Lossy:
        """As `lossy`. Who reads the shard asks before and after: if the answers differ, somebody has written it anew meanwhile."""
        async with self._turn:
            # The storage remembers footers; asked each time, for the shard may have been written anew, exact, since the last one.
            facts = (await lossy_files(self.tier, self._attempt, [name])).get(name)
            if facts is None:
                return Lossy()
            if self._proved.get(name) != facts.digest:
                await self._prove(name, facts)
                self._proved[name] = facts.digest
            return Lossy(footer=facts.digest, blocks=lossy_blocks(facts, self._block_nbytes))

    async def _prove(self, name: str, facts: PackedFacts) -> None:
        if self._files is None:
            copy = await self.document()
            self.told = self.told or {"scheme": copy.scheme, "max_error": copy.max_error, "mean_error": copy.mean_error}
            self._files = {file.name: file for file in copy.files}
        promised = self._files.get(name)
        if promised is None or promised.footer != facts.digest:
            raise IntegrityError(
                f"the footer of {name} on tier {self.tier.name!r} is not the one that {QUANTISED} promises",
                hint=_ANEW,
                tier=self.tier.name,
                file=self._attempt.path(name),
            )
