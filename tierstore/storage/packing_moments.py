"""Which tensors of a shard are quantised, what of them becomes zero, and how far an optimizer's steps are off afterwards."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tierstore.format.packed.layout import pieces_of
from tierstore.format.packed.types import Piece, Quantised, Stretch
from tierstore.format.quantise import UpdateError, decode_moment, encode_moment, update_errors
from tierstore.storage.packing_extras import Extra, covering
from tierstore.storage.packing_rules import QuantiseRule

__all__ = ["Measured", "Moments", "base_name", "is_quantised", "merged", "zero_mask"]

_Floats = npt.NDArray[np.float32]

_Made = tuple[int, bytes, _Floats]
"""Where a run of second moments begins in the file, what it becomes, and the numbers that are made of that again."""

_KEPT = 8
"""Blocks of second moments, as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one block came to for one tensor; `error` None: nothing was measured here."""

    name: str
    error: UpdateError | None = None


class Moments:
    """The tensors of one file that are quantised.

    Args:
        stretches: Of the file.
        rule: Which tensors, and how; None: none.
        scheme: Used instead of the rule's own, where one is given.
        block_nbytes: Of the packed file.
    """

    def __init__(self, stretches: Sequence[Stretch], rule: QuantiseRule | None, scheme: str | None, block_nbytes: int) -> None:
        self._block = block_nbytes
        self._stretches = stretches
        self._scheme: Literal["q8", "q4"] = "q8"
        self.names: dict[str, Stretch] = {}
        """What is quantised, by name."""
        self._second: dict[str, Stretch] = {}
        self._decoded = _Decoded()
        if rule is None:
            return
        self._scheme = _known(scheme or rule.scheme)
        by_name = {stretch.name: stretch for stretch in stretches if stretch.name}
        for name, stretch in by_name.items():
            if is_quantised(stretch, rule):
                self.names[name] = stretch
        for name, stretch in self.names.items():
            base, at, place = name.partition("@")
            second = by_name.get(f"{base}_sq{at}{place}")
            if second is not None and second.shape == stretch.shape and second.dtype == "float32":
                self._second[name] = second

    def needs(self, stretch: Stretch, begin: int, end: int) -> tuple[int, int] | None:
        """Which other bytes of the file have to be known for the bytes ``[begin, end)`` of a tensor: those of its second moment."""
        second = self._second.get(stretch.name)
        if second is None:
            return None
        first, last = second.begin + begin - stretch.begin, second.begin + end - stretch.begin
        # Whole blocks: what becomes of a number depends on what is quantised with it.
        first = max(second.begin, first // self._block * self._block)
        last = min(second.end, -(-last // self._block) * self._block)
        return first, last

    def quantised(self, piece: Piece, stretch: Stretch, begin: int) -> Quantised | None:
        """How a piece of the block at `begin` is quantised; None: it is not."""
        if stretch.name not in self.names or piece.itemsize != 4:
            return None
        columns = stretch.shape[-1]
        kind: Literal["first", "second"] = "second" if base_name(stretch.name).endswith("_sq") else "first"
        first = (begin + piece.begin - stretch.begin) // 4 % columns
        return Quantised(scheme=self._scheme, kind=kind, columns=columns, first_column=first)

    def second_of(self, piece: Piece, stretch: Stretch, begin: int, extras: Sequence[Extra]) -> _Floats | None:
        """The second moments that belong to a piece of first ones."""
        second = self._second.get(stretch.name)
        if second is None:
            return None
        first = second.begin + begin + piece.begin - stretch.begin
        data = covering(extras, first, first + piece.end - piece.begin)
        return None if data is None else np.frombuffer(data, dtype="<f4")

    def measure(
        self, piece: Piece, stretch: Stretch, begin: int, exact: _Floats, made: _Floats, extras: Sequence[Extra]
    ) -> UpdateError | None:
        """How far the steps of a piece of first moments are off; None: they are steps of no optimizer, so that nobody can say.

        Args:
            piece: In the block at `begin`.
            stretch: Of which it is.
            begin: In the file, in bytes.
            exact: The piece's numbers.
            made: What is made of them again.
            extras: Have the second moments.
        """
        v = self.second_of(piece, stretch, begin, extras)
        if v is None:
            one = np.ones(exact.size, dtype=np.float32)
            return update_errors(exact, one, made, one)
        decoded = self._decoded_second(piece, stretch, begin, v, extras)
        steps = np.isfinite(v) & (v >= 0)  # the others are no steps of any optimizer, and are stored as they are
        if not steps.any():
            return None
        if not steps.all():
            exact, v, made, decoded = exact[steps], v[steps], made[steps], decoded[steps]
        return update_errors(exact, v, made, decoded)

    def _decoded_second(self, piece: Piece, stretch: Stretch, begin: int, v: _Floats, extras: Sequence[Extra]) -> _Floats:
        second = self._second[stretch.name]
        if second.name not in self.names:
            return v
        first = second.begin + begin + piece.begin - stretch.begin
        last = first + piece.end - piece.begin
        found: _Floats = v.copy()
        for block in range(first // self._block, -(-last // self._block)):
            for at, _, made in self._decoded.of((second.name, block), lambda block=block: self._decode_block(second, block, extras)):  # type: ignore[misc]
                low, high = max(at, first), min(at + 4 * made.size, last)
                if low < high:
                    found[(low - first) // 4 : (high - first) // 4] = made[(low - at) // 4 : (high - at) // 4]
        return found

    def coded(self, piece: Piece, stretch: Stretch, begin: int) -> bytes | None:
        """What a piece of second moments in the block at `begin` becomes, where that was found out a moment ago for first ones."""
        first, nbytes = begin + piece.begin, piece.end - piece.begin
        for at, coded, made in self._decoded.known((stretch.name, begin // self._block)):
            if at == first and 4 * made.size == nbytes:
                return coded
        return None

    def _decode_block(self, second: Stretch, block: int, extras: Sequence[Extra]) -> list[_Made]:
        """What becomes of the second moments in one block; what is kept exactly is left out."""
        origin = block * self._block
        found = []
        for part, of in pieces_of((second,), max(origin, second.begin), min(origin + self._block, second.end)):
            at = max(origin, second.begin) + part.begin
            part = Piece(begin=at - origin, end=at + part.end - part.begin - origin, itemsize=part.itemsize, rotated=False)
            how = self.quantised(part, of, origin)
            data = covering(extras, at, at + part.end - part.begin)
            if how is None or data is None:
                continue
            numbers = np.frombuffer(data, dtype="<f4")
            coded = encode_moment(numbers, how)
            if coded is not None:
                found.append((at, coded, decode_moment(coded, numbers.size, how)))
        return found

    def facts(self, errors: Mapping[str, UpdateError | None]) -> dict[str, Mapping[str, Any]]:
        """What the footer says of the tensors that were quantised."""
        told: dict[str, Mapping[str, Any]] = {}
        for name, error in errors.items():
            kind = "second" if base_name(name).endswith("_sq") else "first"
            measured = {} if error is None else {"max_error": _finite(error.max), "mean_error": _finite(error.mean)}
            told[name] = {"scheme": self._scheme, "kind": kind, **measured}
        return told


class _Decoded:
    """Blocks of second moments as they will be read, of those used last: two blocks of first moments need most of them. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int], Future[list[_Made]]] = OrderedDict()

    def of(self, key: tuple[str, int], make: Callable[[], list[_Made]]) -> list[_Made]:
        """The block, made by whoever is first to want it."""
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
            else:
                mine = self._blocks[key] = Future()
                if len(self._blocks) > _KEPT:
                    self._blocks.popitem(last=False)
        if found is not None:
            return found.result()
        try:
            mine.set_result(make())
        except BaseException as error:  # noqa: BLE001  told to all who wait for it
            mine.set_exception(error)
            with self._lock:
                self._blocks.pop(key, None)
        return mine.result()

    def known(self, key: tuple[str, int]) -> list[_Made]:
        """The block, if it is here and was made without an error; nobody waits for it."""
        with self._lock:
            found = self._blocks.get(key)
        return found.result() if found is not None and found.done() and found.exception() is None else []


