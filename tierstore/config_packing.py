"""How a tier stores its shards: the codec, what is stored once, and what is quantised. The values, and their short forms."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from tierstore.config_mistakes import Mistake, MistakesError
from tierstore.config_values import Count, Model, Texts, Whole

__all__ = ["CODECS", "MOMENTS", "SCHEMES", "Codec", "CodecConfig", "QuantiseConfig", "Scheme", "codec_from", "quantise_from"]

Codec = Literal["raw", "zstd"]
Scheme = Literal["q8", "q4"]
CODECS: tuple[str, ...] = get_args(Codec)
SCHEMES: tuple[str, ...] = get_args(Scheme)

MOMENTS = ("*exp_avg", "*exp_avg_sq", "*max_exp_avg_sq")
"""Names that optimizers give to the moments of an Adam: what is quantised where nothing else is said."""


class CodecConfig(Model):
    """How a tier's shards are compressed."""

    name: Codec = "raw"
    level: Annotated[Whole, Field(le=19)] = 0
    """0: few matches, the fastest; 1 to 19: zstd's levels, of which each is slower and most are hardly smaller."""
    threads: Annotated[Count, Field(le=64, examples=[2])] = 2
    """Threads that encode and decode for this tier."""


class QuantiseConfig(Model):
    """Which tensors a tier stores quantised: with a loss, that is."""

    scheme: Scheme
    include: Annotated[Texts, Field(max_length=100, examples=['["*exp_avg", "*exp_avg_sq"]'])] = MOMENTS
    """Patterns of tensors' names, of which one must match."""
    exclude: Annotated[Texts, Field(max_length=100, examples=['["*embed*"]'])] | None = None
    """Patterns of which none may match."""
    min_numel: Annotated[Count, Field(examples=[4096])] = 4096
    """Tensors with fewer elements stay exact."""
    max_generation: Annotated[Count, Field(le=1000, examples=[1])] = 1
    """So many lossy copies may stand behind one another: what was resumed from as many is stored exact."""


def codec_from(value: Any) -> Any:
    """What `CodecConfig` is made from: a name stands for the codec with its defaults.

    Raises:
        MistakesError: There is no codec of that name; a mapping does not say which (it would be `raw`, whatever level it names).
    """
    if isinstance(value, dict) and "name" not in value:
        raise MistakesError([Mistake(path=("name",), reason="missing", remedy="add name: zstd")])
    if value is None or isinstance(value, bool):
        raise MistakesError([Mistake(path=(), value=value, reason="it must say which", remedy="write codec: zstd, or codec: raw for none")])
    return {"name": _known(value, CODECS, "codec")} if isinstance(value, str) else value


def quantise_from(value: Any) -> Any:
    """What `QuantiseConfig` is made from: a scheme's name stands for it with its defaults; false is none.

    Raises:
        MistakesError: There is no scheme of that name.
    """
    if value is False:
        return None
    if value is True:
        told = Mistake(path=(), value=True, reason="it must say by which scheme", remedy="write quantise: q8")
        raise MistakesError([told])
    return {"scheme": _known(value, SCHEMES, "quantise")} if isinstance(value, str) else value


def _known(word: str, words: tuple[str, ...], key: str) -> str:
    if word in words:
        return word
    near = difflib.get_close_matches(word.lower(), words, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"write {key}: {words[-1] if key == 'codec' else words[0]}"
    raise MistakesError([Mistake(path=(), value=word, reason=f"must be one of {', '.join(words)}", remedy=remedy)])
