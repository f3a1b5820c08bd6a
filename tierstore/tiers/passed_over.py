"""Which copies of a checkpoint's files were passed over while it was read, and why; and the error where there is no other left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.errors import AccessError, IntegrityError, NotFoundError, StorageError, TemporaryError, TierStoreError
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.leases import Lease
from tierstore.tiers.quarantine import ReadAgain
from tierstore.tiers.sources import Source
from tierstore.tiers.tier import Tier

__all__ = ["BadCopy", "OnDamage", "PassedOver", "damaged_block"]

log = logging.getLogger(__name__)

OnDamage = Callable[[CheckpointInfo, Tier, str, str, ReadAgain | None], None]
"""Told of each file that a whole copy lacks or has damaged, once, with what is wrong; it may not wait (`Noting.note`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCopy:
    """A copy that was passed over, and why; what a repair can begin with. `file` is empty where the tier did not answer."""

    tier: str
    file: str
    reason: str


class PassedOver:
    """What one open checkpoint knows of its copies.

    Args:
        info: The checkpoint.
        sources: Where it is read from, nearest first.
        lease: Asked what became of the checkpoint, where no copy is left.
        on_damage: Told of damage in copies that are recorded as whole; None: nobody is.
    """

    def __init__(self, info: CheckpointInfo, sources: Sequence[Source], lease: Lease | None, on_damage: OnDamage | None = None) -> None:
        self.bad_copies: list[BadCopy] = []
        self._info = info
        self._sources = tuple(sources)
        self._lease = lease
        self._on_damage = on_damage
        self._told: set[tuple[str, str]] = set()
        self._reasons: dict[tuple[str, str], TierStoreError] = {}
        self._absent: set[tuple[str, str]] = set()
        self._down: set[str] = set()

    def order(self, file: str) -> list[Source]:
        """Where to look for a file: nearest first, tiers that did not answer last, not where it is known to be absent. After all exact
        copies, whether these answer or not, come the quantised ones."""
        able = [s for s in self._sources if (s.files is None or file in s.files) and (s.tier.name, file) not in self._absent]
        return sorted(able, key=lambda s: (s.quantised is not None, s.tier.name in self._down))

    def add(self, source: Source) -> None:
        """A copy of some files that came while the checkpoint is open: it is asked first from now on."""
        self._sources = (source, *self._sources)
        self._absent -= {(source.tier.name, file) for file in source.files or ()}

    def answers(self, tier: Tier) -> None:
        """A tier that did not answer does again."""
        self._down.discard(tier.name)

    def note(self, source: Source, file: str, error: TierStoreError, again: ReadAgain | None = None) -> None:
        """Notes why a copy was not used; the first time for a tier and file it is said aloud.

        `again` reads once more what came wrong, for who records damage; None: this error is proof enough.
        """
        tier = source.tier
        damaged = isinstance(error, (IntegrityError, NotFoundError)) and source.expected
        if damaged and self._on_damage is not None and (tier.name, file) not in self._told:
            self._told.add((tier.name, file))
            self._on_damage(self._info, tier, file, error.message, again)
        if isinstance(error, (NotFoundError, AccessError)):
            self._absent.add((tier.name, file))
        elif isinstance(error, StorageError):
            self._down.add(tier.name)
        if (tier.name, file) in self._reasons:
            return
        self._reasons[tier.name, file] = error
        if isinstance(error, NotFoundError) and not source.expected:
            return  # nobody promised that this tier has it
        self.bad_copies.append(BadCopy(tier=tier.name, file=file, reason=error.message))
        log.warning(
            "run=%s step=%d tier=%s file=%s is passed over for the next tier: %s",
            self._info.run,
            self._info.step,
            tier.name,
            self._info.attempt.path(file),
            error.message,
        )

    def reasons(self, file: str) -> str:
        """Why copies of a file were not used so far, for people; empty: there was no other."""
        return "; ".join(f"{tier}: {error.message}" for (tier, name), error in self._reasons.items() if name == file)

    async def no_copy(self, file: str, what: str = "") -> TierStoreError:
        """The error for a file, or the part of it that `what` names, that is good nowhere: that the checkpoint was deleted, if it was."""
        error = self._bad_everywhere(file, what)
        return error if self._lease is None else await self._lease.explain(error)

    def _bad_everywhere(self, file: str, what: str) -> TierStoreError:
        found = [(s.tier, self._reasons[s.tier.name, file]) for s in self._sources if (s.tier.name, file) in self._reasons]
        listed = "; ".join(f"{tier.name}: {type(error).__name__}: {error.message}" for tier, error in found) or "no tier should hold it"
        message = f"no tier has a good copy of {what}{file} of step {self._info.step} of run {self._info.run!r}: {listed}"
        facts = {"run": self._info.run, "step": self._info.step, "file": file, "tiers": {tier.name: e.message for tier, e in found}}
        if found and all(isinstance(error, StorageError) for _, error in found):
            return TemporaryError(
                message, hint="bring one of these tiers back, or try again later; nothing is known to be damaged", **facts
            )
        return IntegrityError(
            message,
            hint="load an older step, or `resume(fallback=True)`; `tierstore verify --level full` shows all that is damaged",
            **facts,
        )


def damaged_block(number: int) -> IntegrityError:
    """The error for a copy's file, one of whose blocks is not what the index promises."""
    return IntegrityError(f"block {number} is damaged: its SHA-256 is not the one in the index")
