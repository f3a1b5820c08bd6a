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

OLDEST_TORCH = (2, 6)  # as in pyproject.toml


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--constraints", default="", help="a pip constraints file; what is left of it goes to VENV/constraints.txt")
    parser.add_argument("--torch-index", default="", help="where CPU builds of torch are, if the package index has only CUDA builds")
    options = parser.parse_args()
    python = options.venv / "bin" / "python"
    if not python.exists():
        shared = _torch_of(sys.executable)
        print(f"making {options.venv} with {sys.executable}" + (f" and its torch {shared}" if shared else ""), flush=True)
        try:
            venv.create(options.venv, with_pip=True, symlinks=True, system_site_packages=bool(shared))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"can't make a virtual environment: {error}\non Debian and Ubuntu: apt-get install python3-venv", file=sys.stderr)
            return 1
    lines = Path(options.constraints).read_text(encoding="utf-8").splitlines() if options.constraints else []
    installed = _torch_of(str(python))
    if not installed:
        if not _install_torch(python, options.constraints, options.torch_index):
            print("torch could not be installed: see pip's message above", file=sys.stderr)
            return 1
        installed = _torch_of(str(python))
    # From here on pip must leave the torch that is there alone, whatever it is.
    kept = [line for line in lines if not line.startswith("torch==")]
    (options.venv / "constraints.txt").write_text("\n".join([*kept, f"torch=={installed}", ""]), encoding="utf-8")
    return 0


def _install_torch(python: Path, constraints: str, index: str) -> bool:
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    held = ["-c", constraints] if constraints else []
    offered = _offered_torch(pip, held)
    if index and not _is_cpu_build(offered):
        print(f"the package index offers torch {offered}, with CUDA; taking a CPU build from {index}", flush=True)
        if subprocess.run([*pip, "-qq", "--retries", "1", *held, "--index-url", index, "torch"], check=False).returncode == 0:
            return True
        print("that did not work; taking what the package index has", flush=True)
    print(f"installing torch {offered}", flush=True)
    return subprocess.run([*pip, "-qq", *held, "torch"], check=False).returncode == 0


def _torch_of(python: str) -> str:
    """The version of the torch that an interpreter can import, as pip knows it; empty if it has none, or one that is too old.

    ``torch.__version__`` would not do: of PyPI's builds for CUDA it says more (``+cu130``), and pip finds no such version.
    """
    code = "import torch; from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    version = done.stdout.strip() if done.returncode == 0 else ""
    numbers = tuple(int(n) for n in version.split("+")[0].split(".")[:2] if n.isdigit())
    return version if numbers >= OLDEST_TORCH else ""


def _offered_torch(pip: list[str], held: list[str]) -> str:
    """The version of torch that pip would take as it is configured; empty if it can't tell."""
    command = [*pip, "-qq", "--dry-run", "--no-deps", "--report", "-", *held, "torch"]
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
