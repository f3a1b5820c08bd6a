"""Matching a wanted state (`into`) with a stored tree, place by place, before anything is read or changed.

Dicts are compared key by key. Lists and tuples that hold neither tensors nor dicts are values: they are replaced as a whole.
A checkpoint without a tree of its own (a flat dict of names) is matched by dotted names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from tierstore.errors import IncompleteError, NotFoundError, StateMismatchError, UsageError
from tierstore.format.index import RoutingIndex, TensorEntry
from tierstore.format.objects import Opaque, TensorRef
from tierstore.state.bits import dtype_name, empty, torch_dtype
from tierstore.state.boxes import whole
from tierstore.state.collecting import collector_paused
from tierstore.state.differences import Differences, LoadOptions, selected
from tierstore.state.filling import Filling, StandIn, fill_rules, fits, omitted_in
from tierstore.state.guard import check_storable, is_plain
from tierstore.state.paths import Place, Shown, name_of, show
from tierstore.state.reading import Fill
from tierstore.state.sharded import Piece, chunk_of, is_spread
from tierstore.state.stored_kinds import deep, describe, flat, is_omitted, is_tensor, layout, leaves
from tierstore.state.unflatten import COMPONENTS, MODULE_STATE, SPARSE, TENSOR, dressed, stored_tensors

__all__ = ["Match", "match", "match_fresh"]


@dataclass(slots=True, kw_only=True)
class Match:
    """What to do: tensors to fill in place, subtrees to load fresh, and how to put the values in.

    `finish` is called when everything is read; it takes the function that builds the subtree of a place, changes `into` and returns it.
    `check` raises what is wrong with the match; nothing is raised before.
    """

    fills: list[Fill] = field(default_factory=list)
    fresh: list[Any] = field(default_factory=list)
    lacking: bool = False
    """The tree lacks something that `into` asks for (allowed or not)."""
    differing: set[Place] = field(default_factory=set)
    """The places that are loaded and whose values differ between the ranks that saved."""
    ties: list[tuple[TensorEntry, TensorEntry, str]] = field(default_factory=list)
    """Pairs of stored tensors that one tensor of `into` stands for; they must be equal. With the place, for the message."""
    finish: Callable[[Build], Any] = field(default=lambda build: None)
    check: Callable[[], None] = field(default=lambda: None)
    """Raises StateMismatchError for every difference that is not allowed, in one error, what is stored and not asked for among them."""
    check_asked: Callable[[], None] = field(default=lambda: None)
    """As `check`, but what is stored and not asked for is no difference: another rank may ask for it."""
    made: dict[Place, torch.Tensor] = field(default_factory=dict)
    """Within `fresh`: tensors for the places of those that were left out; `fills` fill them. Places without one become None."""
    incomplete: bool = False
    """Whether something of `fresh` was left out."""
    filling: Filling = field(default_factory=lambda: Filling(cast(Any, None), None))
    """What stands in for tensors that the checkpoint lacks."""
    unasked: Callable[[], set[str]] = field(default=set)
    """The names of places that are stored, not asked for, and not allowed to be left out."""


Build = Callable[[Any, Place], Any]
"""Makes the value of a stored subtree and its place."""
_Finish = Callable[[Build], Any]


def match(
    into: Any,
    tree: Any,
    index: RoutingIndex,
    options: LoadOptions,
    names: Sequence[str] | None = None,
    differing: Collection[Place] = (),
) -> Match:
    """Plans the load of `tree` into `into`; changes nothing. The caller calls one of the match's checks.

    Args:
        into: The wanted state.
        tree: The stored tree.
        index: The tensors.
        options: What may differ.
        names: Globs of the places that count; None: all.
        differing: Places whose values differ between the ranks that saved `tree`. Where `options.ranks` is set, tensors there are built
            and copied, not filled.

    Raises:
        UnsupportedTypeError: `into` holds a tensor that can't be filled (meta, quantised, freed).
    """
    if not isinstance(into, dict | list | tuple | torch.Tensor):
        raise UsageError(
            f"into is a {type(into).__module__}.{type(into).__qualname__}, not a state",
            hint="pass e.g. {'model': model.state_dict(), 'optim': optimizer.state_dict(), 'step': 0}",
        )
    with collector_paused():
        index.prepare(t.name for t in stored_tensors(tree) if names is None or selected(name_of(t.place), names))
        planner = _Planner(tree, index, options, names, differing)
        plan = planner.plan
        plan.finish = planner.visit(into, tree, ())
    plan.check = lambda: planner.check(unexpected=True)
    plan.check_asked = lambda: planner.check(unexpected=False)
    plan.unasked = planner.unasked
    return plan


def match_fresh(tree: Any, index: RoutingIndex, options: LoadOptions, differing: Collection[Place]) -> Match:
    """Plans to build all of `tree`; only what was left out of it can be missing."""
    planner = _Planner(tree, index, options, None, ())
    planner.fresh(tree, ())
    plan = planner.plan
    plan.differing = set(differing)
    plan.finish = lambda build: build(tree, ())
    plan.check = lambda: planner.differences.check(what="the checkpoint and the state that was saved differ")
    return plan


_ABSENT = object()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class _Planner:
    def __init__(
        self, tree: Any, index: RoutingIndex, options: LoadOptions, names: Sequence[str] | None, differing: Collection[Place]
    ) -> None:
        self.index = index
        self.options = options
        self.names = names
        self.filling = Filling(index, fill_rules(options.fill))
        self.plan = Match(filling=self.filling)
        self.by_name = {name_of(t.place): t.name for t in stored_tensors(tree)} if flat(tree) else {}
        self.used: set[str] = set()
        self.matched = 0
        self.asked = 0
        self.differences = Differences(options, names)
        self.left: list[tuple[Place, Any]] = []
        """Stored subtrees that no place of `into` asks for."""
        self.differing = differing
        self.above = {place[:length] for place in differing for length in range(len(place) + 1)}
        self.memory: dict[Any, TensorEntry] = {}

    # ---- the walk: each visit returns what makes the value of its place, later

    def visit(self, into: Any, node: Any, place: Place) -> _Finish:
        if isinstance(node, Opaque) and node.tag == MODULE_STATE:
            node = node.value[0]
        if isinstance(into, torch.Tensor):
            return self.tensor(into, node, place)
        if isinstance(into, dict):
            return self.mapping(into, node, place)
        if isinstance(into, list | tuple) and not isinstance(into, torch.Size) and (deep(into) or deep(node)):
            return self.sequence(into, node, place)
        return self.value(into, node, place)

    def mapping(self, into: dict[Any, Any], node: Any, place: Place) -> _Finish:
        if not isinstance(node, dict):
            if node is not _ABSENT:
                self.note("kind", place, f"is a {type(into).__name__} in `into`, stored as {describe(node)}")
                return lambda build: into
            node = {}
        parts = {key: self.visit(item, node.get(key, _ABSENT), (*place, key)) for key, item in into.items()}
        for key, item in node.items():
            if key not in into:
                self.unexpected(item, (*place, key))

        def finish(build: Build) -> Any:
            for key, part in parts.items():
                made = part(build)
                if made is not into[key]:
                    into[key] = made
            return into

        return finish

    def sequence(self, into: list[Any] | tuple[Any, ...], node: Any, place: Place) -> _Finish:
        if not isinstance(node, list | tuple):
            if node is not _ABSENT:
                self.note("kind", place, f"is a {type(into).__name__} in `into`, stored as {describe(node)}")
                return lambda build: into
            node = ()
        stored: list[Any] = [*node, *([_ABSENT] * (len(into) - len(node)))]
        parts = [self.visit(item, there, (*place, i)) for i, (item, there) in enumerate(zip(into, stored, strict=False))]
        for i, item in enumerate(stored[len(into) :], len(into)):
            self.unexpected(item, (*place, i))

        def finish(build: Build) -> Any:
            made = [part(build) for part in parts]
            if all(new is old for new, old in zip(made, into, strict=True)):
                return into
            if isinstance(into, list):
                into[:] = made
                return into
            return type(into)(*made) if hasattr(into, "_fields") else type(into)(made)

        return finish

    def value(self, into: Any, node: Any, place: Place) -> _Finish:
        if not self.wanted(place):
            return lambda build: into
        self.asked += 1
        if node is _ABSENT:
            self.plan.lacking = True
            self.note("missing", place, "is stored nowhere")
            return lambda build: into
        if is_omitted(node) and into is not None:
            self.missing(place, node.value["dtype"], node.value["shape"], omitted=True)
            return lambda build: into
        tensors = list(stored_tensors(node))
        if tensors and into is not None and not (isinstance(node, Opaque) and node.tag not in (TENSOR, SPARSE)):
            self.note("kind", place, f"is {describe(into)} in `into`, stored as {describe(node)}")
            return lambda build: into
        self.matched += 1
        self.fresh(node, place)
        self.note_differing(place)
        return lambda build: build(node, place)

    def fresh(self, node: Any, place: Place) -> None:
        """Plans to build a stored subtree, with tensors for those that were left out of it where rules say what fills them."""
        self.plan.fresh.append(node)
        for inside, facts in omitted_in(node, place):
            self.plan.incomplete = True
            name, dtype, shape = name_of(inside), facts["dtype"], tuple(facts["shape"])
            found = self.filling.find(name)
            if found is None:
                self.missing(inside, dtype, shape, omitted=True)
            elif self.stands_in(found, inside, dtype, shape):
                target = empty(shape, torch_dtype(dtype))
                self.plan.made[inside] = dressed(target, facts)
                if target.numel():
                    self.plan.fills.append(Fill(entry=cast(TensorEntry, found.entry), box=whole(shape), target=target))

    def missing(self, place: Place, dtype: str, shape: Sequence[int], *, omitted: bool) -> None:
        self.differences.omitted |= omitted
        self.note("missing", place, f"{dtype} {list(shape)}{', left out of the checkpoint on purpose' if omitted else ''}")

    def stands_in(self, found: StandIn, place: Place, dtype: str, shape: Sequence[int]) -> bool:
        """Whether `found` can fill a tensor of that dtype and shape; notes it, or the difference."""
        source, where = found.entry, ", ".join(found.sources[:3])
        if tuple(shape) != source.shape:
            self.note("shape", place, f"is {list(shape)} in `into`, {list(source.shape)} in what is to fill it ({where})")
            return False
        if not fits(source.dtype, dtype):
            self.note("kind", place, f"is {dtype} in `into`, and can't be filled from {source.dtype} ({where})")
            return False
        self.used.update(found.sources)
        self.filling.note(name_of(place), dtype, found)
        return True

    def tensor(self, into: torch.Tensor, node: Any, place: Place) -> _Finish:
        keep: _Finish = lambda build: into  # noqa: E731
        if not self.wanted(place):
            return keep
        self.asked += 1
        if node is _ABSENT and (found := self.by_name.get(name_of(place))) is not None:
            node = TensorRef(found)
        if node is _ABSENT or is_omitted(node):
            self.plan.lacking |= node is _ABSENT
            stand_in = self.filling.find(name_of(place))
            if stand_in is not None and (into.layout is torch.strided or is_spread(into)):
                self.fill(into, place, stand_in)
            else:
                self.missing(place, dtype_name(into.dtype), into.shape, omitted=node is not _ABSENT)
            return keep
        if isinstance(node, Opaque) and node.tag == SPARSE:
            return self.sparse(into, node, place)
        name = node.name if isinstance(node, TensorRef) else node.value["ref"].name if is_tensor(node) else None
        if name is None or (into.layout is not torch.strided and not is_spread(into)):
            self.note("kind", place, f"is a {layout(into)}tensor in `into`, stored as {describe(node)}")
            return keep
        self.used.add(name)
        self.matched += 1
        if self.note_differing(place) and self.options.ranks is not None:
            return lambda build: _copied(into, build(node, place), place)
        self.fill(into, place, name)
        return keep

    def fill(self, into: torch.Tensor, place: Place, source: str | StandIn) -> None:
        """Plans to fill a tensor from the stored one of a name, or from what stands in for it."""
        if isinstance(source, str) and type(into) in _PLAIN and not hasattr(into, "global_offsets") and is_plain(into):
            self.fill_plain(into, source, place)  # nearly all of them are: few steps for each of tens of thousands
            return
        if is_spread(into):
            chunk = chunk_of(into, f"into{show(place).removeprefix('state')}")
            target, shape, pieces = chunk.tensor, chunk.global_shape, chunk.pieces
            check_storable(target, Shown(place, "into"))
        else:
            target, shape = into.detach(), tuple(into.shape)
            pieces = (Piece(tensor=target, offsets=(0,) * target.ndim),)
            check_storable(into, Shown(place, "into"))
        if isinstance(source, StandIn):
            entry = cast(TensorEntry, source.entry)
            if not self.stands_in(source, place, dtype_name(target.dtype), shape):
                return
            self.matched += 1
        else:
            entry = self.find(source, _around(pieces, len(shape)))
            if shape != entry.shape:
                self.note("shape", place, f"is {list(shape)} in `into`, {list(entry.shape)} stored")
                return
            if dtype_name(target.dtype) != entry.dtype and not self.castable(entry, target, place):
                return
        for piece in pieces:
            self.fill_piece(piece, entry, place)

    def fill_plain(self, into: torch.Tensor, name: str, place: Place) -> None:
        """`fill` for a dense, contiguous tensor in memory that this process has for itself."""
        shape, dtype = tuple(into.shape), into.dtype
        entry = self.find(name)  # all of it is wanted
        if shape != entry.shape:
            self.note("shape", place, f"is {list(shape)} in `into`, {list(entry.shape)} stored")
            return
        target = into.detach() if into.requires_grad or type(into) is not torch.Tensor else into
        if torch_dtype(entry.dtype) is not dtype and not self.castable(entry, target, place):
            return
        if address := into.data_ptr():
            self.fill_box(target, entry, place, tuple(map(range, shape)), (address, shape, dtype))

    def fill_piece(self, piece: Piece, entry: TensorEntry, place: Place) -> None:
        target = piece.tensor
        if not target.is_contiguous() and any(n == 0 and size > 1 for n, size in zip(target.stride(), target.shape, strict=True)):
            self.note("kind", place, "is an expanded tensor in `into`: several of its elements are one place in memory")
            return
        if target.numel() == 0:
            return
        shape, dtype = tuple(target.shape), target.dtype
        if target.is_cpu and target.is_contiguous():
            memory: tuple[Any, ...] = (target.data_ptr(), shape, dtype)
        else:
            memory = (target.device, target.data_ptr(), shape, target.stride(), dtype)
        self.fill_box(target, entry, place, tuple(range(b, b + n) for b, n in zip(piece.offsets, shape, strict=True)), memory)

    def fill_box(self, target: torch.Tensor, entry: TensorEntry, place: Place, box: tuple[range, ...], memory: tuple[Any, ...]) -> None:
        """Plans to fill the box `box` of a stored tensor into `target`, whose memory `memory` names, but once if it is tied."""
        before = self.memory.setdefault(memory, entry)
        if before is entry:
            self.plan.fills.append(Fill(entry=entry, box=box, target=target))
        elif (before.dtype, before.extents) != (entry.dtype, entry.extents):  # tied in `into`, stored apart
            self.plan.ties.append((self.find(before.name), self.find(entry.name), name_of(place)))

    def castable(self, entry: TensorEntry, target: torch.Tensor, place: Place) -> bool:
        found = f"is {dtype_name(target.dtype)} in `into`, {entry.dtype} stored"
        if self.options.dtype == "exact":
            self.note("dtype", place, found)
            return False
        stored = torch_dtype(entry.dtype)
        try:
            torch.zeros(stored.itemsize, dtype=torch.uint8, device="cpu").view(stored).to(target.dtype)
        except (RuntimeError, NotImplementedError):
            self.note("dtype", place, f"{found}, and torch can't convert that")
            return False
        return True

    def sparse(self, into: torch.Tensor, node: Opaque, place: Place) -> _Finish:
        keep: _Finish = lambda build: into  # noqa: E731
        facts = node.value
        parts = list(stored_tensors(node))
        self.used.update(t.name for t in parts)
        if str(into.layout) != f"torch.{facts['layout']}":
            self.note("kind", place, f"is a {layout(into)}tensor in `into`, stored as {facts['layout']}")
            return keep
        stored, first = self.index.dtype(parts[-1].name), self.index.shape(parts[0].name)
        if tuple(facts["shape"]) != tuple(into.shape):
            self.note("shape", place, f"is {list(into.shape)} in `into`, {list(facts['shape'])} stored")
            return keep
        if into.layout is torch.sparse_coo and (into.sparse_dim(),) != first[:1]:
            self.note("kind", place, f"has {into.sparse_dim()} sparse axes in `into`, {first[0] if first else 0} stored")
            return keep
        if stored != dtype_name(into.dtype) and self.options.dtype == "exact":
            self.note("dtype", place, f"is {dtype_name(into.dtype)} in `into`, {stored} stored")
            return keep
        self.matched += 1
        self.fresh(node, place)
        self.note_differing(place)
        return lambda build: _copied(into, build(node, place), place)

    # ---- differences

    def wanted(self, place: Place) -> bool:
        return selected(name_of(place), self.names)

    def find(self, name: str, box: Sequence[range] | None = None) -> TensorEntry:
        try:
            return self.index.find(name, box)
        except NotFoundError as error:
            raise IncompleteError(
                f"the checkpoint's tree names the tensor {name!r}, its index does not", hint="run `tierstore verify`, or load another step"
            ) from error

    def note_differing(self, place: Place) -> bool:
        """Notes the places at or below `place` where the ranks that saved differ; whether there are any."""
        if place not in self.above:
            return False
        self.plan.differing.update(p for p in self.differing if p[: len(place)] == place)
        return True

    def unexpected(self, node: Any, place: Place) -> None:
        if next(omitted_in(node, place), None) is None or next(leaves(node, place), None) is not None:
            self.left.append((place, node))  # else all of it was left out, and nothing is lost

    def note(self, kind: Literal["missing", "unexpected", "shape", "dtype", "kind"], place: Place, detail: str) -> None:
        self.differences.note(kind, place, detail)

    def unasked(self) -> set[str]:
        found: set[str] = set()
        for place, node in self.left:
            tensors = list(stored_tensors(node, place))
            # A tensor that is used was loaded all the same: it is tied, or was found by name.
            places = [t.place for t in tensors if t.name not in self.used] if tensors else leaves(node, place)
            found.update(name_of(p) for p in places if self.differences.counts("unexpected", p))
        return found

    def check(self, *, unexpected: bool) -> None:
        if unexpected:
            found = [(place, node, list(stored_tensors(node, place))) for place, node in self.left]
            for place, node, tensors in found:
                if not tensors:
                    self.note("unexpected", place, describe(node))
            for tensor in (t for _, _, tensors in found for t in tensors):
                if tensor.name not in self.used and self.differences.counts("unexpected", tensor.place):
                    self.note("unexpected", tensor.place, f"{self.index.dtype(tensor.name)} {list(self.index.shape(tensor.name))}")
            self.differences.check()
        else:
            self.differences.check(also_stored=self.unasked())
        if not self.matched and len(self.index) and (unexpected or self.asked):
            raise StateMismatchError(
                f"nothing of `into` is in the checkpoint, which has {len(self.index):,} tensors: nothing would be loaded",
                hint="compare the names: `tierstore tensors RUN@STEP` lists them",
            )


def _copied(into: torch.Tensor, value: Any, place: Place) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != into.shape:
        found = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise StateMismatchError(
            f"{name_of(place)} is a tensor of shape {list(into.shape)} in `into`; what LoadOptions.ranks made of it is {found}",
            hint="return a tensor of that shape there",
        )
    with torch.no_grad():  # not on a detached twin: a sparse one has components of its own
        if into.layout in COMPONENTS and into.layout is not torch.sparse_coo:
            into.resize_as_sparse_(value)  # `copy_` wants as many specified elements
        into.copy_(value)
    return into


def _around(pieces: Sequence[Piece], ndim: int) -> tuple[range, ...]:
    """A box around all pieces: of a stored tensor's extents, which may be thousands, only those within can be wanted."""
    if not pieces:
        return (range(0),) * ndim
    if len(pieces) == 1:
        piece = pieces[0]
        return tuple(range(begin, begin + size) for begin, size in zip(piece.offsets, piece.tensor.shape, strict=True))
    begins = [min(piece.offsets[axis] for piece in pieces) for axis in range(ndim)]
    ends = [max(piece.offsets[axis] + piece.tensor.shape[axis] for piece in pieces) for axis in range(ndim)]
    return tuple(range(begin, end) for begin, end in zip(begins, ends, strict=True))
