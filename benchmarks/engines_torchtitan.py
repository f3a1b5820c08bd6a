"""torchtitan's `CheckpointManager` with a `tier://` folder against one on the local disk; run by `bench_engines`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import fsspec
import torch
from contest import ONE_NOTE, TWO_NOTE, Contender, compete, remove
from engines_plain import batch_of, linears
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

LOCAL = "torch's writer syncs its files; does not hash"
SYNC = "; and torch calls os.sync(), for the whole host, after each file"


def measure(root: Path, nbytes: int, repeat: int) -> None:
    torch.manual_seed(0)
    model = linears(nbytes // 12)
    adam = default_adamw(lr=1e-3)
    adam.implementation = "for-loop"
    optimizers = adam.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=1000)

    def advance(step: int) -> None:
        optimizers.zero_grad()
        model(batch_of(model, step)).square().mean().backward()
        optimizers.step()

    def manager(folder: str, mode: str) -> CheckpointManager:
        config = CheckpointManager.Config(
            enable=True, folder=folder, interval=1, keep_latest_k=0, async_mode=mode, last_save_model_only=False
        )
        return CheckpointManager(
            config,
            dataloader=None,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={},
            sd_adapter=None,
            base_folder=str(root),
        )

    managers = {mode: manager(f"local-{mode}", mode) for mode in ("disabled", "async")}
    contenders = [_local(f"folder, {mode}", each, root / f"local-{mode}") for mode, each in managers.items()]
    for mode, tiers in (("disabled", ["node"]), ("async", ["node", "shared"])):
        place = root / f"tiers-{mode}"
        place.mkdir()
        config = place / "store.yaml"
        config.write_text(f"version: 1\ntiers: [{', '.join(str(place / tier) for tier in tiers)}]\n")
        uri = f"tier://{config}/bench"
        managers[uri] = manager(uri, mode)
        contenders.append(_ours(mode, len(tiers), managers[uri], uri, place))
    advance(0)
    stored = sum(p.nbytes for p in model.parameters()) * 3
    compete(f"torchtitan {version('torchtitan')}", stored, contenders, advance, repeat)
    for each in managers.values():
        each.close()


def _local(name: str, manager: Any, folder: Path) -> Contender:
    return Contender(
        name=name,
        note=LOCAL,
        save=lambda step: _save(manager, step),
        until={"written and synced": manager.maybe_wait_for_saving},
        load=lambda step: _load(manager, step),
        files=folder,
        clean=lambda step: remove(folder / f"step-{step}"),
    )


def _ours(mode: str, tiers: int, manager: Any, uri: str, place: Path) -> Contender:
    fs, path = fsspec.url_to_fs(uri)
    further = {} if tiers == 1 else {"on both tiers": fs.sync_tiers}
    return Contender(
        name=f"tier://, {mode}, {'one tier' if tiers == 1 else 'two tiers'}",
        note=(ONE_NOTE if tiers == 1 else TWO_NOTE) + SYNC,
        save=lambda step: _save(manager, step),
        until={"closed": manager.maybe_wait_for_saving, **further},
        load=lambda step: _load(manager, step),
        files=place,
        clean=lambda step: fs.rm(f"{path}/step-{step}", recursive=True),
    )


def _save(manager: Any, step: int) -> None:
    if not manager.save(step, last_step=False):
        raise RuntimeError("torchtitan did not save")
    manager.maybe_wait_for_staging()


def _load(manager: Any, step: int) -> None:
    if not manager.load(step=step):
        raise RuntimeError("torchtitan did not load")
