"""Reading renaming rules: what a rule may say, checked key by key. See `tierstore.state.renaming` for what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tierstore.config_document import parse_yaml
from tierstore.errors import UsageError

__all__ = ["Rule", "parse_rule", "read_rules"]

_KEYS = ("match", "to", "drop", "split", "fuse", "transpose", "permute", "optional")
_SPLIT_KEYS = ("axis", "sizes", "parts", "heads", "unstack")
_FUSE_KEYS = ("axis", "heads", "stack", "by", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        number: Its place in the list, from 1; `line` is that in its file, 0 where there is none.
        patterns: A name that one of them matches as a whole is the rule's. Several only for `fuse`: one for each member, in order.
        action: What is done beside permuting.
        to: Templates of the new names; empty: the name stays.
        axis: Of split and fuse; counted from the end where negative.
        sizes, parts: Of split: the parts' lengths along `axis` (per head), or their number. Of fuse: how many members there are.
        heads: Split: the axis consists of so many equal groups, and each of them is split; fuse: the same, woven together.
        stack: Fuse along a new axis; `unstack`: split an axis into its single indices and remove it.
        by: Of fuse: the pattern's group that is the member's number, counted from 0.
        permute: The result's axes as axes of what it is made from; ``()``: reversed (a transpose); None: as they are.
        optional: It may match nothing.
    """

    number: int
    line: int = 0
    patterns: tuple[re.Pattern[str], ...]
    action: Literal["rename", "drop", "split", "fuse"]
    to: tuple[str, ...] = ()
    axis: int = 0
    sizes: tuple[int, ...] | None = None
    parts: int | None = None
    heads: int = 1
    stack: bool = False
    unstack: bool = False
    by: int | str | None = None
    permute: tuple[int, ...] | None = None
    optional: bool = False

    @property
    def only_names(self) -> bool:
        """Whether it leaves every tensor's values as they are."""
        return self.action in ("rename", "drop") and self.permute is None

    def __str__(self) -> str:
        return _where(self.number, self.line) + f" ({', '.join(p.pattern for p in self.patterns)})"


def _where(number: int, line: int) -> str:
    return f"rule {number}" + (f" in line {line}" if line else "")


def read_rules(source: Any, name: str) -> tuple[list[Any], Literal["keep", "drop", "error"], Callable[[int], int]]:
    """The list of rules, what becomes of other tensors, and the line of a rule by its number.

    Args:
        source: YAML text, a list, or a mapping.
        name: What messages call it.

    Raises:
        UsageError: It is neither.
    """
    lines: Callable[[int], int] = lambda number: 0  # noqa: E731
    if isinstance(source, str):
        document = parse_yaml(source, name)
        if document.mistakes:
            first = document.mistakes[0]
            place = f" in line {first.line}" if first.line else ""
            raise UsageError(f"{name}{place}: {first.reason}", hint=first.remedy)
        source = document.value
        prefix = () if isinstance(source, list) else ("rules",)
        lines = lambda number: document.line((*prefix, number - 1)) or 0  # noqa: E731
    others: Any = "keep"
    if isinstance(source, Mapping):
        if unknown := [str(key) for key in source if key not in ("rules", "others")]:
            raise UsageError(f"{name}: {unknown[0]!r} is no key of rules", hint="write `rules:` with a list, and `others:` if wanted")
        source, others = source.get("rules"), source.get("others", "keep")
    if not isinstance(source, list | tuple):
        raise UsageError(f"{name}: there is no list of rules", hint="write `rules:` and below it `- match: …` for each")
    if others not in ("keep", "drop", "error"):
        raise UsageError(f"{name}: others is {others!r}", hint="say keep, drop or error")
    return list(source), others, lines


def parse_rule(item: Any, number: int, line: int = 0) -> Rule:
    """Reads one rule.

    Raises:
        UsageError: It is malformed; says what is wrong with which key.
    """
    return _Parser(number, line).rule(item)


