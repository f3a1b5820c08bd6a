"""Documents: small JSON files with a format name and a version; canonical when written, bounded when read."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from tierstore.errors import FormatError, UsageError, VersionError
from tierstore.format.digest import digest_of

__all__ = [
    "FORMAT_VERSION",
    "MAX_DOCUMENT_NBYTES",
    "check_version",
    "decode_document",
    "encode_document",
    "load_json",
    "plain_json",
    "restore_json",
]

FORMAT_VERSION = "1.0"
"""Written into everything. A reader refuses a newer major version by name, and ignores unknown fields of a newer minor one."""

MAX_DOCUMENT_NBYTES = 256 << 20
"""No document is longer (a manifest of 1,000,000 files stays below it)."""

MAX_DEPTH = 100
_MAX_DIGITS = 40  # of a JSON number; our own numbers have at most 24 characters
_SEAL = "self_digest"
_SEAL_LINE = re.compile(rb'\n "self_digest": "sha256:[0-9a-f]{64}",(?=\n)')
_VERSION = re.compile(r"(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def check_version(version: object, what: str) -> tuple[int, int]:
    """Reads a ``format_version``; returns (major, minor).

    Raises:
        VersionError: A newer major version wrote it.
        FormatError: It is missing or not a version.
    """
    found = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if found is None:
        raise FormatError(
            f"{what} has no valid format_version ({str(version)[:40]!r})",
            hint="the file is foreign or damaged: run `tierstore verify`",
        )
    major, minor = int(found[1]), int(found[2])
    if major > int(FORMAT_VERSION.split(".")[0]):
        raise VersionError(
            f"{what} has format version {major}.{minor}; this tierstore reads versions up to {FORMAT_VERSION.split('.')[0]}.x",
            hint="upgrade tierstore on this machine: `pip install -U tierstore`",
            format_version=version,
        )
    return major, minor


def encode_document(kind: str, body: Mapping[str, Any], *, sealed: bool = False) -> bytes:
    """Writes a document as canonical JSON: sorted keys, one-space indent, UTF-8, a newline at the end.

    Args:
        kind: What the document is, e.g. ``tierstore.manifest``; written as ``format``.
        body: JSON values; tuples become lists; NaN and infinities become ``{"$float": "nan"}``.
        sealed: Adds ``self_digest``, the SHA-256 of the same document without that field: for documents that no other document
            proves, in which a flipped bit may read as another valid value.

    Raises:
        UsageError: A value is no JSON value, a key is no str, or the nesting is deeper than 100.
    """
    full = {**body, "format": kind, "format_version": FORMAT_VERSION}
    plain = plain_json(full, kind, 0)
    try:
        return _canonical({**plain, _SEAL: digest_of(_canonical(plain))} if sealed else plain)
    except UnicodeEncodeError as error:
        raise UsageError(f"{kind} holds text that is no valid Unicode ({error.reason})", hint="remove lone surrogates") from error


def _canonical(plain: Mapping[str, Any]) -> bytes:
    return (json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def plain_json(value: Any, path: str, depth: int = 0) -> Any:
    """Returns `value` as what json can write losslessly; `path` names it in messages.

    Raises:
        UsageError: It holds something else.
    """
    if depth > MAX_DEPTH:
        raise UsageError(f"{path[:200]}: nested deeper than {MAX_DEPTH} levels", hint="store it in the state instead")
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if value.bit_length() > 120:  # at most 37 digits
            raise UsageError(f"{path}: the integer is too large for a document", hint="store it in the state instead")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str or key == "$float":
                raise UsageError(f"{path}: {key!r} can't be a key of a document", hint="keys are str, and '$float' is taken")
        return {key: plain_json(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise UsageError(
        f"{path}: a {type(value).__name__} can't stand in a document",
        hint="use dict, list, str, int, float, bool and None only",
    )


def decode_document(data: bytes, kind: str, *, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> dict[str, Any]:
    """Reads a document of `kind`.

    Raises:
        FormatError: Not JSON, too long, too deep, with duplicate keys, not of this kind, or not what its ``self_digest`` says.
        VersionError: Written by a newer major version.
    """
    value = load_json(data, kind, max_nbytes=max_nbytes)
    if not isinstance(value, dict):
        raise FormatError(f"{kind}: the document is no JSON object", hint="the file is foreign or damaged: run `tierstore verify`")
    if value.get("format") != kind:
        raise FormatError(
            f"{kind}: the document says it is {str(value.get('format'))[:60]!r}",
            hint="the file is foreign, damaged or misplaced: run `tierstore verify`",
        )
    check_version(value.get("format_version"), kind)
    seal = value.pop(_SEAL, None)
    if seal is not None and not _is_sealed(data, seal, value):
        raise FormatError(f"{kind}: the document is not what its {_SEAL} says", hint="the file is damaged: run `tierstore verify`")
    body = restore_json(value, kind, 0)
    assert isinstance(body, dict)
    return body


def _is_sealed(data: bytes, seal: object, rest: Mapping[str, Any]) -> bool:
    """Whether a document is what its seal says. As we write it, the seal is a line of its own, and nothing need be written again."""
    line = _SEAL_LINE.search(data)
    if line is not None and seal == digest_of(data[: line.start()] + data[line.end() :]):
        return True
    return seal == digest_of(_canonical(rest))


def restore_json(value: Any, kind: str, depth: int = 0) -> Any:
    """Undoes `plain_json` on what came from outside.

    Raises:
        FormatError: A tagged float is malformed, or the nesting is too deep.
    """
    if depth > MAX_DEPTH + 1:
        raise FormatError(f"{kind}: nested deeper than {MAX_DEPTH} levels", hint="the file is foreign or damaged")
    if isinstance(value, dict):
        if "$float" in value:
            special = value["$float"]
            if len(value) != 1 or not isinstance(special, str) or special not in _SPECIAL:
                raise FormatError(f"{kind}: {str(value)[:60]!r} is no tagged float", hint="the file is foreign or damaged")
            return _SPECIAL[special]
        # Interned: a catalog holds very many documents with the same keys.
        return {sys.intern(key): restore_json(item, kind, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [restore_json(item, kind, depth + 1) for item in value]
    return value


def load_json(data: bytes | bytearray | memoryview, what: str, *, max_nbytes: int) -> Any:
    """Parses strict JSON from outside: UTF-8, no lone surrogates, no duplicate keys, no NaN literals, bounded numbers, size and depth.

    Raises:
        FormatError: Anything else; names `what`.
    """
    if len(data) > max_nbytes:
        raise FormatError(f"{what}: {len(data):,} bytes are more than the {max_nbytes:,} allowed", hint="the file is foreign or damaged")

    def refuse(problem: str, cause: BaseException | None = None) -> FormatError:
        error = FormatError(f"{what}: {problem}", hint="the file is foreign or damaged: run `tierstore verify`")
        error.__cause__ = cause
        return error

    def number(text: str) -> int:
        if len(text) > _MAX_DIGITS:
            raise refuse(f"a number of {len(text)} digits")
        return int(text)

    def real(text: str) -> float:
        value = float(text) if len(text) <= _MAX_DIGITS else math.inf
        if not math.isfinite(value):
            raise refuse(f"{text[:_MAX_DIGITS]!r} is no finite number")
        return value

    def constant(text: str) -> Any:
        raise refuse(f"{text} is no JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise refuse(f"the key {twice[:100]!r} stands there twice")
        return made

    try:
        text = str(data, "utf-8")
        value = json.loads(text, parse_int=number, parse_float=real, parse_constant=constant, object_pairs_hook=pairs)
        if _SURROGATE.search(text):  # an escape may have made text that can't be written again
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeDecodeError as error:
        raise refuse(f"not UTF-8 at byte {error.start}", error) from error
    except UnicodeEncodeError as error:
        raise refuse("a text has lone surrogates", error) from error
    except json.JSONDecodeError as error:
        raise refuse(f"not JSON: {error.msg} at character {error.pos}", error) from error
    except RecursionError as error:
        raise refuse("nested too deep", error) from error
