"""Configuration: a YAML file, a mapping or a list of URIs becomes a `StoreConfig`, or one error that names every mistake.

This module alone reads the environment. The models are in `config_models` and `config_retention`; the keys are described in
docs/reference/configuration.md.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tierstore.config_cadence import AutoEvery, BetterEvery, DynamicEvery, SaveEvery
from tierstore.config_document import Document, expand, parse_yaml
from tierstore.config_explain import explain
from tierstore.config_mistakes import KeyPath, Mistake, config_error, is_secret, redact
from tierstore.config_models import FilesConfig, IoConfig, LoadConfig, SaveConfig, StoreConfig
from tierstore.config_retention import (
    BestRule,
    EveryRule,
    EvictConfig,
    GcConfig,
    KeepRule,
    Match,
    Override,
    ProtectConfig,
    RetentionConfig,
    RetentionOverride,
    TierRetention,
)
from tierstore.config_tiers import TierConfig
from tierstore.config_uris import default_durable, default_name, default_scope, normal_uri
from tierstore.errors import ConfigError, TierStoreError

__all__ = [
    "DEFAULT_FILE",
    "Ack",
    "AutoEvery",
    "BestRule",
    "BetterEvery",
    "DynamicEvery",
    "EveryRule",
    "EvictConfig",
    "FilesConfig",
    "GcConfig",
    "IoConfig",
    "KeepRule",
    "LoadConfig",
    "Match",
    "Override",
    "ProtectConfig",
    "RetentionConfig",
    "RetentionOverride",
    "SaveConfig",
    "SaveEvery",
    "StoreConfig",
    "TierConfig",
    "TierRetention",
    "cache_folder",
    "files_ack",
    "find_config",
    "is_secret",
    "load_config",
    "progress_wanted",
    "redact",
]

DEFAULT_FILE = "tierstore.yaml"
"""What `find_config` looks for in the working directory."""

Ack = Literal["nearest", "authority", "durable"]
"""When closing a written file returns: once it is on the nearest tier that takes it, on the authority, or on `durable_at`."""

_LOOKED_AT = 64 << 10
"""Characters of a file that are looked at to see whether it may be a configuration."""

_MAX_FILE_NBYTES = 2**20
_IN_CODE = "the configuration"


@dataclass(slots=True)
class _Draft:
    """A configuration on its way: the plain value, and where each part of it came from."""

    value: Any
    folder: str = ""
    subject: str = _IN_CODE
    mistakes: list[Mistake] = field(default_factory=list)
    documents: dict[KeyPath, Document] = field(default_factory=dict)

    def placed(self, mistake: Mistake) -> Mistake:
        """`mistake` with the file and line that it stands in; its path is the one within that file."""
        if mistake.file:
            return mistake
        for prefix in sorted(self.documents, key=len, reverse=True):
            if mistake.path[: len(prefix)] == prefix:
                document, path = self.documents[prefix], mistake.path[len(prefix) :]
                return Mistake(
                    path=path,
                    reason=mistake.reason,
                    remedy=mistake.remedy,
                    value=mistake.value,
                    file=document.name,
                    line=document.line(path),
                )
        return mistake


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | Sequence[str | os.PathLike[str] | Mapping[str, Any]] | StoreConfig,
    *,
    run: str | None = None,
    retention: str | os.PathLike[str] | Mapping[str, Any] | RetentionConfig | None = None,
    env: Mapping[str, str] | None = None,
) -> StoreConfig:
    """Reads and checks a configuration. Nothing is opened but its files.

    Args:
        source: The path of a YAML file; or the same as a mapping; or a list of tiers, nearest first, each a URI or a mapping;
            or a `StoreConfig`, which is returned, with `run` if given.
        run: The run's name. It wins over ``TIERSTORE_RUN``, which wins over the file.
        retention: A retention policy instead of the one in `source`: the path of a YAML file, or a mapping.
        env: The environment; `os.environ` by default.

    Raises:
        ConfigError: Every mistake, with file, line, key, value, reason and remedy (``context["mistakes"]`` for machines).
    """
    env = os.environ if env is None else env
    if isinstance(source, StoreConfig):
        if run is None and retention is None:
            return source
        draft = _Draft(value={name: getattr(source, name) for name in StoreConfig.model_fields})
        draft.value["run"] = run or source.run
        if retention is not None:
            _insert_retention(draft, retention, env)
        return _validate(draft)
    draft = _read(source, env)
    _fail_if_unreadable(draft)
    if retention is not None:
        _insert_retention(draft, retention, env)
    elif isinstance(draft.value.get("retention"), (str, os.PathLike)):
        _insert_retention(draft, draft.value["retention"], env, draft.folder)
    for chosen, name in ((run, "the run argument"), (env.get("TIERSTORE_RUN"), "TIERSTORE_RUN")):
        if chosen:
            draft.value["run"] = chosen
            draft.documents[("run",)] = Document(name=name)
            break
    _complete_tiers(draft, env)
    return _validate(draft)


def find_config(explicit: str | os.PathLike[str] | None = None, *, env: Mapping[str, str] | None = None) -> str:
    """The path of the configuration file: `explicit`, else ``TIERSTORE_CONFIG``, else ``tierstore.yaml`` in the working directory.

    Raises:
        ConfigError: There is none.
    """
    env = os.environ if env is None else env
    chosen = os.fspath(explicit) if explicit else env.get("TIERSTORE_CONFIG", "")
    if chosen:
        return chosen
    if Path(DEFAULT_FILE).is_file():
        return DEFAULT_FILE
    others = _configurations_here()
    hint = "name one with -c FILE, or the tiers with --tier PATH_OR_URI each; docs/reference/configuration.md has a file to copy"
    raise ConfigError(
        f"no configuration: there is no {DEFAULT_FILE} in {Path.cwd()}, and TIERSTORE_CONFIG is not set",
        hint=f"did you mean -c {others[0]}? Else {hint}" if others else hint,
    )


def progress_wanted(env: Mapping[str, str] | None = None) -> bool:
    """Whether a terminal gets progress bars: unless ``TIERSTORE_PROGRESS`` is ``0``, ``no``, ``off`` or ``false``, or TERM is ``dumb``."""
    env = os.environ if env is None else env
    return env.get("TIERSTORE_PROGRESS", "").strip().lower() not in ("0", "no", "off", "false") and env.get("TERM") != "dumb"


def cache_folder(*, env: Mapping[str, str] | None = None) -> Path | None:
    """Where this machine keeps what can be read again: ``tierstore`` in ``XDG_CACHE_HOME``, else in ``~/.cache``; None without a home."""
    env = os.environ if env is None else env
    chosen, home = env.get("XDG_CACHE_HOME", ""), env.get("HOME", "")
    if os.path.isabs(chosen):  # as the XDG base directory specification says: a relative one is not used
        return Path(chosen) / "tierstore"
    return Path(home) / ".cache" / "tierstore" if os.path.isabs(home) else None


def files_ack(config: StoreConfig, *, env: Mapping[str, str] | None = None) -> Ack:
    """What ``files: {ack: …}`` means in this process.

    ``auto`` is ``authority`` where the job spans several nodes, as its launcher tells (``WORLD_SIZE`` exceeds ``LOCAL_WORLD_SIZE``): what
    one node writes, others look for as soon as they meet at a barrier.
    """
    if config.files.ack != "auto":
        return config.files.ack
    env = os.environ if env is None else env
    world, local = env.get("WORLD_SIZE", ""), env.get("LOCAL_WORLD_SIZE", "")
    spans = world.isascii() and world.isdigit() and local.isascii() and local.isdigit() and int(world) > int(local)
    return "authority" if spans else "nearest"


def _configurations_here() -> list[str]:
    """Files of the working directory that have tiers, for a hint: what can't be read is none."""
    found = []
    for path in sorted((*Path().glob("*.yaml"), *Path().glob("*.yml"))):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            if re.search(r"^tiers:", file.read(_LOOKED_AT), re.MULTILINE):
                found.append(path.name)
    return found


