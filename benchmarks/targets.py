"""The targets of the speed work, judged by what one run measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from measure import Row, Table, ratio

Tables = Mapping[str, Table]
Measure = Callable[[Tables], "tuple[float, str] | None"]

OURS, MEMORY, ALONE = "tierstore", "tierstore, memory tier before the disk", "tierstore, persist alone (image to disk)"
IN_PLACE = "tierstore, in place"
PACKED, QUANTISED = "codec: zstd, master_once", "codec: zstd, master_once, quantise: q8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound for a figure.

    Attributes:
        what: The operation.
        bound: The figure's bound; None: it is only told, to compare.
        most: The figure may be at most that; else it must be at least that.
        measure: The figure and whom it was measured against; None where a part of it is missing.
        unit: `x` for a ratio.
    """

    what: str
    bound: float | None
    measure: Measure
    most: bool = False
    unit: str = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    what: str
    target: str
    measured: str
    against: str
    met: bool | None
    """None: not measured, or there is no bound."""

    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, "target": self.target, "measured": self.measured, "against": self.against, "met": self.met}

    @property
    def word(self) -> str:
        return {True: "met", False: "MISSED", None: "not measured" if self.measured == "-" else ""}[self.met]


def judged(tables: Iterable[Table]) -> list[Verdict]:
    """All targets, in their order."""
    by_key = {table.key: table for table in tables}
    return [_judge(target, by_key) for target in TARGETS]


def lines(verdicts: Iterable[Verdict]) -> list[str]:
    """The verdicts as a table of at most 100 columns."""
    out = [f"{'target':<57} {'bound':>9} {'measured':>9}  verdict"]
    for verdict in verdicts:
        out.append(f"{verdict.what:<57} {verdict.target:>9} {verdict.measured:>9}  {verdict.word}")
        if verdict.against:
            out.append(f"    against {verdict.against}"[:100])
    return out


def _judge(target: Target, tables: Tables) -> Verdict:
    sign = "≤" if target.most else "≥"
    found = target.measure(tables)
    bound = "" if target.bound is None else f"{sign} {target.bound:g} {target.unit}"
    if found is None:
        return Verdict(what=target.what, target=bound, measured="-", against="", met=None)
    value, against = found
    met = None if target.bound is None else value <= target.bound if target.most else value >= target.bound
    return Verdict(what=target.what, target=bound, measured=f"{value:.2f} {target.unit}", against=against, met=met)


def over(key: str, ours: str | tuple[str, ...], others: Callable[[Row], bool]) -> Measure:
    """How many times as long the fastest of the others takes as ours, by turns: over 1 is faster than all of them.

    Args:
        key: The table.
        ours: Our row, or several of which the faster counts.
        others: Says which rows are meant.
    """

    def measure(tables: Tables) -> tuple[float, str] | None:
        own = _best(tables.get(key), lambda row: row.name in ((ours,) if isinstance(ours, str) else ours))
        best = _best(tables.get(key), others)
        if own is None or best is None:
            return None
        return ratio(best, own), f"{best.name} {best.median:.3f} s; {own.name} {own.median:.3f} s"

    return measure


def under(key: str, ours: str | tuple[str, ...], others: Callable[[Row], bool]) -> Measure:
    """How many times as long ours takes as the fastest of the others."""
    inner = over(key, ours, others)

    def measure(tables: Tables) -> tuple[float, str] | None:
        found = inner(tables)
        return None if found is None else (1 / found[0], found[1])

    return measure


def value(key: str, *names: str, scale: float = 1.0) -> Measure:
    """The worst median of these rows."""

    def measure(tables: Tables) -> tuple[float, str] | None:
        table = tables.get(key)
        rows = [row for row in table.measured() if row.name in names] if table else []
        if not rows:
            return None
        worst = max(rows, key=lambda row: row.median)
        return worst.median * scale, worst.name

    return measure


def _best(table: Table | None, wanted: Callable[[Row], bool]) -> Row | None:
    rows = [row for row in table.measured() if wanted(row)] if table else []
    return min(rows, key=lambda row: row.median, default=None)


def named(*names: str, exact: bool = False) -> Callable[[Row], bool]:
    return lambda row: row.name in names if exact else row.name.startswith(names)


