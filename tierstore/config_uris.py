"""Tier URIs: normal form, and what a bare URI says by itself: scope, name, and whether it survives a power loss."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import PurePath
from urllib.parse import unquote

from tierstore.errors import UsageError
from tierstore.names import plain_uri

__all__ = ["check_outside", "default_durable", "default_name", "default_scope", "is_local", "normal_uri", "overlaps"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_OBJECT_SCHEMES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2", "http", "https"}
_CONTAINER_AT_ACCOUNT = {"abfs", "abfss", "az"}
_TMPFS = ("/dev/shm", "/run/shm")


def normal_uri(uri: object, folder: str = "") -> str:
    """The normal form of a tier's URI: an absolute, normalised local path, or ``scheme://place/prefix`` without a last ``/``.

    Args:
        uri: A path or a URI as text, or a `pathlib` path; ``file://`` and ``local://`` become paths.
        folder: What a relative path is relative to; the working directory if empty.

    Raises:
        UsageError: No URI, a damaged or chained one, or one that holds credentials or a query. Its message shows no secret.
    """
    if not isinstance(uri, (str, PurePath)):
        raise UsageError(f"a tier's URI is text, not {type(uri).__name__}", hint="write a path or a URI such as s3://bucket/prefix")
    text = plain_uri(uri)
    if not text.strip() or any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise UsageError("the URI is empty or holds control characters", hint="write a path or a URI such as s3://bucket/prefix")
    if "::" in text.split("/", 1)[0]:
        raise UsageError("chained URIs are refused: a cache or archive in between breaks the promises", hint="name the storage itself")
    found = _SCHEME.fullmatch(text)
    if found is None:
        return os.path.normpath(os.path.join(folder or os.getcwd(), text))
    scheme, rest = found[1].lower(), found[2]
    if scheme in ("file", "local"):
        path = unquote(rest.removeprefix("localhost"))
        if not path.startswith("/"):
            raise UsageError("a file:// URI names an absolute path of this machine", hint="write file:///path, or just the path")
        return os.path.normpath(path)
    if scheme == "tier":
        raise UsageError(
            f"{text!r} names a checkpoint within a store, not a place for files",
            hint="open its store (tierstore.open, or tierstore.dcp with this as checkpoint_id), or name the folder or bucket itself",
        )
    place, _, prefix = rest.partition("/")
    name, _, port = place.rpartition(":")
    if ("@" in place and not (scheme in _CONTAINER_AT_ACCOUNT and ":" not in place)) or (name and not port.isdigit()):
        raise UsageError(
            "a URI must not hold credentials: URIs are shown in tables, logs and manifests",
            hint="use a profile or the environment (AWS_ACCESS_KEY_ID …), or the tier's options: {key: ${S3_KEY}, secret: ${S3_SECRET}}",
        )
    if not place and scheme != "memory":
        raise UsageError(f"the URI names no bucket or host after {scheme}://", hint=f"write {scheme}://bucket/prefix")
    if "?" in rest or "#" in rest:
        raise UsageError("a tier's URI has no query or fragment", hint="give settings as the tier's options")
    if any(part in ("", ".", "..") for part in prefix.strip("/").split("/") if prefix.strip("/")):
        raise UsageError("the URI's prefix has empty, '.' or '..' segments", hint="write the prefix out")
    return f"{scheme}://{place}/{prefix.strip('/')}".rstrip("/") if place else f"{scheme}://{prefix.strip('/')}"


def is_local(uri: str) -> bool:
    """Whether a normal URI is a path of this machine."""
    return "://" not in uri


def default_scope(uri: str, position: int, count: int) -> str:
    """With several tiers the first is ``node`` if it is a local path; all others, and one alone, are ``shared`` (PROTOCOLS.md §2)."""
    return "node" if count > 1 and position == 0 and is_local(uri) else "shared"


def default_durable(uri: str) -> bool:
    """False for what is memory by its name: a path on ``/dev/shm``, and fsspec's ``memory://``; True else."""
    return not (uri.startswith("memory://") or any(uri == root or uri.startswith(f"{root}/") for root in _TMPFS))


def default_name(uri: str, scope: str, taken: Collection[str]) -> str:
    """A bare URI's name: ``memory``, ``node`` or ``shared`` for a path, ``object`` for a bucket, else the scheme; then ``-2`` and so on."""
    if is_local(uri):
        stem = "memory" if not default_durable(uri) else scope
    else:
        scheme = uri.partition("://")[0]
        stem = "object" if scheme in _OBJECT_SCHEMES else re.sub(r"[^a-z0-9]", "-", scheme)
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}-{count}"
    return name


def check_outside(uri: object, tiers: Mapping[str, str]) -> None:
    """Refuses to write for other programs where the store's own files lie.

    Args:
        uri: The target.
        tiers: The tiers' normal URIs, by their names.

    Raises:
        UsageError: `uri` is a tier, or within one; or it is no URI.
    """
    target = normal_uri(uri)
    for name, place in tiers.items():
        if target == place or target.startswith(f"{place.rstrip('/')}/"):
            raise UsageError(
                f"{target} lies within tier {name!r} of the store, at {place}", hint="choose a place outside the store's tiers"
            )


def overlaps(one: str, other: str) -> bool:
    """Whether two normal URIs are the same place, or one lies inside the other."""
    return one == other or one.startswith(f"{other.rstrip('/')}/") or other.startswith(f"{one.rstrip('/')}/")
