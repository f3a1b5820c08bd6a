"""The door for ``import pytorch_lightning``, whose classes are its own; else as `tierstore.integrations.lightning`.

::

    from tierstore.integrations.pytorch_lightning import TierCheckpointIO

    Trainer(plugins=[TierCheckpointIO("tierstore.yaml", run="sft-7")]).fit(model, ckpt_path="last")
"""

from __future__ import annotations

from tierstore.integrations.needs import needs

with needs("pytorch_lightning", "lightning_fabric", extra="lightning"):
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import ModelParallelStrategy

from tierstore.integrations.lightning_parts.contents import lightning_codecs
from tierstore.integrations.lightning_parts.doors import CheckpointIODoor, ModelCheckpointDoor, ModelParallelDoor

__all__ = ["TierCheckpointIO", "TierModelCheckpoint", "TierModelParallelStrategy", "lightning_codecs"]


class TierCheckpointIO(CheckpointIODoor, CheckpointIO):
    """As `tierstore.integrations.lightning.TierCheckpointIO`."""

    _plain = TorchCheckpointIO


class TierModelCheckpoint(ModelCheckpointDoor, ModelCheckpoint):
    """As `tierstore.integrations.lightning.TierModelCheckpoint`."""


class TierModelParallelStrategy(ModelParallelDoor, ModelParallelStrategy):
    """As `tierstore.integrations.lightning.TierModelParallelStrategy`."""