def _read(source: Any, env: Mapping[str, str]) -> _Draft:
    """The plain value of `source`, with variables expanded."""
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if "://" in path:
            raise ConfigError(f"{redact(path)!r} is a URI, not a configuration file", hint="pass a list of URIs: [URI, …]")
        document = _read_file(path)
        draft = _Draft(value=document.value, folder=str(Path(path).resolve().parent), subject=path, documents={(): document})
        if not document.mistakes and not isinstance(document.value, dict):
            document.complain((), "a configuration is a mapping with at least the key 'tiers'", "see docs/reference/configuration.md", 1)
    elif isinstance(source, Mapping):
        draft = _Draft(value=dict(source))
    elif isinstance(source, Sequence):
        draft = _Draft(value={"tiers": list(source)})
    else:
        raise ConfigError(
            f"a configuration can't be a {type(source).__name__}", hint="pass a YAML file's path, a list of URIs, or a mapping"
        )
    draft.value, mistakes = expand(draft.value, env)
    draft.mistakes += mistakes
    return draft


def _read_file(path: str, what: str = "configuration") -> Document:
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE_NBYTES + 1)
        if len(data) > _MAX_FILE_NBYTES:
            raise ConfigError(f"{path} is larger than 1MiB: that is no configuration", hint="name the YAML file")
        return parse_yaml(data.decode("utf-8"), path)
    except FileNotFoundError as error:
        siblings = sorted(p.name for p in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, siblings, n=1)
        hint = f"did you mean {file.parent / near[0]}?" if near else "check the path; it is relative to the working directory"
        if what != "configuration":
            hint = "`retention:` names it, by a path relative to the file that says so"
        raise ConfigError(f"there is no {what} file {path}", hint=hint, file=path) from error
    except IsADirectoryError as error:
        hint = "name a YAML file; to use the folder as a tier pass a list: [PATH]"
        raise ConfigError(f"{path} is a folder, not a configuration file", hint=hint, file=path) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", hint="save it as UTF-8", file=path) from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", hint="check the file and its permissions", file=path) from error


