"""``adopt``: a checkpoint that tierstore did not write becomes one of the store's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from tierstore.cli.options import Cli, storage_options
from tierstore.cli.progress import tier_bars
from tierstore.cli.render import plain_table
from tierstore.errors import UsageError
from tierstore.storage.loop import EventLoop
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.state.adopt_plan import Adoption

__all__ = ["adopt"]

_SHOWN = 20


def adopt(
    cli: Cli,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, a file or a URI: Hugging Face, DCP, torch.save, safetensors.")],
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="The step that it will have.")],
    format: Annotated[
        str, typer.Option("--format", metavar="auto|safetensors|paddle|dcp|torch", help="What it is, where that leaves a choice.")
    ] = "auto",
    rename: Annotated[str | None, typer.Option("--rename", metavar="FILE", help="Renaming rules (YAML); names only.")] = None,
    skip_objects: Annotated[
        bool, typer.Option("--skip-objects", help="Leave out objects of foreign classes instead of refusing them.")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Hard links instead of copies, where possible: the source must never be changed in place.")
    ] = False,
    supersede: Annotated[bool, typer.Option("--supersede", help="Also where the step is committed already.")] = False,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="A tag for it; repeatable.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="K=V", help="An option of SOURCE's storage, e.g. endpoint_url=…")
    ] = None,
) -> int:
    """Take in a foreign checkpoint; safetensors files are taken as they are. -n only shows what it would become."""
    cli.refuse_names("adopt writes to the nearest tier and goes on from there")
    where: dict[str, Any] = {"options": storage_options(cli, source, option or []) or None, "format": format, "skip_objects": skip_objects}
    config = cli.load()
    if config.run is None:
        raise UsageError(
            "adopt needs the name of a run", hint="name it with --run RUN, or with run: in the configuration; it may be a new one"
        )
    if cli.options.dry_run:
        return _plan(cli, config.run, source, step, rename, where)
    from tierstore.store import Store  # torch: only the verbs that move tensors need it

    with tier_bars(cli.terminal, {}) as progress, Store(config, clock=cli.clock, progress=progress) as store:
        ticket = store.adopt(
            source, step=step, rename=rename, link=link, tags=tag, if_exists="supersede" if supersede else "refuse", **where
        )
        ticket.wait("committed", None)
        store.sync()
        run, nbytes = store.run, next(c.nbytes for c in reversed(store.checkpoints()) if c.step == step)
    cli.terminal.emit({"type": "adopted", "run": run, "step": step, "save_id": ticket.attempt.save_id, "nbytes": nbytes, "source": source})
    cli.terminal.show(Text(f"adopted {source} as {run}@{step}, {format_size(nbytes)}"))
    return 0


def _plan(cli: Cli, run: str, source: str, step: int, rename: str | None, where: dict[str, Any]) -> int:
    """Looks at the source only: the store need not be there yet."""
    from tierstore.state.adopt_plan import plan_adoption
    from tierstore.state.foreign.opening import look_at

    loop = EventLoop()
    try:
        foreign = loop.run(look_at(source, where.pop("options"), **where))
        try:
            adoption = loop.run(plan_adoption(foreign, rename=rename))
        finally:
            loop.run(foreign.close())
    finally:
        loop.close()
    _show(cli, adoption)
    cli.terminal.emit(
        {
            "type": "adoption",
            "run": run,
            "step": step,
            "source": foreign.files.uri,
            "format": foreign.format,
            "tensors": adoption.tensors,
            "nbytes": adoption.nbytes,
            "dropped": adoption.dropped,
            "companions": adoption.companions,
        }
    )
    more = f", {len(adoption.companions)} files beside them" if adoption.companions else ""
    more += f", {len(adoption.dropped)} tensors left out by the rules" if adoption.dropped else ""
    cli.terminal.show(
        Text(f"would adopt {source} ({foreign.format}) as {run}@{step}: {adoption.tensors:,} tensors, {format_size(adoption.nbytes)}{more}")
    )
    return 0


def _show(cli: Cli, adoption: Adoption) -> None:
    table = plain_table(("SHARD", "right"), "FROM", ("SIZE", "right"), ("TENSORS", "right"), fold=("FROM",))
    last = len(adoption.shares) - 1
    for rank, share in enumerate(adoption.shares):
        what = share.origin or ("files beside the tensors" if rank == last and adoption.companions else "tensors, streamed")
        cli.terminal.emit(
            {"type": "shard", "rank": rank, "origin": share.origin or None, "nbytes": share.nbytes, "tensors": len(share.tensors)}
        )
        if rank < _SHOWN:
            table.add_row(str(rank), what, format_size(share.nbytes), str(len(share.tensors)))
    cli.terminal.show(table)
    if last >= _SHOWN:
        cli.terminal.show(Text(f"… {last + 1 - _SHOWN:,} shards are not shown", style="dim"))
