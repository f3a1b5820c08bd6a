"""Turns pydantic's findings into mistakes that a person can act on: the reason in our words, and a remedy that can be pasted."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tierstore.config_mistakes import ABSENT, KeyPath, Mistake, MistakesError
from tierstore.config_tiers import TierConfig
from tierstore.errors import TierStoreError

__all__ = ["explain"]

_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "float_parsing": "a plain number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def explain(error: ValidationError, model: type[BaseModel]) -> Iterator[Mistake]:
    """Yields one mistake for each of pydantic's errors about `model`, in their order."""
    details = error.errors(include_url=False)
    for detail in details:
        path: KeyPath = detail["loc"]
        if detail["type"] == "too_short" and any(len(d["loc"]) > len(path) and d["loc"][: len(path)] == path for d in details):
            continue  # pydantic counts only the good items of a list; the bad ones are told one by one
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, MistakesError):
            yield from (replace(mistake, path=(*path, *mistake.path)) for mistake in cause.mistakes)
            continue
        kind, value = detail["type"], detail["input"]
        if isinstance(value, BaseModel) or (kind == "value_error" and isinstance(value, dict)):
            value = ABSENT  # the mistake is about the keys in it
        if isinstance(cause, TierStoreError):
            yield Mistake(path=path, value=value, reason=cause.message, remedy=cause.hint)
        elif cause is not None:
            yield Mistake(path=path, value=value, reason=str(cause), remedy=_by_example(model, path))
        elif kind == "extra_forbidden":
            yield Mistake(path=path, value=value, reason="unknown key", remedy=_known_keys(model, path))
        elif kind == "missing":
            yield Mistake(path=path, reason="missing", remedy=_by_example(model, path, "add"))
        elif path == ("version",):
            yield Mistake(path=path, value=value, reason="this tierstore reads version 1", remedy="write version: 1, or upgrade tierstore")
        elif kind == "literal_error":
            yield _wrong_word(model, path, value)
        elif kind in _KINDS:
            yield Mistake(path=path, value=value, reason=f"must be {_KINDS[kind]}", remedy=_quoted(model, path, value, kind))
        elif kind in ("too_short", "string_too_short"):
            remedy = "give at least one, or leave the key out: an empty one is never taken for 'everything' or 'nothing'"
            yield Mistake(path=path, value=value, reason="it is empty", remedy=remedy)
        else:
            reason = detail["msg"].replace("Input should be", "must be").replace("Value error, ", "")
            yield Mistake(path=path, value=value, reason=reason, remedy=_by_example(model, path))


def _wrong_word(model: type[BaseModel], path: KeyPath, value: Any) -> Mistake:
    words = _literals(_annotation(model, path))
    shown = ", ".join("true" if w is True else str(w) for w in words)
    if words == [True]:
        return Mistake(path=path, value=value, reason="can only be true", remedy="leave the rule out instead")
    near = difflib.get_close_matches(str(value), [str(w) for w in words], n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"write {_key(path)}: {words[0]}" if words else "see docs/reference/configuration.md"
    return Mistake(path=path, value=value, reason=f"must be {'one of ' if len(words) > 1 else ''}{shown}", remedy=remedy)


def _known_keys(model: type[BaseModel], path: KeyPath) -> str:
    owner = _model(_annotation(model, path[:-1]))
    if owner is None:
        return "remove it"
    keys = [field.alias or name for name, field in owner.model_fields.items()]
    near = difflib.get_close_matches(str(path[-1]), keys, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if owner is TierConfig:
        return f"settings of the storage itself (endpoint_url, key, profile …) go under options; the keys here are {', '.join(keys)}"
    return f"the keys here are {', '.join(keys)}"


def _quoted(model: type[BaseModel], path: KeyPath, value: Any, kind: str) -> str:
    if kind == "string_type" and value is not None and not isinstance(value, (dict, list, bool)):
        return f'quote it: {_key(path)}: "{value}"'
    if _KINDS[kind] == "a mapping":
        owner = _model(_annotation(model, path))
        if owner is not None:
            return f"give it keys: {', '.join(field.alias or name for name, field in owner.model_fields.items())}"
    if _KINDS[kind] == "a list":
        example = _example(_annotation(model, path))
        return f"write it as a list, e.g. {_key(path)}: {example if example is not None else '[…]'}"
    return _by_example(model, path)


def _by_example(model: type[BaseModel], path: KeyPath, verb: str = "write e.g.") -> str:
    example = _example(_annotation(model, path))
    if example is None:
        words = _literals(_annotation(model, path))
        flag = bool in _options(_annotation(model, path))
        example = "true" if flag else words[0] if words else None
    return f"{verb} {_key(path)}: {example}" if example is not None else "docs/reference/configuration.md describes this key"


def _key(path: KeyPath) -> str:
    names = [step for step in path if isinstance(step, str)]
    return names[-1] if names else "tiers"


def _annotation(model: type[BaseModel], path: KeyPath) -> Any:
    """The type of what stands at `path` below `model`; None where the models do not say."""
    here: Any = model
    for step in path:
        here = _inner(here, step)
    return here


def _inner(annotation: Any, step: str | int) -> Any:
    for option in _options(annotation):
        if get_origin(option) is tuple and isinstance(step, int):
            return get_args(option)[0]
        if get_origin(option) is dict and isinstance(step, str):
            return get_args(option)[1]
        if isinstance(option, type) and issubclass(option, BaseModel):
            for name, info in option.model_fields.items():
                if step in (name, info.alias):
                    return _with_info(info)
    return None


def _with_info(info: FieldInfo) -> Any:
    return Annotated[info.annotation, info] if info.annotation is not None else None


def _options(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type, without their annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _options(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for option in get_args(annotation):
            yield from _options(option)
    else:
        yield annotation


def _model(annotation: Any) -> type[BaseModel] | None:
    return next((o for o in _options(annotation) if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _literals(annotation: Any) -> list[Any]:
    return [word for o in _options(annotation) if get_origin(o) is Literal for word in get_args(o)]


def _example(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        examples: Sequence[Any] = next((m.examples for m in metadata if isinstance(m, FieldInfo) and m.examples), ())
        return examples[0] if examples else _example(inner)
    if origin in (Union, UnionType):
        return next((found for option in get_args(annotation) if (found := _example(option)) is not None), None)
    return None
