"""Where the stall of a save went: what a ticket tells of the time that `save` kept its caller."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StageTimes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where the stall of a save went, in seconds."""

    plan_s: float
    """Walking the state, encoding its objects, and planning or recalling the layout."""
    wait_s: float
    """Waiting for memory that earlier saves hold."""
    copy_s: float
    """Copying the tensors; of tensors on a device whose copies go on by themselves, only asking for them."""
    agree_s: float = 0.0
    """Comparing fingerprints, and waiting for the other ranks of the save."""
    allocate_s: float = 0.0
    """Making memory, and touching it for the first time; 0 for recycled memory (`Store.prepare` does it beforehand)."""

    @property
    def total_s(self) -> float:
        """All of these."""
        return self.plan_s + self.wait_s + self.copy_s + self.agree_s + self.allocate_s
