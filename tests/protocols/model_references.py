"""A model of references between checkpoints' files on one tier, all of whose states are looked at (docs/design/protocol.md, "References").

B's file on tier T may take bytes from X's. Two writers of B's copy (one may sleep for as long as it likes), the collector of X, the evictor
of X's copy, the collector of B, the evictor of B's copy, who brings that copy back, and a reader of B under a lease each take one step at a
time, in every order. A crash is an actor that never comes to its next step: what must hold holds in every state. `Rules` has a switch for
each check of the protocol; without any of them something breaks.

B is committed when it is copied; or, saved straight to T (`explore(direct=True)`: T is the authority, whose copies nobody drops, and one
process has the image), it commits only after its file is there, if nobody has condemned it before: who collects may do so at any time, as
if B were an old orphan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The checks. All of them is the protocol."""

    record_first: bool = True
    """`referenced` stands in X's log before B's file is published."""
    writer_asks: bool = True
    """It is refused where X was swept, is reduced without T, or its copy on T was let go."""
    by_number: bool = True
    """The collector of X ends its log upon the number up to which it knows the referrers."""
    dead_is_final: bool = True
    """A referrer is dead only when it can never be read anywhere again (swept, condemned); else also when T dropped its copy."""
    looks_at_shards: bool = True
    """And when nothing of it is left on T."""
    looks_at_fate: bool = True
    """A referrer without a shard on T lives all the same while it is not final: a writer may be about to publish."""
    fate_first: bool = True
    """First the fate, which never changes back, then the shards."""
    asks_for_leases: bool = True
    """The collector of B waits for its readers before it deletes."""
    commit_wins: bool = True
    """B that was condemned does not commit any more."""


class State(NamedTuple):
    # X
    shards: bool = True
    end: str = "open"  # open | reduced | evicting | swept
    ref: bool = False
    # B
    fate: str = "committed"  # open | committed | final; and on T:
    drops: int = 0
    dropped: bool = False
    counted: bool = False
    file: str = ""  # "" | own | ref
    lease: bool = False
    reading: bool = False
    # where each actor is
    w: tuple[int, int] = (0, 0)
    hint: tuple[bool, bool] = (False, False)
    since: tuple[int, int] = (0, 0)
    c: int = 0
    c_grown: bool = False  # X's log, since it was read
    c_alive: bool = True
    c_final: bool = False
    c_shards: bool = False
    e: int = 0
    d: int = 0
    v: int = 0
    p: int = 0
    r: int = 0


Steps = Iterator[tuple[str, State]]


def _writer(number: int) -> Callable[[State, Rules], Steps]:
    """Copies or saves B to T: notes the drops that it saw, records the reference, publishes, lets the copy count, or commits."""

    def step(s: State, rules: Rules) -> Steps:
        at, me = s.w[number], f"writer {number}"

        def to(place: int, **changes: object) -> State:
            w = tuple(place if n == number else x for n, x in enumerate(s.w))
            return s._replace(w=w, **changes)  # type: ignore[arg-type]

        def mine(values: tuple[object, ...], value: object) -> tuple[object, ...]:
            return tuple(value if n == number else x for n, x in enumerate(values))

        if at == 0 and not s.dropped and s.fate != "final" and s.w[0] >= number:
            yield f"{me}: begins", to(1, since=mine(s.since, s.drops))
        elif at == 1:
            refused = s.end in ("swept", "evicting") or (s.end == "reduced" and not s.ref)
            if not rules.record_first:
                yield f"{me}: takes a hint", to(2, hint=mine(s.hint, True))
            elif rules.writer_asks and refused:
                yield f"{me}: is refused", to(2, hint=mine(s.hint, False))
            elif s.ref:
                yield f"{me}: is recorded already", to(2, hint=mine(s.hint, True))
            else:
                yield f"{me}: records", to(2, hint=mine(s.hint, True), ref=True, c_grown=0 < s.c < 4)
            yield f"{me}: takes no hint", to(2, hint=mine(s.hint, False))
        elif at == 2:
            kept = s.hint if not rules.record_first else mine(s.hint, False)
            yield f"{me}: publishes", to(3, file="ref" if s.hint[number] else "own", hint=kept)
        elif at == 3:
            if not rules.record_first and s.hint[number] and not s.ref and s.end != "swept":
                yield f"{me}: records late", s._replace(ref=True, c_grown=0 < s.c < 4)
            fate = "committed" if s.fate == "open" or not rules.commit_wins else s.fate
            wanted = fate == "committed" and s.drops == s.since[number] and bool(s.file)
            yield f"{me}: ends", to(4, fate=fate, counted=s.counted or wanted, since=mine(s.since, 0))

    return step


def _not_final(s: State, rules: Rules) -> bool:
    return not (s.fate == "final" or (not rules.dead_is_final and s.dropped))


def _collector(s: State, rules: Rules) -> Steps:
    """Of X, which has expired: reads its log, looks at each referrer, and ends the log with ``swept`` or ``reduced``; then deletes."""
    if s.c == 0 and s.end != "swept":
        yield "collector: reads the log", s._replace(c=1, c_alive=s.ref, c_final=False, c_shards=False)
    elif s.c in (1, 2):
        first = (s.c == 1) == rules.fate_first
        if first:
            yield "collector: looks at the fate", s._replace(c=s.c + 1, c_final=not rules.looks_at_fate or not _not_final(s, rules))
        else:
            yield "collector: looks for shards", s._replace(c=s.c + 1, c_shards=rules.looks_at_shards and bool(s.file))
    elif s.c == 3:
        dead = not s.c_alive or (s.c_final and not s.c_shards)
        if rules.by_number and s.c_grown:
            yield "collector: has lost the number", _from_the_start(s)
        elif dead:
            yield "collector: swept", _from_the_start(s)._replace(c=4, end="swept")
        elif s.end in ("reduced", "evicting"):
            yield "collector: waits", _from_the_start(s)
        else:
            yield "collector: reduced", _from_the_start(s)._replace(end="reduced")
    elif s.c == 4:
        yield "collector: deletes", s._replace(c=5, shards=False)