def zero_mask(v: _Floats | None) -> npt.NDArray[np.bool_] | None:
    return None if v is None else v == 0


def merged(errors: Iterable[UpdateError | None]) -> UpdateError | None:
    """Of all parts together."""
    total: UpdateError | None = None
    for error in errors:
        total = error if total is None else total if error is None else total.merged(error)
    return total


def _known(scheme: str) -> Literal["q8", "q4"]:
    if scheme == "q8":
        return "q8"
    if scheme == "q4":
        return "q4"
    raise ValueError(f"there is no scheme {scheme!r}")


def base_name(name: str) -> str:
    """Without the place of a further chunk of the same tensor (`format.shard`)."""
    return name.partition("@")[0]


def is_quantised(stretch: Stretch, rule: QuantiseRule) -> bool:
    """Whether a tensor is one that the rule means; runs of it that can't be quantised stay exact all the same."""
    if stretch.dtype != "float32" or len(stretch.shape) < 2 or (stretch.end - stretch.begin) // 4 < rule.min_numel:
        return False
    base = base_name(stretch.name)
    return any(fnmatchcase(base, one) for one in rule.include) and not any(fnmatchcase(base, one) for one in rule.exclude)


def _finite(number: float) -> float:
    return min(float(number), sys.float_info.max)
