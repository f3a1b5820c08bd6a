"""Plans as they are written down: what each rule, protection and obstacle comes to (tests/unit/tiers/retention/golden)."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_kit import GOLDEN, golden_plan, render

FILES = sorted(GOLDEN.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_plan_is_the_one_in_the_file(path: Path) -> None:
    assert render(golden_plan(path)) == path.read_text(encoding="utf-8").partition("\n---\n")[2]


def test_the_files_show_every_rule_and_every_protection() -> None:
    plans = [golden_plan(path) for path in FILES]
    kinds = {reason.kind for plan in plans for entry in plan.entries for reason in entry.reasons}
    kinds |= {drop.reason.kind for plan in plans for entry in plan.entries for drop in entry.drops}
    rules = {"last", "every", "within", "hourly", "daily", "weekly", "monthly", "yearly", "best", "steps", "tags", "final"}
    protections = {"pinned", "held", "newest", "newest-verified", "min-keep", "min-age", "future", "revived", "unusable", "damaged"}
    assert kinds >= rules | protections | {
        "authority-lost",
        "superseded",
        "leased",
        "resumed-from",
        "no-rule",
        "tier-rule",
        "hidden",
        "room",
    }
    assert {entry.action for plan in plans for entry in plan.entries} == {"keep", "expire", "expired", "sweep", "revive"}


def test_the_json_of_a_plan_is_the_one_in_the_file() -> None:
    assert golden_plan(GOLDEN / "example.txt").to_json() == (GOLDEN / "example.json").read_text(encoding="utf-8").strip()
