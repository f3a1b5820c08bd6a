"""Ranks that were started with different configurations hear of it at the first thing that they do together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import run_ranks

import tierstore
from tierstore.errors import RankError, UsageError


def config_of(rank: int, folder: Path, apart: str) -> dict[str, Any]:
    other = rank == 1
    shared = [{"name": name, "uri": str(folder / name), "scope": "shared"} for name in ("shared", "far")]
    config: dict[str, Any] = {"version": 1, "run": "b" if other and apart == "run" else "a"}
    if other and apart == "place":
        shared[0]["uri"], shared[1]["uri"] = str(folder / "elsewhere"), str(folder / "elsewhere-far")
    if other and apart == "name":
        shared[1]["name"] = "further"
    if other and apart == "count":
        shared.pop()
    if other and apart == "durable":
        config["durable_at"] = "far"
    node = {"name": "node", "uri": str(folder / f"node-{rank}"), "scope": "node"}  # a node's tier is its own
    return {**config, "tiers": [node, *shared], "save": {"agreement_timeout": "60s"}}


def tries(rank: int, world_size: int, folder: Path, verb: str, apart: str) -> Any:
    with tierstore.open(config_of(rank, folder, apart)) as store:
        state = {"w": torch.ones(4), "own": torch.tensor([rank])}
        for _ in range(2):  # it is not forgotten
            with pytest.raises((UsageError, RankError)) as refused:
                {"save": lambda: store.save(1, state), "load": lambda: store.load(into=state), "resume": lambda: store.resume(into=state)}[
                    verb
                ]()
        assert store.checkpoints() == []
        return [type(refused.value).__name__, refused.value.message, refused.value.hint]


@pytest.mark.parametrize(
    ("verb", "apart", "words"),
    [
        ("save", "run", "the run is 'b' there and 'a' on rank 0"),
        ("load", "run", "the run is 'b' there and 'a' on rank 0"),
        ("resume", "run", "the run is 'b' there and 'a' on rank 0"),
        ("save", "place", "the store's id is"),
        ("save", "name", "the list of shared tiers is ['shared', 'further'] there and ['shared', 'far'] on rank 0"),
        ("save", "count", "the list of shared tiers is ['shared'] there"),
        ("save", "durable", "the tier that counts as durable is 'far' there and 'shared' on rank 0"),
    ],
)
def test_ranks_with_other_configurations_are_told_so_at_once(tmp_path: Path, verb: str, apart: str, words: str) -> None:
    first, second = run_ranks(2, tries, tmp_path, verb=verb, apart=apart)
    assert [first[0], second[0]] == ["UsageError", "RankError"]
    for _, message, hint in (first, second):
        assert f"rank 1 has opened another store than rank 0: {words}" in message
        assert "same configuration" in hint
