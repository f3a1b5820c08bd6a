"""Tags, steps and files: what a DeepSpeed checkpoint is called in a store, and which one a load means."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo

from tierstore.errors import NotFoundError, UsageError
from tierstore.store import Store
from tierstore.tiers.catalog import CheckpointInfo
from tierstore.units import format_some

__all__ = ["ABOUT", "LATEST", "SUFFIX", "Chosen", "choose", "files_in", "name_of", "number_in", "stands_for", "within"]

log = logging.getLogger(__name__)

ABOUT = "deepspeed"
"""The key of the state under which a checkpoint says that it is one of DeepSpeed's; the other keys are its files."""

LATEST = "latest"
SUFFIX = ".pt"
_DEFAULT_TAG = re.compile(r"global_step(\d{1,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The checkpoint that all ranks load."""

    tag: str
    step: int
    save_id: str


def choose(store: Store, load_dir: str, tag: str | None) -> Chosen | None:
    """Which checkpoint is meant: `tag`, or what ``latest`` in `load_dir` names, or the newest. None: nothing says that there should be one.

    Raises:
        NotFoundError: `tag`, or all that ``latest`` could mean, is not committed.
    """
    known = store.checkpoints()
    if tag is not None:
        found = by_tag(known, tag)
        if found is None:
            raise NotFoundError(f"no checkpoint {tag!r} is committed in run {store.run!r}", hint=hint_for(known, load_dir, tag))
        return chosen_of(tag, found)
    pointer = pointer_in(load_dir)
    newest = store.latest()  # raises where it can't be known
    if newest is None:
        if pointer:
            raise NotFoundError(
                f"{os.path.join(load_dir, LATEST)} names {pointer!r}, but run {store.run!r} has no committed checkpoint",
                hint=f"{hint_for(known, load_dir, pointer)}; to begin anew remove the file `latest`",
            )
        return None
    found = by_tag(known, pointer) if pointer else newest
    if found is None:
        log.warning(
            "run=%s %s names %r, which is not committed: the newest committed checkpoint is taken, %s",
            store.run, os.path.join(load_dir, LATEST), pointer, tag_of(newest),
        )  # fmt: skip
        found = newest
    elif found.step < newest.step:
        log.warning(
            "run=%s %s names %r; %s is newer, and committed: load_checkpoint(…, tag=%r) takes it",
            store.run, os.path.join(load_dir, LATEST), pointer, tag_of(newest), tag_of(newest),
        )  # fmt: skip
    return chosen_of(tag_of(found) if not pointer or found is newest else pointer, found)


def within(path: str, info: CheckpointCommitInfo) -> str | None:
    """A file's name in the state; empty: the checkpoint's folder itself; None: it lies elsewhere."""
    if not info.tag:
        return None
    if info.save_dir:
        relative = os.path.relpath(path, os.path.join(info.save_dir, info.tag))
        return None if relative.startswith(os.pardir) else "" if relative == os.curdir else name_of(relative)
    _, found, name = path.rpartition(f"/{info.tag}/")  # an older DeepSpeed does not say the folder
    return name_of(name) if found else "" if path.endswith(f"/{info.tag}") else None


def name_of(relative: str) -> str:
    return relative.removesuffix(SUFFIX)


def files_in(tree: Mapping[str, Any]) -> list[str]:
    return [name for name in tree if name != ABOUT]


def number_in(tag: str) -> int:
    found = re.search(r"(\d{1,15})$", tag)
    if found is None:
        raise UsageError(f"the tag {tag!r} does not end in a number, which would be the step", hint="use install(), or pass step=")
    return int(found[1])


def stands_for(tag: str) -> int | None:
    """The step of a tag that DeepSpeed makes itself."""
    found = _DEFAULT_TAG.fullmatch(tag)
    return int(found[1]) if found else None


def by_tag(known: Sequence[CheckpointInfo], tag: str) -> CheckpointInfo | None:
    labelled = [info for info in known if tag in info.tags]
    if not labelled:
        labelled = [info for info in known if info.step == stands_for(tag)]
    return max(labelled, key=lambda info: (info.step, info.attempt.save_id), default=None)


def tag_of(info: CheckpointInfo) -> str:
    return f"global_step{info.step}"


def chosen_of(tag: str, info: CheckpointInfo) -> Chosen:
    return Chosen(tag=tag, step=info.step, save_id=info.attempt.save_id)


def hint_for(known: Sequence[CheckpointInfo], load_dir: str, tag: str) -> str:
    if os.path.isdir(os.path.join(load_dir, tag)):
        return f"{os.path.join(load_dir, tag)} holds files of DeepSpeed's own: call load_checkpoint before install()"
    names = [name for info in reversed(known) for name in (*info.tags, tag_of(info))]
    return f"committed are {format_some(names, 8)}" if names else "look whether it is the right store and run: `tierstore ls`"


def pointer_in(load_dir: str) -> str:
    try:
        return Path(load_dir, LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
