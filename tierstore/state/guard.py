"""What can't be stored is refused by name and place, before anything is written."""

from __future__ import annotations

import torch

from tierstore.errors import UnsupportedTypeError
from tierstore.format.dtypes import DTYPES
from tierstore.state.bits import dtype_name

__all__ = ["check_storable", "is_plain"]

_KINDS = (torch.Tensor, torch.nn.Parameter)
_DTYPES = frozenset(dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype))
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def check_storable(tensor: torch.Tensor, shown: object) -> None:
    """Raises UnsupportedTypeError, with the remedy, where the bytes of `tensor` would not be all of it. `shown`: its place."""
    if is_plain(tensor):
        return
    kind = type(tensor)
    if kind.__name__ in ("FakeTensor", "FunctionalTensor"):
        raise UnsupportedTypeError(f"{shown} is a {kind.__name__}: it has no values", hint="save real tensors, outside of tracing")
    if kind.__name__.startswith("Uninitialized"):
        raise UnsupportedTypeError(f"{shown} is an {kind.__name__}: it has no shape yet", hint="run one forward pass before saving")
    if tensor.is_nested:
        raise UnsupportedTypeError(
            f"{shown} is a nested tensor", hint="store its parts: list(tensor.unbind()), or tensor.to_padded_tensor(0)"
        )
    if kind not in _KINDS:
        raise UnsupportedTypeError(
            f"{shown} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass whose inner parts are not known",
            hint=f"store its plain tensors, or register a codec: codecs.register({kind.__name__}, tag, encode, decode)",
        )
    if tensor.is_quantized:
        raise UnsupportedTypeError(
            f"{shown} is a quantised tensor ({dtype_name(tensor.dtype)})",
            hint="store tensor.int_repr() with its scale and zero point, or tensor.dequantize()",
        )
    if tensor.is_meta:
        raise UnsupportedTypeError(
            f"{shown} is on the meta device: it has no values",
            hint="materialise the module first: module.to_empty(device=...) and initialise it",
        )
    if tensor.layout not in _LAYOUTS:
        raise UnsupportedTypeError(f"{shown} has the layout {tensor.layout}", hint="store tensor.to_dense()")
    name = dtype_name(tensor.dtype)
    if name not in DTYPES:
        raise UnsupportedTypeError(f"{shown} has the dtype {name}, which has no portable layout", hint="store tensor.view(torch.uint8)")
    if tensor.layout is torch.strided and (count := tensor.numel()):
        if tensor.is_contiguous():
            last = tensor.storage_offset() + count - 1
        else:
            last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if (last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise UnsupportedTypeError(
                f"{shown} has no memory: its storage was freed or shrunk to {tensor.untyped_storage().nbytes()} bytes",
                hint="gather (unshard) it before saving",
            )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is what nearly all tensors are, told by few questions: dense, on the CPU, contiguous, and all of its memory there."""
    return (
        type(tensor) in _KINDS
        and tensor.is_cpu
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and tensor.storage_offset() * tensor.itemsize + tensor.nbytes <= tensor.untyped_storage().nbytes()
    )
