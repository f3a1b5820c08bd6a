"""The demo's training process: ``python -m tierstore.cli.demo_train SPEC`` trains and reports as one JSON object a line on stdout.

It is a process of its own so that the demo can kill it for real. SPEC is the JSON of a `TrainSpec`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import tierstore
from tierstore.cli.demo_model import Trainer, read_corpus
from tierstore.cli.demo_spec import TrainSpec

__all__ = ["main", "train"]

Emit = Callable[[Mapping[str, Any]], None]

_STANDS_S = 120.0
"""How long it waits to be killed before it goes on by itself."""


def train(spec: TrainSpec, emit: Emit) -> None:
    """Trains from the newest committed checkpoint, or from the beginning, to ``spec.until``."""
    trainer = Trainer(read_corpus(), seed=spec.seed, total=spec.total)
    emit({"event": "start", "torch": torch.__version__, "threads": torch.get_num_threads(), "parameters": trainer.parameters()})
    if not spec.config:
        _run(trainer, spec, emit, lambda step: _save_synchronously(trainer, Path(spec.scratch), step, emit))
        return
    with tierstore.open(spec.config) as store:
        began = time.perf_counter()
        resumed = store.resume()
        if resumed is not None:
            trainer.restore(resumed.state)
            emit({"event": "resumed", "step": resumed.step, "seconds": time.perf_counter() - began})
        _report_digest(trainer, spec, emit)
        _run(trainer, spec, emit, lambda step: _save(store, trainer, step, step == spec.until, emit))
        emit({"event": "draining"})
    emit({"event": "closed"})


def main() -> None:
    """Reads the specification from the command line, trains, and reports until the end."""
    lock = threading.Lock()  # callbacks report from the store's own threads

    def emit(event: Mapping[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()

    spec = json.loads(sys.argv[1])
    handler = _Events(emit)
    handler.setLevel(logging.WARNING)
    logging.getLogger("tierstore").addHandler(handler)
    train(TrainSpec(**{**spec, "digests": tuple(spec["digests"])}), emit)


class _Events(logging.Handler):
    """tierstore's warnings as events, so that the demo shows them where they happen."""

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        self._emit({"event": "warning", "kind": str(record.msg), "text": record.getMessage()})


def _run(trainer: Trainer, spec: TrainSpec, emit: Emit, save: Callable[[int], None]) -> None:
    while trainer.step < spec.until:
        began = time.perf_counter()
        loss = trainer.train_step()
        emit({"event": "step", "step": trainer.step, "loss": loss, "seconds": time.perf_counter() - began})
        if trainer.step % spec.every == 0 or trainer.step == spec.until:
            save(trainer.step)
        if trainer.step == spec.stands_at:
            threading.Event().wait(_STANDS_S)
        _report_digest(trainer, spec, emit)


def _save(store: tierstore.Store, trainer: Trainer, step: int, final: bool, emit: Emit) -> None:
    emit({"event": "saving", "step": step})  # before it begins: who is killed in it has said so
    began = time.perf_counter()
    ticket = store.save(step, trainer.state(), metrics={"train/loss": trainer.loss}, final=final)
    emit({"event": "save", "step": step, "stall_s": time.perf_counter() - began, "attempt": ticket.attempt.name})
    for level in ("staged", "committed", *(tier.name for tier in store.config.tiers)):
        ticket.on(
            level, lambda reached: emit({"event": "level", "step": step, "level": reached.level, "seconds": time.perf_counter() - began})
        )


def _save_synchronously(trainer: Trainer, scratch: Path, step: int, emit: Emit) -> None:
    """What a training loop does without any library: ``torch.save`` to a new file, made durable, then renamed."""
    began = time.perf_counter()
    scratch.mkdir(parents=True, exist_ok=True)
    with open(scratch / "checkpoint.tmp", "wb") as file:
        torch.save(trainer.state(), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch / "checkpoint.tmp", scratch / "checkpoint.pt")
    emit({"event": "save", "step": step, "stall_s": time.perf_counter() - began, "attempt": ""})


def _report_digest(trainer: Trainer, spec: TrainSpec, emit: Emit) -> None:
    if trainer.step in spec.digests:
        emit({"event": "digest", "step": trainer.step, "sha256": trainer.digest()})


if __name__ == "__main__":
    main()
