"""Codecs for the small types that training frameworks put into their states: plain values under a tag, made anew without any pickle.

What is stored of an object is its attributes, as plain values; what is made of them again is an object of the one class that the tag
stands for. No name of a class or function comes from storage.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterable
from enum import Enum
from typing import Any

from tierstore.errors import FormatError
from tierstore.format.objects import ObjectCodecs

__all__ = ["add_codec", "register_deepspeed", "register_enums", "register_megatron", "register_plain"]


def register_plain(codecs: ObjectCodecs) -> None:
    """`argparse.Namespace` and `types.SimpleNamespace`: what scripts keep their arguments in."""
    add_codec(codecs, argparse.Namespace, "argparse.Namespace", vars, lambda value: argparse.Namespace(**value))
    add_codec(codecs, types.SimpleNamespace, "types.SimpleNamespace", vars, lambda value: types.SimpleNamespace(**value))


def register_deepspeed(codecs: ObjectCodecs) -> None:
    """What DeepSpeed's optimizers put into their states: loss scalers, the place of a parameter in a flat one, ZeRO's stage."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    for kind in (LossScaler, DynamicLossScaler, fragment_address):
        _add_attributes(codecs, kind, f"deepspeed.{kind.__name__}")
    add_codec(codecs, ZeroStageEnum, "deepspeed.ZeroStageEnum", lambda stage: int(stage.value), lambda value: ZeroStageEnum(value))


def register_megatron(codecs: ObjectCodecs) -> None:
    """The enumerations that Megatron's arguments hold."""
    from megatron.core.transformer import enums

    register_enums(codecs, "megatron", (kind for kind in vars(enums).values() if isinstance(kind, type) and issubclass(kind, Enum)))


def register_enums(codecs: ObjectCodecs, prefix: str, kinds: Iterable[type[Enum]]) -> None:
    """Enumerations by the names of their members; ``PREFIX.CLASS`` is the tag."""
    for kind in kinds:
        if kind is not Enum and list(kind):
            add_codec(codecs, kind, f"{prefix}.{kind.__name__}", lambda member: member.name, kind.__getitem__)


def add_codec(codecs: ObjectCodecs, kind: type[Any], tag: str, encode: Any, decode: Any) -> None:
    """Registers a codec where neither the type nor the tag has one."""
    if codecs.find(kind) is None and codecs.tagged(tag) is None:  # the caller's own come first
        codecs.register(kind, tag, encode, decode)


def _add_attributes(codecs: ObjectCodecs, kind: type[Any], tag: str) -> None:
    def decode(value: Any) -> Any:
        if not isinstance(value, dict) or any(not isinstance(name, str) or hasattr(kind, name) for name in value):
            raise FormatError(
                f"{tag}: {value!r} are no attributes of {kind.__name__}", hint="`tierstore verify` tells whether it is damaged"
            )
        made: Any = object.__new__(kind)
        made.__dict__.update(value)
        return made

    add_codec(codecs, kind, tag, lambda value: dict(vars(value)), decode)
