"""`Checkpointer` in a loop of one's own against `torch.save`; run by `bench_engines`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from contest import ONE_NOTE, TWO_NOTE, Contender, compete, one_tier, two_tiers, until_durable
from peers.base import nothing

import tierstore


def measure(root: Path, nbytes: int, repeat: int) -> None:
    model, optimizer = trained(nbytes)
    plain = root / "torch"
    plain.mkdir()
    file = plain / "state.pt"

    def save(step: int) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    def sync() -> None:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(step: int) -> None:
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    with one_tier(root / "one") as one, two_tiers(root / "two") as two:
        contenders = [
            Contender(
                name="torch.save",
                note="neither syncs nor hashes, and overwrites its file in place; 'fsynced' is the same save, its file synced after it",
                save=save,
                until={"written": nothing, "fsynced": sync},
                load=load,
                files=plain,
            ),
            _ours("Checkpointer, one tier", ONE_NOTE, _checkpointer(one, model, optimizer), 1, root / "one"),
            _ours("Checkpointer, two tiers", TWO_NOTE, _checkpointer(two, model, optimizer), 2, root / "two"),
        ]
        advance(model, optimizer, 0)
        save(0)
        compete("A plain loop", file.stat().st_size, contenders, lambda step: advance(model, optimizer, step), repeat)


def _checkpointer(store: tierstore.Store, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tierstore.Checkpointer:
    return tierstore.Checkpointer(store, model=model, optimizer=optimizer, rng=False, signals=False, progress=False)


def _ours(name: str, note: str, ckpt: tierstore.Checkpointer, tiers: int, place: Path) -> Contender:
    tickets: list[tierstore.Ticket] = []
    ckpt.resume()
    return Contender(
        name=name,
        note=note,
        save=lambda step: tickets.append(ckpt.save(step)),
        until=until_durable(lambda: tickets[-1], tiers=tiers),
        load=ckpt.load,
        files=place,
    )


def trained(nbytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose weights and AdamW state take about `nbytes`: 12 bytes a parameter."""
    torch.manual_seed(0)
    model = linears(nbytes // 12)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def linears(parameters: int, layers: int = 24) -> torch.nn.Sequential:
    """Square layers of about `parameters` in all."""
    width = max(8, int((parameters / layers) ** 0.5) // 8 * 8)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def batch_of(model: Any, step: int) -> torch.Tensor:
    """Alike for all models of a size, and another one at each step."""
    return torch.randn(2, model[0].in_features, generator=torch.Generator().manual_seed(step))


def advance(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch_of(model, step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
