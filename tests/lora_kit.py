"""What the tests of fine-tuning adapters share: a state of which most never changes."""

from __future__ import annotations

from typing import Any

import torch


def lora_state(step: int, *, base: int = 0) -> dict[str, Any]:
    """Frozen weights of 12 MiB, adapters of 192 KiB that are trained."""
    frozen = torch.Generator().manual_seed(base)
    trained = torch.Generator().manual_seed(1000 + step)
    layers = {f"layer{n}": torch.randn(1024, 2048, generator=frozen).bfloat16() for n in range(3)}
    adapters = {f"layer{n}": torch.randn(8, 2048, generator=trained) for n in range(3)}
    return {"base": layers, "lora": adapters, "step": step}
