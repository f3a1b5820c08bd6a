"""What the tests of retention share: checkpoints told by a few facts, what becomes of them when a plan is carried out, and plans as text.

Run as a program, it writes the second half of the golden files anew: look at the difference before you commit it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import yaml

from tierstore.config_retention import RetentionConfig
from tierstore.names import Attempt, new_save_id
from tierstore.tiers.checkpoint import CheckpointInfo, IncompleteAttempt
from tierstore.tiers.log_facts import Expiry, Hold
from tierstore.tiers.retention import Plan, PlanEntry, Reason, TierFacts, evaluate
from tierstore.units import parse_duration, parse_size

GOLDEN = Path(__file__).parent / "golden"
NOW = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
GIB = 1 << 30

NVME = TierFacts(name="nvme", scope="node", staging=True, capacity=100 * GIB)
PFS = TierFacts(name="pfs", authority=True, durable_at=True)
OBJECT = TierFacts(name="object")
TIERS = (NVME, PFS, OBJECT)


def attempt_of(step: int, saved: datetime, number: int = 0, run: str = "run") -> Attempt:
    """An attempt whose save id is the same each time."""
    return Attempt(run=run, step=step, save_id=f"{new_save_id(saved)[:10]}{number:016d}")


def checkpoint(
    step: int,
    *,
    age_s: float | None = None,
    saved: datetime | None = None,
    number: int = 0,
    run: str = "run",
    on: Iterable[str] = ("pfs", "object"),
    **facts: Any,
) -> CheckpointInfo:
    """A checkpoint that is complete on the tiers of `on`, with the records that say so; committed `age_s` ago, else at one a minute."""
    at = NOW - timedelta(seconds=age_s) if age_s is not None else NOW - timedelta(days=30) + timedelta(minutes=step)
    given: dict[str, Any] = {
        "attempt": attempt_of(step, saved or at, number, run),
        "committed_at": at,
        "manifest_digest": "sha256:0",
        "nbytes": GIB,
        "replicas": dict.fromkeys(on, "complete"),
        "replicated": {name: {} for name in on if name not in ("nvme", "pfs")},
    }
    return CheckpointInfo(**{**given, **facts})


def policy(*keep: Mapping[str, Any], **others: Any) -> RetentionConfig:
    """A policy as it is written, with units."""
    return RetentionConfig.model_validate({"keep": list(keep), **others}, context={"document": True})


def carry_out(infos: Sequence[CheckpointInfo], plan: Plan) -> list[CheckpointInfo]:
    """The checkpoints as they are after all that the plan says was done and recorded, where nothing else happened."""
    left = []
    for info in infos:
        entry = entry_of(plan, info)
        if entry.action == "sweep":
            continue
        if entry.action == "expire":
            assert entry.not_before is not None
            info = replace(info, expired=Expiry(at=plan.at, not_before=entry.not_before, plan=plan.id))
        elif entry.action == "revive":
            info = replace(info, expired=None, revived=plan.at)
        gone = {drop.tier for drop in entry.drops if not drop.blocked}
        left.append(
            replace(
                info,
                replicas={name: state for name, state in info.replicas.items() if name not in gone},
                replicated={name: facts for name, facts in info.replicated.items() if name not in gone},
                dropped=info.dropped | gone,
            )
        )
    return left


def entry_of(plan: Plan, info: CheckpointInfo) -> PlanEntry:
    entry = plan.entry(info.attempt)
    assert entry is not None
    return entry


def steps(plan: Plan, *actions: str) -> list[int]:
    """The steps of the entries with these actions, ascending."""
    return sorted(e.attempt.step for e in plan.entries if e.action in actions)


def why(plan: Plan, step: int) -> list[str]:
    """The kinds of the reasons of a step's newest attempt."""
    return [reason.kind for reason in next(e for e in plan.entries if e.attempt.step == step).reasons]


