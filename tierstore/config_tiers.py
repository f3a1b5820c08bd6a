"""A tier's configuration as values: its place, what is known of it, and how checkpoints are stored there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tierstore.config_mistakes import redact
from tierstore.config_packing import CodecConfig, QuantiseConfig, codec_from, quantise_from
from tierstore.config_uris import default_durable, is_local, normal_uri
from tierstore.config_values import Duration, Model, Rate, Size, Text

__all__ = ["ReadConfig", "TierConfig"]

_TIER_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_LEVELS = ("staged", "committed", "durable")


class ReadConfig(Model):
    """What one request to a tier costs; steers how reads are planned. What is None is measured."""

    latency_s: Duration | None = Field(None, alias="latency", examples=["20ms"])
    """Until the first byte of an answer."""
    bandwidth: Rate | None = None
    """Bytes per second that one request then gets while others are under way."""

    @field_validator("latency_s")
    @classmethod
    def _short(cls, seconds: float | None) -> float | None:
        if seconds is not None and seconds > 60:
            raise ValueError("a request that waits for more than 60s is not answered at all")
        return seconds


class TierConfig(Model):
    """One place that keeps checkpoints."""

    name: Text
    uri: Annotated[Text, Field(examples=["s3://bucket/prefix"])]
    """An absolute path or ``scheme://…``, in normal form, never with credentials."""
    scope: Literal["node", "shared"]
    durable: bool
    """Whether it survives a power loss; in a document the default is False for ``/dev/shm`` and ``memory://``, else True."""
    capacity: Size | None = None
    """Bytes that the tier may hold; None: what its storage has."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Handed to the storage as they are. May hold credentials: never shown."""
    codec: CodecConfig = CodecConfig()
    """How shards are compressed there; in a document also ``raw`` or ``zstd``."""
    master_once: bool | None = None
    """Weights that are the rounding of a float32 tensor of the same shard are not stored; None: `stores_master_once` says."""
    unchanged_once: bool | None = None
    """Bytes that an earlier checkpoint has there are not stored again; None: `stores_unchanged_once` says."""
    quantise: QuantiseConfig | None = None
    """Which tensors are stored with a loss there; in a document also ``q8`` or ``q4``. None: none."""
    max_bandwidth: Rate | None = None
    """Bytes per second for uploads; None: no limit."""
    read: ReadConfig = ReadConfig()

    @model_validator(mode="before")
    @classmethod
    def _durable_by_uri(cls, value: Any) -> Any:
        if isinstance(value, dict) and "durable" not in value and isinstance(value.get("uri"), str):
            return {**value, "durable": default_durable(value["uri"])}
        return value

    @field_validator("name")
    @classmethod
    def _usable_name(cls, name: str) -> str:
        if not _TIER_NAME.fullmatch(name):
            raise ValueError("a tier's name has up to 40 lower-case letters, digits, '-' and '_'")
        if name in _LEVELS:
            raise ValueError(f"{name!r} is a level that a ticket waits for, not a name for a tier")
        return name

    @field_validator("uri", mode="before")
    @classmethod
    def _normal_uri(cls, uri: Any) -> str:
        return normal_uri(uri)

    @field_validator("codec", mode="before")
    @classmethod
    def _codec_by_name(cls, value: Any) -> Any:
        return codec_from(value)

    @field_validator("quantise", mode="before")
    @classmethod
    def _quantise_by_name(cls, value: Any) -> Any:
        return quantise_from(value)

    @property
    def stores_master_once(self) -> bool:
        """What `master_once` means: as it says, else where the tier is remote and compresses."""
        return self._packs_by_itself if self.master_once is None else self.master_once

    @property
    def stores_unchanged_once(self) -> bool:
        """What `unchanged_once` means: as it says, else where the tier is remote and compresses."""
        return self._packs_by_itself if self.unchanged_once is None else self.unchanged_once

    @property
    def packs(self) -> bool:
        """Whether its shards become packed files."""
        return self.codec.name != "raw" or self.stores_master_once or self.stores_unchanged_once or self.quantise is not None

    @property
    def _packs_by_itself(self) -> bool:
        return self.codec.name != "raw" and not is_local(self.uri)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact(value) if name == "options" else value
