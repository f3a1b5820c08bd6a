"""A folder of PaddleNLP's Unified Checkpoint: weights, master weights and optimizer, each with an index; states may be quantised.

A weight and its master weight have the same name there, so that names here begin with their part: ``model.``, ``master_weights.``,
``optimizer.``. Quantised moments (``ckpt_quant_stage`` in the optimizer's index) become tensors of float32 in files that do not exist;
their bytes are calculated when they are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError, IncompleteError, UsageError
from tierstore.format.document import load_json
from tierstore.format.header import HeaderTensor, ShardHeader
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.objects import TensorRef
from tierstore.format.paddle_states import O2_ROWS, decode_o1_first, decode_o1_second, decode_o2_first, decode_o2_second
from tierstore.state.foreign.files import ForeignFiles
from tierstore.state.foreign.places import Place, Wherever
from tierstore.state.foreign.safetensors import INDEX_SUFFIX, merge_headers, read_headers, weight_map_of

__all__ = ["Unified", "is_unified", "read_unified"]

_PARTS = {"model": "model", "peft_model": "model", "master_weights": "master_weights", "optimizer": "optimizer"}
"""Begin of an index file's name → the part of the state that it is of."""

_SURE = ("optimizer", "master_weights")
"""Parts that nobody else's folders have."""

_MAX_INDEX_NBYTES = 256 << 20
_FIRST, _SECOND = "moment1_0", "moment2_0"
_SCALES, _LOW, _HIGH = "@scales", "@min_scales", "@max_scales"

