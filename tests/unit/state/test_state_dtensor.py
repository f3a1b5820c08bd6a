"""DTensor: each rank stores its chunk with its global place; loading puts any layout together (CASES 58, 65)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dtensor_child import body
from ranks_kit import run_ranks

from tierstore.state.sharded import is_dtensor, shard_range

HERE = Path(__file__).parent


@pytest.mark.parametrize("world", [1, 2])
def test_dtensors_round_trip_between_layouts(world: int, tmp_path: Path) -> None:
    written = run_ranks(world, body, tmp_path)
    assert written == [written[0]] * world


@pytest.mark.parametrize("size", [0, 1, 5, 8, 9])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_shards_are_cut_as_torch_cuts_them(size: int, parts: int) -> None:
    sizes = [end - begin for begin, end in (shard_range(size, parts, i) for i in range(parts))]
    chunks = [len(c) for c in torch.arange(size).chunk(parts)] if size else []
    assert sizes == chunks + [0] * (parts - len(chunks))


def test_a_plain_tensor_is_no_dtensor_and_asking_imports_nothing() -> None:
    assert not is_dtensor(torch.ones(1))
    code = (
        "import sys, torch; before = 'torch.distributed.tensor' in sys.modules\n"
        "import tierstore.state.stage, tierstore.state.load, tierstore.state.lazy\n"
        "from tierstore.state.flatten import flatten; flatten({'w': torch.ones(1)})\n"
        "assert ('torch.distributed.tensor' in sys.modules) == before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stderr
