"""``doctor``: what the configuration says, whether the tiers answer, and (``--probe``) whether a storage keeps the contract."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from tierstore.cli.options import Cli
from tierstore.cli.render import facts_table, plain_table
from tierstore.clock import Clock
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import AccessError, TierStoreError, UsageError
from tierstore.storage.contract import Storage
from tierstore.storage.loop import EventLoop
from tierstore.storage.opening import open_storage
from tierstore.storage.probe import probe as probe_storage
from tierstore.tiers.opening import default_opener
from tierstore.units import format_duration, format_size

__all__ = ["doctor"]

_SKEW = timedelta(minutes=5)
"""The default of ``retention.gc.max_clock_skew``: beyond it a person should look."""


def doctor(
    cli: Cli,
    probe: Annotated[
        str | None,
        typer.Option(
            "--probe", metavar="URI", help="Try the contract on this storage; leaves nothing. -c FILE lends the options of its tier there."
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="K=V", help="With --probe: an option of the storage, e.g. endpoint_url=…")
    ] = None,
) -> int:
    """Check configuration, tiers, capabilities and clocks; or try the contract on a storage of your own."""
    if probe is not None:
        return _probe(cli, probe, option or [])
    if option:
        raise UsageError("--option goes with --probe", hint="tier options stand in the configuration file")
    config = cli.load()
    _show_config(cli, config)
    loop = EventLoop()
    try:
        looks = [loop.run(_look(tier, config, cli.clock)) for tier in config.tiers]
    finally:
        loop.close()
    return _conclude(cli, config, looks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What was seen of one tier. `skew_s`: how far the storage's clock is ahead of ours, in seconds."""

    tier: TierConfig
    error: TierStoreError | None
    create: bool = False
    checksums: bool = False
    free_nbytes: int | None = None
    skew_s: float | None = None


async def _look(tier: TierConfig, config: StoreConfig, clock: Clock) -> _Look:
    try:
        storage = default_opener(tier, config)
    except TierStoreError as error:
        return _Look(tier=tier, error=error)
    try:
        skew = await _skew_s(storage, clock)
        can = storage.capabilities
        return _Look(
            tier=tier, error=None, create=can.create, checksums=can.checksums, free_nbytes=await storage.free_nbytes(), skew_s=skew
        )
    except TierStoreError as error:
        return _Look(tier=tier, error=error)
    finally:
        await storage.close()


async def _skew_s(storage: Storage, clock: Clock) -> float | None:
    """Writes and removes a small file; compares its time with the middle of the write, by our clock."""
    path = f".tierstore-probe-{secrets.token_hex(8)}/clock"
    before = clock.now()
    await storage.put(path, b"tierstore doctor\n")
    try:
        at = (await storage.stat(path)).modified_at
    finally:
        await storage.delete([path])
    return None if at is None else (at - (before + (clock.now() - before) / 2)).total_seconds()


def _show_config(cli: Cli, config: StoreConfig) -> None:
    shown = config.redacted()
    cli.terminal.emit({"type": "configuration", **shown})
    facts = [
        ("run", config.run or "not named"),
        ("decides", f"{config.authority.name}: its log says what is committed"),
        ("durable at", config.durable_tier.name),
        ("save", _brief(shown.get("save", {}))),
        ("retention", "yes" if config.retention else "none: nothing is deleted"),
    ]
    facts += [
        (f"tier {t['name']}", f"{t['uri']} {_brief({k: v for k, v in t.items() if k not in ('name', 'uri')})}") for t in shown["tiers"]
    ]
    cli.terminal.show(facts_table(facts), "")


def _conclude(cli: Cli, config: StoreConfig, looks: list[_Look]) -> int:
    table = plain_table("TIER", "ANSWERS", "CREATE", "CHECKSUMS", ("FREE", "right"), ("CLOCK", "right"))
    for look in looks:
        cli.terminal.emit(
            {
                "type": "tier",
                "tier": look.tier.name,
                "uri": look.tier.uri,
                "reachable": look.error is None,
                "error": look.error.message if look.error else "",
                "create_if_absent": look.create,
                "checksums": look.checksums,
                "free_nbytes": look.free_nbytes,
                "clock_skew_s": look.skew_s,
            }
        )
        if look.error is not None:
            table.add_row(look.tier.name, Text("no", style="bold red"), "", "", "", "")
            continue
        table.add_row(
            look.tier.name,
            Text("yes", style="green"),
            "yes" if look.create else "no",
            "yes" if look.checksums else "no",
            format_size(look.free_nbytes) if look.free_nbytes is not None else "-",
            _skew_text(look.skew_s),
        )
    cli.terminal.show(table)
    code = 0
    for look in looks:
        if look.error is not None:
            cli.terminal.say(f"error: {look.tier.name}: {look.error.message}", "bold red")
            if look.error.hint:
                cli.terminal.say(f"hint: {look.error.hint}", "cyan")
            code = code or look.error.exit_code
        elif look.tier.name == config.authority.name and not look.create:
            cli.terminal.say(f"error: {look.tier.name} decides what is committed, but can't create if absent", "bold red")
            code = code or 1
        if look.skew_s is not None and abs(look.skew_s) > _SKEW.total_seconds():
            cli.terminal.say(
                f"warning: the clock of {look.tier.name} differs by {format_duration(look.skew_s)}: set this machine's", "yellow"
            )
    return code


def _probe(cli: Cli, uri: str, options: list[str]) -> int:
    given = _options_of(cli, uri)
    for text in options:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"--option {name!r} has no value", hint="write --option endpoint_url=http://127.0.0.1:9000")
        given[name] = value
    loop = EventLoop()
    try:
        storage = open_storage(uri, given)
        try:
            report = loop.run(probe_storage(storage))
        finally:
            loop.run(storage.close())
    finally:
        loop.close()
    table = plain_table("CHECK", "", "SEEN", fold=("SEEN",))
    for check in report.checks:
        cli.terminal.emit({"type": "check", "uri": report.uri, "name": check.name, "ok": check.ok, "detail": check.detail})
        table.add_row(check.name, Text("ok", style="green") if check.ok else Text("FAILS", style="bold red"), check.detail)
    cli.terminal.emit({"type": "probe", "uri": report.uri, "ok": report.ok, "can_be_authority": report.can_be_authority})
    cli.terminal.show(table)
    if report.can_be_authority:
        cli.terminal.show(Text(f"{report.uri} keeps the contract: it can be any tier", style="green"))
    elif report.ok:
        cli.terminal.show(Text(f"{report.uri} can hold copies, but can't decide what is committed", style="yellow"))
    else:
        cli.terminal.show(Text(f"{report.uri} does not keep the contract: do not use it as a tier", style="bold red"))
    if report.checks[0].ok or report.ok:
        return 0 if report.ok else 1
    return AccessError.exit_code


def _options_of(cli: Cli, uri: str) -> dict[str, Any]:
    """With ``-c FILE``: the options of the file's tier in the same place (bucket, host), so that its endpoint and keys are used."""
    if not cli.options.config:
        return {}
    place = uri.split("/")[:3]
    tiers = [tier for tier in cli.load().tiers if "://" in tier.uri and tier.uri.split("/")[:3] == place]
    return dict(tiers[0].options) if tiers else {}


def _skew_text(skew_s: float | None) -> str:
    if skew_s is None:
        return "-"
    return "same" if abs(skew_s) < 2 else f"{'+' if skew_s > 0 else '-'}{format_duration(abs(skew_s))}"


def _brief(values: object) -> str:
    return json.dumps(values, ensure_ascii=False).replace('"', "")
