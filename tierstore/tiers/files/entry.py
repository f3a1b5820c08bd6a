"""What a tier keeps of a file beside its bytes: the entry that publishes a version, the tombstone, the claim. Small sealed documents."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from datetime import datetime

from tierstore.clock import utc_text
from tierstore.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, block_count, file_digest
from tierstore.format.document import decode_document, encode_document
from tierstore.format.fields import Fields
from tierstore.names import save_id_time

__all__ = ["FileEntry", "FileVersion", "decode_entry", "encode_claim", "encode_entry", "encode_gone", "folder_entry", "owner_in"]

_ENTRY, _GONE, _CLAIM = "tierstore.file", "tierstore.file-gone", "tierstore.file-claim"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVersion:
    """A file as a look over the tiers found it, or a folder.

    Attributes:
        path: As people write it; empty for the root.
        version: Greater than of all versions of the path before it; 0 for a folder that exists only because something lies below it.
        save_id: The ULID of this version; empty where `version` is 0.
        nbytes: The length in bytes; 0 for a folder.
        is_folder: Whether it is a folder.
        tiers: The names of the tiers on which this version was seen, nearest first.
    """

    path: str
    version: int
    save_id: str
    nbytes: int
    is_folder: bool
    tiers: tuple[str, ...]

    @property
    def published_at(self) -> datetime | None:
        """When its writer published it, by the writer's clock; None for a folder that nobody made."""
        return save_id_time(self.save_id) if self.save_id else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """What proves a file's bytes.

    Attributes:
        nbytes: The length in bytes.
        digest: SHA-256 over the blocks' digests, ``sha256:<hex>``.
        block_nbytes: Bytes per block.
        blocks: The blocks' SHA-256, 32 bytes each, concatenated.
        owner: Which process wrote it, as `tierstore.storage.temporaries` names processes.
        created_at: When, by the writer's clock.
    """

    nbytes: int
    digest: str
    block_nbytes: int
    blocks: bytes
    owner: str = ""
    created_at: str = ""


def encode_entry(path: str, entry: FileEntry, *, is_folder: bool = False) -> bytes:
    """Writes an entry as a document."""
    body = {
        "path": path,
        "is_folder": is_folder,
        "nbytes": entry.nbytes,
        "digest": entry.digest,
        "block_nbytes": entry.block_nbytes,
        "blocks": base64.b64encode(entry.blocks).decode("ascii"),
        "owner": entry.owner,
        "created_at": entry.created_at,
    }
    return encode_document(_ENTRY, body, sealed=True)


def decode_entry(data: bytes, path: str, nbytes: int) -> FileEntry:
    """Reads the entry of `path`, whose name says that the file has `nbytes` bytes.

    Raises:
        FormatError: Malformed, foreign, or of another file.
        VersionError: Written by a newer major version.
    """
    fields = Fields(what=f"the entry of {path[:200]!r}", body=decode_document(data, _ENTRY))
    if fields.text("path") != path:
        raise fields.error("path", "names another file")
    if fields.integer("nbytes") != nbytes:
        raise fields.error("nbytes", f"is not {nbytes}, as the entry's name says")
    block_nbytes = fields.integer("block_nbytes", low=1, high=1 << 30)
    count = block_count(nbytes, block_nbytes)
    try:
        blocks = base64.b64decode(fields.text("blocks", max_chars=4 * (count * DIGEST_NBYTES // 3 + 1)), validate=True)
    except (binascii.Error, ValueError) as error:
        raise fields.error("blocks", f"is not base64: {error}") from error
    if len(blocks) != count * DIGEST_NBYTES or file_digest(blocks) != fields.digest("digest"):
        raise fields.error("blocks", "does not fit the file's length and digest")
    return FileEntry(
        nbytes=nbytes,
        digest=file_digest(blocks),
        block_nbytes=block_nbytes,
        blocks=blocks,
        owner=fields.text("owner", max_chars=300),
        created_at=fields.text("created_at", max_chars=40),
    )


def folder_entry(owner: str, at: datetime) -> FileEntry:
    """The entry of a folder that somebody made."""
    return FileEntry(nbytes=0, digest=file_digest(b""), block_nbytes=BLOCK_NBYTES, blocks=b"", owner=owner, created_at=utc_text(at))


def encode_gone(path: str, owner: str, at: datetime) -> bytes:
    """Writes a tombstone: the file was removed. What counts is its name; the rest is for people, and for who carries it on."""
    return encode_document(_GONE, {"path": path, "owner": owner, "created_at": utc_text(at)}, sealed=True)


def encode_claim(path: str, owner: str, nonce: str, at: datetime) -> bytes:
    """Writes the claim of a process that creates a file exclusively."""
    return encode_document(_CLAIM, {"path": path, "owner": owner, "nonce": nonce, "created_at": utc_text(at)}, sealed=True)


def owner_in(data: bytes, kind: str) -> str:
    """Which process wrote a tombstone (``gone``) or a claim (``claim``); FormatError as `decode_document`."""
    name = _GONE if kind == "gone" else _CLAIM
    return Fields(what=name, body=decode_document(data, name, max_nbytes=1 << 20)).text("owner", max_chars=300)