def _insert_retention(draft: _Draft, retention: Any, env: Mapping[str, str], folder: str = "") -> None:
    """Puts a policy from its own file (relative to `folder`), from a mapping or from a model in its place."""
    document = Document(name="the retention argument", value=retention)
    if isinstance(retention, (str, os.PathLike)):
        document = _read_file(os.path.join(folder, os.fspath(retention)), "retention policy")
        if not document.mistakes and not isinstance(document.value, dict):
            document.complain((), "a retention policy is a mapping with at least the key 'keep'", "write e.g. keep: [{last: 5}]", 1)
    draft.documents[("retention",)] = document
    _fail_if_unreadable(draft)
    draft.value["retention"], mistakes = expand(document.value, env, ("retention",))
    draft.mistakes += mistakes


def _complete_tiers(draft: _Draft, env: Mapping[str, str]) -> None:
    """Makes every entry of `tiers` a mapping with name, uri, scope and durable, where its URI is good enough to tell."""
    tiers = draft.value.get("tiers")
    if not isinstance(tiers, (list, tuple)):
        return
    entries: list[Any] = []
    for i, tier in enumerate(tiers):
        entry = {"uri": tier} if isinstance(tier, (str, os.PathLike)) else dict(tier) if isinstance(tier, Mapping) else tier
        entries.append(entry)
        if not isinstance(entry, dict) or "uri" not in entry or any(m.path == ("tiers", i, "uri") for m in draft.mistakes):
            continue
        try:
            entry["uri"] = normal_uri(_at_home(entry["uri"], env), draft.folder)
        except TierStoreError as error:
            path = ("tiers", i, "uri")
            draft.mistakes.append(Mistake(path=path, value=str(entry["uri"]), reason=error.message, remedy=error.hint))
            entry["uri"] = f"/refused/{i}"  # stands in, so that the other keys of this tier are checked too
    taken = {e["name"] for e in entries if isinstance(e, dict) and isinstance(e.get("name"), str)}
    for i, entry in enumerate(entries):
        if isinstance(entry, dict):
            uri = str(entry.get("uri", f"/missing/{i}"))  # the missing key is reported, what it would have told is not
            entry.setdefault("scope", default_scope(uri, i, len(entries)))
            entry.setdefault("durable", default_durable(uri))
            if "name" not in entry:
                entry["name"] = default_name(uri, "node" if entry["scope"] == "node" else "shared", taken)
                taken.add(entry["name"])
    draft.value["tiers"] = entries


def _at_home(uri: Any, env: Mapping[str, str]) -> Any:
    """Expands a leading ``~``, which a shell does for an argument and nobody does in a file."""
    if isinstance(uri, str) and (uri == "~" or uri.startswith("~/")) and env.get("HOME"):
        return env["HOME"] + uri[1:]
    return uri


def _validate(draft: _Draft) -> StoreConfig:
    """The model, or all mistakes: those found on the way here, and pydantic's, but for the ones that only follow from the former."""
    told = [m for document in draft.documents.values() for m in document.mistakes]
    blamed = {m.path for m in draft.mistakes} | {(*prefix, *m.path) for prefix, d in draft.documents.items() for m in d.mistakes}
    try:
        config = StoreConfig.model_validate(draft.value, by_alias=True, by_name=False, context={"document": True})
    except ValidationError as error:
        follows = [m for m in explain(error, StoreConfig) if not any(m.path[: len(path)] == path for path in blamed)]
        draft.mistakes += follows
    else:
        if not draft.mistakes and not told:
            return config
    placed = [*told, *map(draft.placed, draft.mistakes)]
    # Nothing is chained: pydantic's error would show the input, secrets included.
    raise config_error(sorted(placed, key=lambda m: (m.file, m.line or 0)), draft.subject)


def _fail_if_unreadable(draft: _Draft) -> None:
    """Stops at a text that gave no mapping: everything after it would be noise."""
    for document in draft.documents.values():
        if document.mistakes and not isinstance(document.value, dict):
            raise config_error(document.mistakes, document.name)