class _Parser:
    def __init__(self, number: int, line: int) -> None:
        self._number = number
        self._line = line

    def fail(self, reason: str, hint: str) -> UsageError:
        return UsageError(f"{_where(self._number, self._line)}: {reason}", hint=hint, rule=self._number)

    def rule(self, item: Any) -> Rule:
        if not isinstance(item, Mapping):
            raise self.fail(f"{item!r} is no rule", "write a mapping, e.g. {match: 'model\\.(.*)', to: '\\1'}")
        self.only(item, _KEYS, "")
        actions = [key for key in ("drop", "split", "fuse") if item.get(key) not in (None, False)]
        if len(actions) > 1:
            raise self.fail(f"it has both {actions[0]} and {actions[1]}", "make two rules of it: the second sees what the first made")
        action: Any = actions[0] if actions else "rename"
        patterns = self.patterns(item, several=action == "fuse")
        to = self.to(item, patterns, several=action == "split")
        permute = self.permute(item)
        if action == "drop" and (to or permute is not None):
            raise self.fail("a dropped tensor needs no name and no order of axes", "remove `to`, or `drop`")
        if action == "rename" and not to and permute is None:
            raise self.fail("it does nothing", "give it `to`, `drop: true`, `split`, `fuse`, `transpose: true` or `permute`")
        if action in ("split", "fuse") and not to:
            raise self.fail(f"a {action} needs `to`", "name what it makes")
        facts: dict[str, Any] = {}
        if action == "split":
            facts = self.split(item["split"], to)
        elif action == "fuse":
            facts = self.fuse(item["fuse"], patterns)
        return Rule(
            number=self._number,
            line=self._line,
            patterns=patterns,
            action=action,
            to=to,
            permute=permute,
            optional=self.flag(item, "optional"),
            **facts,
        )

    def only(self, item: Mapping[Any, Any], keys: tuple[str, ...], inside: str) -> None:
        if unknown := [str(key) for key in item if key not in keys]:
            raise self.fail(f"{inside}{unknown[0]!r} is no key", f"the keys are {', '.join(keys)}")

    def patterns(self, item: Mapping[Any, Any], *, several: bool) -> tuple[re.Pattern[str], ...]:
        given = item.get("match")
        listed = given if isinstance(given, list | tuple) else [given]
        texts = [text for text in listed if isinstance(text, str)]
        if not listed or len(texts) < len(listed):
            raise self.fail("match is no regular expression", "write e.g. match: 'model\\.(.*)'")
        if len(listed) > 1 and not several:
            raise self.fail("match is a list", "only `fuse` takes one, a pattern for each member; else use (a|b)")
        found: list[re.Pattern[str]] = []
        for text in texts:
            try:
                found.append(re.compile(text))
            except re.error as error:
                raise self.fail(
                    f"match {text!r} is no regular expression: {error}", "names are matched as a whole; a dot is '\\.'"
                ) from error
        return tuple(found)

    def to(self, item: Mapping[Any, Any], patterns: tuple[re.Pattern[str], ...], *, several: bool) -> tuple[str, ...]:
        given = item.get("to")
        if given is None:
            return ()
        listed = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not listed or not all(isinstance(text, str) and text for text in listed) or (len(listed) > 1 and not several):
            raise self.fail(f"to is {given!r}", "give one name (a split: one for each part), with \\1 or \\g<name> for groups")
        for template in listed:
            for pattern in patterns:
                self.check_template(pattern, template)
        return listed

    def check_template(self, pattern: re.Pattern[str], template: str) -> None:
        # The pattern or nothing: whatever the pattern is, that matches the empty text, with all groups there to be named.
        hit = re.compile(f"{pattern.pattern}|").fullmatch("")
        try:
            if hit is not None:
                hit.expand(template)
        except (re.error, IndexError) as error:
            raise self.fail(
                f"to {template!r} does not fit match {pattern.pattern!r}: {error}", "\\1 is the first (…) of `match`"
            ) from error

    def permute(self, item: Mapping[Any, Any]) -> tuple[int, ...] | None:
        transpose, given = self.flag(item, "transpose"), item.get("permute")
        if given is None:
            return () if transpose else None
        if transpose:
            raise self.fail("it has both transpose and permute", "transpose is permute with the axes reversed: give one")
        axes = tuple(given) if isinstance(given, list | tuple) else ()
        if not axes or sorted(map(repr, axes)) != sorted(map(repr, range(len(axes)))):
            raise self.fail(f"permute is {given!r}", "list every axis once, from 0, e.g. [1, 0, 2]")
        return axes

    def split(self, given: Any, to: tuple[str, ...]) -> dict[str, Any]:
        facts = self.inner(given, "split", _SPLIT_KEYS)
        sizes, unstack = facts.get("sizes"), self.flag(facts, "unstack")
        if sizes is not None and (
            not isinstance(sizes, list | tuple) or not sizes or any(type(size) is not int or size < 1 for size in sizes)
        ):
            raise self.fail(f"split: sizes is {sizes!r}", "list the parts' lengths along the axis, e.g. [64, 64, 64]")
        parts = self.number(facts, "parts", "split")
        if (sizes is not None) + (parts is not None) + unstack > 1:
            raise self.fail("split: it has more than one of sizes, parts and unstack", "give one")
        numbered = len(to) == 1 and "{i}" in to[0]
        expected = len(sizes) if sizes is not None else parts
        if not numbered and ((expected is not None and expected != len(to)) or (len(to) == 1 and not unstack)):
            raise self.fail(f"split: it makes {expected or 'several'} parts, and `to` has {len(to)} names", "one for each, or one with {i}")
        if numbered and expected is None and not unstack:
            raise self.fail("split: nothing says into how many parts", "give sizes, parts, or unstack: true")
        heads = self.number(facts, "heads", "split") or 1
        if unstack and heads > 1:
            raise self.fail("split: unstack has no heads", "give one")
        return {
            "axis": self.axis(facts, "split"),
            "sizes": None if sizes is None else tuple(sizes),
            "parts": parts,
            "heads": heads,
            "unstack": unstack,
        }

    def fuse(self, given: Any, patterns: tuple[re.Pattern[str], ...]) -> dict[str, Any]:
        facts = self.inner(given, "fuse", _FUSE_KEYS)
        by, parts, stack = facts.get("by"), self.number(facts, "parts", "fuse"), self.flag(facts, "stack")
        if by is None:
            if len(patterns) < 2 or parts is not None:
                raise self.fail("fuse: nothing says which tensor is which member", "give match a list, or `by:` the group with the number")
        elif len(patterns) > 1 or not _has_group(patterns[0], by):
            raise self.fail(f"fuse: by is {by!r}", "it is a number or name of a group of the only pattern, like (\\d+)")
        heads = self.number(facts, "heads", "fuse") or 1
        if stack and heads > 1:
            raise self.fail("fuse: stack has no heads", "give one")
        return {"axis": self.axis(facts, "fuse"), "parts": parts, "heads": heads, "stack": stack, "by": by}

    def inner(self, given: Any, key: str, keys: tuple[str, ...]) -> Mapping[Any, Any]:
        if given is True:
            return {}
        if not isinstance(given, Mapping):
            raise self.fail(f"{key} is {given!r}", f"write {key}: {{axis: 0}}")
        self.only(given, keys, f"{key}: ")
        return given

    def flag(self, item: Mapping[Any, Any], key: str) -> bool:
        value = item.get(key, False)
        if not isinstance(value, bool):
            raise self.fail(f"{key} is {value!r}", "say true or false")
        return value

    def number(self, item: Mapping[Any, Any], key: str, inside: str) -> int | None:
        value = item.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.fail(f"{inside}: {key} is {value!r}", "give a number from 1")
        return value

    def axis(self, item: Mapping[Any, Any], inside: str) -> int:
        value = item.get("axis", 0)
        if type(value) is not int:
            raise self.fail(f"{inside}: axis is {value!r}", "give its number; 0 is the first, -1 the last")
        return value


def _has_group(pattern: re.Pattern[str], by: Any) -> bool:
    return (type(by) is int and 1 <= by <= pattern.groups) or (isinstance(by, str) and by in pattern.groupindex)
