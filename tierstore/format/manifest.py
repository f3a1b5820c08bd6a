"""The manifest: every file of a checkpoint with size and digest, and the facts about the checkpoint; readable by a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tierstore.clock import utc_text
from tierstore.errors import UsageError
from tierstore.format.document import decode_document, encode_document
from tierstore.format.fields import MAX_RANKS, Fields
from tierstore.names import check_relative

__all__ = ["FILE_KINDS", "LOSSY_GENERATION", "MAX_FILES", "QUANTISE", "FileRecord", "Manifest", "decode_manifest", "encode_manifest"]

FILE_KINDS = frozenset({"shard", "part", "objects", "index"})
MAX_FILES = 1_000_000
QUANTISE = "quantise"
"""The fact that says how this checkpoint is quantised where a tier quantises: a scheme, or ``exact``; absent: as each tier says."""
LOSSY_GENERATION = "lossy_generation"
"""The fact that says how many quantised copies stand behind one another in what the training was resumed from; absent: none."""
MAX_TAGS = 10_000
MAX_BLOCK_NBYTES = 1 << 30
_DOCUMENT = "tierstore.manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        name: Relative to the checkpoint's folder.
        nbytes: Its exact length in bytes.
        digest: `file_digest` over its blocks of the manifest's `block_nbytes`, whatever its kind.
        kind: One of `FILE_KINDS`.
        head_nbytes: Of an index, the length of its head, in bytes; 0 where it has none.
        head_digest: The plain SHA-256 of the head, ``sha256:<hex>``.
    """

    name: str
    nbytes: int
    digest: str
    kind: str
    head_nbytes: int = 0
    head_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        store_id: The store that it was made in.
        run: The run, with `step` and `save_id` the attempt.
        step: The step.
        save_id: The attempt's ULID.
        world_size: How many ranks wrote it.
        block_nbytes: Bytes per block of all digests.
        created_at: When rank 0 began the save, by its clock.
        files: Every file but the manifest itself, sorted by name.
        tensors: How many tensors the index names.
        extents: How many extents the index has.
        nbytes: Bytes of all files together.
        metrics: What the trainer reported, e.g. ``{"val/loss": 2.1}``; NaN and infinities are kept.
        tags: The tags that the save was given.
        final: The trainer's last checkpoint.
        facts: JSON values about the writers (versions, host names).
    """

    store_id: str
    run: str
    step: int
    save_id: str
    world_size: int
    block_nbytes: int
    created_at: datetime
    files: tuple[FileRecord, ...]
    tensors: int
    extents: int
    nbytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    final: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


def encode_manifest(manifest: Manifest) -> bytes:
    """Writes a manifest as a document, files sorted by name.

    Raises:
        UsageError: A file's kind is unknown, its name stands there twice, or `nbytes` is not the files' sum.
        FormatError: A file's name is unsafe.
    """
    names = [check_relative(file.name) for file in manifest.files]
    if len(set(names)) != len(names):
        raise UsageError("manifest: a file name stands there twice", hint="each file is written by one rank")
    if unknown := {file.kind for file in manifest.files} - FILE_KINDS:
        raise UsageError(f"manifest: unknown kinds of file {sorted(unknown)}", hint=f"kinds are {', '.join(sorted(FILE_KINDS))}")
    if manifest.nbytes != (total := sum(file.nbytes for file in manifest.files)):
        raise UsageError(f"manifest: nbytes is {manifest.nbytes}, but its files have {total} bytes", hint="nbytes counts all files")
    return encode_document(
        _DOCUMENT,
        {
            "store_id": manifest.store_id,
            "run": manifest.run,
            "step": manifest.step,
            "save_id": manifest.save_id,
            "world_size": manifest.world_size,
            "block_nbytes": manifest.block_nbytes,
            "created_at": utc_text(manifest.created_at),
            "files": [_file_body(file) for file in sorted(manifest.files, key=lambda file: file.name)],
            "tensors": manifest.tensors,
            "extents": manifest.extents,
            "nbytes": manifest.nbytes,
            "metrics": {name: float(value) for name, value in manifest.metrics.items()},
            "tags": list(manifest.tags),
            "final": manifest.final,
            "facts": manifest.facts,
        },
    )


def _file_body(file: FileRecord) -> dict[str, Any]:
    body: dict[str, Any] = {"name": file.name, "nbytes": file.nbytes, "digest": file.digest, "kind": file.kind}
    if file.head_nbytes:
        body |= {"head_nbytes": file.head_nbytes, "head_digest": file.head_digest}
    return body


def decode_manifest(data: bytes) -> Manifest:
    """Reads a manifest.

    Raises:
        FormatError: Malformed, foreign or oversized, or it names a file outside its folder.
        VersionError: Written by a newer major version.
    """
    fields = Fields(what=_DOCUMENT, body=decode_document(data, _DOCUMENT))
    files: dict[str, FileRecord] = {}
    for item in fields.items("files", max_count=MAX_FILES):
        entry = fields.within("files", item)
        file = FileRecord(
            name=check_relative(entry.text("name")),
            nbytes=entry.integer("nbytes"),
            digest=entry.digest("digest"),
            kind=entry.text("kind", max_chars=40),
            head_nbytes=entry.integer("head_nbytes", low=1, high=entry.integer("nbytes")) if "head_nbytes" in entry.body else 0,
            head_digest=entry.digest("head_digest") if "head_nbytes" in entry.body else "",
        )
        if file.name in files:
            raise fields.error("files", f"names {file.name!r} twice")
        files[file.name] = file
    metrics = Fields(what=f"{_DOCUMENT}: metrics", body=fields.mapping("metrics"))
    tags = fields.items("tags", max_count=MAX_TAGS)
    if not all(isinstance(tag, str) for tag in tags):
        raise fields.error("tags", "holds something that is not a text")
    nbytes = fields.integer("nbytes")
    if nbytes != sum(file.nbytes for file in files.values()):
        raise fields.error("nbytes", "is not the sum of the files' sizes")
    return Manifest(
        store_id=fields.text("store_id"),
        run=fields.run(),
        step=fields.step(),
        save_id=fields.save_id(),
        world_size=fields.integer("world_size", low=1, high=MAX_RANKS),
        block_nbytes=fields.integer("block_nbytes", low=1, high=MAX_BLOCK_NBYTES),
        created_at=fields.at("created_at"),
        files=tuple(files.values()),
        tensors=fields.integer("tensors"),
        extents=fields.integer("extents"),
        nbytes=nbytes,
        metrics={name: metrics.number(name) for name in metrics.body},
        tags=tuple(tags),
        final=fields.flag("final"),
        facts=fields.mapping("facts"),
    )
