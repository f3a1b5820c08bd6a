"""``df``: how full each tier is, against its limits. Nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tierstore.cli.options import Cli
from tierstore.cli.render import plain_table, wrapped
from tierstore.config import RetentionConfig
from tierstore.tiers.space import SAVE_RESERVE_NBYTES
from tierstore.tiers.tier import Tier
from tierstore.tiers.usage import StoreUsage, measure_stores
from tierstore.units import format_size

__all__ = ["df"]


def df(cli: Cli) -> int:
    """Show how full each tier is: what this store holds there, what is free, and the limits at which retention makes room."""
    with cli.session() as session:
        for name in cli.only:
            session.tiers.get(name)  # a wrong name is answered with the nearest one
        chosen = [tier for tier in session.tiers if not cli.only or tier.name in cli.only]
        usages = session.run(measure_stores(session.tiers, cli.only))
        config = session.config
    policy = config.retention_for(config.run) if config.run else config.retention
    table = plain_table(
        "TIER", ("SIZE", "right"), ("FREE", "right"), ("USE", "right"), ("STORE", "right"), "LIMITS", "STATE", fold=("LIMITS", "STATE")
    )
    for tier in chosen:
        usage = usages[tier.name]
        size, used, free = _room(tier, usage)
        limits, over = _limits(tier, usage, policy)
        state = usage.error or "; ".join(over) or "ok"
        table.add_row(
            tier.name,
            format_size(size) if size is not None else "-",
            format_size(free) if free is not None else "-",
            f"{100 * used / size:.0f}%" if size and used is not None else "-",
            format_size(usage.nbytes) if usage.nbytes is not None else "?",
            "; ".join(limits) or "none",
            Text(state, style="bold red" if usage.error else "yellow" if over else "green"),
        )
        cli.terminal.emit(
            {
                "type": "tier",
                "tier": tier.name,
                "uri": tier.uri,
                "capacity": tier.capacity,
                "total_nbytes": usage.total_nbytes,
                "free_nbytes": usage.free_nbytes,
                "store_nbytes": usage.nbytes,
                "files": usage.files,
                "plain_nbytes": usage.plain_nbytes,
                "reserve_nbytes": SAVE_RESERVE_NBYTES,
                "limits": list(limits),
                "over": list(over),
                "error": usage.error,
            }
        )
    cli.terminal.show(table)
    if any(u.nbytes is not None and _limits(t, u, policy)[1] for t in chosen for u in [usages[t.name]]):
        hint = "over a limit: `tierstore plan` says what can go, `tierstore gc` makes room, `tierstore du` says what takes it"
        cli.terminal.show(wrapped(hint))
    return 0


def _room(tier: Tier, usage: StoreUsage) -> tuple[int | None, int | None, int | None]:
    """(size, used, free) of the tier: of its capacity where it has one, else of its file system, whoever uses that."""
    if tier.capacity is not None and usage.nbytes is not None:
        left = max(0, tier.capacity - usage.nbytes)
        return tier.capacity, usage.nbytes, left if usage.free_nbytes is None else min(left, usage.free_nbytes)
    size, free = usage.total_nbytes, usage.free_nbytes
    return size, size - free if size is not None and free is not None else None, free


def _limits(tier: Tier, usage: StoreUsage, policy: RetentionConfig | None) -> tuple[Sequence[str], Sequence[str]]:
    """The tier's limits in words, and those that are passed."""
    limits: list[str] = []
    over: list[str] = []
    size, used, free = _room(tier, usage)
    rules = (policy.tiers or {}).get(tier.name) if policy else None
    evict = rules.evict if rules else None
    if evict and evict.high_watermark is not None and evict.low_watermark is not None:
        limits.append(f"from {100 * evict.high_watermark:g}% down to {100 * evict.low_watermark:g}%")
        if size and used is not None and used > evict.high_watermark * size:
            over.append(f"over {100 * evict.high_watermark:g}%")
    if evict and evict.min_free_nbytes is not None:
        limits.append(f"{format_size(evict.min_free_nbytes)} stay free")
        if free is not None and free < evict.min_free_nbytes:
            over.append(f"less than {format_size(evict.min_free_nbytes)} free")
    if rules and rules.max_nbytes is not None:
        limits.append(f"at most {format_size(rules.max_nbytes)}")
        if usage.nbytes is not None and usage.nbytes > rules.max_nbytes:
            over.append(f"over {format_size(rules.max_nbytes)}")
    if usage.free_nbytes is not None and usage.free_nbytes < SAVE_RESERVE_NBYTES:
        over.append(f"full: saves leave {format_size(SAVE_RESERVE_NBYTES)} free")
    return limits, over
