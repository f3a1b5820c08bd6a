"""Ranks that load together: what one of them meets all of them hear, before any goes on to the next thing."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from tierstore.errors import IntegrityError, RankError, StateMismatchError, TierStoreError, reason_of
from tierstore.state.agreement import Agreement

__all__ = ["Heard", "asked_by_none", "jointly", "time_to_read"]

T = TypeVar("T")

_TOLD = 16
"""Of so many failed ranks the numbers are told."""

_SLOWEST = 16 << 20
"""Bytes per second that a rank reads at least, else it counts as hanging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard(Generic[T]):
    """What came of something that all ranks did: this rank's result, whether any rank's was flagged, and the largest number told."""

    result: T
    flag: bool
    most: int


def jointly(
    ranks: Agreement | None,
    what: str,
    work: Callable[[], T],
    *,
    flag: Callable[[T], bool] = lambda result: False,
    most: Callable[[T], int] = lambda result: 0,
) -> Heard[T]:
    """Does `work` on every rank; returns when all have done theirs, and raises on all where one has failed.

    Args:
        ranks: Who takes part; None: this process alone.
        what: What it is about, for messages.
        work: What this rank does.
        flag: Says something of this rank's result that all are to hear.
        most: A number of which all are to hear the largest.

    Raises:
        IntegrityError: Stored bytes are damaged, here or on other ranks, and nothing else is wrong: the same kind of error on all ranks.
        RankError: Other ranks failed; ``context["ranks"]`` names them.
        DeadlineError: Ranks did not come.
    """
    if ranks is None:
        alone = work()
        return Heard(result=alone, flag=flag(alone), most=most(alone))
    error: Exception | None = None
    try:
        result = work()
        told: dict[str, object] = {"flag": flag(result), "most": most(result)}
    except Exception as caught:  # noqa: BLE001 - a boundary: told to the others, then raised
        error = caught
        kinds = {"damage": isinstance(caught, IntegrityError), "heard": isinstance(caught, RankError)}
        told = {"error": reason_of(caught)[:4000], **kinds}
    verdict = json.loads(ranks.agree(what, json.dumps(told).encode(), _combine))
    failed = verdict["failed"]
    if error is not None and (verdict["damage"] == isinstance(error, IntegrityError)):
        raise error
    if failed:
        some = ", ".join(map(str, failed)) + (f" and {verdict['count'] - len(failed)} more" if verdict["count"] > len(failed) else "")
        message = f"{what}: rank{'s' if len(failed) > 1 else ''} {some} of {ranks.world_size} failed: {verdict['first']}"
        if verdict["damage"]:
            raise IntegrityError(message, hint="load an older step, or `resume(fallback=True)`", ranks=failed) from error
        raise RankError(message, hint="mend that rank; every rank has stopped at the same place", ranks=failed) from error
    return Heard(result=result, flag=verdict["flag"], most=verdict["most"])


def _combine(values: Sequence[bytes]) -> bytes:
    told = [json.loads(value) for value in values]
    failed = [rank for rank, one in enumerate(told) if "error" in one]
    # A rank that only heard of another's failure is no reason; what is not damage is told first: no older checkpoint mends it.
    failed = [rank for rank in failed if not told[rank]["heard"]] or failed
    first = next((rank for rank in failed if not told[rank]["damage"]), failed[0] if failed else 0)
    verdict = {
        "failed": failed[:_TOLD],
        "count": len(failed),
        "first": (f"rank {first}: " if len(failed) > 1 else "") + told[first].get("error", ""),
        "damage": bool(failed) and all(told[rank]["damage"] for rank in failed),
        "flag": any(one.get("flag", False) for one in told),
        "most": max(one.get("most", 0) for one in told),
    }
    return json.dumps(verdict).encode()


@contextmanager
def time_to_read(ranks: Agreement | None, nbytes: int) -> Iterator[None]:
    """While `nbytes`, of the rank that reads most, are read, ranks wait longer for each other."""
    if ranks is None:
        yield
        return
    before, ranks.deadline_s = ranks.deadline_s, ranks.deadline_s + nbytes / _SLOWEST
    try:
        yield
    finally:
        ranks.deadline_s = before


def asked_by_none(ranks: Agreement, what: str, stored: Sequence[str], left: Callable[[], set[str]]) -> list[str]:
    """Which of the `stored` names every rank leaves out; `left` gives this rank's. One bit a name and rank is sent.

    Raises:
        StateMismatchError, RankError: `left` failed somewhere, or the ranks look at different checkpoints.
    """
    try:
        mine = left()
    except TierStoreError as error:
        ranks.fail(what, error)
    bits = np.packbits(np.fromiter((name in mine for name in stored), dtype=bool, count=len(stored)))
    digest = hashlib.sha256("\0".join(stored).encode("utf-8", "surrogatepass")).digest()
    found = ranks.agree(what, digest + zlib.compress(bits.tobytes(), 1), lambda values: _all_bits(what, values))
    return [name for name, bit in zip(stored, np.unpackbits(np.frombuffer(found, dtype=np.uint8)), strict=False) if bit]


def _all_bits(what: str, values: Sequence[bytes]) -> bytes:
    other = [rank for rank, value in enumerate(values) if value[:32] != values[0][:32]]
    if other:
        raise StateMismatchError(
            f"{what}: ranks {other[:_TOLD]} see other names in the checkpoint than rank 0", hint="all ranks load the same one"
        )
    every = np.frombuffer(zlib.decompress(values[0][32:]), dtype=np.uint8).copy()
    for value in values[1:]:
        every &= np.frombuffer(zlib.decompress(value[32:]), dtype=np.uint8)
    return bytes(every)
