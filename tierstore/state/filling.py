"""Tensors that a checkpoint lacks, filled from others that it has: by rules, converted, and told.

``LoadOptions(fill=[{"match": r"model\\.(.*)", "to": r"optim.master.\\1"}])`` says: what is stored as ``model.…`` may stand in for a wanted
``optim.master.…`` that is not stored. The rules are those of `tierstore.state.renaming` (`to`, `split`, `fuse`, `transpose`, `permute`),
but each sees the stored names, and one that matches nothing is no error. Where several make one name, the first counts.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.format.index import RoutingIndex
from tierstore.format.objects import Opaque
from tierstore.state.bits import torch_dtype
from tierstore.state.paths import Place
from tierstore.state.renamed import RenamedIndex
from tierstore.state.renaming import Rules, parse_rules
from tierstore.state.stored_kinds import is_omitted
from tierstore.state.unflatten import MODULE_STATE, OMITTED
from tierstore.state.views import NamedView, View, stored_view
from tierstore.units import format_some

__all__ = ["Filling", "StandIn", "fill_rules", "fits", "omitted_in", "put_in", "without_omitted"]

log = logging.getLogger(__name__)

_COMPARED = 2000
_ALIKE = 0.6
_ANY_TEXT = re.compile(r"\\([^A-Za-z0-9])|\\\w|\[[^\]]*\]|\(\?\w?[:=!]|\.(?=[*+?{])|\{[^}]*\}|[()*+?^$|]")


def fill_rules(source: Any) -> Rules | None:
    """The rules of ``LoadOptions.fill`` or ``load: {fill: …}``; None where there are none.

    Raises:
        UsageError: One is malformed, or drops tensors.
    """
    if source is None or (isinstance(source, list | tuple) and not source):
        return None
    rules = parse_rules(source)
    if found := next((rule for rule in rules.rules if rule.action == "drop"), None):
        raise UsageError(f"{found} drops tensors: nothing is filled from that", hint="give it `to`: the name of what is to be filled")
    return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """What fills a wanted tensor: a view of stored ones by the wanted name, and the names of these."""

    entry: NamedView
    sources: tuple[str, ...]


@dataclass(slots=True)
class Filling:
    """What may stand in for the tensors that a checkpoint lacks; looked at only where one is lacking."""

    index: RoutingIndex
    rules: Rules | None
    filled: dict[str, str] = field(default_factory=dict)
    """Wanted names that were filled, and from what."""
    _views: dict[str, View] | None = None
    _makes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Rule, by its number → the names that it makes of what is stored."""
    _lacking: dict[str, None] = field(default_factory=dict)
    """Names that were asked for, and that nothing stands in for."""

    def find(self, name: str) -> StandIn | None:
        """What stands in for the wanted tensor `name`; None: nothing does.

        Raises:
            UsageError: A rule does not fit the tensors.
        """
        if self.rules is None:
            return None
        if self._views is None:
            self._views = self._made()
        view = self._views.get(name)
        if view is None:
            self._lacking[name] = None
            return None
        index = RenamedIndex(self.index, {name: view})
        index.prepare([name])
        entry: Any = index.find(name)
        return StandIn(entry=entry, sources=tuple(dict.fromkeys(piece.tensor for piece in view.pieces)))

    def note(self, name: str, dtype: str, found: StandIn) -> None:
        """Notes that `name` is filled."""
        self.filled[name] = f"{dtype} from {found.entry.dtype} {format_some(found.sources, 3)}"

    def tell(self, what: str, *, loudly: bool) -> None:
        """Logs what was filled: what was not saved has come back as something else."""
        if self.filled:
            some = format_some([f"{name} ({how})" for name, how in sorted(self.filled.items())], 20)
            level = logging.WARNING if loudly else logging.INFO
            log.log(level, "%s: %d tensors that the checkpoint lacks were filled from others, by rule: %s", what, len(self.filled), some)
        for text in self.unused() if loudly else ():
            log.warning("%s: %s", what, text)

    def unused(self) -> tuple[str, ...]:
        """The rules that filled nothing though something was lacking, and why, for people; ``optional: true`` says that one need not.

        A rule that matches what is stored is among them only where what it makes of that is not what is lacking.
        """
        if self.rules is None or self._views is None:
            return ()
        lacking = [name for name in self._lacking if name not in self.filled]
        texts = []
        for rule in self.rules.rules:
            makes = self._makes[rule.number]
            if rule.optional:
                continue
            if not makes:
                literal = _literal(rule.patterns[0].pattern)
                texts.append(f"fill: {rule} matches nothing that is stored{_near(literal, self.index.names(), 'nearest stored')}")
            elif lacking and self.filled.keys().isdisjoint(makes):
                near = _near(makes[0], lacking, "nearest that is lacking")
                texts.append(f"fill: {rule} makes {format_some(makes, 2)}, and nothing of that is lacking{near}")
        return tuple(texts)

    def _made(self) -> dict[str, View]:
        assert self.rules is not None
        names = self.index.names()
        self.index.prepare(names)
        stored = {name: stored_view(name, self.index.dtype(name), self.index.shape(name)) for name in names}
        made: dict[str, View] = {}
        for rule in self.rules.rules:
            # Nothing but its own: what is stored already may have the name of what the rule makes, and nobody asks for that then.
            its = {name: view for name, view in stored.items() if any(pattern.fullmatch(name) for pattern in rule.patterns)}
            views = Rules(rules=(replace(rule, optional=True),), others="drop").apply(its)
            self._makes[rule.number] = tuple(views)
            for name, view in views.items():
                made.setdefault(name, view)
        return made


