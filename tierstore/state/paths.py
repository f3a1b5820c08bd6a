"""Places in a state: how they are shown to a person, and the tensor names that they give.

A place is the tuple of keys from the root: dict keys as they are, positions in lists and tuples as ints. Its name is the keys joined by
``.``, as PyTorch names parameters. Different places can give the same name (``{"a.b": …}`` and ``{"a": {"b": …}}``, ``{1: …}`` and
``{"1": …}``): then all but one get a suffix ``#2``, ``#3`` …, in an order that depends on the places alone and not on the order of keys,
so that every rank and every later save finds the same names.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["Place", "Shown", "assign_names", "name_of", "show"]

Place = tuple[Hashable, ...]


def show(place: Place) -> str:
    """The place as Python would reach it: ``state['model']['layers.0.weight']``."""
    return "state" + "".join(f"[{key!r}]" for key in place)


class Shown:
    """A place that is shown only where somebody reads it: in an error. `root`: what stands for the state, in its words."""

    __slots__ = ("place", "root")

    def __init__(self, place: Place, root: str = "state") -> None:
        self.place = place
        self.root = root

    def __str__(self) -> str:
        return self.root + show(self.place).removeprefix("state")


def name_of(place: Place) -> str:
    """The name that a place gives, before collisions are resolved; ``state`` for a state that is one tensor."""
    try:
        name = ".".join(place)  # type: ignore[arg-type]
    except TypeError:
        pass
    else:  # as nearly all places do: nothing but text, none of which has to be escaped
        if name.isprintable() and "" not in place:
            return name or "state"
    return ".".join(_text(key) for key in place)


def assign_names(places: Sequence[Place]) -> list[str]:
    """Gives each of `places` (all different) its own name; see the module's docstring for how collisions are resolved."""
    wanted = [name_of(place) for place in places]
    if len(set(wanted)) == len(wanted) and "__metadata__" not in wanted:
        return wanted
    by_name: dict[str, list[int]] = {}
    for index, name in enumerate(wanted):
        by_name.setdefault(name, []).append(index)
    taken = set(by_name)
    names = list(wanted)
    for name in sorted(n for n, sharing in by_name.items() if len(sharing) > 1 or n == "__metadata__"):
        # The place with the most keys first: it is the one whose keys hold no dots.
        sharing = sorted(by_name[name], key=lambda i: (-len(places[i]), [(type(k).__name__, repr(k)) for k in places[i]]))
        number = 2
        for index in sharing if name == "__metadata__" else sharing[1:]:  # a safetensors header uses this one name itself
            while f"{name}#{number}" in taken:
                number += 1
            names[index] = f"{name}#{number}"
            taken.add(names[index])
    return names


def _text(key: Hashable) -> str:
    text = key if isinstance(key, str) else repr(key)
    if text.isprintable():
        return text or "''"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
