"""Rules that turn a checkpoint's tensor names into those that another program expects: rename, drop, split, fuse, transpose.

An ordered list; each rule sees the names that the rules before it made, and applies to every name that its regular expression matches
as a whole. Text form (YAML, or the same as mappings)::

    rules:
      - {match: 'model\\.(.*)', to: '\\1'}                                      # rename, with the expression's groups
      - {match: '.*\\.inv_freq', drop: true}
      - {match: '(.*)\\.qkv\\.weight', to: ['\\1.q.weight', '\\1.k.weight', '\\1.v.weight'], split: {axis: 0, heads: 12}}
      - {match: ['(.*)\\.gate', '(.*)\\.up'], to: '\\1.gate_up', fuse: {axis: 0}}
      - {match: '(.*)\\.experts\\.(\\d+)\\.w', to: '\\1.experts.w', fuse: {stack: true, by: 2}}
      - {match: '.*\\.c_proj\\.weight', transpose: true}
    others: keep            # what no rule matched: keep (default), drop, or error

Everything is checked by names and shapes before a byte is read: a rule that matches nothing (unless ``optional: true``), two tensors
that would get one name, and fused tensors with a member missing or too many are errors that name the rule and the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from tierstore.errors import NotFoundError, UsageError
from tierstore.state.renaming_parse import Rule, parse_rule, read_rules
from tierstore.state.views import View, joined, parted

__all__ = ["Rule", "Rules", "parse_rules"]

T = TypeVar("T")

Others = Literal["keep", "drop", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """An ordered list of rules. `others` says what becomes of tensors that no rule matched."""

    rules: tuple[Rule, ...]
    others: Others = "keep"

    def rename(self, names: Iterable[str]) -> dict[str, str]:
        """Which new name stands for which old one, in the order of `names`; dropped names are left out.

        Raises:
            UsageError: A rule splits, fuses or permutes, which names alone can't do; or the rules don't fit the names.
        """
        if found := next((rule for rule in self.rules if not rule.only_names), None):
            raise UsageError(
                f"{found} changes tensors' values, and only names can be changed here",
                hint="keep to `to` and `drop`; apply the rest when you load (checkpoint.renamed(rules)) or export",
                rule=found.number,
            )
        current = {name: name for name in names}
        return self._applied(current, lambda rule, members: [members[0]])

    def apply(self, tensors: Mapping[str, View]) -> dict[str, View]:
        """The tensors under their new names, as views of stored ones; nothing is read.

        Raises:
            UsageError: The rules don't fit: names the rule and the tensor.
        """
        return self._applied(dict(tensors), _made)

    def _applied(self, current: dict[str, T], make: Any) -> dict[str, T]:
        fresh = set(current)  # what no rule has matched yet
        for rule in self.rules:
            groups = list(_groups(rule, current))
            if not groups and not rule.optional:
                raise UsageError(
                    f"{rule} matches no tensor",
                    hint=f"names here are e.g. {', '.join(map(repr, list(current)[:3]))}; 'optional: true' allows it",
                    rule=rule.number,
                )
            current, fresh = _replaced(rule, groups, current, make, fresh)
        left = [name for name in current if name in fresh]
        if left and self.others == "error":
            raise UsageError(
                f"{len(left):,} tensors are matched by no rule, e.g. {', '.join(map(repr, left[:3]))}",
                hint="add a rule for them (drop: true leaves them out), or set others: keep",
                tensors=tuple(left),
            )
        return current if self.others == "keep" else {name: value for name, value in current.items() if name not in fresh}


def parse_rules(source: Any) -> Rules:
    """Reads rules.

    Args:
        source: A YAML file's path, a list of rules, a mapping with ``rules`` and ``others``, or `Rules`.

    Raises:
        UsageError: There is no such file, or a rule is malformed; names the rule, in a file with its line.
    """
    if isinstance(source, Rules):
        return source
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise NotFoundError(f"the rules {path} can't be read: {reason}", hint="give the path of a YAML file with `rules:`") from error
        listed, others, lines = read_rules(text, str(path))
    else:
        listed, others, lines = read_rules(source, "rules")
    rules = tuple(parse_rule(item, number, lines(number)) for number, item in enumerate(listed, 1))
    return Rules(rules=rules, others=others)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """What one application of a rule consumes, and the templates of what it makes (``{i}`` still in them)."""

    members: tuple[str, ...]
    to: tuple[str, ...]


def _groups(rule: Rule, names: Iterable[str]) -> Iterator[_Group]:
    found: list[tuple[str, int, re.Match[str]]] = []
    for name in names:
        hits = [(number, hit) for number, pattern in enumerate(rule.patterns) if (hit := pattern.fullmatch(name))]
        if len(hits) > 1:
            raise UsageError(f"{rule}: {name!r} is matched by two of its patterns", hint="make them tell the members apart", tensor=name)
        if hits:
            found.append((name, *hits[0]))
    if rule.action != "fuse":
        for name, _, hit in found:
            yield _Group(members=(name,), to=tuple(_expand(rule, hit, template) for template in rule.to) if rule.to else (name,))
        return
    collected: dict[str, dict[int, str]] = {}
    for name, number, hit in found:
        target = _expand(rule, hit, rule.to[0])
        position = number if rule.by is None else _position(rule, hit, name)
        members = collected.setdefault(target, {})
        if position in members:
            raise UsageError(
                f"{rule}: both {members[position]!r} and {name!r} would be member {position} of {target!r}",
                hint="put the group that tells them apart into `to`",
                rule=rule.number,
                tensor=target,
            )
        members[position] = name
    for target, members in collected.items():
        count = rule.parts or (len(rule.patterns) if rule.by is None else max(members) + 1)
        missing = [i for i in range(count) if i not in members]
        if missing or len(members) > count:
            what = ", ".join(repr(rule.patterns[i].pattern) if rule.by is None else str(i) for i in missing[:5])
            extra = sorted(name for i, name in members.items() if i >= count)
            raise UsageError(
                f"{rule}: {target!r} "
                + (f"lacks its member {what}" if missing else f"has more members than {count}: {extra[0]!r}")
                + f"; there are {', '.join(map(repr, list(members.values())[:5]))}",
                hint="select all members for the export, or correct the rule",
                rule=rule.number,
                tensor=target,
            )
        yield _Group(members=tuple(members[i] for i in range(count)), to=(target,))


def _position(rule: Rule, hit: re.Match[str], name: str) -> int:
    assert rule.by is not None
    text = hit.group(rule.by)
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(
            f"{rule}: in {name!r} the group {rule.by!r} is {text!r}, not the member's number", hint="`by` names a group like (\\d+)"
        )
    return int(text)


def _expand(rule: Rule, hit: re.Match[str], template: str) -> str:
    name = hit.expand(template)
    if not name:
        raise UsageError(f"{rule} gives {hit[0]!r} an empty name", hint="correct `to`", rule=rule.number, tensor=hit[0])
    return name


def _replaced(rule: Rule, groups: Sequence[_Group], current: dict[str, T], make: Any, fresh: set[str]) -> tuple[dict[str, T], set[str]]:
    """`current` with each group's members replaced by what the rule makes of them, at the first member's place."""
    consumed = {name for group in groups for name in group.members}
    order = {name: number for number, name in enumerate(current)}
    first = {min(group.members, key=order.__getitem__): group for group in groups}
    result: dict[str, T] = {}
    origin: dict[str, str] = {}

    def add(name: str, value: T, source: str) -> None:
        if name in result:
            raise UsageError(
                f"{rule}: {origin[name]!r} and {source!r} would both be called {name!r}",
                hint="drop one of them by a rule before, or correct `to`",
                rule=rule.number,
                tensor=name,
            )
        result[name], origin[name] = value, source

    for name, value in current.items():
        if name not in consumed:
            add(name, value, name)
        elif name in first and rule.action != "drop":
            group = first[name]
            values = make(rule, [current[member] for member in group.members])
            for new, made in zip(_names(rule, group, len(values)), values, strict=True):
                add(new, made, name)
    return result, fresh - consumed


def _names(rule: Rule, group: _Group, count: int) -> list[str]:
    if len(group.to) == 1 and "{i}" in group.to[0]:
        return [group.to[0].replace("{i}", str(i)) for i in range(count)]
    if len(group.to) != count:
        raise UsageError(
            f"{rule} makes {count} tensors of {group.members[0]!r} and names {len(group.to)}",
            hint="give `to` one name for each, or one with {i}",
            rule=rule.number,
            tensor=group.members[0],
        )
    return list(group.to)


def _made(rule: Rule, members: list[View]) -> list[View]:
    try:
        if rule.action == "split":
            count = None if rule.unstack else rule.parts or (len(rule.to) if rule.sizes is None else None)
            values = parted(members[0], rule.axis, sizes=rule.sizes, parts=count, heads=rule.heads, unstack=rule.unstack)
        elif rule.action == "fuse":
            values = [joined(members, rule.axis, heads=rule.heads, stack=rule.stack)]
        else:
            values = [members[0]]
        if rule.permute is not None:
            values = [value.permuted(rule.permute or tuple(reversed(range(len(value.shape))))) for value in values]
    except UsageError as error:
        raise UsageError(f"{rule}: {error.message}", hint=error.hint, rule=rule.number, **error.context) from error
    return values
