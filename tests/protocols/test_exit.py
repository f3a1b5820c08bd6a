"""The interpreter's end: a save that was just submitted is on every tier when the process is gone (case 18)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import torch

import tierstore
from tierstore.testing.flows import folder_tiers
from tierstore.tiers.catalog import scan

_SCRIPT = """
import sys, torch, tierstore
store = tierstore.open([sys.argv[1] + "/nvme", sys.argv[1] + "/pfs", sys.argv[1] + "/object"], run="r")
store.save(12, {"w": torch.arange(100_000)})
"""


def test_a_script_that_ends_right_after_save_loses_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT, str(tmp_path)], check=True, timeout=200)
    catalog = asyncio.run(scan(folder_tiers(tmp_path, {"nvme": "node", "pfs": "shared", "object": "shared"}), "r"))
    assert [(c.attempt.step, c.complete_on) for c in catalog.checkpoints] == [(12, ("nvme", "pfs", "object"))]
    with tierstore.open([str(tmp_path / "nvme"), str(tmp_path / "pfs")], run="r") as store:
        assert torch.equal(store.load(12)["w"], torch.arange(100_000))
