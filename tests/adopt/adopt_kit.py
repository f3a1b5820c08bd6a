"""What the tests of foreign checkpoints share: every dtype, states with all the awkward things, and the foreign writers themselves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter

from tierstore.format.dtypes import DTYPES
from tierstore.state.bits import as_bits

INDEX = "model.safetensors.index.json"


def any_dtype(name: str, rows: int = 3) -> torch.Tensor:
    """`rows` × 4 values of a dtype: every bit pattern is as good as another, but bools are 0 or 1."""
    dtype = getattr(torch, name)
    count = rows * 4 * dtype.itemsize
    raw = (torch.arange(count) * 37 + 5).to(torch.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype).reshape(rows, 4)


def every_dtype(*, safetensors: bool) -> dict[str, torch.Tensor]:
    """One tensor of each dtype; `safetensors`: of those that safetensors' own writer takes."""
    beyond = ("complex32", "complex128")
    return {f"t.{name}": any_dtype(name) for name in DTYPES if not (safetensors and name in beyond)}


def blank_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the same dtype and shape, made of bytes: torch warns of its own half complex numbers."""
    return torch.zeros(tensor.numel() * tensor.dtype.itemsize, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def assert_bits(found: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bits, in any order."""
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        got = found[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bits(got.contiguous()), as_bits(tensor.detach().contiguous())), name


def hugging_face(folder: Path, parts: list[dict[str, torch.Tensor]]) -> Path:
    """A repository as `save_pretrained` leaves it: shards, index, config; one part: a single file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "test", "torch_dtype": "float32"}')
    if len(parts) == 1:
        save_file(parts[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def save_dcp(state: dict[str, Any], folder: Path, **writer: Any) -> Path:
    """Stock DCP's file system writer, in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(folder, **writer), no_dist=True)
    return folder


def quietly(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls torch's own code, whose warnings are none of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work(*args, **kwargs)
