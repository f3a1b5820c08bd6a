"""One attempt, one tier: the next steps that bring the attempt onto that tier, computed from what the tiers hold.

`advance` is all there is to promotion: the trainer's worker calls it for its own saves, the reconciler for everything that it
finds, and each can stop at any instant and be continued by the other, for every step is found again by looking:

- a staging tier (before the authority) wants the part of each rank that a nearer tier has a receipt for, and, once the attempt is
  committed, the documents (objects, index, manifest, log) that make its replica complete in itself;
- the authority wants every rank's part, and then the commit;
- a tier after it wants the whole committed checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.crashpoints import reach
from tierstore.errors import IntegrityError, RefusedError, StorageError
from tierstore.format.index import FileEntry, Index, decode_index
from tierstore.format.manifest import FileRecord, Manifest, decode_manifest
from tierstore.format.part import Part, decode_part
from tierstore.format.record import Record
from tierstore.names import MANIFEST, Attempt, part_name
from tierstore.storage.contract import FileInfo
from tierstore.tiers.commit import commit
from tierstore.tiers.copying import CopyContext, OnDamage, Proof, check_space, copy_document, copy_file, read_document
from tierstore.tiers.log import append
from tierstore.tiers.tier import Tier
from tierstore.tiers.view import AttemptView, further, observe, read_state, staging

__all__ = ["Outcome", "advance", "manifest_proof", "read_manifest"]

_RANK = re.compile(r"(?:shard|part)-(\d{5})")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where an attempt stands with regard to one tier."""

    view: AttemptView
    done: bool
    """Nothing is left to do for this tier (it has its copy, or is not to have one)."""
    waiting: str = ""
    """What has to happen first, elsewhere."""


async def advance(
    context: CopyContext, attempt: Attempt, tier: Tier, *, act: bool = True, world_size: int | None = None, give_up: bool = False
) -> Outcome:
    """Brings `attempt` onto `tier` as far as it can go now; idempotent, and safe beside others that do the same.

    Args:
        context: Tiers and limits.
        attempt: What to advance.
        tier: Where to.
        act: False only looks (another process has the lock).
        world_size: How many ranks save together, where the caller knows.
        give_up: On the authority: condemn the attempt if parts are still missing.

    Raises:
        StorageError: A tier failed; nothing half-done is visible, and the same call continues.
        IntegrityError: No good copy of a file is left anywhere.
        CondemnedError: `give_up`, and ranks are missing.
    """
    view = await observe(context.tiers, attempt, world_size=world_size)
    if view.log.condemned or view.log.hidden:
        return Outcome(view=view, done=True)
    if context.tiers.is_authority(tier):
        return await _to_authority(context, view, act=act, give_up=give_up)
    if tier.name in view.log.evicted:
        return Outcome(view=view, done=True)
    if tier.name in [t.name for t in further(context.tiers)]:
        return await _to_further(context, view, tier, act=act)
    return await _to_staging(context, view, tier, act=act)


# ---- towards the commit: parts


async def _to_staging(context: CopyContext, view: AttemptView, tier: Tier, *, act: bool) -> Outcome:
    nodes = staging(context.tiers)
    names = [t.name for t in nodes]
    nearer = nodes[: names.index(tier.name)]
    wanted = sorted({rank for t in nearer for rank in view.ranks(t.name)} - view.ranks(tier.name))
    if wanted and not act:
        return Outcome(view=view, done=False, waiting="another process is copying")
    for rank in wanted:
        await _carry(context, view, rank, tier)
    if wanted:
        view = await observe(context.tiers, view.attempt, world_size=view.world_size)
    if not view.ranks(tier.name):
        return Outcome(view=view, done=view.log.committed)  # this node has no part in it
    if not view.log.committed:
        return Outcome(view=view, done=False, waiting="the commit")
    if tier.name not in view.documented:
        if not act:
            return Outcome(view=view, done=False, waiting="another process is copying")
        await _document(context, view, tier)
    return Outcome(view=view, done=True)


async def _to_authority(context: CopyContext, view: AttemptView, *, act: bool, give_up: bool) -> Outcome:
    if view.log.committed:
        return Outcome(view=view, done=True)
    authority = context.tiers.authority
    if not act:
        return Outcome(view=view, done=False, waiting="another process is copying")
    held = {rank for ranks in view.receipts.values() for rank in ranks}
    carried = sorted(held - view.parts)
    for rank in carried:
        await _carry(context, view, rank, authority)
    if carried:
        view = await observe(context.tiers, view.attempt, world_size=view.world_size)
    size = view.world_size
    if size is None and view.parts:
        size = (await _part_on_authority(context, view.attempt, min(view.parts))).world_size
    missing = [rank for rank in range(size or 0) if rank not in view.parts]
    if size is None or (missing and not give_up):
        waiting = f"the parts of ranks {_some(missing)}" if missing else "any rank's part"
        return Outcome(view=view, done=False, waiting=waiting)
    await commit(context.tiers, view.attempt, deadline_s=0.0, clock=context.clock)
    return Outcome(view=await observe(context.tiers, view.attempt, world_size=size), done=True)


