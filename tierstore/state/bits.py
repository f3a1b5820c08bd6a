"""Tensors as plain bits: dtype names, integer views for bit-exact copies, and bytes of a tensor's own memory.

Copies go between integer views of equal item size, because `copy_` of the dtype itself may be missing (float4), normalise NaNs or
cast; an integer copy moves every bit pattern as it is.
"""

from __future__ import annotations

import numpy as np
import torch

from tierstore.errors import FormatError, UsageError
from tierstore.units import format_size

__all__ = ["as_bits", "dtype_name", "empty", "memory_of", "tensor_over", "torch_dtype"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NATIVE = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
"""What numpy's memory can be cast to bytes from."""


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name, torch's without its prefix: ``bfloat16``, ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a canonical name.

    Raises:
        FormatError: This torch has no dtype of that name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype {name!r}", hint="load with a newer torch")
    return found


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """An integer view of a dense tensor with neither conjugate nor negative bit: same memory, same strides, same bits.

    The shape is the tensor's own, with a trailing axis of two for complex128 (there is no 16-byte integer).
    """
    tensor = tensor.detach()
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor's own memory, writable, without a copy; empty for a tensor without elements."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.dtype in _NATIVE:  # each step of torch's is half a microsecond, and states have tens of thousands of tensors
        return (tensor.detach() if tensor.requires_grad else tensor).numpy().data.cast("B")
    return as_bits(tensor).numpy().data.cast("B")


def tensor_over(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of `dtype` and `shape` over writable bytes, which it keeps alive; they begin on a multiple of the item size."""
    if 0 in shape:
        return empty(shape, dtype)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(dtype).view(shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory on the CPU, whatever default device or dtype the caller has set.

    Made as bytes and viewed: for complex32 and other dtypes that torch calls experimental it warns on creation.

    Raises:
        UsageError: The host does not have so much memory.
    """
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    try:
        raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # so torch reports a failed allocation on the CPU
        raise UsageError(
            f"no memory for a tensor of {format_size(nbytes)} and shape {list(shape)}",
            hint="read slices of it: open_checkpoint(...)[name][begin:end]; if the size is absurd, run `tierstore verify --level full`",
        ) from error
    return raw.view(dtype).view(shape)
