"""What a checkpoint of Lightning holds beside tensors: codecs, scores, options; what is refused, and what to do about it; devices."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import torch

from tierstore.errors import UnsupportedTypeError, UsageError
from tierstore.format.objects import ObjectCodecs
from tierstore.integrations.plain_types import add_codec, register_plain
from tierstore.state.codecs import default_codecs

__all__ = ["explained", "lightning_codecs", "load_here", "monitored", "options_of", "warn_of_link"]

log = logging.getLogger(__name__)

_OPTIONS = ("metrics", "tags", "final")


def lightning_codecs(base: ObjectCodecs | None = None) -> ObjectCodecs:
    """Codecs for what hyper-parameters often hold beside plain values: paths, `argparse.Namespace`, `datetime.timedelta`.

    Args:
        base: Codecs to add them to, e.g. with types of your own; it stays as it is. None: `default_codecs()`.
    """
    codecs = default_codecs() if base is None else base.copy()
    for kind in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath):
        add_codec(codecs, kind, f"pathlib.{kind.__name__}", str, _path_maker(kind))
    register_plain(codecs)
    add_codec(codecs, timedelta, "datetime.timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(v[0], v[1], v[2]))
    return codecs


def _path_maker(kind: type[Any]) -> Callable[[str], Any]:
    """A path of another system's kind is loaded as a pure one."""
    pure = PureWindowsPath if kind in (WindowsPath, PureWindowsPath) else PurePosixPath
    here = {"nt": WindowsPath, "posix": PosixPath}[os.name]
    return here if kind is here else pure


def monitored(checkpoint: Mapping[str, Any], path: str) -> dict[str, float]:
    """What `ModelCheckpoint` measured for this path: the scores of the callbacks whose best paths name it, by the monitored names.

    ``current_score`` is no help: it is that of the last save that came among the best.
    """
    found: dict[str, float] = {}
    callbacks = checkpoint.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and isinstance(state.get("monitor"), str) and isinstance(state.get("best_k_models"), dict):
            score = state["best_k_models"].get(path)
            if isinstance(score, (int, float, torch.Tensor)) and math.isfinite(float(score)):
                found[state["monitor"]] = float(score)
    return found


def load_here(value: Any, map_location: Any) -> Any:
    """The state with its tensors where `map_location` says, as `torch.load` understands it; ours come from the CPU."""
    if isinstance(value, torch.Tensor):
        return _moved(value, map_location)
    if isinstance(value, dict):
        moved: Any = type(value)((key, load_here(part, map_location)) for key, part in value.items())
        if (versions := getattr(value, "_metadata", None)) is not None:  # a module's state has them there
            moved._metadata = versions
        return moved
    if type(value) in (list, tuple):
        return type(value)(load_here(part, map_location) for part in value)
    return value


def _moved(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    if isinstance(map_location, (str, torch.device)):
        return tensor.to(map_location)
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get("cpu", "cpu"))
    if callable(map_location):
        found = map_location(tensor.untyped_storage(), "cpu")
        return tensor if found is None else tensor.to(found.device)
    raise UsageError(f"map_location is {map_location!r}", hint="pass a device, its name, a mapping of names, or a function")


def options_of(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or set(given) - set(_OPTIONS):
        raise UsageError(f"storage_options is {given!r}", hint='pass {"metrics": {...}, "tags": [...], "final": True}, or parts of it')
    return given


def warn_of_link(path: str) -> None:
    link = os.path.join(os.path.dirname(path), "last.ckpt")
    if "://" not in path and os.path.islink(link) and not os.path.exists(link):
        log.warning(
            "%s is a link to a file that is written once its save is committed: use save_last=True, a pointer is as small as a link", link
        )


@contextmanager
def explained() -> Iterator[None]:
    """A value that can't be stored is told with its key in Lightning's checkpoint, and what to do about it there."""
    try:
        yield
    except UnsupportedTypeError as error:
        place = str(error.context.get("path", ""))
        raise UnsupportedTypeError(error.message, hint=_remedy(place), **error.context) from error


def _remedy(place: str) -> str:
    also = "or give TierCheckpointIO(codecs=...) a codec for the type (ObjectCodecs.register)"
    keys = place.replace("']", "").replace('"]', "").split("['") if "['" in place else place.split(".")
    keys = [key.strip("'\"[]") for key in keys if key not in ("state", "")]
    head = keys[0] if keys else ""
    name = keys[1] if len(keys) > 1 else ""
    if "hyper_parameters" in head:
        what = f" {name!r}" if name else ""
        return f"keep the hyper-parameter{what} out of the checkpoint: self.save_hyperparameters(ignore=[{name or '...'!r}]), {also}"
    if head == "callbacks":
        return f"let the state_dict() of the callback {name!r} return plain values and tensors, {also}"
    if head == "lr_schedulers":
        return f"let the scheduler's state_dict() return plain values (no functions or objects), {also}"
    return (
        f"let what puts {head!r} into the checkpoint (a state_dict() or on_save_checkpoint hook) put plain values and tensors there, {also}"
    )