async def _carry(context: CopyContext, view: AttemptView, rank: int, target: Tier) -> None:
    """Copies one rank's part of an attempt: its files, then its part record, then (on a staging tier) its receipt."""
    attempt = view.attempt
    sources = [t for t in staging(context.tiers) if rank in view.receipts.get(t.name, {}) and t.name != target.name]
    receipt = view.receipts[sources[0].name][rank]
    data = await read_document(attempt, sources, part_name(rank), Proof(digest=receipt.part_digest), _warn_only, wanted_by=target)
    part = decode_part(data)
    _check_part(part, attempt, rank)
    files = part.index.files()
    await check_space(target, sum(f.nbytes for f in files) + len(data))
    for file in files:
        await copy_file(context, attempt, target, sources, file, part.index.block_nbytes, _warn_only)
    await target.storage.put(attempt.path(part_name(rank)), data)
    if not context.tiers.is_authority(target):
        reach("persist.before-receipt")
        await target.storage.put(attempt.receipt_path(rank), await sources[0].storage.read(attempt.receipt_path(rank)))
        reach("persist.after-receipt")


async def _part_on_authority(context: CopyContext, attempt: Attempt, rank: int) -> Part:
    part = decode_part(await context.tiers.authority.storage.read(attempt.path(part_name(rank))))
    _check_part(part, attempt, rank)
    return part


def _check_part(part: Part, attempt: Attempt, rank: int) -> None:
    """A part record that belongs to another attempt (a stale result, a file put in the wrong place) is never used."""
    if (part.run, part.step, part.save_id, part.rank) != (attempt.run, attempt.step, attempt.save_id, rank):
        raise RefusedError(
            f"the part record of rank {rank} in {attempt.folder} belongs to step {part.step}, save id {part.save_id}, rank {part.rank}",
            hint="it was put there by hand or by another tool: run `tierstore verify`",
            run=attempt.run,
            step=attempt.step,
        )


# ---- after the commit: documents and whole checkpoints


async def _document(context: CopyContext, view: AttemptView, tier: Tier) -> None:
    """Makes a staging tier's replica complete in itself: objects, index, manifest, then the log's records."""
    manifest = await read_manifest(view, _sources(context, view, tier, MANIFEST))
    await copy_documents(context, view, tier, manifest, kinds=("objects", "index"))
    await _manifest_and_log(context, view, tier)


async def _to_further(context: CopyContext, view: AttemptView, tier: Tier, *, act: bool) -> Outcome:
    if not view.log.committed:
        return Outcome(view=view, done=False, waiting="the commit")
    if tier.name in view.log.replicated:
        return Outcome(view=view, done=True)
    if not act:
        return Outcome(view=view, done=False, waiting="another process is copying")
    await _promote(context, view, tier)
    return Outcome(view=await observe(context.tiers, view.attempt, world_size=view.world_size), done=True)


async def _promote(context: CopyContext, view: AttemptView, target: Tier) -> None:
    """Copies a committed checkpoint as a whole (PROTOCOLS.md §5): data, documents, manifest, log; only `replicated` makes it count."""
    attempt = view.attempt
    manifest = await read_manifest(view, _sources(context, view, target, MANIFEST))
    index = await _read_index(context, view, target, manifest)
    shards = [index.file(f.name) for f in manifest.files if f.kind == "shard"]
    listing = await target.storage.children(attempt.folder)
    there = {f.path.rpartition("/")[2]: f.nbytes for f in listing.files}
    await check_space(target, sum(f.nbytes for f in manifest.files if there.get(f.name) != f.nbytes))
    on_damage = _quarantining(context, view)

    async def shard(file: FileEntry) -> tuple[str, FileInfo]:
        sources = _sources(context, view, target, file.name)
        return file.name, await copy_file(context, attempt, target, sources, file, manifest.block_nbytes, on_damage)

    copied = dict(await _together([shard(file) for file in shards]))
    copied.update(await copy_documents(context, view, target, manifest, kinds=("part", "objects", "index")))
    for file in manifest.files:
        if copied[file.name].nbytes != file.nbytes:
            raise IntegrityError(
                f"{attempt.path(file.name)} on tier {target.name!r} has {copied[file.name].nbytes} bytes after the copy, not {file.nbytes}",
                hint="the storage lost bytes: probe it with `tierstore doctor --probe`",
                tier=target.name,
                file=file.name,
            )
    copied[MANIFEST] = await _manifest_and_log(context, view, target)
    facts = {name: {"nbytes": info.nbytes, "etag": info.etag, "checksum": info.checksum} for name, info in sorted(copied.items())}
    reach("promote.before-replicated")
    try:
        await append(
            context.tiers.authority.storage,
            attempt,
            "replicated",
            {"tier": target.name, "files": facts},
            clock=context.clock,
            allow=lambda records: _still_wanted(records, target),
        )
    except RefusedError:  # another process recorded the same copy first, or the checkpoint has expired meanwhile
        log.info("tier=%s checkpoint=%s is recorded, or no longer wanted", target.name, attempt.folder)
    reach("promote.after-replicated")


