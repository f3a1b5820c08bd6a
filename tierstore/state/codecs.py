"""Codecs for what training states hold beside tensors and plain values: torch's own small types and random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from tierstore.format.objects import ObjectCodecs
from tierstore.state.bits import dtype_name, torch_dtype

__all__ = ["default_codecs"]

_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def default_codecs() -> ObjectCodecs:
    """A new registry with torch's dtype, device, Size, layout, memory format, version and Generator, and Python's and numpy's generators.

    Callers register their own types on it: ``codecs.register(Config, "mylib.Config", encode=asdict, decode=lambda v: Config(**v))``.
    """
    codecs = ObjectCodecs()
    codecs.register(torch.dtype, "torch.dtype", dtype_name, torch_dtype)
    codecs.register(torch.device, "torch.device", str, torch.device)
    codecs.register(torch.Size, "torch.Size", list, torch.Size)
    codecs.register(torch.layout, "torch.layout", str, lambda text: {str(v): v for v in _LAYOUTS}[text])
    codecs.register(torch.memory_format, "torch.memory_format", str, lambda text: {str(v): v for v in _MEMORY_FORMATS}[text])
    codecs.register(TorchVersion, "torch.TorchVersion", str, TorchVersion)
    codecs.register(torch.Generator, "torch.Generator", _encode_torch, _decode_torch)
    codecs.register(random.Random, "random.Random", random.Random.getstate, _decode_python)
    codecs.register(np.random.Generator, "numpy.random.Generator", lambda g: g.bit_generator.state, _decode_numpy)
    codecs.register(np.random.RandomState, "numpy.random.RandomState", lambda g: g.get_state(legacy=False), _decode_legacy)
    return codecs


def _encode_torch(generator: torch.Generator) -> dict[str, Any]:
    return {"device": str(generator.device), "state": generator.get_state().numpy().tobytes()}


def _decode_torch(value: dict[str, Any]) -> torch.Generator:
    generator = torch.Generator(device=value["device"])
    generator.set_state(torch.frombuffer(bytearray(value["state"]), dtype=torch.uint8))
    return generator


def _decode_python(state: tuple[Any, ...]) -> random.Random:
    generator = random.Random()
    generator.setstate(state)
    return generator


def _decode_numpy(state: dict[str, Any]) -> np.random.Generator:
    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:  # a name from outside picks from this list and nothing else
        raise ValueError(f"unknown bit generator {name!r}")
    bits = getattr(np.random, name)()
    bits.state = state
    return np.random.Generator(bits)


def _decode_legacy(state: dict[str, Any]) -> np.random.RandomState:
    generator = np.random.RandomState()
    generator.set_state(state)
    return generator
