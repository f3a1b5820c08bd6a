"""``du --explain``: what a checkpoint's bytes are on each tier, what ways to store them smaller would save, and what to write for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from rich.text import Text

from tierstore.cli.find import find_checkpoint
from tierstore.cli.options import Cli
from tierstore.cli.render import plain_table, wrapped
from tierstore.config_models import StoreConfig
from tierstore.config_tiers import TierConfig
from tierstore.config_uris import is_local
from tierstore.errors import UsageError
from tierstore.tiers.catalog import Catalog, CheckpointInfo
from tierstore.tiers.explain_usage import LOSSLESS, OPTIONS, Explained, Storing, explain_usage, stored_nbytes
from tierstore.tiers.usage import measure_run
from tierstore.tiers.usage_classes import CLASSES
from tierstore.units import format_size

__all__ = ["explain_checkpoint"]

_LEAST_SAMPLE = 1 << 20
_WORTH = 0.01
"""An option is written down where it saves at least this part of a checkpoint."""
_REST = "index, objects, rest"


def explain_checkpoint(cli: Cli, ref: str, sample_nbytes: int) -> int:
    """Explains one checkpoint, and shows it.

    Raises:
        UsageError: The sample is too small, or the reference can't be read.
        NotFoundError: There is no such checkpoint.
        StorageError, IntegrityError: It can't be read.
    """
    if sample_nbytes < _LEAST_SAMPLE:
        raise UsageError(f"a sample of {format_size(sample_nbytes)} tells nothing", hint="give --sample 1MiB or more")
    with cli.session() as session, ExitStack() as held:
        catalog, info = find_checkpoint(session, ref)
        usage = session.run(measure_run(session.tiers, info.run))
        replica = session.open_replica(info)
        held.callback(replica.let_go)
        before = None
        if (older := _before(catalog, info)) is not None:
            before = session.open_replica(older)
            held.callback(before.let_go)
        found = session.run(explain_usage(replica, sample_nbytes=sample_nbytes, before=before))
        kinds = usage.by_kind(info.attempt, everything=False)
        count = sum(1 for one in catalog.checkpoints if not one.hidden)
        names = [name for name in session.tiers.names if name not in usage.unreachable]
        config = session.config
    shards = kinds.get("shard", {})
    rest = {tier: sum(row.get(tier, 0) for kind, row in kinds.items() if kind != "shard") for tier in names}
    _show_classes(cli, info, found, config, {tier: shards.get(tier, 0) for tier in names}, rest)
    _show_options(cli, found)
    _show_notes(cli, found, replica.tiers)
    _show_advice(cli, found, config, shards, count)
    return 0


def _before(catalog: Catalog, info: CheckpointInfo) -> CheckpointInfo | None:
    older = [c for c in catalog.checkpoints if c.step < info.step and not (c.hidden or c.superseded) and c.loadable]
    return older[-1] if older else None


def _storing(tier: TierConfig) -> Storing:
    """How a tier stores its shards by the configuration."""
    return Storing(
        zstd=tier.codec.name == "zstd",
        master_once=tier.stores_master_once,
        unchanged_once=tier.stores_unchanged_once,
        quantise=None if tier.quantise is None else tier.quantise.scheme,
    )


# ---- what is where


def _show_classes(
    cli: Cli, info: CheckpointInfo, found: Explained, config: StoreConfig, shards: Mapping[str, int], rest: Mapping[str, int]
) -> None:
    held = [tier for tier in shards if shards[tier]]
    divided = {tier: stored_nbytes(found, _storing(config.tier(tier)), shards[tier]) for tier in held}
    guessed = {tier for tier in held if shards[tier] != found.shard_nbytes}
    columns = held if len(held) <= 4 else held[:3] + held[-1:]

    def cells(values: Mapping[str, int]) -> list[str]:
        return [("~" if tier in guessed else "") + format_size(values[tier]) for tier in columns]

    table = plain_table(
        "BYTES OF", ("TENSORS", "right"), ("RAW", "right"), *((tier.upper(), "right") for tier in columns), fold=("BYTES OF",)
    )
    for one in found.classes:
        on = {tier: divided[tier][one.name] for tier in held}
        table.add_row(CLASSES[one.name], f"{one.tensors:,}", format_size(one.nbytes), *cells(on))
        cli.terminal.emit(
            {
                "type": "class",
                "class": one.name,
                "tensors": one.tensors,
                "nbytes": one.nbytes,
                "unchanged_nbytes": one.unchanged_nbytes,
                "rounded_nbytes": round(one.nbytes * one.rounded_share),
                "tied": one.tied,
                "tied_nbytes": one.tied_nbytes,
                "sampled_nbytes": one.sampled_nbytes,
                "zstd_ratio": one.ratios.get((True, None)),
                "tiers": on,
            }
        )
    heads = {tier: shards[tier] - sum(divided[tier].values()) + rest.get(tier, 0) for tier in held}
    table.add_row(_REST, "", format_size(found.shard_nbytes - found.tensor_nbytes), *(format_size(max(0, heads[t])) for t in columns))
    whole = {tier: shards[tier] + rest.get(tier, 0) for tier in held}
    count = sum(one.tensors for one in found.classes)
    table.add_row("all", f"{count:,}", format_size(found.shard_nbytes), *(format_size(whole[t]) for t in columns), style="bold")
    cli.terminal.show(Text(f"{info.run}@{info.step}", style="bold"), table)
    if guessed:
        cli.terminal.show(wrapped("~ is what a packed or partial copy's bytes come to by the sample; the sums are exact"))


# ---- what would save how much


def _show_options(cli: Cli, found: Explained) -> None:
    table = plain_table("STORED WITH", ("A CHECKPOINT", "right"), ("SAVES", "right"), "", fold=("STORED WITH", ""))
    table.add_row("as it is", format_size(found.shard_nbytes), "", "")
    for how in OPTIONS:
        if how.quantise and not any(one.name in ("first_moment", "second_moment") for one in found.classes):
            continue
        if found.before is None and how in (Storing(unchanged_once=True), Storing(zstd=True, master_once=True)):
            continue  # there is nothing to compare with: what loses nothing is told without it
        nbytes = found.stored(how)
        best = "the most that loses nothing" if how == LOSSLESS else "loses precision" if how.quantise else ""
        table.add_row(_shown(how, found), format_size(nbytes), _percent(found, nbytes), best, style="bold" if how == LOSSLESS else "")
        cli.terminal.emit(
            {
                "type": "option",
                "codec": "zstd" if how.zstd else "raw",
                "master_once": how.master_once,
                "unchanged_once": how.unchanged_once,
                "quantise": how.quantise,
                "nbytes": nbytes,
                "saves": 1 - nbytes / found.shard_nbytes if found.shard_nbytes else 0.0,
            }
        )
    cli.terminal.show("", table)


def _shown(how: Storing, found: Explained) -> str:
    return str(how if found.before is not None else replace(how, unchanged_once=False))


def _percent(found: Explained, nbytes: int) -> str:
    share = 1 - nbytes / found.shard_nbytes if found.shard_nbytes else 0.0
    return f"{100 * share:.1f}%" if share >= 0.0005 else "-"


def _show_notes(cli: Cli, found: Explained, tiers: Sequence[str]) -> None:
    looked, having = found.pairs
    if having:
        told = f"{format_size(found.rounded_nbytes)} of weights are their float32 master, rounded"
        cli.terminal.show("", wrapped(f"{told} ({having} of {looked} that were looked at have one in their shard)"))
    elif looked:
        cli.terminal.show("", wrapped(f"no weight of {looked} that were looked at has a float32 master in its shard"))
    if found.before is not None:
        share = found.unchanged_nbytes / max(1, found.tensor_nbytes)
        cli.terminal.show(wrapped(f"{format_size(found.unchanged_nbytes)} ({share:.0%}) lie in blocks that step {found.before} has too"))
    else:
        cli.terminal.show(wrapped("there is no earlier checkpoint to find unchanged blocks in"))
    tied = sum(one.tied for one in found.classes)
    if tied:
        nbytes = format_size(sum(one.tied_nbytes for one in found.classes))
        told = "1 further name of a tied tensor takes" if tied == 1 else f"{tied:,} further names of tied tensors take"
        cli.terminal.show(wrapped(f"{told} no room: {nbytes} are stored once"))
    cli.terminal.show(wrapped(f"measured with the codec itself on {format_size(found.sampled_nbytes)}, read from {' or '.join(tiers[:2])}"))
    cli.terminal.emit(
        {
            "type": "explained",
            "nbytes": found.shard_nbytes,
            "sampled_nbytes": found.sampled_nbytes,
            "unchanged_nbytes": found.unchanged_nbytes,
            "rounded_nbytes": found.rounded_nbytes,
            "before": found.before,
            "tied": tied,
        }
    )


# ---- what to write


def _show_advice(cli: Cli, found: Explained, config: StoreConfig, shards: Mapping[str, int], count: int) -> None:
    best = _best(found)
    exact = [tier for tier in config.tiers if tier.quantise is None]  # the authority is
    places = [tier for tier in exact if not is_local(tier.uri)] or exact[-1:]
    open_ones = [tier for tier in places if _adds(_storing(tier), best)]
    if best == Storing():
        cli.terminal.show("", wrapped("nothing that loses nothing saves 1% of this checkpoint"))
        return
    if not open_ones:
        told = ", ".join(tier.name for tier in places)
        cli.terminal.show("", wrapped(f"{told} {'has' if len(places) == 1 else 'have'} the best of what loses nothing already"))
        return
    nbytes = found.stored(best)
    size = f"{format_size(found.shard_nbytes)} become {format_size(nbytes)} a checkpoint"
    many = f", {format_size(count * found.shard_nbytes)} of all {count} become about {format_size(count * nbytes)}" if count > 1 else ""
    cli.terminal.show("", wrapped(f"To write into the configuration ({size}{many}):"), "")
    lines = ["tiers:"]
    for tier in open_ones:
        lines += [f"  - name: {tier.name}", *(f"    {line}" for line in _yaml(best))]
    for line in lines:
        cli.terminal.show(Text(line))
    cli.terminal.emit({"type": "advice", "tiers": [t.name for t in open_ones], "yaml": "\n".join(lines) + "\n", "nbytes": nbytes})


def _best(found: Explained) -> Storing:
    """The options that lose nothing and are worth it, each in addition to those before it."""
    chosen, nbytes = Storing(), found.shard_nbytes
    for more in (Storing(zstd=True), Storing(master_once=True), Storing(unchanged_once=True)):
        tried = Storing(
            zstd=chosen.zstd or more.zstd,
            master_once=chosen.master_once or more.master_once,
            unchanged_once=chosen.unchanged_once or more.unchanged_once,
        )
        if nbytes - found.stored(tried) >= _WORTH * found.shard_nbytes:
            chosen, nbytes = tried, found.stored(tried)
    return chosen


def _adds(now: Storing, best: Storing) -> bool:
    return any(getattr(best, option) and not getattr(now, option) for option in ("zstd", "master_once", "unchanged_once"))


def _yaml(best: Storing) -> Iterator[str]:
    if best.zstd:
        yield "codec: zstd"
    if best.master_once:
        yield "master_once: true"
    if best.unchanged_once:
        yield "unchanged_once: true"
