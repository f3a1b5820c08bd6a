"""What the ranks that save together have to agree on before they begin: one save id for one attempt (PROTOCOLS.md §2)."""

from __future__ import annotations

import torch.distributed as dist

from tierstore.errors import UsageError

__all__ = ["from_rank_0"]


def from_rank_0(value: str, *, rank: int, world_size: int) -> str:
    """Rank 0's `value`, on every rank: a broadcast over the default process group, in the caller's thread.

    Raises:
        UsageError: Several processes save together, but the process group is missing, or another one. Without it every rank would
            save an attempt of its own, which would wait for the others' parts and never commit.
    """
    if world_size == 1:
        return value
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"world_size is {world_size}, but torch.distributed has no process group to agree on a save id",
            hint="call torch.distributed.init_process_group(...) before the first save, or open the store with world_size=1",
        )
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise UsageError(
            f"the store was opened as rank {rank} of {world_size}, the process group says {dist.get_rank()} of {dist.get_world_size()}",
            hint="pass rank=dist.get_rank(), world_size=dist.get_world_size() to tierstore.open",
        )
    told: list[object] = [value]
    dist.broadcast_object_list(told, src=0)
    return str(told[0])
