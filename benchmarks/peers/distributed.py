"""torch.distributed.checkpoint with its own writers and readers, and what builds on it: s3torchconnector, torchsnapshot, bytecheckpoint."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _fsspec_filesystem as on_fsspec
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from peers.base import Peer, State, Wait, nothing


class Dcp:
    """`dcp.save` or `dcp.async_save` with a writer of one kind, and its reader.

    Args:
        folder: Where the checkpoints lie, one below it for each turn.
        writer: Makes a writer for a path.
        reader: Makes a reader for a path.
        executor: `thread` or `process`: saves asynchronously.
        keep_writer: The writer is made once, because it keeps its staged copy for the next save.
        stager: What copies the state of an asynchronous save, kept from one save to the next; without: DCP's own, new for each.
    """

    def __init__(
        self,
        folder: Path,
        writer: Callable[[str], Any],
        reader: Callable[[str], Any],
        *,
        executor: AsyncCheckpointerType | None = None,
        keep_writer: bool = False,
        stager: Callable[[], Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.writer, self.reader, self.executor = folder, writer, reader, executor
        self.path = folder / "0"
        self.kept = writer(str(self.path)) if keep_writer else None
        self.stager = stager() if stager else None
        if executor is AsyncCheckpointerType.PROCESS:
            one_rank()

    def save(self, state: State, turn: int) -> Wait:
        if self.kept is None:
            self.path = self.folder / str(turn)
        writer = self.kept or self.writer(str(self.path))
        with quiet():
            if self.executor is None:
                dcp.save(dict(state), storage_writer=writer, no_dist=True)
                return nothing
            alone = self.executor is AsyncCheckpointerType.THREAD
            options = {"async_checkpointer_type": self.executor, "async_stager": self.stager, "no_dist": alone}
            saving = dcp.async_save(dict(state), storage_writer=writer, **options)  # type: ignore[arg-type]
        return saving.result  # type: ignore[union-attr]  # a Future, as no stager works in the background

    def load(self, into: State) -> State:
        with quiet():
            dcp.load(dict(into), storage_reader=self.reader(str(self.path)), no_dist=True)
        return into

    def files(self) -> Path:
        return self.path

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """The process of the process executor ends with this one."""


class Torchsnapshot:
    def __init__(self, folder: Path, *, asynchronous: bool = False) -> None:
        self.folder, self.path, self.asynchronous = folder, folder / "0", asynchronous

    def save(self, state: State, turn: int) -> Wait:
        import torchsnapshot

        self.path = self.folder / str(turn)
        app_state = {"state": torchsnapshot.StateDict(**state)}
        if not self.asynchronous:
            torchsnapshot.Snapshot.take(path=str(self.path), app_state=app_state)
            return nothing
        pending = torchsnapshot.Snapshot.async_take(path=str(self.path), app_state=app_state)
        return lambda: pending.wait()

    def load(self, into: State) -> State:
        import torchsnapshot

        torchsnapshot.Snapshot(str(self.path)).restore({"state": torchsnapshot.StateDict(**into)})
        return into

    def files(self) -> Path:
        return self.path

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Nothing is kept."""


class _Module(torch.nn.Module):
    """What bytecheckpoint takes: a module, whose state is the given one."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.held = dict(state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(self.held)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        for name, tensor in state_dict.items():
            if self.held[name].data_ptr() != tensor.data_ptr():
                self.held[name].copy_(tensor)


class Bytecheckpoint:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "0"
        one_rank()
        logging.getLogger("bytecheckpoint").setLevel(logging.CRITICAL)

    def save(self, state: State, turn: int) -> Wait:
        import bytecheckpoint

        self.path = self.folder / str(turn)
        with quiet():
            bytecheckpoint.DDPCheckpointer.save(str(self.path), {"model": _Module(state)}, fast_saving=False)
        return nothing

    def load(self, into: State) -> State:
        import bytecheckpoint

        with quiet():
            bytecheckpoint.DDPCheckpointer.load(str(self.path), {"model": _Module(into)})
        return into

    def files(self) -> Path:
        return self.path

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Its process ends with this one."""


def one_rank() -> None:
    """A process group of this process alone, which some need."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


@contextlib.contextmanager
def quiet() -> Any:
    """Without what frameworks print and log."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _files(threads: int, **options: Any) -> Callable[[str], Any]:
    return lambda path: dcp.FileSystemWriter(path, thread_count=threads, **options)


def _fsspec(threads: int) -> Callable[[str], Any]:
    return lambda path: on_fsspec.FsspecWriter(f"file://{path}", thread_count=threads)


def _peer(name: str, note: str, writer: Callable[[str], Any], reader: Callable[[str], Any], **more: Any) -> Peer:
    return Peer(
        name=name,
        note=note,
        open=lambda folder: Dcp(folder, writer, reader, **more),
        asynchronous=bool(more.get("executor")),
    )


def _fsspec_reader(path: str) -> Any:
    return on_fsspec.FsspecReader(f"file://{path}")


def _hugging_face_writer(path: str) -> Any:
    return hf_storage.HuggingFaceStorageWriter(path)


def _hugging_face_reader(path: str) -> Any:
    return hf_storage.HuggingFaceStorageReader(path)


_READER = dcp.FileSystemReader
_THREAD, _PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
_SNAPSHOT = Peer(name="torchsnapshot", note="no hash", open=Torchsnapshot, needs=("torchsnapshot",))
_BYTES = Peer(name="bytecheckpoint, DDP", note="no hash", open=Bytecheckpoint, needs=("bytecheckpoint",))

SAVERS = [
    _peer("DCP FileSystem, 1 thread", "no hash", _files(1), _READER),
    _peer("DCP FileSystem, 4 threads", "no hash", _files(4), _READER),
    _peer("DCP async_save, thread", "no hash; 4 threads", _files(4), _READER, executor=_THREAD),
    _peer(
        "DCP async_save, thread, staging cached",
        "no hash; the staged copy is kept for the next save; one path, overwritten",
        _files(4, cache_staged_state_dict=True),
        _READER,
        executor=_THREAD,
        keep_writer=True,
    ),
    _peer(
        "DCP async_save, thread, stager kept",
        "no hash; DefaultStager with shared memory, which it keeps for the next save",
        _files(4),
        _READER,
        executor=_THREAD,
        stager=lambda: DefaultStager(StagingOptions(False, True, False, False)),
    ),
    _peer("DCP async_save, process", "no hash; 4 threads", _files(4), _READER, executor=_PROCESS),
    _peer("DCP Fsspec, 4 threads", "no hash", _fsspec(4), _fsspec_reader),
    _peer("DCP HuggingFace", "no hash", _hugging_face_writer, _hugging_face_reader),
    _SNAPSHOT,
    Peer(
        name="torchsnapshot async_take",
        note="no hash",
        open=lambda folder: Torchsnapshot(folder, asynchronous=True),
        needs=("torchsnapshot",),
        asynchronous=True,
    ),
    _BYTES,
]
LOADERS = [
    _peer("DCP FileSystem, 1 file", "in place; no check", _files(1), _READER),
    _peer("DCP FileSystem, 4 files", "in place; no check", _files(4), _READER),
    _peer("DCP Fsspec", "in place; no check", _fsspec(4), _fsspec_reader),
    _peer("DCP HuggingFace", "in place; no check", _hugging_face_writer, _hugging_face_reader),
    _SNAPSHOT,
    _BYTES,
]
