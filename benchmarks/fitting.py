"""How large a state can be measured in the time that there is: as asked, unless the machine is so slow that nothing would be finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import scratch
from measure import fact, timed
from peers import limits

from tierstore.units import format_size

_PROBE = 256 << 20
_PARTS = ("memory copied at", "O_DIRECT written at", "SHA-256 by one thread")
_LEAST = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What saves are made of, in bytes a second: copying into touched memory, writing by O_DIRECT, SHA-256 by one thread."""

    copy: float
    write: float
    hash: float

    @property
    def seconds(self) -> float:
        """For 256 MiB, one after the other."""
        return _PROBE / self.copy + _PROBE / self.write + _PROBE / self.hash

    def __str__(self) -> str:
        return ", ".join(f"{what} {speed / 1e9:.1f} GB/s" for what, speed in zip(_PARTS, (self.copy, self.write, self.hash), strict=True))


def affordable(
    suite: str, nbytes: int, directory: Path | None, until: float | None, two_turns: float, *, speed: Callable[[Path | None], Speed]
) -> int:
    """Halves `nbytes` until two turns of all fit into the time; as it is where the time is not limited. Facts say so, and how fast it is.

    Args:
        suite: Whose state it is.
        nbytes: What was asked for.
        directory: On the disk that is to be measured.
        until: When the time is over, by the monotonic clock.
        two_turns: How many times `Speed.seconds` two turns of all take for each 256 MiB.
        speed: `probe`.
    """
    if until is None or nbytes <= _LEAST:
        return nbytes
    try:
        found = speed(directory)
    except OSError:  # no O_DIRECT there: the raw limits say so in their rows
        return nbytes
    fact(f"{suite}: machine at its start", str(found))
    left_s, fits = until - time.monotonic(), nbytes
    while fits > _LEAST and fits / _PROBE * found.seconds * two_turns > left_s:
        fits //= 2
    if fits < nbytes:
        fact(f"{suite}: size", f"{format_size(fits)} in place of {format_size(nbytes)}, for the machine is too slow")
    return fits


def probe(directory: Path | None) -> Speed:
    """A look of a second or two."""
    state = {"probe": torch.zeros(_PROBE, dtype=torch.uint8)}
    copied = torch.ones(_PROBE, dtype=torch.uint8)
    with scratch(directory) as root:
        raw = limits.Raw(root / "probe", limits.Image(), threads=4)
        raw.save(state, 0)  # makes the image
        write_s = timed(raw.save, state, 1)
        raw.close()
    copy_s = timed(copied.copy_, state["probe"])
    hash_s = timed(limits.hash_blocks, memoryview(copied.numpy()))
    return Speed(copy=_PROBE / copy_s, write=_PROBE / write_s, hash=_PROBE / hash_s)
