"""An open checkpoint under other names: a reader whose index has the tensors that renaming rules make of the stored ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from tierstore.errors import NotFoundError, UsageError
from tierstore.format.index import ExtentTable, FileEntry, RoutingIndex, TensorEntry
from tierstore.format.objects import TensorRef, encode_objects
from tierstore.state.choice import Choice
from tierstore.state.reading import Reader
from tierstore.state.renaming import parse_rules
from tierstore.state.views import NamedView, View, stored_view
from tierstore.tiers.reads import AnyWant

__all__ = ["RenamedIndex", "RenamedReader", "chosen_views", "renamed_reader"]


def chosen_views(index: RoutingIndex, names: Mapping[str, str], rules: Any) -> dict[str, View]:
    """What rules make of chosen tensors; shapes are looked at, no values are read.

    Args:
        index: The stored tensors.
        names: New name → stored name.
        rules: What `parse_rules` takes; None: none.

    Raises:
        UsageError: The rules don't fit, or leave nothing.
    """
    index.prepare(names.values())
    views = {new: stored_view(old, index.dtype(old), index.shape(old)) for new, old in names.items()}
    if rules is None:
        return views
    made = parse_rules(rules).apply(views)
    if not made:
        raise UsageError("the rules leave no tensor", hint="correct `drop` and `others`")
    return made


def renamed_reader(reader: Reader, rules: Any, choice: Choice) -> RenamedReader:
    """An open checkpoint's tensors, chosen and renamed.

    Raises:
        NotFoundError: Nothing is chosen.
        UsageError: The rules don't fit; names the rule and the tensor.
    """
    return RenamedReader(reader, chosen_views(reader.index, choice.of(reader.index.names()), rules))


class RenamedIndex:
    """A `RoutingIndex` of views. `find` gives a `NamedView`, which loads take for an entry; files are those of the stored index."""

    def __init__(self, stored: RoutingIndex, views: Mapping[str, View]) -> None:
        self._stored = stored
        self._views = views

    @property
    def block_nbytes(self) -> int:
        return self._stored.block_nbytes

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    @property
    def extent_count(self) -> int:
        return sum(len(view.pieces) for view in self._views.values())

    @property
    def file_names(self) -> tuple[str, ...]:
        return self._stored.file_names

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[TensorEntry]:
        return map(self.find, self.names())

    def names(self) -> list[str]:
        return sorted(self._views)

    def prepare(self, names: Iterable[str]) -> None:
        self._stored.prepare(piece.tensor for name in names if name in self._views for piece in self._views[name].pieces)

    def find(self, name: str, box: Sequence[range] | None = None) -> TensorEntry:
        return cast(TensorEntry, NamedView(name=name, view=self._view(name), find=self._stored.find))

    def table(self, name: str) -> ExtentTable:
        """There is none: a view is no extents.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{name!r} is made by renaming rules and has no extents of its own", hint="use find(), or the stored names")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._view(name).shape

    def dtype(self, name: str) -> str:
        return self._view(name).dtype

    def files(self) -> tuple[FileEntry, ...]:
        return self._stored.files()

    def file(self, name: str) -> FileEntry:
        return self._stored.file(name)

    def file_nbytes(self, name: str) -> int:
        return self._stored.file_nbytes(name)

    def _view(self, name: str) -> View:
        if name not in self._views:
            near = difflib.get_close_matches(name, self._views, n=3)
            hint = f"nearest are {', '.join(map(repr, near))}" if near else f"there are {len(self._views):,}, e.g. {min(self._views)!r}"
            raise NotFoundError(f"the renamed checkpoint has no tensor {name!r}", hint=hint, tensor=name)
        return self._views[name]


class RenamedReader:
    """A `Reader` under other names; made by `renamed_reader`. Its tree is the tensors by name, the same for every rank."""

    def __init__(self, stored: Reader, views: Mapping[str, View]) -> None:
        self._stored = stored
        self._views = views
        self._index = RenamedIndex(stored.index, views)

    @property
    def index(self) -> RoutingIndex:
        return self._index

    @property
    def manifest(self) -> Any:
        """The stored checkpoint's, where it has one: files that came with its tensors go along in an export."""
        return getattr(self._stored, "manifest", None)

    async def objects(self, rank: int) -> bytes:
        return encode_objects({name: TensorRef(name) for name in self._views})

    async def object_ranks(self) -> Mapping[int, int]:
        return {0: 0}

    async def read(self, wants: Sequence[AnyWant]) -> None:
        await self._stored.read(wants)
