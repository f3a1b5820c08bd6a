"""Several processes that save together make one checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.errors import UsageError

CHILD = """
import sys
import torch, torch.distributed as dist
import tierstore
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
with tierstore.open([f"{folder}/node", f"{folder}/shared"], run="r", rank=rank, world_size=2) as store:
    tickets = [store.save(step, {f"w{rank}": torch.full((4,), float(step))}) for step in (1, 2)]
    for ticket in tickets:
        ticket.wait("durable", 60)
    print(*(t.attempt.save_id for t in tickets))
dist.destroy_process_group()
"""


def test_ranks_of_one_save_share_its_save_id_and_commit_one_checkpoint(tmp_path: Path) -> None:
    """Each rank used to make an id of its own: none of the attempts ever had all its parts."""
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], told
    assert told[0][0].split() == told[1][0].split()
    with tierstore.open([str(tmp_path / "node"), str(tmp_path / "shared")], run="r") as store:
        assert [c.step for c in store.checkpoints()] == [1, 2]
        opened = store.open_checkpoint(2)
        assert sorted(opened) == ["w0", "w1"]
        assert torch.equal(opened["w1"].full(), torch.full((4,), 2.0))


def test_ranks_that_can_not_agree_on_a_save_id_are_refused(tmp_path: Path) -> None:
    with tierstore.open([str(tmp_path)], run="r", rank=1, world_size=2) as store:
        with pytest.raises(UsageError, match="no process group"):
            store.save(1, {"w": torch.ones(1)})
        assert store.checkpoints() == []
