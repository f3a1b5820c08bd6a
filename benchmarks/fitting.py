"""How large a state can be measured in the time that there is: as asked, unless the machine is so slow that nothing would be finished."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import torch
from common import scratch
from measure import fact
from peers import limits

from tierstore.units import format_size

_PROBE = 256 << 20
_BLOCK = 1 << 20
_LEAST = 64 << 20


def affordable(nbytes: int, directory: Path | None, until: float | None, two_turns: float, *, seconds: float | None = None) -> int:
    """Halves `nbytes` until two turns of all fit into the time, and says so in a fact; as it is where the time is not limited.

    Args:
        nbytes: What was asked for.
        directory: On the disk that is to be measured.
        until: When the time is over, by the monotonic clock.
        two_turns: How many times as long two turns of all take as `probe` does for as many bytes.
        seconds: What `probe` said, where it is known.
    """
    if until is None or nbytes <= _LEAST:
        return nbytes
    try:
        per_byte = (probe(directory) if seconds is None else seconds) / _PROBE
    except OSError:  # no O_DIRECT there: the raw limits say so in their rows
        return nbytes
    left_s, fits = until - time.monotonic(), nbytes
    while fits > _LEAST and fits * per_byte * two_turns > left_s:
        fits //= 2
    if fits < nbytes:
        fact(
            f"state of {format_size(fits)} in place of {format_size(nbytes)}",
            f"the machine is slow: {format_size(_PROBE)} written, copied and hashed in {per_byte * _PROBE:.1f} s",
        )
    return fits


def probe(directory: Path | None) -> float:
    """Seconds to copy 256 MiB, to write them by O_DIRECT and to hash them by one thread: what saves are made of."""
    state = {"probe": torch.zeros(_PROBE, dtype=torch.uint8)}
    with scratch(directory) as root:
        raw = limits.Raw(root / "probe", limits.Image(), threads=4)
        raw.save(state, 0)  # makes the image
        began = time.perf_counter()
        raw.save(state, 1)
        state["probe"].clone()
        for at in range(0, _PROBE, _BLOCK):
            hashlib.sha256(memoryview(state["probe"][at : at + _BLOCK].numpy())).digest()
        seconds = time.perf_counter() - began
        raw.close()
    return seconds
