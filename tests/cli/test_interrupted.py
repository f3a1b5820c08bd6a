"""Ctrl-C while the command line is still being loaded."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import runpy, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "tierstore.cli.listing":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
sys.argv = ["tierstore", "ls"]
runpy.run_module("tierstore", run_name="__main__")
"""


def test_ctrl_c_while_modules_are_loaded_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
