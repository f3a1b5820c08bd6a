"""Loading: a stored state becomes fresh tensors, or fills the tensors that the caller has, in place."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tierstore.errors import IncompleteError, NotFoundError, StateMismatchError
from tierstore.format.index import RoutingIndex
from tierstore.format.objects import ObjectCodecs, Opaque
from tierstore.state.agreement import Agreement
from tierstore.state.bits import empty, torch_dtype
from tierstore.state.boxes import whole
from tierstore.state.codecs import default_codecs
from tierstore.state.differences import LoadOptions, selected, unexpected_error
from tierstore.state.exchange.exchange import BUDGET_NBYTES, Exchange, SharedReader
from tierstore.state.filling import put_in
from tierstore.state.jointly import asked_by_none, jointly, time_to_read
from tierstore.state.matching import Match, match, match_fresh
from tierstore.state.pages import on_huge_pages
from tierstore.state.paths import Place, name_of
from tierstore.state.rank_trees import RankTrees
from tierstore.state.rank_values import LazyValues, RankValues
from tierstore.state.reading import Fill, Reader, Run, fill_all, same_values
from tierstore.state.stored_kinds import leaves
from tierstore.state.unflatten import MODULE_STATE, stored_tensors, unflatten
from tierstore.units import format_some

__all__ = ["LoadOptions", "load_fresh", "load_state", "read_tree"]

log = logging.getLogger(__name__)

Filler = Callable[[Sequence[Fill]], None]
"""Reads all wishes."""


def load_state(
    replica: Reader,
    run: Run,
    *,
    into: Any = None,
    options: LoadOptions | None = None,
    rank: int = 0,
    world_size: int | None = None,
    codecs: ObjectCodecs | None = None,
    names: Sequence[str] | None = None,
    ranks: Agreement | None = None,
    what: str = "the load",
    exchange_nbytes: int = BUDGET_NBYTES,
) -> Any:
    """Loads a state; every byte is proved by `Reader.read`.

    Args:
        replica: The open checkpoint.
        run: Runs a coroutine on the event loop that `replica` lives on.
        into: A state whose tensors are filled in place (their identity and memory stay; other devices, strides and, if allowed, dtypes
            too) and whose other values are replaced. None: a fresh state on the CPU; sharded tensors come back whole.
        options: What to do where `into` and the checkpoint differ; None: every difference is an error.
        rank: Who loads: counters, RNG states and tensors that are not sharded belong to a rank; see `RankTrees`.
        world_size: How many load together; None: as many as saved.
        codecs: Codecs for further types; None: torch's own.
        names: Globs over dotted names. With `into`: only these places are compared and loaded. Without: the result is a flat dict of these.
        ranks: The ranks that make this call together: an error on one is raised on all, and what none of them asks for is unexpected.
            None: this process decides alone.
        what: What it is about, for messages.
        exchange_nbytes: Memory for bytes that `ranks` exchange, in bytes; see `exchange.Exchange`.

    Returns:
        The state; `into` itself where it is given (a new tuple if it is a tuple that holds plain values).

    Raises:
        StateMismatchError: `into` and the checkpoint differ, every difference in one error. Nothing was changed, on no rank.
        IncompleteError, IntegrityError: Stored bytes are missing or wrong on every tier. Tensors of `into` may be partly filled.
        RankError, DeadlineError: Other ranks failed, or did not come.
    """
    load = _Load(
        replica,
        run,
        into,
        options or LoadOptions(),
        rank=rank,
        world_size=world_size,
        codecs=codecs or default_codecs(),
        names=names,
        what=what,
    )
    if ranks is not None and ranks.world_size > 1 and load.options.exchange == "auto" and isinstance(replica, SharedReader):
        load.filling = functools.partial(_exchanged, ranks, f"{what}: exchanging", exchange_nbytes, replica, run)
    if into is None and names is not None:
        with time_to_read(ranks, replica.index.nbytes):
            return jointly(ranks, what, load.named).result
    comparing = f"{what}: comparing what is wanted with what is stored"
    heard = jointly(ranks, comparing, lambda: load.compare(ranks is None), flag=lambda found: found[0], most=lambda found: found[1])
    if heard.flag and ranks is not None:
        question = f"{what}: asking who wants what"
        stored, unasked = jointly(ranks, question, load.unasked).result
        unexpected = asked_by_none(ranks, question, stored, lambda: unasked)
        if unexpected:
            raise unexpected_error(unexpected)
    with time_to_read(ranks, heard.most):
        return jointly(ranks, f"{what}: reading", load.finish).result


def read_tree(replica: Reader, run: Run, rank: int, world_size: int | None = None) -> Any:
    """The decoded tree that `rank` of `world_size` loads, with references for its tensors and tags left as they are."""
    return RankTrees(replica, run, rank=rank, world_size=world_size).tree()[0]


def load_fresh(replica: Reader, run: Run, tree: Any, codecs: ObjectCodecs) -> Any:
    """Builds the state of `tree`; its tensors are new, each with memory of its own, but for ties and views."""
    made = _fresh_tensors(replica.index, functools.partial(fill_all, replica, run), {t.base for t in stored_tensors(tree)})
    return unflatten(tree, made.__getitem__, codecs)


class _Load:
    """One rank's load: first compared, then read."""

    def __init__(
        self,
        replica: Reader,
        run: Run,
        into: Any,
        options: LoadOptions,
        *,
        rank: int,
        world_size: int | None,
        codecs: ObjectCodecs,
        names: Sequence[str] | None,
        what: str,
    ) -> None:
        self.replica, self.run = replica, run
        self.into, self.options, self.names = into, options, names
        self.rank, self.world_size = rank, world_size
        self.codecs = codecs
        self.what = what
        self.filling: Callable[[], AbstractContextManager[Filler]] = lambda: nullcontext(functools.partial(fill_all, replica, run))
        self.trees: RankTrees
        self.plan: Match

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors whose names match, and nothing else."""
        with self.filling() as fill:
            wanted = [name for name in self.replica.index.names() if selected(name, self.names)]
            if not wanted:
                raise NotFoundError(
                    f"no tensor of the checkpoint matches {list(self.names or ())}", hint="`tierstore tensors RUN@STEP` lists the names"
                )
            return _fresh_tensors(self.replica.index, fill, wanted)

    def compare(self, alone: bool) -> tuple[bool, int]:
        """Plans; raises where the two differ. Returns whether this rank leaves something out that is stored, and the bytes it will read."""
        self.trees = RankTrees(self.replica, self.run, rank=self.rank, world_size=self.world_size)
        tree, differing = self.trees.tree()
        if self.into is None:
            self.plan = match_fresh(tree, self.replica.index, self.options, differing)
            self.plan.check()
            return False, self.replica.index.nbytes
        self.plan = self._match(tree, differing)
        if self.plan.lacking and not (self.trees.changed or self.trees.alike):
            self.plan = self._match(self.trees.united()[0])  # another rank's tree may have it: it moved here
        if alone:
            self.plan.check()
        else:
            self.plan.check_asked()
        for first, second, place in self.plan.ties:
            if not same_values(self.replica, self.run, first, second):
                raise StateMismatchError(
                    f"`into` has one tensor where the checkpoint has two different ones: {first.name!r} and {second.name!r} (at {place}); "
                    "nothing was changed",
                    hint="untie the weights before loading, or load them by names=",
                )
        return not alone and bool(self.plan.unasked()), 0 if alone else self._nbytes()

    def _nbytes(self) -> int:
        fresh = {t.base for node in self.plan.fresh for t in stored_tensors(node)}
        whole_ones = [(entry.dtype, entry.shape) for entry in (_find(self.replica.index, name) for name in sorted(fresh))]
        parts = [(fill.entry.dtype, tuple(fill.target.shape)) for fill in self.plan.fills]
        return sum(math.prod(shape) * torch_dtype(dtype).itemsize for dtype, shape in (*whole_ones, *parts))

    def unasked(self) -> tuple[list[str], set[str]]:
        """The names of all places of all saved ranks, the same list on every rank, and those that this rank leaves out."""
        tree, _ = self.trees.united(self.trees.saved[0])
        stored = sorted({name_of(place) for place in leaves(tree)})
        return stored, set(stored) if self.into is None else self._match(tree).unasked()

    def finish(self) -> Any:
        """Reads everything, and puts it in its place."""
        plan, hook = self.plan, self.options.ranks
        with self.filling() as fill:
            made = _fresh_tensors(self.replica.index, fill, {t.base for node in plan.fresh for t in stored_tensors(node)}, plan.fills)
        if plan.differing and hook is None:
            self._warn(plan.differing)
        chosen: Mapping[Place, RankValues] = self._values(plan.differing) if plan.differing and hook is not None else {}
        above = {place[:length] for place in chosen for length in range(len(place))}

        def resolve(node: Any, place: Place) -> Any:
            if hook is not None and place in chosen:
                return hook(chosen[place])
            return _at_places(node, place, resolve) if place in above else node

        plan.filling.tell(self.what, loudly=self.rank == 0)

        def build(node: Any, place: Place) -> Any:
            whole = put_in(node, place, plan.made) if plan.incomplete else node
            return unflatten(resolve(whole, place), made.__getitem__, self.codecs)

        return plan.finish(build)

    def _match(self, tree: Any, differing: Collection[Place] = ()) -> Match:
        return match(self.into, tree, self.replica.index, self.options, self.names, differing)

    def _values(self, places: Collection[Place]) -> dict[Place, RankValues]:
        nodes = self.trees.values(frozenset(places))
        return {
            place: RankValues(
                path=name_of(place),
                values=LazyValues(tuple(found), lambda rank, found=found: load_fresh(self.replica, self.run, found[rank], self.codecs)),  # type: ignore[misc]
                rank=self.rank,
                world_size=self.world_size or len(self.trees.saved),
                saved_world_size=len(self.trees.saved),
            )
            for place, found in nodes.items()
        }

    def _warn(self, places: Collection[Place]) -> None:
        some = format_some(sorted(name_of(place) for place in places), 20)
        log.log(
            logging.WARNING if self.rank == 0 else logging.INFO,
            "%d ranks saved values that differ between them, %s load: rank %d takes over from saved rank %d, as each does modulo %d: %s. "
            "LoadOptions(ranks=...) decides what each rank gets; ranks=tierstore.keep_modulo does as now, without this warning",
            len(self.trees.saved),
            self.world_size,
            self.rank,
            self.trees.base,
            len(self.trees.saved),
            some,
        )


def _at_places(node: Any, place: Place, change: Any) -> Any:
    """A stored container with `change` applied to each of its items and their places."""
    if isinstance(node, dict):
        return type(node)((key, change(item, (*place, key))) for key, item in node.items())
    if isinstance(node, list | tuple):
        return type(node)(change(item, (*place, at)) for at, item in enumerate(node))
    if isinstance(node, Opaque) and node.tag == MODULE_STATE:
        return Opaque(node.tag, [change(node.value[0], place), node.value[1]])
    return node


@contextmanager
def _exchanged(ranks: Agreement, what: str, budget_nbytes: int, replica: SharedReader, run: Run) -> Iterator[Filler]:
    with Exchange(ranks, what=what, budget_nbytes=budget_nbytes) as exchange:
        yield functools.partial(exchange.fill, replica, run)


def _fresh_tensors(index: RoutingIndex, fill: Filler, names: Iterable[str], fills: Sequence[Fill] = ()) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    wishes = list(fills)
    listed = sorted(names)
    index.prepare(listed)
    for name in listed:
        entry = _find(index, name)
        made[name] = on_huge_pages(empty(entry.shape, torch_dtype(entry.dtype)))
        wishes.append(Fill(entry=entry, box=whole(entry.shape), target=made[name]))
    fill(wishes)
    return made


def _find(index: RoutingIndex, name: str) -> Any:
    try:
        return index.find(name)
    except NotFoundError as error:
        raise IncompleteError(
            f"the checkpoint's tree names the tensor {name!r}, its index does not", hint="run `tierstore verify`, or load another step"
        ) from error
