"""DTensor: each rank stores its chunk with its global place; loading puts any layout together (CASES 58, 65)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tierstore.state.sharded import is_dtensor, shard_range

HERE = Path(__file__).parent


@pytest.mark.parametrize("world", [1, 2])
def test_dtensors_round_trip_between_layouts(world: int, tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE), str(HERE.parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    children = [
        subprocess.Popen(
            [sys.executable, str(HERE / "dtensor_child.py"), str(rank), str(world), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        outputs = [child.communicate(timeout=100)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * world, "\n".join(outputs)
    assert all((tmp_path / f"ok-{rank}").exists() for rank in range(world))


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
