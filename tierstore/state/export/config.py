"""The files that come with a model's tensors: configuration, tokenizer and the like, taken from a directory or URI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from tierstore.errors import NotFoundError, UsageError
from tierstore.state.reading import Run
from tierstore.storage.contract import Storage
from tierstore.units import format_size

__all__ = ["companion_files", "with_dtype"]

_WEIGHTS = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf"),
    *("*.distcp", ".metadata", "*.ot", "*.tflite", "*.pkl", "*.npz"),
)
_MAX_NBYTES = 256 << 20


def companion_files(storage: Storage, run: Run) -> list[tuple[str, bytes]]:
    """Every file of `storage` that holds no tensors, and is not hidden, by name.

    Raises:
        NotFoundError: There is none.
        UsageError: One is larger than 256 MiB.
    """
    found = []
    for file in sorted(run(storage.list("")), key=lambda f: f.path):
        path = PurePosixPath(file.path)
        if any(part.startswith(".") for part in path.parts) or any(fnmatchcase(path.name, pattern) for pattern in _WEIGHTS):
            continue
        if file.nbytes > _MAX_NBYTES:
            raise UsageError(
                f"{storage.uri}/{file.path} has {format_size(file.nbytes)}: that is no configuration",
                hint="put config.json and the tokenizer's files into a directory of their own",
            )
        found.append((file.path, run(storage.read(file.path, 0, file.nbytes))))
    if not found:
        raise NotFoundError(f"{storage.uri} has no configuration files", hint="give the directory that holds config.json")
    return found


def with_dtype(files: list[tuple[str, bytes]], dtype: str) -> list[tuple[str, bytes]]:
    """The files with config.json's ``dtype`` (older: ``torch_dtype``) saying what the tensors were cast to."""
    return [(name, _config_with(data, dtype) if name == "config.json" else data) for name, data in files]


def _config_with(data: bytes, dtype: str) -> bytes:
    try:
        body = json.loads(data)
    except ValueError:
        return data  # not ours to judge: it goes along as it is
    changed = _changed(body, dtype)
    return data if changed == body else (json.dumps(changed, ensure_ascii=False, indent=2) + "\n").encode("utf-8")


def _changed(value: Any, dtype: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        key: dtype if _names_dtype(key, inner) else inner if key == "quantization_config" else _changed(inner, dtype)
        for key, inner in value.items()
    }


def _names_dtype(key: str, value: Any) -> bool:
    return key in ("dtype", "torch_dtype") and isinstance(value, str)
