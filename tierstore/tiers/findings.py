"""What `verify` can find: stable codes, what each means, and what to do about it (docs/reference/findings.md is made of this table)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tierstore.names import Attempt

__all__ = ["FINDING_KINDS", "Finding", "FindingKind", "Remedy", "Severity", "findings_markdown", "grouped", "next_steps"]

Severity = Literal["damage", "warning", "note"]
"""``damage``: promised bytes are missing or wrong (exit code 6); ``warning``: nothing promised is wrong, but look at it; ``note``."""

Remedy = Literal["recover", "repair", "sync", "gc", "doctor", ""]
"""The verb that ends it; empty: none does, or it ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingKind:
    """One row of the table."""

    code: str
    name: str
    severity: Severity
    meaning: str
    hint: str
    remedy: Remedy = ""


_KINDS = (
    FindingKind(
        code="V101",
        name="missing-file",
        severity="damage",
        meaning="A file that the manifest names is not there.",
        hint="run `tierstore repair`: it is written anew from the other tiers",
        remedy="repair",
    ),
    FindingKind(
        code="V102",
        name="wrong-size",
        severity="damage",
        meaning="A file's size is not the one that the manifest promises.",
        hint="run `tierstore repair`: what is lacking comes from the other tiers",
        remedy="repair",
    ),
    FindingKind(
        code="V103",
        name="wrong-digest",
        severity="damage",
        meaning="Bytes do not match the SHA-256 that the index or the manifest promises.",
        hint="run `tierstore repair`: the bad blocks come from the other tiers; then look at the disk or bucket that changed them",
        remedy="repair",
    ),
    FindingKind(
        code="V104",
        name="wrong-manifest",
        severity="damage",
        meaning="The manifest is missing, can't be read, or is not the one that the commit record names.",
        hint="run `tierstore repair`: it comes from any other tier",
        remedy="repair",
    ),
    FindingKind(
        code="V105",
        name="unreadable-record",
        severity="damage",
        meaning="A record of the authority's log can't be read, or is missing. Nothing of this run is deleted until it can.",
        hint="run `tierstore repair`: the record's bytes come from a copy beside a replica",
        remedy="repair",
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
        meaning="The server's checksum or ETag of an object is not the one recorded when it was written. Its bytes were not read.",
        hint="run `tierstore repair`: it reads the object, mends what is wrong, and records the server's word anew",
        remedy="repair",
    ),
    FindingKind(
        code="V110",
        name="lost-log",
        severity="damage",
        meaning="A replica's commit record names a checkpoint that the authority's log knows nothing of.",
        hint="make sure that the authority is mounted; then run `tierstore recover`: it rebuilds the log from the replicas' copies",
        remedy="recover",
    ),
    FindingKind(
        code="V111",
        name="tier-unreachable",
        severity="warning",
        meaning="A tier did not answer: what it holds was not checked.",
        hint="check the endpoint with `tierstore doctor --probe`, then verify again",
        remedy="doctor",
    ),
    FindingKind(
        code="V112",
        name="missing-replica",
        severity="note",
        meaning="A committed checkpoint is not (yet) complete on a tier that should hold it.",
        hint="run `tierstore sync`, or leave it to the trainer's background worker",
        remedy="sync",
    ),
    FindingKind(
        code="V113",
        name="missing-copy",
        severity="damage",
        meaning="A whole copy is gone that the log promises and that nobody dropped.",
        hint="is the tier mounted? Then run `tierstore repair`: the copy is made again from the other tiers",
        remedy="repair",
    ),
    FindingKind(
        code="V114",
        name="wrong-log-copy",
        severity="damage",
        meaning="A replica's copy of a record is missing, unreadable, or not the authority's: it would not do if the log were lost.",
        hint="run `tierstore repair`: the authority's records are copied again; those that are only missing `tierstore gc` copies, too",
        remedy="repair",
    ),
    FindingKind(
        code="V115",
        name="quarantined-file",
        severity="warning",
        meaning="A file was found damaged earlier. Its tier is read last until the copy is recorded anew.",
        hint="run `tierstore repair`: it is proved or mended, and counts again",
        remedy="repair",
    ),
    FindingKind(
        code="V116",
        name="leftover",
        severity="note",
        meaning="Files of a checkpoint that was deleted, dropped from this tier, or condemned.",
        hint="run `tierstore gc`, or leave it to the trainer's background worker",
        remedy="gc",
    ),
    FindingKind(
        code="V117",
        name="eviction-under-way",
        severity="note",
        meaning="This tier's copy is being dropped, or whoever dropped it was interrupted.",
        hint="run `tierstore gc`: it finishes what was begun",
        remedy="gc",
    ),
    FindingKind(
        code="V118",
        name="upload-left",
        severity="note",
        meaning="An unfinished upload that began longer ago than `multipart_grace`: its parts cost money and are in no listing.",
        hint="run `tierstore sync`, or leave it to the next writer: both abort it",
        remedy="sync",
    ),
    FindingKind(
        code="V119",
        name="rewritten-object",
        severity="warning",
        meaning="The server's checksum or ETag of an object is not the recorded one, but every byte of it was read and is good.",
        hint="run `tierstore repair`: the server's word is recorded anew",
        remedy="repair",
    ),
    FindingKind(
        code="V120",
        name="plain-missing-bytes",
        severity="damage",
        meaning="A file of `tier://` is published on this tier, but its bytes are not there, or too few or too many of them.",
        hint="run `tierstore repair`: they come from another tier; until then reads take the next tier",
        remedy="repair",
    ),
    FindingKind(
        code="V121",
        name="plain-wrong-digest",
        severity="damage",
        meaning="Bytes of a file of `tier://` do not match the SHA-256 in its entry.",
        hint="run `tierstore repair`: they come from another tier; then look at the disk or bucket that changed them",
        remedy="repair",
    ),
    FindingKind(
        code="V122",
        name="plain-wrong-entry",
        severity="damage",
        meaning="The entry of a file of `tier://` can't be read, or is not the one of that file.",
        hint="run `tierstore repair`: it comes from another tier",
        remedy="repair",
    ),
    FindingKind(
        code="V123",
        name="plain-missing-copy",
        severity="note",
        meaning="The newest version of a file of `tier://` is not (yet) on a tier that should hold it.",
        hint="run `tierstore sync`, or leave it to the process that wrote it",
        remedy="sync",
    ),
    FindingKind(
        code="V124",
        name="unproved-quantised",
        severity="damage",
        meaning="What proves a quantised copy (`quantised.json`, beside the copies of the log) is missing, can't be read, or is not what "
        "the copy's record names.",
        hint="run `tierstore repair`: what is not exact there is written anew from an exact copy",
        remedy="repair",
    ),
    FindingKind(
        code="V125",
        name="no-exact-copy",
        severity="warning",
        meaning="A checkpoint is whole on tiers that quantise alone: the exact bytes that were saved are on no tier that was reached.",
        hint="bring back a tier that has an exact copy; else load it (a warning says what was lost) and save that as a new checkpoint",
    ),
)

