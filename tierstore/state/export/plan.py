"""What an export writes: the chosen tensors under their new names, with dtypes and ties, computed before anything is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from tierstore.errors import UsageError
from tierstore.format.dtypes import DTYPES
from tierstore.format.index import TensorEntry
from tierstore.state.boxes import Box, whole
from tierstore.state.choice import Choice
from tierstore.state.reading import Fill, Reader
from tierstore.state.renamed import chosen_views
from tierstore.state.views import NamedView, Piece, View
from tierstore.units import parse_size

__all__ = ["ExportOptions", "OutTensor", "Plan", "boxes_of_range", "flat_fills", "plan_tensors"]

CASTS = ("float64", "float32", "float16", "bfloat16")
"""What floating-point tensors can be cast to, and from. Smaller floats are quantised: without their scales a cast means nothing."""

_MIN_BUDGET = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What to export, and how.

    Attributes:
        format: ``hf``: a Hugging Face directory of safetensors; ``dcp``: a torch.distributed.checkpoint directory; ``torch``: one file
            as `torch.save` writes it.
        include: Globs over the stored names; empty: all.
        exclude: Globs of names to leave out.
        strip: A prefix that every chosen name has and that is taken off; without `include` it chooses the names that have it.
        rules: Renaming rules for the names that are left: what `parse_rules` takes.
        dtype: Cast floating-point tensors of 16 bits and more to it: ``bfloat16``, ``float16``, ``float32`` or ``float64``.
        max_shard_size: The longest file of tensors, in bytes or as text (``5GB``); a larger tensor has a file of its own.
        tied: ``once``: of names that share one tensor only the first is written, as `save_pretrained` does; ``copy``: all of them.
        config_from: A directory or URI whose other files (config.json, tokenizer …) are copied along (``hf``). None: those that came with
            an adopted checkpoint.
        overwrite: Replace what is at the target; else a target that has files is refused.
        budget: Memory for the export, in bytes or as text; larger tensors are read and written in pieces. Not for ``torch``.
        rank: Whose objects and tree (``dcp``, ``torch``).
    """

    format: Literal["hf", "dcp", "torch"] = "hf"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip: str = ""
    rules: Any = None
    dtype: str | None = None
    max_shard_size: int | str = "5GB"
    tied: Literal["once", "copy"] = "once"
    config_from: str | None = None
    overwrite: bool = False
    budget: int | str = 256 << 20
    rank: int = 0

    def __post_init__(self) -> None:
        allowed = {"format": ("hf", "dcp", "torch"), "tied": ("once", "copy"), "dtype": (None, *CASTS)}
        for option, values in allowed.items():
            if getattr(self, option) not in values:
                listed = ", ".join(repr(v) for v in values if v is not None)
                raise UsageError(f"export with {option}={getattr(self, option)!r}", hint=f"{option} is one of {listed}")
        _ = self.choice  # checks it
        if self.config_from is not None and self.format != "hf":
            raise UsageError(f"config_from goes with a Hugging Face directory, not with format {self.format!r}", hint="leave it out")
        if self.shard_nbytes < 1 << 20:
            raise UsageError(f"max_shard_size is {self.max_shard_size!r}", hint="give 1MiB or more, e.g. 5GB")
        if self.budget_nbytes < _MIN_BUDGET:
            raise UsageError(f"a budget of {self.budget!r} is too small", hint="give 32MiB or more")

    @property
    def choice(self) -> Choice:
        return Choice(include=self.include, exclude=self.exclude, strip=self.strip)

    @property
    def shard_nbytes(self) -> int:
        return self.max_shard_size if isinstance(self.max_shard_size, int) else parse_size(self.max_shard_size)

    @property
    def budget_nbytes(self) -> int:
        return self.budget if isinstance(self.budget, int) else parse_size(self.budget)

    @property
    def window_nbytes(self) -> int:
        """So many bytes of a file are made at once: three such windows, what is on its way out of them, and scratch fit the budget."""
        return self.budget_nbytes // 8 >> 20 << 20

    @property
    def selects(self) -> bool:
        """Whether names are chosen or changed."""
        return bool(self.include or self.exclude or self.strip or self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutTensor:
    """A tensor to write: its name, what it shows, and the dtype that it gets (a name of `DTYPES`)."""

    name: str
    view: View
    dtype: str

    def fill(self, reader: Reader, box: Box, target: torch.Tensor) -> Fill:
        """The wish that fills `target`, whose shape is the box's, with the part `box` of it."""
        entry = NamedView(name=self.name, view=self.view, find=reader.index.find)
        return Fill(entry=cast(TensorEntry, entry), box=box, target=target)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.view.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The tensors to write, in order, and the names that are left out because they are tied: name → the name that is written."""

    tensors: tuple[OutTensor, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """All of both, in order."""


def plan_tensors(reader: Reader, names: Mapping[str, str], options: ExportOptions) -> Plan:
    """Applies rules, dtype and ties to chosen tensors.

    Args:
        reader: The open checkpoint.
        names: New name → stored name, in the order of writing.
        options: See `ExportOptions`.

    Raises:
        UsageError: The rules don't fit.
    """
    tensors = chosen_views(reader.index, names, options.rules)
    canonical = _canonical(reader, {piece.tensor for view in tensors.values() for piece in view.pieces})
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    kept: list[OutTensor] = []
    for name, view in tensors.items():
        if options.tied == "once" and 0 not in view.shape:
            same = first.setdefault((view.shape, tuple(_key(piece, canonical) for piece in view.pieces)), name)
            if same != name:
                tied[name] = same
                continue
        cast = options.dtype is not None and view.dtype in CASTS
        kept.append(OutTensor(name=name, view=view, dtype=str(options.dtype) if cast else view.dtype))
    return Plan(tensors=tuple(kept), tied=tied, names=tuple(tensors))


def _canonical(reader: Reader, names: set[str]) -> dict[str, str]:
    """For each stored name the first one that has the same extents: tied tensors are one stored tensor."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name in sorted(names):
        entry = reader.index.find(name)
        found[name] = first.setdefault((entry.dtype, entry.shape, entry.extents), name) if 0 not in entry.shape else name
    return found


def _key(piece: Piece, canonical: Mapping[str, str]) -> tuple[Any, ...]:
    return canonical[piece.tensor], piece.box, piece.axes, piece.offsets


def boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The boxes that hold the elements ``[begin, end)`` of a row-major tensor, in order; at most two per axis and one."""
    if begin >= end:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, inside = divmod(begin, row)
    if inside:
        stop = min(end, (first + 1) * row)
        for box in boxes_of_range(shape[1:], inside, inside + stop - begin):
            yield (range(first, first + 1), *box)
        begin, first = stop, first + 1
    last = end // row
    if begin < end and first < last:
        yield (range(first, last), *whole(shape[1:]))
        begin = last * row
    if begin < end:
        for box in boxes_of_range(shape[1:], 0, end - begin):
            yield (range(last, last + 1), *box)


def flat_fills(reader: Reader, tensor: OutTensor, begin: int, target: torch.Tensor) -> Iterator[Fill]:
    """The wishes that fill `target` (one axis, the tensor's export dtype) with its elements from `begin` on."""
    at = 0
    for box in boxes_of_range(tensor.shape, begin, begin + target.numel()):
        shape = tuple(len(r) for r in box)
        count = math.prod(shape)
        yield tensor.fill(reader, box, target[at : at + count].view(shape))
        at += count
