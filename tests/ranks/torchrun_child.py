"""A training job as torchrun starts it: DDP with a node tier of its own for each rank, saves every step, resumes. Run by test_torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tierstore


def main(folder: Path, until: int, die_at: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tiers = [  # as on two nodes: neither sees the other's node tier
        {"name": "node", "uri": str(folder / f"node{rank}"), "scope": "node"},
        {"name": "shared", "uri": str(folder / "shared"), "scope": "shared"},
    ]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    told = {"rank": rank, "resumed": None, "weights": 0.0}
    with tierstore.open({"version": 1, "run": "job", "tiers": tiers}) as store:
        state = {"model": model.module.state_dict(), "optim": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": 0}
        begin = 0
        if (resumed := store.resume()) is not None:
            state = resumed.state
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optim"])
            torch.set_rng_state(state["rng"])
            begin = told["resumed"] = resumed.step
        else:
            torch.manual_seed(100 + rank)  # from here on each rank has random numbers of its own
        ticket = None
        for step in range(begin + 1, until + 1):
            loss = model(torch.randn(8, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = {"model": model.module.state_dict(), "optim": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": step}
            ticket = store.save(step, state)
            if step == die_at:
                ticket.wait("durable", 60)
                os._exit(3)
        if ticket is not None:
            ticket.wait("durable", 60)
    told["weights"] = float(model.module.weight.double().sum())
    told["rng"] = float(torch.get_rng_state().double().sum())
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
