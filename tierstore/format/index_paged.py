"""The routing index of a large checkpoint, read by groups as tensors are asked for; same questions and answers as `Index`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence

from tierstore.errors import FormatError, NotFoundError
from tierstore.format.index_file import IndexHead
from tierstore.format.index_groups import decode_group, group_names
from tierstore.format.index_table import ExtentTable, FileEntry, Index, TensorEntry

__all__ = ["PagedIndex"]

CACHE_NBYTES = 64 << 20
"""Groups that are kept, in bytes on disk."""

WINDOW_NBYTES = 8 << 20
"""Groups that are fetched together, where it is known that they will be wanted, in bytes."""


class PagedIndex:
    """A routing index whose rows are fetched when they are asked for. Not for the event loop: its methods wait for storage.

    Safe from several threads: at worst two of them fetch the same group.

    Args:
        head: The index's head.
        fetch: Reads groups by number, proved; returns their bytes in that order.
        fetch_digests: Reads a file's block digests by its number, proved.
        cache_nbytes: How much is kept.
    """

    def __init__(
        self,
        head: IndexHead,
        fetch: Callable[[Sequence[int]], Sequence[bytes]],
        fetch_digests: Callable[[int], bytes],
        *,
        cache_nbytes: int = CACHE_NBYTES,
    ) -> None:
        self.head = head
        self._fetch = fetch
        self._fetch_digests = fetch_digests
        self._cache_nbytes = cache_nbytes
        self._groups: dict[int, Index] = {}
        self._expected: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._file_numbers = {name: number for number, name in enumerate(head.files.file_names)}

    @property
    def block_nbytes(self) -> int:
        return self.head.block_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all files that the index names."""
        return sum(self.head.files.file_nbytes.tolist())

    @property
    def extent_count(self) -> int:
        """How many extents all tensors have together."""
        return self.head.groups.extents

    @property
    def file_names(self) -> tuple[str, ...]:
        return self.head.files.file_names

    def __len__(self) -> int:
        return self.head.groups.rows

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        group = self._group_with(name)
        return group is not None and name in group

    def __iter__(self) -> Iterator[TensorEntry]:
        """Every tensor, sorted by name, group by group."""
        for group in self._all():
            yield from group

    def names(self) -> list[str]:
        """All names, sorted by their UTF-8 bytes; reads the rows of all tensors.

        Raises:
            FormatError: They are out of order.
        """
        made: list[str] = []
        for group in self._all():
            names = group.names()
            if made and made[-1].encode() >= names[0].encode():
                raise FormatError(
                    "index: the tensor names are out of order", hint="the index is foreign or damaged: run `tierstore verify`"
                )
            made += names
        return made

    def prepare(self, names: Iterable[str]) -> None:
        """Says which tensors will be asked for, in about that order: their rows are then fetched many at a time."""
        groups = self.head.groups
        numbers: dict[int, None] = {}
        for name in names:
            number = groups.number_of(name.encode("utf-8", "surrogatepass"))
            if number is not None:
                numbers[number] = None
        self._expect(tuple(numbers))

    def find(self, name: str, box: Sequence[range] | None = None) -> TensorEntry:
        """The tensor called `name`; of its extents those that meet `box`, as `Index.find` has it.

        Raises:
            NotFoundError: There is none; the nearest names are suggested.
            IntegrityError: No tier has its rows.
        """
        group, row = self._found(name)
        return group.entry(row, box)

    def table(self, name: str) -> ExtentTable:
        """The extents of the tensor called `name` as arrays; raises as `find` does."""
        return self._found(name)[0].table(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of the tensor called `name`; raises as `find` does."""
        return self._found(name)[0].shape(name)

    def dtype(self, name: str) -> str:
        """The dtype's name of the tensor called `name`; raises as `find` does."""
        return self._found(name)[0].dtype(name)

    def files(self) -> tuple[FileEntry, ...]:
        """All files, in the order of their numbers; reads all block digests."""
        return tuple(self.file(name) for name in self.file_names)

    def file(self, name: str) -> FileEntry:
        """The file called `name`, with its block digests, which are read.

        Raises:
            NotFoundError: The index names no such file.
        """
        number = self.file_number(name)
        return FileEntry(name=name, nbytes=int(self.head.files.file_nbytes[number]), block_digests=self._fetch_digests(number))

    def file_number(self, name: str) -> int:
        """The number of the file called `name`.

        Raises:
            NotFoundError: The index names no such file.
        """
        number = self._file_numbers.get(name)
        if number is None:
            raise NotFoundError(f"the index names no file {name!r}", hint=_nearest(name, self.file_names), file=name)
        return number

    def file_nbytes(self, name: str) -> int:
        """The length of the file called `name`, in bytes; nothing is read.

        Raises:
            NotFoundError: The index names no such file.
        """
        return int(self.head.files.file_nbytes[self.file_number(name)])

    # ---- inside

    def _found(self, name: str) -> tuple[Index, int]:
        group = self._group_with(name)
        row = None if group is None else group.row_of(name)
        if group is None or row is None:
            near = [*(group.names() if group is not None else ()), *group_names(self.head.groups)]
            raise NotFoundError(f"the checkpoint has no tensor {name!r}", hint=_nearest(name, near), tensor=name)
        return group, row

    def _group_with(self, name: str) -> Index | None:
        try:
            number = self.head.groups.number_of(name.encode("utf-8"))
        except UnicodeEncodeError:
            return None
        return None if number is None else self._group(number)

    def _all(self) -> Iterator[Index]:
        numbers = range(len(self.head.groups))
        self._expect(tuple(numbers))
        return (self._group(number) for number in numbers)

    def _expect(self, numbers: tuple[int, ...]) -> None:
        self._places = {number: place for place, number in enumerate(numbers)}
        self._expected = numbers

    def _group(self, number: int) -> Index:
        found = self._groups.get(number)
        if found is not None:
            return found
        wanted = self._window(number)
        made: dict[int, Index] = {}
        for each, data in zip(wanted, self._fetch(wanted), strict=True):
            made[each] = decode_group(self.head.groups, each, data, files=self.head.files, block_nbytes=self.block_nbytes)
        self._keep(made)
        return made[number]

    def _window(self, number: int) -> list[int]:
        """The group, and what is expected to be asked for next."""
        groups, expected = self.head.groups, self._expected
        wanted = [number]
        nbytes = groups.nbytes(number)
        place = self._places.get(number)
        for each in expected[place + 1 :] if place is not None else ():
            if each in self._groups:
                continue
            nbytes += groups.nbytes(each)
            if nbytes > min(WINDOW_NBYTES, self._cache_nbytes // 2):
                break
            wanted.append(each)
        return wanted

    def _keep(self, made: dict[int, Index]) -> None:
        self._groups.update(made)
        kept = list(self._groups)  # at once, whatever other threads do
        held = sum(map(self.head.groups.nbytes, kept))
        for number in kept:  # the oldest first
            if held <= self._cache_nbytes or number in made:
                break
            self._groups.pop(number, None)
            held -= self.head.groups.nbytes(number)


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names[:5000], n=3)
    return (
        f"nearest are {', '.join(map(repr, close))}"
        if close
        else f"there are others, e.g. {names[0]!r}"
        if names
        else "there are none at all"
    )
