"""Makes the virtual environment that `make` uses, with torch in it: the interpreter's own if it has one, else a CPU build.

Runs on the bare interpreter, so it uses the standard library only. Where it finds the environment complete it changes nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import venv
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--constraints", default="", help="a pip constraints file")
    parser.add_argument("--torch-index", default="", help="where CPU builds of torch are, if the package index has only CUDA builds")
    options = parser.parse_args()
    python = options.venv / "bin" / "python"
    if not python.exists():
        shared = _has_torch(sys.executable)
        print(f"making {options.venv} with {sys.executable}" + (" and its torch" if shared else ""), flush=True)
        try:
            venv.create(options.venv, with_pip=True, system_site_packages=shared)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"can't make a virtual environment: {error}\non Debian and Ubuntu: apt-get install python3-venv", file=sys.stderr)
            return 1
    if _has_torch(str(python)):
        return 0
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    held = ["-c", options.constraints] if options.constraints else []
    offered = _offered_torch(pip, held)
    if options.torch_index and not _is_cpu_build(offered):
        print(f"the package index offers torch {offered}, with CUDA; taking a CPU build from {options.torch_index}", flush=True)
        if subprocess.run([*pip, "--quiet", "--retries", "1", *held, "--index-url", options.torch_index, "torch"], check=False).returncode == 0:
            return 0
        print("that did not work; taking what the package index has", flush=True)
    print(f"installing torch {offered}", flush=True)
    return subprocess.run([*pip, "--quiet", *held, "torch"], check=False).returncode


def _has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def _offered_torch(pip: list[str], held: list[str]) -> str:
    """The version of torch that pip would take as it is configured; empty if it can't tell."""
    command = [*pip, "--quiet", "--dry-run", "--no-deps", "--report", "-", *held, "torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return ""
    report = json.loads(done.stdout)
    return str(report["install"][0]["metadata"]["version"]) if report["install"] else ""


def _is_cpu_build(version: str) -> bool:
    """PyPI's builds for Linux on x86_64 are for CUDA, those for other systems are not; a ``+cpu`` build says so itself."""
    return version.endswith("+cpu") or (version != "" and (platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64")))


if __name__ == "__main__":
    sys.exit(main())
