"""`TierFileSystem`: ``tier://`` for everything that speaks fsspec.

Here is what fsspec calls, with its arguments and its ways; `bridged` brings the work to the session's event loop, and `tree` does it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from glob import has_magic
from pathlib import Path
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import isfilelike

from tierstore.errors import UsageError
from tierstore.fs.bridged import BridgedFileSystem
from tierstore.fs.local import receive_file, send_file
from tierstore.fs.nodes import Node, UnsupportedModeError
from tierstore.fs.places import inner, options_of, outer
from tierstore.fs.streams import TierReader, TierWriter
from tierstore.fs.tree import Range, Tree, names_index
from tierstore.tiers.files.spool import Spool

__all__ = ["TierFileSystem"]

Info = dict[str, Any]


class TierFileSystem(BridgedFileSystem):
    """Files and checkpoints of a store's tiers.

    Args:
        config: A YAML file's path, a mapping, or a `StoreConfig`; None: what the command line would find.
        tiers: The tiers themselves instead, nearest first, as `tierstore.open` takes them; or one.
        ack: When a file counts as written: ``nearest``, ``authority``, ``durable``, or ``auto``; empty: as configured (``files.ack``).
        name: A configuration's name, as in ``tier://NAME/…``.
        store: An open `Store`, whose configuration is meant.
        asynchronous: The caller awaits the coroutines itself.
        batch_size: How many files fsspec's bulk operations work on at once.
        fingerprint: Made by the class itself: tells configurations given as values apart.
    """

    protocol = "tier"
    root_marker = "/"

    def __init__(
        self,
        config: Any = None,
        *,
        tiers: Iterable[Any] | None = None,
        ack: str = "",
        asynchronous: bool = False,
        batch_size: int | None = None,
        fingerprint: str = "",
        **options: Any,
    ) -> None:
        if getattr(self, "_cached", False):
            return
        super().__init__(config, tiers, ack, asynchronous=asynchronous, batch_size=batch_size, **options)

    # ---- the store behind it

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that all work runs on: the session's own, which a forked child makes anew."""
        return self._opened().session.loop.asyncio_loop

    @property
    def fsid(self) -> str:
        """Names the store: equal for all file systems over it."""
        return f"tier_{self._opened().session.tiers.store_id}"

    def sync_tiers(self, timeout: float | None = None) -> None:
        """Waits until what this process has written is on every tier that should have it.

        Args:
            timeout: Seconds to wait; None: as long as it goes on.

        Raises:
            DeadlineError: Not done in time, or a tier keeps failing; what is left is carried on all the same.
            TierStoreError: Something can't be brought where it should be; names it.
        """
        opened = self._opened()
        opened.session.run(opened.files.sync(timeout))

    def close(self, deadline: float | None = None) -> None:
        """Waits as `sync_tiers`, then closes this process's tiers of that configuration; a later call opens them anew.

        Without it that is done when the interpreter ends.

        Args:
            deadline: Seconds that the background work may take; None: as long as it goes on.

        Raises:
            DeadlineError, TierStoreError: As `sync_tiers`; `tierstore sync`, or a later process on this node, carries on what is left.
        """
        self._close(deadline)

    # ---- names

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return [inner(each) for each in path] if isinstance(path, list) else inner(path)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return options_of(path) if path[:7].lower() == "tier://" else {}

    def unstrip_protocol(self, name: str) -> str:
        """The URI of a path here, with the configuration or the tiers in it."""
        return outer(inner(name), self._given)

    def _names(self, path: Any) -> str:
        """The path as the tree knows it."""
        return inner(path)[1:]

    # ---- looking

    async def _info(self, path: str, **options: Any) -> Info:
        name = self._names(path)
        return (await self._there(lambda tree: tree.look_up(name))).info()

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        name = self._names(path)
        found = await self._there(lambda tree: tree.listed(name))
        return [node.info() if detail else f"/{node.path}" for node in found]

    async def _find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, prefix: str = "", **options: Any
    ) -> Any:
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        name = self._names(path)

        async def look(tree: Tree) -> list[Node]:
            found = [
                node
                for node in await tree.below(name, maxdepth)
                if (withdirs or not node.is_folder) and node.path[len(name) + 1 if name else 0 :].startswith(prefix)
            ]
            own = await tree.find(name) if name and (withdirs or not found) else None
            return [own, *found] if own is not None and (withdirs or not own.is_folder) else found

        found = {f"/{node.path}": node.info() for node in await self._there(look)}
        return found if detail else sorted(found)

    async def _expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, assume_literal: bool = False
    ) -> list[str]:
        """As fsspec's, but a name with ``[``, ``?`` or ``*`` in it that is there is meant itself.

        Nothing is left to fsspec's own: its arguments differ between releases (2026.2 has no `assume_literal`).
        """
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        found: set[str] = set()
        for given in path if isinstance(path, list | tuple | set) else [path]:
            name, depth = inner(given), maxdepth
            roots = [name]
            if has_magic(name) and not assume_literal and not await self._exists(name):
                roots = list(await self._glob(name, maxdepth=maxdepth))
                found.update(roots)  # what a pattern names is a level of its own
                depth = None if maxdepth is None else maxdepth - 1
            for root in roots:
                if recursive and depth != 0:
                    found.update(await self._find(root, maxdepth=depth, withdirs=True))
                if root not in found and (not recursive or await self._exists(root)):
                    found.add(root)
        if not found:
            raise FileNotFoundError(path)
        return sorted(found)

    async def _created(self, path: str) -> datetime:
        name = self._names(path)
        at = (await self._there(lambda tree: tree.look_up(name))).at
        if at is None:
            raise NotImplementedError(f"nobody made the folder /{name}: it has no time of its own")
        return at

    def created(self, path: str) -> datetime:
        """When the file's bytes were published, by the writer's clock: a file that is written again is another version."""
        return self._wait(lambda: self._created(path))

    modified = created

    def checksum(self, path: str) -> int:
        """The file's SHA-256 (over its blocks' digests) as a number: equal for equal bytes."""

        async def ask(tree: Tree) -> str:
            return await tree.digest(await tree.file(self._names(path)))

        return int(self._wait(lambda: self._there(ask)).partition(":")[2], 16)

    def ukey(self, path: str) -> str:
        """Names the version of the file: another one after each write."""

        async def ask(tree: Tree) -> str:
            node = await tree.look_up(self._names(path))
            return f"{node.path}@{node.identity}"

        return self._wait(lambda: self._there(ask))

    def walk(self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "omit", **options: Any) -> Iterator[Any]:
        """As fsspec's, a folder at a time."""
        steps = self._walk(path, maxdepth=maxdepth, topdown=topdown, on_error=on_error, **options)

        async def step() -> list[Any]:
            try:
                return [await steps.__anext__()]
            except StopAsyncIteration:
                return []

        while found := self._wait(step):
            yield found[0]

    # ---- reading

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        name = self._names(path)

        async def read(tree: Tree) -> bytes:
            return await tree.read(await tree.file(name), Range(start=start, end=end))

        return await self._there(read)

    async def _cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = "return",
        **options: Any,
    ) -> list[Any]:
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        starts = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
        ends = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
        if not len(starts) == len(ends) == len(paths):
            raise ValueError("paths, starts and ends differ in length")
        wanted = [(self._names(p), Range(start=s, end=e)) for p, s, e in zip(paths, starts, ends, strict=True)]
        found = await self._there(lambda tree: tree.read_ranges(wanted, gap_nbytes=max_gap))
        failure = next((each for each in found if isinstance(each, Exception)), None)
        if failure is not None and on_error != "return":
            raise failure
        return found

    async def _get_file(self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, **options: Any) -> None:
        name = self._names(rpath)
        node = await self._there(lambda tree: tree.look_up(name))
        if node.is_folder:
            os.makedirs(lpath, exist_ok=True)
            return
        callback.set_size(node.nbytes)
        target = lpath if isfilelike(lpath) else Path(lpath)
        await self._there(lambda tree: receive_file(tree, node, target, callback.relative_update))

    def read_node(self, node: Node, wanted: Range) -> bytes:
        """Bytes of a file that was looked up before, for `TierReader`."""
        return self._wait(lambda: self._there(lambda tree: tree.read(node, wanted)))

    # ---- writing

    async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **options: Any) -> None:
        name = self._names(path)
        if self._intrans:
            await self._aside(self._write_later, name, mode, lambda file: file.write(value))
            return
        await self._there(lambda tree: tree.put(name, bytes(value), exclusive=_exclusive(mode)), writing=True)

    async def _put(self, lpath: Any, rpath: Any, recursive: bool = False, callback: Any = DEFAULT_CALLBACK, **options: Any) -> None:
        """As fsspec's, but indexes (`is_index`) come when all others are there."""
        later: list[tuple[Any, str]] = []
        await super()._put(lpath, rpath, recursive=recursive, callback=callback, later=later, **options)
        own = {key: value for key, value in options.items() if key not in ("batch_size", "maxdepth")}
        for source, target in later:
            await callback.branch_coro(self._put_file)(source, target, **own)

    async def _put_file(
        self,
        lpath: Any,
        rpath: str,
        mode: str = "overwrite",
        callback: Any = DEFAULT_CALLBACK,
        later: list[tuple[Any, str]] | None = None,
        **options: Any,
    ) -> None:
        name, source = self._names(rpath), Path(lpath)
        if later is not None and names_index(name):
            later.append((lpath, rpath))
            return
        if await asyncio.to_thread(source.is_dir):
            await self._makedirs(rpath, exist_ok=True)
            return
        callback.set_size(await asyncio.to_thread(lambda: source.stat().st_size))
        if self._intrans:
            await self._aside(self._write_later, name, mode, lambda file: send_file(source, file.write, callback.relative_update))
            return

        async def send(tree: Tree) -> None:
            await tree.check_target(name)
            spool = tree.files.spool()
            try:
                await asyncio.to_thread(send_file, source, spool.write, callback.relative_update)
                await tree.publish(name, spool, exclusive=_exclusive(mode))
            finally:
                spool.discard()

        await self._there(send, writing=True)

    def _write_later(self, name: str, mode: str, write: Callable[[TierWriter], object]) -> None:
        """Within a transaction: what is written is published when that ends."""
        file = self._open(name, "xb" if _exclusive(mode) else "wb", autocommit=False)
        with file:
            write(file)
        self.transaction.files.append(file)

    async def _cp_file(
        self, path1: str, path2: str, later: list[tuple[str, str]] | None = None, made: list[str] | None = None, **options: Any
    ) -> None:
        source, target = self._names(path1), self._names(path2)
        if made is not None:
            made.append(target)
        if later is not None and names_index(target):
            later.append((path1, path2))
            return
        await self._there(lambda tree: tree.copy(source, target), writing=True)

    async def _copy(self, path1: Any, path2: Any, recursive: bool = False, on_error: str | None = None, **options: Any) -> None:
        """As fsspec's, but a file whose name looks like a pattern is one file, and indexes (`is_index`) come when all others are there."""
        if isinstance(path1, str) and has_magic(inner(path1)) and await self._isfile(path1):
            into = str(path2).endswith("/") or await self._isdir(path2)
            path1, path2 = [path1], [f"{path2}/{inner(path1).rpartition('/')[2]}" if into else path2]
        later: list[tuple[str, str]] = []
        on_error = on_error or ("ignore" if recursive else "raise")
        await super()._copy(path1, path2, recursive=recursive, on_error=on_error, later=later, **options)
        for source, target in later:
            try:
                await self._cp_file(source, target)
            except FileNotFoundError:
                if on_error != "ignore":
                    raise

    async def _mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> None:
        if isinstance(path1, list):
            for old, new in zip(path1, path2, strict=True):
                await self._mv(old, new)
            return
        source, target = self._names(path1), self._names(path2)
        if source == target:
            return

        if has_magic(source) and not await self._exists(path1):
            found = [self._names(each) for each in await self._expand_path(path1, maxdepth=maxdepth)]
            made = [target]
            _refuse_into_itself(found, made)
            await self._copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise", made=made)
            _refuse_into_itself(found, made)  # before what was made goes with what it was made of
            await self._rm(path1, recursive=recursive, maxdepth=maxdepth)
            return
        await self._there(lambda tree: tree.move(source, target, into=str(path2).endswith("/")), writing=True)

    async def _rm_file(self, path: str, **options: Any) -> None:
        name = self._names(path)

        await self._there(lambda tree: tree.remove_one(name), writing=True)

    async def _rm(
        self, path: Any, recursive: bool = False, batch_size: int | None = None, maxdepth: int | None = None, **options: Any
    ) -> None:
        found = await self._expand_path(path, maxdepth=maxdepth)
        if not recursive:
            for each in found:
                await self._rm_file(each)
            return

        await self._there(lambda tree: tree.remove_all([inner(each)[1:] for each in found], maxdepth), writing=True)

    async def _mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        name = self._names(path)
        await self._there(lambda tree: tree.make_folder(name, exist_ok=False, parents=create_parents), writing=True)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        name = self._names(path)
        await self._there(lambda tree: tree.make_folder(name, exist_ok=exist_ok), writing=True)

    async def _rmdir(self, path: str) -> None:
        name = self._names(path)

        await self._there(lambda tree: tree.remove_one(name, folder=True), writing=True)

    async def _touch(self, path: str, truncate: bool = True, **options: Any) -> None:
        if truncate or not await self._exists(path):
            await self._pipe_file(path, b"")
        else:
            raise NotImplementedError("a file's time is that of its bytes: it can't be changed alone")

    # ---- open files

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Any = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        name = self._names(path)
        if mode == "rb":
            node = self._wait(lambda: self._there(lambda tree: tree.file(name)))
            size = block_size if isinstance(block_size, int) else self.blocksize  # some say "default"
            return TierReader(self, f"/{name}", node, block_size=size, cache_options=cache_options, **options)
        if mode not in ("wb", "xb"):
            raise UnsupportedModeError(
                f"/{name} can't be opened with mode {mode!r}: files are written as a whole, and immutable then",
                hint="read it and write it anew ('wb'), or write what is to be added as a file of its own",
            )
        opened = self._opened(writing=True)
        exclusive = mode == "xb"

        opened.session.run(opened.tree.check_new(name, exclusive=exclusive))

        def publish(spool: Spool) -> None:
            opened.session.run(opened.tree.publish(name, spool, exclusive=exclusive))

        return TierWriter(opened.files.spool(), publish, name, mode=mode, autocommit=autocommit)


def _refuse_into_itself(sources: Iterable[str], targets: Iterable[str]) -> None:
    """Raises UsageError where one of the targets is one of the sources, or lies in it."""
    moved = {f"{source}/" for source in sources}
    for target in targets:
        ends = [at + 1 for at, letter in enumerate(f"{target}/") if letter == "/"]
        if any(f"{target}/"[:end] in moved for end in ends):
            raise UsageError(f"/{target} is, or lies in, what is to be moved; nothing was removed", hint="move it elsewhere")


def _exclusive(mode: str) -> bool:
    return mode == "create"
