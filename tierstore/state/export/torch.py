"""One file as `torch.save` writes it, that `torch.load(weights_only=True)` reads. The whole state is in memory, and once more as bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from tierstore.errors import UnsupportedTypeError, UsageError
from tierstore.format.objects import ObjectCodecs
from tierstore.state.bits import empty, torch_dtype
from tierstore.state.boxes import whole
from tierstore.state.export.plan import ExportOptions, Plan
from tierstore.state.export.target import ExportTarget
from tierstore.state.export.tree import beyond, in_order, plain_tree
from tierstore.state.load import load_fresh
from tierstore.state.reading import Fill, Reader, Run, fill_all
from tierstore.state.unflatten import stored_tensors, unflatten

__all__ = ["load_tensors", "torch_names", "write_torch"]


def torch_names(reader: Reader, tree: Any, options: ExportOptions) -> dict[str, str]:
    """The tensors of the file, new name → stored name: what is chosen, or all that the tree has.

    Raises:
        NotFoundError: Nothing matches.
        UsageError: Nothing was chosen, and the tree of the rank lacks tensors that other ranks have.
    """
    if options.selects:
        return options.choice.of(in_order(tree, reader.index))
    if lost := beyond(tree, reader.index):
        raise UsageError(
            f"the state of rank {options.rank} lacks {len(lost):,} tensors that other ranks have, e.g. {lost[0]!r}",
            hint="--include '*' writes every tensor by its name; --format dcp has both",
        )
    return {t.name: t.name for t in stored_tensors(tree)}


def write_torch(
    target: ExportTarget, name: str, reader: Reader, run: Run, tree: Any, plan: Plan, options: ExportOptions, codecs: ObjectCodecs
) -> None:
    """Loads what is planned (without a choice: the state as it was saved) and writes it.

    Raises:
        UnsupportedTypeError: The state holds something that `torch.load` would only unpickle with ``weights_only=False``.
    """
    state: Any
    if options.selects:
        state = load_tensors(reader, run, plan)
    elif options.dtype is not None:
        state = unflatten(plain_tree(tree, sparse=True), load_tensors(reader, run, plan).__getitem__, codecs)
    else:
        state = load_fresh(reader, run, tree, codecs)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    del state
    if unsafe := _unsafe(buffer):
        raise UnsupportedTypeError(
            f"the state holds values that torch.load reads only with weights_only=False: {', '.join(unsafe[:5])}; nothing was written",
            hint="choose what to export with --include (tensors only), or export with --format dcp",
        )
    target.put(name, buffer.getbuffer(), len(plan.tensors))


def load_tensors(reader: Reader, run: Run, plan: Plan) -> dict[str, torch.Tensor]:
    """Reads planned tensors as a whole, by name."""
    made: dict[str, torch.Tensor] = {}
    fills: list[Fill] = []
    for tensor in plan.tensors:
        made[tensor.name] = empty(tensor.shape, torch_dtype(tensor.dtype))
        fills.append(tensor.fill(reader, whole(tensor.shape), made[tensor.name]))
    fill_all(reader, run, fills)
    return made


def _unsafe(buffer: io.BytesIO) -> list[str]:
    """What a reader with ``weights_only=True`` would refuse. (Tells names from opcodes; nothing is unpickled.)"""
    buffer.seek(0)
    try:
        return sorted(get_unsafe_globals_in_checkpoint(buffer))
    except pickle.UnpicklingError as error:
        return [str(error).splitlines()[0]]
