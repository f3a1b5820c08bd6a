"""What the demo prints: its headings, its comparisons, its table of stalls."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from tierstore.cli.demo_process import Tally
from tierstore.cli.layout import FitTable
from tierstore.cli.render import plain_table
from tierstore.cli.terminal import Terminal
from tierstore.units import format_duration

__all__ = ["Bar", "Story", "curve_verdict", "digest_verdict", "look_further", "program_name", "stall_table"]


class Bar:
    """A progress bar of training steps; silent where there is no terminal."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress, self._task = progress, task

    def step(self, step: int, loss: float) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, loss=f"loss {loss:.3f}")


class Story:
    """The demo's voice: on stdout for people, as JSON objects for programs."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._chapter = 0
        self._live: Progress | None = None

    def chapter(self, title: str) -> None:
        self._chapter += 1
        heading = f"{self._chapter}. {title} "
        self._terminal.show("", Text.assemble((heading, "bold"), ("─" * max(0, 78 - len(heading)), "dim")))
        self._terminal.emit({"type": "chapter", "number": self._chapter, "title": title})

    def tell(self, text: str, style: str = "", **facts: Any) -> None:
        """One line for people; with `facts`, the same for programs."""
        self._print(Text(text, style=style))
        if facts:
            self._terminal.emit({"type": "event", "text": text, **facts})

    def table(self, table: FitTable, heading: Text | None = None) -> None:
        self._terminal.show("", *([heading] if heading is not None else []), table, "")

    def emit(self, value: Mapping[str, Any]) -> None:
        self._terminal.emit(value)

    @contextmanager
    def bar(self, title: str, begin: int, end: int) -> Iterator[Bar]:
        """A bar while it lasts; lines that are told meanwhile stand above it."""
        console = self._terminal.out
        if self._terminal.as_json or not (self._terminal.progress and console.is_terminal):
            yield Bar(None, None)
            return
        with _progress(console) as live:
            self._live = live
            try:
                yield Bar(live, live.add_task(title, total=end, completed=begin, loss=""))
            finally:
                self._live = None

    def _print(self, text: Text) -> None:
        if self._live is not None:
            self._live.console.print(text)
        else:
            self._terminal.show(text)


def curve_verdict(story: Tally, reference: Tally) -> tuple[int, list[str]]:
    """Compares every loss with the uninterrupted run's, bit for bit.

    Returns:
        How many were compared (a step that was redone counts each time), and one line for each that differs or is missing.
    """
    problems = [f"step {step} is missing" for step in reference.losses if step not in story.losses]
    compared = 0
    for step, values in sorted(story.losses.items()):
        expected = reference.losses.get(step, [])
        for value in values:
            compared += 1
            if expected != [value]:
                problems.append(f"step {step}: loss {value!r}, without interruption {expected}")
    return compared, problems


def digest_verdict(story: Tally, reference: Tally, step: int) -> tuple[str, list[str]]:
    """Compares the SHA-256 of all weights and moments after `step`; returns the reference's and what differs."""
    expected = reference.digests.get(step, [])
    found = story.digests.get(step, [])
    good = len(expected) == 1 and bool(found) and set(found) == set(expected)
    return (expected[0] if expected else ""), [] if good else [
        f"after step {step}: {found or 'nothing'}, without interruption {expected or 'nothing'}"
    ]


def stall_table(ours: Tally, theirs: Tally) -> FitTable:
    """How long a save kept training waiting: tierstore's against ``torch.save`` and fsync of the same state to the same disk.

    The median step tells what the background work costs the training beside it, where both share the processors.
    """
    table = plain_table("SAVE", ("SAVES", "right"), ("MEDIAN STALL", "right"), ("WORST", "right"), ("STEP MEANWHILE", "right"))
    for name, tally in (("tierstore, three tiers in background", ours), ("torch.save and fsync, one disk", theirs)):
        stalls = tally.stall_s
        table.add_row(
            name,
            str(len(stalls)),
            format_duration(statistics.median(stalls)),
            format_duration(max(stalls)),
            format_duration(statistics.median(tally.step_s)),
        )
    return table


def program_name() -> str:
    """How a person calls this very program again."""
    if shutil.which("tierstore"):
        return "tierstore"
    script = Path(sys.argv[0])
    if script.name == "tierstore" and script.exists():
        return shlex.quote(min(str(script), os.path.relpath(script), key=len))
    return f"{shlex.quote(sys.executable)} -m tierstore"


def look_further(config: Path, *, serving: bool, serve_again: bool) -> Sequence[tuple[str, str]]:
    """Commands to go on with, and what each shows."""
    program, file = program_name(), shlex.quote(str(config))
    folder = shlex.quote(str(config.parent))
    lines: list[tuple[str, str]] = []
    if not serving and serve_again:
        lines.append((f"{program} demo --serve --directory {folder} &", "the demo's S3 server again, for the lines below"))
    look = f"{program} -c {file}"
    return [
        *lines,
        (f"{look} ls", "checkpoints × tiers"),
        (f"{look} show @latest", "one checkpoint: facts, files, replicas, its log"),
        (f"{look} tensors @latest 'master.*norm*'", "tensors by name"),
        (f"{look} cat @latest objects.json", "what is not a tensor, readable"),
        (f"{look} verify --tier object --level full", "every byte on S3 against its SHA-256"),
        (f"{look} status", "what each tier holds, what is pending"),
        (f"rm -r {folder}", "when you are done"),
    ]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