Read = Callable[[str, int, int], Awaitable[bytes]]
"""File, begin and length in bytes → the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unified:
    """What a folder holds.

    Attributes:
        entries: Its tensors; quantised ones as what they stand for.
        places: How the bytes of files that do not exist are made.
        sizes: Length of each file, in bytes, also of those that do not exist.
        shards: The files, where all tensors lie in them as they are; else empty.
        tree: The state: a dict for each part.
    """

    entries: tuple[TensorEntry, ...]
    places: Mapping[str, Wherever]
    sizes: Mapping[str, int]
    shards: tuple[str, ...]
    tree: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMoment:
    """A moment ``[rows, columns]`` of float32 that is calculated from codes and scales; finds itself (`Wherever`).

    Attributes:
        name: Of the moment, for messages.
        file: Where its codes lie, from `begin` on, one byte a number.
        rows, columns: As a matrix.
        step: Rows that have one scale in a column; 0: all.
        scales: Where its scales begin, each float32, `columns` for each step.
        decode: Makes the numbers.
    """

    name: str
    file: str
    begin: int
    rows: int
    columns: int
    step: int
    scales: tuple[int, ...]
    decode: Callable[..., npt.NDArray[np.float32]]

    async def find(self, files: ForeignFiles) -> Place:
        return Place(file=self.file, begin=0, nbytes=self.rows * self.row_nbytes, made=self)

    @property
    def row_nbytes(self) -> int:
        return 4 * self.columns

    async def make(self, first: int, last: int, read: Read) -> npt.NDArray[np.uint8]:
        """The bytes of rows ``[first, last)``.

        Raises:
            FormatError: They are no numbers; names the tensor.
        """
        step = self.step or self.rows
        begin, end = first // step, -(-last // step)
        top, bottom = (begin * step, end * step) if self.step else (first, last)
        raw = await read(self.file, self.begin + top * self.columns, (bottom - top) * self.columns)
        codes = np.frombuffer(raw, dtype=np.int8).reshape(bottom - top, self.columns)
        scales = [await read(self.file, at + begin * 4 * self.columns, (end - begin) * 4 * self.columns) for at in self.scales]
        shape = (end - begin, self.columns) if self.step else (self.columns,)
        try:
            made = await asyncio.to_thread(self.decode, codes, *(np.frombuffer(one, dtype="<f4").reshape(shape) for one in scales))
        except FormatError as error:
            raise FormatError(f"{self.file}: {self.name[:200]!r}: {error.message}", hint=error.hint, tensor=self.name) from error
        return np.ascontiguousarray(made[first - top : last - top]).view(np.uint8)


def is_unified(files: ForeignFiles) -> bool:
    """Whether a folder is a Unified Checkpoint, by the names of its files."""
    return not files.only and any(f"{part}{INDEX_SUFFIX}" in files.infos for part in _SURE)


async def read_unified(files: ForeignFiles) -> Unified:
    """Reads the indexes and the headers of the files that they name.

    Raises:
        UsageError: It was saved without merging the optimizer, rank by rank.
        FormatError: An index or a header is malformed, or says that nothing is quantised while something is.
        IncompleteError: A file, a tensor or a scale is missing.
    """
    entries: list[TensorEntry] = []
    places: dict[str, Wherever] = {}
    sizes: dict[str, int] = {}
    tree: dict[str, dict[str, TensorRef]] = {}
    for stem, part in _PARTS.items():
        found = await _read_part(files, stem, part)
        if found is None:
            continue
        if part in tree:
            raise UsageError(f"{files.uri} holds both a model and an adapter", hint="take one of them out of the folder", file=stem)
        entries += [replace(entry, name=f"{part}.{entry.name}") for entry in found.entries]
        tree[part] = {entry.name: TensorRef(f"{part}.{entry.name}") for entry in found.entries}
        places.update(found.places)
        sizes.update(found.sizes)
    shards = () if places else tuple(sizes)
    return Unified(entries=tuple(entries), places=places, sizes=sizes, shards=shards, tree=tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    entries: tuple[TensorEntry, ...]
    places: Mapping[str, Wherever]
    sizes: Mapping[str, int]


async def _read_part(files: ForeignFiles, stem: str, part: str) -> _Part | None:
    """One part by its own names; None: the folder has none."""
    index, single = stem + INDEX_SUFFIX, f"{stem}.safetensors"
    if index in files.infos:
        body = load_json(await files.small(index, _MAX_INDEX_NBYTES), index, max_nbytes=_MAX_INDEX_NBYTES)
        if part == "optimizer" and isinstance(body, dict) and "weight_map" not in body and "optim_shard_num" in body:
            raise UsageError(
                f"{files.uri} was saved with ignore_merge_optimizer: each rank's optimizer lies in a file of its own, in its own layout",
                hint="resume it with PaddleNLP and save it without that option; or say format='safetensors' for the weights alone",
            )
        weight_map = weight_map_of(files, body, index)
        names = sorted(set(weight_map.values()))
    elif single in files.infos:
        index, body, names, weight_map = single, {}, [single], {}
    else:
        return None
    sizes = {name: await files.nbytes(name, index) for name in names}
    headers = await read_headers(files, names)
    weight_map = weight_map or dict.fromkeys(headers[single].tensors, single)
    moments: dict[str, QuantisedMoment] = {}
    if part == "optimizer":
        moments = {n: m for n, m in _quantised(files, headers, body.get("ckpt_quant_stage", "O0"), index).items() if n in weight_map}
    if moved := [name for name, moment in moments.items() if weight_map[name] != moment.file]:
        raise IncompleteError(
            f"{files.uri}: {index} places the tensor {moved[0][:200]!r} in {weight_map[moved[0]]!r}, but {moments[moved[0]].file!r} has it",
            hint="index and files are of different saves: copy the checkpoint again",
            tensor=moved[0],
        )
    plain = {name: file for name, file in weight_map.items() if name not in moments}
    found = await asyncio.to_thread(merge_headers, files, headers, plain, index, proven=False)
    made = [_entry(name, moment, headers, number) for number, (name, moment) in enumerate(moments.items())]
    virtual = {entry.extents[0].file: moments[entry.name] for entry in made}
    sizes.update((file, moment.rows * moment.row_nbytes) for file, moment in virtual.items())
    return _Part(entries=(*found, *made), places=virtual, sizes=sizes)


def _quantised(files: ForeignFiles, headers: Mapping[str, ShardHeader], stage: Any, index: str) -> dict[str, QuantisedMoment]:
    """The moments that are quantised, by name."""
    scales = {key: file for file, header in headers.items() for key in header.tensors if key.endswith((_SCALES, _LOW, _HIGH))}
    if stage not in ("O0", "O1", "O2"):
        raise FormatError(f"{files.uri}: {index} says ckpt_quant_stage is {stage!r}", hint="known are O0, O1 and O2", file=index)
    if stage == "O0":
        if scales:
            raise FormatError(
                f"{files.uri}: {index} says that no state is quantised (ckpt_quant_stage), but {next(iter(scales))[:200]!r} is a scale",
                hint="index and files are of different saves: copy the checkpoint again",
                file=index,
            )
        return {}
    moments: dict[str, QuantisedMoment] = {}
    for file, header in headers.items():
        for key, tensor in header.tensors.items():
            if stage == "O1" and key.endswith(_FIRST) and tensor.dtype == "I8":
                moments[key] = _column_wise(file, header, key, tensor, (_SCALES,), decode_o1_first)
            elif stage == "O1" and key.endswith(_SECOND) and tensor.dtype == "U8":
                moments[key] = _column_wise(file, header, key, tensor, (_LOW, _HIGH), partial(_unsigned, decode_o1_second))
            elif stage == "O2" and key.endswith(_SECOND) and tensor.dtype == "I8":
                first = key.removesuffix(_SECOND) + _FIRST
                moments[first] = _group_wise(file, header, first, tensor, (first + _SCALES,), decode_o2_first)
                moments[key] = _group_wise(file, header, key, tensor, (key + _LOW, key + _HIGH), decode_o2_second)
    return moments


def _unsigned(decode: Callable[..., npt.NDArray[np.float32]], codes: npt.NDArray[np.int8], *scales: Any) -> npt.NDArray[np.float32]:
    return decode(codes.view(np.uint8), *scales)


def _column_wise(
    file: str, header: ShardHeader, name: str, codes: HeaderTensor, scales: Sequence[str], decode: Callable[..., Any]
) -> QuantisedMoment:
    columns = codes.shape[-1] if len(codes.shape) > 1 else 1
    begins = _scales(file, header, name, [name + suffix for suffix in scales], columns)
    rows = prod(codes.shape) // columns if columns else 0
    return QuantisedMoment(name=name, file=file, begin=codes.begin, rows=rows, columns=columns, step=0, scales=begins, decode=decode)


def _group_wise(
    file: str, header: ShardHeader, name: str, codes: HeaderTensor, scales: Sequence[str], decode: Callable[..., Any]
) -> QuantisedMoment:
    if len(codes.shape) != 2 or codes.shape[0] % O2_ROWS:
        raise FormatError(
            f"{file}: {name[:200]!r} is quantised in stage O2 with shape {list(codes.shape)}, which has no groups of {O2_ROWS} rows",
            hint="the file is damaged, or holds one rank's part",
            tensor=name,
            file=file,
        )
    rows, columns = codes.shape
    begins = _scales(file, header, name, scales, rows // O2_ROWS * columns)
    return QuantisedMoment(name=name, file=file, begin=codes.begin, rows=rows, columns=columns, step=O2_ROWS, scales=begins, decode=decode)


def _scales(file: str, header: ShardHeader, name: str, keys: Sequence[str], count: int) -> tuple[int, ...]:
    begins = []
    for key in keys:
        found = header.tensors.get(key)
        if found is None:
            raise IncompleteError(
                f"{file}: {name[:200]!r} is quantised, but its scales {key[:200]!r} are missing",
                hint="the file is damaged, or of another save: copy the checkpoint again",
                tensor=name,
                file=file,
            )
        if found.dtype != "F32" or prod(found.shape) != count:
            raise FormatError(
                f"{file}: the scales {key[:200]!r} are {found.dtype} {list(found.shape)}, where {count:,} of F32 are needed",
                hint="the file is damaged, or holds one rank's part",
                tensor=name,
                file=file,
            )
        begins.append(found.begin)
    return tuple(begins)


def _entry(name: str, moment: QuantisedMoment, headers: Mapping[str, ShardHeader], number: int) -> TensorEntry:
    """The moment as a tensor, in a file of its own that does not exist."""
    tensors = headers[moment.file].tensors
    shape = (tensors.get(name) or tensors[name.removesuffix(_FIRST) + _SECOND]).shape
    extent = Extent(file=f"{moment.file}@{number}", begin=0, end=moment.rows * moment.row_nbytes, offsets=(0,) * len(shape), sizes=shape)
    return TensorEntry(name=name, dtype="float32", shape=shape, extents=(extent,))
