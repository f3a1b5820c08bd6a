"""Copying what is committed: a whole checkpoint to a further tier, and the documents that make a staging replica complete."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.crashpoints import reach
from tierstore.errors import ConflictError, IntegrityError, NotFoundError, RefusedError, StorageError
from tierstore.format.index import FileEntry, Index, decode_index
from tierstore.format.manifest import FileRecord, Manifest, decode_manifest
from tierstore.format.record import Record
from tierstore.names import MANIFEST, Attempt
from tierstore.storage.contract import FileInfo, KeepsForms, Storage, WritesPacked
from tierstore.storage.packed import PACKED_MARKER, PackedStorage
from tierstore.storage.tasks import all_or_none
from tierstore.tiers.copying import CopyContext, OnDamage, Proof, copy_document, copy_file, read_document
from tierstore.tiers.log import append, files_told, taken_told
from tierstore.tiers.log_copies import copy_beside, copy_records
from tierstore.tiers.log_facts import fold
from tierstore.tiers.quantised import are_lossy_now, look_at_shards, lossy_files, put_document, quantising
from tierstore.tiers.quarantine import quarantine
from tierstore.tiers.references import exact_where_referred
from tierstore.tiers.space_estimate import check_room
from tierstore.tiers.tier import Tier
from tierstore.tiers.view import AttemptView, further, staging

__all__ = [
    "Copied",
    "copy_checkpoint",
    "copy_payload",
    "document_replica",
    "manifest_proof",
    "quarantining",
    "read_manifest",
    "record_replica",
    "sources_of",
    "warn_only",
]

log = logging.getLogger(__name__)

_TRIES = 3
_RANK = re.compile(r"(?:shard|part)-(\d{5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A checkpoint's files on a tier: what that says of each, and what the record is to say of a copy that is not exact (None: it is)."""

    files: Mapping[str, FileInfo]
    quantised: Mapping[str, Any] | None = None


async def document_replica(context: CopyContext, view: AttemptView, tier: Tier) -> None:
    """Makes a staging tier's replica complete in itself: objects, index, manifest, then the log's records."""
    manifest = await read_manifest(view, sources_of(context, view, tier, MANIFEST))
    await _copy_documents(context, view, tier, manifest, kinds=("objects", "index"))
    await _copy_manifest(context, view, tier)
    await _copy_log(context, view, tier)


async def copy_checkpoint(context: CopyContext, view: AttemptView, target: Tier, *, exact: bool = False) -> None:
    """Copies a committed checkpoint as a whole (PROTOCOLS.md §5): payload, manifest, log; only `replicated` makes it count.

    `exact`: also where the tier quantises, and in the place of a quantised copy.

    Raises:
        ConflictError: Somebody with another configuration of the tier writes there at the same time, again and again.
    """
    for _ in range(_TRIES):
        copied = await copy_payload(context, view, target, exact=exact, refer=True)
        await _copy_log(context, view, target)
        reach("promote.before-replicated")
        recorded = await record_replica(context, view, target, copied)
        reach("promote.after-replicated")
        if recorded:
            return
        exact = True  # what is exact is right whatever the log says
    raise ConflictError(
        f"step {view.attempt.step} of run {view.attempt.run!r}: its files on tier {target.name!r} are being replaced by another process",
        hint="two processes have different `quantise` for this tier: give them one configuration",
        run=view.attempt.run,
        step=view.attempt.step,
        tier=target.name,
    )


