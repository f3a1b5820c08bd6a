"""The real launcher: two ranks under torchrun, each with a node tier that the other can't see, and one authority between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tierstore

HERE = Path(__file__).parent


def torchrun(folder: Path, until: int, die_at: int = -1) -> tuple[int, str, list[Any]]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    command += [str(HERE / "torchrun_child.py"), str(folder), str(until), str(die_at)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    told = [json.loads(p.read_text()) for p in sorted(folder.glob("told-*.json"))]
    for path in folder.glob("told-*.json"):
        path.unlink()
    return ended.returncode, ended.stderr, told


def test_a_job_of_two_nodes_saves_dies_and_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    code, errors, told = torchrun(tmp_path / "a", 5, die_at=3)
    assert code != 0
    assert told == []
    # Each rank's node tier has its own part only; replicas were written once, by one of them.
    for rank in range(2):
        shards = sorted(p.name for p in (tmp_path / "a" / f"node{rank}" / "job").rglob("shard-*"))
        assert shards
        assert set(shards) == {f"shard-0000{rank}-of-00002.safetensors"}
    code, errors, told = torchrun(tmp_path / "a", 5)
    assert code == 0, errors
    assert [t["resumed"] for t in told] == [3, 3]

    code, errors, straight = torchrun(tmp_path / "b", 5)
    assert code == 0, errors
    for key in ("weights", "rng"):
        assert [t[key] for t in told] == [t[key] for t in straight], key
    assert told[0]["rng"] != told[1]["rng"]  # each rank its own
    with tierstore.open([str(tmp_path / "a" / "node0"), str(tmp_path / "a" / "shared")], run="job") as store:
        assert [c.step for c in store.checkpoints()] == [1, 2, 3, 4, 5]
        names = sorted(store.open_checkpoint(5))
    assert names == sorted(
        [
            "model.weight",
            "model.bias",
            *(f"optim.state.{i}.{k}" for i in (0, 1) for k in ("exp_avg", "exp_avg_sq", "step")),
            "rng",
            "rng@rank1",
        ]
    )
