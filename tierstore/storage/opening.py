"""Opens the storage that a URI names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tierstore.errors import ConfigError
from tierstore.names import plain_uri
from tierstore.storage.contract import Storage

__all__ = ["open_storage"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_storage(
    uri: str,
    options: Mapping[str, Any] | None = None,
    *,
    durable: bool = True,
    threads: int = 2,
    nice: int = 0,
    part_nbytes: int | None = None,
    request_timeout_s: float = 30,
    stall_timeout_s: float = 30,
    concurrency: int = 8,
) -> Storage:
    """The storage at `uri`: a local path or ``file://``, ``s3://``, or what fsspec knows. No I/O happens here.

    Args:
        uri: A path, or a URI without credentials.
        options: What the storage's client takes; none for a local path.
        durable: Local paths: force what is written to the disk. False only for memory (tmpfs).
        threads: Local paths and synchronous file systems: threads for I/O.
        nice: Local paths and synchronous file systems: by how much those are nicer than the process, 0 to 19.
        part_nbytes: The unit in which writes pull their source, in bytes, where the storage lets one choose.
        request_timeout_s: Remote storages: seconds within which a small request must be answered.
        stall_timeout_s: Remote storages: seconds without a moved byte after which a transfer is given up.
        concurrency: Remote storages: transfers at once.

    Raises:
        UsageError: The URI is a damaged one (a Path that swallowed a slash).
        ConfigError: The protocol is unknown (names the package to install), or an option is wrong.
    """
    text = plain_uri(uri)
    if "::" in text and "://" in text:
        raise ConfigError(f"{text!r} is a chained URI", hint="name the storage itself: a tier is its own cache")
    found = _SCHEME.match(text)
    scheme = found[1].lower() if found else ""
    settings: dict[str, Any] = {} if part_nbytes is None else {"part_nbytes": part_nbytes}
    if scheme in ("", "file", "local"):
        if options:
            raise ConfigError(f"the local path {text!r} takes no options ({', '.join(map(str, options))})", hint="remove them")
        # The import is here so that a remote tier's door does not load what only local tiers need, and the reverse below.
        from tierstore.storage.posix import PosixStorage

        return PosixStorage(_local_path(text) if scheme else Path(text), durable=durable, threads=threads, nice=nice)
    if scheme in ("s3", "s3a"):
        from tierstore.storage.s3 import S3Storage

        return S3Storage(
            text, options, request_timeout_s=request_timeout_s, stall_timeout_s=stall_timeout_s, concurrency=concurrency, **settings
        )
    from tierstore.storage.fsspec_storage import FsspecStorage

    return FsspecStorage(
        text, options, threads=threads, nice=nice, request_timeout_s=request_timeout_s, stall_timeout_s=stall_timeout_s, **settings
    )


def _local_path(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{uri!r} names the host {parts.netloc!r}", hint=f"write file:///{parts.netloc}{parts.path} for a local path")
    return Path(unquote(parts.path))
