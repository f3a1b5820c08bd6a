"""What a file system is made with (a configuration, tiers, a URI's place, a store) as one place, and paths as fsspec gives them."""

from __future__ import annotations

import difflib
import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fsspec.utils import stringify_path

from tierstore.config import StoreConfig, find_config, load_config
from tierstore.errors import ConfigError, UsageError
from tierstore.fs.opened import Place
from tierstore.tier_uri import SCHEME, TierPlace, is_tier_uri, locate_config, split_tier_uri

__all__ = ["inner", "options_of", "outer", "place_of", "with_config"]

_ACKS = ("auto", "nearest", "authority", "durable")
_OWN = ("config", "tiers", "ack", "name", "store", "asynchronous", "batch_size", "fingerprint")
_OF_FSSPEC = frozenset(
    {"skip_instance_cache", "loop", "use_listings_cache", "listings_expiry_time", "max_paths", "add_docs", "add_aliases"}
    | {"auto_mkdir", "block_size", "default_block_size", "cache_type", "default_cache_type", "cache_options", "protocol"}
)
"""What programs give any file system; it changes nothing here."""


def options_of(uri: str) -> dict[str, Any]:
    """The options that stand in a URI: ``name``, ``config``, ``tiers``, ``ack``; errors as `split_tier_uri`."""
    place, _ = split_tier_uri(uri)
    given = {"name": place.name, "config": place.config, "tiers": list(place.tiers), "ack": place.ack}
    return {key: value for key, value in given.items() if value}


def with_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the configuration's path in them, where they name it or leave it out and it can be found.

    So that an instance stays with the file that it was made for, also in another process, and wherever the program changes to.

    Raises:
        UsageError: An option is unknown, or says nothing.
    """
    for key in options:
        if key not in _OWN and key not in _OF_FSSPEC:
            near = difflib.get_close_matches(key, _OWN, n=1)
            raise UsageError(
                f"tier:// has no option {key!r}", hint=f"did you mean {near[0]}=?" if near else f"the options are {', '.join(_OWN[:5])}"
            )
    found = dict(options)
    if found.get("store") is not None:
        store = found.pop("store")
        found["config"] = getattr(store, "config", None)
        if not isinstance(found["config"], StoreConfig):
            raise UsageError(f"store={store!r} is no open store", hint="pass what tierstore.open gave, or a configuration as config=")
    if found.get("tiers") is not None:
        tiers = found["tiers"]
        found["tiers"] = [tiers] if isinstance(tiers, (str, os.PathLike, Mapping)) else list(tiers)
        if not found["tiers"]:
            raise UsageError("tiers=[] names no tier", hint="name one at least, nearest first; or leave it out and name a configuration")
    values = [*(found.get("tiers") or ()), found.get("config") or ""]
    if not all(isinstance(value, (str, os.PathLike)) for value in values):  # their texts hide secrets, and so differences
        found["fingerprint"] = hashlib.sha256(pickle.dumps(values)).hexdigest()
        return found
    if found.get("tiers"):
        return found
    if found.get("name") or found.get("config"):
        given = TierPlace(name=found.pop("name", ""), config=os.fspath(found.get("config") or ""))
        if given.name and given.config:
            raise UsageError(f"the tiers are named twice: {given.name!r} and {given.config!r}", hint="name a configuration once")
        found["config"] = os.path.abspath(locate_config(given))
        return found
    try:
        found["config"] = os.path.abspath(find_config())
    except ConfigError:
        pass  # told when something is asked of it
    return found


def place_of(config: Any, tiers: Sequence[Any] | None, ack: str) -> Place:
    """What is opened.

    Raises:
        ConfigError: The configuration is wrong or missing.
        UsageError: Both are given, or `ack` is none.
    """
    if config and tiers:
        raise UsageError("both a configuration and tiers are given", hint="name one of them")
    if ack and ack not in _ACKS:
        raise UsageError(f"ack={ack!r} is no level", hint=f"the levels are {', '.join(_ACKS)}")
    return Place(config=load_config(list(tiers) if tiers else config or find_config()), ack=ack)


def inner(path: Any) -> str:
    """A path or URI as the file system knows it: ``/`` and names, without a slash at the end; the root is ``/``.

    Raises:
        UsageError: `pathlib` has damaged it, it leaves the root by ``..``, or it is no path.
    """
    if isinstance(path, PurePath):
        is_tier_uri(path)
    text = stringify_path(path)
    if not isinstance(text, str):
        raise UsageError(f"{text!r} is no path", hint="pass a str")
    if text.startswith("tier::"):
        text = text[len("tier::") :]
    if is_tier_uri(text):
        text = split_tier_uri(text)[1]
    elif text[:6].lower() == "tier:/":
        raise UsageError(f"{text!r} has one '/' after its scheme", hint=f"write {SCHEME + text[5:]!r}; nothing was read or written")
    names = [name for name in text.split("/") if name not in ("", ".")]
    if ".." in names:
        raise UsageError(f"{text!r} leaves its folder by '..'", hint="write the path without it")
    return "/" + "/".join(names)


def outer(path: str, options: Mapping[str, Any]) -> str:
    """The URI of `path` for a file system with these options, that leads there again; a configuration given as a value can't be told."""
    config = options.get("config")
    tiers = [each for each in options.get("tiers") or () if isinstance(each, (str, os.PathLike))]
    place = TierPlace(
        config=os.fspath(config) if isinstance(config, (str, os.PathLike)) else "",
        tiers=tuple(str(os.fspath(tier)) for tier in tiers) if len(tiers) == len(options.get("tiers") or ()) else (),
        ack=options.get("ack") or "",
    )
    return place.uri(path)