def _from_the_start(s: State) -> State:
    return s._replace(c=0, c_grown=False, c_alive=True, c_final=False, c_shards=False)


def _evictor(s: State, rules: Rules) -> Steps:
    """Of X's copy on T: nothing is recorded after ``evicting``, so that the referrers are known then."""
    if s.e == 0 and s.end == "open":
        yield "evictor: evicting", s._replace(e=1, end="evicting", c_grown=0 < s.c < 4)
    elif s.e == 1:
        final = not s.ref or not rules.looks_at_fate or not _not_final(s, rules)
        if rules.fate_first and final:
            yield "evictor: finds no living referrer", s._replace(e=2)
        elif not rules.fate_first and not (rules.looks_at_shards and s.file):
            yield "evictor: finds no shards", s._replace(e=2)
    elif s.e == 2 and rules.fate_first:
        if not (rules.looks_at_shards and s.ref and s.file):
            yield "evictor: deletes", s._replace(e=3, shards=False)
    elif s.e == 2 and (not s.ref or not rules.looks_at_fate or not _not_final(s, rules)):
        yield "evictor: deletes", s._replace(e=3, shards=False)


def _ender(s: State, rules: Rules) -> Steps:
    """The collector of B, which goes for good; also of what a late writer leaves."""
    if s.fate != "final":
        yield f"ender: {'swept' if s.fate == 'committed' else 'condemned'} B", s._replace(fate="final", counted=False)
    elif s.file and not (rules.asks_for_leases and s.lease):
        yield "ender: deletes B's file", s._replace(file="")


def _dropper(s: State, rules: Rules) -> Steps:
    """The evictor of B's copy on T, which stands elsewhere; it never goes under a lease that it sees."""
    if s.v == 0 and s.counted and not s.dropped and s.fate == "committed":
        yield "dropper: evicting B", s._replace(v=1, dropped=True, counted=False, drops=s.drops + 1)
    elif s.v == 1:
        yield "dropper: deletes B's file", s._replace(v=2, file="", reading=False)  # who read it there goes on with another copy


def _bringer(s: State, rules: Rules) -> Steps:
    """Brings B's copy back, self-contained, where no file lies there; what lies there is taken as it is."""
    if s.p == 0 and s.v == 2 and s.dropped and s.fate == "committed":
        yield "bringer: writes", s._replace(p=1, file=s.file or "own")
    elif s.p == 1:
        counts = s.fate == "committed" and bool(s.file)
        yield "bringer: replicated", s._replace(p=2, counted=counts, dropped=s.dropped and not counts)


def _reader(s: State, rules: Rules) -> Steps:
    """Of B on T, under a lease: makes it, looks at the log, reads."""
    if s.r == 0:
        yield "reader: lease", s._replace(r=1, lease=True)
    elif s.r == 1:
        if s.fate == "committed" and s.counted:
            yield "reader: reads", s._replace(r=2, reading=True)
        else:
            yield "reader: is told", s._replace(r=3, lease=False)
    elif s.r == 2:
        yield "reader: ends", s._replace(r=3, lease=False, reading=False)


ACTORS: tuple[Callable[[State, Rules], Steps], ...] = (
    _writer(0),
    _writer(1),
    _collector,
    _evictor,
    _ender,
    _dropper,
    _bringer,
    _reader,
)


DIRECT: tuple[Callable[[State, Rules], Steps], ...] = (_writer(0), _collector, _ender, _reader)


def broken(s: State) -> str:
    """What must never be: somebody who may read B on T finds that it refers to bytes that are gone."""
    if s.file == "ref" and not s.shards:
        if s.counted:
            return "a copy that counts refers to a file that is gone"
        if s.reading:
            return "a reader under a lease has lost bytes"
    if s.counted and not s.file:
        return "a copy that counts has no file"
    return ""


def explore(rules: Rules, *, direct: bool = False) -> tuple[int, tuple[str, ...], bool]:
    """All states, up to the first in which something is broken. `direct`: B is not committed yet.

    Returns:
        How many states there are; what broke, with a shortest way to it; whether nothing is left on T of either in every state from which
        nobody has a step to go.
    """
    first = State(fate="open" if direct else "committed")
    seen: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])
    ends = True
    while queue:
        s = queue.popleft()
        moved = False
        for actor in DIRECT if direct else ACTORS:
            for name, after in actor(s, rules):
                moved = True
                if after in seen:
                    continue
                seen[after] = (s, name)
                if why := broken(after):
                    return len(seen), (why, *_way(seen, after)), False
                queue.append(after)
        if not moved:
            ends = ends and not s.file and not s.shards
    return len(seen), (), ends


def _way(seen: dict[State, tuple[State, str] | None], s: State) -> tuple[str, ...]:
    way: list[str] = []
    while (before := seen[s]) is not None:
        s, name = before
        way.append(name)
    return tuple(reversed(way))
