"""How long a retention plan takes: `measure_planning(count)` for bench_retention.py; ``python benchmarks/planning.py 10000`` prints it."""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from tierstore.config_retention import RetentionConfig
from tierstore.names import Attempt, new_save_id
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.retention import TierFacts, evaluate
from tierstore.units import format_size

NOW = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
TIERS = (
    TierFacts(name="nvme", scope="node", staging=True, capacity=2 << 40),
    TierFacts(name="pfs", authority=True, durable_at=True),
    TierFacts(name="object"),
)
POLICY = RetentionConfig.model_validate(
    {
        "timezone": "Europe/Berlin",
        "keep": [
            {"last": 5},
            {"every": {"steps": 5000}},
            {"within": "12h"},
            {"hourly": 24},
            {"daily": 7},
            {"weekly": 5},
            {"monthly": 12},
            {"yearly": 3},
            {"best": {"metric": "val/loss", "mode": "min", "count": 3}},
            {"steps": [0, 1000]},
            {"tags": ["release/*"]},
            {"final": True},
        ],
        "tiers": {"nvme": {"keep": [{"last": 2}]}, "pfs": {"keep": [{"last": 10}, {"best": {"metric": "val/loss", "mode": "min"}}]}},
    },
    context={"document": True},
)
"""Every rule there is, and two tiers with rules of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Seconds of processor time (medians) and peak bytes, the plan's JSON included in neither; its length is `json_nbytes`."""

    count: int
    seconds: float
    json_seconds: float
    peak_nbytes: int
    json_nbytes: int
    deletes: int


def many_checkpoints(count: int) -> list[CheckpointInfo]:
    """A run that saved every ten minutes until now; the last twenty are still on the node."""
    infos = []
    for number in range(count):
        at = NOW - timedelta(minutes=10 * (count - number))
        near = ("nvme",) if number >= count - 20 else ()
        infos.append(
            CheckpointInfo(
                attempt=Attempt(run="run", step=number * 500, save_id=new_save_id(at)),
                committed_at=at,
                manifest_digest="sha256:0",
                nbytes=10 << 30,
                metrics={"val/loss": 1 + 1 / (number + 1)},
                replicas=dict.fromkeys((*near, "pfs", "object"), "complete"),
                replicated={"object": {}},
            )
        )
    return infos


def measure_planning(count: int, *, repeat: int = 3) -> Planning:
    """Plans `count` checkpoints under every rule that there is; the input lies in memory."""
    infos = many_checkpoints(count)
    seconds, json_seconds = [], []
    for _ in range(repeat):
        begun = time.process_time()
        plan = evaluate(infos, POLICY, NOW, tiers=TIERS)
        planned = time.process_time()
        text = plan.to_json()
        seconds.append(planned - begun)
        json_seconds.append(time.process_time() - planned)
    tracemalloc.start()
    evaluate(infos, POLICY, NOW, tiers=TIERS)
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Planning(
        count=count,
        seconds=statistics.median(seconds),
        json_seconds=statistics.median(json_seconds),
        peak_nbytes=peak_nbytes,
        json_nbytes=len(text.encode()),
        deletes=plan.deletes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", type=int, nargs="*", default=[10_000, 100_000])
    for count in parser.parse_args().counts:
        found = measure_planning(count)
        print(
            f"{count:>8,} checkpoints: planned in {found.seconds:.2f} s ({found.seconds / count * 1e6:.0f} µs each), "
            f"peak {format_size(found.peak_nbytes)}; {found.deletes:,} would go; "
            f"JSON {format_size(found.json_nbytes)} in {found.json_seconds:.2f} s"
        )


if __name__ == "__main__":
    main()