def render(plan: Plan) -> str:
    """A plan as a person reads it in a golden file."""
    lines = []
    for entry in plan.entries:
        until = f" [{entry.not_before:%d %b %H:%MZ}]" if entry.not_before else ""
        lines.append(f"{entry.attempt.step:>6} {entry.action:<7} {'; '.join(r.text for r in entry.reasons)}{until}")
        for drop in entry.drops:
            verb = "blocked" if drop.blocked else "drop"
            more = f"; but {drop.blocked}" if drop.blocked else f"; copies on {', '.join(drop.copies)}"
            lines.append(f"{'':14} {verb} {drop.tier}: {drop.reason.text}{more}")
    for item in plan.incomplete:
        orphan = f"; orphan from {item.orphan_at:%d %b %H:%MZ}" if item.orphan_at else ""
        lines.append(f"{item.attempt.step:>6} (incomplete, {item.note}{orphan})")
    return "\n".join([*lines, *(f"warning: {text}" for text in plan.warnings)]) + "\n"


def golden_plan(path: Path) -> Plan:
    """The plan of a golden file's first half, a YAML document; README.md beside them says what it may hold."""
    told = yaml.safe_load(path.read_text(encoding="utf-8").partition("\n---\n")[0])
    infos = [_info(number, item) for number, item in enumerate(told["checkpoints"])]
    by_step = {info.step: info.attempt for info in infos}
    return evaluate(
        infos,
        RetentionConfig.model_validate(told["policy"], context={"document": True}),
        told.get("now", NOW),
        tiers=[_tier(item) for item in told.get("tiers", ())],
        protected={by_step[step]: Reason(kind=kind, text=kind) for step, kind in told.get("protected", {}).items()},
        incomplete=[_incomplete(item) for item in told.get("incomplete", ())],
        run="run",
    )


def _tier(item: Mapping[str, Any]) -> TierFacts:
    return TierFacts(**{key: parse_size(value) if key.endswith(("nbytes", "capacity")) else value for key, value in item.items()})


def _at(item: Mapping[str, Any], key: str, default: datetime = NOW) -> datetime:
    """A time as it is written, or so long ago (`age: 5h`)."""
    value = item.get(key)
    if value is None:
        return default
    return value.astimezone(timezone.utc) if isinstance(value, datetime) else NOW - timedelta(seconds=parse_duration(value))


def _info(number: int, item: Mapping[str, Any]) -> CheckpointInfo:
    at = _at(item, "at")
    on = item.get("in", ["pfs"])
    states = on if isinstance(on, dict) else dict.fromkeys(on, "complete")
    plain = {key: item[key] for key in ("metrics", "final", "superseded", "damaged", "authority_lost", "world_size") if key in item}
    texts = {key: tuple(item[key]) for key in ("tags", "pins") if key in item}
    expired = item.get("expired")
    return CheckpointInfo(
        attempt=attempt_of(item["step"], _at(item, "saved", at), number),
        committed_at=at,
        manifest_digest="sha256:0",
        nbytes=parse_size(item.get("size", "1GiB")),
        replicas=states,
        receipts={name: (0,) for name, state in states.items() if state == "receipt"},
        replicated={name: {} for name in (*states, *item.get("recorded", ())) if name not in item.get("unrecorded", ())},
        dropped=frozenset(item.get("dropped", ())),
        quarantined=frozenset((name, "a file") for name in item.get("quarantined", ())),
        holds=tuple(
            Hold(name=h["name"], at=at, reason=h.get("reason", ""), until=_at(h, "until") if "until" in h else None)
            for h in item.get("holds", ())
        ),
        expired=Expiry(at=_at(expired, "at"), not_before=_at(expired, "not_before")) if expired else None,
        revived=_at(item, "revived") if "revived" in item else None,
        **plain,
        **texts,
    )


def _incomplete(item: Mapping[str, Any]) -> IncompleteAttempt:
    plain = {key: item[key] for key in ("world_size", "condemned", "unreadable") if key in item}
    return IncompleteAttempt(attempt=attempt_of(item["step"], _at(item, "at")), parts={"nvme": tuple(item.get("ranks", ()))}, **plain)


def main() -> None:
    for path in sorted(GOLDEN.glob("*.txt")):
        told = path.read_text(encoding="utf-8").partition("\n---\n")[0]
        path.write_text(f"{told}\n---\n{render(golden_plan(path))}", encoding="utf-8")
        sys.stdout.write(f"{path.name}\n")
    (GOLDEN / "example.json").write_text(golden_plan(GOLDEN / "example.txt").to_json() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
