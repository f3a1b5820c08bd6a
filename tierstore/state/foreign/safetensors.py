"""Foreign safetensors files: what their headers say of tensors, merged over all files of a checkpoint.

Three kinds meet here: whole tensors (Hugging Face), the chunks of stock DCP's `HuggingFaceStorageWriter` (offsets in
``DCP_SHARDING_INFO``, no global shape: it is inferred, and the chunks have to tile it), and shards that tierstore wrote itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.errors import FormatError, IncompleteError
from tierstore.format.document import load_json
from tierstore.format.dtypes import SAFETENSORS_NAMES
from tierstore.format.header import MAX_HEADER_NBYTES, HeaderTensor, ShardHeader, header_nbytes, parse_header
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.shard import shard_entries
from tierstore.state.foreign.files import ForeignFiles
from tierstore.tiers.together import together

__all__ = ["INDEX_SUFFIX", "choose_files", "merge_headers", "read_headers", "weight_map_of"]

INDEX_SUFFIX = ".safetensors.index.json"

_MAX_INDEX_NBYTES = 256 << 20
_AT_ONCE = 16
_SHARDED = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"


async def choose_files(files: ForeignFiles) -> tuple[tuple[str, ...], Mapping[str, str] | None, str]:
    """Which safetensors files make up the checkpoint.

    Returns:
        Their names; an index file's map of tensor to file, if there is one; and that index file's name.

    Raises:
        IncompleteError: An index or a file's own name says that there are more.
        FormatError: The index is malformed, or names files outside the folder.
        UsageError: Nothing says which of several files are meant.
    """
    names = sorted(name for name in files.infos if name.endswith(".safetensors"))
    listed = [files.only] if files.only.endswith(INDEX_SUFFIX) else sorted(n for n in files.infos if n.endswith(INDEX_SUFFIX))
    if files.only and not listed:
        return (files.only,), None, ""
    index = "model" + INDEX_SUFFIX if "model" + INDEX_SUFFIX in listed else listed[0] if len(listed) == 1 else ""
    if index:
        weight_map = await read_weight_map(files, index)
        chosen = tuple(dict.fromkeys(weight_map.values()))
        for name in chosen:
            await files.nbytes(name, index)
        return tuple(sorted(chosen)), weight_map, index
    if "model.safetensors" in names:
        return ("model.safetensors",), None, ""
    _check_numbers(files, names)
    return tuple(names), None, ""


async def read_weight_map(files: ForeignFiles, index: str) -> dict[str, str]:
    """The ``weight_map`` of a ``*.index.json``: tensor → file.

    Raises:
        FormatError: Malformed, or it names a file outside the folder.
    """
    body = load_json(await files.small(index, _MAX_INDEX_NBYTES), index, max_nbytes=_MAX_INDEX_NBYTES)
    return weight_map_of(files, body, index)


def weight_map_of(files: ForeignFiles, body: Any, index: str) -> dict[str, str]:
    """The same of an index file that was read.

    Raises:
        FormatError: Malformed, or it names a file outside the folder.
    """
    found = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise FormatError(f"{index} has no weight_map of tensors to files", hint="it is no index of a Hugging Face checkpoint", file=index)
    for file in dict.fromkeys(found.values()):
        files.path(file)
    return found


def _check_numbers(files: ForeignFiles, names: Sequence[str]) -> None:
    """Files that number themselves ``-of-N`` are all there."""
    series: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if (hit := _NUMBERED.fullmatch(name)) and not _SHARDED.fullmatch(name):
            series.setdefault((hit[1], int(hit[3])), set()).add(int(hit[2]))
    for (stem, count), there in series.items():
        first = 0 if 0 in there else 1  # tierstore's own begin at 0
        if missing := [n for n in range(first, first + min(count, 100_000)) if n not in there]:
            lost = f"{stem}-{missing[0]:05d}-of-{count:05d}.safetensors"
            raise IncompleteError(
                f"{files.uri} lacks {lost!r}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
                hint="the checkpoint is not whole: copy the missing files, then try again",
                file=lost,
            )


async def read_headers(files: ForeignFiles, names: Sequence[str]) -> dict[str, ShardHeader]:
    """The files' headers, each by two small reads.

    Raises:
        FormatError: A file is no safetensors file, or its header lies; names it.
    """

    async def one(name: str) -> ShardHeader:
        nbytes = await files.nbytes(name)
        try:
            length = header_nbytes(await files.read(name, 0, 8) if nbytes >= 8 else b"", nbytes)
            return parse_header(await files.read(name, 0, length), nbytes)
        except FormatError as error:
            raise FormatError(f"{name} in {files.uri}: {error.message}", hint=error.hint, file=name) from error

    return dict(zip(names, await together(one, names, at_once=_AT_ONCE), strict=True))


@dataclass(slots=True)
class _Merged:
    dtype: str
    shape: tuple[int, ...] | None
    """As stored; None: to be inferred."""
    extents: list[Extent]


def merge_headers(
    files: ForeignFiles, headers: Mapping[str, ShardHeader], weight_map: Mapping[str, str] | None, index: str, *, proven: bool
) -> tuple[TensorEntry, ...]:
    """What all headers say together. Whether chunks cover their tensors is another question: `check_coverage`.

    Args:
        files: For messages.
        headers: By file.
        weight_map: The index's word on which file has which tensor; only these tensors are taken.
        index: The index file's name.
        proven: The caller knows the global shapes and compares them: a gap between shard numbers is allowed then.

    Raises:
        IncompleteError: Two files have the same tensor, a file lacks one that the index places there, or a shard is missing.
        FormatError: A header's metadata contradict it, or a dtype is none of torch's.
    """
    merged: dict[str, _Merged] = {}
    for file, header in headers.items():
        for entry, known in _entries(header, file):
            if weight_map is not None and entry.name not in weight_map:
                continue
            before = merged.setdefault(entry.name, _Merged(entry.dtype, entry.shape if known else None, []))
            whole = known and any(extent.sizes == entry.shape for extent in entry.extents)
            if before.extents and whole:
                raise IncompleteError(
                    f"{files.uri}: tensor {entry.name[:200]!r} is in two files: {before.extents[0].file!r} and {file!r}",
                    hint="one of them is from another save: remove it, or name the one file that is meant",
                    tensor=entry.name,
                    files=[before.extents[0].file, file],
                )
            same_rank = not before.extents or len(before.extents[0].sizes) == len(entry.shape)
            if before.dtype != entry.dtype or (known and before.shape != entry.shape) or not same_rank:
                raise IncompleteError(
                    f"{files.uri}: {before.extents[0].file!r} and {file!r} disagree about the dtype or shape of {entry.name[:200]!r}",
                    hint="one of them is from another save: remove the stale files",
                    tensor=entry.name,
                    files=[before.extents[0].file, file],
                )
            before.extents.extend(entry.extents)
    if weight_map is not None:
        _check_map(files, merged, weight_map, index)
    if not proven:
        _check_shards(files, list(headers))
    return tuple(
        TensorEntry(name=name, dtype=m.dtype, shape=m.shape if m.shape is not None else _inferred(m.extents), extents=tuple(m.extents))
        for name, m in merged.items()
    )


def _inferred(extents: Sequence[Extent]) -> tuple[int, ...]:
    ends = [[o + n for o, n in zip(e.offsets, e.sizes, strict=True)] for e in extents]
    return tuple(max(axis) for axis in zip(*ends, strict=True))


def _check_map(files: ForeignFiles, merged: Mapping[str, _Merged], weight_map: Mapping[str, str], index: str) -> None:
    for name, file in weight_map.items():
        if name not in merged or all(extent.file != file for extent in merged[name].extents):
            raise IncompleteError(
                f"{files.uri}: {index} says that {file!r} has the tensor {name[:200]!r}, which it has not",
                hint="index and files are of different saves: copy the checkpoint again",
                tensor=name,
                file=file,
            )


def _check_shards(files: ForeignFiles, names: Sequence[str]) -> None:
    """DCP numbers its shards by rank, from 1: a gap is a lost file (or a rank that had nothing to write, which nothing tells apart)."""
    hits = [hit for name in names if (hit := _SHARDED.fullmatch(name))]
    there = {int(hit[1]) for hit in hits}
    if missing := [n for n in range(1, max(there, default=0)) if n not in there]:
        lost = f"shard-{missing[0]:05d}-model-{hits[0][2]}-of-{hits[0][3]}.safetensors"
        raise IncompleteError(
            f"{files.uri} lacks the shard {lost!r}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            hint="copy the missing shards; if that rank had nothing to write, prove it with shapes=model.state_dict()",
            file=lost,
        )


def _entries(header: ShardHeader, file: str) -> list[tuple[TensorEntry, bool]]:
    """A file's tensors, and for each whether its shape is known (not inferred from its chunks)."""
    if "tierstore" in header.metadata:
        return [(entry, True) for entry in shard_entries(header, file)]
    sharding: Any = None
    if text := header.metadata.get(_SHARDING):
        sharding = load_json(text.encode("utf-8", "surrogatepass"), f"{_SHARDING} of {file}", max_nbytes=MAX_HEADER_NBYTES)
        if not isinstance(sharding, dict):
            raise FormatError(f"{file}: {_SHARDING} is no JSON object", hint="the file is foreign or damaged", file=file)
    found = []
    for key, tensor in header.tensors.items():
        dtype, sizes = _dtype(key, tensor, file)
        offsets, shape = (0,) * len(sizes), sizes
        known = sharding is None
        if sharding is not None:
            offsets, given = _place(sharding.get(key), sizes, key, file)
            if sizes != tensor.shape and offsets:  # two numbers in a byte: offsets count numbers, sizes bytes
                offsets = (*offsets[:-1], offsets[-1] // 2)
            shape, known = (given, True) if given is not None else (tuple(o + n for o, n in zip(offsets, sizes, strict=True)), False)
        extent = Extent(file=file, begin=tensor.begin, end=tensor.end, offsets=offsets, sizes=sizes)
        found.append((TensorEntry(name=key, dtype=dtype, shape=shape, extents=(extent,)), known))
    return found


def _dtype(key: str, tensor: HeaderTensor, file: str) -> tuple[str, tuple[int, ...]]:
    known = SAFETENSORS_NAMES.get(tensor.dtype)
    if known is not None:
        return known.name, tensor.shape
    if tensor.dtype == "F8_E8M0":
        return "float8_e8m0fnu", tensor.shape
    if tensor.dtype == "F4" and tensor.shape and tensor.shape[-1] % 2 == 0:  # torch packs two numbers in a byte
        return "float4_e2m1fn_x2", (*tensor.shape[:-1], tensor.shape[-1] // 2)
    raise FormatError(
        f"{file}: tensor {key[:200]!r} has dtype {tensor.dtype}, which no torch dtype stores", hint="convert the file first", tensor=key
    )


def _place(info: Any, sizes: tuple[int, ...], key: str, file: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Offsets, and the global shape where it is given (pytorch#189945 proposes ``global_shape``)."""
    offsets: Any = info.get("saved_offsets") if isinstance(info, dict) else None
    shape: Any = info.get("global_shape") if isinstance(info, dict) else None
    if not _are_sizes(offsets, sizes) or (shape is not None and not _are_sizes(shape, sizes)):
        raise FormatError(f"{file}: {_SHARDING} says nothing sensible of tensor {key[:200]!r}", hint="the file is damaged", tensor=key)
    return tuple(offsets), None if shape is None else tuple(shape)


def _are_sizes(value: Any, like: tuple[int, ...]) -> bool:
    return isinstance(value, list) and len(value) == len(like) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
