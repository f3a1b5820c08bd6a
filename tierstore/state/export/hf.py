"""A Hugging Face directory: safetensors files of bounded size and their index, as `save_pretrained` writes them."""

from __future__ import annotations

import bisect
import json
import logging
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tierstore.errors import UnsupportedTypeError
from tierstore.format.dtypes import DTYPES
from tierstore.format.header import encode_header
from tierstore.state.bits import tensor_over, torch_dtype
from tierstore.state.export.plan import ExportOptions, OutTensor, Plan, flat_fills
from tierstore.state.export.source import WindowSource
from tierstore.state.export.target import ExportTarget
from tierstore.state.reading import Fill, Reader, Run, fill_all

__all__ = ["SafetensorsFile", "plan_files", "write_hf"]

log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"

_ALIGNMENT = 64
_BYTES_ONLY = {"float8_e8m0fnu": "U8", "float4_e2m1fn_x2": "U8"}
"""safetensors' readers raise KeyError on its names for these (F8_E8M0, F4): they go as bytes, as published models have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """The layout of one file: its header, and where each tensor begins (absolute, in bytes)."""

    name: str
    header: bytes
    tensors: tuple[OutTensor, ...]
    begins: tuple[int, ...]
    nbytes: int


def plan_files(tensors: Sequence[OutTensor], shard_nbytes: int) -> list[SafetensorsFile]:
    """Spreads tensors over files in their order; a file is longer than `shard_nbytes` only if it is one tensor.

    Raises:
        UnsupportedTypeError: A tensor has a dtype that safetensors has no name for.
    """
    groups: list[list[OutTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if groups[-1] and used + tensor.nbytes > shard_nbytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.nbytes
    count = len(groups)
    names = ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [_layout(name, group) for name, group in zip(names, groups, strict=True)]


def _layout(name: str, tensors: Sequence[OutTensor]) -> SafetensorsFile:
    ordered = sorted(tensors, key=lambda t: -DTYPES[t.dtype].itemsize)  # stable: so each begins at a multiple of its item size
    header = encode_header([(t.name, _stored_name(t), t.shape, t.nbytes) for t in ordered], {"format": "pt"}, _ALIGNMENT)
    begins, at = [], len(header)
    for tensor in ordered:
        begins.append(at)
        at += tensor.nbytes
    return SafetensorsFile(name=name, header=header, tensors=tuple(ordered), begins=tuple(begins), nbytes=at)


def _stored_name(tensor: OutTensor) -> str:
    found = DTYPES[tensor.dtype].safetensors or _BYTES_ONLY.get(tensor.dtype)
    if found is None:
        raise UnsupportedTypeError(
            f"tensor {tensor.name!r} is {tensor.dtype}, which safetensors has no name for",
            hint=f"leave it out (--exclude '{tensor.name}'), or export with --format dcp or torch",
            tensor=tensor.name,
        )
    return found


def write_hf(
    target: ExportTarget,
    reader: Reader,
    run: Run,
    plan: Plan,
    options: ExportOptions,
    extra: Sequence[tuple[str, bytes]],
    on_bytes: Callable[[int], None],
) -> None:
    """Writes the files, then what comes with them, then what makes it whole.

    Args:
        target: Where to.
        reader: The open checkpoint.
        run: Runs a coroutine on its event loop.
        plan: What to write.
        options: See `ExportOptions`.
        extra: Name and content of the files that come with it.
        on_bytes: Told how many bytes more are made.
    """
    files = plan_files(plan.tensors, options.shard_nbytes)
    if raw := [t.name for t in plan.tensors if t.dtype in _BYTES_ONLY]:
        log.warning(
            "export=%s %d tensors go as U8, byte by byte, as safetensors' readers don't know their dtype: %s", target.uri, len(raw), raw[0]
        )
    target.begin()
    if len(files) == 1:
        _put_extra(target, extra)
        target.drop_stale()
        _write(target, files[0], reader, run, options, on_bytes)
        return
    for file in files:
        _write(target, file, reader, run, options, on_bytes)
    _put_extra(target, extra)
    target.drop_stale()
    target.put(INDEX_NAME, _index_document(files))


def _put_extra(target: ExportTarget, extra: Sequence[tuple[str, bytes]]) -> None:
    for name, data in extra:
        target.put(name, data)


def _index_document(files: Sequence[SafetensorsFile]) -> bytes:
    tensors = [(tensor, file.name) for file in files for tensor in file.tensors]
    body = {
        "metadata": {
            "total_parameters": sum(math.prod(t.shape) for t, _ in tensors),
            "total_size": sum(t.nbytes for t, _ in tensors),
        },
        "weight_map": {t.name: name for t, name in sorted(tensors, key=lambda pair: pair[0].name)},
    }
    return (json.dumps(body, ensure_ascii=False, indent=2) + "\n").encode("utf-8")


def _write(
    target: ExportTarget, file: SafetensorsFile, reader: Reader, run: Run, options: ExportOptions, on_bytes: Callable[[int], None]
) -> None:
    overflowed: dict[str, int] = {}
    maker = _Maker(file, reader, run, overflowed)
    cuts = [*range(0, file.nbytes, options.window_nbytes), file.nbytes]
    target.write(file.name, WindowSource(cuts, maker.make, on_bytes), len(file.tensors))
    for name, count in overflowed.items():
        log.warning("export=%s tensor=%s %d values are infinite in float16: bfloat16 has the range", target.uri, name, count)


class _Maker:
    """Makes byte ranges of a file."""

    def __init__(self, file: SafetensorsFile, reader: Reader, run: Run, overflowed: dict[str, int]) -> None:
        self._file = file
        self._reader = reader
        self._run = run
        self._overflowed = overflowed

    def make(self, begin: int, end: int) -> memoryview:
        window = memoryview(mmap.mmap(-1, end - begin))  # page-aligned, which O_DIRECT can use
        header = self._file.header[begin:end]
        window[: len(header)] = header
        fills: list[Fill] = []
        narrowed: list[tuple[str, torch.Tensor]] = []
        first = max(0, bisect.bisect_right(self._file.begins, begin) - 1)
        for tensor, at in zip(self._file.tensors[first:], self._file.begins[first:], strict=True):
            if at >= end:
                break
            start, stop = max(begin, at), min(end, at + tensor.nbytes)
            if start >= stop:
                continue
            # Windows begin at multiples of 1 MiB and tensors at multiples of their item size, so whole elements lie in a window.
            itemsize = DTYPES[tensor.dtype].itemsize
            part = tensor_over(window[start - begin : stop - begin], torch_dtype(tensor.dtype), ((stop - start) // itemsize,))
            fills.extend(flat_fills(self._reader, tensor, (start - at) // itemsize, part))
            if tensor.dtype == "float16" != tensor.view.dtype:
                narrowed.append((tensor.name, part))
        fill_all(self._reader, self._run, fills)
        for name, part in narrowed:
            if count := int(torch.isinf(part).sum()):
                self._overflowed[name] = self._overflowed.get(name, 0) + count
        return window
