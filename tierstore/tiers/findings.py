"""What `verify` can find: stable codes, what each means, and what to do about it (docs/reference/findings.md is made of this table)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["FINDING_KINDS", "Finding", "FindingKind", "Severity", "findings_markdown"]

Severity = Literal["damage", "warning", "note"]
"""``damage``: promised bytes are missing or wrong (exit code 6); ``warning``: nothing promised is wrong, but look at it; ``note``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingKind:
    """One row of the table."""

    code: str
    name: str
    severity: Severity
    meaning: str
    hint: str


_KINDS = (
    FindingKind(
        code="V101",
        name="missing-file",
        severity="damage",
        meaning="A file that the manifest names is not there.",
        hint="copy the file from a tier that has it: docs/guides/recovery.md shows how",
    ),
    FindingKind(
        code="V102",
        name="wrong-size",
        severity="damage",
        meaning="A file's size is not the one that the manifest promises.",
        hint="copy the file from a tier whose copy verifies: docs/guides/recovery.md shows how",
    ),
    FindingKind(
        code="V103",
        name="wrong-digest",
        severity="damage",
        meaning="Bytes do not match the SHA-256 that the index or the manifest promises.",
        hint="copy the file from a tier whose copy verifies (docs/guides/recovery.md); look at the disk or bucket that changed it",
    ),
    FindingKind(
        code="V104",
        name="wrong-manifest",
        severity="damage",
        meaning="The manifest is missing, can't be read, or is not the one that the commit record names.",
        hint="copy manifest.json from any other tier: docs/guides/recovery.md shows how",
    ),
    FindingKind(
        code="V105",
        name="unreadable-record",
        severity="damage",
        meaning="A record of the log can't be read. Nothing of this run is deleted until it can.",
        hint="run `tierstore recover`: it rebuilds a lost log from the replicas' copies",
    ),
    FindingKind(
        code="V106",
        name="foreign-file",
        severity="warning",
        meaning="A file in a checkpoint's folder that no manifest names. It is never deleted by tierstore.",
        hint="move it away if it is not wanted",
    ),
    FindingKind(
        code="V107",
        name="incomplete-attempt",
        severity="note",
        meaning="An attempt without a commit record: a save under way, or one whose process died.",
        hint="run `tierstore recover` to finish it if all its parts are there; it does no harm",
    ),
    FindingKind(
        code="V108",
        name="temporary-left",
        severity="note",
        meaning="A temporary file that a dead process left behind.",
        hint="nothing: the next writer removes it",
    ),
    FindingKind(
        code="V109",
        name="changed-object",
        severity="damage",
        meaning="The server's checksum or ETag of an object is not the one recorded when the copy was verified.",
        hint="run `tierstore verify --level full` on this tier; copy what is damaged from another (docs/guides/recovery.md)",
    ),
    FindingKind(
        code="V110",
        name="lost-log",
        severity="warning",
        meaning="A replica's commit record names a checkpoint that the authority's log knows nothing of.",
        hint="run `tierstore recover`: it rebuilds the log from the replicas' copies",
    ),
    FindingKind(
        code="V111",
        name="tier-unreachable",
        severity="warning",
        meaning="A tier did not answer: what it holds was not checked.",
        hint="check the endpoint with `tierstore doctor --probe`, then verify again",
    ),
    FindingKind(
        code="V112",
        name="missing-replica",
        severity="note",
        meaning="A committed checkpoint is not (yet) complete on a tier that should hold it.",
        hint="run `tierstore sync`, or leave it to the trainer's background worker",
    ),
)

FINDING_KINDS: Mapping[str, FindingKind] = {kind.code: kind for kind in _KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that `verify` saw. `checkpoint` is the attempt's folder, empty where it is about the run or the tier."""

    code: str
    tier: str
    file: str
    detail: str
    checkpoint: str = ""

    @property
    def kind(self) -> FindingKind:
        return FINDING_KINDS[self.code]

    @property
    def severity(self) -> Severity:
        return self.kind.severity

    @property
    def hint(self) -> str:
        return self.kind.hint


def findings_markdown() -> str:
    """The reference page's text."""
    lines = [
        "# Findings of `tierstore verify`",
        "",
        "Codes are stable: scripts may rely on them. A finding of severity `damage` makes the exit code 6; the others leave it 0.",
        "Verify never deletes or moves anything.",
        "",
        "| code | name | severity | meaning | what to do |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {k.code} | {k.name} | {k.severity} | {k.meaning} | {k.hint} |" for k in _KINDS]
    return "\n".join(lines) + "\n"
