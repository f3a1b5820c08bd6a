"""Where an export goes: a directory or prefix that is empty or may be replaced, and that looks whole only when all of it is there."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from tierstore.errors import RefusedError, TierStoreError
from tierstore.names import TMP
from tierstore.state.export.source import WindowSource
from tierstore.state.reading import Run
from tierstore.storage.contract import Source, Storage
from tierstore.storage.sources import BytesSource

__all__ = ["ExportTarget", "ExportedFile"]

log = logging.getLogger(__name__)

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|__\d+_\d+\.distcp|\.metadata")
"""The files of an earlier export that a new one replaces; nothing else is ever deleted."""

_WHOLE = ("model.safetensors.index.json", "model.safetensors", ".metadata")
"""With one of these a directory looks like a whole export: they go first and come last."""


_END_S = 10.0
"""Seconds to wait for a write that was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A file that was written: its name in the target, its length in bytes, and how many tensors lie in it."""

    name: str
    nbytes: int
    tensors: int = 0


class ExportTarget:
    """Writes files into `storage`. A context manager: after an error what was written is removed again.

    Args:
        storage: The target; each of its writes is atomic and durable.
        run: Runs a coroutine on the event loop.
        overwrite: Files of an earlier export may be replaced, and any files may be there.
    """

    def __init__(self, storage: Storage, run: Run, *, overwrite: bool) -> None:
        self._storage = storage
        self._run = run
        self._overwrite = overwrite
        self._stale: set[str] = set()
        self._begun: list[str] = []
        self.files: list[ExportedFile] = []

    @property
    def uri(self) -> str:
        return self._storage.uri

    def check_empty(self) -> None:
        """Looks whether anything is there.

        Raises:
            RefusedError: It is, and may not be overwritten.
        """
        found = [file.path for file in self._run(self._storage.list(""))]
        if found and not self._overwrite:
            raise RefusedError(
                f"{self.uri} is not empty: it has {len(found):,} files, e.g. {min(found)}",
                hint="choose an empty directory, or replace an earlier export with --overwrite (overwrite=True)",
            )
        self._stale = {name for name in found if _OURS.fullmatch(name)}

    def check_absent(self, name: str) -> None:
        """As `check_empty`, for the one file `name`."""
        if not self._overwrite and any(file.path == name for file in self._run(self._storage.children("")).files):
            raise RefusedError(
                f"{self.uri}/{name} exists already", hint="choose another name, or replace it with --overwrite (overwrite=True)"
            )

    def begin(self) -> None:
        """Makes sure that an earlier export no longer looks whole: from here on what is there is a mixture."""
        self._delete([name for name in _WHOLE if name in self._stale])

    def put(self, name: str, data: bytes | memoryview, tensors: int = 0) -> None:
        """Writes a file that is in memory."""
        source = BytesSource(data)
        self._write(name, source)
        self.files.append(ExportedFile(name=name, nbytes=source.nbytes, tensors=tensors))

    def write(self, name: str, source: WindowSource, tensors: int) -> None:
        """Writes a file that is made while it is written, and closes its source."""
        try:
            self._write(name, source)
        finally:
            source.close()
        self.files.append(ExportedFile(name=name, nbytes=source.nbytes, tensors=tensors))

    def _write(self, name: str, source: Source) -> None:
        self._begun.append(name)
        ended = threading.Event()

        async def work() -> None:
            try:
                await self._storage.write(name, source)
            finally:
                ended.set()

        try:
            self._run(work())
        except BaseException:
            ended.wait(_END_S)  # Ctrl-C only asks it to end, and until it has it may still be published
            raise

    def drop_stale(self) -> None:
        """Removes the earlier export's files that were not replaced: stock readers open every file that is there."""
        self._delete(sorted(self._stale - {file.name for file in self.files}))

    def _delete(self, names: Sequence[str]) -> None:
        if names:
            self._run(self._storage.delete(names))
            self._stale.difference_update(names)

    def tidy(self) -> None:
        """Removes the empty folder that a local storage keeps its temporaries in."""
        local = self._storage.local_path(TMP)
        if local is not None and local.is_dir() and not any(local.iterdir()):
            local.rmdir()

    def __enter__(self) -> ExportTarget:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._begun:
            try:
                self._run(self._storage.delete(self._begun[::-1]))
            except TierStoreError as failure:  # the first error is the one to raise
                log.warning("export=%s its files could not be removed after an error: %s", self.uri, failure)
        self.tidy()
