"""Planners that know tensors which say themselves where they lie in a global one, as torch 2.14's do (``CheckpointableTensor``).

Such a tensor is a plain local one with four attributes: ``global_shape``; and per local shard ``global_offsets``, ``local_offsets`` and
``local_sizes``. Torch before 2.14 takes it for a whole tensor. With merged leading dimensions (the local tensor has fewer than the
global one) a shard is a run of local rows, viewed in its size.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from tierstore.errors import UsageError

__all__ = ["TierLoadPlanner", "TierSavePlanner"]

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class TierSavePlanner(DefaultSavePlanner):
    """Torch's default planner, for ``CheckpointableTensor`` too."""

    saves_values_as_they_are = True
    """What `lookup_object` adds concerns tensors: objects are saved as the state has them."""

    def create_local_plan(self) -> SavePlan:
        """Plans the state; a tensor that tells its shards gives one item for each."""
        every = self.state_dict
        self.state_dict = {fqn: _Shards(value) if _tells(value) else value for fqn, value in every.items()}
        try:
            return super().create_local_plan()
        finally:
            self.state_dict = every

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict.get(index.fqn)
        return _shard(value, index) if _tells(value) else super().lookup_object(index)


class TierLoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, for ``CheckpointableTensor`` too; objects below keys that are no strings replace the ones that are there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts an object in its place. Torch's own planner knows paths of strings: below ``{0: …}`` it would add a key ``"0"``."""
        path = self.mappings.get(read_item.dest_index.fqn) if self.flatten_state_dict else None
        here: Any = self.original_state_dict
        for part in (path or ())[:-1]:
            found = _key(here, part)
            if found is None:
                break
            here = here[found]
        else:
            last = _key(here, path[-1]) if path else None
            if last is not None:
                here[last] = torch.load(value, weights_only=False)  # of our reader, who made it of what the codecs decoded
                return
        super().load_bytes(read_item, value)

    def create_local_plan(self) -> LoadPlan:
        """Plans the state; a tensor that tells its shards is filled shard by shard."""
        every = self.state_dict
        stand_ins = {fqn: _Shards(value) if _tells(value) else value for fqn, value in every.items()}
        self.state_dict = stand_ins
        try:
            return super().create_local_plan()
        finally:
            if self.state_dict is stand_ins:  # torch puts another one there where it meets keys of its old versions
                self.state_dict = every

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict.get(index.fqn)
        return _shard(value, index) if _tells(value) else super().lookup_tensor(index)


class _Shards:
    """Stands in for a tensor that tells its shards while torch plans: it has the hooks that torch asks every value for."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def size(self) -> torch.Size:
        return torch.Size(self.tensor.global_shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return _chunks(self.tensor)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.tensor),
                    size=self.size(),
                ),
            )
            for number, chunk in enumerate(_chunks(self.tensor))
        ]


def _key(container: Any, part: Any) -> Any:
    """The key of `container` that DCP calls `part`; None where there is none."""
    if isinstance(container, list):
        return part if isinstance(part, int) and part < len(container) else None
    if not isinstance(container, dict):
        return None
    return part if part in container else next((key for key in container if str(key) == part), None)


def _tells(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and not hasattr(value, "__create_write_items__")
    return plain and all(hasattr(value, name) for name in _FIELDS)


def _chunks(tensor: Any) -> list[ChunkStorageMetadata]:
    offsets, sizes = tensor.global_offsets, tensor.local_sizes
    if not len(offsets) == len(sizes) == len(tensor.local_offsets):
        raise UsageError(
            f"a tensor tells {len(offsets)} global offsets, {len(tensor.local_offsets)} local offsets and {len(sizes)} sizes",
            hint="each local shard has one of each",
        )
    return [ChunkStorageMetadata(offsets=torch.Size(o), sizes=torch.Size(s)) for o, s in zip(offsets, sizes, strict=True)]


def _shard(tensor: Any, index: MetadataIndex) -> torch.Tensor:
    """The local shard that begins at `index.offset` of the global tensor, as a view."""
    for begin, place, size in zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True):
        if tuple(begin) == tuple(index.offset or ()):
            return _view(tensor, place, size)
    raise UsageError(
        f"{index.fqn!r} has no local shard at {tuple(index.offset or ())}", hint="the tensor's shards changed while it was saved"
    )


def _view(tensor: torch.Tensor, place: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    local = tensor.detach()
    merged = len(size) - local.ndim
    if merged > 0:
        return local.narrow(0, place[0], math.prod(size[: merged + 1])).view(*size)
    return local[tuple(slice(begin, begin + length) for begin, length in zip(place, size, strict=True))]
