"""Loading: a stored state becomes fresh tensors, or fills the tensors that the caller has, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tierstore.errors import IncompleteError, NotFoundError, StateMismatchError
from tierstore.format.index import RoutingIndex
from tierstore.format.objects import ObjectCodecs, decode_objects
from tierstore.state.bits import empty, torch_dtype
from tierstore.state.boxes import whole
from tierstore.state.codecs import default_codecs
from tierstore.state.differences import LoadOptions, selected
from tierstore.state.matching import match
from tierstore.state.reading import Fill, Reader, Run, fill_all, same_values
from tierstore.state.unflatten import check_tree, stored_tensors, unflatten

__all__ = ["LoadOptions", "load_fresh", "load_state", "read_tree"]


def load_state(
    replica: Reader,
    run: Run,
    *,
    into: Any = None,
    options: LoadOptions | None = None,
    rank: int = 0,
    codecs: ObjectCodecs | None = None,
    names: Sequence[str] | None = None,
) -> Any:
    """Loads a state; every byte is proved by `Reader.read`.

    Args:
        replica: The open checkpoint.
        run: Runs a coroutine on the event loop that `replica` lives on.
        into: A state whose tensors are filled in place (their identity and memory stay; other devices, strides and, if allowed, dtypes
            too) and whose other values are replaced. None: a fresh state on the CPU; sharded tensors come back whole.
        options: What to do where `into` and the checkpoint differ; None: every difference is an error.
        rank: Whose objects to load: counters, RNG states and tensors that are not sharded belong to a rank.
        codecs: Codecs for further types; None: torch's own.
        names: Globs over dotted names. With `into`: only these places are compared and loaded. Without: the result is a flat dict of these.

    Returns:
        The state; `into` itself where it is given (a new tuple if it is a tuple that holds plain values).

    Raises:
        StateMismatchError: `into` and the checkpoint differ, every difference in one error. Nothing was changed.
        IncompleteError, IntegrityError: Stored bytes are missing or wrong on every tier. Tensors of `into` may be partly filled.
    """
    codecs = codecs or default_codecs()
    tree = read_tree(replica, run, rank)
    if into is None:
        if names is None:
            return load_fresh(replica, run, tree, codecs)
        wanted = [name for name in replica.index.names() if selected(name, names)]
        if not wanted:
            raise NotFoundError(f"no tensor of the checkpoint matches {list(names)}", hint="`tierstore tensors RUN@STEP` lists the names")
        return _fresh_tensors(replica, run, wanted)
    plan = match(into, tree, replica.index, options or LoadOptions(), names)
    for first, second, place in plan.ties:
        if not same_values(replica, run, first, second):
            raise StateMismatchError(
                f"`into` has one tensor where the checkpoint has two different ones: {first.name!r} and {second.name!r} (at {place}); "
                "nothing was changed",
                hint="untie the weights before loading, or load them by names=",
            )
    made = _fresh_tensors(replica, run, {t.base for node in plan.fresh for t in stored_tensors(node)}, plan.fills)
    return plan.finish(lambda node: unflatten(node, made.__getitem__, codecs))


def read_tree(replica: Reader, run: Run, rank: int) -> Any:
    """The decoded tree of `rank`, with references for its tensors and tags left as they are."""
    return check_tree(decode_objects(run(replica.objects(rank))))


def load_fresh(replica: Reader, run: Run, tree: Any, codecs: ObjectCodecs) -> Any:
    """Builds the state of `tree`; its tensors are new, each with memory of its own, but for ties and views."""
    made = _fresh_tensors(replica, run, {t.base for t in stored_tensors(tree)})
    return unflatten(tree, made.__getitem__, codecs)


def _fresh_tensors(replica: Reader, run: Run, names: Iterable[str], fills: Sequence[Fill] = ()) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    wishes = list(fills)
    listed = sorted(names)
    replica.index.prepare(listed)
    for name in listed:
        entry = _find(replica.index, name)
        made[name] = empty(entry.shape, torch_dtype(entry.dtype))
        wishes.append(Fill(entry=entry, box=whole(entry.shape), target=made[name]))
    fill_all(replica, run, wishes)
    return made


def _find(index: RoutingIndex, name: str) -> Any:
    try:
        return index.find(name)
    except NotFoundError as error:
        raise IncompleteError(
            f"the checkpoint's tree names the tensor {name!r}, its index does not", hint="run `tierstore verify`, or load another step"
        ) from error