FINDING_KINDS: Mapping[str, FindingKind] = {kind.code: kind for kind in _KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that `verify` saw. `checkpoint` is the attempt's folder, empty where it is about the run or the tier.

    `blocks`: the numbers of the bad blocks, where `file` is a shard of which some were read and are bad.
    """

    code: str
    tier: str
    file: str
    detail: str
    checkpoint: str = ""
    blocks: tuple[int, ...] = ()

    @property
    def attempt(self) -> Attempt | None:
        """Which attempt it is about, if about one."""
        run, _, name = self.checkpoint.rpartition("/")
        return Attempt.parse(run, name)

    @property
    def kind(self) -> FindingKind:
        return FINDING_KINDS[self.code]

    @property
    def severity(self) -> Severity:
        return self.kind.severity

    @property
    def hint(self) -> str:
        return self.kind.hint


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, tuple[int, ...]]]:
    """Findings that differ in the step only, as one with all its steps: one cause, one line. Worst first, else in their order."""
    order = ("damage", "warning", "note")
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for found in findings:
        groups.setdefault((found.code, found.tier, "" if found.code in _OF_THE_WHOLE else found.file, found.detail), []).append(found)
    shown = [(members[0], tuple(sorted({a.step for f in members if (a := f.attempt) is not None}))) for members in groups.values()]
    return sorted(shown, key=lambda pair: order.index(pair[0].severity))


_OF_THE_WHOLE = frozenset({"V110", "V112", "V113", "V116", "V117", "V125"})
"""Codes that are about a whole copy: the file that they name adds nothing."""

_WHY: Mapping[Remedy, str] = {
    "recover": "rebuilds the authority's log from the replicas, once you are sure that nothing is merely unmounted",
    "repair": "mends what another tier has good; -n says what it would do",
    "sync": "works off what is pending",
    "gc": "finishes what was begun to be deleted",
    "doctor": "shows why a tier does not answer",
}


def next_steps(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """What to run now, and what it does; the first first. Notes alone ask for nothing."""
    wanted = {f.kind.remedy for f in findings if f.severity != "note"}
    return [(f"tierstore {verb}", why) for verb, why in _WHY.items() if verb in wanted]


def findings_markdown() -> str:
    """The reference page's text."""
    lines = [
        "# Findings of `tierstore verify`",
        "",
        "Codes are stable: scripts may rely on them. A finding of severity `damage` makes the exit code 6; the others leave it 0.",
        "Verify deletes and moves nothing, and writes nothing but a lease while it reads data, and a note in the log of what it finds "
        "damaged (not with `-n`); `tierstore repair` mends. Copies that were dropped on purpose are no findings.",
        "",
        "| code | name | severity | meaning | what to do |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {k.code} | {k.name} | {k.severity} | {k.meaning} | {k.hint} |" for k in _KINDS]
    return "\n".join(lines) + "\n"
