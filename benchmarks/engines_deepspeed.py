"""DeepSpeed's engine with the store against its own files; run by `bench_engines`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from contest import ONE_NOTE, TWO_NOTE, Contender, compete, one_tier, remove, two_tiers, until_durable
from deepspeed.utils import logger
from engines_plain import batch_of, linears
from memory import fsync_all
from peers.base import nothing

from tierstore.integrations.deepspeed import install


def measure(root: Path, nbytes: int, repeat: int) -> None:
    # Its all-reduce through shared memory would be compiled here, for minutes; without it DeepSpeed takes gloo's.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel("CRITICAL")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    own = _engine(nbytes)
    engines = [own]

    def advance(step: int) -> None:
        for engine in engines:
            engine.backward(engine(batch_of(engine.module, step)).square().mean())
            engine.step()

    with one_tier(root / "one") as one, two_tiers(root / "two") as two:
        stock = root / "stock"
        contenders = [
            Contender(
                name="DeepSpeed's own",
                note="torch.save of each file; neither syncs nor hashes; 'fsynced' is the same save, its files synced after it",
                save=lambda step: own.save_checkpoint(str(stock)),
                until={"written": nothing, "fsynced": lambda: fsync_all(stock)},
                load=lambda step: _load(own, str(stock)),
                files=stock,
                clean=lambda step: remove(stock),
            )
        ]
        waiting, going_on = _engine(nbytes), _engine(nbytes)
        engines += [waiting, going_on]
        contenders += [
            _ours("installed, one tier", ONE_NOTE, waiting, install(waiting, one), 1, root / "one"),
            _ours("wait='staged', two tiers", TWO_NOTE, going_on, install(going_on, two, wait="staged"), 2, root / "two"),
        ]
        advance(0)
        own.save_checkpoint(str(stock))
        stored = sum(path.stat().st_size for path in stock.rglob("*.pt"))
        remove(stock)
        compete(f"DeepSpeed {deepspeed.__version__}, ZeRO stage 2", stored, contenders, advance, repeat)


def _ours(name: str, note: str, engine: Any, tier: Any, tiers: int, place: Path) -> Contender:
    pointers = f"{place}-latest"
    return Contender(
        name=name,
        note=note,
        save=lambda step: engine.save_checkpoint(pointers),
        until=until_durable(lambda: tier.ticket, tiers=tiers),
        load=lambda step: _load(engine, pointers),
        files=place,
    )


def _load(engine: Any, folder: str) -> None:
    path, _ = engine.load_checkpoint(folder)
    if path is None:
        raise RuntimeError("DeepSpeed did not load")


def _engine(nbytes: int) -> Any:
    """Of about `nbytes` when saved: 16 a parameter, for stage 2 keeps weights of its own beside the model's. All alike."""
    torch.manual_seed(0)
    model = linears(nbytes // 16)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config)[0]