async def copy_payload(
    context: CopyContext, view: AttemptView, target: Tier, *, exact: bool = False, refer: bool = False, anew: Collection[str] = ()
) -> Copied:
    """Copies all files of a committed checkpoint, the manifest last; returns what the target says of each.

    A shard that is there already is left as it is, also an exact one where the tier quantises by now; one that is not exact is written
    anew where the copy is to be. Whether a copy is exact is asked of the files that are there in the end.

    `refer`: as for `copy_file`. `anew`: shards that are written though they are there.

    Raises:
        TierFullError: No room; nothing was copied.
        IntegrityError: No good copy of a file is left, or the target lost bytes.
    """
    attempt = view.attempt
    manifest = await read_manifest(view, sources_of(context, view, target, MANIFEST))
    index = await _read_index(context, view, target, manifest)
    shards = [index.file(f.name) for f in manifest.files if f.kind == "shard"]
    if target.unchanged_once:
        context.references.learned(attempt, shards, manifest.block_nbytes, whole=True)
    listing = await target.storage.children(attempt.folder)
    there = {f.path.rpartition("/")[2]: f.nbytes for f in listing.files}
    wanted = quantising(target, manifest.facts, exact=exact)
    missing = {f.name for f in manifest.files if there.get(f.name) != f.nbytes}
    promise = await check_room(
        context,
        attempt,
        target,
        [file for file in shards if file.name in missing],
        manifest.block_nbytes,
        besides=sum(f.nbytes for f in manifest.files if f.kind != "shard" and f.name in missing),
        lossy=bool(wanted.scheme),
        refer=refer,
    )
    on_damage = quarantining(context, view)
    if wanted.why_exact:
        log.info("tier=%s checkpoint=%s is stored exact: %s", target.name, attempt.folder, wanted.why_exact)
    found = await look_at_shards(target, attempt, [file.name for file in shards if file.name in there])
    again = {*anew, *found.damaged, *(() if wanted.scheme else found.lossy)}

    hints = exact_where_referred(view.log, target.name, wanted.hints)

    async def shard(file: FileEntry) -> tuple[str, FileInfo]:
        sources = sources_of(context, view, target, file.name)
        if not sources and (left := set(view.log.quantised) - {target.name}):
            raise _only_quantised(view, file.name, target, sorted(left))
        absent = file.name not in there or file.name in again
        return file.name, await copy_file(
            context, attempt, target, sources, file, manifest.block_nbytes, on_damage, absent=absent, hints=hints, refer=refer
        )

    copied = dict(await all_or_none([shard(file) for file in shards]))
    if missing or isinstance(target.storage, KeepsForms):
        copied.update(await _keep_one_form(target.storage, attempt, shards, shard))
    quantised = None
    if wanted.scheme or again:
        lossy = await lossy_files(target, attempt, [file.name for file in shards])
        if lossy:
            reach("quantise.before-document")
            quantised = await put_document(target, attempt, lossy, scheme=wanted.scheme, generation=wanted.generation)
            reach("quantise.after-document")
    if quantised is None and isinstance(target.storage, WritesPacked) and (wanted.why_exact or there):
        await target.storage.delete([attempt.quantised_path])  # an earlier try may have left it
    copied.update(await _copy_documents(context, view, target, manifest, kinds=("part", "objects", "index")))
    for file in manifest.files:
        if copied[file.name].nbytes != file.nbytes:
            raise IntegrityError(
                f"{attempt.path(file.name)} on tier {target.name!r} has {copied[file.name].nbytes} bytes after the copy, not {file.nbytes}",
                hint="the storage lost bytes: probe it with `tierstore doctor --probe`",
                tier=target.name,
                file=file.name,
            )
    copied[MANIFEST] = await _copy_manifest(context, view, target)
    target.account.written(promise, sum(info.taken_nbytes for name, info in copied.items() if name in missing))
    return Copied(files=copied, quantised=quantised)


async def _keep_one_form(
    storage: Storage,
    attempt: Attempt,
    shards: Sequence[FileEntry],
    copy: Callable[[FileEntry], Awaitable[tuple[str, FileInfo]]],
) -> dict[str, FileInfo]:
    """Another process, with another codec, may have copied the same shards at the same time: one form of each stays.

    What is told of those of which one was removed, which are written anew should none be left.
    """
    if not isinstance(storage, KeepsForms):  # opened before anybody packed there
        try:
            await storage.stat(PACKED_MARKER)
        except NotFoundError:
            return {}
        storage = PackedStorage(storage, None)
    files, told = {attempt.path(file.name): file for file in shards}, dict[str, FileInfo]()
    for _ in range(_TRIES):
        changed = [files[path] for path in await storage.keep_one(attempt.folder) if path in files]
        if not changed:
            break
        log.info("checkpoint=%s shards=%d lay there in two forms, of which one was removed", attempt.folder, len(changed))
        for file in changed:
            try:
                told[file.name] = await storage.stat(attempt.path(file.name))
            except NotFoundError:
                told.update([await copy(file)])
    return told


