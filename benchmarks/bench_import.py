"""Start-up: importing the package and running the command line, against bare Python and what they could have imported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from common import contest_arguments, scratch
from measure import Table, fact
from turns import Turns

import tierstore

BARE = "python -c pass"
FIRST = (BARE, "import tierstore", "tierstore --help", "tierstore ls, local store")
"""They have their turns first: targets are about them, and the others take seconds each."""


def run(repeat: int, directory: Path | None, without: Mapping[str, str], until: float | None = None) -> list[Table]:
    table = Table("Start-up of a process, until it has ended", 0, BARE, key="import")
    with scratch(directory) as root:
        with tierstore.open([str(root / "store")], run="bench") as store:
            for step in range(1, 11):
                store.save(step, {"w": torch.ones(16)}).wait("committed", timeout=60)
        (root / "tierstore.yaml").write_text(f"run: bench\ntiers: [{root / 'store'}]\n", encoding="utf-8")
        command = [sys.executable, "-m", "tierstore"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}  # installed code is compiled
        ways = {
            BARE: [sys.executable, "-c", "pass"],
            "import tierstore": [sys.executable, "-c", "import tierstore"],
            "tierstore --help": [*command, "--help"],
            "tierstore ls, local store": [*command, "ls"],
            "import tierstore; tierstore.open": [sys.executable, "-c", "import tierstore; tierstore.open"],
            "import safetensors.torch": [sys.executable, "-c", "import safetensors.torch"],
            "import torch": [sys.executable, "-c", "import torch"],
            "import torch.distributed.checkpoint": [sys.executable, "-c", "import torch.distributed.checkpoint"],
        }
        for name in ways:
            table.describe(name, kind="ours" if "tierstore" in name else "peer")
        turns = Turns([name for name in ways if name not in without], repeat=repeat, first=lambda name: name in FIRST, until=until)
        for turn, order in turns:
            for name in order:

                def measure(name: str = name, turn: int = turn) -> None:
                    began = time.perf_counter()
                    subprocess.run(ways[name], cwd=root, env=environment, check=True, capture_output=True)
                    seconds = time.perf_counter() - began
                    turns.took(name, seconds)
                    if turn >= 0:
                        table.add(name, seconds, turn)

                turns.attempt(name, [table], measure)
        turns.list_left_out([table])
        fact("torch imported by `import tierstore`", _imports_torch("import tierstore", root))
        fact(
            "torch imported by `tierstore ls`",
            _imports_torch("from tierstore.__main__ import main\ntry: main()\nexcept SystemExit: pass", root),
        )
    return [table]


def _imports_torch(code: str, root: Path) -> bool:
    told = f"import sys; sys.argv = ['tierstore', 'ls']\n{code}\nsys.stderr.write('TORCH' if 'torch' in sys.modules else 'NONE')"
    done = subprocess.run([sys.executable, "-c", told], cwd=root, capture_output=True, text=True, check=False)
    return "TORCH" in done.stderr


def main() -> None:
    warnings.simplefilter("ignore")
    args = contest_arguments(__doc__ or "", nbytes="1B", repeat=7)
    for table in run(args.repeat, args.directory, args.without, args.until):
        table.show()


if __name__ == "__main__":
    main()
