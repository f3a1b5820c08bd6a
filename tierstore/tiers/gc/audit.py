"""The audit log: every file that is to be deleted is written down, durably, before its deletion is asked for (PROTOCOLS.md §6).

``<run>/.audit/<ulid>-<known>.jsonl``, one line a file. What goes from the authority and the tiers after it is written down on the
authority, what goes from a node's own tier on that tier. The number in a file's name is how many attempts the authority knew of: a
later listing that knows of fewer has lost some (`brakes`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.clock import Clock, utc_text
from tierstore.names import new_save_id
from tierstore.tiers.log import actor_name
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.view import staging

__all__ = ["AuditLine", "audit_home", "audit_root", "known_before", "write_audit"]

_NAME = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}-(\d{1,12})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """One file that is to be deleted: from which tier, how many bytes it has, and what allows it."""

    tier: str
    path: str
    nbytes: int
    why: str


def audit_root(run: str) -> str:
    """The folder of a run's audit files, on every tier that has some."""
    return f"{run}/.audit"


def audit_home(tiers: Tiers, tier: Tier) -> Tier:
    """Where it is written down what `tier` loses."""
    return tier if tier.name in {t.name for t in staging(tiers)} else tiers.authority


async def write_audit(home: Tier, run: str, lines: Sequence[AuditLine], *, known: int, clock: Clock) -> str:
    """Writes down what is about to be deleted; returns the path. When it returns the lines are durable.

    Raises:
        StorageError: They can't be written, and so nothing may be deleted.
    """
    at, actor = clock.now(), actor_name()
    path = f"{audit_root(run)}/{new_save_id(at)}-{known}.jsonl"
    facts = [
        {"at": utc_text(at), "actor": actor, "tier": line.tier, "path": line.path, "nbytes": line.nbytes, "why": line.why} for line in lines
    ]
    await home.storage.put(path, "".join(json.dumps(fact, ensure_ascii=False) + "\n" for fact in facts).encode())
    return path


async def known_before(tiers: Tiers, run: str) -> tuple[int, str]:
    """The most attempts that a collector ever counted on the authority, and the audit file that says so; 0 where there is none.

    Raises:
        StorageError: The authority can't be listed.
    """
    level = await tiers.authority.storage.children(audit_root(run))
    counted = [(int(found[1]), info.path) for info in level.files if (found := _NAME.fullmatch(info.path.rpartition("/")[2]))]
    return max(counted, default=(0, ""))
