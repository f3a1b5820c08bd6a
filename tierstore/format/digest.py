"""Digests: SHA-256 of blocks, and of a file as SHA-256 over its blocks' digests.

A file's digest is taken over its blocks' digests so that blocks are hashed in parallel and one slice can be proved alone.
A block's number is not hashed with it: its place is fixed by its position in the list that the file's digest covers.
"""

from __future__ import annotations

import hashlib
import re
from typing import TypeAlias

from tierstore.errors import FormatError

__all__ = [
    "BLOCK_NBYTES",
    "DIGEST_NBYTES",
    "Buffer",
    "bad_blocks",
    "block_count",
    "block_digests",
    "check_digest",
    "digest_of",
    "file_digest",
]

BLOCK_NBYTES = 1 << 20
"""The unit of hashing and verified reading unless configured, in bytes (DESIGN.md §3)."""

DIGEST_NBYTES = 32
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Buffer: TypeAlias = "bytes | bytearray | memoryview"


def block_count(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> int:
    """How many blocks a file of `nbytes` bytes has; the last one may be short, an empty file has none."""
    if block_nbytes <= 0:
        raise ValueError(f"a block has at least one byte, not {block_nbytes}")
    return -(-nbytes // block_nbytes)


def block_digests(data: Buffer, block_nbytes: int = BLOCK_NBYTES) -> bytes:
    """Hashes each block of `data`; returns 32 bytes a block, concatenated (hashlib releases the GIL for each)."""
    view = memoryview(data).cast("B")
    count = block_count(view.nbytes, block_nbytes)
    return b"".join(hashlib.sha256(view[i * block_nbytes : (i + 1) * block_nbytes]).digest() for i in range(count))


def file_digest(digests: Buffer) -> str:
    """The digest of a file, ``sha256:<hex>``, from its blocks' digests (32 bytes each, concatenated)."""
    view = memoryview(digests).cast("B")
    if view.nbytes % DIGEST_NBYTES:
        raise ValueError(f"block digests are {DIGEST_NBYTES} bytes each; {view.nbytes} bytes are not a whole number of them")
    return f"sha256:{hashlib.sha256(view).hexdigest()}"


def digest_of(data: Buffer) -> str:
    """The plain SHA-256 of a small document (a manifest, a part record), ``sha256:<hex>``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check_digest(text: object, what: str = "digest") -> str:
    """Returns `text` if it is a digest as tierstore writes it.

    Raises:
        FormatError: It is not ``sha256:`` and 64 lower-case hexadecimal digits.
    """
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise FormatError(f"{what}: {str(text)[:100]!r} is no digest", hint="a digest is 'sha256:' and 64 hexadecimal digits")
    return text


def bad_blocks(found: bytes, promised: bytes) -> list[int]:
    """The numbers of the blocks whose digests differ, counted from the first of both; one that only one side has differs."""
    if found == promised:
        return []
    size = DIGEST_NBYTES
    count = -(-max(len(found), len(promised)) // size)
    return [n for n in range(count) if found[n * size : (n + 1) * size] != promised[n * size : (n + 1) * size]]
