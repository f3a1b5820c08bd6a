"""What the tests of the whole store share: a `Store` over storages of the test's own, in one process and without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tierstore.config_models import StoreConfig
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.jobs import WorkerOptions, worker_options
from tierstore.tiers.ticket import Ticket

NAMES = ("node", "shared", "far")


def tiers_of(root: Path) -> list[dict[str, str]]:
    """Three tiers on folders: the node's, the authority, and a further one."""
    return [{"name": name, "uri": str(root / name), "scope": "node" if name == "node" else "shared"} for name in NAMES]


def unsynced(uri: str) -> Storage:
    """A folder without its fsyncs, where nobody pulls the plug."""
    return PosixStorage(Path(uri), durable=False)


def has_error(ticket: Ticket, *, times: int = 1) -> Ticket:
    """Returns when something went wrong with a save: what a short wait, or a call, says then no longer depends on who is quicker.

    `times`: on so many tiers.
    """
    end = time.monotonic() + 200
    while len(ticket.errors) < times:
        assert time.monotonic() < end, f"nothing goes wrong with {ticket!r}: {ticket.events}"
        time.sleep(0.005)
    return ticket


def open_over(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Storage], root: Path, *, rules: dict[str, Any] | None = None, **config: Any
) -> tierstore.Store:
    """A store over three tiers that `make` makes from their URIs.

    Args:
        monkeypatch: Undoes it.
        make: Makes a tier's storage.
        root: The tiers' folder.
        rules: `WorkerOptions` to change, such as the pauses between retries.
        config: More of the configuration.
    """

    def options(config: StoreConfig) -> WorkerOptions:
        return replace(worker_options(config), **(rules or {}))

    monkeypatch.setattr("tierstore.tiers.opening.open_storage", lambda uri, *_args, **_settings: make(uri))
    monkeypatch.setattr("tierstore.tiers.worker.worker_options", options)
    return tierstore.open({"version": 1, "run": "r", "tiers": tiers_of(root), "durable_at": "far", **config})
