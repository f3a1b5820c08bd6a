"""Opening foreign checkpoints in place: Hugging Face and plain safetensors, DCP directories, files of ``torch.save``; local or remote."""

from __future__ import annotations

import asyncio
import logging
import operator
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tierstore.errors import FormatError, IncompleteError, UsageError
from tierstore.format.digest import DIGEST_NBYTES, block_count
from tierstore.format.index import FileEntry, Index, TensorEntry, build_index, check_coverage
from tierstore.format.objects import ObjectCodecs, TensorRef
from tierstore.state.foreign.dcp import METADATA, dcp_entries, dcp_tree, read_dcp
from tierstore.state.foreign.files import ForeignFiles, find_files
from tierstore.state.foreign.paddle import is_unified, read_unified
from tierstore.state.foreign.places import Wherever
from tierstore.state.foreign.reader import ForeignReader
from tierstore.state.foreign.safetensors import INDEX_SUFFIX, choose_files, merge_headers, read_headers, read_weight_map
from tierstore.state.foreign.torch import read_saved, refuse
from tierstore.state.lazy import Checkpoint
from tierstore.storage.loop import EventLoop

__all__ = ["Foreign", "Format", "look_at", "open_foreign"]

log = logging.getLogger(__name__)

Format = Literal["auto", "safetensors", "paddle", "dcp", "torch"]

_BLOCK_NBYTES = 1 << 20
_MAX_BLOCKS = 1 << 20
"""An index has room for a digest of each block: of a file that claims to be absurdly long, blocks are longer."""

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_NOT_OURS = "it is damaged, or no checkpoint: copy or download it again, and compare checksums with the source's"
_BIN_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A foreign checkpoint, looked at: its headers were read, its tensors were not.

    Attributes:
        format: What it is.
        files: Its files.
        index: Names, shapes and places of its tensors; coverage is proved. Its digests are zeros.
        entries: The same as a list.
        places: Where the bytes of those files of the index lie that are not files of their own.
        shards: Safetensors files that hold all of its tensors as they are; empty where there are none such.
        tree: Makes the tree of the state; reads objects if there are any.
    """

    format: str
    files: ForeignFiles
    index: Index
    entries: tuple[TensorEntry, ...]
    places: Mapping[str, Wherever]
    shards: tuple[str, ...]
    tree: Callable[[], Awaitable[Any]]

    def reader(self) -> ForeignReader:
        """Reads its tensors in place."""
        return ForeignReader(files=self.files, index=self.index, places=self.places, tree=self.tree)

    async def close(self) -> None:
        """Ends the storage's clients."""
        await self.files.storage.close()


def open_foreign(
    uri: Any,
    *,
    options: Mapping[str, Any] | None = None,
    format: Format = "auto",
    shapes: Mapping[str, Any] | None = None,
    skip_objects: bool = False,
    codecs: ObjectCodecs | None = None,
) -> Checkpoint:
    """Opens a checkpoint that tierstore did not write, where it lies; nothing is copied, and slices are read by ranges.

    Its bytes are **not verified**: foreign formats have no digests. Nothing of it is executed or unpickled by Python's pickle.

    Args:
        uri: A folder or a file, as a path or any URI that a tier may have. A Hugging Face folder (one file, or
            ``model.safetensors.index.json`` with its shards), a folder of stock DCP's (``.metadata``, or the shards of its
            `HuggingFaceStorageWriter`), a folder of PaddleNLP's Unified Checkpoint, a ``torch.save`` file, or safetensors files.
        options: What the storage takes, as in a tier's configuration.
        format: ``safetensors``, ``paddle``, ``dcp`` or ``torch``, where what is there leaves a choice.
        shapes: Tensor name → shape, or the tensors themselves (``model.state_dict()``), which the checkpoint has to have. Sharded
            safetensors of stock DCP don't say how large their tensors are: without this, a lost last shard can't be told from a
            smaller tensor.
        skip_objects: Leave out what is not a tensor and can't be read without running foreign code, instead of refusing.
        codecs: Codecs for further types of the target state.

    Returns:
        The checkpoint: names, lazy tensors, `load`. Close it, or use it in a ``with`` statement.

    Raises:
        NotFoundError: There is nothing.
        FormatError: It is none of these, is damaged, or names classes beside the known ones.
        IncompleteError: Files, shards or tensors are missing, or some are from another save; names tensor and file.
        UnsupportedTypeError: It holds objects of foreign classes; names their places.
    """
    loop = EventLoop("tierstore-foreign")
    try:
        foreign = loop.run(look_at(uri, options, format=format, shapes=shapes, skip_objects=skip_objects))
    except BaseException:
        loop.close()
        raise
    reader = foreign.reader()
    finish = weakref.finalize(reader, loop.close)

    def close() -> None:
        if finish.alive:
            try:
                loop.run(reader.close())
            finally:
                finish()

    return Checkpoint(reader, loop.run, codecs=codecs, note=f"{foreign.format} in {foreign.files.uri}, not verified", on_close=close)


