"""A store's committed checkpoints as read-only folders, ``RUN/step-N/<file>``: the manifest and the files that it names, each proved."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict

from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError, UsageError
from tierstore.format.digest import digest_of
from tierstore.format.manifest import Manifest, decode_manifest
from tierstore.fs.nodes import CheckpointFile, Node, ReadOnlyError, folder_node
from tierstore.names import MANIFEST, check_run, log_root
from tierstore.tiers.catalog import scan
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.replica import Replica, Want
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tier, recheck
from tierstore.tiers.together import together

__all__ = ["Checkpoints"]

_STEP = re.compile(r"step-(\d{1,15})")
_LOGS = log_root("")[1:]
_KEEP = 8
_MAX_DEPTH = 16


class Checkpoints:
    """The checkpoints of a session's store. Methods run on its event loop; paths have no slash at either end.

    What is kept between calls is immutable: manifests that were proved, and open checkpoints with their leases. Which checkpoints there are
    is asked each time.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cache = session.new_cache()
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._replicas: OrderedDict[str, Replica] = OrderedDict()
        self._opening = asyncio.Lock()

    async def look_up(self, path: str) -> Node | None:
        """The checkpoint's folder or file, or the folder that has runs below it, under `path`; None: nothing of that kind is there."""
        found = await self._checkpoint_of(path)
        if found is not None:
            info, file = found
            if not file:
                return folder_node(path)
            return next((node for node in await self._files(path[: -len(file) - 1], info) if node.path == path), None)
        return folder_node(path) if await self._has_runs(path) else None

    async def listed(self, folder: str) -> list[Node]:
        """What lies directly in `folder`: checkpoints of the run of that name, folders with runs below, or a checkpoint's files."""
        found = await self._checkpoint_of(folder)
        if found is not None:
            info, file = found
            return [] if file else await self._files(folder, info)
        if folder and not _is_run(folder):
            return []
        start = f"{folder}/" if folder else ""
        names = await self._names(folder)
        shown = {f"{start}step-{step}" for step in await self._steps(folder)} if folder and _LOGS in names else set()
        shown |= {f"{start}{name}" for name in names - {_LOGS} if await self._has_runs(f"{start}{name}")}
        return [folder_node(path) for path in sorted(shown)]

    async def below(self, folder: str) -> list[Node]:
        """All that lies below `folder`, at any depth."""
        found: list[Node] = []
        for node in await self.listed(folder):
            found.append(node)
            if node.is_folder:
                found.extend(await self.below(node.path))
        return found

    async def refuse_writes(self, *paths: str) -> None:
        """For who is about to write or remove `paths`.

        Raises:
            ReadOnlyError: One lies in a committed checkpoint, or is one.
        """
        for path in paths:
            found = await self._checkpoint_of(path)
            if found is not None:
                info, _ = found
                raise ReadOnlyError(
                    f"/{path} lies in the checkpoint {info.run}@{info.step}, which is not changed file by file",
                    hint="write elsewhere; checkpoints leave by `tierstore prune` (all copies) or `tierstore evict` (those of one tier)",
                    run=info.run,
                    step=info.step,
                )

    async def read(self, file: CheckpointFile, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes at `offset`, proved, from the nearest tier that has good ones; errors as `Replica.read`."""
        if not nbytes:
            return b""
        replica = await self._replica(file.info)
        shards = {record.name for record in replica.manifest.files if record.kind == "shard"}
        if file.name not in shards:
            return (await replica.document(file.name))[offset : offset + nbytes]
        buffer = bytearray(nbytes)
        await replica.read([Want(file=file.name, offset=offset, buffer=memoryview(buffer))])
        return bytes(buffer)

    def close(self) -> None:
        """Ends the leases."""
        for replica in self._replicas.values():
            replica.let_go()
        self._replicas.clear()

    # ---- inside

    async def _replica(self, info: CheckpointInfo) -> Replica:
        name = info.attempt.folder
        async with self._opening:
            replica = self._replicas.get(name)
            if replica is None:
                replica = self._replicas[name] = await self._session.leases.open(info, run=self._session.run)
                while len(self._replicas) > _KEEP:
                    self._replicas.popitem(last=False)[1].let_go()
            self._replicas.move_to_end(name)
            return replica

    async def _checkpoint_of(self, path: str) -> tuple[CheckpointInfo, str] | None:
        """The committed checkpoint that `path` is or lies in, and the rest of the path."""
        segments = path.split("/")
        for at in range(1, len(segments)):
            step = _STEP.fullmatch(segments[at])
            if step is None:
                continue
            run = "/".join(segments[:at])
            if not _is_run(run) or _LOGS not in await self._names(run):
                continue
            found = (await self._steps(run)).get(int(step[1]))
            if found is not None:
                return found, "/".join(segments[at + 1 :])
        return None

    async def _steps(self, run: str) -> dict[int, CheckpointInfo]:
        """The checkpoints of a run that are offered; it must have logs."""
        catalog = await scan(self._session.tiers, run, self._cache)
        return {info.step: info for info in catalog.checkpoints if not (info.hidden or info.superseded) and info.loadable}

    async def _files(self, folder: str, info: CheckpointInfo) -> list[Node]:
        manifest = await self._manifest(info)
        own = CheckpointFile(info=info, name=MANIFEST, digest=info.manifest_digest)
        nodes = [Node(path=f"{folder}/{MANIFEST}", nbytes=info.manifest_nbytes or 0, source=own)]
        for record in manifest.files:
            source = CheckpointFile(info=info, name=record.name, digest=record.digest)
            nodes.append(Node(path=f"{folder}/{record.name}", nbytes=record.nbytes, source=source))
        return sorted(nodes, key=lambda node: node.path)

    async def _manifest(self, info: CheckpointInfo) -> Manifest:
        name = info.attempt.folder
        known = self._manifests.get(name)
        if known is None:
            known = self._manifests[name] = await self._read_manifest(info)
            while len(self._manifests) > 64 * _KEEP:
                self._manifests.popitem(last=False)
        return known

    async def _read_manifest(self, info: CheckpointInfo) -> Manifest:
        """The manifest, proved by the commit record; no lease is taken for it."""
        reasons: list[str] = []
        for tier_name in info.complete_on:
            try:
                data = await self._session.tiers.get(tier_name).storage.read(info.attempt.path(MANIFEST), 0, info.manifest_nbytes)
                if digest_of(data) != info.manifest_digest:
                    raise IntegrityError("its SHA-256 is not the one in the commit record")
            except (StorageError, NotFoundError, IntegrityError) as error:
                reasons.append(f"tier={tier_name}: {error.message}")
                continue
            return await asyncio.to_thread(decode_manifest, data)
        return (await self._replica(info)).manifest  # tries all there is, and names what is wrong

    # ---- which runs there are

    async def _has_runs(self, folder: str, depth: int = 0) -> bool:
        """Whether `folder` is a run with checkpoints, or has one below it."""
        if not _is_run(folder) or depth > _MAX_DEPTH:
            return False
        names = await self._names(folder)
        if _LOGS in names and await self._steps(folder):
            return True
        for name in names - {_LOGS}:
            if await self._has_runs(f"{folder}/{name}", depth + 1):
                return True
        return False

    async def _names(self, folder: str) -> set[str]:
        """Names of folders directly in `folder` on any tier that is asked: that of its logs, if it is a run, and what may lead to runs."""
        found = {name.rpartition("/")[2] for names in await self._on_each(folder) for name in names}
        return {name for name in found if name == _LOGS or _is_run(name)}

    async def _on_each(self, folder: str) -> list[tuple[str, ...]]:
        """The folders in `folder` on the node's tiers and on the authority, of those that answer; where one does not, on all."""
        tiers = self._session.tiers

        async def one(tier: Tier) -> tuple[str, ...] | None:
            try:
                await recheck(tiers, tier)
                return (await tier.storage.children(folder)).folders
            except TierStoreError:
                return None

        near = [tier for tier in tiers if tier.scope == "node" or tiers.is_authority(tier)]
        found = await together(one, near)
        if any(names is None for names in found):
            found += await together(one, [tier for tier in tiers if tier not in near])
        return [names for names in found if names]


def _is_run(name: str) -> bool:
    try:
        check_run(name)
    except UsageError:
        return False
    return True
