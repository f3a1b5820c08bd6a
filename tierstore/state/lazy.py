"""A checkpoint opened for looking and for single slices: nothing is read before it is asked for, and then only those rows."""

from __future__ import annotations

import math
import operator
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from tierstore.errors import NotFoundError, UsageError
from tierstore.format.dtypes import DTYPES
from tierstore.format.index import TensorEntry
from tierstore.format.objects import ObjectCodecs, Opaque, TensorRef
from tierstore.state.bits import empty, torch_dtype
from tierstore.state.boxes import Box, whole
from tierstore.state.choice import Choice
from tierstore.state.codecs import default_codecs
from tierstore.state.export.exporting import Exported, ExportOptions, export_checkpoint
from tierstore.state.load import LoadOptions, load_fresh, load_state, read_tree
from tierstore.state.rank_trees import RankTrees
from tierstore.state.reading import Fill, Reader, Run, fill_all
from tierstore.state.renamed import renamed_reader
from tierstore.state.unflatten import COMPONENTS, MODULE_STATE, OMITTED, SPARSE, TENSOR, stored_tensors

__all__ = ["Checkpoint", "LazyTensor"]


class LazyTensor:
    """A stored tensor whose values are read when it is indexed: ``t[128:256]``, ``t[:, 3]``, ``t[..., ::2]``, ``t.full()``."""

    __slots__ = ("_entry", "_reader", "_run")

    def __init__(self, entry: TensorEntry, reader: Reader, run: Run) -> None:
        self._entry = entry
        self._reader = reader
        self._run = run

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def shape(self) -> torch.Size:
        """The whole tensor's shape, however it was sharded."""
        return torch.Size(self._entry.shape)

    @property
    def ndim(self) -> int:
        return len(self._entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self._entry.dtype)

    @property
    def nbytes(self) -> int:
        """Length of the whole tensor, in bytes."""
        return math.prod(self._entry.shape) * DTYPES[self._entry.dtype].itemsize

    def __len__(self) -> int:
        if not self._entry.shape:
            raise TypeError("a 0-d tensor has no length")
        return self._entry.shape[0]

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Reads a part: ints, slices with steps from 1, ``...`` and None, as torch indexes. The result has memory of its own.

        Raises:
            IndexError: Out of range, or too many indices.
            UsageError: Masks, index lists and negative steps; read a part that covers them and index that.
        """
        box, shape = _parse(key, self._entry.shape)
        return self._read(box).view(shape)

    def full(self) -> torch.Tensor:
        """Reads all of it."""
        return self._read(whole(self._entry.shape))

    def _read(self, box: Box) -> torch.Tensor:
        target = empty(tuple(len(r) for r in box), self.dtype)
        fill_all(self._reader, self._run, [Fill(entry=self._entry, box=box, target=target)])
        return target

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, shape={list(self.shape)}, dtype={self._entry.dtype})"


class Checkpoint(Mapping[str, LazyTensor]):
    """The tensors of one checkpoint by name, and the rest of its state. Made by `Store.open_checkpoint` and `tierstore.open_foreign`.

    Args:
        replica: The open checkpoint.
        run: Runs a coroutine on the event loop that `replica` lives on.
        codecs: Codecs for further types; None: torch's own.
        rank: Whose objects `objects` and `state` give.
        world_size: How many load; where another number saved, objects are those of all ranks united. None: as many as saved.
        note: What the representation says of it beside its size.
        on_close: Ends what only this checkpoint uses; a store's checkpoints live as long as their store.
    """

    def __init__(
        self,
        replica: Reader,
        run: Run,
        *,
        codecs: ObjectCodecs | None = None,
        rank: int = 0,
        world_size: int | None = None,
        note: str = "",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.replica = replica
        self._note = note
        self._on_close = on_close
        self._run = run
        self._codecs = codecs or default_codecs()
        self._rank = rank
        self._world_size = world_size
        self._tree: Any = None

    def __getitem__(self, name: str) -> LazyTensor:
        """The tensor called `name`; nothing is read.

        Raises:
            NotFoundError: There is none; the nearest names are suggested.
            UsageError: `name` is no text.
        """
        if not isinstance(name, str):
            raise UsageError(f"a checkpoint's tensors have names, not {name!r}", hint="index the tensor: checkpoint['NAME'][0]")
        if name not in self.replica.index and (parts := self._components(name)):
            raise NotFoundError(
                f"{name!r} is a sparse tensor, which is stored by its components: {', '.join(map(repr, parts))}",
                hint=f"read one: checkpoint[{parts[-1]!r}]; or load the tensor into one of yours: checkpoint.load(into=…)",
                tensor=name,
            )
        return LazyTensor(self.replica.index.find(name), self.replica, self._run)

    def _components(self, name: str) -> list[str]:
        """What a sparse tensor of this name is stored as; nothing where there is none."""
        each = ([f"{name}.{part}" for part in parts] for parts in COMPONENTS.values())
        return next((parts for parts in each if all(part in self.replica.index for part in parts)), [])

    def __contains__(self, name: object) -> bool:
        return name in self.replica.index

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor called `name`, or `default`."""
        if name not in self:
            return default
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.replica.index.names())

    def __len__(self) -> int:
        return len(self.replica.index)

    @property
    def objects(self) -> Any:
        """The state's tree without its tensors' values: numbers, strings and containers as saved, a `TensorRef` for each tensor."""
        return _outline(self._read_tree(), self._codecs)

    def state(self) -> Any:
        """Loads all of it into fresh tensors."""
        return self.load()

    def load(self, into: Any = None, *, options: LoadOptions | None = None, names: Sequence[str] | None = None) -> Any:
        """Loads it into fresh tensors, or into those that the caller has (sharded ones too: each rank reads its own part).

        Args:
            into: A state whose tensors are filled in place; None: fresh tensors on the CPU.
            options: What to do about missing, unexpected, wrong-shape and wrong-dtype entries; strict by default.
            names: Globs over dotted names: only these are loaded.

        Returns:
            The state; `into` itself where it was given.

        Raises:
            StateMismatchError: `into` and the checkpoint differ; nothing was changed.
            IntegrityError: There are no good bytes.
        """
        return load_state(
            self.replica,
            self._run,
            into=into,
            options=options,
            rank=self._rank,
            world_size=self._world_size,
            codecs=self._codecs,
            names=names,
        )

    def renamed(self, rules: Any, *, include: Sequence[str] = (), exclude: Sequence[str] = (), strip: str = "") -> Checkpoint:
        """This checkpoint's tensors under other names, split, fused and permuted by `rules`; nothing is read but what is asked for.

        What is not a tensor is not part of it.

        Args:
            rules: A YAML file's path, a list of rules, or a mapping with ``rules`` and ``others`` (see the guide on export).
            include: Globs of the stored names that the rules see; empty: all.
            exclude: Globs of those that they don't.
            strip: A prefix to take off first; without `include` it chooses the names that have it.

        Raises:
            UsageError: The rules don't fit the tensors; names the rule and the tensor.
        """
        reader = renamed_reader(self.replica, rules, Choice(include=tuple(include), exclude=tuple(exclude), strip=strip))
        return Checkpoint(reader, self._run, codecs=self._codecs, note=self._note, on_close=self._on_close)

    def export(
        self,
        to: str | os.PathLike[str],
        options: ExportOptions | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
        dry_run: bool = False,
    ) -> Exported:
        """Writes it for other programs; see `Store.export`."""
        return export_checkpoint(
            self.replica,
            self._run,
            to,
            options,
            storage_options=storage_options,
            codecs=self._codecs,
            progress=progress,
            dry_run=dry_run,
        )

    def fill(self, fills: Sequence[Fill]) -> None:
        """Reads boxes of stored tensors, each into memory of the caller's, in one go; for doors that lay bytes out for themselves.

        Raises:
            IntegrityError: There are no good bytes.
        """
        fill_all(self.replica, self._run, fills)

    def trees(self) -> RankTrees:
        """The trees of the ranks that saved it, for doors that look for a part of the state whoever saved it."""
        return RankTrees(self.replica, self._run, rank=self._rank, world_size=None)

    def build(self, node: Any) -> Any:
        """Loads the part of the state that `node`, a part of one of `trees`, stands for; its tensors are new.

        Raises:
            IntegrityError: There are no good bytes.
        """
        return load_fresh(self.replica, self._run, node, self._codecs)

    def close(self) -> None:
        """Ends what only this checkpoint uses (of `tierstore.open_foreign`: its storage's clients); idempotent."""
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _read_tree(self) -> Any:
        if self._tree is None:
            self._tree = read_tree(self.replica, self._run, self._rank, self._world_size)
        return self._tree

    def __repr__(self) -> str:
        return f"Checkpoint({len(self):,} tensors{', ' if self._note else ''}{self._note})"


