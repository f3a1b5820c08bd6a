"""What lossless codecs leave of a real training state, and how fast they are, beside each other on the same blocks of 1 MiB.

The state is AdamW's (bf16 weights, fp32 master weights, both moments) of a model that `trained.py` trains once and keeps. A codec is given
the tensors of one class one after the other, with a thread (seconds of the processor) and with two (seconds that passed); what it gives
back is compared bit by bit. Peers return new bytes, ours fills a block that is there. The whole checkpoint is packed as a tier would:
blocks, table and footer of one shard.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors.torch
import torch
from common import contest_arguments
from machine import machine
from measure import Table, fact
from peers.codecs import CODECS, PLAIN, Codec, Data, Decode, stored_nbytes
from trained import KINDS, trained_state
from turns import Turns

from tierstore.format.header import parse_header
from tierstore.format.packed.footer import encode_footer
from tierstore.format.packed.frame import FrameEncoder, decode_frame
from tierstore.format.packed.layout import pieces_of, stretches_of
from tierstore.format.packed.rounding import is_rounding, round_into
from tierstore.format.packed.types import Footer, Run

BLOCK = 1 << 20
BOUND = "entropy of the byte planes"
GROUPS = {"weights": "model.", "master": "master.", "m": "exp_avg.", "v": "exp_avg_sq."}
_AT_ONCE = 2


def classes(state: Mapping[str, torch.Tensor], nbytes: int) -> list[Data]:
    """The four classes of the state, in its proportions, and samples of other dtypes that are made of it; `nbytes` of each at most."""
    found = []
    for name, prefix in GROUPS.items():
        tensors = [tensor for key, tensor in state.items() if key.startswith(prefix)]
        raw = b"".join(_bytes_of(tensor) for tensor in tensors)
        # From the middle of the file, so that both the embedding and the layers have part in it.
        itemsize = 2 if name == "weights" else 4
        take = nbytes * itemsize // 4
        begin = max(0, len(raw) - take) // 2 // 8 * 8
        floats: Literal["bfloat16", "float32"] = "bfloat16" if name == "weights" else "float32"
        found.append(Data(name=name, raw=raw[begin : begin + take], itemsize=itemsize, floats=floats))
    few = min(nbytes, 8 << 20)
    weights = torch.cat([tensor.float().reshape(-1) for key, tensor in state.items() if key.startswith("master.") and tensor.dim() > 1])[
        :few
    ]
    scale = weights.abs().max() / 127
    tokens = torch.randint(0, 50_000, (few // 8,), generator=torch.Generator().manual_seed(0)) % torch.arange(1, few // 8 + 1)
    return [
        *found,
        Data(name="int8 weights", raw=_bytes_of((weights / scale).round().to(torch.int8)), itemsize=1),
        Data(name="fp8 weights", raw=_bytes_of((weights * 16).to(torch.float8_e4m3fn)), itemsize=1),
        Data(name="int64 tokens", raw=_bytes_of(tokens), itemsize=8),
        Data(name="fp32 zeros", raw=bytes(few), itemsize=4, floats="float32"),
    ]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def entropy(data: Data) -> float:
    """What is left, in percent, if each byte plane (the sign moved out of the exponent) takes its entropy: the bound of codes of bytes."""
    words = np.frombuffer(data.raw, f"<u{data.itemsize}")
    if data.floats:
        top = words >> words.dtype.type(8 * data.itemsize - 16)
        top = top.astype("<u2")
        top = top << np.uint16(1) | top >> np.uint16(15)
        planes = [(words >> words.dtype.type(8 * n)).astype(np.uint8) for n in range(data.itemsize - 2)]
        planes += [(top & np.uint16(255)).astype(np.uint8), (top >> np.uint16(8)).astype(np.uint8)]
    else:
        planes = [(words >> words.dtype.type(8 * n)).astype(np.uint8) for n in range(data.itemsize)]
    bits = 0.0
    for plane in planes:
        shares = np.bincount(plane, minlength=256) / len(plane)
        shares = shares[shares > 0]
        bits -= float((shares * np.log2(shares)).sum())
    return 100 * bits / (8 * data.itemsize)


class Contest:
    """All codecs on one class of bytes: what they leave, and seconds for encoding and decoding by a thread and by two."""

    def __init__(self, data: Data, bound: float) -> None:
        key = "codec." + data.name.replace(" ", "-")
        self.data = data
        self.left = Table(f"{data.name}: what is left, percent", 0, PLAIN, key=f"{key}.left", unit="%")
        self.speeds = {
            (what, threads): Table(f"{data.name}: {what}, threads: {threads}", len(data.raw), PLAIN, key=f"{key}.{what}.{threads}")
            for what in ("encode", "decode")
            for threads in range(1, _AT_ONCE + 1)
        }
        for table in self.tables:
            for codec in CODECS:
                table.describe(codec.name, kind=codec.kind, note=codec.note)
        self.left.describe(BOUND, kind="limit")
        self.left.add(BOUND, bound)

    @property
    def tables(self) -> list[Table]:
        return [self.left, *self.speeds.values()]

    def run(self, repeat: int, without: Mapping[str, str]) -> None:
        able = {}
        for codec in CODECS:
            reason = without.get(codec.name) or codec.why_not(self.data)
            if reason is None:
                able[codec.name] = codec
            elif not codec.only_floats or self.data.floats:
                for table in self.tables:
                    table.fail(codec.name, reason)
        turns = Turns(able, repeat=repeat, warm_ups=1, limit_s=60)
        for turn, order in turns:
            for name in order:
                codec = able[name]
                if not codec.slow or turn == 0:
                    turns.attempt(name, self.tables, lambda codec=codec, turn=turn: self._measure(codec, turn))  # type: ignore[misc]

    def _measure(self, codec: Codec, turn: int) -> None:
        view = memoryview(self.data.raw)
        blocks = [view[begin : begin + BLOCK] for begin in range(0, len(view), BLOCK)]
        for threads in (1,) if codec.slow or turn < 0 else (1, 2):
            pairs = [codec.make(self.data) for _ in range(threads)]
            frames, encode_s = _timed([(encode, blocks) for encode, _ in pairs])
            sizes = [block.nbytes for block in blocks]
            both = list(zip(frames, sizes, strict=True))
            _, decode_s = _timed([(partial(_apply, decode), both) for _, decode in pairs])
            if turn < 0:
                decode = pairs[0][1]
                for frame, block in zip(frames, blocks, strict=True):
                    if memoryview(decode(frame, block.nbytes)) != block:
                        raise ValueError("what came back is not what went in")
                self.left.add(codec.name, 100 * sum(map(stored_nbytes, frames)) / len(view))
            else:
                self.speeds["encode", threads].add(codec.name, encode_s)
                self.speeds["decode", threads].add(codec.name, decode_s)
        if codec.slow:
            self.left.add(codec.name, 100 * sum(map(stored_nbytes, frames)) / len(view))


def _apply(decode: Decode, frame: tuple[object, int]) -> object:
    return decode(*frame)


def _timed(work: Sequence[tuple[Callable[..., object], Sequence[object]]]) -> tuple[list[object], float]:
    """Does the items in as many threads as there are functions; each takes the next one that is left.

    Returns:
        What came of each, and the seconds: of the processor where it is one thread, which others on the machine can't take away.
    """
    items = work[0][1]
    results: list[object] = [None] * len(items)
    left = iter(range(len(items)))

    def share(function: Callable[..., object]) -> None:
        for n in left:
            results[n] = function(items[n])

    clock = time.process_time if len(work) == 1 else time.perf_counter
    began = clock()
    threads = [threading.Thread(target=share, args=(function,)) for function, _ in work[1:]]
    for thread in threads:
        thread.start()
    share(work[0][0])
    for thread in threads:
        thread.join()
    return results, clock() - began


def whole(state: Mapping[str, torch.Tensor], table: Table, of: str = "") -> None:
    """A checkpoint of one shard, packed with and without weights that are derived from the master ones; in percent of its raw bytes."""
    raw = safetensors.torch.save(dict(state))
    header = parse_header(raw, len(raw))
    view = memoryview(raw)
    runs, derived = [], 0
    for key, tensor in header.tensors.items():
        master = header.tensors.get("master." + key.removeprefix("model."))
        if key.startswith("model.") and tensor.dtype == "BF16" and master is not None:
            derived += tensor.end - tensor.begin
            if is_rounding(view[master.begin : master.end], view[tensor.begin : tensor.end], "bfloat16"):
                runs.append(Run(begin=tensor.begin, end=tensor.end, kind="bfloat16", file=0, source=master.begin))
    runs.sort(key=lambda run: run.begin)
    saved = sum(run.end - run.begin for run in runs)
    if not of:
        fact("weights that are their master weights rounded, of all bf16 bytes", f"{saved:,} of {derived:,}")
    table.add(f"the codec{of}", 100 * _packed(raw, [], level=0) / len(raw))
    table.add(f"weights from the master weights{of}", 100 * (len(raw) - saved) / len(raw))
    table.add(f"both{of}", 100 * _packed(raw, runs, level=0) / len(raw))
    table.add(f"both, level 9{of}", 100 * _packed(raw, runs, level=9) / len(raw))


def _packed(raw: bytes, runs: list[Run], *, level: int) -> int:
    """The length of the packed file; what it gives back is compared."""
    stretches = stretches_of(parse_header(raw, len(raw)), len(raw))
    encoder, view = FrameEncoder("zstd", level), memoryview(raw)
    holes = [(run.begin, run.end) for run in runs]
    ends, back = [0], bytearray(len(raw))
    for begin in range(0, len(raw), BLOCK):
        end = min(begin + BLOCK, len(raw))
        here = [(max(a, begin), min(b, end)) for a, b in holes if a < end and b > begin]
        frame = encoder.encode(view[begin:end], [piece for piece, _ in pieces_of(stretches, begin, end, here)])
        decode_frame(frame, memoryview(back)[begin:end], [(a - begin, b - begin) for a, b in here])
        ends.append(ends[-1] + len(frame))
    for run in runs:
        source = memoryview(back)[run.source : run.source + 2 * (run.end - run.begin)]
        round_into(source, memoryview(back)[run.begin : run.end], "bfloat16")
    if back != raw:
        raise ValueError("what came back is not what was packed")
    return ends[-1] + len(encode_footer(Footer(nbytes=len(raw), block_nbytes=BLOCK, frame_ends=np.array(ends[1:]), runs=tuple(runs))))


def run(nbytes: int, repeat: int, model: str, without: Mapping[str, str]) -> list[Table]:
    """Measures it all; `nbytes` of each class at most."""
    state = trained_state(model)
    parameters = sum(tensor.numel() for key, tensor in state.items() if key.startswith("master."))
    fact("codec: machine", f"{os.cpu_count()} cores: {machine(Path())['processor']}")
    fact("codec: state", f"AdamW, {parameters:,} parameters after {KINDS[model].steps} steps; {nbytes >> 20} MiB of each class at most")
    table = Table("Whole checkpoint, packed: what is left, percent", 0, "the codec", key="codec.whole", unit="%")
    for of in ("", " (without the embedding)"):
        for name in ("the codec", "weights from the master weights", "both", "both, level 9"):
            table.describe(f"{name}{of}", kind="ours")
    whole(state, table)
    # The moments of an embedding's rows that never occurred are zeros, and the embedding is a third of this model: too good to be usual.
    whole({key: tensor for key, tensor in state.items() if ".pairs." not in key}, table, " (without the embedding)")
    tables = [table]
    contests = [Contest(data, entropy(data)) for data in classes(state, nbytes)]
    for contest in contests:
        contest.run(repeat, without)
        show(contest)
        tables += contest.tables
    together = summed(contests[: len(GROUPS)])
    show(together)
    return tables + together.tables


def summed(parts: Sequence[Contest]) -> Contest:
    """The classes together: bytes and seconds of each turn added up."""
    total = sum(len(part.data.raw) for part in parts)
    bound = sum(part.left.median(BOUND) * len(part.data.raw) for part in parts) / total
    whole = Contest(Data(name="state", raw=b"".join(part.data.raw for part in parts), itemsize=1), bound)
    for name in (codec.name for codec in CODECS):
        if reason := next((part.left.failed[name] for part in parts if name in part.left.failed), None):
            for table in whole.tables:
                table.fail(name, reason)
            continue
        whole.left.add(name, sum(part.left.median(name) * len(part.data.raw) for part in parts) / total)
        for key, table in whole.speeds.items():
            rows = [part.speeds[key].rows[name].values for part in parts if name in part.speeds[key].rows]
            for values in zip(*rows, strict=False):
                table.add(name, sum(values))
    return whole


def show(contest: Contest) -> None:
    """One line a codec."""
    print(f"\n{contest.data.name}, {len(contest.data.raw) >> 20} MiB{'':<20}  left   encode GB/s     decode GB/s")
    print(f"{'':<34}       1 thread    2   1 thread    2", flush=True)
    for codec in CODECS:
        if codec.name in contest.left.failed:
            print(f"  {codec.name}: not measured: {contest.left.failed[codec.name]}")
        elif contest.left.rows[codec.name].values:
            cells = []
            for what in ("encode", "decode"):
                for threads in (1, 2):
                    row = contest.speeds[what, threads].rows[codec.name]
                    cells.append(f"{len(contest.data.raw) / row.median / 1e9:7.2f}" if row.values else "      -")
            print(f"  {codec.name:<32}{contest.left.median(codec.name):5.1f} %{' '.join(cells)}")
    print(f"  {BOUND:<32}{contest.left.median(BOUND):5.1f} %", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(KINDS), default="large", help="whose state (default large); trained first, once")
    args = contest_arguments(__doc__ or "", nbytes="16MiB", repeat=3, parser=parser)
    tables = run(args.nbytes, args.repeat, args.model, args.without)
    tables[0].show()


if __name__ == "__main__":
    main()