def _literal(pattern: str) -> str:
    """What a regular expression says of the names themselves, without what stands for any text."""
    return _ANY_TEXT.sub(lambda found: found[1] or "", pattern)


def _near(wanted: str, names: Sequence[str], what: str) -> str:
    """The names that have most of `wanted` in them, in its order: a rule may name a small part of each. Empty where none is near."""
    if not wanted:
        return ""
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)
    ranked: list[tuple[float, int, str]] = []
    for name in names[:_COMPARED]:
        matcher.set_seq1(name)
        same = sum(block.size for block in matcher.get_matching_blocks()) / len(wanted)
        if same >= _ALIKE:
            ranked.append((-same, len(name), name))
    return f" ({what}: {', '.join(name for _, _, name in sorted(ranked)[:2])})" if ranked else ""


def fits(source: str, wanted: str) -> bool:
    """Whether values of one dtype may fill a tensor of another: floating-point ones are converted, others must be the same."""
    return source == wanted or (torch_dtype(source).is_floating_point and torch_dtype(wanted).is_floating_point)


def omitted_in(node: Any, place: Place = ()) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """The places of a stored tree whose tensors were left out on purpose, and what the tree says of each."""
    if isinstance(node, Opaque):
        if node.tag == OMITTED:
            yield place, node.value
        else:
            yield from omitted_in(node.value[0] if node.tag == MODULE_STATE else node.value, place)
    elif isinstance(node, dict):
        for key, item in node.items():
            yield from omitted_in(item, (*place, key))
    elif isinstance(node, list | tuple):
        for at, item in enumerate(node):
            yield from omitted_in(item, (*place, at))


def put_in(node: Any, place: Place, made: Mapping[Place, torch.Tensor]) -> Any:
    """A stored tree with tensors in the places of those that were left out; None where there is none."""
    if isinstance(node, Opaque):
        if node.tag == OMITTED:
            return made.get(place)
        if node.tag == MODULE_STATE:
            return Opaque(node.tag, [put_in(node.value[0], place, made), node.value[1]])
        return Opaque(node.tag, put_in(node.value, place, made))
    kind = type(node)
    if kind is dict or kind is OrderedDict:
        return kind((key, put_in(item, (*place, key), made)) for key, item in node.items())
    if kind is list or kind is tuple:
        return kind(put_in(item, (*place, at), made) for at, item in enumerate(node))
    return node


def without_omitted(node: Any) -> Any:
    """A stored tree as if what was left out had never been there: its keys are gone, in lists there is None."""
    if isinstance(node, Opaque):
        return None if node.tag == OMITTED else Opaque(node.tag, without_omitted(node.value))
    if isinstance(node, dict):
        return type(node)((key, without_omitted(item)) for key, item in node.items() if not is_omitted(item))
    if isinstance(node, list | tuple):
        return type(node)(without_omitted(item) for item in node)
    return node
