"""Where a writer or reader is pointed: a configuration, a run, and a checkpoint of it; and what a ``checkpoint_id`` changes of that."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from tierstore.config import StoreConfig, load_config
from tierstore.errors import UsageError
from tierstore.names import Reference, check_step, parse_reference
from tierstore.tier_uri import TierUri, is_tier_uri, locate_config, parse_tier_uri

__all__ = ["Place", "moved", "place_of"]

_STEP = re.compile(r"step-(\d{1,15})")
_HINT = "pass 'tier:///RUN/step-N', or, where the run is known, 'step-N' or N"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store's configuration with its run, and the checkpoint that is meant.

    Attributes:
        config: The configuration; its `run` is the one that is meant.
        file: The file that it was read from, as an absolute path; empty where it was given as a value.
        reference: The checkpoint; None: none was named yet.
    """

    config: StoreConfig
    file: str = ""
    reference: Reference | None = None

    @property
    def run(self) -> str:
        if self.config.run is None:
            raise UsageError("no run is known", hint="pass run='NAME' or a tier:// URI with the run, or set run: in the configuration")
        return self.config.run

    @property
    def step(self) -> int:
        """The step to save.

        Raises:
            UsageError: None was named.
        """
        if self.reference is None or self.reference.step is None:
            raise UsageError(f"no step is known to save run {self.config.run!r} as", hint=f"{_HINT} as checkpoint_id")
        return self.reference.step

    def __str__(self) -> str:
        return str(TierUri(config=self.file, run=self.config.run or "?", reference=self.reference))


def place_of(source: Any, run: str | None = None) -> Place:
    """Reads what a writer or reader was made with; only a configuration file is opened.

    Args:
        source: A ``tier://`` URI, or a configuration in any form that `tierstore.open` takes.
        run: The run, where `source` does not say it.

    Raises:
        UsageError: A malformed URI, or two different runs.
        ConfigError: The configuration is wrong or missing.
    """
    if not is_tier_uri(source):
        file = os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else ""
        return Place(config=load_config(source, run=run), file=file)
    uri = parse_tier_uri(source)
    if run is not None and run != uri.run:
        raise UsageError(f"run={run!r}, but {str(uri)!r} names the run {uri.run!r}", hint="name the run once")
    file = locate_config(uri)
    return Place(config=load_config(file, run=uri.run), file=file, reference=uri.reference)


def moved(place: Place | None, checkpoint_id: Any) -> Place:
    """What `checkpoint_id` means for a writer or reader at `place`: another run or checkpoint of the same configuration.

    Raises:
        UsageError: It names nothing, or another configuration than `place`.
    """
    if is_tier_uri(checkpoint_id):
        if place is None:
            return place_of(checkpoint_id)
        uri = parse_tier_uri(checkpoint_id)
        if (uri.config or uri.name) and locate_config(uri) != place.file:
            raise UsageError(
                f"{str(uri)!r} names another configuration than the one in use ({place.file or 'given as a value'})",
                hint=f"leave the configuration out of the URI: tier:///{uri.run}/step-N, or make another writer or reader",
            )
        return Place(config=load_config(place.config, run=uri.run), file=place.file, reference=uri.reference)
    if place is None:
        raise UsageError(f"{checkpoint_id!r} names no configuration", hint=_HINT)
    return Place(config=place.config, file=place.file, reference=_reference(checkpoint_id))


def _reference(checkpoint_id: Any) -> Reference:
    if isinstance(checkpoint_id, int):
        return Reference(run="", selector="step", step=check_step(checkpoint_id))
    text = str(checkpoint_id) if isinstance(checkpoint_id, (str, PurePath)) else ""
    found = _STEP.fullmatch(text)
    if found:
        return Reference(run="", selector="step", step=int(found[1]))
    try:
        reference = parse_reference(text)
    except UsageError as error:
        raise UsageError(f"checkpoint_id {checkpoint_id!r} names no checkpoint", hint=_HINT) from error
    if reference.run:
        raise UsageError(f"checkpoint_id {checkpoint_id!r} names a run without tier://", hint=_HINT)
    return reference
