"""Index and objects made anew from the ranks' part records, where no tier has a good copy of them left.

A commit makes both from the parts alone, and the same bytes whoever makes them (`tiers.commit`), so that the manifest's digests say whether
it came out right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tierstore.errors import TierStoreError
from tierstore.format.index import encode_index, merge_indexes
from tierstore.format.manifest import FileRecord, Manifest
from tierstore.format.objects import merge_objects
from tierstore.format.part import Part, decode_part
from tierstore.names import Attempt
from tierstore.tiers.copying import Proof
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together

__all__ = ["remade_documents"]

log = logging.getLogger(__name__)


async def remade_documents(attempt: Attempt, manifest: Manifest, tiers: Sequence[Tier]) -> dict[str, bytes]:
    """File name → bytes, of the index and the objects: those that are as the manifest promises. Empty where a part is good nowhere."""

    async def part(file: FileRecord) -> Part | None:
        proof = Proof(digest=file.digest, block_nbytes=manifest.block_nbytes)
        for tier in tiers:
            try:
                data = await tier.storage.read(attempt.path(file.name))
                if await asyncio.to_thread(proof.digest_of, data) == file.digest:
                    return await asyncio.to_thread(decode_part, data)
            except TierStoreError as error:
                log.debug("tier=%s file=%s no part from here: %s", tier.name, file.name, error.message)
        return None

    found = await together(part, [f for f in manifest.files if f.kind == "part"])
    parts = [p for p in found if p is not None]
    if not parts or len(parts) < len(found):
        return {}
    try:
        made = await asyncio.to_thread(_merge, attempt, sorted(parts, key=lambda p: p.rank))
    except TierStoreError as error:
        log.debug("checkpoint=%s its parts do not make a whole: %s", attempt.folder, error.message)
        return {}
    good = {}
    for file in manifest.files:
        if file.kind in made and Proof(digest=file.digest, block_nbytes=manifest.block_nbytes).digest_of(made[file.kind]) == file.digest:
            good[file.name] = made[file.kind]
    return good


def _merge(attempt: Attempt, parts: Sequence[Part]) -> dict[str, bytes]:
    """By kind."""
    merged = merge_indexes([p.index for p in parts], labels=[f"rank {p.rank}" for p in parts])
    facts = {"run": attempt.run, "step": attempt.step, "save_id": attempt.save_id}
    return {"index": encode_index(merged, facts), "objects": merge_objects({p.rank: p.objects for p in parts})}
