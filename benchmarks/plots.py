"""Draws the pictures of docs/performance.md from the results: docs/images/bench-*.png and .svg.

python benchmarks/plots.py [RESULTS.json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Row, Table
from run import LATEST, tables_of

IMAGES = Path(__file__).parents[1] / "docs" / "images"
_OURS, _LOSSY, _PEER, _LIMIT = "#0b6e4f", "#7fbfa5", "#8d99ae", "#d9a441"
_KINDS = {_OURS: "tierstore", _LOSSY: "tierstore, with a loss", _PEER: "peers", _LIMIT: "limits"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A bar for each row of a table; the shorter the faster where it shows seconds."""

    name: str
    key: str
    title: str
    unit: str = "seconds (median; the line: fastest and slowest)"
    scale: float = 1.0
    suffix: str = " s"
    log: bool = False


PICTURES = [
    Picture(name="stall", key="save.stall", title="How long a save keeps training"),
    Picture(name="persist-warm", key="persist.warm", title="From the call until synced on the disk, memory warm"),
    Picture(name="persist-fresh", key="persist.fresh", title="From the call until synced on the disk, memory fresh"),
    Picture(name="load-cold", key="load.cold", title="Load from a cold local disk"),
    Picture(name="s3-upload", key="s3.upload", title="Upload to an S3 server on the same cores"),
    Picture(name="s3-load", key="s3.load", title="Load everything from S3"),
    Picture(name="s3-rows", key="s3.rows", title="One rank of eight loads its rows from S3, 20 ms a request"),
    Picture(
        name="codec-left",
        key="codec.state.left",
        title="What is left of AdamW's state (bf16 weights, fp32 master, m, v)",
        unit="percent of the raw bytes",
        suffix=" %",
    ),
    Picture(name="codec-encode", key="codec.state.encode.1", title="Encoding AdamW's state, seconds of the processor"),
    Picture(name="codec-decode", key="codec.state.decode.1", title="Decoding AdamW's state, seconds of the processor"),
    Picture(name="packed-promote", key="packed.promote", title="Promotion from the disk to an S3 server on the same cores"),
    Picture(name="packed-load", key="packed.load", title="Load everything from S3, packed and raw"),
    Picture(
        name="sizes-dense",
        key="sizes.dense",
        title="A whole checkpoint of AdamW's state, dense layers",
        unit="bytes a parameter, of 14",
        suffix=" B",
    ),
    Picture(
        name="quantise-drift",
        key="quantise.drift",
        title="Resumed from quantised moments: drift of all parameters",
        unit="distance from the exact resume, of the way since the checkpoint (median; the line: all seeds)",
        suffix="",
        log=True,
    ),
    Picture(
        name="quantise-rows",
        key="quantise.rows",
        title="The same of an embedding with rows that never occur",
        unit="distance from the exact resume, of the way since the checkpoint (median; the line: all seeds)",
        suffix="",
        log=True,
    ),
]


def draw(picture: Picture, table: Table, folder: Path) -> None:
    """Writes the PNG and the SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "svg.hashsalt": "tierstore", "svg.fonttype": "none", "font.family": "DejaVu Sans"})
    rows = sorted(table.measured(), key=lambda row: row.median, reverse=True)
    figure, axes = plt.subplots(figsize=(9.5, 1.5 + 0.34 * len(rows)), layout="constrained")
    medians = [row.median for row in rows]
    spread = [[m - min(row.values) for m, row in zip(medians, rows, strict=True)], [max(r.values) - r.median for r in rows]]
    axes.barh(
        range(len(rows)), medians, xerr=spread, color=[_color(row) for row in rows], height=0.7, error_kw={"ecolor": "#333333", "lw": 1}
    )
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", length=0)
    widest = max(max(row.values) for row in rows)
    for at, row in enumerate(rows):
        beside = max(row.values) * 1.06 if picture.log else max(row.values) + widest * 0.012
        axes.text(beside, at, f"{_figure(row.median)}{picture.suffix}", va="center", fontsize=10)
    if picture.log:
        axes.set_xscale("log")
        axes.set_xlim(min(min(row.values) for row in rows) / 2, widest * 3)
    else:
        axes.set_xlim(0, widest * 1.12)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(picture.unit)
    figure.suptitle(picture.title, x=0.008, ha="left", fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    kinds = {_color(row) for row in rows}
    shown = {color: name for color, name in _KINDS.items() if color in kinds}
    if len(shown) > 1:  # below, for it covers figures where the bars are of one length
        handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in shown]
        figure.legend(handles, list(shown.values()), loc="outside lower right", ncols=len(shown), frameon=False, fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"bench-{picture.name}.png", dpi=110, metadata={"Software": ""})
    figure.savefig(folder / f"bench-{picture.name}.svg", metadata={"Date": None})
    plt.close(figure)


def draw_all(document: dict[str, Any], folder: Path, draw_one: Callable[[Picture, Table, Path], None] = draw) -> list[str]:
    """Draws what was measured; returns the names."""
    tables = {table.key: table for table in tables_of(document)}
    drawn = []
    for picture in PICTURES:
        table = tables.get(picture.key)
        if table is not None and table.measured():
            draw_one(picture, table, folder)
            drawn.append(picture.name)
    return drawn


def _color(row: Row) -> str:
    if row.kind == "ours":
        return _LOSSY if row.note.startswith("loses") else _OURS
    return _LIMIT if row.kind == "limit" else _PEER


def _figure(value: float) -> str:
    """Three digits, also where the last ones are zeros."""
    return f"{value:#.3g}".rstrip(".")


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else LATEST
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else IMAGES
    print("pictures:", ", ".join(draw_all(json.loads(source.read_text(encoding="utf-8")), folder)))


if __name__ == "__main__":
    main()
