"""Under which names raw shards lie in a storage: as they are, or packed. What was seen is remembered, and looked for anew when gone."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tierstore.errors import NotFoundError
from tierstore.format.packed.types import packable, packed_name, parse_packed_name
from tierstore.storage.contract import FileInfo, Storage

__all__ = ["Form", "StoredNames", "form_of_packed", "is_packable", "shown_as", "split"]

_Looking = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, tuple[asyncio.Lock, int]]]
_REMEMBERED = 1 << 16
"""Names of so many shards."""
_LISTED = 1 << 12
"""Folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A file that holds a raw shard.

    Attributes:
        path: Its name in the storage.
        nbytes: Of the raw shard.
        stored_nbytes: Of the file; None: it was not told.
        packed: It is a packed file; else the raw shard itself.
    """

    path: str
    nbytes: int
    stored_nbytes: int | None
    packed: bool


def split(path: str) -> tuple[str, str]:
    """Folder and name."""
    folder, _, name = path.rpartition("/")
    return folder, name


def is_packable(path: str) -> bool:
    """Whether a raw path is one that may be packed."""
    return packable(split(path)[1])


class StoredNames:
    """The forms of raw shards in one storage; usable from any thread and event loop, anew after a fork.

    Args:
        inner: The storage.
    """

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._forms: OrderedDict[str, tuple[Form, ...]] = OrderedDict()
        self._listed: OrderedDict[str, bool] = OrderedDict()
        self._looking: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, tuple[asyncio.Lock, int]]] = (
            weakref.WeakKeyDictionary()
        )

    def _be_here(self) -> None:
        """After a fork nothing of the parent's is used: a thread of its may have held the lock."""
        if self._pid != os.getpid():
            self._reset()

    def shown(self, files: Iterable[FileInfo], folder: str, *, deep: bool = False) -> list[FileInfo]:
        """A listing with raw paths and lengths, and one entry for each shard; remembers the forms.

        Args:
            files: What the storage listed.
            folder: Of which folder.
            deep: And of all below it.
        """
        found: list[FileInfo] = []
        forms: dict[str, list[tuple[Form, FileInfo]]] = {}
        for raw, form, info in _forms_of(files):
            if form is None:
                found.append(info)
            else:
                forms.setdefault(raw, []).append((form, info))
        for raw, some in forms.items():
            some.sort(key=_best_first)
            self.note(raw, [form for form, _ in some])
            found.append(shown_as(raw, *some[0]))
        self._be_here()
        with self._lock:
            self._listed[folder] = deep or self._listed.pop(folder, False)
            if len(self._listed) > _LISTED:
                self._listed.popitem(last=False)
        return found

    def _was_listed(self, folder: str) -> bool:
        with self._lock:
            if folder in self._listed:
                return True
            while folder:
                folder, _ = split(folder)
                if self._listed.get(folder):
                    return True
            return False

    def note(self, path: str, forms: Sequence[Form]) -> None:
        """Remembers all forms of a shard, the one that counts first; none: forgets it."""
        self._be_here()
        with self._lock:
            self._forms.pop(path, None)
            if forms:
                self._forms[path] = tuple(forms)
                if len(self._forms) > _REMEMBERED:
                    self._forms.popitem(last=False)

    def known(self, path: str) -> tuple[Form, ...]:
        """What is remembered."""
        self._be_here()
        with self._lock:
            return self._forms.get(path, ())

    def forget(self, path: str, form: Form) -> None:
        """A form is not there any more: nothing that is remembered of its shard counts."""
        if form in self.known(path):
            self.note(path, ())

    async def find(self, path: str) -> Form:
        """Where a shard lies: as remembered, else as a listing of its folder shows.

        Raises:
            NotFoundError: Nowhere.
        """
        forms = self.known(path)
        if forms:
            return forms[0]
        folder, _ = split(path)
        with self._lock:
            locks = self._looking.setdefault(asyncio.get_running_loop(), {})
        lock, waiting = locks.get(folder, (asyncio.Lock(), 0))
        locks[folder] = lock, waiting + 1
        try:
            async with lock:  # of several that look for shards of one folder, the first one's listing serves all that it shows
                forms = self.known(path)
                if not forms:
                    self.shown((await self._inner.children(folder)).files, folder)
                    forms = self.known(path)
        finally:
            lock, waiting = locks.pop(folder)
            if waiting > 1:
                locks[folder] = lock, waiting - 1
        if forms:
            return forms[0]
        _, form = _form_of(await self._inner.stat(path))  # it says what is missing, in its own words
        if form is None:  # a footer may name anything as what it takes bytes from
            raise NotFoundError(f"{self._inner.uri}/{path} is no shard", hint="run `tierstore verify`", path=path)
        self.note(path, [form])
        return form

    async def look(self, path: str) -> tuple[Form, ...]:
        """All forms of a shard: as remembered, else as a listing of its folder shows, which one for all shards in it is enough for."""
        forms, folder = self.known(path), split(path)[0]
        if not forms and not self._was_listed(folder):
            self.shown((await self._inner.children(folder)).files, folder)
            forms = self.known(path)
        return forms

    async def outdated(self, path: str, form: Form, before: Sequence[Form]) -> list[str]:
        """The files of the same shard that `form`, which has just been published, makes superfluous; remembers what is there.

        Of two that are published at the same time, in different forms, by different processes, what is newer by the storage's own clock
        stays; where nothing was there before, both do, until `KeepsForms.keep_one`.

        Args:
            path: The raw path.
            form: What was published.
            before: What there was when that began.
        """
        if all(other.path == form.path for other in before):
            self.note(path, [form])
            return []
        found = [
            (other, info)
            for raw, other, info in _forms_of((await self._inner.children(split(path)[0])).files)
            if other is not None and raw == path
        ]
        own = next((info for other, info in found if other.path == form.path), None)
        known_before = {other.path for other in before}
        gone = [
            other.path
            for other, info in found
            if own is not None
            and other.path != form.path
            and (_time(info) < _time(own) or (_time(info) == _time(own) and other.path in known_before))
        ]
        self.note(path, [form, *(other for other, _ in found if other.path not in (form.path, *gone))])
        return gone


