"""The suites of `make bench`: which program, at which sizes, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A program `bench_<name>.py`, run in a process of its own.

    Attributes:
        name: After `--only`.
        full: Its arguments at the sizes that figures are quoted of.
        short: The same for a run of some minutes.
        limit_s: Seconds after which it is ended; what it has measured until then counts.
        planned: It takes `--within` and plans its turns for nearly that time: it is done within its limit also in a slow hour, with fewer
            turns, and can make do with less.
        contest: It takes `--without`, so that it can go on without a peer that ended its process.
        takes: Which options of `make bench` it takes.
    """

    name: str
    full: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    limit_s: float = 180
    planned: bool = False
    contest: bool = False
    takes: tuple[str, ...] = ("--nbytes", "--repeat", "--directory")

    @property
    def program(self) -> str:
        return f"bench_{self.name}.py"


def _sized(name: str, full: str, short: str, limit_s: float, *, contest: bool = False) -> Suite:
    """`full` and `short` are a size and a number of repetitions; a contest of that kind is planned."""
    (big, many), (small, few) = full.split(), short.split()
    return Suite(
        name=name,
        full=("--nbytes", big, "--repeat", many),
        short=("--nbytes", small, "--repeat", few),
        limit_s=limit_s,
        planned=contest,
        contest=contest,
    )


SUITES = [
    _sized("save", "2GiB 5", "128MiB 2", 340, contest=True),
    _sized("persist", "2GiB 5", "128MiB 1", 900, contest=True),
    _sized("load", "1GiB 5", "128MiB 1", 440, contest=True),
    _sized("s3", "256MiB 5", "32MiB 1", 330, contest=True),
    Suite(
        name="import",
        full=("--repeat", "7"),
        short=("--repeat", "3"),
        limit_s=100,
        planned=True,
        contest=True,
        takes=("--repeat", "--directory"),
    ),
    Suite(name="scale", full=(), short=("--short",), limit_s=240, takes=()),
    _sized("files", "128MiB 3", "16MiB 1", 60),
    _sized("lightning", "256MiB 3", "32MiB 1", 90),
    _sized("transformers", "64MiB 3", "16MiB 1", 90),
    _sized("engines", "100MB 2", "20MB 1", 120),
    _sized("exchange", "64MiB 2", "16MiB 1", 90),
    Suite(name="index", full=("--short",), short=("--short",), limit_s=90, takes=("--directory",)),
    Suite(
        name="retention",
        full=("--checkpoints", "10000", "--files", "2000", "--nbytes", "64MiB", "--repeat", "2"),
        short=("--checkpoints", "1000", "--files", "200", "--nbytes", "16MiB", "--repeat", "1"),
        limit_s=150,
    ),
    Suite(name="real_model", full=("--repeat", "3"), short=("--repeat", "1"), limit_s=60, takes=("--repeat", "--directory")),
    Suite(
        name="codec",
        full=("--nbytes", "16MiB", "--repeat", "3"),
        short=("--nbytes", "4MiB", "--repeat", "1", "--model", "demo"),
        limit_s=200,
        contest=True,
        takes=("--nbytes", "--repeat"),
    ),
    Suite(
        name="packed",
        full=("--repeat", "5"),
        short=("--repeat", "1", "--model", "demo"),
        limit_s=260,
        planned=True,
        contest=True,
        takes=("--repeat", "--directory"),
    ),
    Suite(name="sizes", short=("--model", "demo"), limit_s=420, takes=("--directory",)),
    _sized("reshard", "64MiB 1", "8MiB 1", 150),
    Suite(name="quantise", short=("--short",), limit_s=600, takes=()),
]
"""In the order in which they run: those that the targets are about first, for the whole run has a limit."""
