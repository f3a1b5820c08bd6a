"""Which checkpoint the ranks load: all of them the same one, whatever each one's listing shows at its moment.

Ranks see different things: a node's tier is its own, a listing may be a moment older, a commit may land between two of them. So each
looks for itself, rank 0 says what it found, the others say what differs, and all go through the one list that this gives, newest first.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierstore import errors
from tierstore.clock import parse_utc, utc_text
from tierstore.errors import IntegrityError, TemporaryError, TierStoreError
from tierstore.names import Attempt
from tierstore.state.agreement import Agreement
from tierstore.tiers.catalog import Catalog, CheckpointInfo
from tierstore.tiers.promote import ReconcileReport

__all__ = ["Candidates", "Stuck", "candidates", "first_of_node", "info_of", "same_facts", "stuck_error"]

Facts = dict[str, Any]
"""A checkpoint as one rank tells the others of it (JSON)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A newer attempt that is out of reach: its commit record can't be read, or it is staged whole and could not be committed."""

    step: int
    message: str
    damaged: bool
    """It is out of reach because of damage, which does not pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What can be resumed from, newest first, and what is newer but out of reach; the same on all ranks."""

    facts: tuple[Facts, ...]
    stuck: tuple[Stuck, ...]
    incomplete: tuple[int, ...]
    """Steps of newer attempts that never became whole."""


def stuck_error(stuck: Stuck, run: str) -> TierStoreError:
    """The error for something that is out of reach."""
    kind: type[TierStoreError] = IntegrityError if stuck.damaged else TemporaryError
    return kind(
        stuck.message,
        hint="mend that and resume again, load an older step by name, or pass this one over with resume(fallback=True)",
        run=run,
        step=stuck.step,
    )


def first_of_node(ranks: Agreement | None, what: str, node_tier: str) -> bool:
    """Whether this rank is the first of those that share a node's tier (all ranks, where there is none): it looks after what lies there."""
    if ranks is None:
        return True
    here = f"{platform.node()}:{node_tier}" if node_tier else ""
    return ranks.gather(what, here.encode()).index(here.encode()) == ranks.rank


def candidates(
    ranks: Agreement | None, what: str, catalog: Catalog, *, adopted: ReconcileReport | None, locked: bool, shared: Collection[str]
) -> Candidates:
    """Agrees on what can be resumed from.

    Args:
        ranks: Who takes part; None: this process alone.
        what: What it is about, for messages.
        catalog: What this rank sees, after all ranks have adopted what lay on their nodes.
        adopted: What this rank's adoption did, where it was the one to do it.
        locked: It was the one, and another process was at it.
        shared: The names of the tiers that all ranks see.
    """
    mine = {**_view(catalog, adopted, shared), "locked": locked}
    if ranks is None:
        return _candidates(_merge([mine]))
    first = json.loads(ranks.share(what, json.dumps(mine).encode()))
    news = mine if ranks.rank == 0 else _difference(mine, first)
    merged = ranks.agree(what, json.dumps(news).encode(), lambda values: json.dumps(_merge([json.loads(v) for v in values])).encode())
    return _candidates(json.loads(merged))


def same_facts(ranks: Agreement, what: str, resolve: Callable[[], CheckpointInfo], shared: Collection[str]) -> Facts:
    """The facts of the checkpoint that rank 0 resolves, on every rank.

    Raises:
        TierStoreError: From `resolve`; the same on all ranks.
    """
    told: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            told = _facts(resolve(), shared)
        except TierStoreError as error:
            ranks.share(what, json.dumps({"error": [type(error).__name__, error.message, error.hint]}).encode())
            raise
    found: dict[str, Any] = json.loads(ranks.share(what, json.dumps(told).encode()))
    if "error" in found:
        name, message, hint = found["error"]
        kind: type[TierStoreError] = getattr(errors, name) if name in errors.__all__ else TierStoreError
        raise kind(message, hint=hint)
    return found


def info_of(facts: Facts, catalog: Catalog) -> CheckpointInfo:
    """A checkpoint that was agreed on, as this rank sees it; where its listing does not show it yet, as others told of it."""
    attempt = _attempt(facts)
    told: Mapping[str, Any] = facts["replicas"]
    own = next((c for c in catalog.checkpoints if c.attempt == attempt), None)
    if own is not None:
        return replace(own, replicas={**told, **own.replicas})
    receipts = next((a.receipts for a in catalog.incomplete if a.attempt == attempt), {})
    return CheckpointInfo(
        attempt=attempt,
        committed_at=parse_utc(facts["at"]),
        manifest_digest=facts["manifest"],
        manifest_nbytes=facts["manifest_nbytes"],
        nbytes=facts["nbytes"],
        world_size=facts["world_size"],
        metrics=facts["metrics"],
        tags=tuple(facts["tags"]),
        final=facts["final"],
        replicas={**dict.fromkeys(receipts, "receipt"), **told},
        receipts=receipts,
    )


# ---- what ranks tell each other


def _facts(info: CheckpointInfo, shared: Collection[str]) -> Facts:
    return {
        "run": info.run,
        "step": info.step,
        "save_id": info.attempt.save_id,
        "at": utc_text(info.committed_at),
        "manifest": info.manifest_digest,
        "manifest_nbytes": info.manifest_nbytes,
        "nbytes": info.nbytes,
        "world_size": info.world_size,
        "metrics": dict(info.metrics),
        "tags": list(info.tags),
        "final": info.final,
        "replicas": {name: state for name, state in info.replicas.items() if name in shared},
    }


