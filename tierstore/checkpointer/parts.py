"""What a checkpoint of a training loop is made of: model, optimizer, whatever has a state, plain values, random states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from tierstore.checkpointer.optimizers import by_names, by_numbers, names_of, space_for
from tierstore.checkpointer.rng import capture_rng, new_stream, restore_rng
from tierstore.errors import UsageError
from tierstore.state.lazy import Checkpoint
from tierstore.state.load import LoadOptions
from tierstore.state.rank_values import RankValues
from tierstore.units import format_some

__all__ = ["Parts"]

log = logging.getLogger(__name__)

_ABOUT = "checkpointer"
_OWN = (_ABOUT, "rng", "values")
"""Keys that a checkpoint of another door lacks."""


class Parts:
    """The objects of one training loop.

    Args:
        model: Its weights and buffers are stored under ``model``, loaded in place.
        optimizer: As torch's, or whatever has a state; under ``optimizer``.
        others: Name → whatever has `state_dict` and `load_state_dict`; each under its name.
        rng: Whether random states are saved and restored.

    Raises:
        UsageError: Something has no state, or a name is taken.
    """

    def __init__(self, *, model: Any, optimizer: Any, others: Mapping[str, Any], rng: bool) -> None:
        for name, part in {"model": model, "optimizer": optimizer, **others}.items():
            if part is not None and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(
                    f"{name} is a {type(part).__qualname__}, which has no state_dict and load_state_dict",
                    hint="plain values go into ckpt.values['NAME']",
                )
        taken = sorted({"model", "optimizer", *_OWN} & set(others))
        if taken:
            raise UsageError(f"extra has {', '.join(taken)}, which is a name of the Checkpointer's own", hint="choose another name")
        if isinstance(model, torch.nn.Module) and any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise UsageError(
                "the model is wrapped by FullyShardedDataParallel (FSDP1)",
                hint="use torch.distributed.fsdp.fully_shard (FSDP2); or Store.save and Store.resume with torch's get_state_dict",
            )
        self.model, self.optimizer = model, optimizer
        self.others = {name: part for name, part in others.items() if part is not None}
        self.rng = rng
        self.values: dict[str, Any] = {}

    @property
    def sharded(self) -> bool:
        """Whether the optimizer's state can be made only by one who knows what was saved."""
        return self.optimizer is not None and self.model is not None and any(isinstance(p, DTensor) for p in self.model.parameters())

    def capture(self, step: int, world_size: int) -> dict[str, Any]:
        """The state to save; its tensors are the training's own."""
        state: dict[str, Any] = {_ABOUT: {"form": 1, "step": step, "world_size": world_size}}
        if self.model is not None:
            state["model"] = _model_state(self.model)
        if self.optimizer is not None:
            state["optimizer"] = by_names(self.optimizer, names_of(self.model))
        state.update({name: part.state_dict() for name, part in self.others.items()})
        state["values"] = dict(self.values)
        if self.rng:
            state["rng"] = capture_rng()
        return state

    def space(self, stored: Checkpoint | None) -> dict[str, Any]:
        """What is loaded into: the model's own tensors, None where a value is to come whole.

        Args:
            stored: What will be loaded; needed where `sharded`.
        """
        into: dict[str, Any] = dict.fromkeys(_OWN)
        if self.model is not None:
            into["model"] = _model_state(self.model)
        if self.optimizer is not None:
            into["optimizer"] = None if stored is None else space_for(self.optimizer, names_of(self.model), stored, "optimizer")
        into.update({name: _space(part) for name, part in self.others.items()})
        return into

    def options(self, given: LoadOptions | None) -> LoadOptions:
        """The caller's options, where the keys that only this door has may be missing and random states of other ranks are no surprise."""
        given = given or LoadOptions()
        return replace(given, allow_missing=(*given.allow_missing, *_OWN), ranks=_Taking(given.ranks))

    def restore(self, state: Mapping[str, Any], rank: int) -> None:
        """Puts a loaded state in its place; the model's tensors are filled already."""
        if self.optimizer is not None and (saved := state["optimizer"]) is not None:
            saved = by_numbers(self.optimizer, names_of(self.model), saved)  # what can be refused comes before anything is set
            self.optimizer.load_state_dict(saved)
        if self.model is not None:
            if isinstance(self.model, torch.nn.Module):
                set_model_state_dict(self.model, state["model"])
            else:
                self.model.load_state_dict(state["model"])
        for name, part in self.others.items():
            if state[name] is not None:
                part.load_state_dict(state[name])
        self.values.clear()
        self.values.update(state["values"] or {})
        if self.rng and state["rng"] is not None:
            restore_rng(state["rng"])
            saved_ranks = (state[_ABOUT] or {}).get("world_size", rank + 1)
            if rank >= saved_ranks:
                new_stream(rank)
                log.info("rank %d begins random numbers of its own: %d ranks saved this checkpoint", rank, saved_ranks)


class _Taking:
    """What a rank takes over where the saved ranks differ, for `LoadOptions.ranks`: random states without a word."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._told: list[str] = []

    def __call__(self, values: RankValues) -> Any:
        if self._given is not None:
            return self._given(values)
        if values.path.partition(".")[0] not in ("rng", _ABOUT):
            self._told.append(values.path)
        return values.default

    def warn(self) -> None:
        if self._told:
            log.warning(
                "ranks saved values that differ between them, and another number of ranks loads them: rank r takes over from saved rank r "
                "modulo their number: %s. LoadOptions(ranks=...) decides what each rank gets",
                format_some(sorted(self._told), 20),
            )


def _model_state(model: Any) -> Any:
    return get_model_state_dict(model) if isinstance(model, torch.nn.Module) else model.state_dict()


def _space(part: Any) -> Any:
    """Modules are filled in place. Nothing else is asked for a state before it has one: a data loader may begin to work when it is."""
    return part.state_dict() if isinstance(part, torch.nn.Module) else None