async def record_replica(context: CopyContext, view: AttemptView, target: Tier, copied: Copied) -> bool:
    """Appends `replicated`, with what the target's server says of each file.

    False: the bytes there are not what the log says, or would say; they are to be written anew, exact.

    Another process may have copied the same checkpoint to the tier at the same time, and with another `quantise`: then each has
    written over the other's shards. Whoever comes second to the log finds the other's record, and looks at what lies there now.

    The record of a quantised copy goes beside it at once: where the log is lost, it proves what is left.
    """
    told = {"tier": target.name, **files_told(copied.files), **taken_told(copied.files)}
    if copied.quantised is not None:
        told["quantised"] = copied.quantised
    exact = copied.quantised is None
    looked, other = False, False
    before: Sequence[Record] = ()

    def allow(records: Sequence[Record]) -> bool:
        nonlocal other, before
        before = records
        wanted, quantised = _still_wanted(records, target, since=len(view.records), exact=exact), fold(records).quantised
        replicated = target.name in fold(records).replicated
        other = (target.name in quantised) if exact else (replicated and target.name not in quantised)
        return wanted and (looked or not other)

    while True:
        try:
            record = await append(context.tiers.authority.storage, view.attempt, "replicated", told, clock=context.clock, allow=allow)
            break
        except RefusedError:  # another process recorded a copy first, or the checkpoint has expired meanwhile
            if other and not looked:
                if await are_lossy_now(target, view.attempt):
                    return False
                looked = True
                if exact:
                    continue
                await target.storage.delete([view.attempt.quantised_path])
            log.info("tier=%s checkpoint=%s is recorded, or no longer wanted", target.name, view.attempt.folder)
            return True
    if looked:
        await target.storage.delete([view.attempt.quantised_path])
    if not exact:
        known = {each.seq for each in view.records}  # these lie there already
        fresh = [each for each in before if each.seq not in known]
        await copy_beside(context.tiers.authority, target, view.attempt, [*fresh, record])
    return True


def _still_wanted(records: Sequence[Record], target: Tier, since: int, *, exact: bool) -> bool:
    """Not where the tier's copy was dropped since the copying began: some of the files that it found there are gone."""
    state = fold(records)
    dropped = any(r.kind in ("evicting", "evicted") and r.data.get("tier") == target.name for r in records[since:])
    there = target.name in state.replicated and not (exact and target.name in state.quantised)
    return not (state.hidden or dropped or there)


def _only_quantised(view: AttemptView, name: str, target: Tier, left: Sequence[str]) -> IntegrityError:
    """The error where nothing but quantised copies is left: nothing is ever copied from one."""
    return IntegrityError(
        f"there is no exact copy of {view.attempt.path(name)} for tier {target.name!r}: only a quantised one, on {', '.join(left)}",
        hint="it can be loaded, with a warning; save what was loaded as a new checkpoint",
        run=view.attempt.run,
        step=view.attempt.step,
        file=name,
    )


async def _copy_documents(
    context: CopyContext, view: AttemptView, target: Tier, manifest: Manifest, *, kinds: Sequence[str]
) -> dict[str, FileInfo]:
    """Copies the small files of the given kinds, those of the first kind first."""
    on_damage = quarantining(context, view)

    async def document(file: FileRecord) -> tuple[str, FileInfo]:
        proof = Proof(digest=file.digest, block_nbytes=manifest.block_nbytes)
        sources = sources_of(context, view, target, file.name)
        return file.name, await copy_document(context, view.attempt, target, sources, file.name, proof, on_damage)

    copied: dict[str, FileInfo] = {}
    for kind in kinds:
        copied.update(await all_or_none([document(f) for f in manifest.files if f.kind == kind]))
    return copied


