"""``export``: a checkpoint as files that other programs load: a Hugging Face directory, a DCP directory, a `torch.save` file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from tierstore.cli.find import find_checkpoint
from tierstore.cli.options import Cli, storage_options
from tierstore.cli.progress import one_bar
from tierstore.cli.render import plain_table
from tierstore.config_uris import check_outside
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.state.export.exporting import Exported
    from tierstore.state.lazy import Checkpoint

__all__ = ["export"]

_SHOWN = 20


def export(
    cli: Cli,
    ref: Annotated[str, typer.Argument(metavar="REF", help="RUN@12000, RUN@latest …; with --foreign a path or URI.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="A directory or URI (s3://…); with --format torch a file.")],
    format: Annotated[str, typer.Option("--format", metavar="hf|dcp|torch", help="What is written.")] = "hf",
    include: Annotated[list[str] | None, typer.Option("--include", metavar="GLOB", help="Only names like 'model.*'; repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave these names out; repeatable.")] = None,
    strip: Annotated[str, typer.Option("--strip", metavar="PREFIX", help="Take this prefix off, e.g. 'model.'.")] = "",
    rules: Annotated[str | None, typer.Option("--rules", metavar="FILE", help="Renaming rules (YAML).")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Cast floats to bfloat16, float16, float32, float64.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="The longest file of tensors.")] = "5GB",
    tied: Annotated[str, typer.Option("--tied", metavar="once|copy", help="Tied tensors: once, or under each name.")] = "once",
    config_from: Annotated[
        str | None, typer.Option("--config-from", metavar="DIR", help="Copy config.json, tokenizer … from there along.")
    ] = None,
    foreign: Annotated[bool, typer.Option("--foreign", help="REF is a checkpoint that tierstore did not write, read in place.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in TO.")] = False,
    budget: Annotated[str, typer.Option("--budget", metavar="SIZE", help="Memory for it; not for --format torch.")] = "256MiB",
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="K=V", help="An option of TO's storage, e.g. endpoint_url=…")
    ] = None,
) -> int:
    """Export a checkpoint for other programs; reads only what is needed, in bounded memory."""
    cli.refuse_names("export reads the nearest good copy")
    from tierstore.state.export.exporting import ExportOptions  # torch: only this verb needs it

    options: dict[str, Any] = {
        "format": format,
        "include": tuple(include or ()),
        "exclude": tuple(exclude or ()),
        "strip": strip,
        "rules": rules,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
        "tied": tied,
        "config_from": config_from,
        "overwrite": overwrite,
        "budget": budget,
    }
    wanted = ExportOptions(**options)
    lent = storage_options(cli, to, option or [], configured=not foreign)
    given = storage_options(cli, ref, option or [], configured=False) if foreign else {}
    if not foreign:
        check_outside(to, {tier.name: tier.uri for tier in cli.load().tiers})
    with _opened(cli, ref, given if foreign else None) as (checkpoint, what), one_bar(cli.terminal, "export") as progress:
        done = checkpoint.export(to, wanted, storage_options=lent, progress=progress, dry_run=cli.options.dry_run)
    _tell(cli, done, what)
    return 0


@contextmanager
def _opened(cli: Cli, ref: str, foreign: dict[str, Any] | None) -> Iterator[tuple[Checkpoint, str]]:
    """The checkpoint, and what messages call it. `foreign`: the options to open a foreign one with."""
    from tierstore.state.foreign.opening import open_foreign
    from tierstore.state.lazy import Checkpoint

    if foreign is not None:
        with open_foreign(ref, options=foreign or None) as checkpoint:
            yield checkpoint, ref
        return
    with cli.session() as session:
        _, info = find_checkpoint(session, ref)
        replica = session.open_replica(info)
        yield Checkpoint(replica, session.run), f"{info.run}@{info.step}"


def _tell(cli: Cli, done: Exported, what: str) -> None:
    table = plain_table("FILE", ("SIZE", "right"), ("TENSORS", "right"), fold=("FILE",))
    for file in done.files:
        cli.terminal.emit({"type": "file", "name": file.name, "nbytes": file.nbytes, "tensors": file.tensors})
    shown = done.files if len(done.files) <= _SHOWN else (*done.files[: _SHOWN - 1], done.files[-1])
    for file in shown:
        table.add_row(file.name, format_size(file.nbytes), str(file.tensors) if file.tensors else "-")
    cli.terminal.emit(
        {
            "type": "export",
            "checkpoint": what,
            "uri": done.uri,
            "format": done.format,
            "tensors": done.tensors,
            "nbytes": done.nbytes,
            "tied": done.tied,
            "left_out": done.left_out,
            "components": done.components,
            "dry_run": cli.options.dry_run,
        }
    )
    cli.terminal.show(table)
    if len(shown) < len(done.files):
        cli.terminal.show(Text(f"… {len(done.files) - len(shown):,} files are not shown", style="dim"))
    if done.tied:
        name, kept = next(iter(done.tied.items()))
        become = "lead to another tensor's bytes" if done.format == "dcp" else "are left out, as they are tied"
        cli.terminal.show(Text(f"{len(done.tied):,} names {become}: {name} is {kept}", style="dim"))
    if done.components:
        name, parts = next(iter(done.components.items()))
        count = len(done.components)
        subject = "1 sparse tensor is written by its" if count == 1 else f"{count:,} sparse tensors are written by their"
        what_is = f"{subject} components: {name} as {', '.join(parts)}"
        cli.terminal.show(Text(f"{what_is} (--format torch writes sparse tensors)", style="dim"))
    if done.left_out:
        cli.terminal.show(Text(f"{len(done.left_out):,} stored tensors were not chosen", style="dim"))
    did = "would write" if cli.options.dry_run else "wrote"
    size = f"{done.tensors:,} tensors, {format_size(done.nbytes)} in {len(done.files):,} {'file' if len(done.files) == 1 else 'files'}"
    cli.terminal.show(Text(f"{did} {what} as {done.format}: {size}, to {done.uri}"))
    if done.format == "hf" and "config.json" not in (file.name for file in done.files):
        cli.terminal.say("no config.json goes along, which transformers asks for: --config-from DIR copies one", "yellow")
