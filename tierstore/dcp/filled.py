"""What a checkpoint lacks, as planners ask for it: tensors that were left out of it on purpose, and what rules fill from others.

Torch's planners look a key up in `Metadata.state_dict_metadata` before they plan it, and only then does anybody know what is wanted. So
the mapping here answers for more keys than it lists. It lists what a load without a state gets: what is stored, and what was left out and
rules fill. When it is asked, it also knows what rules can make of the stored names, and what was left out and nothing fills. Loading that
is an error (`Lacking.check`) in words that torch's "Missing key" does not have; with ``allow_partial_load`` the state keeps its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from tierstore.errors import StateMismatchError
from tierstore.format.index import RoutingIndex, TensorEntry
from tierstore.state.bits import dtype_name, empty, torch_dtype
from tierstore.state.boxes import Box, whole
from tierstore.state.filling import Filling, StandIn, fits, omitted_in, put_in
from tierstore.state.paths import Place, name_of
from tierstore.state.reading import Fill
from tierstore.state.renaming import Rules
from tierstore.state.unflatten import dressed
from tierstore.units import format_some

__all__ = ["Keys", "Lacking", "LeftOut", "tensor_metadata"]

_FILL = "say what fills it: TierStorageReader(…, fill=[{'match': STORED, 'to': WANTED}]), or load: {fill: …} in the configuration"
_KEEP = "or keep what the state has there: planner=DefaultLoadPlanner(allow_partial_load=True)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A tensor that the tree says was left out: where, and what it was like (``dtype``, ``shape``, the flags of a parameter)."""

    path: Place
    facts: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.facts["shape"])


@dataclass(slots=True, kw_only=True)
class Lacking:
    """What one open checkpoint lacks, and what stands in for it.

    Args:
        index: Its tensors.
        rules: What fills what; None: nothing does.
        left_out: Key → what was left out there.
    """

    index: RoutingIndex
    rules: Rules | None
    left_out: Mapping[str, LeftOut]
    filling: Filling = field(init=False)
    _missing: dict[str, str] = field(default_factory=dict)
    _misfits: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.filling = Filling(self.index, self.rules)

    def filled(self) -> Iterator[str]:
        """The keys of what was left out and rules fill."""
        return (key for key in self.left_out if self._stand_in(key) is not None)

    def metadata(self, key: str) -> TensorStorageMetadata | None:
        """What a planner is told of a key that is not stored; None: nothing is known of it."""
        if (left := self.left_out.get(key)) is not None:
            return tensor_metadata(left.facts["dtype"], left.shape)
        found = self._stand_in(key)
        return None if found is None else tensor_metadata(found.entry.dtype, found.entry.shape)

    def wish(self, key: str, box: Box, target: torch.Tensor) -> Fill | None:
        """What fills `target` with a box of the tensor that is lacking at `key`; None: nothing does, and `check` says why."""
        left, found = self.left_out.get(key), self._stand_in(key)
        if found is None:
            self._missing[key] = "is stored nowhere" if left is None else _left_out(left.facts)
            return None
        return self._wish(key, found, None if left is None else left.shape, box, target)

    def whole_object(self, node: Any, path: Place, wishes: list[Fill]) -> tuple[Any, bool]:
        """A stored object with tensors in the places of those that were left out of it, and whether it has all of them.

        What fills them is added to `wishes`.
        """
        made: dict[Place, torch.Tensor] = {}
        places = list(omitted_in(node, path))
        for place, facts in places:
            key, shape = name_of(place), tuple(facts["shape"])
            found = self.filling.find(key)
            if found is None:
                self._missing[key] = _left_out(facts)
                continue
            target = empty(shape, torch_dtype(facts["dtype"]))
            if (wish := self._wish(key, found, shape, whole(shape), target)) is not None:
                wishes.append(wish)
                made[place] = dressed(target, facts)
        return (put_in(node, path, made) if places else node), len(made) == len(places)

    def check(self, *, partial: bool) -> None:
        """Raises StateMismatchError for all that was wished for and that nothing can fill, in one error.

        Args:
            partial: The planner allows that something is missing; what is to be filled from another shape or kind is an error all the same.
        """
        wrong = {**({} if partial else self._missing), **self._misfits}
        ways = [*self.filling.unused(), *((_FILL, _KEEP) if not partial and self._missing else ("correct the rules, or the state",))]
        self._missing, self._misfits = {}, {}
        if wrong:
            shown = "; ".join([format_some([f"{key} ({what})" for key, what in wrong.items()], 8), *self.filling.unused()[:8]])
            count = "1 tensor that is" if len(wrong) == 1 else f"{len(wrong):,} tensors that are"
            raise StateMismatchError(
                f"the checkpoint lacks {count} asked for, and nothing fills: {shown}; nothing was changed",
                hint="; ".join(ways),
                missing=tuple(wrong),
            )

    # ---- inside

    def _stand_in(self, key: str) -> StandIn | None:
        left = self.left_out.get(key)
        return self.filling.find(key if left is None else name_of(left.path))

    def _wish(self, key: str, found: StandIn, shape: tuple[int, ...] | None, box: Box, target: torch.Tensor) -> Fill | None:
        source, wanted = found.entry, dtype_name(target.dtype)
        where = ", ".join(found.sources[:3])
        if shape is not None and shape != source.shape:
            self._misfits[key] = f"is {list(shape)}, {list(source.shape)} in what is to fill it ({where})"
        elif not fits(source.dtype, wanted):
            self._misfits[key] = f"is {wanted} in the state, and can't be filled from {source.dtype} ({where})"
        else:
            self.filling.note(key, wanted, found)
            return Fill(entry=cast(TensorEntry, source), box=box, target=target)
        return None


class Keys(dict[str, STORAGE_TYPES]):
    """`Metadata.state_dict_metadata`: lists what a load without a state gets, and answers for what is `Lacking` when it is asked."""

    def __init__(self, listed: Iterable[tuple[str, STORAGE_TYPES]], lacking: Lacking) -> None:
        super().__init__(listed)
        self._lacking = lacking

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and self._lacking.metadata(key) is not None)

    def __missing__(self, key: str) -> STORAGE_TYPES:
        found = self._lacking.metadata(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _left_out(facts: Mapping[str, Any]) -> str:
    return f"{facts['dtype']} {list(facts['shape'])}, left out of the checkpoint on purpose"


def tensor_metadata(dtype: str, shape: tuple[int, ...]) -> TensorStorageMetadata:
    """A tensor as one chunk that is all of it."""
    size = torch.Size(shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(dtype)),
        size=size,
        chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)],
    )
