"""What the coordinator tells the ranks of a save, in their plans; and the checks that they all do the same one.

Torch's planners can cache plans: one that has not changed is then not sent, and would come back to its rank as it was last time, save id
and all. So it is sent as a usable plan without items, and the rank puts the items back that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tierstore.dcp.place import Place
from tierstore.errors import IncompleteError, UsageError
from tierstore.names import Attempt
from tierstore.state.differences import selected
from tierstore.state.paths import name_of
from tierstore.state.ranks import differences
from tierstore.units import format_some

__all__ = ["Orders", "check_opened", "check_same", "check_written", "whole_plan", "with_orders", "without"]

_KEPT = "tierstore:"
"""Before a planner's key in torch's cache of final plans: where the last whole plan of that planner lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the coordinator tells a rank, in `SavePlan.storage_data`.

    Attributes:
        attempt: The attempt that all ranks save.
        rank: The rank's place among those that save together.
        world_size: How many these are.
        opened: What the coordinator's store has in common with every rank's (`Store.opened`).
        omit: The patterns of what all ranks leave out of it.
        reuse: The plan has not changed since this planner's last save: the rank takes the items that it had then.
    """

    attempt: Attempt
    rank: int
    world_size: int
    opened: Mapping[str, Any]
    omit: tuple[str, ...] = ()
    reuse: bool = False


def without(plan: SavePlan, omit: Sequence[str]) -> SavePlan:
    """The plan without the tensors that `omit` names, by globs of their dotted names, as `Store.save` does: nobody stores these."""
    paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    tensors = {item.index.fqn for item in plan.items if item.type is not WriteItemType.BYTE_IO} if omit else set()
    left_out = {fqn for fqn in tensors if selected(name_of(tuple(paths.get(fqn) or (fqn,))), omit)}
    return replace(plan, items=[item for item in plan.items if item.index.fqn not in left_out]) if left_out else plan


def with_orders(plans: list[SavePlan], attempt: Attempt, opened: Mapping[str, Any], omit: tuple[str, ...]) -> list[SavePlan]:
    """The plans as they are sent: each with its rank's orders, and usable also where torch's cache stands for it."""
    return [
        replace(
            plan,
            items=plan.items if plan.usable else [],
            usable=True,
            storage_data=Orders(attempt=attempt, rank=rank, world_size=len(plans), opened=opened, omit=omit, reuse=not plan.usable),
        )
        for rank, plan in enumerate(plans)
    ]


def whole_plan(plan: SavePlan, planner: SavePlanner, orders: Orders) -> SavePlan:
    """The plan with its items. Whole ones are kept beside torch's own copy in its cache, which ours, without items, would replace."""
    cache: dict[str, SavePlan] = SavePlanner._cached_final_save_plan
    key = getattr(planner, "_cached_plans_key", type(planner).__name__)
    if orders.reuse:
        kept = cache.get(_KEPT + key)
        if kept is None:
            raise UsageError(
                "the planner's cache says that the plan has not changed, but this process never wrote it with a TierStorageWriter",
                hint="don't change the writer's class while a planner caches plans: use another planner class for each",
            )
        before = kept.storage_data.omit if isinstance(kept.storage_data, Orders) else orders.omit
        if before != orders.omit:
            raise UsageError(
                f"the planner's cache has a plan that leaves out {list(before)}, and this save is to leave out {list(orders.omit)}",
                hint="keep omit as it is while a planner caches plans, or use another planner class for the other saves",
            )
        cache[key] = kept
        return replace(kept, storage_data=orders)
    if isinstance(planner, DefaultSavePlanner) and planner._enable_plan_caching:
        cache[_KEPT + key] = plan
    return plan


def check_same(place: Place, omit: tuple[str, ...], orders: Orders) -> None:
    """Raises UsageError where this rank means another run or step than the coordinator, or leaves out something else."""
    mine, told = (place.run, place.step), (orders.attempt.run, orders.attempt.step)
    if mine != told:
        raise UsageError(
            f"this rank saves {mine[0]}@{mine[1]}, the coordinator {told[0]}@{told[1]}", hint="pass the same checkpoint_id on all ranks"
        )
    if omit != orders.omit:
        raise UsageError(
            f"this rank leaves {list(omit)} out of {mine[0]}@{mine[1]}, the coordinator {list(orders.omit)}",
            hint="pass the same omit= on all ranks, and the same save.omit in their configurations",
        )


def check_opened(opened: Mapping[str, Any], orders: Orders) -> None:
    """Raises UsageError where this rank has opened another store than the coordinator."""
    if apart := differences(orders.opened, opened):
        raise UsageError(
            f"this rank has opened another store than the coordinator: {'; '.join(apart)}",
            hint="start all ranks with the same configuration, run and environment (TIERSTORE_CONFIG, TIERSTORE_RUN)",
        )


def check_written(metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """What was planned was written: a rank's lost item must not become a checkpoint without it."""
    written = {result.index for of_rank in results for result in of_rank}
    planned: list[MetadataIndex] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            planned += [MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks]
        else:
            planned.append(MetadataIndex(fqn))
    missing = [index for index in planned if index not in written]
    if missing:
        shown = format_some((f"{index.fqn}{list(index.offset) if index.offset else ''}" for index in missing), 8)
        raise IncompleteError(
            f"{len(missing):,} of {len(planned):,} planned items were written by no rank: {shown}",
            hint="the planner and its cache disagree: save again with a new planner",
        )
