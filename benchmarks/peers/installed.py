"""Where the peers are that want other versions of what the project has: in a folder of their own, behind everything else on the path.

Each is installed without its dependencies (bytecheckpoint would bring torch 2.5, tensorizer a redis client of a certain age, …); what
they import beside them is named here. `python benchmarks/peers/installed.py` installs them, `make bench` does so before it begins.
One that can't be had is left out, and the reason is what the benchmarks list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "bench-peers"
PACKAGES = {
    "torchsnapshot": ["torchsnapshot==0.1.0", "importlib-metadata<8.8", "zipp", "nest-asyncio"],
    "bytecheckpoint": ["bytecheckpoint==0.0.2", "grpcio", "protobuf", "mmh3", "cachetools"],
    "fastsafetensors": ["fastsafetensors>=0.5"],
    "runai_model_streamer": ["runai-model-streamer>=0.17", "runai-model-streamer-s3>=0.17", "humanize"],
    "instanttensor": ["instanttensor>=0.2"],
    "tensorizer": ["tensorizer>=2.12", "redis", "hiredis", "libnacl", "protobuf"],
    "blosc2": ["blosc2>=4.0", "ndindex", "msgpack", "numexpr", "threadpoolctl"],
    "zipnn": ["zipnn>=0.5.4"],
    "lmz": ["lmzip>=1.3"],
}
"""Module: what pip is asked for."""

FROM_SOURCE = frozenset({"zipnn"})
"""Those that are published as source only, small C extensions: a compiler builds them."""

_DONE = "installed.json"
_LIMIT_S = 180


def use() -> None:
    """Makes them importable, after everything of the project's own."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def why_not(module: str) -> str | None:
    """Why installing it failed; None if it did not, or was not tried."""
    reason = _read().get(module)
    return None if reason is None else f"pip install: {reason}"


def install() -> dict[str, str | None]:
    """Installs what is not there or has changed; returns the reason of each that failed.

    Returns:
        For each module None, or the last line that pip said.
    """
    done: dict[str, str | None] = {module: reason for module, reason in _read().items() if reason is None and _stamp(module).exists()}
    for module, packages in PACKAGES.items():
        if module not in done:
            done[module] = _pip(packages, from_source=module in FROM_SOURCE)
            if done[module] is None:
                _stamp(module).touch()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / _DONE).write_text(json.dumps(done, indent=1), encoding="utf-8")
    return done


def _pip(packages: list[str], *, from_source: bool) -> str | None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    command += [*([] if from_source else ["--only-binary", ":all:"]), "--upgrade", "--target", str(FOLDER), *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {_LIMIT_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return None


def _stamp(module: str) -> Path:
    """A file that is there once just these were installed."""
    return FOLDER / ("." + "+".join(PACKAGES[module]))


def _read() -> dict[str, str | None]:
    try:
        document: dict[str, str | None] = json.loads((FOLDER / _DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document


def main() -> None:
    for module, reason in install().items():
        if reason is not None:
            print(f"{module}: not installed: {reason}")


if __name__ == "__main__":
    main()
