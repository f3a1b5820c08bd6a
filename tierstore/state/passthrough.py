"""The files beside a model's tensors (configuration, tokenizer …): carried with a checkpoint as bytes, never looked into.

An adopted checkpoint keeps them in a shard of their own, named by nothing in the index; the manifest's fact ``passthrough`` says which
bytes of it are which file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tierstore.errors import FormatError
from tierstore.format.shard import ChunkSpec, ShardPlan, plan_shard
from tierstore.names import check_relative
from tierstore.state.foreign_reader import ForeignReader
from tierstore.state.reading import Reader, Run
from tierstore.storage.contract import FileInfo
from tierstore.tiers.reads import Want

__all__ = ["FACT", "Companion", "companions_of", "pick_companions", "plan_companions", "read_companion"]

FACT = "passthrough"
"""The key in the facts of rank 0, and so in the manifest."""

_MAX_FILE_NBYTES = 64 << 20
_MAX_ALL_NBYTES = 256 << 20
_NOT = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf"),
    *("*.distcp", "*.metadata", "*.metadata.tmp", "*.ot", "*.tflite", "*.pkl", "*.npz", "*.npy"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A file beside the tensors: `nbytes` bytes from `begin` of the checkpoint's file `file`."""

    name: str
    file: str
    begin: int
    nbytes: int


def pick_companions(infos: Mapping[str, FileInfo]) -> tuple[list[str], list[str]]:
    """Which files go along, and which do not though they hold no tensors, being too large."""
    taken: list[str] = []
    left: list[str] = []
    total = 0
    for name, info in sorted(infos.items()):
        if _is_weights(name) or info.nbytes == 0:
            continue
        fits = info.nbytes <= _MAX_FILE_NBYTES and total + info.nbytes <= _MAX_ALL_NBYTES
        (taken if fits else left).append(name)
        total += info.nbytes if fits else 0
    return taken, left


def _is_weights(name: str) -> bool:
    """Whether a file is none that goes along: it holds tensors, says where they are, or is hidden."""
    parts = name.split("/")
    return any(part.startswith(".") for part in parts) or any(fnmatchcase(parts[-1], pattern) for pattern in _NOT)


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
    listed: Any = manifest.facts.get(FACT) if manifest is not None else None
    if listed is None:
        return {}
    found = {}
    for name, place in listed.items() if isinstance(listed, Mapping) else [("", None)]:
        if (
            _is_weights(name)
            or not isinstance(place, list)
            or len(place) != 3
            or type(place[0]) is not str
            or any(type(n) is not int for n in place[1:])
        ):
            raise FormatError(f"the manifest's fact {FACT!r} is malformed", hint="run `tierstore verify`")
        found[check_relative(name)] = Companion(name=name, file=place[0], begin=place[1], nbytes=place[2] - place[1])
    return found


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
