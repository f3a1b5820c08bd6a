"""`Checkpointer`: for a training loop in plain PyTorch."""

from __future__ import annotations

from tierstore.checkpointer.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
