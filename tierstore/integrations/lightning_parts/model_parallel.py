"""The body of `TierModelParallelStrategy`: a sharded model's checkpoint is one joint save of all ranks, and loads into any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from tierstore.integrations.lightning_parts.pictures import apply_pointer
from tierstore.integrations.lightning_parts.pointers import Pointer, path_of
from tierstore.integrations.lightning_parts.saving import Body
from tierstore.state.load import LoadOptions

__all__ = ["StrategyRanks", "load_jointly", "model_state", "optimizer_state"]

_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"
_SHARDED = StateDictOptions(full_state_dict=False, cpu_offload=False)
"""The tensors themselves: the save copies them once, and marks tell a second save at one step."""


class StrategyRanks:
    """The ranks of a strategy.

    Args:
        rank: This process's.
        broadcast: Gives everybody rank 0's value.
        agree: Whether something is true on all ranks.
    """

    def __init__(self, rank: int, broadcast: Callable[[Any], Any], agree: Callable[[bool], bool]) -> None:
        self.rank = rank
        self.share = broadcast
        self.all = agree

    def asked_by_0(self, ask: Callable[[], Any]) -> Any:
        """What rank 0 finds; where it fails, everybody does."""
        found: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                found = ask()
            except Exception as failure:  # noqa: BLE001 boundary: whatever it is, the others must not wait for ever
                error = failure
        found, error = self.share((found, error))
        if error is not None:
            raise error
        return found


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state, sharded as it is."""
    return get_model_state_dict(model, options=_SHARDED)


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameters' names, sharded as it is."""
    return get_optimizer_state_dict(model, optimizer, options=_SHARDED)


def load_jointly(
    body: Body, path: object, ranks: StrategyRanks, *, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], strict: bool
) -> dict[str, Any] | None:
    """Loads into the model and the optimizers, whatever layout was saved.

    Returns:
        The rest of the checkpoint; None where `path` is no pointer of ours.
    """
    where = ranks.share(path_of(path))
    pointer: Pointer | None = ranks.asked_by_0(lambda: body.find(where))
    if pointer is None:
        return None
    store = body.store()
    reference = f"{pointer.run}@{pointer.step}"
    opened = store.open_checkpoint(reference)
    try:
        tree: Mapping[str, Any] = opened.objects
        wanted = [key for key in tree if pointer.units is None or any(unit[0] == key for unit in pointer.units)]
        into: dict[str, Any] = {key: None for key in wanted if key != _OPTIMIZERS}
        into[_MODEL] = model_state(model)
        whole = _saved_whole(tree)
        if _OPTIMIZERS in wanted and optimizers:
            into[_OPTIMIZERS] = None if whole else [optimizer_state(model, optimizer) for optimizer in optimizers]
        left_out = tuple(pattern for key in tree if key not in into for pattern in (key, f"{key}.*"))
        options = LoadOptions(allow_unexpected=left_out) if strict else LoadOptions(missing="keep", unexpected="ignore")
        state = store.load(reference, into=into, options=options)
    except BaseException:
        opened.close()
        raise
    body.going_on_from(opened)
    state = dict(state)
    model.load_state_dict(state.pop(_MODEL), strict=strict)
    for optimizer, saved in zip(optimizers, state.pop(_OPTIMIZERS, None) or (), strict=False):
        if whole:
            named = FullyShardedDataParallel.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_NAME, model)
            set_optimizer_state_dict(model, optimizer, optim_state_dict=named, options=StateDictOptions(full_state_dict=True))
        else:
            set_optimizer_state_dict(model, optimizer, optim_state_dict=saved, options=_SHARDED)
    rest = apply_pointer(pointer, state, store.codecs)
    for key in (_MODEL, _OPTIMIZERS):
        rest.pop(key, None)
    return rest


def _saved_whole(tree: Mapping[str, Any]) -> bool:
    """Whether the optimizers' states go by parameters' numbers, as a strategy of whole models saves them."""
    states = tree.get(_OPTIMIZERS) or ()
    return any(isinstance(key, int) for saved in states if isinstance(saved, Mapping) for key in saved.get("state", ()))
