"""Resuming: the newest checkpoint that can be loaded, on all ranks the same one; never a silent step back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from tierstore.errors import IntegrityError
from tierstore.state.agreement import Agreement
from tierstore.state.candidates import candidates, first_of_node, info_of, stuck_error
from tierstore.state.jointly import jointly
from tierstore.tiers.catalog import Catalog, CheckpointInfo
from tierstore.tiers.promote import ReconcileReport

__all__ = ["Resumed", "resume_newest"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `Store.resume` loaded."""

    step: int
    state: Any
    checkpoint: CheckpointInfo
    skipped: tuple[int, ...] = ()
    """Newer steps that were committed but damaged everywhere (only with ``fallback=True``)."""


def resume_newest(
    ranks: Agreement | None,
    run: str,
    *,
    adopt: Callable[[], ReconcileReport | None],
    look: Callable[[], Catalog],
    load: Callable[[Callable[[], CheckpointInfo], str], tuple[CheckpointInfo, Any]],
    node_tier: str,
    shared: Collection[str],
    fallback: bool,
) -> Resumed | None:
    """What `Store.resume` promises.

    Args:
        ranks: Who resumes together; None: this process alone.
        run: The run.
        adopt: Commits what a dead process left whole on this node's tiers; None where another process is at it.
        look: Looks at the tiers.
        load: Finds, opens and loads a checkpoint together with the other ranks; the text says what it is about, for messages.
        node_tier: What ranks that share a node's tier have in common; empty where there is none.
        shared: The names of the tiers that all ranks see.
        fallback: Newer checkpoints that are out of reach or damaged everywhere are passed over.

    Raises:
        TierStoreError: As `Store.resume`.
    """
    what = f"resuming run {run!r}"
    first = first_of_node(ranks, what, node_tier)
    adopted = jointly(ranks, f"{what}: committing what lies on the nodes", lambda: adopt() if first else None).result
    catalog = jointly(ranks, f"{what}: looking at the tiers", look).result
    found = candidates(ranks, what, catalog, adopted=adopted, locked=first and adopted is None, shared=shared)
    skipped: list[int] = []
    for stuck in found.stuck:
        if not fallback:
            raise stuck_error(stuck, run)
        log.warning("run=%s step=%d is out of reach and is passed over: %s", run, stuck.step, stuck.message)
        skipped.append(stuck.step)
    if found.incomplete and found.facts:
        log.warning("run=%s newer attempts at steps %s never became whole", run, list(found.incomplete))
    for facts in found.facts:
        step, save_id = facts["step"], facts["save_id"]
        try:
            info, state = load(partial(info_of, facts, catalog), f"{what} from step {step}, {save_id}")
        except IntegrityError as error:
            if not fallback:
                if "fallback=True" not in error.hint:  # an older step is what `latest` gives: nobody goes back there without asking for it
                    error.hint = "; ".join(filter(None, (error.hint, "or pass it over with resume(fallback=True)")))
                raise
            log.warning("run=%s step=%d can't be loaded and is passed over: %s", run, step, error.message)
            skipped.append(step)
            continue
        return Resumed(step=step, state=state, checkpoint=info, skipped=tuple(skipped))
    if skipped:
        raise IntegrityError(
            f"run {run!r}: none of the committed steps {skipped} can be loaded from any tier",
            hint="run `tierstore verify --level full` to see which files are damaged where",
            run=run,
        )
    # Raises where the authority was not reached: that it knows nothing would be a guess.
    jointly(ranks, f"{what}: making sure that there is nothing", catalog.latest)
    if found.incomplete:
        steps = list(found.incomplete)
        log.warning("run=%s has no committed checkpoint, but incomplete attempts at steps %s: training begins anew", run, steps)
    return None
