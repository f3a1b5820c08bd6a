"""The door for ``import lightning``; for ``import pytorch_lightning`` there is `tierstore.integrations.pytorch_lightning`.

::

    from tierstore.integrations.lightning import TierCheckpointIO

    Trainer(plugins=[TierCheckpointIO("tierstore.yaml", run="sft-7")]).fit(model, ckpt_path="last")
"""

from __future__ import annotations

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from tierstore.integrations.lightning_parts.contents import lightning_codecs
from tierstore.integrations.lightning_parts.doors import CheckpointIODoor, ModelCheckpointDoor, ModelParallelDoor

__all__ = ["TierCheckpointIO", "TierModelCheckpoint", "TierModelParallelStrategy", "lightning_codecs"]


class TierCheckpointIO(CheckpointIODoor, CheckpointIO):
    __doc__ = CheckpointIODoor.__doc__
    _plain = TorchCheckpointIO


class TierModelCheckpoint(ModelCheckpointDoor, ModelCheckpoint):
    __doc__ = ModelCheckpointDoor.__doc__


class TierModelParallelStrategy(ModelParallelDoor, ModelParallelStrategy):
    __doc__ = ModelParallelDoor.__doc__
