"""The plan: what retention would do to each checkpoint of a run and every reason for it, as values and as stable JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, cast, get_args

from pydantic import ValidationError

from tierstore.config_retention import RetentionConfig
from tierstore.errors import FormatError
from tierstore.format.digest import digest_of
from tierstore.format.document import load_json, plain_json, restore_json
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import ReplicaState

__all__ = ["Action", "Drop", "Plan", "PlanEntry", "PlanIncomplete", "Reason", "make_plan", "plan_from_json", "policy_digest"]

Action = Literal["keep", "expire", "expired", "sweep", "revive"]
"""What becomes of a checkpoint.

- ``keep``: it stays.
- ``expire``: it is decided that it goes.
- ``expired``: that was decided earlier; it waits for its `not_before`, or for what its reasons say.
- ``sweep``: that time has passed: it is freed.
- ``revive``: it was to go, and a rule or a protection wants it back.
"""

_VERSION = 1
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_MAX_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One rule's or protection's word: `kind` for machines, `text` for people."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A tier's copy that goes while the checkpoint stays.

    `copies` are the counted copies elsewhere that remain. `blocked` says why it can't go although `reason` wants it to; empty: it can.
    `nbytes` is what the tier gets free.
    """

    tier: str
    reason: Reason
    copies: tuple[str, ...] = ()
    blocked: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One checkpoint.

    Attributes:
        replicas: What each tier holds, as the catalog saw it.
        action: What becomes of it.
        reasons: All that apply: the rules in the policy's order, then the protections.
        drops: Copies that leave a tier, or would if something did not block it.
        not_before: For ``expire``, ``expired`` and ``sweep``: until then it can be taken back.
        metrics: Those that the policy's rules go by.
        ranked: It takes a place in the rules.
        taken: What its copy takes up on a tier, in bytes, where that is not `nbytes`.
    """

    attempt: Attempt
    committed_at: datetime
    nbytes: int
    replicas: Mapping[str, ReplicaState]
    action: Action
    reasons: tuple[Reason, ...]
    drops: tuple[Drop, ...] = ()
    not_before: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    final: bool = False
    ranked: bool = True
    taken: Mapping[str, int] = field(default_factory=dict)

    @property
    def stays(self) -> bool:
        return self.action in ("keep", "revive")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanIncomplete:
    """An attempt that is no checkpoint (yet): the ranks that are missing (None: unknown), and from when on it counts as an orphan."""

    attempt: Attempt
    missing: tuple[int, ...] | None
    orphan_at: datetime | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What retention would do to one run; made by `make_plan`.

    Attributes:
        id: Digest of the content: the same input gives the same plan and the same id.
        at: The time that it was made for.
        policy: The rules that decided.
        entries: Newest first.
        deletes: How many entries say ``expire``.
    """

    id: str
    run: str
    at: datetime
    policy: RetentionConfig
    policy_digest: str
    entries: tuple[PlanEntry, ...]
    incomplete: tuple[PlanIncomplete, ...]
    warnings: tuple[str, ...]

    @property
    def deletes(self) -> int:
        return sum(entry.action == "expire" for entry in self.entries)

    def entry(self, attempt: Attempt) -> PlanEntry | None:
        """The entry of one attempt; None where the plan has none."""
        return next((entry for entry in self.entries if entry.attempt == attempt), None)

    def to_json(self) -> str:
        """One line of JSON with the keys always in the same order."""
        return f'{{"id":"{self.id}",{"".join(_pieces(self))}'


def make_plan(
    *,
    run: str,
    at: datetime,
    policy: RetentionConfig,
    entries: tuple[PlanEntry, ...],
    incomplete: tuple[PlanIncomplete, ...] = (),
    warnings: tuple[str, ...] = (),
) -> Plan:
    """A plan with its id."""
    digest = policy_digest(policy)

    def with_id(plan_id: str) -> Plan:
        return Plan(
            id=plan_id, run=run, at=at, policy=policy, policy_digest=digest, entries=entries, incomplete=incomplete, warnings=warnings
        )

    content = hashlib.sha256()
    for piece in _pieces(with_id("")):
        content.update(piece.encode())
    return with_id(content.hexdigest()[:20])


def policy_digest(policy: RetentionConfig) -> str:
    """The digest of a policy's canonical JSON."""
    return digest_of(_line(_policy(policy)).encode())


