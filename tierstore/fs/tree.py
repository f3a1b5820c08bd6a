"""One tree of paths: the files through the tiers, and the store's checkpoints between them. Where both have a path the file is meant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tierstore.errors import ConflictError, NotFoundError, TierStoreError, UsageError
from tierstore.fs.checkpoints import Checkpoints
from tierstore.fs.nodes import CheckpointFile, Node, NotAFolderError, NotEmptyError, folder_node, node_of
from tierstore.tiers.files.entry import FileVersion
from tierstore.tiers.files.files import Files
from tierstore.tiers.files.spool import Spool
from tierstore.tiers.session import Session
from tierstore.tiers.together import together

__all__ = ["Range", "Tree", "is_index", "names_index"]

_WINDOW_NBYTES = 16 << 20
_GAP_NBYTES = 64 << 10
_MERGED_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bytes that somebody wants of a file, as Python slices count: None and negative numbers from the end."""

    start: int | None = None
    end: int | None = None

    def of(self, nbytes: int) -> tuple[int, int]:
        """The half-open range within a file of `nbytes` bytes."""
        begin, end, _ = slice(self.start, self.end).indices(nbytes)
        return begin, max(begin, end)


class Tree:
    """What the file system does, on the session's event loop. Paths have no slash at either end; the root is empty."""

    def __init__(self, session: Session, files: Files) -> None:
        self.files = files
        self.checkpoints = Checkpoints(session)

    # ---- looking

    async def look_up(self, path: str) -> Node:
        """What is under `path`.

        Raises:
            NotFoundError: Nothing.
        """
        node = await self.find(path)
        if node is None:
            raise NotFoundError(f"there is no file or folder /{path}", hint="look with fs.ls; a file exists once its writer has closed it")
        return node

    async def find(self, path: str) -> Node | None:
        """What is under `path`; None: nothing."""
        if not path:
            return folder_node("")
        version = await self.files.look_up(path)
        if version is not None and not version.is_folder:
            return node_of(version)
        other = await self.checkpoints.look_up(path)
        if version is not None and (other is None or other.is_folder):
            return node_of(version)
        return other

    async def file(self, path: str) -> Node:
        """The file under `path`.

        Raises:
            NotFoundError: There is none; also where it is a folder.
        """
        node = await self.look_up(path)
        if node.is_folder:
            raise NotFoundError(f"/{path} is a folder", hint="name a file in it", folder=path)
        return node

    async def listed(self, folder: str) -> list[Node]:
        """What lies directly in `folder`; of a file, the file.

        Raises:
            NotFoundError: There is no such folder.
        """
        found = _merged(await self.files.list(folder, recursive=False), await self.checkpoints.listed(folder))
        if found:
            return found
        node = await self.look_up(folder)
        return [] if node.is_folder else [node]

    async def below(self, folder: str, maxdepth: int | None = None) -> list[Node]:
        """All files and folders below `folder`, sorted by path; those directly in it are at depth 1. `maxdepth` None: at any depth."""
        found = _merged(await self.files.list(folder, recursive=True), await self.checkpoints.below(folder))
        start = len(folder) + 1 if folder else 0
        return [node for node in found if maxdepth is None or node.path[start:].count("/") < maxdepth]

    # ---- reading

    async def read(self, node: Node, wanted: Range) -> bytes:
        """Bytes of a file, proved; an empty range reads nothing."""
        begin, end = wanted.of(node.nbytes)
        if begin >= end:
            return b""
        if isinstance(node.source, CheckpointFile):
            return await self.checkpoints.read(node.source, begin, end - begin)
        assert node.source is not None, "a folder has no bytes"
        return await self.files.read(node.source, begin, end - begin)

    async def digest(self, node: Node) -> str:
        """``sha256:<hex>`` over the blocks' digests of a file."""
        if isinstance(node.source, CheckpointFile):
            return node.source.digest
        assert node.source is not None, "a folder has no bytes"
        return (await self.files.entry(node.source)).digest

    async def read_ranges(self, wanted: Sequence[tuple[str, Range]], *, gap_nbytes: int | None = None) -> list[bytes | Exception]:
        """Ranges of several files, each in its place; what is wrong with one stands there instead of its bytes.

        Each file is looked up once, and ranges of it that lie within `gap_nbytes` of each other are read at once.
        """
        by_path: dict[str, list[int]] = {}
        for number, (path, _) in enumerate(wanted):
            by_path.setdefault(path, []).append(number)
        found: list[bytes | Exception] = [b""] * len(wanted)
        gap = _GAP_NBYTES if gap_nbytes is None else gap_nbytes

        async def of_file(path: str) -> None:
            numbers = by_path[path]
            try:
                node = await self.file(path)
            except (TierStoreError, OSError) as error:
                for number in numbers:
                    found[number] = error
                return
            spans = _merge([(*wanted[number][1].of(node.nbytes), number) for number in numbers], gap)
            await together(lambda span: self._read_span(node, span, found), spans)

        await together(of_file, list(by_path))
        return found

    async def _read_span(self, node: Node, span: _Span, found: list[bytes | Exception]) -> None:
        try:
            data = memoryview(await self.read(node, Range(start=span.begin, end=span.end)))
        except (TierStoreError, OSError) as error:
            for _, _, number in span.parts:
                found[number] = error
            return
        for begin, end, number in span.parts:
            found[number] = bytes(data[begin - span.begin : end - span.begin])

    # ---- writing

    async def publish(self, path: str, spool: Spool, *, exclusive: bool = False) -> Node:
        """Makes what `spool` holds the file `path`.

        Raises:
            ReadOnlyError: It lies in a checkpoint.
            ConflictError: `exclusive`, and there is one.
        """
        await self.check_writable(path)
        return node_of(await self.files.publish(path, spool, exclusive=exclusive))

    async def put(self, path: str, data: bytes, *, exclusive: bool = False) -> Node:
        """Makes `data` the file `path`; errors as `publish` and `check_target`."""
        await self.check_target(path)
        return node_of(await self.files.put(path, data, exclusive=exclusive))

    async def check_writable(self, *paths: str) -> None:
        """Errors as `publish`, for paths that are about to be written or removed."""
        if "" in paths:
            raise UsageError("the root is no file", hint="name a file below it")
        await self.checkpoints.refuse_writes(*paths)

    async def check_target(self, path: str) -> None:
        """Errors as `check_writable`, for a path under which something is about to be made.

        Raises:
            NotAFolderError: A file is where one of its folders would have to be.
        """
        await self.check_writable(path)
        file = await self.files.file_above(path)
        if file is not None:
            raise NotAFolderError(f"/{file} is a file: there can't be a /{path} below it", hint="choose another name, or remove the file")

    async def check_new(self, path: str, *, exclusive: bool) -> None:
        """Errors as `check_target`, for a file that is about to be written.

        Raises:
            ConflictError: `exclusive`, and there is one.
        """
        await self.check_target(path)
        if exclusive and (node := await self.find(path)) is not None and not node.is_folder:
            raise ConflictError(f"there is a file /{path} already", hint="open it with 'wb' to replace it")

    async def copy(self, source: str, target: str) -> None:
        """Copies one file, or makes the folder `target` where `source` is one."""
        node = await self.look_up(source)
        if node.is_folder:
            await self.make_folder(target, exist_ok=True)
            version = await self.files.look_up(target)
            if version is not None and version.is_folder and not version.version:
                await self.files.make_folder(target)  # a file of the same copy may have come first: the folder would go with that
        elif isinstance(node.source, CheckpointFile):
            await self.check_target(target)
            spool = self.files.spool()
            try:
                for begin in range(0, node.nbytes, _WINDOW_NBYTES):
                    data = await self.read(node, Range(start=begin, end=begin + _WINDOW_NBYTES))
                    await asyncio.to_thread(spool.write, data)
                await self.files.publish(target, spool)
            finally:
                spool.discard()
        else:
            await self.check_target(target)
            await self.files.copy(source, target)

    async def move(self, source: str, target: str, *, into: bool) -> None:
        """Moves a file, or a folder with all that is in it; `into`: below `target`, as where there is a folder of that name.

        The new name is there before the old one goes; between the two both are. Indexes (`is_index`) are copied when all others are there.

        Raises:
            UsageError: A folder would be moved into itself.
        """
        await self.check_writable(source, *filter(None, [target]))
        node = await self.look_up(source)
        to = await self.find(target)
        if into or (to is not None and to.is_folder):
            target = "/".join(filter(None, [target, source.rpartition("/")[2]]))
        if source == target:
            return  # it is there already
        if not node.is_folder:
            await self.copy(source, target)
            await self.remove([node])
            return
        if f"{target}/".startswith(f"{source}/"):
            raise UsageError(f"/{source} can't be moved into itself", hint="move it elsewhere")
        moved = [node, *await self.below(source)]
        for each in sorted(moved, key=is_index):
            if each.source is not None:
                await self.copy(each.path, f"{target}{each.path[len(source) :]}")
        await self.remove(moved)

    async def make_folder(self, path: str, *, exist_ok: bool, parents: bool = True) -> None:
        """Makes a folder that is there also while it is empty; its parents are folders by that.

        Raises:
            ConflictError: There is a file of that name, or, without `exist_ok`, a folder.
            NotFoundError: Without `parents`: the folder above is missing.
            NotAFolderError, ReadOnlyError: As `check_target`.
        """
        node = await self.find(path)
        if node is not None:
            if node.is_folder and exist_ok:
                return
            raise ConflictError(f"there is a {'folder' if node.is_folder else 'file'} /{path} already", hint="use makedirs(exist_ok=True)")
        above = path.rpartition("/")[0]
        if not parents and above and await self.find(above) is None:
            raise NotFoundError(f"there is no folder /{above} to make /{path} in", hint="use create_parents=True, or makedirs")
        await self.check_target(path)
        await self.files.make_folder(path)

    async def remove_one(self, path: str, *, folder: bool = False) -> None:
        """Removes a file or an empty folder; `folder`: only a folder.

        Raises:
            NotAFolderError: `folder`, and it is a file.
            NotEmptyError: It is a folder that holds something.
        """
        node = await self.look_up(path)
        if folder and not node.is_folder:
            raise NotAFolderError(f"/{path} is a file", hint="use fs.rm_file")
        if node.is_folder and await self.below(path):
            raise NotEmptyError(f"/{path} is a folder that is not empty", hint="use fs.rm(path, recursive=True)")
        await self.remove([node])

    async def remove_all(self, paths: Sequence[str], maxdepth: int | None = None) -> None:
        """Removes files, and folders with what is in them, as deep as `maxdepth` (as `below`).

        Raises:
            NotFoundError: There is nothing of that.
        """
        found: dict[str, Node] = {}
        for path in paths:
            node = await self.find(path)
            nodes = [] if node is None else [node]
            if node is not None and node.is_folder:
                nodes = [*await self.below(path, maxdepth), *(nodes if path else [])]
            found.update((each.path, each) for each in nodes)
        if not found:
            raise NotFoundError(f"there is nothing to remove under {', '.join(f'/{path}' for path in paths)}", hint="look with fs.ls")
        await self.remove(list(found.values()))

    async def remove(self, nodes: Sequence[Node]) -> None:
        """Removes files, and folders that somebody made; those that only hold something are gone with it.

        Many go at once, but indexes (`is_index`) before all others: what is half removed never looks like a whole checkpoint.
        """
        await self.check_writable(*(node.path for node in nodes))
        gone = sorted((node for node in nodes if node.source is not None), key=lambda node: (node.is_folder, node.path))
        for some in ([node for node in gone if is_index(node)], [node for node in gone if not is_index(node)]):
            if some:
                await self.files.remove([node.path for node in some])


