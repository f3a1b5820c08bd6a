"""What the tests of the Checkpointer share: a small training loop whose every part counts, here or in a process of its own.

A process is a fork of a server that has imported torch, so that it starts within milliseconds; what it prints comes as JSON lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fork_kit import SERVER

from tierstore.checkpointer import Checkpointer


class Sampler:
    """Knows which samples come next."""

    def __init__(self) -> None:
        self.position = 0

    def __call__(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Loop:
    """Model, optimizer, schedule, sampler, averaged weights; each step draws random numbers of all generators."""

    def __init__(self, width: int = 16) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.width = width
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(width))
        self.model.add_module("unused", torch.nn.Linear(2, 2))  # never gets a gradient: the optimizer has no state for it
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.sampler = Sampler()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def checkpointer(self, source: Any, **options: Any) -> Checkpointer:
        return Checkpointer(
            source,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            extra={"average": self.average},
            **options,
        )

    def train(self) -> float:
        data = torch.randn(8, self.width) * (1 + random.random()) + float(np.random.rand()) + self.sampler() / 1000
        loss = self.model[2](self.model[1](self.model[0](data))).square().sum(1).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return loss.item()

    def digest(self) -> str:
        """Of everything that training goes on from."""
        whole = hashlib.sha256()
        optimizer = self.optimizer.state_dict()
        for state in (self.model.state_dict(), self.average.state_dict(), *(optimizer["state"][key] for key in sorted(optimizer["state"]))):
            for name, value in state.items():
                whole.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
        told = [optimizer["param_groups"], self.scheduler.state_dict(), self.sampler.position, random.random(), float(np.random.rand())]
        whole.update(repr(told).encode() + torch.randn(3).numpy().tobytes())
        return whole.hexdigest()


class Process:
    """``body(say, **values)`` in a process of its own; `say` sends JSON values here. Used as a context manager it is killed at the end."""

    def __init__(self, body: Callable[..., None], folder: Path, **values: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.errors = folder / "stderr.txt"
        reader, writer = SERVER.Pipe(duplex=False)
        self._process = SERVER.Process(target=_main, args=(body, writer, str(self.errors), values))
        self._process.start()
        writer.close()
        self._output = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._output.close()

    def told(self) -> Iterator[Any]:
        """What it says, until it is dead."""
        while line := self._output.readline():
            yield json.loads(line)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self, timeout_s: float = 60.0) -> int:
        """Its exit code; fails if it lives on."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"it did not end\n{self.errors.read_text()}"
        return self._process.exitcode


def _main(body: Callable[..., None], writer: Any, errors: str, values: dict[str, Any]) -> None:
    told = os.fdopen(os.dup(writer.fileno()), "w", buffering=1, encoding="utf-8")
    with open(errors, "a", buffering=1) as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    try:
        body(lambda value: told.write(json.dumps(value) + "\n"), **values)
    except BaseException:  # noqa: BLE001 - boundary of the process
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
