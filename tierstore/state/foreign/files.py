"""The files of a foreign checkpoint: where they lie, how long they are, and reading them. Nothing here is written, ever."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore.config_uris import normal_uri
from tierstore.errors import IncompleteError, NotFoundError, StorageError, UsageError
from tierstore.names import check_relative
from tierstore.storage.contract import FileInfo, Listing, Storage
from tierstore.storage.opening import open_storage
from tierstore.tiers.together import together

__all__ = ["ForeignFiles", "find_files"]

_FILE_SUFFIXES = (".safetensors", ".json", ".pt", ".pth", ".bin", ".ckpt", ".distcp")
_MAX_FOLDERS = 32
_ROOT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFiles:
    """A folder of files. Names are relative to it; one that leads out of it is refused.

    Attributes:
        uri: Where it is, without credentials.
        storage: Where they lie; `prefix` is the folder within it, empty or ending in ``/``.
        infos: What the folder's listing says, by name.
        beside: The same, and the files one folder further down.
        only: The one file that was named instead of a folder; empty where a folder was.
    """

    uri: str
    storage: Storage
    prefix: str = ""
    infos: dict[str, FileInfo] = field(default_factory=dict)
    beside: dict[str, FileInfo] = field(default_factory=dict)
    only: str = ""

    def path(self, name: str) -> str:
        """The storage's path of a file.

        Raises:
            FormatError: The name leads out of the folder, or is none.
        """
        return self.prefix + check_relative(name)

    async def nbytes(self, name: str, named_by: str = "") -> int:
        """A file's length in bytes.

        Args:
            name: The file.
            named_by: The file that says that it should be there, for the message.

        Raises:
            IncompleteError: It is missing.
            FormatError: The name leads out of the folder.
        """
        path = self.path(name)
        if name not in self.infos:
            try:
                self.infos[name] = await self.storage.stat(path)
            except NotFoundError as error:
                raise IncompleteError(
                    f"{self.uri} lacks the file {name!r}" + (f", which {named_by} names" if named_by else ""),
                    hint="the checkpoint is not whole: download or copy the missing file, then try again",
                    file=name,
                ) from error
        return self.infos[name].nbytes

    async def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`; raises as `Storage.read` does."""
        return await self.storage.read(self.path(name), offset, nbytes)

    async def small(self, name: str, limit: int) -> bytes:
        """A whole file.

        Raises:
            UsageError: It has more than `limit` bytes.
        """
        nbytes = await self.nbytes(name)
        if nbytes > limit:
            raise UsageError(f"{name} in {self.uri} has {nbytes:,} bytes; {limit:,} are allowed", hint="it can't be what its name says")
        return await self.read(name, 0, nbytes)


async def find_files(uri: Any, options: Mapping[str, Any] | None = None) -> ForeignFiles:
    """Looks at a folder, or at one file of it.

    Args:
        uri: A path or a URI.
        options: What its storage takes.

    Raises:
        NotFoundError: There is nothing.
        UsageError: It is no path or URI, or one that holds credentials.
        ConfigError, StorageError: The storage can't be used.
    """
    text = normal_uri(uri)
    parent, _, name = text.rpartition("/")
    named = bool(name) and not _ROOT.fullmatch(parent + "/")
    if named and name.endswith(_FILE_SUFFIXES) and (found := await _one_file(text, parent, name, options)) is not None:
        return found
    storage, prefix = _folder(text, options)
    listing = await storage.children(prefix.rstrip("/"))
    infos = {info.path.removeprefix(prefix): info for info in listing.files}
    if infos:
        beside = {**infos, **await _further_down(storage, prefix, listing)}
        return ForeignFiles(uri=_label(storage, prefix), storage=storage, prefix=prefix, infos=infos, beside=beside)
    await storage.close()
    if named and (found := await _one_file(text, parent, name, options)) is not None:
        return found
    where = _label(storage, prefix)
    if not listing.folders:  # a bucket's empty folder and a missing one are the same
        raise NotFoundError(
            f"there are no files at {where}", hint="check the path or URI; name the checkpoint's folder or file itself", uri=where
        )
    inside = ", ".join(sorted(listing.folders)[:5])
    hint = f"name the folder or the file itself, e.g. {where}/{min(listing.folders)}"
    raise NotFoundError(f"there is no checkpoint in {where}: no files; it has the folders {inside}", hint=hint, uri=where)


async def _further_down(storage: Storage, prefix: str, listing: Listing) -> dict[str, FileInfo]:
    """The files of the folders in a folder; of a place with very many folders, which is no model's, nothing."""
    folders = sorted(name for name in listing.folders if not name.startswith("."))
    if len(folders) > _MAX_FOLDERS:
        return {}
    listings = await together(storage.children, [prefix + name for name in folders], at_once=8)
    return {info.path.removeprefix(prefix): info for further in listings for info in further.files}


def _folder(text: str, options: Mapping[str, Any] | None) -> tuple[Storage, str]:
    """The storage for a folder, and the folder within it.

    The files in a snapshot of Hugging Face's cache are links to ``../../blobs``. A storage follows no link out of its root, so the
    root is the repository's folder there.
    """
    parts = text.split("/")
    if "://" not in text and len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].count("--"):
        return open_storage("/".join(parts[:-2]), options), f"snapshots/{parts[-1]}/"
    return open_storage(text, options), ""


async def _one_file(text: str, parent: str, name: str, options: Mapping[str, Any] | None) -> ForeignFiles | None:
    storage, prefix = _folder(parent or ("." if not text.startswith("/") else "/"), options)
    try:
        info = await storage.stat(prefix + name)
    except (NotFoundError, StorageError) as error:
        await storage.close()
        if isinstance(error, NotFoundError) or isinstance(error.__cause__, IsADirectoryError | NotADirectoryError):
            return None
        raise
    return ForeignFiles(uri=_label(storage, prefix + name), storage=storage, prefix=prefix, infos={name: info}, only=name)


def _label(storage: Storage, path: str) -> str:
    """Where it is, for messages and records: as the storage says it, which never shows a credential."""
    return f"{storage.uri.rstrip('/')}/{path}".rstrip("/")
