"""Recorded storage: the real code runs, its system calls are written down, and every legal state after a power failure is built.

::

    fs = RecordingFs(root)
    storage = PosixStorage(root, syscalls=fs)
    asyncio.run(storage.put("file", b"new"))
    fs.acknowledge("file")
    for number, state in enumerate(fs.crash_states()):
        materialise(state, folder / str(number))     # and run the real recovery there

What the model takes for legal (PROTOCOLS.md §1; after ALICE, Pillai et al., OSDI 2014), for a crash after any number of calls:

- bytes written since the last fsync of their file are there, are lost, are torn, or are zeros of the right length;
- an entry (create, link, rename, unlink, mkdir, rmdir) that its folder was not synced for may or may not be there, in any combination:
  nothing is said of the order;
- one entry is atomic, and so is a rename from one folder to another, which is durable when the folder it went to was synced.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tierstore.storage._syscalls import OsSyscalls, Syscalls

__all__ = ["CrashState", "Op", "RecordingFs", "crash_states", "materialise"]

T = TypeVar("T")
_ROOT = 0
_LIMIT = 4096

_Slot = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One recorded call. Files and folders are numbered, as names come and go; the root is 0.

    `entries` are the changes of folders, ``(folder, name, number or None)``; `syncs` is the folder whose fsync makes them durable.
    """

    kind: str
    node: int = -1
    path: str = ""
    offset: int = 0
    data: bytes = b""
    entries: tuple[tuple[int, str, int | None], ...] = ()
    syncs: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashState:
    """What may be found after a power failure.

    `after` is the number of calls that were made, `acknowledged` what the caller had been told by then. `sampled` says that there
    were too many states at this point to give them all, and that this is one of a random choice.
    """

    after: int
    acknowledged: frozenset[str]
    files: Mapping[str, bytes]
    folders: frozenset[str]
    sampled: bool = False


class RecordingFs:
    """System calls that are made, and written down where they concern `root`. What lies there at the start counts as durable.

    Args:
        root: The folder; made if it is missing.
        inner: Who makes the calls.
    """

    def __init__(self, root: Path, inner: Syscalls | None = None) -> None:
        self._root = os.path.abspath(root)
        os.makedirs(self._root, exist_ok=True)
        self._inner = inner or OsSyscalls()
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._names: dict[str, int] = {"": _ROOT}
        self._descriptors: dict[int, int] = {}
        self._ops: list[Op] = []
        for folder, folders, files in os.walk(self._root):
            for name in folders:
                self._entry("mkdir", self._inside(os.path.join(folder, name)), next(self._numbers))
            for name in files:
                path = os.path.join(folder, name)
                number = next(self._numbers)
                self._entry("create", self._inside(path), number)
                self._ops.append(Op(kind="write", node=number, data=Path(path).read_bytes()))
                self._ops.append(Op(kind="fsync", node=number))
        for number in sorted({0, *self._names.values()}):
            self._ops.append(Op(kind="fsync_folder", node=number))
        self._start = len(self._ops)

    @property
    def ops(self) -> tuple[Op, ...]:
        """What was recorded, the folder's first state included."""
        with self._lock:
            return tuple(self._ops)

    def acknowledge(self, name: str) -> None:
        """Notes that the caller has now been told that `name` is done."""
        with self._lock:
            self._ops.append(Op(kind="acknowledge", path=name))

    def crash_states(self, *, limit: int = _LIMIT) -> Iterator[CrashState]:
        """`crash_states` of what was recorded, from the folder's first state on."""
        return crash_states(self.ops, start=self._start, limit=limit)

    # The system calls

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            fd = self._inner.open(path, flags)
            name = self._inside(path)
            if name is not None:
                if flags & os.O_CREAT and name not in self._names:
                    self._entry("create", name, next(self._numbers))
                if name in self._names:
                    self._descriptors[fd] = self._names[name]
            return fd

    def allocate(self, fd: int, nbytes: int) -> None:
        with self._lock:
            self._inner.allocate(fd, nbytes)
            if fd in self._descriptors:
                self._ops.append(Op(kind="allocate", node=self._descriptors[fd], offset=nbytes))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            wrote = self._inner.pwrite(fd, data, offset)
            if fd in self._descriptors:
                self._ops.append(Op(kind="write", node=self._descriptors[fd], offset=offset, data=bytes(data[:wrote])))
            return wrote

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        return self._inner.pread(fd, nbytes, offset)

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
        return self._inner.preadv(fd, buffer, offset, flags)

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._inner.fsync(fd)
            if fd in self._descriptors:
                self._ops.append(Op(kind="fsync", node=self._descriptors[fd]))

    def close(self, fd: int) -> None:
        with self._lock:
            self._descriptors.pop(fd, None)
            self._inner.close(fd)

    def link(self, source: str, target: str) -> None:
        with self._lock:
            self._inner.link(source, target)
            name = self._inside(source)
            number = self._names.get(name) if name is not None else None
            if number is None:  # what somebody else wrote, by calls that are not recorded: nothing of it is durable yet
                number = next(self._numbers)
                self._ops.append(Op(kind="write", node=number, data=Path(source).read_bytes()))
            self._entry("link", self._inside(target), number)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            self._inner.rename(source, target)
            old, new = self._inside(source), self._inside(target)
            assert old is not None
            assert new is not None
            number = self._names.pop(old)
            self._names[new] = number
            folder, name = self._slot(new)
            self._ops.append(Op(kind="rename", path=new, entries=((*self._slot(old), None), (folder, name, number)), syncs=folder))

    def unlink(self, path: str) -> None:
        with self._lock:
            self._inner.unlink(path)
            self._entry("unlink", self._inside(path), None)

    def mkdir(self, path: str) -> None:
        with self._lock:
            self._inner.mkdir(path)
            self._entry("mkdir", self._inside(path), next(self._numbers))

    def rmdir(self, path: str) -> None:
        with self._lock:
            self._inner.rmdir(path)
            self._entry("rmdir", self._inside(path), None)

    def fsync_folder(self, path: str) -> None:
        with self._lock:
            self._inner.fsync_folder(path)
            name = self._inside(path)
            if name is not None:
                self._ops.append(Op(kind="fsync_folder", node=self._names[name], path=name))

    def _inside(self, path: str) -> str | None:
        """The path below the root; None for what lies elsewhere."""
        if path == self._root:
            return ""
        # A storage may have followed links on the way to its root.
        for root in (self._root, os.path.realpath(self._root)):
            if path.startswith(root + "/"):
                return path[len(root) + 1 :]
        return None

    def _slot(self, name: str) -> _Slot:
        folder, _, leaf = name.rpartition("/")
        return self._names[folder], leaf

    def _entry(self, kind: str, name: str | None, number: int | None) -> None:
        if name is None:
            return
        folder, leaf = self._slot(name)
        if number is None:
            del self._names[name]
        else:
            self._names[name] = number
        self._ops.append(Op(kind=kind, path=name, entries=((folder, leaf, number),), syncs=folder))


