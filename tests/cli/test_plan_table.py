"""The plan's table and its one-line summary: all verdicts, any names, at most 80 columns, and a long plan is shortened."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from typing import Any

from cli_kit import NOW
from rich.console import Console

from tierstore.cli.plan_table import MOST_ROWS, plan_summary, plan_table, plan_values, plural, rows_left_out
from tierstore.config_retention import RetentionConfig
from tierstore.names import Attempt, new_save_id
from tierstore.tiers.retention.plan import Drop, Plan, PlanEntry, PlanIncomplete, Reason, make_plan, plan_from_json

POLICY = RetentionConfig.model_validate({"keep": [{"last": 5}]})
SIZE = 812 << 30


def entry(step: int, action: Any = "keep", *reasons: str, drops: tuple[Drop, ...] = (), **more: Any) -> PlanEntry:
    at = NOW - timedelta(hours=3)
    values = {"replicas": {"nvme": "complete", "pfs": "complete"}, "nbytes": SIZE, "committed_at": at, **more}
    texts = tuple(Reason(kind="rule", text=text) for text in reasons or ("last #1",))
    return PlanEntry(attempt=Attempt(run="r", step=step, save_id=new_save_id(at)), action=action, reasons=texts, drops=drops, **values)


def drop(tier: str, text: str, *, blocked: str = "") -> Drop:
    return Drop(tier=tier, reason=Reason(kind="tier-rule", text=text), copies=("pfs", "object"), blocked=blocked, nbytes=SIZE)


def plan_of(*entries: PlanEntry, incomplete: tuple[PlanIncomplete, ...] = (), warnings: tuple[str, ...] = ()) -> Plan:
    ordered = tuple(sorted(entries, key=lambda e: e.attempt, reverse=True))
    return make_plan(run="r", at=NOW, policy=POLICY, entries=ordered, incomplete=incomplete, warnings=warnings)


def shown(plan: Plan, *, width: int = 80, everything: bool = False) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(plan_table(plan, {}, NOW, everything=everything))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_every_verdict_has_its_row() -> None:
    later = NOW + timedelta(hours=24)
    gone = Attempt(run="r", step=45, save_id=new_save_id(NOW - timedelta(minutes=20)))
    plan = plan_of(
        entry(60, "keep", "last #1", "newest"),
        entry(50, drops=(drop("nvme", "nvme keeps last 2"),)),
        entry(40, drops=(drop("nvme", "nvme keeps last 2", blocked="1 of 2 copies elsewhere"),)),
        entry(30, "expire", "no rule matched", not_before=later, drops=(drop("nvme", "it goes"),)),
        entry(20, "expired", "no rule matched", not_before=later),
        entry(10, "sweep", "no rule matched", not_before=NOW),
        entry(5, "revive", "pinned"),
        incomplete=(PlanIncomplete(attempt=gone, missing=(3,), orphan_at=later, note=""),),
    )
    text = " ".join(" ".join(shown(plan, width=200)).split())
    for row in (
        "60 3h 812GiB nvme pfs keep last #1; newest",
        "50 3h 812GiB nvme pfs evict:nvme nvme keeps last 2; 2 verified durable copies elsewhere",
        "45 20m - (incomplete, rank 3 missing; orphan in 1d)",
        "40 3h 812GiB nvme pfs keep last #1; nvme keeps last 2, but it stays on nvme: 1 of 2 copies elsewhere",
        "30 3h 812GiB nvme pfs expire no rule matched; leaves nvme with the next gc; undelete until 30 Nov 03:00Z",
        "20 3h 812GiB nvme pfs expired no rule matched; freed from 30 Nov 03:00Z, undelete until then",
        "10 3h 812GiB nvme pfs sweep no rule matched; the next gc frees it",
        "5 3h 812GiB nvme pfs revive pinned",
    ):
        assert row in text, row
    assert plan_summary(plan) == (
        "1 checkpoint would expire (1.6TiB), 1 would come back, 1 due to be freed (1.6TiB), 1 expired (1.6TiB), "
        "2 copies would leave nvme (1.6TiB), 3 kept"
    )


def test_nothing_but_why_gives_way_in_eighty_columns() -> None:
    many = {"memory": "partial", "nvme-scratch": "evicting", "lustre": "complete", "object": "quarantined", "far": "receipt"}
    drops = (drop("nvme-scratch", "nvme-scratch keeps last 2"), drop("lustre", "lustre keeps last 10"))
    lines = shown(plan_of(entry(1_000_000_000, "keep", replicas=many, drops=drops)))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for word in ("1000000000", "812GiB", "~memory", "-nvme-scratch", "!object", "+far", "evict:nvme-scratch", "evict:lustre"):
        assert word in text, word
    assert "…" not in text


def test_a_long_plan_shows_what_changes_and_says_what_it_leaves_out() -> None:
    plan = plan_of(*(entry(step, "expire" if step % 12 == 0 else "keep") for step in range(1, 601)))
    lines = shown(plan)
    assert len(lines) <= MOST_ROWS + 1
    assert sum("expire" in line for line in lines) == 50
    assert rows_left_out(plan) == 600 - (len(lines) - 1) > 0
    assert len(shown(plan, everything=True)) == 601
    assert rows_left_out(plan_of(*(entry(step) for step in range(MOST_ROWS)))) == 0


def test_the_objects_of_json_are_the_plan() -> None:
    plan = plan_of(entry(20, "expire"), entry(10), warnings=("look",))
    values = list(plan_values(plan))
    assert [value["type"] for value in values] == ["plan_entry", "plan_entry", "plan"]
    body = {k: v for k, v in values[-1].items() if k not in ("type", "plan_version")}
    entries = [{k: v for k, v in value.items() if k not in ("type", "run")} for value in values[:-1]]
    whole = {**body, "plan": values[-1]["plan_version"], "incomplete": [], "entries": entries}
    assert json.loads(plan.to_json()) == whole, "nothing is lost on the way"
    assert plan_from_json(plan.to_json()).id == values[-1]["id"]


def test_a_plan_of_nothing_says_so() -> None:
    assert plan_summary(plan_of()) == "nothing goes: 0 kept"
    assert plan_summary(plan_of(entry(1))) == "nothing goes: 1 kept"
    assert (plural(1, "copy"), plural(2, "copy"), plural(1000, "file")) == ("1 copy", "2 copies", "1,000 files")
