"""Stores with very many checkpoints, made without saving any: what listing, planning and collecting are measured on.

Each checkpoint has true records and a true manifest, and one small shard whose bytes the manifest promises. It has no index: it can be
listed, planned about, evicted and deleted, and not be loaded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from tierstore.clock import utc_text
from tierstore.format.digest import block_digests, digest_of, file_digest
from tierstore.format.manifest import FileRecord, Manifest, encode_manifest
from tierstore.format.record import Record, encode_record
from tierstore.names import MANIFEST, Attempt, new_save_id, shard_name
from tierstore.storage.contract import Storage
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.together import together

__all__ = ["fabricate"]

_BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
_BLOCK_NBYTES = 1 << 20


def _some_loss(number: int) -> Mapping[str, float]:
    return {"val/loss": 4.0 - (number % 997) / 997}


async def fabricate(
    tiers: Tiers,
    run: str,
    count: int,
    *,
    every_steps: int = 100,
    every_s: float = 600.0,
    begin: datetime = _BEGIN,
    metrics: Callable[[int], Mapping[str, float]] = _some_loss,
    tags: Callable[[int], Sequence[str]] = lambda number: (),
    shard_nbytes: int = 64,
    n_files: int = 1,
) -> list[Attempt]:
    """Writes `count` committed checkpoints, complete on every tier that is shared; four files a tier and checkpoint, with `n_files` 1.

    Args:
        tiers: The store's tiers; those of scope ``node`` get nothing. Folders are written directly, other storages by `Storage.put`.
        run: The run.
        count: How many; the first at step `every_steps`.
        every_steps: Steps between them.
        every_s: Seconds between them.
        begin: When the first was saved.
        metrics: Of the n-th, from 0.
        tags: Of the n-th, from 0.
        shard_nbytes: Bytes of each shard.
        n_files: Shards of each checkpoint.

    Returns:
        The attempts, oldest first.
    """
    shard = bytes(range(256)) * (shard_nbytes // 256) + bytes(range(shard_nbytes % 256))
    digest = file_digest(block_digests(shard, _BLOCK_NBYTES))
    shared = [tier for tier in tiers if tier.scope == "shared"]
    files = tuple(FileRecord(name=shard_name(rank, n_files), nbytes=shard_nbytes, digest=digest, kind="shard") for rank in range(n_files))
    attempts = []
    batch: list[tuple[Tier, dict[str, bytes]]] = []
    for number in range(count):
        at = begin + timedelta(seconds=every_s * number)
        attempt = Attempt(run=run, step=every_steps * (number + 1), save_id=new_save_id(at))
        manifest = Manifest(
            store_id=tiers.store_id,
            run=run,
            step=attempt.step,
            save_id=attempt.save_id,
            world_size=n_files,
            block_nbytes=_BLOCK_NBYTES,
            created_at=at,
            files=files,
            tensors=n_files,
            extents=n_files,
            nbytes=shard_nbytes * n_files,
            metrics=metrics(number),
            tags=tuple(tags(number)),
        )
        data = encode_manifest(manifest)
        payload = {attempt.path(MANIFEST): data, **{attempt.path(f.name): shard for f in files}}
        log = _records(attempt, manifest, data, at, [t.name for t in shared if not tiers.is_authority(t)], payload)
        for tier in shared:
            records = log if tiers.is_authority(tier) else dict(list(log.items())[:1])
            batch.append((tier, {**payload, **records}))
        attempts.append(attempt)
        if len(batch) >= 256:
            await together(_write, batch)
            batch.clear()
    await together(_write, batch)
    return attempts


def _records(
    attempt: Attempt, manifest: Manifest, data: bytes, at: datetime, copies: Sequence[str], payload: Mapping[str, bytes]
) -> dict[str, bytes]:
    facts = {
        "manifest": digest_of(data),
        "manifest_nbytes": len(data),
        "nbytes": manifest.nbytes + len(data),
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
        "tags": list(manifest.tags),
        "final": manifest.final,
        "created_at": utc_text(at),
    }
    copied = {path.rpartition("/")[2]: {"nbytes": len(held), "etag": "", "checksum": ""} for path, held in payload.items()}
    said: list[tuple[str, dict[str, Any]]] = [("committed", facts), *(("replicated", {"tier": t, "files": copied}) for t in copies)]
    return {
        attempt.record_path(seq): encode_record(Record(seq=seq, kind=kind, at=at, nonce=f"{seq:032x}", actor="fabricated:1", data=told))
        for seq, (kind, told) in enumerate(said)
    }


async def _write(item: tuple[Tier, Mapping[str, bytes]]) -> None:
    tier, files = item
    local = {path: tier.storage.local_path(path) for path in files}
    if all(local.values()):
        await asyncio.to_thread(_write_folder, {str(local[path]): data for path, data in files.items()})
    else:
        await _put(tier.storage, files)


async def _put(storage: Storage, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        await storage.put(path, data)


def _write_folder(files: Mapping[str, bytes]) -> None:
    made: set[str] = set()
    for full, data in files.items():
        folder = full.rpartition("/")[0]
        if folder not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        with open(full, "wb") as file:
            file.write(data)
