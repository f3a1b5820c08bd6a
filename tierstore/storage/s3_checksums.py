"""Transport checksums of S3: which one goes with a body, what the server says of it, and what a whole object's must be.

They prove the way from this process's memory into the server's, nothing else: blocks have tierstore's SHA-256. So large bodies carry a
CRC, which costs next to nothing and is part of what is signed; the payload itself needs no signing then (`s3_client`), and SHA-256 of a
block is computed once in its life. Small documents carry SHA-256.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.errors import IntegrityError, StorageError, TierStoreError

_crc32c: Callable[[memoryview], int] | None
try:
    from crc32c import crc32c as _crc32c
except ImportError:  # the extra `fast` is not installed: zlib's is slower, and as good
    _crc32c = None

__all__ = ["CRC32", "MODES", "SHA256", "Algorithm", "Checksums", "computable", "told_of"]

_log = logging.getLogger(__name__)
MODES = ("auto", "sha256", "required", "off")
_REFUSALS = ("NotImplemented", "InvalidRequest", "InvalidArgument", "501")
_TOLD = ("SHA256", "CRC64NVME", "CRC32C", "CRC32", "SHA1")
"""What a server may say of an object, in the order of preference: the same object is always called by the same one."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One checksum algorithm."""

    name: str
    """As S3 writes it, for example ``CRC32C``."""
    of: Callable[[memoryview], bytes]
    """The checksum of bytes, as S3 orders it; lets other threads run meanwhile."""

    @property
    def argument(self) -> str:
        """The parameter that carries it, in requests and answers."""
        return f"Checksum{self.name}"

    def composite(self, parts: Sequence[bytes]) -> str:
        """Of a multipart upload, as S3 writes it: base64 of the checksum of the parts' checksums, ``-``, their number."""
        return f"{_text(self.of(memoryview(b''.join(parts))))}-{len(parts)}"


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _zlib_crc32(data: memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def _fast_crc32c(data: memoryview) -> bytes:
    assert _crc32c is not None
    return int(_crc32c(data)).to_bytes(4, "big")


SHA256 = Algorithm("SHA256", _sha256)
CRC32 = Algorithm("CRC32", _zlib_crc32)
_LARGE = CRC32 if _crc32c is None else Algorithm("CRC32C", _fast_crc32c)
_COMPUTABLE = {algorithm.name: algorithm for algorithm in (SHA256, CRC32, _LARGE)}


class Checksums:
    """Which transport checksums one storage sends: as a header, until the server refuses the header as such.

    Args:
        mode: One of `MODES`. ``auto``: CRC32C (CRC32 without the extra ``fast``) for what may be large, SHA-256 for documents;
            ``sha256``: SHA-256 for all; ``required``: as ``auto``, and an upload fails where the server does not return it; ``off``.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.sent = mode != "off"
        self.taken = False
        """Whether the server's last word shows that it checks what it gets: only then may a payload go unsigned."""

    @property
    def large(self) -> Algorithm:
        """For shards and their parts."""
        return SHA256 if self._mode == "sha256" else _LARGE

    @property
    def document(self) -> Algorithm:
        """For documents and records."""
        return SHA256

    def of(self, algorithm: Algorithm | None, digest: bytes) -> dict[str, Any]:
        """The arguments of a PUT, of a part, or of a part's line in a completion; None: the upload has no checksums."""
        return {algorithm.argument: _text(digest)} if self.sent and algorithm is not None else {}

    def check(self, answer: Mapping[str, Any], algorithm: Algorithm | None, digest: bytes, what: str) -> None:
        """Checks the checksum that the server returned, if it returned one.

        Raises:
            IntegrityError: It computed another one: the bytes were damaged on their way.
            StorageError: It returned none where the options require one.
        """
        told = "" if algorithm is None else str(answer.get(algorithm.argument) or "")
        self.taken = bool(told)
        if self.sent and told and told != _text(digest):
            raise IntegrityError(
                f"{what}: the server received other bytes than were sent", hint="check the network and its proxies", code="BadDigest"
            )
        if self._mode == "required" and not told:
            raise StorageError(
                f"{what}: the server returned no {'checksum' if algorithm is None else algorithm.name}",
                hint="it does not check uploads: set checksums: auto to accept that",
            )

    def refused(self, error: TierStoreError, sent: Mapping[str, Any]) -> bool:
        """Whether `error` says that the server can't take the checksum among the arguments `sent`; from now on none is sent.

        True for each request that carried one, also if another one was refused first: it is to be sent again without.
        """
        told = error.context.get("code")
        carried = any(name.startswith("Checksum") for name in sent)
        if self._mode not in ("auto", "sha256") or not carried or told not in _REFUSALS:
            return False
        if self.sent:
            _log.warning(
                "event=checksums-off code=%s reason=%s", told, "the server refuses checksum headers; digests are checked by tierstore alone"
            )
        self.sent = self.taken = False
        return True


def told_of(answer: Mapping[str, Any]) -> str:
    """What the answer to a HEAD says of the object, as `FileInfo.checksum` has it; empty if it says nothing."""
    for name in _TOLD:
        value = answer.get(f"Checksum{name}")
        if value:
            return f"{name.lower()}:{value}"
    return ""


def computable(name: str) -> Algorithm | None:
    """The algorithm that S3 calls `name`, where this process can compute it."""
    return _COMPUTABLE.get(name)


def _text(digest: bytes) -> str:
    return b64encode(digest).decode()
