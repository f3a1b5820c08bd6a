"""What a load may overlook, and the one error that lists all that it may not.

What the options mean, for every place (patterns are `fnmatch` globs over dotted names):

================  =========================================  ==================================================
 found            default                                    otherwise
================  =========================================  ==================================================
 missing          ``missing="error"``: in `into`, not stored   ``"keep"``, or `allow_missing`: `into` keeps its value;
                                                             `fill`: it is filled from another stored tensor
 unexpected       ``unexpected="error"``: stored, not in       ``"ignore"``, or `allow_unexpected`: left out
                  `into`
 other shape      ``shape="error"``                           ``"skip"``: `into` keeps its value
 other dtype      ``dtype="exact"``                           ``"cast"``: converted as `Tensor.copy_` does
 other kind       always an error (a tensor here, a number    None in `into` takes anything, freshly loaded
                  there; sparse and dense)
================  =========================================  ==================================================

Dicts are compared key by key. Lists and tuples that hold neither tensors nor dicts are values: they are replaced as a whole.

A further name of a tied tensor is not unexpected where the tensor is loaded under another name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from tierstore.errors import StateMismatchError, UsageError
from tierstore.state.paths import Place, name_of
from tierstore.state.rank_values import RankValues

__all__ = ["Differences", "LoadOptions", "selected", "unexpected_error"]

_SHOWN = 20
_FILL = "to fill what was left out from what is stored: LoadOptions(fill=[{'match': STORED, 'to': WANTED}])"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What to do where the wanted state and the stored one differ; see the module's table. Strict by default."""

    missing: Literal["error", "keep"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    shape: Literal["error", "skip"] = "error"
    dtype: Literal["exact", "cast"] = "exact"
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    ranks: Callable[[RankValues], Any] | None = None
    """What another number of ranks gets of values that the saving ranks had each for itself; see `tierstore.state.rank_values`."""
    exchange: Literal["auto", "off"] = "auto"
    """``auto``: where several ranks load together, what more than one of them needs is read from afar once and sent to the others. ``off``:
    each reads for itself. The same on all ranks."""
    fill: Any = None
    """Rules by which a tensor of `into` that the checkpoint lacks is filled from others that it has, converted to its dtype: a list, a
    YAML file's path or `Rules`; see `tierstore.state.filling`. What was filled is logged as a warning. ``()``: nothing is; None: as
    configured (``load: {fill: …}``)."""
    hydrate: str | Literal[False] | None = None
    """Where files that are largely wanted are copied to before they are read: a tier of this node; False: nowhere. None: as configured
    (``load: {hydrate: …}``)."""

    def __post_init__(self) -> None:
        allowed = {
            "missing": ("error", "keep"),
            "unexpected": ("error", "ignore"),
            "shape": ("error", "skip"),
            "dtype": ("exact", "cast"),
            "exchange": ("auto", "off"),
        }
        for option, values in allowed.items():
            if getattr(self, option) not in values:
                raise UsageError(
                    f"LoadOptions({option}={getattr(self, option)!r})", hint=f"{option} is one of {', '.join(map(repr, values))}"
                )
        if self.hydrate in (True, ""):
            raise UsageError(f"LoadOptions(hydrate={self.hydrate!r})", hint="name a tier of this node, or say False")
        for option in ("allow_missing", "allow_unexpected"):
            if isinstance(getattr(self, option), str):
                raise UsageError(f"LoadOptions({option}={getattr(self, option)!r})", hint=f"write {option}=({getattr(self, option)!r},)")


def selected(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether one of the globs names it; no patterns: all."""
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


class Differences:
    """Collects what differs between a wanted state and a stored one, as far as the options do not allow it.

    Args:
        options: What is allowed.
        names: Globs of the places that count; None: all.
    """

    def __init__(self, options: LoadOptions, names: Sequence[str] | None) -> None:
        self._options = options
        self._names = names
        self._found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in ("missing", "unexpected", "shape", "dtype", "kind")}
        self.omitted = False
        """Whether something that is missing was left out of the checkpoint on purpose."""
        self.unfilled: Callable[[], Sequence[str]] = tuple
        """Says why rules filled nothing of what is missing."""

    def note(self, kind: Literal["missing", "unexpected", "shape", "dtype", "kind"], place: Place, detail: str) -> None:
        """Notes one, unless it is allowed or its place does not count."""
        if self.counts(kind, place):
            self._found[kind].append((name_of(place), detail))

    def counts(self, kind: Literal["missing", "unexpected", "shape", "dtype", "kind"], place: Place) -> bool:
        """Whether a difference of this kind is an error there."""
        name = name_of(place)
        options = self._options
        allowed = {
            "missing": options.missing == "keep" or _any(name, options.allow_missing),
            "unexpected": options.unexpected == "ignore" or _any(name, options.allow_unexpected),
            "shape": options.shape == "skip",
        }
        return selected(name, self._names) and not allowed.get(kind, False)

    def check(self, also_stored: Collection[str] = (), what: str = "the checkpoint and `into` differ") -> None:
        """Raises StateMismatchError with all of them, if there are any; the names are in its context, by kind.

        Args:
            also_stored: Names that are stored and not asked for, where that is no error: only looked at for the nearest to a missing one.
            what: How the message begins.
        """
        total = sum(map(len, self._found.values()))
        if not total:
            return
        unexpected = [*(name for name, _ in self._found["unexpected"]), *sorted(also_stored)]
        lines: list[str] = []
        for kind, found in self._found.items():
            for name, detail in found:
                near = difflib.get_close_matches(name, unexpected[:2000], n=1) if kind == "missing" and len(lines) < _SHOWN else []
                lines.append(f"{kind:<10} {name}: {detail}" + (f" (nearest stored: {near[0]})" if near else ""))
        more = f"\n  ... and {total - _SHOWN:,} more" if total > _SHOWN else ""
        more += "".join(f"\n  {rule}" for rule in (self.unfilled()[:_SHOWN] if self._found["missing"] else ()))
        raise StateMismatchError(
            f"{what} in {_places(total)}; nothing was changed\n  " + "\n  ".join(lines[:_SHOWN]) + more,
            hint=(f"{_FILL}; " if self.omitted else "") + _hint(self._found),
            **{kind: tuple(name for name, _ in found) for kind, found in self._found.items()},
        )


def _places(count: int) -> str:
    return "1 place" if count == 1 else f"{count:,} places"


def _hint(problems: dict[str, list[tuple[str, str]]]) -> str:
    ways = {
        "missing": "missing='keep' or allow_missing=('PATTERN', ...)",
        "unexpected": "unexpected='ignore' or allow_unexpected=('PATTERN', ...)",
        "shape": "shape='skip'",
        "dtype": "dtype='cast'",
    }
    allowed = [way for kind, way in ways.items() if problems[kind]]
    text = f"to go on all the same: LoadOptions({', '.join(allowed)})" if allowed else "correct `into`"
    if problems["unexpected"]:
        text += "; None in `into` (e.g. for an optimizer that has not stepped yet) takes what is stored, freshly loaded"
    return text


def unexpected_error(names: Sequence[str]) -> StateMismatchError:
    """The error for what is stored and that no rank asks for."""
    lines = [f"unexpected {name}: no rank asks for it" for name in names[:_SHOWN]]
    more = f"\n  ... and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return StateMismatchError(
        f"the checkpoint and `into` of all ranks differ in {_places(len(names))}; nothing was changed\n  " + "\n  ".join(lines) + more,
        hint=_hint({"missing": [], "unexpected": [(name, "") for name in names], "shape": [], "dtype": []}),
        unexpected=tuple(names),
    )


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
