"""A state in host memory, as `stage` leaves it: its bytes as a source, what the index says of them, and how the memory goes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierstore.errors import UsageError
from tierstore.format.index import TensorEntry
from tierstore.state.device_copy import Arrival
from tierstore.state.image import Image
from tierstore.storage.sources import LocalSource
from tierstore.tiers.stall import StageTimes

__all__ = ["ImageSource", "StagedState", "staged_in"]


class ImageSource:
    """The staged bytes as a `storage.contract.Source`, in memory: read-only views of the image, nothing is copied.

    Where a device still copies into the image, whoever asks for bytes first waits for that.
    """

    __slots__ = ("_arrival", "_view")

    def __init__(self, view: memoryview, arrival: Arrival | None = None) -> None:
        self._view = view.toreadonly()
        self._arrival = arrival

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        if self._arrival is not None and not self._arrival.done():
            await asyncio.to_thread(self._arrival.wait)
        return self.view(offset, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """`storage.contract.InMemory`.

        Raises:
            IntegrityError: A device failed to copy.
        """
        if not 0 <= offset <= offset + nbytes <= self._view.nbytes:
            raise UsageError(f"bytes {offset} to {offset + nbytes} lie outside of a staged image of {self._view.nbytes}")
        if self._arrival is not None:
            self._arrival.wait()
        return self._view[offset : offset + nbytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedState:
    """A state in host memory, independent of the tensors that it came from.

    Attributes:
        source: The shard file's bytes; an image on a memory tier is a file that the tier can take in (`sources.LocalSource`).
        tensors: What the routing index will say of them.
        objects: This rank's encoded tree: everything that is not a tensor, and references to those.
        nbytes: Length of the shard, in bytes.
        seconds: Where the time went.
        omitted: Names of tensors that were left out on purpose, and their lengths as wholes, in bytes.
    """

    source: ImageSource | LocalSource
    tensors: tuple[TensorEntry, ...]
    objects: bytes
    nbytes: int
    seconds: StageTimes
    _free: Callable[[], None] = field(repr=False)
    omitted: Mapping[str, int] = field(default_factory=dict)

    def release(self) -> None:
        """Gives the image back to its pool, when its bytes are on a tier; a second call does nothing."""
        self._free()


def staged_in(
    image: Image,
    arrival: Arrival,
    *,
    tensors: tuple[TensorEntry, ...],
    objects: bytes,
    seconds: StageTimes,
    omitted: Mapping[str, int] | None = None,
) -> StagedState:
    """What was copied, or is arriving, in `image`."""
    source = ImageSource(image.view, None if arrival.done() else arrival)

    def free() -> None:
        arrival.settle()  # no device writes into what the next save takes
        image.release()

    return StagedState(
        source=source if image.path is None else LocalSource(source, image.path, hard=True, memory=True),
        tensors=tensors,
        objects=objects,
        nbytes=image.nbytes,
        seconds=seconds,
        _free=free,
        omitted=omitted or {},
    )
