"""Where the time goes in each path: samples of all threads (py-spy), summed by function, as tables for docs/performance.md.

    python benchmarks/profiles.py save upload load load-s3 catalog [--nbytes 512MiB]

Each path is repeated for some seconds in a process of its own, while py-spy samples it 200 times a second. A sample counts for the
innermost Python function, whether that runs or waits for a system call; threads that wait for work are not counted. `caller` is the
thread that called, `others` are the store's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from common import flattened, scratch, training_state
from memory import make_cold

import tierstore
from tierstore.testing.servers import embedded_server
from tierstore.units import parse_size

_RATE = 200
_TOP = 12
_WAITS = ("Condition.wait", "EpollSelector.select", "thread._worker", "Event.wait", "time.sleep", "_recv_bytes", "_worker (concurrent")
"""Functions that wait for work; py-spy takes some of them for busy where the kernel does not say."""


def save(root: Path, nbytes: int, seconds: float) -> None:
    """Stalls only: each save is waited for before the next, and nothing else is done by the caller."""
    state = flattened(training_state(nbytes))
    with tierstore.open([str(root / "node")], run="p") as store:
        step = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            step += 1
            store.save(step, state).wait("committed", timeout=300)


def upload(root: Path, nbytes: int, seconds: float) -> None:
    """A node tier and a bucket: what promotes."""
    state = flattened(training_state(nbytes))
    with embedded_server(root / "server") as server:
        server.make_bucket("profiles")
        tier = {"name": "object", "uri": "s3://profiles/x", "options": server.options()}
        node = {"name": "node", "uri": str(root / "node"), "scope": "node"}
        with tierstore.open({"version": 1, "run": "p", "tiers": [node, tier]}) as store:
            step = 0
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                step += 1
                store.save(step, state).wait("object", timeout=300)


def load(root: Path, nbytes: int, seconds: float) -> None:
    """In place and cold: what is in the page cache is dropped before each."""
    state = flattened(training_state(nbytes))
    with tierstore.open([str(root / "node")], run="p") as store:
        store.save(1, state).wait("committed", timeout=300)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            make_cold(root)
            store.load(into=state)


def load_s3(root: Path, nbytes: int, seconds: float) -> None:
    """Everything from a bucket, in place."""
    state = flattened(training_state(nbytes))
    with embedded_server(root / "server") as server:
        server.make_bucket("profiles")
        tier = {"name": "object", "uri": "s3://profiles/x", "options": server.options()}
        with tierstore.open({"version": 1, "run": "p", "tiers": [tier]}) as store:
            store.save(1, state).wait("committed", timeout=300)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                store.load(into=state)


def catalog(root: Path, nbytes: int, seconds: float) -> None:
    """A store of 200 checkpoints on a folder, opened anew and listed."""
    with tierstore.open([str(root / "node")], run="p") as store:
        for step in range(1, 201):
            store.save(step, {"w": torch.ones(4)})
        store.sync()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with tierstore.open([str(root / "node")], run="p") as store:
            store.checkpoints()


PATHS: dict[str, Callable[[Path, int, float], None]] = {
    "save": save,
    "upload": upload,
    "load": load,
    "load-s3": load_s3,
    "catalog": catalog,
}


def profiled(name: str, nbytes: int, seconds: float) -> str:
    """Runs one path below py-spy; returns its tables in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks"
        command = ["py-spy", "record", "--format", "raw", "--rate", str(_RATE), "--threads", "--output", str(out), "--"]
        command += [sys.executable, __file__, "--run", name, "--nbytes", f"{nbytes}B", "--seconds", str(seconds)]
        command[0] = str(Path(sys.executable).parent / "py-spy")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            return f"{name}: py-spy: {done.stderr.strip().splitlines()[-1:]}"
        return tables(name, out.read_text(encoding="utf-8"))


def tables(name: str, stacks: str) -> str:
    """What py-spy wrote in its raw format, summed by innermost function; one line a function and kind of thread."""
    own: Counter[tuple[str, str]] = Counter()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        names = frames.split(";")
        if not count.isdigit() or len(names) < 2:
            continue
        thread = "caller" if "MainThread" in names[0] else "others"
        if not any("tierstore" in frame for frame in names) or any("_find_and_load" in frame for frame in names):
            continue  # the building of the state, other libraries' own threads, imports
        if any(wait in names[-1] for wait in _WAITS):
            continue
        own[thread, short(names[-1], names)] += int(count)
    total = sum(own.values()) or 1
    lines = [f"**{name}** ({total} samples)", "", "| thread | function | share |", "| --- | --- | --- |"]
    for (thread, function), samples in own.most_common(_TOP):
        if samples / total >= 0.01:
            lines.append(f"| {thread} | `{function}` | {samples / total:.0%} |")
    return "\n".join(lines)


def short(frame: str, frames: list[str]) -> str:
    """A function and its module; for what is not tierstore's also whom it was called for."""
    function, _, place = frame.partition(" (")
    module = place.partition(":")[0].rstrip(")")
    label = f"{Path(module).stem}.{function}"
    if "tierstore" in frame:
        return label
    ours = next((f for f in reversed(frames) if "tierstore/" in f), "")
    return f"{label} < {Path(ours.partition(' (')[2].partition(':')[0]).stem}.{ours.partition(' (')[0]}" if ours else label


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", choices=[*PATHS, []], help="which; all where none is named")
    parser.add_argument("--nbytes", type=parse_size, default=512 << 20)
    parser.add_argument("--seconds", type=float, default=12, help="how long each path is repeated")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        with scratch(None) as root:
            PATHS[args.run](root, args.nbytes, args.seconds)
        return
    for name in args.paths or PATHS:
        print(f"\n{profiled(name, args.nbytes, args.seconds)}", flush=True)


if __name__ == "__main__":
    main()