def is_index(node: Node) -> bool:
    """Whether it may say that the files beside it are whole: it comes last, and goes first."""
    return not node.is_folder and names_index(node.path)


def names_index(path: str) -> bool:
    """Whether a file of that name may be an index: torch's ``.metadata``, or ``model.safetensors.index.json``."""
    name = path.rpartition("/")[2]
    return name.startswith(".") or name.endswith(".index.json")


@dataclass(slots=True, kw_only=True)
class _Span:
    """A part of one file that is read at once, and the wanted ranges in it, each with its number."""

    begin: int
    end: int
    parts: list[tuple[int, int, int]] = field(default_factory=list)


def _merge(ranges: Iterable[tuple[int, int, int]], gap: int) -> list[_Span]:
    spans: list[_Span] = []
    for begin, end, number in sorted(ranges):
        last = spans[-1] if spans else None
        if last is not None and begin <= last.end + gap and max(end, last.end) - last.begin <= _MERGED_NBYTES:
            last.end = max(last.end, end)
        else:
            last = _Span(begin=begin, end=end)
            spans.append(last)
        last.parts.append((begin, end, number))
    return spans


def _merged(files: Iterable[FileVersion], checkpoints: Iterable[Node]) -> list[Node]:
    found = {node.path: node for node in checkpoints}
    for version in files:
        known = found.get(version.path)
        if known is None or known.is_folder or not version.is_folder:
            found[version.path] = node_of(version)
    return [found[path] for path in sorted(found)]