def _still_wanted(records: Sequence[Record], target: Tier) -> bool:
    state = read_state(tuple(records))
    return not state.hidden and target.name not in state.replicated


async def copy_documents(
    context: CopyContext, view: AttemptView, target: Tier, manifest: Manifest, *, kinds: Sequence[str]
) -> dict[str, FileInfo]:
    """Copies the small files of the given kinds, those of the first kind first."""
    on_damage = _quarantining(context, view)

    async def document(file: FileRecord) -> tuple[str, FileInfo]:
        proof = Proof(digest=file.digest, block_nbytes=manifest.block_nbytes)
        sources = _sources(context, view, target, file.name)
        return file.name, await copy_document(context, view.attempt, target, sources, file.name, proof, on_damage)

    copied: dict[str, FileInfo] = {}
    for kind in kinds:
        copied.update(await _together([document(f) for f in manifest.files if f.kind == kind]))
    return copied


async def _manifest_and_log(context: CopyContext, view: AttemptView, target: Tier) -> FileInfo:
    """The manifest after everything that it names, then the log's records, the commit record last: it makes a replica readable."""
    attempt = view.attempt
    reach("promote.before-manifest")
    sources = _sources(context, view, target, MANIFEST)
    info = await copy_document(context, attempt, target, sources, MANIFEST, manifest_proof(view), _quarantining(context, view))
    reach("promote.before-record")
    for record in reversed(view.records):
        path = attempt.record_path(record.seq)
        await target.storage.put(path, await context.tiers.authority.storage.read(path))
    reach("promote.after-record")
    return info


def manifest_proof(view: AttemptView) -> Proof:
    """What the commit record says of the manifest."""
    assert view.log.fate is not None
    return Proof(digest=str(view.log.fate.data["manifest_digest"]))


async def read_manifest(view: AttemptView, sources: Sequence[Tier]) -> Manifest:
    """The committed manifest, proved against the commit record.

    Raises:
        IntegrityError: No source has it, or it is about another attempt.
    """
    attempt = view.attempt
    manifest = decode_manifest(await read_document(attempt, sources, MANIFEST, manifest_proof(view), _warn_only))
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
    sources = _sources(context, view, target, record.name)
    data = await read_document(view.attempt, sources, record.name, proof, _quarantining(context, view), wanted_by=target)
    index, _ = await asyncio.to_thread(decode_index, data)
    return index


def _sources(context: CopyContext, view: AttemptView, target: Tier, name: str) -> list[Tier]:
    """The tiers to read a committed file from, nearest first, those whose copy was found damaged last.

    A node's tier holds the files of its own ranks only.
    """
    found = _RANK.match(name)
    holding = []
    for tier in staging(context.tiers):
        ranks = view.ranks(tier.name)
        if (found and int(found[1]) in ranks) or (not found and tier.name in view.documented):
            holding.append(tier)
    holding.append(context.tiers.authority)
    holding += [t for t in further(context.tiers) if t.name in view.log.replicated]
    usable = [t for t in holding if t.name != target.name]
    return sorted(usable, key=lambda t: (t.name, name) in view.log.quarantined)


def _quarantining(context: CopyContext, view: AttemptView) -> OnDamage:
    """Records a damaged copy in the log, once, so that readers and later copies go elsewhere first. Nothing is deleted."""

    async def on_damage(tier: Tier, file: str, detail: str) -> None:
        if (tier.name, file) in view.log.quarantined:
            return
        try:
            await append(
                context.tiers.authority.storage,
                view.attempt,
                "quarantined",
                {"tier": tier.name, "file": file, "detail": detail},
                clock=context.clock,
                allow=lambda records: (tier.name, file) not in read_state(tuple(records)).quarantined,
            )
        except RefusedError:
            return  # another process was first
        except StorageError as error:  # the copy itself does not depend on this record
            log.warning("checkpoint=%s tier=%s file=%s the damage can't be recorded: %s", view.attempt.folder, tier.name, file, error.message)

    return on_damage


async def _warn_only(tier: Tier, file: str, detail: str) -> None:
    """Before the commit there is no log to record damage in; `copying` has warned, and the part is taken from another tier."""


async def _together(work: Sequence[Coroutine[Any, Any, tuple[str, FileInfo]]]) -> list[tuple[str, FileInfo]]:
    """Runs all of `work`; on the first failure, or when cancelled, the others are ended and awaited: nothing goes on behind our back."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(r) for r in ranks[:8])
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