async def look_at(
    uri: Any,
    options: Mapping[str, Any] | None = None,
    *,
    format: Format = "auto",
    shapes: Mapping[str, Any] | None = None,
    skip_objects: bool = False,
) -> Foreign:
    """Finds out what is there, and reads its headers; see `open_foreign`."""
    if format not in ("auto", "safetensors", "paddle", "dcp", "torch"):
        raise UsageError(f"format is {format!r}", hint="say 'auto', 'safetensors', 'paddle', 'dcp' or 'torch'")
    files = await find_files(uri, options)
    try:
        kind = await _kind(files) if format == "auto" else format
        if kind == "dcp":
            found = await _dcp(files, skip=skip_objects)
        elif kind == "torch":
            found = await _torch(files, skip=skip_objects)
        elif kind == "paddle":
            found = await _paddle(files)
        else:
            found = await _safetensors(files, proven=shapes is not None)
        if shapes is not None:
            _compare(found, shapes)
        return found
    except BaseException as error:
        await files.storage.close()
        if isinstance(error, FormatError):
            raise _placed(error, files.uri) from error
        raise


def _placed(error: FormatError, uri: str) -> FormatError:
    """The same error, which says where the file is; the hint of our own formats, which `tierstore verify` can check, is not for these."""
    message = error.message if uri in error.message else f"{uri}: {error.message}"
    hint = _NOT_OURS if "tierstore verify" in error.hint else error.hint
    return type(error)(message, hint=hint, **error.context)


async def _kind(files: ForeignFiles) -> str:
    """What is there, by the names of the files; several possible answers are settled in this order. One file is looked at if need be."""
    names = [files.only] if files.only else list(files.infos)
    if files.only.endswith(".distcp") or files.only.startswith(METADATA):
        raise UsageError(f"{files.uri} is one file of a DCP directory", hint="name the directory")
    if any(name.startswith(METADATA) or name.endswith(METADATA) for name in names):
        return "dcp"
    if is_unified(files):
        return "paddle"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    if any(name.endswith((*_TORCH_SUFFIXES, ".bin.index.json")) for name in names):
        return "torch"
    if files.only:
        return "torch" if await files.read(files.only, 0, min(4, await files.nbytes(files.only))) == b"PK\x03\x04" else "safetensors"
    raise UsageError(
        f"{files.uri} holds no checkpoint that is known here: {', '.join(sorted(names)[:6])}",
        hint="known are safetensors, DCP directories (.metadata) and torch.save files (.pt, .pth, .bin, .ckpt)",
    )


async def _safetensors(files: ForeignFiles, *, proven: bool) -> Foreign:
    chosen, weight_map, index = await choose_files(files)
    if not chosen:
        several = sorted(name for name in files.infos if name.endswith(INDEX_SUFFIX))
        found = f" of its own, but several index files: {', '.join(several[:6])}" if several else ""
        raise UsageError(f"{files.uri} holds no safetensors file{found}", hint="name the folder, or the file itself")
    headers = await read_headers(files, chosen)
    entries = await asyncio.to_thread(merge_headers, files, headers, weight_map, index, proven=proven)
    sizes = {name: await files.nbytes(name) for name in chosen}
    tree = {entry.name: TensorRef(entry.name) for entry in entries}

    async def flat() -> Any:
        return tree

    return await _foreign("safetensors", files, entries, {}, sizes, chosen, flat)


async def _paddle(files: ForeignFiles) -> Foreign:
    if not is_unified(files):
        raise UsageError(
            f"{files.uri} holds no Unified Checkpoint of PaddleNLP", hint="name the folder with optimizer.safetensors.index.json"
        )
    found = await read_unified(files)

    async def nested() -> Any:
        return found.tree

    return await _foreign("paddle", files, found.entries, found.places, found.sizes, found.shards, nested)


