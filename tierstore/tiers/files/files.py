"""`Files`: any file through the tiers. What the ``tier://`` file system is made of; coroutines that run on the session's loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from tierstore.clock import utc_text
from tierstore.config import Ack, files_ack
from tierstore.errors import LockedError, NotFoundError, TierStoreError
from tierstore.format.digest import block_digests, file_digest
from tierstore.storage.contract import Source
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource, LocalSource
from tierstore.storage.tasks import end_all
from tierstore.storage.temporaries import temporary_name
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.files.entry import FileEntry, FileVersion, folder_entry
from tierstore.tiers.files.looking import Looker, State
from tierstore.tiers.files.mover import Item, Mover, MoverOptions, PendingFile
from tierstore.tiers.files.places import check_path
from tierstore.tiers.files.publishing import Publisher
from tierstore.tiers.files.reading import AnyTierSource, Reader, data_path
from tierstore.tiers.files.reconcile import FILES_LOCK, look_at_files, take_over, tidy
from tierstore.tiers.files.spool import Spool, spool_folders
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import happens, together

__all__ = ["Ack", "FileEntry", "FileVersion", "Files", "PendingFile", "Spool"]

log = logging.getLogger(__name__)


class Files:
    """The files of one store, as one process uses them.

    All coroutines run on the session's loop. What is published is carried on in the background; `close` waits for it.

    Args:
        session: The store; opened for writing, if anything is to be written.
        ack: When a publication returns; None: as the configuration says (``files: {ack: …}``).
        options: How the mover tries again; None: as the configuration says.
    """

    def __init__(self, session: Session, *, ack: Ack | None = None, options: MoverOptions | None = None) -> None:
        self._session = session
        self._tiers = session.tiers
        self._ack: Ack = ack if ack is not None else files_ack(session.config)
        self._options = options or MoverOptions(patience_s=session.config.save.patience_s)
        self._make()

    def _make(self) -> None:
        session, options = self._session, self._options
        self._context = CopyContext.make(session.tiers, session.clock, files_in_flight=session.config.io.threads)
        self._looker = Looker(session.tiers)
        self._reader = Reader(session.tiers, self._looker)
        self._owner = temporary_name("file")
        self._mover = Mover(self._context, options, self._owner)
        self._publisher = Publisher(self._context, session.clock, self._looker, self._mover)
        self._taking_over: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._pid = os.getpid()

    def _this_process(self) -> None:
        """In a forked child: what its parent has under way is the parent's."""
        if self._pid != os.getpid():
            self._make()

    # Looking

    async def look_up(self, path: str) -> FileVersion | None:
        """The newest version of a file, or the folder of that name (also one that exists only through what lies below it), or None.

        Raises:
            UsageError: `path` can't name a file.
            StorageError: No tier answers.
        """
        return await self._looker.look_up(path)

    async def file_above(self, path: str) -> str | None:
        """The file that is where a folder above `path` would have to be; None where there is none. Errors as `look_up`."""
        names = check_path(path).split("/")
        above = ["/".join(names[:depth]) for depth in range(1, len(names))]
        states = await together(self._looker.state, above)
        return next((state.path for state in states if state.live is not None), None)

    async def list(self, folder: str = "", *, recursive: bool = True) -> list[FileVersion]:
        """The files and folders below `folder`, sorted by path; empty if there is no such folder. Errors as `look_up`."""
        return await self._looker.list(folder, recursive=recursive)

    # Reading

    async def entry(self, version: FileVersion) -> FileEntry:
        """What proves a version's bytes.

        Raises:
            ConflictError: The file was replaced since it was looked up.
            NotFoundError: It was removed since.
            IntegrityError: Every copy is damaged; names each.
            StorageError: No tier that may hold it answers.
        """
        return await self._reader.entry(version)

    async def read(self, version: FileVersion, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a version, every block proved; fewer than `nbytes` only at its end. Errors as `entry`."""
        return await self._reader.read(version, offset, nbytes)

    async def read_into(self, version: FileVersion, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable, contiguous bytes), every block proved. Errors as `entry`; UsageError past the end."""
        await self._reader.read_into(version, offset, buffer)

    # Writing

    def spool(self) -> Spool:
        """A place for bytes that are being written, in order; `publish` makes a file of them. Blocking, no coroutine."""
        return Spool(spool_folders(self._tiers), self._session.config.io.block_nbytes)

    async def publish(self, path: str, spool: Spool, *, exclusive: bool = False) -> FileVersion:
        """Publishes a spool's bytes as the newest version of `path`; the spool is discarded once that is done.

        Args:
            path: The file; what it held before is replaced.
            spool: The bytes; kept when this fails, so that it can be tried again.
            exclusive: The file must not exist: one winner among any number of racers.

        Raises:
            UsageError: `path` can't name a file.
            ConflictError: `exclusive`, and it exists or is being created.
            TierFullError, AccessError, StorageError: No tier takes it; nothing was published.
            DeadlineError: It is published, but not as far as `ack` asks, and the tier keeps failing; it is carried on.
        """
        self._this_process()
        entry = await asyncio.to_thread(spool.entry, self._owner, utc_text(self._session.clock.now()))
        self._begin()
        version, item = await self._publisher.publish(
            check_path(path), entry, lambda tier: _SpoolSource.of(spool, entry.nbytes, tier), exclusive=exclusive
        )
        await asyncio.to_thread(spool.discard)
        await self._acknowledge(item)
        return version

    async def put(self, path: str, data: bytes, *, exclusive: bool = False) -> FileVersion:
        """Publishes `data` as the newest version of `path`. Errors as `publish`."""
        self._this_process()
        entry = await asyncio.to_thread(self._entry_of, data)
        self._begin()
        version, item = await self._publisher.publish(check_path(path), entry, lambda tier: BytesSource(data), exclusive=exclusive)
        await self._acknowledge(item)
        return version

    async def make_folder(self, path: str) -> None:
        """Makes a folder that exists though nothing lies in it; fine if it was made already. Errors as `publish`."""
        if not path or (await self._looker.state(check_path(path), is_folder=True)).live is not None:
            return
        self._this_process()
        self._begin()
        entry = folder_entry(self._owner, self._session.clock.now())
        _, item = await self._publisher.publish(path, entry, lambda tier: BytesSource(b""), is_folder=True)
        await self._acknowledge(item)

    async def remove(self, paths: Sequence[str]) -> None:
        """Removes files, and folders that were made (`make_folder`): what lies below a folder stays, and the folder with it.

        Raises:
            NotFoundError: One of them does not exist; nothing was removed.
            StorageError: The authority does not answer; what was removed before stays removed.
        """

        self._this_process()
        self._begin()

        async def look(path: str) -> tuple[State, State]:
            return await self._looker.state(check_path(path)), await self._looker.state(path, is_folder=True)

        states = await together(look, paths)
        wanted: list[State] = []
        for path, (file, folder) in zip(paths, states, strict=True):
            found = [state for state in (file, folder) if state.live is not None]
            if not found and not any(on_tier.claims for on_tier in file.tiers.values()):
                found_below = await self._looker.look_up(path)
                if found_below is None:
                    raise NotFoundError(f"there is no {path!r} to remove", hint="list its folder to see what there is", path=path)
            wanted += found or ([file] if any(on_tier.claims for on_tier in file.tiers.values()) else [])
        await self._publisher.remove(wanted)

    async def copy(self, source: str, target: str) -> FileVersion:
        """Publishes what `source` holds as `target` too; without copying bytes where they lie on the tier that takes it.

        Raises:
            NotFoundError: There is no file `source`.
        """
        self._this_process()
        self._begin()
        version = await self.look_up(check_path(source))
        if version is None or version.is_folder:
            what = "is a folder" if version is not None else "does not exist"
            raise NotFoundError(f"{source!r} {what}", hint="copy files one by one: `list` gives what lies in a folder", path=source)
        entry = await self.entry(version)
        new = FileEntry(
            nbytes=entry.nbytes,
            digest=entry.digest,
            block_nbytes=entry.block_nbytes,
            blocks=entry.blocks,
            owner=self._owner,
            created_at=utc_text(self._session.clock.now()),
        )

        def of_tier(tier: Tier) -> Source:
            anywhere = AnyTierSource(self._reader, version, self._context.budget)
            local = tier.storage.local_path(data_path(version)) if tier.name in version.tiers else None
            return LocalSource(anywhere, local, hard=True) if local is not None and version.nbytes else anywhere

        published, item = await self._publisher.publish(check_path(target), new, of_tier)
        await self._acknowledge(item)
        return published

    # Carrying on

    async def sync(self, timeout: float | None = None) -> None:
        """Takes over what dead processes of this node left, then waits until everything that was published is on every tier.

        Raises:
            DeadlineError: Not within `timeout` seconds, or a tier keeps failing; the rest is carried on later.
            TierStoreError: Something can't be brought where it should be.
        """
        self._this_process()
        end = None if timeout is None else asyncio.get_running_loop().time() + timeout
        self._begin()
        if self._taking_over is not None:
            await happens(self._looked, timeout)
        await self._mover.drain(None if end is None else max(0.0, end - asyncio.get_running_loop().time()))

    def pending(self) -> Sequence[PendingFile]:
        """What is not where it should be yet; to be called on the session's loop, or for a picture that may be a moment old."""
        return self._mover.pending() if self._pid == os.getpid() else ()

    async def close(self, deadline: float | None = None) -> None:
        """Waits until everything that was published is on every tier, `deadline` seconds at most, then ends the background work.

        Raises:
            DeadlineError, TierStoreError: As `sync`.
        """
        if self._pid != os.getpid():
            return
        try:
            await self._mover.drain(deadline)
        finally:
            if self._taking_over is not None:
                await end_all({self._taking_over})
            await self._mover.close()

    def _begin(self) -> None:
        """The first writing: from now on this process also carries on what dead ones left."""
        if self._taking_over is None and len(self._tiers) > 1:
            self._taking_over = asyncio.ensure_future(self._take_over())

    async def _take_over(self) -> None:
        """One process of a node does it at a time; the others look again later, as that one may die meanwhile."""
        try:
            while await self._take_over_now():  # noqa: ASYNC110 - nobody tells when another process is dead
                await asyncio.sleep(self._options.look_again_s)
        except TierStoreError as error:
            log.warning("what other processes left is not carried on now, `tierstore sync` does it: %s", error.message)
        finally:
            self._looked.set()

    async def _take_over_now(self) -> bool:
        """Returns whether to look again later.

        The lock keeps the other processes of the node from copying the same once more, which would do no harm but take bandwidth. So it is
        not kept for a further tier that is down, nor for an authority that is down for longer than until the others look again.
        """
        lock = RunLock(lock_path(self._tiers, FILES_LOCK), FILES_LOCK)
        try:
            async with lock.hold():
                picture = await look_at_files(self._tiers)
                now = self._session.clock.now()
                taken = await take_over(picture.lacking(now=now), self._mover, now=now)
                self._looked.set()
                await tidy(picture, self._mover, self._session.clock)
                there = await self._mover.wait_for_all(taken.items, self._tiers.authority, self._options.look_again_s)
        except LockedError as error:
            log.debug("another process of this node carries on what was left: %s", error.message)
            self._looked.set()
            return True
        if not there:
            await self._mover.wait_for_all(taken.items, self._tiers.authority, None)
        if picture.complete:
            self._looker.restored()
        return taken.to_look_again

    async def _acknowledge(self, item: Item) -> None:
        if self._ack == "nearest":
            return
        tier = self._tiers.authority if self._ack == "authority" else self._tiers.durable_at
        await self._mover.wait_for(item, tier.name, self._options.patience_s)

    def _entry_of(self, data: bytes) -> FileEntry:
        block = self._session.config.io.block_nbytes
        blocks = block_digests(data, block)
        return FileEntry(
            nbytes=len(data),
            digest=file_digest(blocks),
            block_nbytes=block,
            blocks=blocks,
            owner=self._owner,
            created_at=utc_text(self._session.clock.now()),
        )


class _SpoolSource:
    """A spool's bytes, for who copies them."""

    def __init__(self, spool: Spool, nbytes: int) -> None:
        self._spool = spool
        self.nbytes = nbytes

    @staticmethod
    def of(spool: Spool, nbytes: int, tier: Tier) -> Source:
        """For a tier on a local file system as a file that can be taken in as it is: nobody writes into it any more."""
        source = _SpoolSource(spool, nbytes)
        local = isinstance(tier.storage, PosixStorage) and spool.path is not None
        return LocalSource(source, spool.path, hard=True) if local and spool.path is not None else source

    async def read(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(await asyncio.to_thread(self._spool.read, offset, nbytes))
