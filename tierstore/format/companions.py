"""The files beside a model's tensors (configuration, tokenizer …) that an adopted checkpoint carries: where the manifest says they lie.

They are rows of bytes in a shard of their own, named by nothing in the index; the manifest's fact ``passthrough`` says which bytes of it
are which file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tierstore.errors import FormatError
from tierstore.names import check_relative

__all__ = ["FACT", "Companion", "companions_in", "holds_weights"]

FACT = "passthrough"
"""The key in the facts of rank 0, and so in the manifest."""

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


def holds_weights(name: str) -> bool:
    """Whether a file is none that goes along: it holds tensors, says where they are, or is hidden."""
    parts = name.split("/")
    return any(part.startswith(".") for part in parts) or any(fnmatchcase(parts[-1], pattern) for pattern in _NOT)


def companions_in(facts: Mapping[str, Any]) -> dict[str, Companion]:
    """The files that a checkpoint with these facts in its manifest carries, by name; none where it was not adopted.

    Raises:
        FormatError: The manifest's word on them is malformed.
    """
    listed: Any = facts.get(FACT)
    if listed is None:
        return {}
    found = {}
    for name, place in listed.items() if isinstance(listed, Mapping) else [("", None)]:
        if (
            holds_weights(name)
            or not isinstance(place, list)
            or len(place) != 3
            or type(place[0]) is not str
            or any(type(n) is not int for n in place[1:])
        ):
            raise FormatError(f"the manifest's fact {FACT!r} is malformed", hint="run `tierstore verify`")
        found[check_relative(name)] = Companion(name=name, file=place[0], begin=place[1], nbytes=place[2] - place[1])
    return found
