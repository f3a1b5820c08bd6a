"""CUDA (and what torch calls so on AMD's devices) for `state.device_copy`: nothing but the calls. Not run where there is no such device."""

from __future__ import annotations

import torch

__all__ = ["Cuda"]

_PORTABLE = 1
"""cudaHostRegisterPortable: for all devices of the process."""


class Cuda:
    """`device_copy.Device`."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def register(self, address: int, nbytes: int) -> None:
        _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> None:
        _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]

    def current(self, device: torch.device) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(device))

    def side(self, device: torch.device) -> CudaStream:
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return CudaStream(self._sides[device])


class CudaStream:
    """`device_copy.Stream`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def wait(self, other: object) -> None:
        assert isinstance(other, CudaStream)
        self._stream.wait_stream(other._stream)

    def copy(self, place: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            place.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def mark(self) -> CudaEvent:
        # Blocking: who waits sleeps.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaEvent(event)


class CudaEvent:
    """`device_copy.Event`."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


def _check(call: str, code: object) -> None:
    number = int(code)  # type: ignore[call-overload]
    if number != 0:
        raise RuntimeError(f"{call} answered {number}")