def shown_as(path: str, form: Form, info: FileInfo) -> FileInfo:
    """What is said of a raw shard, of which `info` is said where it lies."""
    return replace(info, path=path, nbytes=form.nbytes, stored_nbytes=info.nbytes) if form.packed else info


def form_of_packed(path: str, nbytes: int, stored_nbytes: int | None) -> Form:
    """The packed form of a raw shard."""
    return Form(path=packed_name(path, nbytes), nbytes=nbytes, stored_nbytes=stored_nbytes, packed=True)


def _form_of(info: FileInfo) -> tuple[str, Form | None]:
    """The raw path of a file, and its form if it is a shard."""
    folder, name = split(info.path)
    parsed = parse_packed_name(name)
    if parsed is not None:
        raw = f"{folder}/{parsed[0]}" if folder else parsed[0]
        return raw, Form(path=info.path, nbytes=parsed[1], stored_nbytes=info.nbytes, packed=True)
    if packable(name):
        return info.path, Form(path=info.path, nbytes=info.nbytes, stored_nbytes=info.nbytes, packed=False)
    return info.path, None


def _forms_of(files: Iterable[FileInfo]) -> Iterator[tuple[str, Form | None, FileInfo]]:
    for info in files:
        yield *_form_of(info), info


def _best_first(one: tuple[Form, FileInfo]) -> tuple[float, bool, int]:
    """The newest first, for one that was damaged may have been written anew in the other form; else what is packed."""
    form, info = one
    return -_time(info), not form.packed, -form.nbytes


def _time(info: FileInfo) -> float:
    return info.modified_at.timestamp() if info.modified_at else 0.0
