"""Where a file lies in a tier: ``.files/<folders>/<name>@/<version>-<ULID>…``; paths that people give become names that storages take.

::

    .files/a/b.txt@/0000000003-<ULID>.data        the bytes, immutable
    .files/a/b.txt@/0000000003-<ULID>-<nbytes>.json   the entry: the version is published
    .files/a/b.txt@/0000000004-<ULID>.gone        the file was removed
    .files/a/b.txt@/0000000004.claim              on the authority: who may create it exclusively
    .files/a/@/0000000001-<ULID>-0.json           a folder that somebody made

A run's name can't begin with a dot, so nothing here is ever taken for a checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tierstore.errors import UsageError

__all__ = [
    "ROOT",
    "Kind",
    "Leaf",
    "Mark",
    "check_path",
    "claim_path",
    "decode_name",
    "folder_place",
    "leaf_name",
    "parse_place",
    "place_of",
]

ROOT = ".files"
"""The folder of a tier that holds files."""

Kind = Literal["data", "entry", "gone", "claim"]

_MAX_SEGMENT = 254  # bytes; the folder's name has one more, the '@'
_MAX_PATH = 800  # bytes of the encoded path: a storage takes 900, of which the root and the leaf's name take their part
_ENCODED = re.compile(r"[\x00-\x1f\x7f%@\\]")
_DECODED = re.compile(r"%([0-9A-F]{2})")
_LEAF = re.compile(r"(\d{10,15})-([0-7][0-9A-HJKMNP-TV-Z]{25})(?:\.(data|gone)|-(\d{1,19})\.json)")
_CLAIM = re.compile(r"(\d{10,15})\.claim")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mark:
    """One version of a path. Of two the greater one counts: by number, and where two writers took the same number, by ULID."""

    version: int
    save_id: str

    @property
    def stem(self) -> str:
        return f"{self.version:010d}-{self.save_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One file of a tier below `ROOT`, by its name.

    Attributes:
        path: The file or folder that it belongs to, as people write it; empty for the root folder.
        is_folder: Whether it says something of a folder.
        kind: What it is.
        mark: Its version; of a claim with an empty save id.
        nbytes: Of an entry: the length of the file.
    """

    path: str
    is_folder: bool
    kind: Kind
    mark: Mark
    nbytes: int = 0


def check_path(path: str) -> str:
    """Returns `path` if it can name a file or a folder below the root.

    Raises:
        UsageError: It can't; says why.
    """
    if not isinstance(path, str) or any(0xD800 <= ord(c) <= 0xDFFF for c in path):
        raise UsageError(f"{path!r} is no path", hint="a path is text without lone surrogates")
    segments = path.split("/")
    if any(segment in ("", ".", "..") for segment in segments):
        raise UsageError(
            f"{path!r} can't name a file", hint="write names separated by single '/', without '.' and '..', and without '/' at the ends"
        )
    encoded = [_encode(segment).encode("utf-8") for segment in segments]
    longest = max(encoded, key=len)
    if len(longest) > _MAX_SEGMENT:
        raise UsageError(
            f"a name in {path[:100]!r}… is {len(longest)} bytes long", hint=f"a name has {_MAX_SEGMENT} bytes at most, as file systems do"
        )
    if sum(map(len, encoded)) + len(encoded) > _MAX_PATH:
        raise UsageError(f"the path {path[:100]!r}… is too long", hint=f"a path has {_MAX_PATH} bytes at most: use shorter names")
    return path


def place_of(path: str, *, is_folder: bool = False) -> str:
    """The folder of a tier in which the versions of a file (or the marks of a folder) lie; errors as `check_path`."""
    if is_folder:
        return f"{folder_place(path)}/@"
    return f"{folder_place(path)}@"


def folder_place(path: str) -> str:
    """The folder of a tier below which everything below the folder `path` lies; errors as `check_path`, but the root has no name."""
    return f"{ROOT}/{'/'.join(map(_encode, check_path(path).split('/')))}" if path else ROOT


def leaf_name(kind: Kind, mark: Mark, nbytes: int = 0) -> str:
    return f"{mark.stem}-{nbytes}.json" if kind == "entry" else f"{mark.stem}.{kind}"


def claim_path(path: str, version: int) -> str:
    return f"{place_of(path)}/{version:010d}.claim"


def parse_place(stored: str) -> Leaf | None:
    """Reads the path of a tier's file; None if it is not of our grammar."""
    root, _, rest = stored.partition("/")
    place, _, name = rest.rpartition("/")
    if root != ROOT or not place.endswith("@"):
        return None
    is_folder = place == "@" or place.endswith("/@")
    encoded = place[:-1].rstrip("/") if is_folder else place[:-1]
    path = decode_name(encoded)
    if "/".join(map(_encode, path.split("/"))) != encoded:
        return None  # not by us: nobody would find it under its path
    found = _LEAF.fullmatch(name)
    if found is not None:
        kind: Kind = "entry" if found[4] is not None else "data" if found[3] == "data" else "gone"
        mark = Mark(version=int(found[1]), save_id=found[2])
        return Leaf(path=path, is_folder=is_folder, kind=kind, mark=mark, nbytes=int(found[4] or 0))
    claim = _CLAIM.fullmatch(name)
    if claim is not None:
        return Leaf(path=path, is_folder=is_folder, kind="claim", mark=Mark(version=int(claim[1]), save_id=""))
    return None


def _encode(segment: str) -> str:
    return _ENCODED.sub(lambda found: f"%{ord(found[0]):02X}", segment)


def decode_name(place: str) -> str:
    """What people wrote, from a tier's names; without the '@' that ends them."""
    return _DECODED.sub(lambda found: chr(int(found[1], 16)), place)