@dataclass(slots=True)
class _Disk:
    """What is known of the disk at one instant: what is durable, and what may be."""

    folders: set[int] = field(default_factory=lambda: {_ROOT})
    entries: dict[_Slot, int] = field(default_factory=dict)
    pending: list[Op] = field(default_factory=list)
    synced: dict[int, bytes] = field(default_factory=dict)
    written: dict[int, bytes] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)

    def apply(self, op: Op) -> None:
        if op.entries:
            for _, _, number in op.entries:
                if op.kind == "mkdir" and number is not None:
                    self.folders.add(number)
                elif op.kind == "create" and number is not None:
                    self.written[number] = b""
            self.pending.append(op)
        elif op.kind == "write":
            before = self.written.get(op.node, b"").ljust(op.offset, b"\0")
            self.written[op.node] = before[: op.offset] + op.data + before[op.offset + len(op.data) :]
        elif op.kind == "allocate":
            self.written[op.node] = self.written.get(op.node, b"").ljust(op.offset, b"\0")
        elif op.kind == "fsync":
            self.synced[op.node] = self.written[op.node]
        elif op.kind == "fsync_folder":
            self._sync_folder(op.node)
        else:
            self.acknowledged.add(op.path)

    def _sync_folder(self, folder: int) -> None:
        """The folder's entries are now durable, whatever came before them in the same slots no longer matters."""
        decided: set[_Slot] = set()
        kept: list[Op] = []
        for op in reversed(self.pending):
            if op.syncs == folder:
                for where, name, number in op.entries:
                    if (where, name) not in decided:
                        decided.add((where, name))
                        if number is None:
                            self.entries.pop((where, name), None)
                        else:
                            self.entries[where, name] = number
            elif rest := tuple(entry for entry in op.entries if entry[:2] not in decided):
                kept.append(replace(op, entries=rest))
        self.pending = kept[::-1]

    def groups(self) -> list[list[Op]]:
        """The pending changes in groups that touch no slot in common: what becomes of one says nothing of another."""
        groups: list[tuple[set[_Slot], list[int]]] = []
        for number, op in enumerate(self.pending):
            slots = {entry[:2] for entry in op.entries}
            touching = [group for group in groups if group[0] & slots]
            groups = [group for group in groups if not group[0] & slots]
            groups.append((slots.union(*(group[0] for group in touching)), sorted([number, *(n for group in touching for n in group[1])])))
        return [[self.pending[number] for number in numbers] for _, numbers in groups]

    def contents(self, number: int) -> list[bytes]:
        """What the bytes of one file may be."""
        full, base = self.written[number], self.synced.get(number)
        if full == base:
            return [full]
        lost = base or b""
        torn = full[: (len(full) + 1) // 2] + lost[(len(full) + 1) // 2 :]
        return list(dict.fromkeys([full, lost, torn, bytes(len(full))] if base is None else [full, lost, torn]))


def _outcomes(group: Sequence[Op]) -> list[dict[_Slot, int | None]]:
    """What may become of the slots of one group."""
    found: dict[frozenset[tuple[_Slot, int | None]], dict[_Slot, int | None]] = {}
    for keep in itertools.product((False, True), repeat=len(group)):
        slots: dict[_Slot, int | None] = {}
        for op, kept in zip(group, keep, strict=True):
            if kept:
                slots.update({(where, name): number for where, name, number in op.entries})
        found.setdefault(frozenset(slots.items()), slots)
    return list(found.values())


def crash_states(ops: Sequence[Op], *, start: int = 0, limit: int = _LIMIT) -> Iterator[CrashState]:
    """Every legal state after a power failure at any point of `ops`, each once.

    Args:
        ops: What `RecordingFs` recorded.
        start: The first `start` calls are complete in every state.
        limit: Up to so many combinations at one point are all built; of more, `limit` random ones (the same in each run), which
            are marked `sampled`.
    """
    disk = _Disk()
    seen: set[object] = set()
    for after, op in enumerate([*ops, None]):
        if after >= start:
            for acknowledged, files, folders, sampled in _at(disk, limit):
                key = (acknowledged, frozenset(files.items()), folders)
                if key not in seen:
                    seen.add(key)
                    yield CrashState(after=after - start, acknowledged=acknowledged, files=files, folders=folders, sampled=sampled)
        if op is not None:
            disk.apply(op)


def _at(disk: _Disk, limit: int) -> Iterator[tuple[frozenset[str], dict[str, bytes], frozenset[str], bool]]:
    choices = [_outcomes(group) for group in disk.groups()]
    acknowledged = frozenset(disk.acknowledged)
    for combination, many in _combinations(choices, limit):
        entries = dict(disk.entries)
        for slots in combination:
            for slot, number in slots.items():
                if number is None:
                    entries.pop(slot, None)
                else:
                    entries[slot] = number
        files, folders = _tree(entries, disk.folders)
        variants = [[(number, data) for data in disk.contents(number)] for number in sorted(set(files.values()))]
        for contents, more in _combinations(variants, limit):
            data = dict(contents)
            yield acknowledged, {path: data[number] for path, number in files.items()}, folders, many or more


def _combinations(choices: Sequence[Sequence[T]], limit: int) -> Iterator[tuple[tuple[T, ...], bool]]:
    """Every way to take one of each, or `limit` random ones of more; with True if it was a random choice."""
    if math.prod(len(choice) for choice in choices) <= limit:
        for combination in itertools.product(*choices):
            yield combination, False
        return
    chance = random.Random(limit)
    for _ in range(limit):
        yield tuple(chance.choice(choice) for choice in choices), True


def _tree(entries: Mapping[_Slot, int], folders: set[int]) -> tuple[dict[str, int], frozenset[str]]:
    """The files that can be reached from the root, by path, and the folders."""
    below: dict[int, list[tuple[str, int]]] = {}
    for (folder, name), number in entries.items():
        below.setdefault(folder, []).append((name, number))
    files: dict[str, int] = {}
    reached: set[str] = set()
    pending = [(_ROOT, "")]
    while pending:
        folder, path = pending.pop()
        for name, number in below.get(folder, ()):
            full = f"{path}/{name}" if path else name
            if number in folders:
                reached.add(full)
                pending.append((number, full))
            else:
                files[full] = number
    return files, frozenset(reached)


def materialise(state: CrashState, directory: Path) -> None:
    """Builds `state` in `directory`, which is made and must be empty, so that the real recovery can run on it."""
    directory.mkdir(parents=True, exist_ok=True)
    assert not any(directory.iterdir()), f"{directory} is not empty"
    for folder in sorted(state.folders):
        (directory / folder).mkdir()
    for path, data in state.files.items():
        (directory / path).write_bytes(data)
