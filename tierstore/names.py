"""Names: runs, attempts, checkpoint references, and the paths of a tier. All names from outside are validated here."""

from __future__ import annotations

import difflib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePath

from tierstore.errors import FormatError, UsageError

__all__ = [
    "DESCRIPTOR",
    "EVICTED",
    "INDEX",
    "MANIFEST",
    "OBJECTS",
    "QUANTISED",
    "TMP",
    "Attempt",
    "Reference",
    "attempt_of_log_path",
    "check_relative",
    "check_run",
    "check_step",
    "later_save_id",
    "log_root",
    "new_save_id",
    "parse_reference",
    "part_name",
    "plain_uri",
    "save_id_time",
    "shard_name",
]

DESCRIPTOR = "tierstore.json"
MANIFEST = "manifest.json"
EVICTED = "evicted.json"
QUANTISED = "quantised.json"
INDEX = "index.safetensors"
OBJECTS = "objects.json"
TMP = ".tmp"

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford base 32, as ULIDs use it
_FOLDER = re.compile(r"step-(\d{10,15})-([0-7][0-9A-HJKMNP-TV-Z]{25})")
_SEGMENT = re.compile(r"[A-Za-z0-9_=+,@%][A-Za-z0-9._=+,@%-]*")
_PLAIN = re.compile(r"\.?[A-Za-z0-9_=+,@%-][A-Za-z0-9._=+,@%-]*(?:/\.?[A-Za-z0-9_=+,@%-][A-Za-z0-9._=+,@%-]*)*")  # nearly all paths
_LOG_PATH = re.compile(r"(?P<run>.+)/\.log/(?P<folder>step-[^/]+)/(?P<leaf>[^/]+)")
MAX_STEP = 10**15 - 1


def new_save_id(at: datetime) -> str:
    """Makes a ULID: 48 bits of milliseconds since the epoch, 80 random bits (https://github.com/ulid/spec)."""
    return _save_id(int(at.timestamp() * 1000))


def later_save_id(at: datetime, than: str) -> str:
    """Makes a save id that sorts after `than` whatever the clock says: where `at` is not later, a millisecond after `than`.

    Its 80 random bits are fresh, so that two processes that know the same last id never make the same next one.
    """
    millis = max(0, int(at.timestamp() * 1000))
    return _save_id(max(millis, min(_millis(than) + 1, _LAST_MILLI)) if than else millis)


def save_id_time(save_id: str) -> datetime:
    """When a save id was made, by its maker's clock; for people, it steers nothing. Years past 9999 are shown as 9999."""
    return datetime.fromtimestamp(min(_millis(save_id) / 1000, 253402300799), timezone.utc)


_LAST_MILLI = (1 << 48) - 1  # the year 10889


def _save_id(millis: int) -> str:
    value = (millis << 80) | secrets.randbits(80)
    return "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))


def _millis(save_id: str) -> int:
    millis = 0
    for letter in save_id[:10]:
        millis = millis << 5 | _ALPHABET.index(letter)
    return millis


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Attempt:
    """One attempt at saving a step: (run, step, save id). Sorts by run, step, then age of the attempt."""

    run: str
    step: int
    save_id: str

    def __hash__(self) -> int:
        return hash(self.save_id)  # which differs wherever attempts differ; a catalog asks very often

    @property
    def name(self) -> str:
        """The folder's own name, ``step-0000001000-<save id>``."""
        return f"step-{self.step:010d}-{self.save_id}"

    @property
    def folder(self) -> str:
        return f"{self.run}/{self.name}"

    @property
    def log_folder(self) -> str:
        return f"{self.run}/.log/{self.name}"

    def path(self, file: str) -> str:
        """The path in a tier of one of this attempt's files."""
        return f"{self.folder}/{check_relative(file)}"

    def record_path(self, seq: int) -> str:
        return f"{self.log_folder}/{seq:06d}.json"

    def receipt_path(self, rank: int) -> str:
        """A node tier's local receipt: this rank's part of this attempt is complete and synced there."""
        return f"{self.log_folder}/receipt-{rank:05d}.json"

    @property
    def evicted_path(self) -> str:
        """On a tier before the authority: this node's copy was dropped on purpose, and is not made again."""
        return f"{self.log_folder}/{EVICTED}"

    @property
    def quantised_path(self) -> str:
        """On a tier whose copy is quantised: what proves it (`format.quantised`)."""
        return f"{self.log_folder}/{QUANTISED}"

    @staticmethod
    def parse(run: str, name: str) -> Attempt | None:
        """Reads a folder's name; None if it is not of our grammar (step numbers are integers, never text)."""
        found = _FOLDER.fullmatch(name)
        return Attempt(run=run, step=int(found[1]), save_id=found[2]) if found else None


