"""Which ranks hold other values than the copy that is stored: each tells what its plain tensors look like, and rank 0 compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from tierstore.state.agreement import Agreement

__all__ = ["differing"]

_ROW = np.dtype([("key", "<u8"), ("print", "V16"), ("written", "u1")])


def differing(agreement: Agreement, what: str, prints: Mapping[str, tuple[bytes, bool]]) -> frozenset[str]:
    """The keys of this rank's tensors whose values are not those of the rank that writes them.

    Args:
        agreement: All ranks that save together.
        what: What it is about, for messages.
        prints: Key → 16 bytes that stand for its value, and whether this rank writes it (`OwnState.fingerprints`).

    Raises:
        DeadlineError, RankError: From `Agreement.agree`.
    """
    by_hash = {_hash(key): key for key in prints}
    rows = np.array([(number, prints[key][0], prints[key][1]) for number, key in by_hash.items()], dtype=_ROW)
    verdict = json.loads(agreement.agree(what, rows.tobytes(), _compare))
    return frozenset(by_hash[number] for number in verdict.get(str(agreement.rank), ()))


def _compare(reports: Sequence[bytes]) -> bytes:
    tables = [np.frombuffer(report, dtype=_ROW) for report in reports]
    stored: dict[int, bytes] = {}
    for table in tables:
        for key, value, _ in table[table["written"] == 1].tolist():
            stored.setdefault(key, value)
    found: dict[int, list[int]] = {}
    for rank, table in enumerate(tables):
        for key, value, written in table.tolist():
            if not written and stored.get(key, value) != value:
                found.setdefault(rank, []).append(key)
    return json.dumps(found).encode()


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
