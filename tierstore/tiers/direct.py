"""A save straight to a tier that stores unchanged bytes once: what its shard takes from earlier checkpoints there.

What is the same is known by its digests alone, so the image, which lies in memory, is hashed before it is written, and only then packed:
each block is hashed once. That takes longer than hashing beside the write; so where the last save found nothing, the next one is hashed
beside it, and compared for the sake of the one after it. All else is as for a copy (`references`): the log of whoever gives bytes says so
before the shard is there. That the attempt is not committed yet changes nothing. It lives until its fate is final; one that never commits
is condemned, as any orphan is, and holds nothing from when its shards are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.format.index import FileEntry
from tierstore.names import Attempt
from tierstore.storage.contract import InMemory, Source, Unchanged
from tierstore.storage.sources import bare_of
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.tier import Tier

__all__ = ["Bare", "Refers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refers:
    """How one rank's share of a save may refer to what its tier has."""

    context: CopyContext
    attempt: Attempt
    tier: Tier
    block_nbytes: int
    whole: bool
    """The share is all of the checkpoint: later ones compare with it whatever they are cut into."""

    async def expected(self, name: str, shard: Source) -> bool:
        """Whether to hash the shard first: it lies in memory, and an earlier checkpoint is there that it probably may take bytes from."""
        references = self.context.references
        if not isinstance(shard, InMemory) or self._key in references.in_vain:
            return False
        return await references.may_have(self.context.tiers, self.attempt, self.tier, name, shard.nbytes)

    async def unchanged(self, file: FileEntry) -> tuple[Unchanged, ...]:
        """The bytes of the hashed shard that are there already, and stay: `References.unchanged`."""
        context = self.context
        found = await context.references.unchanged(context.tiers, self.attempt, self.tier, file, self.block_nbytes, clock=context.clock)
        if not found:
            context.references.in_vain.add(self._key)
        return found

    async def learned(self, file: FileEntry) -> None:
        """The shard is there: later saves are compared with it."""
        references = self.context.references
        if self._key in references.in_vain:
            same = await references.unchanged_nbytes(self.context.tiers, self.attempt, self.tier, file, self.block_nbytes)
            if same:
                references.in_vain.discard(self._key)
        references.learned(self.attempt, [file], self.block_nbytes, whole=self.whole)

    @property
    def _key(self) -> tuple[str, str]:
        return self.attempt.run, self.tier.name


class Bare:
    """A source in memory without the work on its bytes (`contract.WorksBeside`): they are pulled again when they are written."""

    def __init__(self, source: InMemory, nbytes: int) -> None:
        self._view = bare_of(source)
        self.nbytes = nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        return self._view(offset, nbytes)
