"""``tier://`` URIs: one text that names a configuration, and a path in it: a file's (the fs door), or a run with a step or a reference.

::

    tier://[NAME]/[path/to/config.yaml/]PATH[?config=…&tier=…&tier=…&ack=…]
    tier://[NAME]/[path/to/config.yaml/]RUN[/step-N | @REFERENCE]

    tier:///run1/step-100                        the configuration that the command line would find
    tier:///etc/store.yaml/team/run1/step-100    the configuration in the path: an absolute path, up to the part in .yaml or .yml
    tier://prod/run1@latest                      prod.yaml, beside the configuration that the command line would find
    tier:///data/x.parquet?tier=/nvme&tier=/nfs  the tiers themselves, nearest first; for files only

NAME is empty where the path names a configuration. REFERENCE is what follows ``RUN@`` on the command line: ``latest``, ``12000``,
``best:val/loss``, ``tag:release/1``. A ``?`` that begins no such query is a letter of the path (globs have it). Values may be
percent-encoded. Programs join names to a URI: after a query that ends in ``&`` what they join is path (``…?tier=/nvme&/part-0``);
a configuration in the path needs no such care.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from urllib.parse import quote, unquote

from tierstore.config import find_config
from tierstore.errors import UsageError
from tierstore.names import Reference, check_run, check_step, parse_reference, plain_uri

__all__ = ["SCHEME", "TierPlace", "TierUri", "is_tier_uri", "locate_config", "parse_tier_uri", "split_tier_uri"]

SCHEME = "tier://"

_GRAMMAR = "write tier://[NAME]/[path/to/config.yaml/]RUN[/step-N | @REFERENCE], e.g. tier:///run1/step-100"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_STEP = re.compile(r"step-(\d{1,15})")
_COLLAPSED = re.compile(r"tier:/?(?!/)", re.IGNORECASE)
_FILE_GRAMMAR = "write tier://[NAME]/[path/to/config.yaml/]PATH, e.g. tier:///data/x.parquet, or add ?tier=/nvme&tier=s3://bucket/prefix"
_KEYS = ("config", "tier", "ack")
_QUERY = re.compile(r"\?(?:config|tier|ack)=")
_MAYBE_QUERY = re.compile(r"\?([A-Za-z]{3,12})=")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlace:
    """What a ``tier://`` URI says of the tiers, without the path.

    Attributes:
        name: The configuration's name (``NAME.yaml`` beside the usual one); empty: not given.
        config: The configuration's path, absolute where it stands in the URI's path; empty: not given.
        tiers: The tiers themselves, nearest first; empty: not given.
        ack: When a file counts as written; empty: as configured.
    """

    name: str = ""
    config: str = ""
    tiers: tuple[str, ...] = ()
    ack: str = ""

    def uri(self, path: str) -> str:
        """The URI of `path` here: `split_tier_uri` gives both back."""
        rest = path.lstrip("/")
        in_path = self.config if self.config.startswith("/") and _split_config(f"{self.config[1:]}/x")[0] == self.config else ""
        query = [*([f"config={_quoted(self.config)}"] if self.config and not in_path else [])]
        query += [f"tier={_quoted(tier)}" for tier in self.tiers]
        query += [f"ack={_quoted(self.ack)}"] if self.ack else []
        # The last '&' keeps apart what programs join to the URI of a folder.
        return f"{SCHEME}{self.name}{in_path}/{rest}{'?' + '&'.join(query) + '&' if query else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUri:
    """What a ``tier://`` URI names.

    Attributes:
        name: The configuration's name (``NAME.yaml`` beside the usual one); empty: not given.
        config: The configuration's absolute path; empty: not given.
        run: The run.
        reference: The checkpoint; None where the URI names the run alone. Its own `run` is empty.
    """

    name: str = ""
    config: str = ""
    run: str
    reference: Reference | None = None

    @property
    def step(self) -> int | None:
        """The step, where the URI names one."""
        return None if self.reference is None else self.reference.step

    def __str__(self) -> str:
        place = f"{SCHEME}{self.name}{self.config}/{self.run}"
        reference = self.reference
        if reference is None:
            return place
        if reference.step is not None:
            return f"{place}/step-{reference.step}"
        return f"{place}@{reference.selector}{':' if reference.argument else ''}{reference.argument}"


def _quoted(value: str) -> str:
    return quote(value, safe="/:@,=+~!$'()*;-._")


def is_tier_uri(value: object) -> bool:
    """Whether `value` is a ``tier://`` URI.

    Raises:
        UsageError: It was one, before `pathlib` made ``tier:/`` of it: used as a path it would make a local folder of that name.
    """
    if not isinstance(value, (str, PurePath)):
        return False
    if isinstance(value, PurePath) and _COLLAPSED.match(str(value)):
        raise UsageError(
            f"the path {str(value)!r} is a tier:// URI that pathlib has damaged ('//' became '/')",
            hint="pass the URI as a str; nothing was read or written",
        )
    return isinstance(value, str) and value[: len(SCHEME)].lower() == SCHEME


def split_tier_uri(uri: object) -> tuple[TierPlace, str]:
    """Reads a ``tier://`` URI of a file or a folder; nothing is opened.

    Returns:
        The place, and the path in it, which begins with no slash.

    Raises:
        UsageError: It is none, `pathlib` has damaged it, or a part of it is malformed.
    """
    text = plain_uri(uri) if isinstance(uri, (str, PurePath)) else ""
    if not is_tier_uri(text):
        raise UsageError(f"{str(uri)!r} is no tier:// URI", hint=_FILE_GRAMMAR)
    text, query = _split_query(text)
    name, slash, path = text[len(SCHEME) :].partition("/")
    if name and not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} can't name a configuration", hint=_FILE_GRAMMAR)
    if name and not slash and not query.joined:
        raise UsageError(f"{text!r} has no '/PATH' after {name!r}", hint=_FILE_GRAMMAR)
    config, rest = _split_config(path)
    given = [c for c in (config, query.config) if c] + ([name] if name else [])
    if len(given) > 1 or (given and query.tiers):
        raise UsageError(f"{text!r} names its tiers twice: {[*given, *query.tiers]}", hint="name a configuration, or the tiers")
    return TierPlace(name=name, config=config or query.config, tiers=query.tiers, ack=query.ack), rest + query.joined


def parse_tier_uri(uri: object) -> TierUri:
    """Reads a ``tier://`` URI of a run or a checkpoint; nothing is opened.

    Raises:
        UsageError: It is none, `pathlib` has damaged it, or a part of it is malformed.
    """
    place, rest = split_tier_uri(uri)
    if any(ord(c) < 32 or ord(c) == 127 for c in str(uri)) or "?" in rest or "#" in rest:
        raise UsageError(f"{str(uri)!r} holds control characters, a query or a fragment", hint=_GRAMMAR)
    if place.tiers or place.ack:
        raise UsageError(f"{str(uri)!r} has a query that only files take", hint="name the configuration: tier:///path/to/config.yaml/RUN")
    config = place.config
    if config and not config.startswith("/"):
        config = os.path.abspath(config)
    run, reference = _split_reference(rest)
    if not run:
        raise UsageError(f"{str(uri)!r} names no run", hint=_GRAMMAR)
    return TierUri(name=place.name, config=config, run=check_run(run), reference=reference)


def locate_config(uri: TierUri | TierPlace, *, env: Mapping[str, str] | None = None) -> str:
    """The path of the configuration that `uri` means.

    Args:
        uri: The URI.
        env: The environment; `os.environ` by default.

    Raises:
        ConfigError: It names none, and there is none where the command line looks.
        UsageError: ``NAME.yaml`` does not exist.
    """
    if uri.config:
        return uri.config
    if not uri.name:
        return os.path.abspath(find_config(env=env))
    try:
        folder = Path(find_config(env=env)).resolve().parent
    except UsageError:  # nothing usual to lie beside: the working directory is where it would lie
        folder = Path.cwd()
    for ending in (".yaml", ".yml"):
        if (folder / f"{uri.name}{ending}").is_file():
            return str(folder / f"{uri.name}{ending}")
    raise UsageError(
        f"{uri.name!r} means the configuration {uri.name}.yaml, which is not in {folder}",
        hint="write the file's path into the URI: tier:///path/to/config.yaml/RUN/step-N; or set TIERSTORE_CONFIG",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    """A URI's query; `joined` is the path that a program joined to it."""

    config: str = ""
    tiers: tuple[str, ...] = ()
    ack: str = ""
    joined: str = ""


