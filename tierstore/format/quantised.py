"""What proves a quantised copy of a checkpoint: for each shard that is not exact, the digest of its packed file's footer.

The chain: the log's ``replicated`` record → this document → each footer → each frame. It lies beside the tier's copies of the log's
records, so that whoever lists these sees that the copy is not exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore.format.document import decode_document, encode_document
from tierstore.format.fields import Fields
from tierstore.names import check_relative

__all__ = ["QuantisedCopy", "QuantisedFile", "decode_quantised", "encode_quantised"]

_DOCUMENT = "tierstore.quantised"
_MAX_FILES = 1_000_000
_MAX_TENSORS = 50_000
"""So many tensors' facts are written down; of more they stand in the files' own footers only."""
_MAX_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedFile:
    """One shard of the copy that is not exact.

    Attributes:
        name: Relative to the checkpoint's folder.
        footer: `sha256:` digest of its packed file's footer.
        stored_nbytes: Length of the packed file, in bytes.
        tensors: Tensor (key in the shard's header) → facts: scheme, kind, errors of the update.
    """

    name: str
    footer: str
    stored_nbytes: int
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedCopy:
    """One checkpoint's copy on one tier.

    Attributes:
        run, step, save_id: The attempt.
        scheme: ``q8`` or ``q4``; several, joined by ``+``, where its files were written by different ones.
        generation: How many lossy copies stand behind one another, this one included: 1 where the training never saw one.
        max_error: The worst relative error of an Adam update that the moments of one tensor lead to.
        mean_error: The same on the average over all tensors.
        files: The shards that are not exact, sorted by name.
    """

    run: str
    step: int
    save_id: str
    scheme: str
    generation: int
    max_error: float
    mean_error: float
    files: tuple[QuantisedFile, ...]

    def file(self, name: str) -> QuantisedFile | None:
        """A shard that is not exact; None: it is, or should be."""
        return next((file for file in self.files if file.name == name), None)

    @staticmethod
    def of(run: str, step: int, save_id: str, *, generation: int, scheme: str, files: Iterable[QuantisedFile]) -> QuantisedCopy:
        """The document of a copy with these files; `scheme` counts where no tensor tells its own."""
        ordered = tuple(sorted(files, key=lambda file: file.name))
        facts = [tensor for file in ordered for tensor in file.tensors.values()]
        schemes = sorted({str(tensor["scheme"]) for tensor in facts if "scheme" in tensor})
        worst = [error for tensor in facts if (error := _error(tensor.get("max_error"))) is not None]
        mean = [error for tensor in facts if (error := _error(tensor.get("mean_error"))) is not None]
        if len(facts) > _MAX_TENSORS:
            ordered = tuple(QuantisedFile(name=file.name, footer=file.footer, stored_nbytes=file.stored_nbytes) for file in ordered)
        return QuantisedCopy(
            run=run,
            step=step,
            save_id=save_id,
            scheme="+".join(schemes) or scheme,
            generation=generation,
            max_error=max(worst, default=math.nan),
            mean_error=sum(mean) / len(mean) if mean else math.nan,  # infinite where that is too much, as footers may say anything
            files=ordered,
        )


def _error(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def encode_quantised(copy: QuantisedCopy) -> bytes:
    """Writes it as a document: the same bytes for the same copy."""
    return encode_document(
        _DOCUMENT,
        {
            "run": copy.run,
            "step": copy.step,
            "save_id": copy.save_id,
            "scheme": copy.scheme,
            "generation": copy.generation,
            "max_error": copy.max_error,
            "mean_error": copy.mean_error,
            "files": [
                {"name": file.name, "footer": file.footer, "stored_nbytes": file.stored_nbytes, "tensors": file.tensors}
                for file in copy.files
            ],
        },
        sealed=True,
    )


def decode_quantised(data: bytes) -> QuantisedCopy:
    """Reads it.

    Raises:
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    fields = Fields(what=_DOCUMENT, body=decode_document(data, _DOCUMENT, max_nbytes=_MAX_NBYTES))
    files: dict[str, QuantisedFile] = {}
    for item in fields.items("files", max_count=_MAX_FILES):
        entry = fields.within("files", item)
        tensors = entry.mapping("tensors")
        if not all(isinstance(facts, dict) for facts in tensors.values()):
            raise entry.error("tensors", "holds something that is not an object")
        file = QuantisedFile(
            name=check_relative(entry.text("name")),
            footer=entry.digest("footer"),
            stored_nbytes=entry.integer("stored_nbytes"),
            tensors=tensors,
        )
        if file.name in files:
            raise fields.error("files", f"names {file.name!r} twice")
        files[file.name] = file
    return QuantisedCopy(
        run=fields.run(),
        step=fields.step(),
        save_id=fields.save_id(),
        scheme=fields.text("scheme", max_chars=100),
        generation=fields.integer("generation", low=1, high=1_000_000),
        max_error=fields.number("max_error"),
        mean_error=fields.number("mean_error"),
        files=tuple(files.values()),
    )
