"""Matching a wanted state (`into`) with a stored tree, place by place, before anything is read or changed.

Dicts are compared key by key. Lists and tuples that hold neither tensors nor dicts are values: they are replaced as a whole.
A checkpoint without a tree of its own (a flat dict of names) is matched by dotted names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from tierstore.errors import StateMismatchError, UsageError
from tierstore.format.index import RoutingIndex, TensorEntry
from tierstore.format.objects import Opaque, TensorRef
from tierstore.state.bits import dtype_name, empty, torch_dtype
from tierstore.state.boxes import whole
from tierstore.state.collecting import collector_paused
from tierstore.state.differences import Differences, LoadOptions, selected
from tierstore.state.filling import Filling, fill_rules, omitted_in
from tierstore.state.paths import Place, name_of
from tierstore.state.reading import Fill
from tierstore.state.sharded import is_spread
from tierstore.state.stored_kinds import deep, describe, flat, is_omitted, is_tensor, layout, leaves
from tierstore.state.targets import Targets
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


class _Planner:
    def __init__(
        self, tree: Any, index: RoutingIndex, options: LoadOptions, names: Sequence[str] | None, differing: Collection[Place]
    ) -> None:
        self.index = index
        self.options = options
        self.names = names
        self.filling = Filling(index, fill_rules(options.fill))
        self.plan = Match(filling=self.filling)
        self.differences = Differences(options, names)
        self.targets = Targets(index, options, self.filling, self.differences, self.plan.fills, self.plan.ties)
        self.by_name = {name_of(t.place): t.name for t in stored_tensors(tree)} if flat(tree) else {}
        self.matched = 0
        self.asked = 0
        self.differences.unfilled = self.filling.unused
        self.left: list[tuple[Place, Any]] = []
        """Stored subtrees that no place of `into` asks for."""
        self.differing = differing
        self.above = {place[:length] for place in differing for length in range(len(place) + 1)}

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
            elif self.targets.stands_in(found, inside, dtype, shape):
                target = empty(shape, torch_dtype(dtype))
                self.plan.made[inside] = dressed(target, facts)
                if target.numel():
                    self.plan.fills.append(Fill(entry=cast(TensorEntry, found.entry), box=whole(shape), target=target))

    def missing(self, place: Place, dtype: str, shape: Sequence[int], *, omitted: bool) -> None:
        self.differences.omitted |= omitted
        self.note("missing", place, f"{dtype} {list(shape)}{', left out of the checkpoint on purpose' if omitted else ''}")

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
                self.matched += self.targets.fill(into, place, stand_in)
            else:
                self.missing(place, dtype_name(into.dtype), into.shape, omitted=node is not _ABSENT)
            return keep
        if isinstance(node, Opaque) and node.tag == SPARSE:
            return self.sparse(into, node, place)
        name = node.name if isinstance(node, TensorRef) else node.value["ref"].name if is_tensor(node) else None
        if name is None or (into.layout is not torch.strided and not is_spread(into)):
            self.note("kind", place, f"is a {layout(into)}tensor in `into`, stored as {describe(node)}")
            return keep
        self.targets.used.add(name)
        self.matched += 1
        if self.note_differing(place) and self.options.ranks is not None:
            return lambda build: _copied(into, build(node, place), place)
        self.targets.fill(into, place, name)
        return keep

    def sparse(self, into: torch.Tensor, node: Opaque, place: Place) -> _Finish:
        keep: _Finish = lambda build: into  # noqa: E731
        facts = node.value
        parts = list(stored_tensors(node))
        self.targets.used.update(t.name for t in parts)
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
            places = [t.place for t in tensors if t.name not in self.targets.used] if tensors else leaves(node, place)
            found.update(name_of(p) for p in places if self.differences.counts("unexpected", p))
        return found

    def check(self, *, unexpected: bool) -> None:
        if unexpected:
            found = [(place, node, list(stored_tensors(node, place))) for place, node in self.left]
            for place, node, tensors in found:
                if not tensors:
                    self.note("unexpected", place, describe(node))
            for tensor in (t for _, _, tensors in found for t in tensors):
                if tensor.name not in self.targets.used and self.differences.counts("unexpected", tensor.place):
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
