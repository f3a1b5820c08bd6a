"""Resuming never takes "can't be asked" for "there is nothing"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from store_kit import open_over, unsynced

from tierstore.errors import TemporaryError
from tierstore.storage.contract import Storage
from tierstore.testing.flows import HookedStorage


def test_resume_does_not_begin_anew_while_the_authority_can_not_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returned None, as for a run without checkpoints, and the trainer would have begun at step 0 over it."""
    away = False

    async def hook(operation: str, path: str) -> None:
        if away and operation in ("list", "children", "read", "stat"):
            raise TemporaryError("the share is away")

    def make(uri: str) -> Storage:
        return HookedStorage(unsynced(uri), hook=hook) if Path(uri).name == "shared" else unsynced(uri)

    with open_over(monkeypatch, make, tmp_path) as store:
        away = True
        with pytest.raises(TemporaryError, match="the share is away"):
            store.resume()
        away = False
        assert store.resume() is None


def test_with_skip_oldest_a_save_that_grew_is_not_held_up_by_the_ones_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room was made for an image as large as the last one; for a larger one staging waited for memory, whatever the rule said."""
    down = True

    async def hook(operation: str, path: str) -> None:
        if down and operation == "write" and "/step-" in path:
            raise TemporaryError("down")

    def make(uri: str) -> Storage:
        return HookedStorage(unsynced(uri), hook=hook)

    config = {"save": {"backlog": "skip_oldest"}, "io": {"max_inflight": "1MiB"}}
    rules = {"retry_first_s": 0.005, "retry_most_s": 0.05}
    with open_over(monkeypatch, make, tmp_path, rules=rules, **config) as store:
        store.save(1, {"w": torch.zeros(200 << 10, dtype=torch.uint8)})
        grown = store.save(2, {"w": torch.zeros(900 << 10, dtype=torch.uint8)})
        down = False
        grown.wait("committed", 200)
        assert [c.step for c in store.checkpoints()] == [2]
