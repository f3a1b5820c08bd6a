"""Retention: a pure function from checkpoints and a policy to a plan that gives every reason. It reads nothing and deletes nothing."""

from __future__ import annotations

from tierstore.tiers.retention.evaluate import evaluate
from tierstore.tiers.retention.explain import Word, explain
from tierstore.tiers.retention.facts import TierFacts, counted_copies, tier_facts
from tierstore.tiers.retention.plan import Action, Drop, Plan, PlanEntry, PlanIncomplete, Reason, plan_from_json

__all__ = [
    "Action",
    "Drop",
    "Plan",
    "PlanEntry",
    "PlanIncomplete",
    "Reason",
    "TierFacts",
    "Word",
    "counted_copies",
    "evaluate",
    "explain",
    "plan_from_json",
    "tier_facts",
]
