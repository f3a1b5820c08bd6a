"""A fair comparison of ways to save: the same bytes in the same run, each warmed as often, and each turn another one first.

Before each save and each load the disk writes out what was left dirty. Loads read from the disk: what the page cache holds of the files is
dropped first, for some writers (tierstore's is one) go past the cache, and others leave all they wrote in it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measure import Table, timed
from memory import forget, settle
from turns import Turns

import tierstore

WARM_UPS = 2
"""Turns of all that are not counted: buffers are allocated, modules imported, processes forked once."""

STAGED, DURABLE, DURABLE_TWICE = "on the first tier", "committed, durable", "committed, durable on both"
"""What a save into a store has come to."""

ONE_NOTE = "one copy on the same disk, as the framework's own; synced, with the SHA-256 of every block; loading proves every block"
TWO_NOTE = "two copies on the same disk, both synced, with the SHA-256 of every block; loading reads the first and proves every block"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to save and load.

    Attributes:
        name: Its row in the tables.
        note: Which of syncing and hashing it does; printed.
        save: Saves what is there at a step; returns when training may go on.
        until: What is waited for after that, in this order, each a row of its own; without: it is done when `save` returns.
        load: Loads what was saved at a step.
        files: Where its files lie.
        clean: Removes what was saved at a step, for those that keep all.
        prepare: What goes before a save and is not counted.
    """

    name: str
    note: str
    save: Callable[[int], object]
    until: Mapping[str, Callable[[], object]]
    load: Callable[[int], object]
    files: Path
    clean: Callable[[int], object] = field(default=lambda step: None)
    prepare: Callable[[int], object] = field(default=lambda step: None)


def compete(title: str, nbytes: int, contenders: Sequence[Contender], advance: Callable[[int], object], repeat: int) -> None:
    """Measures all of them and prints the tables, relative to the first.

    Args:
        title: What saves.
        nbytes: The state's size.
        contenders: Who saves.
        advance: Trains on to a step, so that nobody can reuse what it stored before.
        repeat: Turns that count.
    """
    first = contenders[0]
    stall = Table(f"{title}, stall: how long a save keeps training", nbytes, first.name)
    total = Table(f"{title}, from the call until …", nbytes, _row(first, next(iter(first.until))))
    loading = Table(f"{title}, load, from the disk", nbytes, first.name)
    tables = [stall, total, loading]
    by_name = {contender.name: contender for contender in contenders}
    turns = Turns(by_name, repeat=repeat, warm_ups=WARM_UPS)
    for turn, order in turns:
        step = turn + WARM_UPS + 1
        advance(step)
        counted = turn >= 0

        def save(name: str, step: int = step, counted: bool = counted) -> None:
            _save(by_name[name], step, *((stall, total) if counted else (None, None)))

        def load(name: str, step: int = step, counted: bool = counted) -> None:
            settle()
            forget(by_name[name].files)
            seconds = timed(by_name[name].load, step)
            if counted:
                loading.add(name, seconds)

        for work in (save, load):
            for name in order:
                if name not in turns.failed:
                    turns.attempt(name, tables, lambda work=work, name=name: work(name))  # type: ignore[misc]
        for contender in contenders:
            contender.clean(step)
    print(f"\n{title}; each turn another one first; {WARM_UPS} turns of all before that are not counted")
    for contender in contenders:
        print(f"  {contender.name}: {contender.note}")
    for table in (stall, total, loading):
        table.show()


def one_tier(root: Path) -> tierstore.Store:
    """A store on one folder: what its save writes is what a framework's own writes."""
    return _store(root / "node")


def two_tiers(root: Path) -> tierstore.Store:
    """A store with a node's tier and a further one; a checkpoint counts as committed once it is on the second."""
    return _store(root / "node", root / "shared")


def _store(*tiers: Path) -> tierstore.Store:
    return tierstore.open([str(tier) for tier in tiers], run="bench", retention={"keep": [{"last": 2}]})


def until_durable(ticket: Callable[[], tierstore.Ticket | None], *, tiers: int) -> dict[str, Callable[[], object]]:
    """What is waited for with a store of so many tiers, of the newest save's ticket."""

    def wait(level: str) -> None:
        newest = ticket()
        assert newest is not None
        newest.wait(level, 1200)

    def durable() -> None:
        wait("committed")
        wait("durable")

    return {DURABLE: durable} if tiers == 1 else {STAGED: lambda: wait("staged"), DURABLE_TWICE: durable}


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _save(contender: Contender, step: int, stall: Table | None, total: Table | None) -> None:
    """Saves and waits; without tables nothing is counted."""
    contender.prepare(step)
    settle()
    began = time.perf_counter()
    contender.save(step)
    if stall is not None:
        stall.add(contender.name, time.perf_counter() - began)
    for milestone, wait in contender.until.items():
        wait()
        if total is not None:
            total.add(_row(contender, milestone), time.perf_counter() - began)


def _row(contender: Contender, milestone: str) -> str:
    return f"{contender.name}: {milestone}"
