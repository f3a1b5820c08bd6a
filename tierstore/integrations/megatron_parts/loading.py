"""Megatron's strategies that load from a store."""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException, maybe_load_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
)

from tierstore.errors import RefusedError
from tierstore.integrations.megatron_parts.home import BACKEND, VERSION, Home, MegatronMismatchError
from tierstore.integrations.megatron_parts.layout import COMMON, OBJECTS, SHARDED, at_global_rank
from tierstore.state.bits import torch_dtype
from tierstore.state.lazy import Checkpoint
from tierstore.state.reading import Fill
from tierstore.units import format_some

__all__ = ["EitherLoadCommonStrategy", "TierLoadCommonStrategy", "TierLoadShardedStrategy"]


class TierLoadShardedStrategy(LoadShardedStrategy):
    """Loads sharded state from a store, in any sharding, whichever ranks saved it; each byte is proved by SHA-256.

    Args:
        source: An open store, or what `tierstore.open` takes.
        run: The run, where `source` does not say it.
        allow_cast: Whether values of another dtype than the destination's are cast; else an error.
    """

    def __init__(self, source: Any, *, run: str | None = None, allow_cast: bool = False) -> None:
        super().__init__()
        self.home = source if isinstance(source, Home) else Home(source, run)
        self.allow_cast = allow_cast

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Fills the tensors of `sharded_state_dict` in place (those without data are made on the CPU) and returns the plain state.

        Raises:
            NotFoundError: The step is not committed.
            MegatronMismatchError: Keys are missing, shapes or dtypes differ: all of them are named, and nothing was changed.
            IntegrityError: There are no good bytes.
        """
        with self.home.opened(checkpoint_dir) as (checkpoint, tree):
            wanted = list(nested_values(sharded_state_dict))
            self._check(wanted, checkpoint, tree)
            checkpoint.fill([fill for shard in wanted if isinstance(shard, ShardedTensor) for fill in _fills(shard, checkpoint)])

            def loaded(value: Any) -> Any:
                return value.data if isinstance(value, ShardedTensor) else checkpoint.build(tree[OBJECTS][value.unique_key])

            return dict_list_map_outplace(loaded, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        """A `ShardedTensor` without data for each key."""
        with self.home.opened(checkpoint_dir) as (checkpoint, tree):
            return {key: _without_data(key, checkpoint) for key in tree[SHARDED]}

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """As `load_tensors_metadata`, and a `ShardedObject` without data for each of these."""
        with self.home.opened(checkpoint_dir) as (checkpoint, tree):
            objects = {key: ShardedObject.empty_from_unique_key(key) for key in tree[OBJECTS]}
            return {**objects, **{key: _without_data(key, checkpoint) for key in tree[SHARDED]}}

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        raise RefusedError(
            "a committed checkpoint is never changed", hint="load it, and save what is to stay under a new step; or leave the keys unread"
        )

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        if loaded_backend != BACKEND:
            raise CheckpointingException(
                f"the checkpoint was saved by {loaded_backend!r}, not by {BACKEND!r}: load it with its own strategy"
            )

    def check_version_compatibility(self, loaded_version: Any) -> None:
        if int(loaded_version) > VERSION:
            raise CheckpointingException(f"the checkpoint is of version {loaded_version}; this tierstore reads up to {VERSION}: upgrade it")

    def _check(self, wanted: list[Any], checkpoint: Checkpoint, tree: Any) -> None:
        wrong = dict.fromkeys(found for value in wanted if (found := self._difference(value, checkpoint, tree)))
        if wrong:
            raise MegatronMismatchError(
                f"{len(wrong)} of the wanted values differ from what is stored: {format_some(wrong, 8)}; nothing was changed",
                hint="`tierstore tensors RUN@STEP` lists what is stored; strict='log_all' passes keys over that are not stored, and "
                "TierLoadShardedStrategy(…, allow_cast=True) casts",
            )

    def _difference(self, value: Any, checkpoint: Checkpoint, tree: Any) -> str:
        if isinstance(value, ShardedObject):
            return "" if value.unique_key in tree[OBJECTS] else f"the object {value.unique_key!r} is not stored"
        if value.key not in tree[SHARDED]:
            return f"the tensor {value.key!r} is not stored"
        stored = checkpoint[value.key]
        fits = len(stored.shape) == len(value.global_shape) and (
            value.allow_shape_mismatch or tuple(stored.shape) == tuple(value.global_shape)
        )
        if not fits:
            return f"{value.key!r} has the shape {list(stored.shape)}, wanted {list(value.global_shape)}"
        dtype = value.dtype if value.data is None else value.data.dtype
        if stored.dtype != dtype and not self.allow_cast:
            return f"{value.key!r} is {str(stored.dtype).removeprefix('torch.')}, wanted {str(dtype).removeprefix('torch.')}"
        return ""


class TierLoadCommonStrategy(LoadCommonStrategy):
    """Loads the common state from a store, typed values only."""

    def __init__(self, source: Any, *, run: str | None = None) -> None:
        self.home = source if isinstance(source, Home) else Home(source, run)

    def load_common(self, checkpoint_dir: Any) -> Any:
        """The common state; raises as `TierLoadShardedStrategy.load`."""
        with self.home.opened(checkpoint_dir) as (checkpoint, tree):
            return checkpoint.build(tree.get(COMMON, {}))

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        return TierLoadShardedStrategy(self.home).load(sharded_objects_state_dict, checkpoint_dir)

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Megatron writes the same name for every common strategy."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """As above."""


class EitherLoadCommonStrategy(LoadCommonStrategy):
    """Ours for folders that name a checkpoint of the store, Megatron's own for all others."""

    def __init__(self, tier: TierLoadCommonStrategy, stock: LoadCommonStrategy) -> None:
        self.tier, self.stock = tier, stock

    def _of(self, checkpoint_dir: Any) -> LoadCommonStrategy:
        config = maybe_load_config(os.fspath(checkpoint_dir))
        return self.tier if config is not None and config.sharded_backend == BACKEND else self.stock

    def load_common(self, checkpoint_dir: Any) -> Any:
        return self._of(checkpoint_dir).load_common(checkpoint_dir)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        return self._of(checkpoint_dir).load_sharded_objects(sharded_objects_state_dict, checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        return self._of(checkpoint_dir).load_sharded_metadata(checkpoint_dir)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        self.stock.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: Any) -> None:
        self.stock.check_version_compatibility(loaded_version)


def _fills(shard: ShardedTensor, checkpoint: Checkpoint) -> list[Fill]:
    entry = checkpoint.replica.index.find(shard.key)
    if shard.data is None:
        shard.init_data(torch.device("cpu"))
    target = at_global_rank(shard.data.detach(), shard)
    ranges = [range(begin, begin + length) for begin, length in zip(shard.global_offset, target.shape, strict=True)]
    if shard.allow_shape_mismatch:  # as Megatron's own: what is not stored is zero
        target.zero_()
        ranges = [range(each.start, max(each.start, min(each.stop, stored))) for each, stored in zip(ranges, entry.shape, strict=True)]
        target = target[tuple(slice(0, len(each)) for each in ranges)]
    return [Fill(entry=entry, box=tuple(ranges), target=target)] if target.numel() else []


def _without_data(key: str, checkpoint: Checkpoint) -> ShardedTensor:
    entry = checkpoint.replica.index.find(key)
    meta = torch.empty(tuple(entry.shape), dtype=torch_dtype(entry.dtype), device="meta")
    return ShardedTensor.from_rank_offsets(key, meta).without_data()
