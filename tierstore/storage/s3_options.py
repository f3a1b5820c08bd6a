"""The options of an S3 tier: what a user may write, checked and turned into s3fs's arguments. Nothing here does I/O."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tierstore.errors import ConfigError
from tierstore.storage.s3_checksums import MODES

__all__ = ["S3Options", "parse_s3_options", "split_s3_uri"]

_OURS = ("addressing_style", "checksums", "client", "region_name")
_S3FS = (
    "anon",
    "client_kwargs",
    "config_kwargs",
    "endpoint_url",
    "key",
    "password",
    "profile",
    "requester_pays",
    "s3_additional_kwargs",
    "secret",
    "token",
    "use_ssl",
    "username",
)
_CLIENTS = ("s3fs", "direct")
_STYLES = ("auto", "path", "virtual")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Checked options. Holds secrets: its repr shows none."""

    checksums: str
    """One of `s3_checksums.MODES`."""
    client: str
    """``s3fs``: it does everything; ``direct``: large ranges are read beside it (`s3_direct`)."""
    endpoint_url: str
    key_id: str
    s3fs: Mapping[str, Any] = field(repr=False)
    """Arguments for `s3fs.S3FileSystem`."""


def split_s3_uri(uri: str) -> tuple[str, str]:
    """The bucket and the key prefix (without outer slashes) of ``s3://bucket/prefix``.

    Raises:
        ConfigError: No bucket, credentials in the URI, or a query.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme not in ("s3", "s3a"):
        raise ConfigError(f"{scheme!r} is not S3", hint="write s3://BUCKET/PREFIX")
    if "@" in bucket:
        raise ConfigError(
            "an s3:// URI must not hold credentials", hint="put key and secret into the tier's options, a profile or the environment"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*|arn:[A-Za-z0-9:_.-]+", bucket):
        raise ConfigError(f"{uri!r} names no bucket", hint="write s3://BUCKET/PREFIX")
    prefix = prefix.strip("/")
    if "//" in prefix or any(part in (".", "..") for part in prefix.split("/")) or any(ord(c) < 32 for c in prefix):
        raise ConfigError(f"{uri!r}: the prefix has an empty, '.' or '..' segment", hint="write s3://BUCKET/a/b")
    return bucket, prefix


def parse_s3_options(options: Mapping[str, Any], *, connections: int, connect_timeout_s: float, read_timeout_s: float) -> S3Options:
    """Checks a tier's options and builds the arguments of `s3fs.S3FileSystem`.

    Explicit `config_kwargs` win over what is set here, but for retries, which happen in one place only (ours).

    Args:
        options: What the user wrote; ``endpoint_url`` and ``region_name`` are understood on top and in ``client_kwargs``.
        connections: How many connections one client may hold.
        connect_timeout_s: Seconds until a connection attempt is given up.
        read_timeout_s: Seconds without a byte until an answer is given up.

    Raises:
        ConfigError: An unknown option, or one with an impossible value; names it, never its value.
    """
    for name in options:
        if name not in _OURS + _S3FS:
            near = difflib.get_close_matches(str(name), _OURS + _S3FS, n=1)
            raise ConfigError(
                f"unknown option {name!r} of an S3 tier",
                hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(_OURS + _S3FS))}",
            )
    checksums = _one_of(options, "checksums", MODES)
    reader = _one_of(options, "client", _CLIENTS)
    style = _one_of(options, "addressing_style", _STYLES)
    client = _mapping(options, "client_kwargs")
    config = _mapping(options, "config_kwargs")
    endpoint = str(options.get("endpoint_url") or client.pop("endpoint_url", None) or "")
    client.pop("endpoint_url", None)
    if endpoint:
        _check_endpoint(endpoint)
    region = options.get("region_name") or client.pop("region_name", None)
    if region:
        client["region_name"] = str(region)
    s3 = _mapping(config, "s3")
    if style != "auto":
        s3["addressing_style"] = style
    arguments = {
        name: options[name] for name in _S3FS if name in options and name not in ("client_kwargs", "config_kwargs", "endpoint_url")
    }
    if endpoint:
        arguments["endpoint_url"] = endpoint
    arguments["client_kwargs"] = client
    arguments["config_kwargs"] = {
        "connect_timeout": connect_timeout_s,
        "read_timeout": read_timeout_s,
        "max_pool_connections": connections,
        # Default CRC trailers of new botocore versions break older servers (PROTOCOLS.md §8): SHA-256 goes as a header.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **config,
        **({"s3": s3} if s3 else {}),
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    key_id = str(options.get("key") or options.get("username") or client.get("aws_access_key_id") or "")
    return S3Options(checksums=checksums, client=reader, endpoint_url=endpoint, key_id=key_id, s3fs=arguments)


def _one_of(options: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    value = options.get(name, allowed[0])
    if value is False and "off" in allowed:  # YAML 1.1 reads a bare `off` as false
        value = "off"
    if value not in allowed:
        raise ConfigError(f"the option {name!r} of an S3 tier is none of {', '.join(allowed)}", hint=f"leave it out for {allowed[0]!r}")
    return str(value)


def _mapping(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = options.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(
            f"the option {name!r} of an S3 tier is a {type(value).__name__}, not a mapping", hint=f"write {name}: {{name: value}}"
        )
    return dict(value or {})


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is not a number, a bracket that does not close
        valid = False
    if not valid:
        raise ConfigError("endpoint_url of an S3 tier is not an http(s) URL", hint="write http://HOST:PORT or https://HOST")
    if parts.username or parts.password:
        raise ConfigError(
            "endpoint_url of an S3 tier must not hold credentials", hint="put them into key and secret, a profile or the environment"
        )
