"""The facts of a checkpoint that its saver gives: metrics, tags, and who wrote it."""

from __future__ import annotations

import difflib
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Any

import torch

from tierstore.clock import Clock, utc_text
from tierstore.config_packing import SCHEMES
from tierstore.errors import UsageError
from tierstore.format.manifest import QUANTISE
from tierstore.tiers.tier import Tier

__all__ = ["checked_omit", "facts_of", "omitted_fact", "quantise_fact"]

log = logging.getLogger(__name__)


def facts_of(metrics: Mapping[str, float] | None, tags: Sequence[str] | None, final: bool, clock: Clock) -> dict[str, Any]:
    """The facts as the part record and the manifest keep them.

    Args:
        metrics: Numbers that rank checkpoints.
        tags: Labels that retention and references know.
        final: It is the run's last checkpoint.
        clock: Says when it was made.

    Raises:
        UsageError: A metric is no number, or a name can't be shown in a table and written on a command line.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"metrics are a mapping of names to numbers, not {metrics!r}", hint="pass e.g. metrics={'val/loss': 1.9}")
    if isinstance(tags, str) or any(not isinstance(t, str) or not _is_label(t) for t in tags or ()):
        raise UsageError(f"tags are a list of names of 1 to 200 printable characters, not {tags!r}", hint="pass e.g. tags=['release/1']")
    return {
        "created_at": utc_text(clock.now()),
        "metrics": {str(name): _number(str(name), value) for name, value in (metrics or {}).items()},
        "tags": sorted(set(tags or ())),
        "final": bool(final),
        "writer": {
            "tierstore": version("tierstore"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "host": platform.node(),
        },
    }


def quantise_fact(quantise: str | None, tiers: Iterable[Tier]) -> dict[str, str]:
    """What a checkpoint's manifest says of how it is to be quantised; nothing where each tier goes by its own rule.

    Raises:
        UsageError: There is no such scheme, or none of `tiers` quantises.
    """
    if quantise is None:
        return {}
    words = ("exact", *SCHEMES)
    if quantise not in words:
        near = difflib.get_close_matches(str(quantise), words, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"say one of {', '.join(words)}, or leave it to the tiers"
        raise UsageError(f"quantise={quantise!r} is no scheme", hint=hint)
    if quantise != "exact" and not any(tier.quantise for tier in tiers):
        raise UsageError(
            f"quantise={quantise!r} is for a tier that quantises, and this store has none",
            hint=f"give a tier after the authority `quantise: {quantise}` in the configuration, or save without it",
        )
    return {QUANTISE: quantise}


def checked_omit(patterns: Any) -> tuple[str, ...]:
    """The globs of what a save leaves out.

    Raises:
        UsageError: They are no list of text.
    """
    if isinstance(patterns, str) or not all(isinstance(one, str) and one for one in patterns):
        raise UsageError(f"omit is a list of patterns of tensors' names, not {patterns!r}", hint="pass e.g. omit=['optim.*.master']")
    return tuple(patterns)


def omitted_fact(patterns: Sequence[str], omitted: Mapping[str, int]) -> dict[str, Any]:
    """What a checkpoint's manifest says of what this rank left out of it; warns of patterns that left out nothing."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in omitted):
            log.warning("omit: no tensor matches %r: nothing is left out by it", pattern)
    return {"patterns": list(patterns), "tensors": len(omitted), "nbytes": sum(omitted.values())}


def _number(name: str, value: Any) -> float:
    if not _is_label(name):
        raise UsageError(f"{name[:100]!r} can't name a metric", hint="use 1 to 200 printable characters")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of several
        raise UsageError(f"metric {name!r} is {value!r}, not a number", hint="pass floats, e.g. metrics={'val/loss': 1.9}") from error


def _is_label(name: str) -> bool:
    return 0 < len(name) <= 200 and name.isprintable()