def log_root(run: str) -> str:
    return f"{run}/.log"


def attempt_of_log_path(path: str) -> tuple[Attempt, str] | None:
    """Splits ``<run>/.log/<attempt>/<leaf>`` into the attempt and the leaf's name; None for anything else."""
    found = _LOG_PATH.fullmatch(path)
    attempt = Attempt.parse(found["run"], found["folder"]) if found else None
    return (attempt, found["leaf"]) if found and attempt else None


def shard_name(rank: int, world_size: int) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def check_run(run: str) -> str:
    """Returns `run` if it can name a run: ``/``-separated segments of letters, digits and ``._=+,@%-``."""
    parts = run.split("/") if isinstance(run, str) else []
    bad = [p for p in parts if not _SEGMENT.fullmatch(p) or len(p) > 200 or _FOLDER.fullmatch(p)]
    if not parts or bad or len(run) > 600:
        raise UsageError(
            f"{run!r} can't name a run",
            hint="use letters, digits and ._=+,@%- in segments separated by '/', not beginning with '.'",
            run=str(run),
        )
    return run


def check_step(step: object) -> int:
    """Returns `step` as an int if it is a whole number from 0 (numpy integers count, bool does not)."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise UsageError(f"a step is a whole number, not {type(step).__name__} {step!r}", hint="pass the trainer's global step as an int")
    value: int = step.__index__()
    if not 0 <= value <= MAX_STEP:
        raise UsageError(f"step {value} is out of range", hint=f"steps go from 0 to {MAX_STEP}")
    return value


def check_relative(path: str) -> str:
    """Returns `path` if it is relative, normalised, inside its folder and free of control characters.

    Raises:
        FormatError: The name came from outside and must not be followed.
    """
    if isinstance(path, str) and len(path) <= 255 and _PLAIN.fullmatch(path):
        return path
    if (
        not isinstance(path, str)
        or not 0 < len(path.encode("utf-8", "replace")) <= 900
        or any(p in ("", ".", "..") or len(p.encode("utf-8", "replace")) > 255 for p in path.split("/"))
        or any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in path)
        or "\\" in path
    ):
        raise FormatError(
            f"unsafe file name {path!r} in stored metadata",
            hint="the file that names it is foreign or damaged: run `tierstore verify`",
        )
    return path


def plain_uri(uri: object) -> str:
    """Returns a tier's URI as text; refuses a Path that swallowed a scheme's slashes (``Path("s3://b/x")``)."""
    text = str(uri)
    if isinstance(uri, PurePath) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/?(?!/)", text):
        raise UsageError(
            f"the path {text!r} is a URI that pathlib has damaged ('//' became '/')",
            hint="pass the URI as a str",
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        raise UsageError(f"{text!r} has one '/' after its scheme", hint=f"write {text.replace(':/', '://', 1)!r}")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A checkpoint as a person names it: ``RUN@SELECTOR``.

    `selector` is ``latest``, ``step`` (with `step`), ``best`` (with `argument`, the metric) or ``tag`` (with `argument`).
    `run` is empty where the configuration names the run.
    """

    run: str
    selector: str
    step: int | None = None
    argument: str = ""


def parse_reference(text: str) -> Reference:
    """Reads ``RUN@12000``, ``RUN@latest``, ``RUN@best:val/loss``, ``RUN@tag:release/1``; the run may be empty."""
    run, at, selector = text.rpartition("@")
    if not at:
        run, selector = "", text
    if run:
        check_run(run)
    head, _, argument = selector.partition(":")
    if selector.isascii() and selector.isdigit():
        return Reference(run=run, selector="step", step=check_step(int(selector)))
    if selector == "latest" or (head in ("best", "tag") and argument):
        return Reference(run=run, selector=head, argument=argument)
    selectors = {"latest": "latest", "best": "best:METRIC", "tag": "tag:TAG"}
    near = difflib.get_close_matches(head, selectors, n=1)
    raise UsageError(
        f"{text!r} names no checkpoint",
        hint=f"did you mean {selectors[near[0]]}?" if near else "write RUN@12000, RUN@latest, RUN@best:METRIC or RUN@tag:TAG",
    )
