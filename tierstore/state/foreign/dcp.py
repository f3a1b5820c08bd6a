"""A directory of torch.distributed.checkpoint: its ``.metadata`` as an index of ours, its objects as a tree of ours."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from tierstore.errors import FormatError, IncompleteError
from tierstore.format.dcp_metadata import MAX_METADATA_NBYTES, DcpItem, DcpMetadata, parse_dcp_metadata
from tierstore.format.dtypes import DTYPES
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.objects import TensorRef
from tierstore.state.foreign.files import ForeignFiles
from tierstore.state.foreign.places import ItemPlace, Wherever, Window, member_bytes, open_archive
from tierstore.state.foreign.torch import plain_values
from tierstore.tiers.together import together

__all__ = ["METADATA", "dcp_entries", "dcp_tree", "read_dcp"]

METADATA = ".metadata"

_AT_ONCE = 16
_TAIL_NBYTES = 4096


async def read_dcp(files: ForeignFiles) -> DcpMetadata:
    """Reads and checks the metadata; every file that it names is there, and long enough.

    Raises:
        FormatError: Not DCP's own metadata; an item is compressed.
        IncompleteError: A file is missing or too short; names it and the tensor.
    """
    if METADATA not in files.infos:
        found = sorted(name for name in files.infos if name.endswith(METADATA) or name.startswith(METADATA))
        if not found:
            raise FormatError(f"{files.uri} has no {METADATA}: it is no checkpoint of DCP's", hint="name the folder that has one")
        raise IncompleteError(
            f"{files.uri} has no {METADATA}, but {', '.join(found[:4])}: its save did not end, or each rank saved for itself",
            hint="use another checkpoint; those saved with use_collectives=False have no common metadata",
            files=found,
        )
    metadata = await asyncio.to_thread(parse_dcp_metadata, await files.small(METADATA, MAX_METADATA_NBYTES))
    listed = [(name, chunk.item) for name, tensor in metadata.tensors.items() for chunk in tensor.chunks]
    for name, item in [*listed, *metadata.objects.items()]:
        if item.transforms:
            raise FormatError(
                f"{item.file}: {name!r} was compressed by the DCP extension {', '.join(item.transforms)}",
                hint="load it with DCP and the extension, and save it without",
                file=item.file,
            )
        nbytes = await files.nbytes(item.file, METADATA)
        if item.offset + item.nbytes > nbytes:
            raise IncompleteError(
                f"{item.file} has {nbytes:,} bytes; {METADATA} places {name!r} at {item.offset:,} to {item.offset + item.nbytes:,}",
                hint="the file was cut off, or is from another save: copy it again",
                tensor=name,
                file=item.file,
            )
    await _check_claims(files, metadata)
    return metadata


async def _check_claims(files: ForeignFiles, metadata: DcpMetadata) -> None:
    """No file is said to hold more than it has: chunks are stored as they are, and what a lie would allocate is refused before."""
    claimed: dict[str, int] = {}
    counted: set[DcpItem] = set()
    for name, tensor in metadata.tensors.items():
        for chunk in tensor.chunks:
            file = chunk.item.file
            if chunk.item not in counted:
                counted.add(chunk.item)
                claimed[file] = claimed.get(file, 0) + _nbytes(tensor.dtype, chunk.sizes)
            if claimed[file] > (nbytes := await files.nbytes(file)):
                raise IncompleteError(
                    f"{file} has {nbytes:,} bytes; {METADATA} claims {claimed[file]:,} bytes of tensors in it, up to {name[:200]!r}",
                    hint="the file is from another save, or one of the two is damaged: copy the checkpoint again",
                    tensor=name,
                    file=file,
                )


def _nbytes(dtype: str, sizes: tuple[int, ...]) -> int:
    return DTYPES[dtype].itemsize * math.prod(sizes)


def dcp_entries(metadata: DcpMetadata) -> tuple[list[TensorEntry], dict[str, Wherever], dict[str, int]]:
    """The tensors, where their chunks are to be found, and the length in bytes of each such chunk."""
    entries: list[TensorEntry] = []
    places: dict[str, Wherever] = {}
    sizes: dict[str, int] = {}
    for name, tensor in metadata.tensors.items():
        extents = []
        for chunk in tensor.chunks:
            nbytes = _nbytes(tensor.dtype, chunk.sizes)
            stored = f"{chunk.item.file}@{len(places)}"
            places[stored] = ItemPlace(name=name, dtype=tensor.dtype, sizes=chunk.sizes, item=chunk.item)
            sizes[stored] = nbytes
            extents.append(Extent(file=stored, begin=0, end=nbytes, offsets=chunk.offsets, sizes=chunk.sizes))
        entries.append(TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, extents=tuple(extents)))
    return entries, places, sizes


async def dcp_tree(files: ForeignFiles, metadata: DcpMetadata) -> tuple[Any, list[tuple[str, str]]]:
    """The tree: nested as the planner flattened it, else flat by name. Reads the objects' streams, and runs nothing of them.

    Returns:
        The tree, and what can't be stored: (place, class).

    Raises:
        FormatError: An object's stream is damaged.
    """
    refused: list[tuple[str, str]] = []

    async def one(pair: tuple[str, DcpItem]) -> Any:
        name, item = pair
        window = Window(files=files, file=item.file, begin=item.offset, nbytes=item.nbytes)
        archive = await open_archive(window, _TAIL_NBYTES)
        data = await member_bytes(window, archive.member("data.pkl"))
        before = len(refused)
        value = await asyncio.to_thread(plain_values, data, f"{item.file} at {item.offset}", metadata.paths.get(name, (name,)), refused)
        return _Left if len(refused) > before and value is None else value

    pairs = list(metadata.objects.items())
    values: dict[str, Any] = dict(zip(metadata.objects, await together(one, pairs, at_once=_AT_ONCE), strict=True))
    leaves = {name: TensorRef(name) if name in metadata.tensors else values[name] for name in (*metadata.tensors, *values)}
    leaves = {name: value for name, value in leaves.items() if value is not _Left}
    return (_nested(leaves, metadata.paths) if metadata.paths else leaves), refused


class _Left:
    """Stands for an object that is left out."""


def _nested(leaves: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> Any:
    """A tree of dicts; a dict whose keys are positions becomes a list."""
    root: dict[str | int, Any] = {}
    for name, value in leaves.items():
        node = root
        for key in paths[name][:-1]:
            inner = node.setdefault(key, _Node())
            if not isinstance(inner, _Node):
                return dict(leaves)  # a name is both a leaf and a folder of others: only flat names tell them apart
            node = inner.items
        if paths[name][-1] in node:
            return dict(leaves)
        node[paths[name][-1]] = value
    return _plain(root)


class _Node:
    """An inner place, so that a stored dict is not taken for one."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: dict[str | int, Any] = {}


def _plain(items: Mapping[str | int, Any]) -> Any:
    values = {key: _plain(value.items) if isinstance(value, _Node) else value for key, value in items.items()}
    positions = [key for key in values if isinstance(key, int)]
    if len(positions) != len(values) or not values or min(positions) < 0 or max(positions) >= 1_000_000:
        return {key if isinstance(key, str) else str(key): value for key, value in values.items()}
    return [values.get(i) for i in range(max(positions) + 1)]