def plan_from_json(text: str) -> Plan:
    """Reads what `Plan.to_json` wrote.

    Raises:
        FormatError: It is not a plan, or not what its id says.
    """
    value = load_json(text.encode("utf-8", "replace"), "a plan", max_nbytes=_MAX_NBYTES)
    try:
        if value["plan"] != _VERSION:
            raise FormatError(f"a plan of version {str(value['plan'])[:20]!r}", hint="this tierstore reads version 1: make the plan anew")
        run = str(value["run"])
        plan = make_plan(
            run=run,
            at=_time(value["at"]),
            policy=RetentionConfig.model_validate(value["policy"]),
            entries=tuple(_entry(run, item) for item in value["entries"]),
            incomplete=tuple(_incomplete(run, item) for item in value["incomplete"]),
            warnings=tuple(str(text) for text in value["warnings"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError, ValidationError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"this is no plan: {type(error).__name__} {str(error)[:200]}", hint="make it anew with `tierstore plan`"
        ) from error
    if plan.id != value.get("id"):
        raise FormatError(
            f"the plan of run {run!r} is not what its id {str(value.get('id'))[:40]!r} says", hint="it was changed: make it anew", run=run
        )
    return plan


def _line(value: object) -> str:
    return _JSON.encode(value)


def _policy(policy: RetentionConfig) -> dict[str, Any]:
    return policy.model_dump(mode="json", exclude_none=True)


def _pieces(plan: Plan) -> Iterator[str]:
    """The JSON after the id, one entry after the other: that of 100,000 entries is never in memory as objects."""
    head = {
        "plan": _VERSION,
        "run": plan.run,
        "at": _utc(plan.at),
        "policy_digest": plan.policy_digest,
        "policy": _policy(plan.policy),
        "deletes": plan.deletes,
        "warnings": list(plan.warnings),
        "incomplete": [_incomplete_body(item) for item in plan.incomplete],
    }
    yield f'{_line(head)[1:-1]},"entries":['
    for number, entry in enumerate(plan.entries):
        yield f"{',' if number else ''}{_line(_entry_body(entry))}"
    yield "]}"


def _entry_body(entry: PlanEntry) -> dict[str, Any]:
    """Fields that say nothing are left out: a plan may have 100,000 entries, and each of them costs its share of a second."""
    body: dict[str, Any] = {
        "step": entry.attempt.step,
        "save_id": entry.attempt.save_id,
        "committed_at": _utc(entry.committed_at),
        "nbytes": entry.nbytes,
        "replicas": dict(entry.replicas),
        "action": entry.action,
        "reasons": [{"kind": reason.kind, "text": reason.text} for reason in entry.reasons],
    }
    if entry.drops:
        body["drops"] = [_drop_body(drop) for drop in entry.drops]
    if entry.tags:
        body["tags"] = list(entry.tags)
    if entry.not_before is not None:
        body["not_before"] = _utc(entry.not_before)
    if entry.final:
        body["final"] = True
    if not entry.ranked:
        body["unranked"] = True
    if entry.taken:
        body["taken"] = dict(entry.taken)
    if entry.metrics:
        body["metrics"] = plain_json(dict(sorted(entry.metrics.items())), "metrics")
    return body


def _utc(at: datetime) -> str:
    """The text of `tierstore.clock.utc_text`, ten times as fast."""
    return at.astimezone(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _time(text: str) -> datetime:
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if at.tzinfo is None:
        raise ValueError(f"{text!r} is no aware time")
    return at.astimezone(timezone.utc)


def _drop_body(drop: Drop) -> dict[str, Any]:
    return {
        "tier": drop.tier,
        "kind": drop.reason.kind,
        "text": drop.reason.text,
        "copies": list(drop.copies),
        "blocked": drop.blocked,
        "nbytes": drop.nbytes,
    }


def _incomplete_body(item: PlanIncomplete) -> dict[str, Any]:
    return {
        "step": item.attempt.step,
        "save_id": item.attempt.save_id,
        "missing": None if item.missing is None else list(item.missing),
        "orphan_at": _utc(item.orphan_at) if item.orphan_at else None,
        "note": item.note,
    }


def _attempt(run: str, item: Mapping[str, Any]) -> Attempt:
    attempt = Attempt.parse(run, Attempt(run=run, step=item["step"], save_id=item["save_id"]).name)
    if attempt is None:
        raise ValueError(f"step {item['step']!r} with save id {item['save_id']!r} is no attempt")
    return attempt


def _entry(run: str, item: Mapping[str, Any]) -> PlanEntry:
    action = item["action"]
    if action not in get_args(Action):
        raise ValueError(f"there is no action {action!r}")
    return PlanEntry(
        attempt=_attempt(run, item),
        committed_at=_time(item["committed_at"]),
        nbytes=item["nbytes"],
        replicas=item["replicas"],
        action=cast("Action", action),
        reasons=tuple(Reason(kind=reason["kind"], text=reason["text"]) for reason in item["reasons"]),
        drops=tuple(
            Drop(
                tier=drop["tier"],
                reason=Reason(kind=drop["kind"], text=drop["text"]),
                copies=tuple(drop["copies"]),
                blocked=drop["blocked"],
                nbytes=drop["nbytes"],
            )
            for drop in item.get("drops", ())
        ),
        not_before=_time(item["not_before"]) if "not_before" in item else None,
        metrics=restore_json(item.get("metrics", {}), "metrics"),
        tags=tuple(item.get("tags", ())),
        final=item.get("final", False),
        ranked=not item.get("unranked", False),
        taken={str(tier): int(nbytes) for tier, nbytes in item.get("taken", {}).items()},
    )


def _incomplete(run: str, item: Mapping[str, Any]) -> PlanIncomplete:
    return PlanIncomplete(
        attempt=_attempt(run, item),
        missing=None if item["missing"] is None else tuple(item["missing"]),
        orphan_at=_time(item["orphan_at"]) if item["orphan_at"] else None,
        note=item["note"],
    )
