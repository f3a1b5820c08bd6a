"""Unfinished multipart uploads: found again and gone on with after a restart, or swept when nobody does (PROTOCOLS.md §4)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tierstore.errors import AccessError, IntegrityError, NotFoundError, StorageError, TierFullError, TierStoreError
from tierstore.storage.contract import Source
from tierstore.storage.s3_checksums import Algorithm, Checksums, computable
from tierstore.storage.s3_client import S3Requests
from tierstore.storage.s3_upload import HeldPart, Upload, Uploaded
from tierstore.storage.tasks import to_the_end

__all__ = ["go_on", "stale_uploads"]

_log = logging.getLogger(__name__)
_ROUNDS = 4
"""How often an upload that was ended under our feet is begun again, before the failure is passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An upload of one key that was begun and neither completed nor aborted."""

    id: str
    initiated_at: datetime
    parts: Mapping[int, HeldPart]
    """By index from 0."""
    algorithm: str
    """Of its checksums, where the server says so: of the upload, or of a part of it; else empty."""

    def usable(self, nbytes: int, part_nbytes: int) -> int:
        """How many of its parts have the size that they must have."""
        return sum(part.nbytes == min(part_nbytes, nbytes - i * part_nbytes) for i, part in self.parts.items() if i * part_nbytes < nbytes)


async def go_on(requests: S3Requests, key: str, source: Source, part_nbytes: int, in_flight: int, checksums: Checksums) -> Uploaded:
    """Uploads `source` in parts, but for those that an unfinished upload of `key` holds already.

    For a key whose content can only ever be one. Each held part is compared with the source's bytes before it is trusted. A failure
    that may pass, and a cancellation, leave what was uploaded for the next call; any other failure aborts the upload.
    Another process may go on with the same upload, complete it or abort it at any time: all end with the whole object, or a typed error.
    """
    for left in range(_ROUNDS - 1, -1, -1):
        upload = Upload(requests, key, source, part_nbytes, checksums)
        adopted = await _adopt(upload, requests, key, source.nbytes, part_nbytes, checksums)
        if not adopted:
            await upload.begin()
        try:
            uploaded = await upload.run(in_flight)
        except TierStoreError as error:
            if error is upload.source_failure:
                if not _stays(error):
                    await to_the_end(upload.abort())
                raise
            if isinstance(error, NotFoundError) and error.context.get("code") != "NoSuchBucket":
                # The upload is gone: another process has completed it, or aborted it.
                if await upload.prove_there():
                    return Uploaded(etag="", algorithm=upload.algorithm, checksum=upload.checksum)
                if left:
                    _log.info("event=upload-gone key=%s reason=another process ended it: it is begun again", key)
                    continue
            if _stays(error):
                raise
            await to_the_end(upload.abort())
            if adopted and left and not isinstance(error, (IntegrityError, TierFullError)):
                # What another version began may have rules of its own (another checksum): our own is asked before giving up.
                _log.info("event=upload-refused key=%s reason=%s", key, error.message)
                continue
            raise
        except Exception:
            await to_the_end(upload.abort())
            raise
        if upload.reused:
            _log.info("event=upload-resumed key=%s parts_reused=%d", key, upload.reused)
        return uploaded
    raise AssertionError("the last round returns or raises")


def _stays(error: TierStoreError) -> bool:
    """Whether what was uploaded is left for the next call: the failure may pass, or somebody can make it pass."""
    return (error.retryable or isinstance(error, AccessError)) and not isinstance(error, TierFullError)


async def _adopt(upload: Upload, requests: S3Requests, key: str, nbytes: int, part_nbytes: int, checksums: Checksums) -> bool:
    """Chooses the unfinished upload of `key` with the most usable parts, ends those that are older than it; False: there is none.

    A server that can't tell is no obstacle: a new upload is begun.
    """
    found: list[Unfinished] = []
    try:
        async for listed, _ in _listed(requests, key):
            if listed["Key"] == key:
                unfinished = await _look(requests, key, listed)
                if unfinished is not None:
                    found.append(unfinished)
    except StorageError as error:
        if error.retryable:
            raise
        _log.info("event=uploads-not-listed key=%s reason=%s", key, error.message)
        return False
    chosen = max(found, key=lambda u: (u.usable(nbytes, part_nbytes), u.initiated_at), default=None)
    if chosen is None or not chosen.usable(nbytes, part_nbytes):
        return False  # an empty one may be another process's that has just begun: each completes its own, with the same bytes
    algorithm: Algorithm | None = checksums.large if checksums.sent else None
    if algorithm is not None and chosen.algorithm:
        algorithm = computable(chosen.algorithm)
        if algorithm is None:
            return False
    for other in found:
        if other.initiated_at < chosen.initiated_at:
            await _abort(requests, key, other.id)
    upload.adopt(chosen.id, algorithm, chosen.parts)
    return True


async def stale_uploads(requests: S3Requests, prefix: str, older_than_s: float) -> list[tuple[str, str]]:
    """(key, upload id) of each unfinished upload below `prefix` to which nothing was added for `older_than_s` seconds.

    By the server's clock: the upload began so long ago, and so did the newest of its parts arrive, for somebody may have gone on
    with an old one.
    """
    stale: list[tuple[str, str]] = []
    async for listed, now in _listed(requests, prefix):
        if (now - listed["Initiated"]).total_seconds() <= older_than_s:
            continue
        key, upload_id = str(listed["Key"]), str(listed["UploadId"])
        newest = await _newest_part(requests, key, upload_id)
        if newest is None or (now - newest).total_seconds() > older_than_s:
            stale.append((key, upload_id))
    return stale


async def _newest_part(requests: S3Requests, key: str, upload_id: str) -> datetime | None:
    try:
        times = [part["LastModified"] async for _, part in _parts(requests, key, upload_id) if part.get("LastModified")]
    except NotFoundError:
        return None
    return max(times, default=None)


async def _look(requests: S3Requests, key: str, listed: Mapping[str, Any]) -> Unfinished | None:
    """What the server holds of one upload; None where it has ended meanwhile."""
    parts: dict[int, HeldPart] = {}
    algorithm = str(listed.get("ChecksumAlgorithm") or "")
    try:
        async for page, part in _parts(requests, key, str(listed["UploadId"])):
            algorithm = algorithm or str(page.get("ChecksumAlgorithm") or "")
            told = {name: str(value) for name, value in part.items() if name.startswith("Checksum") and value}
            if told and not algorithm:
                algorithm = next(iter(told)).removeprefix("Checksum")
            parts[int(part["PartNumber"]) - 1] = HeldPart(nbytes=int(part["Size"]), etag=str(part["ETag"]), checksums=told)
    except NotFoundError:
        return None
    initiated = listed.get("Initiated") or datetime.fromtimestamp(0, timezone.utc)
    return Unfinished(id=str(listed["UploadId"]), initiated_at=initiated, parts=parts, algorithm=algorithm)


async def _abort(requests: S3Requests, key: str, upload_id: str) -> None:
    try:
        await requests.send("aborting the upload of", key, "abort_multipart_upload", Key=key, UploadId=upload_id)
    except NotFoundError:
        pass  # ended by its writer meanwhile
    except StorageError as error:
        _log.warning("event=abort-failed upload_id=%s reason=%s", upload_id, error.message)


async def _listed(requests: S3Requests, prefix: str) -> AsyncIterator[tuple[dict[str, Any], datetime]]:
    """Unfinished uploads of keys that begin with `prefix`, each with the server's time."""
    marker: dict[str, Any] = {}
    while True:
        page = await requests.send("listing uploads of", prefix, "list_multipart_uploads", Prefix=prefix, **marker)
        now = requests.server_time(page)
        for upload in page.get("Uploads") or ():
            if str(upload["Key"]).startswith(prefix):
                yield upload, now
        if not page.get("IsTruncated"):
            return
        marker = {"KeyMarker": str(page["NextKeyMarker"]), "UploadIdMarker": str(page["NextUploadIdMarker"])}


async def _parts(requests: S3Requests, key: str, upload_id: str) -> AsyncIterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The parts that the server holds of an upload, each with the page that told of it."""
    marker: dict[str, Any] = {}
    while True:
        page = await requests.send("listing parts of", key, "list_parts", Key=key, UploadId=upload_id, **marker)
        for part in page.get("Parts") or ():
            yield page, part
        if not page.get("IsTruncated"):
            return
        marker = {"PartNumberMarker": page["NextPartNumberMarker"]}