def _view(catalog: Catalog, adopted: ReconcileReport | None, shared: Collection[str]) -> dict[str, Any]:
    """One rank's view: `offered` and `open` by save id, `withdrawn` save ids, and what adoption could not do."""
    offered = [c for c in catalog.checkpoints if not (c.superseded or c.hidden)]
    newest = offered[-1].step if offered else -1
    adopted = adopted or ReconcileReport()
    return {
        "offered": {c.attempt.save_id: _facts(c, shared) for c in offered},
        "withdrawn": [c.attempt.save_id for c in catalog.checkpoints if c.hidden] + [a.save_id for a in catalog.swept],
        "open": {
            a.attempt.save_id: {
                "step": a.attempt.step,
                "world_size": a.world_size,
                # A part on a node's tier counts with its receipt only: without it the rank had not come so far.
                "seen": sorted({rank for held in (a.parts.get(catalog.authority, ()), *a.receipts.values()) for rank in held}),
                "unreadable": catalog.unreadable_error(a).message if a.unreadable else "",
            }
            for a in catalog.incomplete
            if a.attempt.step > newest
        },
        "failures": {
            f.copy.attempt.save_id: [f"{type(f.error).__name__}: {f.error.message}", isinstance(f.error, IntegrityError)]
            for f in adopted.failed
            if f.copy.kind == "commit"
        },
        "waiting": {copy.attempt.save_id: reason for copy, reason in adopted.waiting if copy.kind == "commit"},
    }


def _difference(mine: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """What this rank knows beyond rank 0: usually nothing, for there may be thousands of ranks."""
    opened = {}
    for save_id, one in mine["open"].items():
        known = first["open"].get(save_id)
        if known is None:
            opened[save_id] = one
        elif more := sorted({*one["seen"]} - {*known["seen"]}):
            opened[save_id] = {**one, "seen": more}
    return {
        "offered": {k: v for k, v in mine["offered"].items() if k not in first["offered"]},
        "withdrawn": [k for k in mine["withdrawn"] if k in first["offered"]],
        "open": opened,
        **{key: mine[key] for key in ("failures", "waiting", "locked")},
    }


def _merge(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' views as one: what any rank saw committed is, what any rank saw withdrawn is not offered."""
    withdrawn = {save_id for view in views for save_id in view["withdrawn"]}
    offered: dict[str, Facts] = {}
    opened: dict[str, dict[str, Any]] = {}
    failures: dict[str, list[Any]] = {}
    locked = ""
    for rank, view in enumerate(views):
        for save_id, facts in view["offered"].items():
            offered.setdefault(save_id, facts)
        for save_id, one in view["open"].items():
            known = opened.setdefault(save_id, {**one, "seen": []})
            known["seen"] = sorted({*known["seen"], *one["seen"]})
            known["world_size"] = known["world_size"] or one["world_size"]
            known["unreadable"] = known["unreadable"] or one["unreadable"]
        where = f" (on rank {rank})" if len(views) > 1 else ""
        for save_id, (reason, damaged) in view["failures"].items():
            failures.setdefault(save_id, [f"{reason}{where}", damaged])
        if view["locked"]:
            locked = f"another process works on the node's tier{where}; wait for it"
    for view in views:  # what is whole and still waits has receipts or part records that can't be read
        for save_id, reason in view["waiting"].items():
            failures.setdefault(save_id, [locked or f"not all of it can be read: it waits for {reason}", not locked])
    steps: dict[int, Facts] = {}
    for save_id in sorted(offered):  # of two attempts at one step the later one wins
        if save_id not in withdrawn:
            steps[offered[save_id]["step"]] = offered[save_id]
    newest = max(steps, default=-1)
    return {
        "facts": [steps[step] for step in sorted(steps, reverse=True)],
        "open": {k: v for k, v in opened.items() if v["step"] > newest and k not in offered and k not in withdrawn},
        "failures": failures,
        "locked": locked,
    }


def _candidates(merged: dict[str, Any]) -> Candidates:
    facts = merged["facts"]
    back = f"resuming would go back to step {facts[0]['step']}" if facts else "resuming would begin anew"
    stuck: list[Stuck] = []
    incomplete: set[int] = set()
    for save_id, one in sorted(merged["open"].items(), key=lambda item: (item[1]["step"], item[0])):
        whole = one["world_size"] is not None and set(range(one["world_size"])) <= set(one["seen"])
        if one["unreadable"]:
            stuck.append(Stuck(step=one["step"], message=one["unreadable"], damaged=True))
        elif whole:
            reason, damaged = merged["failures"].get(save_id, [merged["locked"] or "nobody tried", False])
            message = f"step {one['step']} is staged on the nodes, and could not be committed, so that {back}: {reason}"
            stuck.append(Stuck(step=one["step"], message=message, damaged=damaged))
        else:
            incomplete.add(one["step"])
    return Candidates(facts=tuple(facts), stuck=tuple(stuck), incomplete=tuple(sorted(incomplete)))


def _attempt(facts: Facts) -> Attempt:
    return Attempt(run=facts["run"], step=facts["step"], save_id=facts["save_id"])
