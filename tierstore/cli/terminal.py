"""The terminal: results on stdout, everything else on stderr; one JSON object a line where a program reads."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tierstore.cli.layout import break_lines
from tierstore.clock import utc_text
from tierstore.errors import TierStoreError

__all__ = ["Terminal", "plain_json"]

_ALIKE = 1
"""So many log lines of one kind are shown."""

_WIDE = 10_000
"""Columns where the output is no terminal and COLUMNS does not say how wide: a table for `grep` is not cut."""


class Terminal:
    """Where the command line writes.

    Args:
        as_json: Results are JSON objects, one a line.
        quiet: Only results and errors.
        verbose: 1: also what is being done, and tracebacks; 2: everything.
        progress: Bars are wanted; they appear only where stderr is a terminal.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: int = 0, progress: bool = True) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)
        self.progress = progress and not quiet and self.err.is_terminal

    def show(self, *parts: RenderableType) -> None:
        """Prints a result for people; nothing with ``--json``. Lines of text break between words only: paths can be copied."""
        if not self.as_json:
            for part in parts:
                if isinstance(part, str | Text):
                    self._print_lines(part if isinstance(part, Text) else Text(part))
                else:
                    self.out.print(part)

    def _print_lines(self, text: Text) -> None:
        for line in break_lines(text, self.out.width):
            self.out.print(line, soft_wrap=True)

    def show_line(self, line: str) -> None:
        """Prints a result that stays one line, however long: for a file that grows line by line."""
        if not self.as_json:
            self.out.print(Text(line), soft_wrap=True)

    def emit(self, value: Mapping[str, Any]) -> None:
        """Prints a result for programs: one JSON object on a line of its own; nothing without ``--json``."""
        if self.as_json:
            self.out.file.write(json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False) + "\n")

    def say(self, message: str, style: str = "") -> None:
        """Says on stderr what is going on; nothing with ``-q``."""
        if not self.quiet:
            self._tell(Text(message, style=style))

    def complain(self, error: BaseException) -> None:
        """Prints an error as ``error: …`` and ``hint: …``; with ``-v`` the traceback before it."""
        if self.verbose:
            self.err.file.write("".join(traceback.format_exception(error)))
        if isinstance(error, TierStoreError):
            message, hint = error.message, error.hint
        else:
            message, hint = (
                f"internal: {type(error).__name__}: {error}",
                "" if self.verbose else "run it again with -v and report the traceback",
            )
        self._labelled("error", message, "bold red")
        if hint:
            self._labelled("hint", hint, "cyan")

    @contextmanager
    def logging(self, *, quiet: bool = False) -> Iterator[None]:
        """While it lasts, tierstore's log goes to stderr: warnings, with ``-v`` information, with ``-q`` (or `quiet`) errors only."""
        logger = logging.getLogger("tierstore")
        handler, before, propagated = _LogLines(self), logger.level, logger.propagate
        others, logger.handlers = logger.handlers, [handler]
        logger.propagate = False  # logging's last resort would print the same once more
        logger.setLevel(logging.ERROR if quiet or self.quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(self.verbose, 2)])
        try:
            yield
        finally:
            logger.handlers, logger.propagate = others, propagated
            logger.setLevel(before)
            handler.conclude()

    def _labelled(self, label: str, message: str, style: str) -> None:
        self._tell(Text.assemble((f"{label}:", style), " ", message))

    def _tell(self, text: Text) -> None:
        self.err.print(text, soft_wrap=not self.err.is_terminal)  # a log is searched by lines


class _LogLines(logging.Handler):
    """Log records as ``warning: …`` on stderr. Of many alike (one for each checkpoint, say) the first few, unless ``-v``."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal
        self._seen: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        kind = str(record.msg)
        self._seen[kind] += 1
        if self._seen[kind] > _ALIKE and not self._terminal.verbose:
            return
        style = "bold red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else "dim"
        self._terminal._labelled(record.levelname.lower(), record.getMessage(), style)

    def conclude(self) -> None:
        """Says how many were left out."""
        more = sum(count - _ALIKE for count in self._seen.values() if count > _ALIKE)
        if more and not self._terminal.verbose:
            self._terminal._labelled("warning", f"{more} more like these; -v shows all", "yellow")


def plain_json(value: Any) -> Any:
    """`value` as strict JSON can hold it: times as UTC text, NaN and infinities as texts, mappings and sequences followed."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime):
        return utc_text(value)
    if isinstance(value, Mapping):
        return {str(k): plain_json(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain_json(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain_json(v) for v in value)
    return value


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _DataConsole(Console):
    """A console on which data can't speak to the terminal: escape sequences in names would move its cursor, or worse."""

    def on_broken_pipe(self) -> None:
        """The reader has gone (`| head`): told as the error that it is, where rich would end the process."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or not _CONTROL.search(text) else Segment(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text), style)


def _console(stream: TextIO | None) -> Console:
    # Names from checkpoints are data: no markup, no emoji codes, no guessing of what a number is.
    stream = io.StringIO() if stream is None else stream  # Python's word for a stream that was closed before it started
    width = None if stream.isatty() else shutil.get_terminal_size((_WIDE, 24)).columns
    return _DataConsole(file=stream, width=width, markup=False, emoji=False, highlight=False)
