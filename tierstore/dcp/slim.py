"""A state without the bytes of what a save leaves out: so that staging it (``async_save``) copies only what is saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tierstore.state.differences import selected
from tierstore.state.paths import Place, name_of
from tierstore.state.sharded import is_spread

__all__ = ["slim"]


def slim(state: dict[str, Any], omit: Sequence[str]) -> dict[str, Any]:
    """A state like `state`, which is not changed; in the tensors that `omit` names all elements are one, for nobody looks at their values.

    Args:
        state: What DCP is to save: it flattens dicts, and lists; what lies in other containers stays.
        omit: Globs of the tensors' dotted names.
    """
    made: dict[str, Any] = _slim(state, (), omit) if omit else state
    return made


def _slim(value: Any, place: Place, omit: Sequence[str]) -> Any:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        made = kind((key, _slim(item, (*place, key), omit)) for key, item in value.items())
        return made if any(made[key] is not value[key] for key in value) else value
    if kind is list:
        items = [_slim(item, (*place, number), omit) for number, item in enumerate(value)]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return _stand_in(value) if isinstance(value, torch.Tensor) and selected(name_of(place), omit) else value


def _stand_in(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return value  # of another mesh: there is nothing of it here
        local = _one(value.to_local())
        made: torch.Tensor = DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        return made
    ordinary = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not is_spread(value)
    return _one(value) if ordinary else value


def _one(value: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=value.dtype, device="cpu").expand(value.shape)
