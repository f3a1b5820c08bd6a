"""Copies from a device that go on by themselves: on a stream of their own, into registered memory, while `save` has returned.

The caller may change its tensors as soon as `save` returns: what it gives the device from then on, on the stream that was current in
the call, waits for the copies. Work on another stream that nothing orders behind that one is the caller's to order.
Where the memory can't be registered (a limit on locked memory), copies are made as on any other device: `save` waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from tierstore.errors import IntegrityError
from tierstore.state.bits import as_bits
from tierstore.state.copying import Move, as_place
from tierstore.state.device_cuda import Cuda
from tierstore.state.image import Image
from tierstore.state.image_memory import whole_pages

__all__ = ["Arrival", "Device", "DeviceCopies", "Event", "Stream"]

log = logging.getLogger(__name__)


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether the stream has got there."""

    def wait(self) -> None:
        """Returns when it has; callable from any thread.

        Raises:
            RuntimeError: The device failed.
        """


class Stream(Protocol):
    """A queue of a device's work, done in order. Its methods only ask for work, and return at once."""

    def wait(self, other: Stream) -> None:
        """What is asked for from now on waits for all that `other` was asked for so far."""

    def copy(self, place: torch.Tensor, source: torch.Tensor) -> None:
        """Copies `source`, on the device, to `place`, in registered host memory; the memory of `source` is not used again before."""

    def mark(self) -> Event:
        """The point behind all that was asked for so far."""


class Device(Protocol):
    """A kind of device, e.g. all of CUDA. All of its methods raise RuntimeError where the device refuses."""

    def register(self, address: int, nbytes: int) -> None:
        """Makes host memory one that the device copies into by itself."""

    def unregister(self, address: int) -> None:
        """Ends that, before the memory goes."""

    def current(self, device: torch.device) -> Stream:
        """The stream that the caller's own work goes to."""

    def side(self, device: torch.device) -> Stream:
        """A stream for copies, the same each time."""


class Arrival:
    """When all copies of one save have arrived in its image."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Event]] = []

    def expect(self, device: str, event: Event) -> None:
        """Adds what is to be waited for; `device` names where from."""
        self._events.append((device, event))

    def done(self) -> bool:
        """Whether nothing is under way, and nothing failed: `wait` tells that."""
        try:
            return all(event.done() for _, event in self._events)
        except RuntimeError:
            return False

    def wait(self) -> None:
        """Returns when all is there.

        Raises:
            IntegrityError: A device failed; the image holds anything.
        """
        for device, event in self._events:
            try:
                event.wait()
            except RuntimeError as error:
                raise IntegrityError(
                    f"the copies from {device} into the staged image failed: {error}", hint="the device is broken; nothing was committed"
                ) from error

    def settle(self) -> None:
        """As `wait`, for who only wants to know that no device writes into the memory any more."""
        try:
            self.wait()
        except IntegrityError as error:
            log.warning("%s", error.message)


class DeviceCopies:
    """What a store's saves use of devices.

    Args:
        devices: Kinds of devices whose copies go on by themselves, by torch's name; None: CUDA.
    """

    def __init__(self, devices: Mapping[str, Device] | None = None) -> None:
        self._devices: Mapping[str, Device] = {"cuda": Cuda()} if devices is None else devices
        self._refused: set[str] = set()

    def register(self, image: Image, kind: str) -> bool:
        """Registers an image with the kind of device that its tensors are on, once in its life; False where it can't be."""
        memory = image.memory
        if memory.registered == kind:
            return True
        if kind not in self._devices or kind in self._refused or memory.registered:
            return False
        device, address, nbytes = self._devices[kind], memory.address, whole_pages(memory.nbytes)
        try:
            device.register(address, nbytes)
        except RuntimeError as error:
            self._refused.add(kind)
            log.warning("kind=%s nbytes=%d the device can't have the image registered, copies are waited for: %s", kind, nbytes, error)
            return False
        memory.register(kind, lambda: _unregister(device, address))
        return True

    def sender(self, image: Image, arrival: Arrival) -> Callable[[Sequence[Move], memoryview], Sequence[Move]]:
        """What `copying.copy_all` gives tensors to that are not plain host memory; it begins what it can, and returns the others."""

        def send(moves: Sequence[Move], view: memoryview) -> Sequence[Move]:
            there: dict[torch.device, list[Move]] = {}
            for move in moves:
                there.setdefault(move.tensor.device, []).append(move)
            left: list[Move] = []
            for device, group in there.items():
                if not self.register(image, device.type) or not self._begin(device, group, view, arrival):
                    left += group
            return left

        return send

    def _begin(self, where: torch.device, moves: Sequence[Move], view: memoryview, arrival: Arrival) -> bool:
        device = self._devices[where.type]
        try:
            side, current = device.side(where), device.current(where)
            side.wait(current)  # the values that the caller sees now
            try:
                for move in moves:
                    side.copy(as_place(move, view), as_bits(move.tensor))
            finally:
                arrival.expect(str(where), side.mark())
                current.wait(side)  # what the caller does next comes after the copies
        except RuntimeError as error:
            log.warning("device=%s copies could not be begun, they are made one by one: %s", where, error)
            arrival.settle()
            return False
        return True


def _unregister(device: Device, address: int) -> None:
    try:
        device.unregister(address)
    except RuntimeError as error:  # at the end of a process the device may be gone already
        log.debug("memory at %#x is not registered any more: %s", address, error)
