"""The door for ``import lightning``; for ``import pytorch_lightning`` there is `tierstore.integrations.pytorch_lightning`.

::

    from tierstore.integrations.lightning import TierCheckpointIO

    Trainer(plugins=[TierCheckpointIO("tierstore.yaml", run="sft-7")]).fit(model, ckpt_path="last")
"""

from __future__ import annotations

from tierstore.integrations.needs import needs

with needs("lightning", extra="lightning"):
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

from tierstore.integrations.lightning_parts.contents import lightning_codecs
from tierstore.integrations.lightning_parts.doors import CheckpointIODoor, ModelCheckpointDoor, ModelParallelDoor

__all__ = ["TierCheckpointIO", "TierModelCheckpoint", "TierModelParallelStrategy", "lightning_codecs"]


class TierCheckpointIO(CheckpointIODoor, CheckpointIO):
    """Lightning's checkpoints as checkpoints of a store; at each path a small pointer file says which one it stands for.

    ``Trainer(plugins=[TierCheckpointIO("tierstore.yaml", run="sft-7")])``. Nothing is opened before the first save or load, so each
    process of a DDP job makes its own; rank 0 saves. Fits every strategy that saves on rank 0, and `TierModelParallelStrategy`.

    Args:
        source: What `tierstore.open` takes, or an open `Store` (opened with ``rank=0, world_size=1`` and ``codecs=lightning_codecs()``),
            which stays open.
        run: As `tierstore.open`; one training, one run.
        retention: As `tierstore.open`.
        codecs: Codecs for types of your own in hyper-parameters and callbacks; `lightning_codecs` adds its own to them.
        wait: When a save returns: ``staged`` (copied; the rest follows in the background), ``committed``, or ``durable``.
    """

    _plain = TorchCheckpointIO


class TierModelCheckpoint(ModelCheckpointDoor, ModelCheckpoint):
    """`ModelCheckpoint` for ``dirpath="tier://…"``, where ``ckpt_path="last"`` finds nothing with Lightning's own; local ones work as well.

    Takes the same arguments. A pointer is as small as a link, so ``save_last="link"`` means ``save_last=True``. What training was
    resumed from, and what lies in another folder, is not removed, whatever the file system.
    """


class TierModelParallelStrategy(ModelParallelDoor, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallel) that saves through a `TierCheckpointIO` on all ranks, each its own shards.

    ``Trainer(strategy=TierModelParallelStrategy(), plugins=[TierCheckpointIO(…)])``. A checkpoint loads into any other layout, and
    without a strategy into one process; so do checkpoints that were saved by one process.

    Args:
        data_parallel_size: As `ModelParallelStrategy`; so are all others.
    """
