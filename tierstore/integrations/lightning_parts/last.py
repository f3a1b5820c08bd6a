"""What `TierModelCheckpoint` needs to know: the URIs of last checkpoints, what is pending, and what is not to be removed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tierstore.errors import UsageError
from tierstore.integrations.lightning_parts.saving import Body
from tierstore.tier_uri import is_tier_uri

__all__ = ["body_of", "last_uris", "may_remove"]


def body_of(checkpoint_io: Any) -> Body | None:
    """The body of the `TierCheckpointIO` that a strategy uses, also within Lightning's wrappers; None where it is another's."""
    while checkpoint_io is not None and not isinstance(getattr(checkpoint_io, "body", None), Body):
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)
    return None if checkpoint_io is None else checkpoint_io.body


def body_or_refuse(checkpoint_io: Any) -> Body:
    """As `body_of`.

    Raises:
        UsageError: The strategy has no `TierCheckpointIO`.
    """
    body = body_of(checkpoint_io)
    if body is None:
        raise UsageError("TierModelParallelStrategy needs a TierCheckpointIO", hint="pass Trainer(plugins=[TierCheckpointIO(...)])")
    return body


def last_uris(found: Iterable[str], dirpath: object) -> set[str]:
    """The paths that a file system's listing gave, as URIs in `dirpath`: Lightning normalises them, which ``tier://`` doesn't outlive."""
    if not is_tier_uri(dirpath):
        return set(found)
    return {f"{str(dirpath).rstrip('/')}/{os.path.basename(path)}" for path in found}


def may_remove(previous: str, dirpath: object, resumed_from: object) -> bool:
    """What Lightning asks of local paths only: not what training was resumed from, and nothing outside of its own folder
    (https://github.com/Lightning-AI/pytorch-lightning/issues/21813).
    """
    return previous != resumed_from and os.path.dirname(previous) == str(dirpath).rstrip("/")
