"""How the routing index scales: build, encode, open, find, merge and coverage from 1,000 to 1,000,000 extents.

Prints milliseconds (medians) and, for each operation, the exponent of its growth with the number of extents (1 is linear, 0 constant).

    python benchmarks/bench_index.py [--most 1000000]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from tierstore.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, block_count
from tierstore.format.index import (
    Extent,
    FileEntry,
    Index,
    TensorEntry,
    build_index,
    check_coverage,
    decode_index,
    encode_index,
    merge_indexes,
)

RANKS = 256  # extents of each tensor: one per rank, cut along axis 0
ROW = 64


def part(rank: int, tensors: int) -> Index:
    """What one rank reports: a row of each tensor, in a file of its own."""
    file = f"shard-{rank:05d}-of-{RANKS:05d}.safetensors"
    nbytes = 4096 + tensors * 2 * ROW
    entries = [
        TensorEntry(
            name=f"model.layers.{i:06d}.mlp.experts.weight",
            dtype="bfloat16",
            shape=(RANKS, ROW),
            extents=(Extent(file=file, begin=4096 + 2 * ROW * i, end=4096 + 2 * ROW * (i + 1), offsets=(rank, 0), sizes=(1, ROW)),),
        )
        for i in range(tensors)
    ]
    digests = bytes(DIGEST_NBYTES * block_count(nbytes, BLOCK_NBYTES))
    return build_index(entries, [FileEntry(name=file, nbytes=nbytes, block_digests=digests)])


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure(extents: int) -> dict[str, float]:
    tensors = max(1, extents // RANKS)
    begin = time.perf_counter()
    parts = [part(rank, tensors) for rank in range(RANKS)]
    built = 1000 * (time.perf_counter() - begin)
    merged = merge_indexes(parts)
    data = encode_index(merged)
    opened, _ = decode_index(data)
    names = [f"model.layers.{i:06d}.mlp.experts.weight" for i in range(0, tensors, max(1, tensors // 100))]
    return {
        "build parts": built,
        "merge": milliseconds(lambda: merge_indexes(parts), 3),
        "coverage": milliseconds(lambda: check_coverage(decode_index(data)[0]), 3),
        "encode": milliseconds(lambda: encode_index(merged), 3),
        "open": milliseconds(lambda: decode_index(data), 7),
        "table of one": milliseconds(lambda: [opened.table(name) for name in names], 7) / len(names),
        "find one": milliseconds(lambda: [opened.find(name) for name in names], 3) / len(names),
        "MiB": len(data) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=1_000_000, help="extents of the largest index")
    most = parser.parse_args().most
    sizes = [n for n in (1_000, 10_000, 100_000, 1_000_000) if n <= most]
    rows = {n: measure(n) for n in sizes}
    print(f"{'extents':>12}" + "".join(f"{name:>14}" for name in rows[sizes[0]]))
    for n, row in rows.items():
        print(f"{n:>12,}" + "".join(f"{value:>14.3f}" for value in row.values()))
    if len(sizes) > 1:
        low, high = sizes[-2], sizes[-1]
        slopes = {name: math.log(rows[high][name] / rows[low][name], high / low) for name in rows[high]}
        print(f"{'exponent':>12}" + "".join(f"{value:>14.2f}" for value in slopes.values()))
    print("times in milliseconds; the exponent is that of the last step")


if __name__ == "__main__":
    main()