def of_kind(kind: str) -> Callable[[Row], bool]:
    return lambda row: row.kind == kind


_RAW = named("raw O_DIRECT, ")
_DCP = named("DCP ")
_S3 = ("tierstore (s3fs)", "tierstore, client: direct")

TARGETS = [
    Target(
        what="stall, second and later: of one warm memcpy", bound=1.3, most=True, measure=under("save.stall", OURS, named("warm memcpy"))
    ),
    Target(
        what="stall with a memory tier (/dev/shm): of one warm memcpy",
        bound=1.3,
        most=True,
        measure=under("save.stall", MEMORY, named("warm memcpy")),
    ),
    Target(
        what="stall: DCP async_save blocks longer", bound=3, measure=over("save.stall", OURS, named("DCP async_save, thread", exact=True))
    ),
    Target(what="stall: DCP async_save's best blocks longer", bound=None, measure=over("save.stall", OURS, named("DCP async_save"))),
    Target(what="stall: torch.save blocks longer", bound=10, measure=over("save.stall", OURS, named("torch.save"))),
    Target(what="persist with SHA-256: share of raw O_DIRECT's speed, warm", bound=0.8, measure=over("persist.warm", ALONE, _RAW)),
    Target(what="the same, fresh memory", bound=0.8, measure=over("persist.fresh", ALONE, _RAW)),
    Target(what="the same with the copy of the state, warm", bound=None, measure=over("persist.warm", OURS, _RAW)),
    Target(what="persist: the best peer at its best takes longer", bound=1.15, measure=over("persist.warm", OURS, of_kind("peer"))),
    Target(what="persist: the best peer, fresh memory", bound=2, measure=over("persist.fresh", OURS, of_kind("peer"))),
    Target(what="persist: the best peer followed by SHA-256", bound=2, measure=over("persist.warm.hashed", OURS, of_kind("peer"))),
    Target(what="cold load in place: share of raw O_DIRECT's speed", bound=0.8, measure=over("load.cold", IN_PLACE, _RAW)),
    Target(
        what="cold load: safetensors.load_file, touched, takes longer",
        bound=1,
        measure=over("load.cold", IN_PLACE, named("safetensors load_file, touched")),
    ),
    Target(
        what="cold load: torch.load takes longer",
        bound=2,
        measure=over("load.cold", IN_PLACE, lambda row: row.name == "torch.load"),
    ),
    Target(what="cold load: DCP's best takes longer", bound=1.2, measure=over("load.cold", IN_PLACE, _DCP)),
    Target(what="upload to S3: share of the best raw client's speed", bound=0.9, measure=over("s3.upload", _S3, of_kind("limit"))),
    Target(what="upload to S3: DCP FsspecWriter takes longer", bound=2, measure=over("s3.upload", _S3, named("DCP Fsspec"))),
    Target(what="load from S3: share of the best raw client's speed", bound=0.9, measure=over("s3.load", _S3, of_kind("limit"))),
    Target(what="load from S3: DCP FsspecReader takes longer", bound=3, measure=over("s3.load", _S3, named("DCP Fsspec"))),
    Target(what="rows 1/8 from S3 behind 20 ms: FsspecReader takes longer", bound=5, measure=over("s3.rows", _S3, named("DCP Fsspec"))),
    Target(
        what="promotion to S3 with codec zstd + master_once: of raw",
        bound=1.0,
        most=True,
        measure=under("packed.promote", PACKED, named("raw", exact=True)),
    ),
    Target(
        what="load from S3 with codec zstd + master_once: of raw",
        bound=1.1,
        most=True,
        measure=under("packed.load", PACKED, named("raw", exact=True)),
    ),
    Target(
        what="promotion to S3 with quantise q8: of raw",
        bound=1.0,
        most=True,
        measure=under("packed.promote", QUANTISED, named("raw", exact=True)),
    ),
    Target(what="extra host memory of a save beyond the image", bound=64, most=True, unit="MiB", measure=value("save.extra", OURS, MEMORY)),
    Target(what="import tierstore", bound=0.15, most=True, unit="s", measure=value("import", "import tierstore")),
    Target(what="tierstore ls on a local store", bound=0.3, most=True, unit="s", measure=value("import", "tierstore ls, local store")),
]
"""As the issue has them. Where several peers are meant it is the fastest of them that counts."""
