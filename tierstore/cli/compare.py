"""``diff``: two checkpoints by their digests, tensor by tensor, and object by object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from tierstore.cli.find import find_checkpoint
from tierstore.cli.options import Cli
from tierstore.cli.render import facts_table, plain_table
from tierstore.names import OBJECTS
from tierstore.tiers.compare import TensorDiff, compare_data, compare_indexes, compare_trees
from tierstore.tiers.replica import Replica
from tierstore.tiers.session import Session
from tierstore.units import format_size

__all__ = ["diff"]

_MOST = 50
_STYLES = {"changed": "yellow", "unknown": "dim", "reshaped": "bold yellow", "added": "green", "removed": "red", "same": ""}
_WORDS = {
    "same": "the same",
    "changed": "changed",
    "unknown": "not told apart",
    "reshaped": "of another dtype or shape",
    "added": "only in the second",
    "removed": "only in the first",
}


def diff(
    cli: Cli,
    first: Annotated[str, typer.Argument(metavar="A", help="RUN@12000, RUN@latest, RUN@best:METRIC, RUN@tag:TAG.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one; it may be of another run.")],
    data: Annotated[bool, typer.Option("--data", help="Read the tensors that their digests can't tell apart.")] = False,
    everything: Annotated[bool, typer.Option("--all", help=f"Show all tensors that differ, not the first {_MOST}.")] = False,
) -> int:
    """Compare two checkpoints: tensors that changed, came or went, and objects. Reads digests only, unless --data."""
    cli.refuse_names("diff reads the nearest good copies")
    with cli.session() as session:
        left, right = _open(session, first), _open(session, second)
        found = list(compare_indexes(left.index, right.index))
        if data:
            found = [_settle(session, left, right, one) if one.change == "unknown" else one for one in found]
        objects = session.run(_objects(left, right))
    _tell(cli, left, right, found, objects, everything)
    return 0


def _open(session: Session, reference: str) -> Replica:
    _, info = find_checkpoint(session, reference)
    return session.open_replica(info)


def _settle(session: Session, left: Replica, right: Replica, found: TensorDiff) -> TensorDiff:
    # A long index waits for its rows: it is asked here, not on the event loop.
    one, other = left.index.find(found.name), right.index.find(found.name)
    return session.run(compare_data(left, one, right, other, found))


async def _objects(left: Replica, right: Replica) -> list[tuple[str, Any, Any]]:
    """Where the objects differ; of ranks that have the same, once. A path of another rank than 0 begins with ``rank N:``."""
    digests = [next((f.digest for f in one.manifest.files if f.name == OBJECTS), "") for one in (left, right)]
    if digests[0] == digests[1]:
        return []
    mine, theirs = await left.object_ranks(), await right.object_ranks()
    seen: set[tuple[int, int]] = set()
    found: dict[str, tuple[str, Any, Any]] = {}
    for rank in sorted({*mine} & {*theirs}):
        pair = mine[rank], theirs[rank]
        if pair not in seen:
            seen.add(pair)
            for path, a, b in compare_trees(await left.encoded_tree(rank), await right.encoded_tree(rank)):
                name = path if rank == 0 else f"rank {rank}: {path}"
                if rank == 0 or (path, a, b) != found.get(path):
                    found[name] = (path, a, b)
    for ranks, word in (({*mine} - {*theirs}, "removed"), ({*theirs} - {*mine}, "added")):
        for rank in sorted(ranks):
            found[f"rank {rank}"] = ("", "all its objects" if word == "removed" else None, "all its objects" if word == "added" else None)
    return [(name, a, b) for name, (_, a, b) in found.items()]


def _tell(
    cli: Cli, left: Replica, right: Replica, found: Sequence[TensorDiff], objects: Sequence[tuple[str, Any, Any]], everything: bool
) -> None:
    for one in found:
        value = {"type": "tensor_diff", "name": one.name, "change": one.change, "nbytes": one.nbytes, "dtype": one.dtype}
        cli.terminal.emit({**value, "shape": one.shape, "why": one.why})
    for path, a, b in objects:
        cli.terminal.emit({"type": "object_diff", "path": path, "first": a, "second": b})
    sums = {change: [one for one in found if one.change == change] for change in _WORDS}
    told = [f"{len(ones)} {_WORDS[change]} ({format_size(sum(o.nbytes for o in ones))})" for change, ones in sums.items() if ones]
    cli.terminal.emit(
        {
            "type": "diff",
            "first": {"run": left.info.run, "step": left.info.step, "save_id": left.info.attempt.save_id},
            "second": {"run": right.info.run, "step": right.info.step, "save_id": right.info.attempt.save_id},
            "tensors": {change: len(ones) for change, ones in sums.items()},
            "nbytes": {change: sum(o.nbytes for o in ones) for change, ones in sums.items()},
            "objects": len(objects),
        }
    )
    cli.terminal.show(facts_table([("first", _name(left)), ("second", _name(right))]))
    differ = [one for one in found if one.change != "same"]
    if differ:
        table = plain_table("CHANGE", "TENSOR", "DTYPE", ("SIZE", "right"), "WHY", fold=("TENSOR", "WHY"))
        for one in differ if everything else differ[:_MOST]:
            table.add_row(Text(one.change, style=_STYLES[one.change]), one.name, one.dtype, format_size(one.nbytes), one.why)
        cli.terminal.show("", table)
        if len(differ) > _MOST and not everything:
            cli.terminal.show(Text(f"… {len(differ) - _MOST:,} more; --all shows them", style="dim"))
    if objects:
        cli.terminal.show("", facts_table([(path or "objects", f"{_brief(a)} → {_brief(b)}") for path, a, b in objects[:_MOST]]))
        if len(objects) > _MOST:
            cli.terminal.show(Text(f"… {len(objects) - _MOST:,} more; --json has them", style="dim"))
    cli.terminal.show(Text(f"tensors: {', '.join(told) or 'none'}; objects: {f'{len(objects)} differ' if objects else 'the same'}"))
    if sums["unknown"]:
        cli.terminal.show(Text("not told apart: their blocks' digests do not say; --data reads them", style="dim"))


def _name(replica: Replica) -> str:
    info = replica.info
    ranks = f"{info.world_size} rank{'s' if info.world_size > 1 else ''}"
    return f"{info.run}@{info.step}, {len(replica.index)} tensors, {format_size(info.nbytes)} by {ranks}"


def _brief(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:36]}…"
