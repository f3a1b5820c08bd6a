"""``tierstore complete-names``: what a shell's completion asks for: names of tiers, runs and checkpoints. Quick, and quiet on errors.

It does not go through the command line: that takes a quarter of a second to load. Of a store only folders of this machine are listed,
which are there in milliseconds; where it has none, its storage is asked, for a second and a half at most.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tierstore.config import StoreConfig, find_config, load_config

__all__ = ["answer", "main"]

_REMOTE_S = 1.5
_MOST = 200
_SELECTORS = ("latest",)


def main(arguments: Sequence[str]) -> None:
    """Prints the names, separated by blanks, and ends the process; nothing where something is wrong."""
    told: list[str] = []

    def ask() -> None:
        try:
            told.extend(answer(arguments))
        except Exception:  # noqa: BLE001 - boundary: somebody pressed Tab, and nothing that is wrong now is to be said
            told.clear()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_REMOTE_S * 2)
    sys.stdout.write(" ".join(told[:_MOST]))
    sys.stdout.flush()
    os._exit(0)  # a storage that does not answer has threads that would be waited for


def answer(arguments: Sequence[str]) -> list[str]:
    """The names for ``[-c FILE] [--tier URI]… [--run RUN] tiers|runs|refs [BEGINNING]``."""
    given: dict[str, list[str]] = {"-c": [], "--tier": [], "--run": []}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in given:
            given[word].append(next(words, ""))
        else:
            rest.append(word)
    kind, beginning = rest[0], rest[1] if len(rest) > 1 else ""
    source = given["--tier"] or find_config(given["-c"][-1] if given["-c"] else None)
    config = load_config(source, run=given["--run"][-1] if given["--run"] else None)
    if kind == "tiers":
        return [tier.name for tier in config.tiers]
    if kind == "runs":
        return sorted(_runs(config))
    return _references(config, beginning)


def _references(config: StoreConfig, beginning: str) -> list[str]:
    """``RUN@`` for each run, and behind that the steps, newest first; of the configuration's own run also without its name."""
    run, at, _ = beginning.partition("@")
    if at:
        prefix, wanted = f"{run}@", run or config.run or ""
        found = [wanted] if wanted else sorted(_runs(config))[:1]
        return [f"{prefix}{selector}" for selector in (*_SELECTORS, *(str(step) for name in found for step in _steps(config, name)))]
    own = [str(step) for step in _steps(config, config.run)] if config.run and (beginning.isdigit() or not beginning) else []
    return [*_SELECTORS, *own, *(f"{name}@" for name in sorted(_runs(config)))]


def _folders(config: StoreConfig) -> list[Path]:
    """The local tiers, the one that decides first."""
    found = []
    for tier in (config.authority, *config.tiers):
        scheme = urlsplit(tier.uri).scheme
        path = Path(urlsplit(tier.uri).path if scheme == "file" else tier.uri)
        if scheme in ("", "file") and path.is_dir():
            found.append(path)
    return found


def _runs(config: StoreConfig) -> set[str]:
    folders = _folders(config)
    if not folders:
        return set(_ask_storage(config, None))
    return {name for folder in folders for name in _runs_below(folder, "", 0)}


def _runs_below(root: Path, name: str, depth: int) -> Iterator[str]:
    folder = root / name if name else root
    if (folder / ".log").is_dir() and name:
        yield name
    if depth < 6:
        for entry in os.scandir(folder):
            if entry.is_dir() and not entry.name.startswith((".", "step-")):
                yield from _runs_below(root, f"{name}/{entry.name}" if name else entry.name, depth + 1)


def _steps(config: StoreConfig, run: str) -> list[int]:
    folders = _folders(config)
    names = [n for f in folders for n in _listed(f / run / ".log")] if folders else _ask_storage(config, run)
    found = {int(part[1]) for name in names if len(part := name.split("-")) == 3 and part[0] == "step" and part[1].isdigit()}
    return sorted(found, reverse=True)


def _listed(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _ask_storage(config: StoreConfig, run: str | None) -> list[str]:
    """The names of runs, or of a run's attempts, on the tier that decides; where it is no folder of this machine."""
    from tierstore.storage.loop import EventLoop  # slow to load, and only for a store without a local tier
    from tierstore.tiers.opening import default_opener

    loop = EventLoop()
    storage = default_opener(config.authority, config)
    listing = loop.run(storage.children(f"{run}/.log" if run else ""), _REMOTE_S)
    return [name.rpartition("/")[2] for name in listing.folders if not name.startswith(".")]
