"""``tier://`` URIs: one text that names a configuration, a run, and a step or a reference.

::

    tier://[NAME]/[path/to/config.yaml/]RUN[/step-N | @REFERENCE]

    tier:///run1/step-100                        the configuration that the command line would find
    tier:///etc/store.yaml/team/run1/step-100    the configuration in the path: an absolute path, up to the part in .yaml or .yml
    tier://prod/run1@latest                      prod.yaml, beside the configuration that the command line would find

NAME is empty where the path names a configuration. REFERENCE is what follows ``RUN@`` on the command line: ``latest``, ``12000``,
``best:val/loss``, ``tag:release/1``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from tierstore.config import find_config
from tierstore.errors import UsageError
from tierstore.names import Reference, check_run, check_step, parse_reference, plain_uri

__all__ = ["SCHEME", "TierUri", "is_tier_uri", "locate_config", "parse_tier_uri"]

SCHEME = "tier://"

_GRAMMAR = "write tier://[NAME]/[path/to/config.yaml/]RUN[/step-N | @REFERENCE], e.g. tier:///run1/step-100"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_STEP = re.compile(r"step-(\d{1,15})")
_COLLAPSED = re.compile(r"tier:/?(?!/)", re.IGNORECASE)


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


def parse_tier_uri(uri: object) -> TierUri:
    """Reads a ``tier://`` URI; nothing is opened.

    Raises:
        UsageError: It is none, `pathlib` has damaged it, or a part of it is malformed.
    """
    text = plain_uri(uri) if isinstance(uri, (str, PurePath)) else ""
    if not is_tier_uri(text):
        raise UsageError(f"{str(uri)!r} is no tier:// URI", hint=_GRAMMAR)
    if any(ord(c) < 32 or ord(c) == 127 for c in text) or "?" in text or "#" in text:
        raise UsageError(f"{text!r} holds control characters, a query or a fragment", hint=_GRAMMAR)
    name, slash, path = text[len(SCHEME) :].partition("/")
    if not slash or (name and not _NAME.fullmatch(name)):
        raise UsageError(f"{text!r} has no '/RUN' after {name!r}" if not slash else f"{name!r} can't name a configuration", hint=_GRAMMAR)
    config, rest = _split_config(path)
    if name and config:
        raise UsageError(f"{text!r} names a configuration twice: {name!r} and {config!r}", hint="leave NAME empty: tier:///path/…")
    run, reference = _split_reference(rest)
    if not run:
        raise UsageError(f"{text!r} names no run", hint=_GRAMMAR)
    return TierUri(name=name, config=config, run=check_run(run), reference=reference)


def locate_config(uri: TierUri, *, env: Mapping[str, str] | None = None) -> str:
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
        f"{str(uri)!r} means the configuration {uri.name}.yaml, which is not in {folder}",
        hint="write the file's path into the URI: tier:///path/to/config.yaml/RUN/step-N; or set TIERSTORE_CONFIG",
    )


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
