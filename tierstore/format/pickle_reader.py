"""Reading pickles from outside without executing any: plain values, containers, and the names that the caller knows.

An interpreter of the pickle opcodes of its own, in which no opcode reaches Python's import system: a name is looked up in the
caller's table, and what a pickle "calls" are makers of that table. Work, memory and nesting are bounded by the length of the data and
by `max_ops`: the standard library's C reader allocates what a length or a memo number merely claims.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tierstore.errors import FormatError, TierStoreError

__all__ = ["MAX_OPS", "Instance", "Maker", "full_name", "read_pickle"]

MAX_OPS = 200_000_000
"""Opcodes in one pickle; stock DCP's metadata of a million chunks has about 40 million."""

_MAX_INT_NBYTES = 512
_MAX_KEY_DEPTH = 4
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))
_HINT = "the file is damaged, or was not made by torch; nothing of it was executed"


class Maker:
    """A name that a pickle may call: `make` gets the arguments as the pickle has them, and may raise anything."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name = name
        self.make = make


class Instance:
    """What stands for an object of a class: its name, the arguments that it was made with, and its state. Inert."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


def full_name(module: str, name: str) -> str:
    """A name of a pickle for people: it comes from outside, and may neither be endless nor speak to a terminal."""
    text = f"{module}.{name}"[:200]
    return text if text.isprintable() else ascii(text)


def read_pickle(
    data: bytes | memoryview,
    what: str,
    *,
    find: Callable[[str, str], Any],
    persistent: Callable[[Any], Any] | None = None,
    max_ops: int = MAX_OPS,
) -> Any:
    """Reads one pickle.

    Args:
        data: Its bytes; what follows the end is ignored.
        what: What to call it in messages.
        find: What a name (module, qualified name) stands for: a `Maker`, or a value. Raises for a name that it doesn't know.
        persistent: What a persistent id stands for; None: there are none.
        max_ops: How many opcodes it may have.

    Raises:
        FormatError: Malformed, too long, or it uses what no plain data need; or what `find`, `persistent` and makers raise.
    """
    return _Reader(bytes(data), what, find, persistent).run(max_ops)