def _outline(node: Any, codecs: ObjectCodecs) -> Any:
    if isinstance(node, Opaque):
        if node.tag == OMITTED:
            return node
        if node.tag == TENSOR:
            return TensorRef(node.value["ref"].name)
        if node.tag == MODULE_STATE:
            return _outline(node.value[0], codecs)
        if node.tag == SPARSE or any(True for _ in stored_tensors(node)):
            return Opaque(node.tag, _outline(node.value, codecs))
        return codecs.decode(node.tag, _outline(node.value, codecs))
    if isinstance(node, OrderedDict):
        return OrderedDict((key, _outline(item, codecs)) for key, item in node.items())
    if isinstance(node, dict):
        return {key: _outline(item, codecs) for key, item in node.items()}
    if isinstance(node, list):
        return [_outline(item, codecs) for item in node]
    if isinstance(node, tuple):
        return tuple(_outline(item, codecs) for item in node)
    return node


def _parse(key: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...]]:
    """The box that an index means, and the result's shape."""
    keys = key if isinstance(key, tuple) else (key,)
    if sum(k is Ellipsis for k in keys) > 1:
        raise IndexError("an index can have one '...' only")
    given = sum(k is not None and k is not Ellipsis for k in keys)
    if given > len(shape):
        raise IndexError(f"too many indices: {given} for a tensor of {len(shape)} dimensions")
    rest = [slice(None)] * (len(shape) - given)
    if not any(k is Ellipsis for k in keys):
        keys = (*keys, Ellipsis)
    full = [part for k in keys for part in (rest if k is Ellipsis else (k,))]
    box: list[range] = []
    result: list[int] = []
    for part in full:
        if part is None:
            result.append(1)
            continue
        size = shape[len(box)]
        if isinstance(part, slice):
            begin, end, step = part.indices(size)
            if step < 0:
                raise UsageError("negative steps can't be read", hint="read with a positive step and .flip() the result")
            box.append(range(begin, max(begin, end), step))
            result.append(len(box[-1]))
        elif isinstance(part, bool | torch.Tensor) or not hasattr(part, "__index__"):
            raise UsageError(
                f"a lazy tensor can't be indexed by a {type(part).__name__}",
                hint="use ints, slices, '...' and None; for masks and lists read the rows that cover them and index those",
            )
        else:
            index = operator.index(part)
            if not -size <= index < size:
                raise IndexError(f"index {index} is out of range for dimension {len(box)} of size {size}")
            index %= size
            box.append(range(index, index + 1))
    return tuple(box), tuple(result)
