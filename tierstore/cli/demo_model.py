"""What the demo trains: a small byte-level transformer in bf16 with fp32 master weights, on the standard library's own sources.

Everything that steers the training lies in one state (`Trainer.state`): working and master weights, AdamW's moments, the schedule,
the sampler's generator, and the random states of Python, numpy and torch. All four are drawn from at every step (dropout from
torch, noise in the input from numpy, its kind from Python, positions from the sampler), so that a run which forgot one of them
would leave the curve of the uninterrupted run at once.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SEQUENCE", "LanguageModel", "Trainer", "read_corpus"]

WIDTH = 128
HEADS = 4
LAYERS = 4
PAIRS = 16384
SEQUENCE = 64
BATCH = 8
PEAK_LR = 3e-3
WARMUP = 10
DROPOUT = 0.1
CORPUS_NBYTES = 4 << 20
THREADS = 1
"""One: the same sums in the same order on any machine, and the other processors are free for the saves in the background."""


class Linear(nn.Module):
    """A bf16 weight that is multiplied in fp32: what bf16 units do, and fast on processors that have none."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self.weight.float()).to(x.dtype)


class Block(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = Linear(WIDTH, 3 * WIDTH)
        self.out = Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, 4 * WIDTH)
        self.down = Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, WIDTH) to the same."""
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH)), DROPOUT, self.training)
        grown = functional.gelu(self.up(self.norm_2(x)))
        return x + functional.dropout(self.down(grown), DROPOUT, self.training)


class LanguageModel(nn.Module):
    """Predicts the next byte. The output layer is tied to the byte embedding; hashed byte pairs widen the view."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.pairs = nn.Embedding(PAIRS, WIDTH)
        self.places = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Linear(WIDTH, 256)
        self.bytes.weight = self.head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes as int64 (batch, sequence) to logits (batch, sequence, 256)."""
        before = functional.pad(tokens, (1, 0))[:, :-1]
        x = self.bytes(tokens) + self.pairs((before * 256 + tokens) * 40503 % PAIRS) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Trainer:
    """Mixed-precision training that is exact: the same state always gives the same next step, to the last bit.

    The working weights are bf16; AdamW steps fp32 master weights, which are rounded back into the working weights after each step.

    Args:
        corpus: The text, uint8, one dimension.
        seed: Seeds every generator.
        total: Steps that the learning rate's schedule is laid out for.
    """

    def __init__(self, corpus: Tensor, *, seed: int, total: int) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(THREADS)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.corpus = corpus
        self.sampler = torch.Generator().manual_seed(seed)
        self.samples = 0
        self.model = LanguageModel()
        self.master = {name: nn.Parameter(p.detach().clone()) for name, p in self.model.named_parameters()}
        self.model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.master.values(), lr=PEAK_LR, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: _rate(step, total))
        self.step = 0
        self.loss = math.nan

    def parameters(self) -> int:
        """How many parameters are trained."""
        return sum(p.numel() for p in self.master.values())

    def train_step(self) -> float:
        """One step; returns its loss, in nats per byte."""
        inputs, targets = self._batch()
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.float().view(-1, 256), targets.reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self.master[name].grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.master.values(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name])
        self.step += 1
        self.loss = float(loss.detach())
        return self.loss

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on; the tensors are the live ones, not copies."""
        return {
            "model": self.model.state_dict(),
            "master": {name: p.detach() for name, p in self.master.items()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "sampler": {"generator": self.sampler.get_state(), "samples": self.samples},
            "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            for name, parameter in self.master.items():
                parameter.copy_(state["master"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.sampler.set_state(state["sampler"]["generator"])
        self.samples = state["sampler"]["samples"]
        random.setstate(state["rng"]["python"])
        np.random.set_state(state["rng"]["numpy"])
        torch.set_rng_state(state["rng"]["torch"])
        self.step = state["step"]

    def digest(self) -> str:
        """SHA-256 over names and bits of all working and master weights and AdamW's moments."""
        found = hashlib.sha256()
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        tensors |= {f"master.{name}": p for name, p in self.master.items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": t for name, t in moments.items()}
        for name in sorted(tensors):
            found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
            found.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def _batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.corpus) - SEQUENCE - 1, (BATCH,), generator=self.sampler)
        self.samples += BATCH
        windows = torch.stack([self.corpus[start : start + SEQUENCE + 1] for start in starts.tolist()]).long()
        inputs = windows[:, :-1].clone()
        noisy = torch.from_numpy(np.random.random(inputs.shape) < 0.02)  # the legacy generator: the one that users seed and save
        inputs[noisy] = random.choice(b" \n?x")
        return inputs, windows[:, 1:]


def read_corpus(nbytes: int = CORPUS_NBYTES) -> Tensor:
    """The first `nbytes` bytes of the standard library's sources in the order of their names, as uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in ("site-packages", "dist-packages", "test", "__pycache__"))
        for name in sorted(files):
            if name.endswith(".py"):
                text += (Path(folder) / name).read_bytes()
        if len(text) >= nbytes:
            break
    return torch.frombuffer(text[:nbytes], dtype=torch.uint8)


def _rate(step: int, total: int) -> float:
    """Linear warm-up, then a cosine to a tenth (Loshchilov and Hutter, arXiv 1608.03983)."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - WARMUP) / max(1, total - WARMUP)))