async def _torch(files: ForeignFiles, *, skip: bool) -> Foreign:
    names = [files.only] if files.only else sorted(n for n in files.infos if n.endswith(_TORCH_SUFFIXES))
    index = _BIN_INDEX if _BIN_INDEX in files.infos and (not files.only or files.only == _BIN_INDEX) else ""
    if index:
        names = sorted(set((await read_weight_map(files, index)).values()))
        for name in names:
            await files.nbytes(name, index)
    elif "pytorch_model.bin" in names:
        names = ["pytorch_model.bin"]
    if not names:
        raise UsageError(f"{files.uri} holds no torch.save file ({', '.join(_TORCH_SUFFIXES)})", hint="name the file that is meant")
    if len(names) != 1 and not index:
        raise UsageError(f"{files.uri} holds several torch.save files: {', '.join(names[:6])}", hint="name the one that is meant")
    states = [await read_saved(files, name) for name in names]
    refuse([item for state in states for item in state.refused], files.uri, skip=skip)
    entries = tuple(entry for state in states for entry in state.entries)
    tree = states[0].tree if len(states) == 1 else _united([state.tree for state in states], names, files)

    async def whole() -> Any:
        return tree

    places = {name: place for state in states for name, place in state.places.items()}
    sizes = {name: nbytes for state in states for name, nbytes in state.sizes.items()}
    return await _foreign("torch", files, entries, places, sizes, (), whole)


def _united(trees: Sequence[Any], names: Sequence[str], files: ForeignFiles) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for tree, name in zip(trees, names, strict=True):
        if not isinstance(tree, dict):
            raise UsageError(f"{name} in {files.uri} is not a dict of tensors", hint="name the one file that is meant", file=name)
        if twice := [key for key in tree if key in made]:
            raise IncompleteError(
                f"{files.uri}: {twice[0]!r} is in two files, one of them {name!r}", hint="remove the stale one", file=name
            )
        made.update(tree)
    return made


async def _dcp(files: ForeignFiles, *, skip: bool) -> Foreign:
    metadata = await read_dcp(files)
    entries, places, sizes = await asyncio.to_thread(dcp_entries, metadata)

    async def nested() -> Any:
        tree, refused = await dcp_tree(files, metadata)
        refuse(refused, files.uri, skip=skip)
        return tree

    return await _foreign("dcp", files, tuple(entries), places, sizes, (), nested)


async def _foreign(
    kind: str,
    files: ForeignFiles,
    entries: tuple[TensorEntry, ...],
    places: Mapping[str, Wherever],
    sizes: Mapping[str, int],
    shards: tuple[str, ...],
    tree: Callable[[], Awaitable[Any]],
) -> Foreign:
    index = await asyncio.to_thread(_indexed, entries, sizes, files)
    return Foreign(format=kind, files=files, index=index, entries=entries, places=places, shards=shards, tree=tree)


def _indexed(entries: Sequence[TensorEntry], sizes: Mapping[str, int], files: ForeignFiles) -> Index:
    block_nbytes = _BLOCK_NBYTES
    while sum(sizes.values()) // block_nbytes > _MAX_BLOCKS:
        block_nbytes *= 2
    listed = [
        FileEntry(name=name, nbytes=nbytes, block_digests=bytes(DIGEST_NBYTES * block_count(nbytes, block_nbytes)))
        for name, nbytes in sizes.items()
    ]
    index = build_index(entries, listed, block_nbytes)
    try:
        check_coverage(index)
    except IncompleteError as error:
        names = sorted({e.file for entry in entries if entry.name == error.context.get("tensor") for e in entry.extents})
        raise IncompleteError(
            f"{files.uri}: {error.message} (files with chunks of it: {', '.join(names[:8])})",
            hint="a shard is missing, or one of another save lies among them: copy what is missing, remove what is stale",
            **{"files": names, **error.context},
        ) from error
    return index


def _compare(found: Foreign, shapes: Mapping[str, Any]) -> None:
    """Proves that the checkpoint has what the caller knows that it should have."""
    if not isinstance(shapes, Mapping):
        raise UsageError(f"shapes is a {type(shapes).__name__}, not a mapping of names", hint="pass shapes=model.state_dict()")
    for name, given in shapes.items():
        dimensions: Any = getattr(given, "shape", given)
        try:
            wanted = tuple(operator.index(n) for n in dimensions)
        except TypeError as error:
            raise UsageError(f"shapes: {name!r} is {given!r}, no shape", hint="pass shapes=model.state_dict(), or tuples") from error
        there = found.index.shape(name) if name in found.index else None
        if there != wanted:
            what = f"has the shape {list(there)}" if there is not None else "is in no file"
            raise IncompleteError(
                f"{found.files.uri}: tensor {name!r} should have the shape {list(wanted)}, but {what}",
                hint="a shard is missing, or it is the checkpoint of another model",
                tensor=name,
            )
