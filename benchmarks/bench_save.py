"""The stall of `save`, and the time to committed on a node tier with digests, against memcpy, torch.save, DCP and a plain write."""

from __future__ import annotations

import mmap
import os
import shutil
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common import Table, arguments, change, save_until, scratch, settle, state_nbytes, timed, training_state

import tierstore
from tierstore.units import format_size


def memcpy(state: dict[str, dict[str, torch.Tensor]], buffer: torch.Tensor) -> None:
    at = 0
    for group in state.values():
        for tensor in group.values():
            flat = tensor.reshape(-1).view(torch.uint8)
            buffer[at : at + flat.numel()].copy_(flat)
            at += flat.numel()


def torch_save(state: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def plain_write(data: memoryview, path: Path) -> None:
    """The buffered write and fsync that a script would do, nothing hashed."""
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), 8 << 20):
            file.write(data[at : at + (8 << 20)])
        os.fsync(file.fileno())


def direct_write(data: mmap.mmap, path: Path) -> None:
    """A raw O_DIRECT write and fsync, one thread: near the disk's own speed, nothing hashed."""
    view = memoryview(data)
    whole = len(view) // 4096 * 4096
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        for at in range(0, whole, 8 << 20):
            os.pwrite(fd, view[at : min(at + (8 << 20), whole)], at)
        os.fsync(fd)
    finally:
        os.close(fd)
        view.release()


def main() -> None:
    warnings.simplefilter("ignore")
    args = arguments(__doc__ or "")
    state = training_state(args.nbytes)
    nbytes = state_nbytes(state)
    stall = Table("Stall: how long training stands still per save", nbytes, "warm memcpy, 1 thread")
    total = Table("Time until the bytes are durable on the node's disk", nbytes, "plain buffered write + fsync, no hash")
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    image = mmap.mmap(-1, nbytes)
    flat_bytes = torch.cat([t.reshape(-1).view(torch.uint8) for g in state.values() for t in g.values()])
    torch.frombuffer(image, dtype=torch.uint8).copy_(flat_bytes)
    flat = {f"{g}.{n}": t for g, group in state.items() for n, t in group.items()}  # what DCP takes
    memcpy(state, buffer)
    print(f"state: {len(flat)} tensors, {format_size(nbytes)}; {torch.get_num_threads()} torch threads, {os.cpu_count()} cores")
    with scratch(args.directory) as root, tierstore.open([str(root / "node")], run="bench") as store:
        first = save_until(store, 0, state, "committed")
        print(f"first save (allocates its image): stall {first.stall_s:.3f} s")
        for turn in range(1, args.repeat + 1):
            change(state)
            stall.add("warm memcpy, 1 thread", timed(memcpy, state, buffer))

            settle()
            began = time.perf_counter()
            stall.add("tierstore save", save_until(store, turn, state, "committed").stall_s)
            total.add("tierstore, SHA-256 of every block, until committed", time.perf_counter() - began)

            settle()
            total.add("plain buffered write + fsync, no hash", timed(plain_write, memoryview(image), root / "plain"))
            settle()
            total.add("raw O_DIRECT write + fsync, no hash", timed(direct_write, image, root / "direct"))
            settle()
            seconds = timed(torch_save, state, root / "torch.pt")
            stall.add("torch.save + fsync (synchronous)", seconds)
            total.add("torch.save + fsync, no hash", seconds)
            settle()
            seconds = timed(dcp.save, flat, checkpoint_id=root / "dcp", no_dist=True)
            stall.add("DCP save (synchronous)", seconds)
            total.add("DCP save (FileSystemWriter), no hash", seconds)
            settle()
            began = time.perf_counter()
            saving = dcp.async_save(flat, checkpoint_id=root / "dcp-async", no_dist=True)
            stall.add("DCP async_save", time.perf_counter() - began)
            saving.result()  # type: ignore[union-attr]  # a Future, as no stager was given
            total.add("DCP async_save, until done, no hash", time.perf_counter() - began)
            for name in ("plain", "direct", "torch.pt"):
                (root / name).unlink()
            for name in ("dcp", "dcp-async"):
                shutil.rmtree(root / name)
    stall.show()
    total.show()


if __name__ == "__main__":
    main()