async def _copy_manifest(context: CopyContext, view: AttemptView, target: Tier) -> FileInfo:
    """The manifest, after everything that it names."""
    reach("promote.before-manifest")
    sources = sources_of(context, view, target, MANIFEST)
    return await copy_document(context, view.attempt, target, sources, MANIFEST, manifest_proof(view), quarantining(context, view))


async def _copy_log(context: CopyContext, view: AttemptView, target: Tier) -> None:
    """The copies of the log's records, after everything else."""
    reach("promote.before-record")
    await copy_records(context.tiers.authority, target, view.attempt, view.records)
    reach("promote.after-record")


def manifest_proof(view: AttemptView) -> Proof:
    """What the commit record says of the manifest."""
    assert view.log.fate is not None
    return Proof(digest=str(view.log.fate.data["manifest"]))


async def read_manifest(view: AttemptView, sources: Sequence[Tier]) -> Manifest:
    """The committed manifest, proved against the commit record.

    Raises:
        IntegrityError: No source has it, or it is about another attempt.
    """
    attempt = view.attempt
    manifest = decode_manifest(await read_document(attempt, sources, MANIFEST, manifest_proof(view), warn_only))
    if (manifest.run, manifest.step, manifest.save_id) != (attempt.run, attempt.step, attempt.save_id):
        raise IntegrityError(
            f"the manifest in {attempt.folder} is that of {manifest.run}@{manifest.step}, save id {manifest.save_id}",
            hint="the folder was renamed or mixed by hand: run `tierstore verify`",
            run=attempt.run,
            step=attempt.step,
        )
    return manifest


async def _read_index(context: CopyContext, view: AttemptView, target: Tier, manifest: Manifest) -> Index:
    record = next((f for f in manifest.files if f.kind == "index"), None)
    if record is None:
        raise IntegrityError(f"the manifest in {view.attempt.folder} names no index", hint="run `tierstore verify`", run=view.attempt.run)
    proof = Proof(digest=record.digest, block_nbytes=manifest.block_nbytes)
    sources = sources_of(context, view, target, record.name)
    data = await read_document(view.attempt, sources, record.name, proof, quarantining(context, view), wanted_by=target)
    index, _ = await asyncio.to_thread(decode_index, data)
    return index


def sources_of(context: CopyContext, view: AttemptView, target: Tier, name: str) -> list[Tier]:
    """The tiers to read a committed file from, nearest first, those whose copy was found damaged last.

    A node's tier holds the files of its own ranks only. A copy that was, or is being, dropped is no source, the authority's neither;
    nor is a quantised one, but for the small files.
    """
    found = _RANK.match(name)
    holding = []
    for tier in staging(context.tiers):
        ranks = view.ranks(tier.name)
        if tier.name in view.dropped:
            continue
        if (found and int(found[1]) in ranks) or (not found and tier.name in view.documented):
            holding.append(tier)
    if context.tiers.authority.name not in view.dropped:
        holding.append(context.tiers.authority)
    lossy = set(view.log.quantised) if name.startswith("shard-") else set()
    holding += [t for t in further(context.tiers) if t.name in view.log.replicated and t.name not in lossy]
    usable = [t for t in holding if t.name != target.name]
    return sorted(usable, key=lambda t: (t.name, name) in view.log.quarantined)


def quarantining(context: CopyContext, view: AttemptView) -> OnDamage:
    """Records a damaged copy in the log, once, so that readers and later copies go elsewhere first. Nothing is deleted."""

    async def on_damage(tier: Tier, file: str, detail: str) -> None:
        if (tier.name, file) in view.log.quarantined:
            return
        try:
            await quarantine(context.tiers, view.attempt, tier, {file: detail}, world_size=view.world_size or 1, clock=context.clock)
        except StorageError as error:  # the copy itself does not depend on this record
            log.warning("checkpoint=%s tier=%s file=%s damage not recorded: %s", view.attempt.folder, tier.name, file, error.message)

    return on_damage


async def warn_only(tier: Tier, file: str, detail: str) -> None:
    """An `OnDamage` that records nothing: before the commit there is no log. `copying` has warned, and another tier is asked."""
