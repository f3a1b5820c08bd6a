"""Open files: a reader that stays with the version that it was opened on, and a writer that publishes only what was closed in peace."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile

from tierstore.errors import UsageError, reason_of
from tierstore.fs.nodes import Node
from tierstore.fs.tree import Range
from tierstore.tiers.files.spool import Spool

if TYPE_CHECKING:
    from tierstore.fs.filesystem import TierFileSystem

__all__ = ["TierReader", "TierWriter"]

log = logging.getLogger(__name__)


class TierReader(AbstractBufferedFile):  # type: ignore[misc]
    """One file, opened for reading. Every byte is proved; a file that is replaced meanwhile is read on as it was, or fails clearly."""

    def __init__(self, fs: TierFileSystem, path: str, node: Node, **options: Any) -> None:
        self.node = node
        options.pop("size", None)  # what another version of the file may have had
        super().__init__(fs, path, mode="rb", size=node.nbytes, **options)
        self._details = node.info()

    def _fetch_range(self, start: int, end: int) -> bytes:
        found: bytes = self.fs.read_node(self.node, Range(start=start, end=end))
        return found

    def __reduce__(self) -> Any:
        """Opened anew where it is unpickled: there the newest version of the file is read."""
        cache = self.cache.name if self.cache else "none"
        return _reopen, (self.fs, self.path, self.blocksize, cache, self.loc, self.kwargs)

    def __hash__(self) -> int:
        return hash((self.path, self.node.identity))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TierReader) and (self.path, self.node.identity) == (other.path, other.node.identity)


def _reopen(fs: TierFileSystem, path: str, block_size: int, cache_type: str, at: int, options: dict[str, Any]) -> TierReader:
    file: TierReader = fs.open(path, "rb", block_size=block_size, cache_type=cache_type, **options)
    file.seek(at)
    return file


class TierWriter(io.BufferedIOBase):
    """One file that is being written. Nothing is visible before `close` (or, in a transaction, its end), and then all of it.

    What an exception interrupts is discarded, however the file was opened: in a ``with`` block, and by a `close` that is called while an
    exception is being handled that was not yet there when the file was opened (a ``finally``, a library's clean-up). So is what nobody
    closes. `commit` publishes in any case.

    Args:
        spool: Takes the bytes.
        publish: Publishes them; errors as `Tree.publish`.
        path: For messages.
        autocommit: False: `close` ends the writing, and `commit` publishes.
    """

    def __init__(self, spool: Spool, publish: Callable[[Spool], object], path: str, *, mode: str = "wb", autocommit: bool = True) -> None:
        self.path = path
        self.mode = mode
        self.autocommit = autocommit
        self._spool: Spool | None = spool
        self._publish = publish
        self._handled = _handled()
        self._abandoned = False

    # ---- writing

    def write(self, data: Any) -> int:
        """Appends bytes; returns how many. Errors as `Spool.write`."""
        if self.closed or self._spool is None:
            raise ValueError(f"/{self.path} is closed: nothing can be written to it any more")
        return self._spool.write(data)

    def tell(self) -> int:
        if self._spool is None:
            raise ValueError(f"/{self.path} is closed")
        return self._spool.nbytes

    def writable(self) -> bool:
        return not self.closed

    @property
    def size(self) -> int | None:
        """How many bytes were written so far; None once it is published or discarded."""
        return None if self._spool is None else self._spool.nbytes

    @property
    def name(self) -> str:
        return f"/{self.path}"

    # ---- the end

    def close(self) -> None:
        """Publishes the file, if it was written in peace; idempotent. Errors as `Tree.publish`: then nothing is published.

        In a transaction it only ends the writing.
        """
        if self.closed:
            return
        error = sys.exc_info()[1]
        if self._abandoned:
            self._drop("nobody closed it")
        elif error is not None and not any(error is known for known in self._handled):
            self._drop(f"an exception interrupted it ({reason_of(error)[:200]})")
        elif self.autocommit:
            self.commit()
        self._end()

    def commit(self) -> None:
        """Publishes the file, whatever exception is being handled; what was discarded stays so. Errors as `close`."""
        spool, self._spool = self._spool, None
        try:
            if spool is not None:
                self._publish(spool)
        finally:
            if spool is not None:
                spool.discard()
            self._end()

    def discard(self) -> None:
        """Drops what was written; a file of this name stays as it is."""
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.discard()
        self._end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.closed:
            self._drop(f"an exception interrupted it ({reason_of(error)[:200]})")
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_spool", None) is not None and not self.closed:
            self._abandoned = True
            self.close()

    def _dealloc_warn(self, source: object) -> None:
        """Called by a text or compression layer that is being thrown away unclosed, before it closes this file."""
        self._abandoned = True

    def __reduce__(self) -> Any:
        raise UsageError("a file that is being written can't be pickled", hint="close it, and open it again where it is needed")

    def _drop(self, why: str) -> None:
        if self._spool is not None:
            log.warning("file=/%s is not written: %s; %d bytes are discarded", self.path, why, self._spool.nbytes)
        self.discard()

    def _end(self) -> None:
        self._handled = ()
        super().close()


def _handled() -> tuple[BaseException, ...]:
    """The exceptions that are being handled now, the innermost first."""
    found: list[BaseException] = []
    error = sys.exc_info()[1]
    while error is not None and len(found) < 100 and not any(error is known for known in found):
        found.append(error)
        error = error.__context__
    return tuple(found)