def _split_query(text: str) -> tuple[str, _Query]:
    found = _QUERY.search(text)
    if found is None:
        for guess in _MAYBE_QUERY.finditer(text):
            if near := difflib.get_close_matches(guess[1].lower(), _KEYS, n=1, cutoff=0.7):
                raise UsageError(f"{text!r} has a query with the unknown key {guess[1]!r}", hint=f"did you mean {near[0]}=?")
        return text, _Query()
    given: dict[str, list[str]] = {key: [] for key in _KEYS}
    items = text[found.start() + 1 :].split("&")
    joined = ""
    for number, item in enumerate(items):
        if item.startswith("/") or (not item and number == len(items) - 1):
            joined = "&".join(items[number:])
            break
        key, equals, value = item.partition("=")
        if key not in given or not equals or not value:
            raise UsageError(f"{text!r} has a query in which {item!r} is no KEY=VALUE", hint=f"the keys are {', '.join(_KEYS)}")
        given[key].append(unquote(value))
    for key in ("config", "ack"):
        if len(given[key]) > 1:
            raise UsageError(f"{text!r} gives {key} twice", hint="give it once")
    single = {key: "".join(given[key]) for key in ("config", "ack")}
    return text[: found.start()], _Query(tiers=tuple(given["tier"]), joined=joined, **single)


def _split_config(path: str) -> tuple[str, str]:
    """The configuration's absolute path, and the rest; the first part that ends in .yaml or .yml and has something behind it."""
    parts = path.split("/")
    for number, part in enumerate(parts[:-1]):
        if part.lower().endswith((".yaml", ".yml")) and len(part) > 5:
            return "/" + "/".join(parts[: number + 1]).lstrip("/"), "/".join(parts[number + 1 :])
    return "", path


def _split_reference(rest: str) -> tuple[str, Reference | None]:
    rest = rest.rstrip("/")
    run, _, last = rest.rpartition("/")
    found = _STEP.fullmatch(last)
    if found and "@best:" not in rest and "@tag:" not in rest:
        return run, Reference(run="", selector="step", step=check_step(int(found[1])))
    for mark in ("@best:", "@tag:"):
        run, at, argument = rest.partition(mark)
        if at:
            return run, parse_reference(f"{mark[1:]}{argument}")
    run, at, selector = rest.rpartition("@")
    return (run, parse_reference(selector)) if at else (rest, None)
