"""An optimizer's state by the names of the parameters instead of their numbers, so that it does not depend on the layout.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: ``state`` by name, and ``param_groups`` whose
``params`` are names. Unlike it, nothing is asked of the optimizer but `state_dict`: no step with empty gradients makes the state of
parameters that were never trained, and where parameters are sharded the shape of the state is read off the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tierstore.errors import StateMismatchError
from tierstore.format.objects import TensorRef
from tierstore.state.bits import torch_dtype
from tierstore.state.lazy import Checkpoint
from tierstore.state.stored_kinds import is_omitted
from tierstore.units import format_some

__all__ = ["by_names", "by_numbers", "names_of", "space_for"]

_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))
"""What torch.compile and activation checkpointing put into the names of parameters."""

_LATER = frozenset({"capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"})
"""What torch has added to its optimizers' groups in the course of time; a state that was saved before has none of it."""


def names_of(model: torch.nn.Module | None) -> dict[int, str]:
    """The id of each parameter → its name, as `get_model_state_dict` has it."""
    while isinstance(model, torch.nn.Module) and (inner := getattr(model, "_orig_mod", None)) is not None:
        model = inner
    if isinstance(model, DistributedDataParallel):
        return names_of(model.module)
    if model is None:
        return {}
    return {id(p): ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name, p in model.named_parameters()}


def by_names(optimizer: Any, names: Mapping[int, str]) -> Any:
    """The state of `optimizer`, with names; as it is where it is not built as torch's optimizers are."""
    state = optimizer.state_dict()
    if not _is_torch_s(optimizer):
        return state
    order = [name for group in _order(optimizer, names) for name in group]
    return {
        **state,
        "state": {order[key] if isinstance(key, int) else key: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]],
    }


def by_numbers(optimizer: Any, names: Mapping[int, str], saved: Any) -> Any:
    """What `optimizer.load_state_dict` takes, of what `by_names` or `state_dict` returned.

    Raises:
        StateMismatchError: The optimizer is of another kind, or has other groups or parameters, than the one that was saved; names them.
    """
    if not (_is_torch_s(optimizer) and isinstance(saved, dict) and "param_groups" in saved):
        return saved
    stored = [name for group in saved["param_groups"] for name in group["params"]]
    if any(isinstance(name, int) for name in stored):
        return saved
    groups = _order(optimizer, names)
    if len(groups) != len(saved["param_groups"]):
        raise StateMismatchError(
            f"the optimizer has {len(groups)} groups of parameters, the one that was saved has {len(saved['param_groups'])}",
            hint="make the optimizer as it was made for the run that saved it",
        )
    for group in saved["param_groups"]:
        lacking = sorted(set(getattr(optimizer, "defaults", ())) - set(group) - _LATER)
        if lacking:
            raise StateMismatchError(
                f"the optimizer that was saved is of another kind than this {type(optimizer).__name__}: its groups have no "
                f"{format_some(lacking, 8)}",
                hint="make the optimizer as it was made for the run that saved it",
            )
    order = [name for group in groups for name in group]
    missing, unexpected = tuple(sorted(set(order) - set(stored))), tuple(sorted(set(stored) - set(order)))
    if missing or unexpected:
        told = [f"it has {format_some(missing, 8)}, which the saved one had not"] if missing else []
        told += [f"the saved one had {format_some(unexpected, 8)}"] if unexpected else []
        raise StateMismatchError(
            f"the optimizer is over other parameters than the one that was saved: {'; '.join(told)}",
            hint="make the optimizer as it was made for the run that saved it",
            missing=missing,
            unexpected=unexpected,
        )
    numbers = {name: number for number, name in enumerate(order)}
    return {
        **saved,
        "state": {numbers.get(key, key): value for key, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in own]} for group, own in zip(saved["param_groups"], groups, strict=True)
        ],
    }


def space_for(optimizer: Any, names: Mapping[int, str], stored: Checkpoint, key: str) -> Any:
    """A state to be filled that is sharded as the parameters are; None, "load it whole", where they are not.

    Args:
        optimizer: Has no state yet, as a rule.
        names: See `names_of`.
        stored: What will be loaded.
        key: Where the optimizer's state is in it.
    """
    if not _is_torch_s(optimizer):
        return None
    shards = {names.get(id(p), ""): p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)}
    tree = stored.objects.get(key)
    if not shards or not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
        return None
    return {
        **dict.fromkeys(tree),
        "state": {
            name: {inner: _space(value, shards[name], stored) for inner, value in values.items()} if name in shards else None
            for name, values in tree["state"].items()
        },
    }


def _space(value: Any, parameter: DTensor, stored: Checkpoint) -> Any:
    if is_omitted(value):  # left out of the checkpoint: filled by a rule of the load's, or missing
        dtype, shape = torch_dtype(value.value["dtype"]), torch.Size(value.value["shape"])
    elif isinstance(value, TensorRef):
        dtype, shape = stored[value.name].dtype, stored[value.name].shape
    else:
        return None
    return torch.empty_like(parameter.detach(), dtype=dtype) if shape == parameter.shape else None


def _is_torch_s(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "param_groups", None), list)


def _order(optimizer: Any, names: Mapping[int, str]) -> list[list[str]]:
    """The names of each group's parameters, in the order in which torch numbers them; those outside of the model are numbered."""
    return [list(_names(number, group["params"], names)) for number, group in enumerate(optimizer.param_groups)]


def _names(number: int, parameters: Any, names: Mapping[int, str]) -> Iterator[str]:
    for at, parameter in enumerate(parameters):
        yield names.get(id(parameter), f"group{number}.{at}")
