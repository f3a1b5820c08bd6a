"""The files beside a model's tensors (configuration, tokenizer …): carried with a checkpoint as bytes, never looked into.

An adopted checkpoint keeps them in a shard of their own; `tierstore.format.companions` says where.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierstore.errors import FormatError
from tierstore.format.companions import FACT, Companion, companions_in, holds_weights
from tierstore.format.shard import ChunkSpec, ShardPlan, plan_shard
from tierstore.state.foreign.reader import ForeignReader
from tierstore.state.reading import Reader, Run
from tierstore.storage.contract import FileInfo
from tierstore.tiers.reads import Want

__all__ = ["FACT", "Companion", "companions_of", "pick_companions", "plan_companions", "read_companion"]

_MAX_FILE_NBYTES = 64 << 20
_MAX_ALL_NBYTES = 256 << 20


def pick_companions(infos: Mapping[str, FileInfo]) -> tuple[list[str], list[str]]:
    """Which files go along, and which do not though they hold no tensors, being too large."""
    taken: list[str] = []
    left: list[str] = []
    total = 0
    for name, info in sorted(infos.items()):
        if holds_weights(name) or info.nbytes == 0:
            continue
        fits = info.nbytes <= _MAX_FILE_NBYTES and total + info.nbytes <= _MAX_ALL_NBYTES
        (taken if fits else left).append(name)
        total += info.nbytes if fits else 0
    return taken, left


def plan_companions(sizes: Mapping[str, int]) -> ShardPlan:
    """A shard that holds files as rows of bytes; their names are its keys."""
    return plan_shard(
        [ChunkSpec(name=name, dtype="uint8", shape=(nbytes,), global_shape=(nbytes,), offsets=(0,)) for name, nbytes in sizes.items()]
    )


def companions_of(reader: Reader) -> dict[str, Companion]:
    """The files that a checkpoint carries, by name: an adopted one, or a foreign one opened in place.

    Raises:
        FormatError: The manifest's word on them is malformed.
    """
    if isinstance(reader, ForeignReader):
        infos = reader.files.beside
        taken, _ = pick_companions(infos)
        return {name: Companion(name=name, file=name, begin=0, nbytes=infos[name].nbytes) for name in taken}
    manifest = getattr(reader, "manifest", None)
    return companions_in(manifest.facts) if manifest is not None else {}


def read_companion(reader: Reader, run: Run, companion: Companion) -> bytes:
    """The file's bytes; proved, where the checkpoint has digests.

    Raises:
        FormatError: It claims an absurd length.
        IntegrityError: There are no good bytes.
    """
    if not 0 <= companion.nbytes <= _MAX_FILE_NBYTES:
        raise FormatError(f"{companion.name} claims {companion.nbytes:,} bytes", hint="run `tierstore verify`", file=companion.name)
    buffer = memoryview(bytearray(companion.nbytes))
    run(reader.read([Want(companion.file, companion.begin, buffer)]))
    return bytes(buffer)
