"""Which tensors are meant: globs over stored names, and a prefix to take off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tierstore.errors import NotFoundError, UsageError

__all__ = ["Choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice among names.

    Attributes:
        include: Globs; empty: all, or with `strip` those that begin with it.
        exclude: Globs of names to leave out.
        strip: A prefix that every chosen name has and that is taken off.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip: str = ""

    def __post_init__(self) -> None:
        for option in ("include", "exclude"):
            if isinstance(getattr(self, option), str):
                raise UsageError(f"{option}={getattr(self, option)!r} is no list", hint=f"write {option}=({getattr(self, option)!r},)")

    def of(self, names: Sequence[str]) -> dict[str, str]:
        """The chosen names in their order: without the prefix → as stored.

        Raises:
            NotFoundError: None matches.
            UsageError: A chosen name lacks the prefix that is to be stripped.
        """
        include = self.include or ((f"{self.strip}*",) if self.strip else ("*",))
        found = [n for n in names if any(fnmatchcase(n, p) for p in include) and not any(fnmatchcase(n, p) for p in self.exclude)]
        if not found:
            raise NotFoundError(
                f"nothing that is stored matches {', '.join(map(repr, include))}" + (" without what is excluded" if self.exclude else ""),
                hint=f"`tierstore tensors REF` lists the names, e.g. {', '.join(map(repr, names[:3]))}",
            )
        if odd := next((name for name in found if not name.startswith(self.strip) or name == self.strip), None):
            raise UsageError(
                f"{odd!r} is chosen and does not begin with {self.strip!r}", hint="choose with include, or strip another prefix", tensor=odd
            )
        return {name[len(self.strip) :]: name for name in found}
