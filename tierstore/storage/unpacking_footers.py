"""Footers of packed files, read once: what lies where in each."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tierstore.errors import FormatError, IntegrityError, VersionError
from tierstore.format.digest import block_count
from tierstore.format.packed.footer import TRAILER_NBYTES, decode_footer, footer_digest, footer_nbytes
from tierstore.format.packed.layout import holes_of
from tierstore.format.packed.types import Footer, Run, RunKind
from tierstore.storage.contract import Storage
from tierstore.storage.packed_names import Form

__all__ = ["Footers", "Known", "Part"]

_MOST_NBYTES = 64 << 20
"""Of all footers that are kept, as they lie in the files, bytes."""
_TAIL_NBYTES = 32 << 10
_BLOCK_TAIL_NBYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a run, and what it is made of: the bytes ``[source, source_end)`` of a file, of which, rounded, the first `skipped` are not
    wanted (and of which the last number may be more than is)."""

    begin: int
    end: int
    kind: RunKind
    file: int
    source: int
    source_end: int
    skipped: int


@dataclass(frozen=True)
class Known:
    """A packed file whose footer was read and makes sense."""

    form: Form
    footer: Footer
    digest: str
    nbytes: int
    """Of the footer."""

    def block(self, number: int) -> tuple[int, int]:
        """Begin and end of a block in the raw file."""
        size = self.footer.block_nbytes
        return number * size, min((number + 1) * size, self.footer.nbytes)

    def frame(self, number: int) -> tuple[int, int]:
        """Begin and end of a block's frame in the packed file."""
        ends = self.footer.frame_ends
        return int(ends[number - 1]) if number else 0, int(ends[number])

    def parts(self, begin: int, end: int) -> Iterator[Part]:
        """The parts of runs that lie in ``[begin, end)`` of the raw file."""
        for run in self._runs(begin, end):
            first, last = max(begin, run.begin), min(end, run.end)
            low, high = first - run.begin, last - run.begin
            skipped = 0 if run.kind == "copy" else low % 2
            if run.kind != "copy":
                low, high = 2 * (low - skipped), 2 * (high + high % 2)
            yield Part(
                begin=first,
                end=last,
                kind=run.kind,
                file=run.file,
                source=run.source + low,
                source_end=run.source + high,
                skipped=skipped,
            )

    def holes(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What runs cover of ``[begin, end)`` of the raw file, joined."""
        return holes_of(self._runs(begin, end), begin, end)

    def _runs(self, begin: int, end: int) -> Iterator[Run]:
        runs = self.footer.runs
        for at in range(bisect_right(self._run_ends, begin), len(runs)):
            if runs[at].begin >= end:
                return
            yield runs[at]

    @cached_property
    def _run_ends(self) -> list[int]:
        return [run.end for run in self.footer.runs]

    @cached_property
    def _taken(self) -> tuple[list[int], list[int]]:
        """Begins and ends of what runs of this file take from itself, joined."""
        begins: list[int] = []
        ends: list[int] = []
        own = [run for run in self.footer.runs if run.file == 0]
        for begin, end in sorted((run.source, run.source + (run.end - run.begin) * (1 if run.kind == "copy" else 2)) for run in own):
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        return begins, ends

    def is_taken_from(self, begin: int, end: int) -> bool:
        """Whether runs of this file take bytes from ``[begin, end)`` of it."""
        begins, ends = self._taken
        at = bisect_right(ends, begin)
        return at < len(begins) and begins[at] < end


class Footers:
    """Reads footers, and keeps those used last. Usable from any thread and event loop.

    Args:
        inner: Where the packed files lie.
    """

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Known] = OrderedDict()
        self._kept_nbytes = 0
        self._reading: dict[tuple[int, str], asyncio.Task[Known]] = {}

    async def of(self, form: Form, path: str) -> Known:
        """What is known of a packed file.

        Args:
            form: The file.
            path: The raw shard's, for errors.

        Raises:
            NotFoundError: It is not there.
            IntegrityError: It does not end with the footer of a packed file of this length.
        """
        known = self.kept(form.path)
        if known is not None and form.stored_nbytes in (None, known.form.stored_nbytes):  # another length: another file by now
            return known
        key = id(asyncio.get_running_loop()), form.path
        task = self._reading.get(key)
        if task is None or task.done():  # what is done is kept, or failed
            task = self._reading[key] = asyncio.ensure_future(self._read(form, path))

            def ended(done: asyncio.Task[Known]) -> None:
                if self._reading.get(key) is done:
                    del self._reading[key]
                if not done.cancelled():
                    done.exception()  # all who were to hear of it may have been cancelled

            task.add_done_callback(ended)
        await asyncio.wait([task])  # the cancellation of one of several that wait is no reason to stop
        return task.result()

    def kept(self, stored: str) -> Known | None:
        """What is remembered of the file under this name in the storage."""
        with self._lock:
            known = self._kept.get(stored)
            if known is not None:
                self._kept.move_to_end(stored)
            return known

    def forget(self, stored: str) -> None:
        """The file under this name in the storage is not what it was."""
        with self._lock:
            known = self._kept.pop(stored, None)
            if known is not None:
                self._kept_nbytes -= known.nbytes

    async def _read(self, form: Form, path: str) -> Known:
        stored = form.stored_nbytes
        if stored is None:
            stored = (await self._inner.stat(form.path)).nbytes
        try:
            if stored < TRAILER_NBYTES:
                raise FormatError(f"it has {stored} bytes", hint="")
            tail = min(stored, _TAIL_NBYTES + _BLOCK_TAIL_NBYTES * block_count(form.nbytes))
            data = await self._inner.read(form.path, stored - tail, tail)
            nbytes = footer_nbytes(data, stored)
            if nbytes > len(data):
                data = await self._inner.read(form.path, stored - nbytes, nbytes)
            data = data[len(data) - nbytes :]
            footer = await asyncio.to_thread(decode_footer, data, stored)
            if footer.nbytes != form.nbytes:
                raise FormatError(f"it is of a file of {footer.nbytes:,} bytes, not {form.nbytes:,} as its name says", hint="")
        except VersionError:
            raise
        except FormatError as error:
            raise IntegrityError(
                f"{path} in {self._inner.uri} is damaged: the footer of its packed file {form.path.rpartition('/')[2]}: {error.message}",
                hint="run `tierstore verify --level full`; docs/guides/recovery.md shows how to put a good copy back",
                file=path,
            ) from error
        known = Known(form=replace(form, stored_nbytes=stored), footer=footer, digest=footer_digest(data), nbytes=nbytes)
        with self._lock:
            before = self._kept.pop(form.path, None)
            self._kept[form.path] = known
            self._kept_nbytes += nbytes - (before.nbytes if before is not None else 0)
            while self._kept_nbytes > _MOST_NBYTES and len(self._kept) > 1:
                self._kept_nbytes -= self._kept.popitem(last=False)[1].nbytes
        return known