class _Reader:
    def __init__(self, data: bytes, what: str, find: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None) -> None:
        self.data = data
        self.what = what
        self.find = find
        self.persistent = persistent
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, max_ops: int) -> Any:
        try:
            return self.interpret(max_ops)
        except TierStoreError:
            raise
        except RecursionError as error:
            raise self.refused("nested too deep") from error
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
            raise self.refused(f"malformed ({type(error).__name__})") from error

    def interpret(self, max_ops: int) -> Any:
        """The loop. The opcodes that metadata of a million chunks mostly consist of are done here, the others by the table."""
        data, table, stack, memo, marks = self.data, _TABLE, self.stack, self.memo, self.marks
        at = floor = 0  # below `floor`, the last mark, nothing is taken off
        for _ in range(max_ops):
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x4D:  # BININT2
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif code == 0x28:  # MARK
                floor = len(stack)
                marks.append(floor)
            elif code == 0x85 and len(stack) > floor:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x86 and len(stack) > floor + 1:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                handler = table[code]
                self.at = at
                if handler is None:
                    raise self.refused(f"the opcode {bytes([code])!r} is none that plain data need")
                handler(self)
                at = self.at
                floor = marks[-1] if marks else 0
        raise self.refused(f"more than {max_ops:,} opcodes")

    def refused(self, problem: str) -> FormatError:
        return FormatError(f"{self.what}: a pickle that can't be read: {problem}, at byte {self.at:,}", hint=_HINT)

    # ---- pieces

    def take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        if nbytes < 0 or end > len(self.data):
            raise self.refused(f"{nbytes:,} bytes are claimed, {len(self.data) - self.at:,} are left")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + 1000)
        text = self.take(end - self.at).decode("utf-8")
        self.at += 1
        return text

    def marked(self) -> list[Any]:
        """What lies above the last mark, taken off the stack."""
        start = self.marks.pop()
        items = self.stack[start:]
        if start > len(self.stack):
            raise IndexError("a mark above the stack")
        del self.stack[start:]
        return items

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError("nothing above the mark")
        return self.stack.pop()

    def key(self, value: Any) -> Any:
        if not _can_be_key(value, 0):
            raise self.refused(f"a {type(value).__name__} as a key")
        return value

    # ---- opcodes

    def global_(self) -> None:
        module = self.line()
        self.stack.append(self.find(module, self.line()))

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise self.refused("a name that is no text")
        self.stack.append(self.find(module, name))

    def call(self) -> None:
        args, maker = self.pop(), self.pop()
        if not isinstance(maker, Maker) or type(args) is not tuple:
            raise self.refused("a call of something that can't be called")
        self.stack.append(maker.make(*args))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, Instance):
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict and set(state) <= {"_metadata"}:
            if state:  # a module's state_dict says there which version each module has
                target._metadata = state["_metadata"]  # type: ignore[attr-defined]
        else:
            raise self.refused(f"a state for a {type(target).__name__}")

    def persistent_id(self) -> None:
        if self.persistent is None:
            raise self.refused("a persistent id")
        self.stack.append(self.persistent(self.pop()))

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def integer(self, nbytes: int) -> None:
        if nbytes > _MAX_INT_NBYTES:
            raise self.refused(f"an integer of {nbytes:,} bytes")
        self.stack.append(int.from_bytes(self.take(nbytes), "little", signed=True))

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Instance):  # of an unknown class nothing is kept
            raise self.refused(f"list items for a {type(target).__name__}")

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if len(items) % 2:
            raise self.refused("a key without a value")
        if type(target) in (dict, OrderedDict):
            for i in range(0, len(items), 2):
                target[self.key(items[i])] = items[i + 1]
        elif not isinstance(target, Instance):
            raise self.refused(f"keys for a {type(target).__name__}")

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise self.refused(f"set items for a {type(target).__name__}")
        target.update(self.key(item) for item in items)

    def tuple_(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def push(self, value: Any) -> None:
        self.stack.append(value)


def _can_be_key(value: Any, depth: int) -> bool:
    # Hashing a tuple recurses in C without a bound: nested ones are looked through first.
    if type(value) in _PLAIN_KEYS or isinstance(value, Instance):
        return True
    return type(value) is tuple and depth < _MAX_KEY_DEPTH and all(_can_be_key(item, depth + 1) for item in value)


def _table() -> list[Callable[[_Reader], None] | None]:
    handlers: dict[bytes, Callable[[_Reader], None]] = {
        b"\x80": lambda r: _check_protocol(r),
        b"\x95": lambda r: _ignore(r.take(8)),  # FRAME
        b"(": lambda r: r.marks.append(len(r.stack)),
        b"0": lambda r: _ignore(r.pop()),
        b"1": lambda r: _ignore(r.marked()),
        b"N": lambda r: r.push(None),
        b"\x88": lambda r: r.push(True),
        b"\x89": lambda r: r.push(False),
        b"J": lambda r: r.integer(4),
        b"K": lambda r: r.push(r.number(1)),
        b"M": lambda r: r.push(r.number(2)),
        b"\x8a": lambda r: r.integer(r.number(1)),
        b"\x8b": lambda r: r.integer(r.number(4)),
        b"G": lambda r: r.push(struct.unpack(">d", r.take(8))[0]),
        b"\x8c": lambda r: r.push(r.take(r.number(1)).decode("utf-8", "surrogatepass")),
        b"X": lambda r: r.push(r.take(r.number(4)).decode("utf-8", "surrogatepass")),
        b"\x8d": lambda r: r.push(r.take(r.number(8)).decode("utf-8", "surrogatepass")),
        b"C": lambda r: r.push(r.take(r.number(1))),
        b"B": lambda r: r.push(r.take(r.number(4))),
        b"\x8e": lambda r: r.push(r.take(r.number(8))),
        b"\x96": lambda r: r.push(bytearray(r.take(r.number(8)))),
        b"]": lambda r: r.push([]),
        b"l": lambda r: r.push(r.marked()),
        b"a": lambda r: r.extend([r.pop()]),
        b"e": lambda r: r.extend(r.marked()),
        b")": lambda r: r.push(()),
        b"\x85": lambda r: r.tuple_(1),
        b"\x86": lambda r: r.tuple_(2),
        b"\x87": lambda r: r.tuple_(3),
        b"t": lambda r: r.push(tuple(r.marked())),
        b"}": lambda r: r.push({}),
        b"s": lambda r: r.update([r.pop(), r.pop()][::-1]),
        b"u": lambda r: r.update(r.marked()),
        b"\x8f": lambda r: r.push(set()),
        b"\x90": lambda r: r.add(r.marked()),
        b"\x91": lambda r: r.push(frozenset(r.key(item) for item in r.marked())),
        b"h": lambda r: r.push(r.memo[r.number(1)]),
        b"j": lambda r: r.push(r.memo[r.number(4)]),
        b"q": lambda r: r.put(r.number(1)),
        b"r": lambda r: r.put(r.number(4)),
        b"\x94": lambda r: r.put(len(r.memo)),
        b"c": _Reader.global_,
        b"\x93": _Reader.stack_global,
        b"R": _Reader.call,
        b"\x81": _Reader.call,  # NEWOBJ: a class and its arguments
        b"b": _Reader.build,
        b"Q": _Reader.persistent_id,
    }
    return [handlers.get(bytes([code])) for code in range(256)]


def _check_protocol(reader: _Reader) -> None:
    version = reader.number(1)
    if not 2 <= version <= 5:
        raise reader.refused(f"protocol {version}")


def _ignore(value: Any) -> None:
    """What was taken off is not kept."""


_TABLE = _table()
