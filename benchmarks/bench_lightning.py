"""Saves from Lightning: how long training stands still, until the bytes are on the disk, and loading, against Lightning's own plugins."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import arguments, change, scratch, state_nbytes, training_state
from contest import DURABLE, ONE_NOTE, Contender, compete
from memory import fsync_all
from peers.base import nothing

warnings.simplefilter("ignore")
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO  # noqa: E402

from tierstore.integrations.lightning import TierCheckpointIO  # noqa: E402

OWN_NOTE = "neither syncs nor hashes; 'fsynced' is the same save, its file synced after it"


def checkpoint_of(state: dict[str, dict[str, torch.Tensor]], step: int) -> dict[str, Any]:
    """A checkpoint as Lightning's connector makes it: weights, and an optimizer's state by parameters' numbers."""
    moments = zip(state["master"].values(), state["exp_avg"].values(), state["exp_avg_sq"].values(), strict=True)
    per_parameter = {
        number: {"step": torch.tensor(float(step)), "master": master, "exp_avg": mean, "exp_avg_sq": square}
        for number, (master, mean, square) in enumerate(moments)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(per_parameter)}]
    return {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": dict(state["weights"]),
        "loops": {},
        "callbacks": {"ModelCheckpoint": {"monitor": None, "last_model_path": f"last-{step}.ckpt"}},
        "optimizer_states": [{"state": per_parameter, "param_groups": groups}],
        "lr_schedulers": [],
    }


def stock(name: str, plugin: Any, root: Path, checkpoint: Callable[[int], dict[str, Any]], written: Callable[[], object]) -> Contender:
    root.mkdir()
    path = root / "epoch.ckpt"
    return Contender(
        name=name,
        note=OWN_NOTE,
        save=lambda step: plugin.save_checkpoint(checkpoint(step), path),
        until={"written": written, "fsynced": lambda: fsync_all(root)},
        load=lambda step: plugin.load_checkpoint(path),
        files=root,
    )


def ours(name: str, io: TierCheckpointIO, root: Path, checkpoint: Callable[[int], dict[str, Any]], *, last: bool) -> Contender:
    """With `last` what is measured is ``last.ckpt``, saved after another path at the same step, with other values of callbacks."""
    epoch, path = root / "epoch.ckpt", root / ("last.ckpt" if last else "epoch.ckpt")

    def settled(of: Path) -> None:
        io.body._publisher.settle(str(of), timeout_s=600)  # committed: synced, digests and all; and the pointer is there

    def before(step: int) -> None:
        if last:
            io.save_checkpoint(checkpoint(step), epoch)
            settled(epoch)

    return Contender(
        name=name,
        note=("a second path at one step; the first one's save is not counted; " if last else "") + ONE_NOTE,
        prepare=before,
        save=lambda step: io.save_checkpoint({**checkpoint(step), **({"callbacks": {}} if last else {})}, path),
        until={DURABLE: lambda: settled(path)},
        load=lambda step: io.load_checkpoint(path),
        files=root,
    )


def main() -> None:
    args = arguments(__doc__ or "")
    logging.getLogger("tierstore").setLevel(logging.ERROR)
    state = training_state(args.nbytes)

    made: dict[int, dict[str, Any]] = {}

    def advance(step: int) -> None:
        change(state)
        made[step] = checkpoint_of(state, step)

    with scratch(args.directory) as root:
        threaded = AsyncCheckpointIO(TorchCheckpointIO())  # ended after each save, and begun anew by the next
        keep = {"keep": [{"last": 2}]}
        ios = [TierCheckpointIO([str(root / place / "node")], run="bench", retention=keep) for place in ("ours", "ours-last")]
        contenders = [
            stock("TorchCheckpointIO", TorchCheckpointIO(), root / "torch", made.__getitem__, nothing),
            stock("AsyncCheckpointIO", threaded, root / "threaded", made.__getitem__, threaded.teardown),
            ours("TierCheckpointIO", ios[0], root / "ours", made.__getitem__, last=False),
            ours("TierCheckpointIO, last.ckpt", ios[1], root / "ours-last", made.__getitem__, last=True),
        ]
        compete("Lightning", state_nbytes(state), contenders, advance, args.repeat)
        for io in ios:
            io.teardown()


if __name__ == "__main__":
    main()
