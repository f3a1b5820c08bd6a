"""Ways that write one file: `torch.save`, safetensors, tensorizer, and the loaders of safetensors files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peers.base import Peer, State, Wait, nothing, touched


class OneFile:
    """Saves by one function and loads by another."""

    def __init__(self, folder: Path, write: Callable[[State, Path], object], read: Callable[[Path, State], State]) -> None:
        self.path = folder / "state.bin"
        folder.mkdir(parents=True, exist_ok=True)
        self.write, self.read = write, read

    def save(self, state: State, turn: int) -> Wait:
        self.write(state, self.path)
        return nothing

    def load(self, into: State) -> State:
        return self.read(self.path, into)

    def files(self) -> Path:
        return self.path.parent

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is kept."""


def torch_save(state: State, path: Path) -> None:
    torch.save(dict(state), path)


def torch_load(path: Path, into: State) -> State:
    return touched(torch.load(path, weights_only=True))


def torch_load_mapped(path: Path, into: State) -> State:
    return touched(torch.load(path, weights_only=True, mmap=True))


def save_file(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(state), path)


def load_file(path: Path, into: State) -> State:
    from safetensors.torch import load_file

    return touched(load_file(path))


def load_file_into(path: Path, into: State) -> State:
    from safetensors.torch import load_file

    for name, tensor in load_file(path).items():
        into[name].copy_(tensor)
    return into


def fast_load(path: Path, into: State) -> State:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device=torch.device("cpu"), nogds=True)
    try:
        loader.add_filenames({0: [str(path)]})
        buffer = loader.copy_files_to_device()
        for name in loader.get_keys():  # its tensors are views into the buffer, which goes with the loader
            into[name].copy_(buffer.get_tensor(name))
        buffer.close()
    finally:
        loader.close()
    return into


def stream(path: Path | str, into: State) -> State:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        for name, tensor in streamer.get_tensors():  # a tensor is good until the next one is asked for
            into[name].copy_(tensor)
    return into


def instant_load(path: Path, into: State) -> State:
    import instanttensor

    with instanttensor.safe_open(str(path), framework="pt", device="cpu") as file:
        for name, tensor in file.tensors():
            into[name].copy_(tensor)
    return into


def serialize(state: State, path: Path) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(path))
    serializer.write_state_dict(dict(state))
    serializer.close()


def deserialize(path: Path, into: State) -> State:
    from tensorizer import TensorDeserializer

    with TensorDeserializer(str(path), device="cpu", lazy_load=False) as tensors:
        return touched({name: tensors[name] for name in tensors})


def _peer(name: str, note: str, write: Callable[[State, Path], object], read: Callable[[Path, State], State], **more: Any) -> Peer:
    return Peer(name=name, note=note, open=lambda folder: OneFile(folder, write, read), **more)


SAVERS = [
    _peer("torch.save", "one zip file; no hash", torch_save, torch_load),
    _peer("safetensors save_file", "one file; no hash", save_file, load_file, needs=("safetensors.torch",)),
    _peer("tensorizer", "one file; CRC32 or SHA-256 of each tensor are off by default", serialize, deserialize, needs=("tensorizer",)),
]
LOADERS = [
    _peer("torch.load", "memory of its own; no check", torch_save, torch_load),
    _peer("torch.load(mmap=True), touched", "mapped; no check", torch_save, torch_load_mapped),
    _peer("safetensors load_file, touched", "mapped; no check", save_file, load_file, needs=("safetensors.torch",)),
    _peer("safetensors load_file, copied into place", "no check", save_file, load_file_into, needs=("safetensors.torch",)),
    _peer("fastsafetensors, copied into place", "its CPU path; no check", save_file, fast_load, needs=("fastsafetensors",)),
    _peer("runai-model-streamer, copied into place", "no check", save_file, stream, needs=("runai_model_streamer",)),
    _peer("instanttensor, copied into place", "no check", save_file, instant_load, needs=("instanttensor",)),
    _peer("tensorizer", "memory of its own; no check", serialize, deserialize, needs=("tensorizer",)),
]
