"""What the worker is given: one save, and the rules that it works by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tierstore.config_models import StoreConfig
from tierstore.format.digest import BLOCK_NBYTES
from tierstore.format.index import TensorEntry
from tierstore.names import Attempt
from tierstore.storage.contract import Source

__all__ = ["PendingCopy", "SaveJob", "WorkerOptions", "worker_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One rank's share of one save, staged in memory.

    `shard` is the image's bytes and stays valid until `release` is called, which happens once: when the image is durable on a tier,
    or when the save is given up. `facts` of rank 0 hold all that a committer needs (``created_at``, ``metrics``, ``tags``, ``final``).
    `nbytes` is what the image takes in memory.
    """

    attempt: Attempt
    rank: int
    world_size: int
    shard: Source
    tensors: Sequence[TensorEntry]
    objects: bytes
    facts: Mapping[str, Any]
    nbytes: int
    release: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The worker's rules. Sizes in bytes, times in seconds."""

    backlog: Literal["block", "skip_oldest"] = "block"
    """When images fill `max_inflight`: the next save waits, or the oldest save that is not being written is given up."""
    on_error: Literal["raise", "warn"] = "raise"
    max_inflight: int = 1 << 30
    """Bytes of images in memory. One save is always let in, however big."""
    max_waiting: int = 4
    """With ``skip_oldest``: so many checkpoints wait for a further tier; older ones are put off until it is idle."""
    copy_nbytes: int = 256 << 20
    """Bytes in flight over all copies."""
    files_in_flight: int = 4
    block_nbytes: int = BLOCK_NBYTES
    commit_timeout_s: float = 1800.0
    """How long to wait for the other ranks' parts before the attempt is condemned."""
    poll_s: float = 0.1
    """The first pause before looking again for what another process has to do first; pauses grow to 20 times this."""
    rescan_s: float = 300.0
    """How often an idle worker looks for work that other processes left."""
    housekeep_s: float = 600.0
    """The longest pause between two looks for what retention has to do; commits and copies let it look at once."""
    retry_first_s: float = 0.5
    retry_most_s: float = 60.0
    patience_s: float = 60.0
    """A drain without a deadline gives up on a tier that has failed for so long. Nothing is lost: the next process resumes."""


def worker_options(config: StoreConfig) -> WorkerOptions:
    """The rules that a configuration asks for."""
    return WorkerOptions(
        backlog=config.save.backlog,
        on_error=config.save.on_error,
        max_inflight=config.io.max_inflight,
        files_in_flight=config.io.threads,
        block_nbytes=config.io.block_nbytes,
        commit_timeout_s=config.save.commit_timeout_s,
        patience_s=config.save.patience_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCopy:
    """Something that is not where it should be yet. `nbytes` is what is left to copy, 0 where unknown."""

    attempt: Attempt
    tier: str
    nbytes: int
    reason: str
    """What it waits for: a retry and its error, another rank, its turn."""
    failing_s: float = 0.0
    """For how long its tier, or the authority whose commit it waits for, has been failing, in seconds; 0 if it is not."""
