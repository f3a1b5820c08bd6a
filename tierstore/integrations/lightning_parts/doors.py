"""The doors' classes without Lightning's bases: ``lightning`` and ``pytorch_lightning`` each have bases of their own."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch

from tierstore.format.objects import ObjectCodecs
from tierstore.integrations.lightning_parts.last import body_of, body_or_refuse, last_uris, may_remove
from tierstore.integrations.lightning_parts.model_parallel import StrategyRanks, load_jointly, model_state, optimizer_state
from tierstore.integrations.lightning_parts.saving import Body, Plain, Wait
from tierstore.tier_uri import is_tier_uri

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
else:  # each package has its own, and joins it
    ModelCheckpoint = ModelParallelStrategy = object

__all__ = ["CheckpointIODoor", "ModelCheckpointDoor", "ModelParallelDoor"]


class CheckpointIODoor:
    """`tierstore.integrations.lightning.TierCheckpointIO` without its base."""

    _plain: Callable[[], Plain]
    """Lightning's own, for files that are no pointers."""

    def __init__(
        self,
        source: Any,
        *,
        run: str | None = None,
        retention: Any = None,
        codecs: ObjectCodecs | None = None,
        wait: Wait = "staged",
    ) -> None:
        self.body = Body(source, plain=self._plain(), run=run, retention=retention, codecs=codecs, wait=wait)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves as step ``global_step``; the pointer at `path` is written once that is committed.

        Args:
            checkpoint: What Lightning saves. A second path at one step saves nothing anew where it says the same.
            path: Local, or a URI of any file system of fsspec: ``tier:///…`` too.
            storage_options: ``{"metrics": {…}, "tags": […], "final": True}``, or parts of it.

        Raises:
            SaveError: An earlier save failed in the background, or its pointer could not be written.
            UnsupportedTypeError: Something can't be stored without pickle; names its key and the remedy. Nothing was written.
            UsageError: The path is a URI that a path function has damaged.
        """
        self.body.save(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads what the pointer at `path` names, every block proved; a file that is none is loaded by Lightning's `TorchCheckpointIO`.

        Args:
            path: A pointer's; or ``@latest``, ``@12000``, ``@best:METRIC``, ``@tag:TAG``.
            map_location: As `torch.load`; None: the CPU.
            weights_only: For files that are no pointers; from a store nothing is unpickled anyway.

        Raises:
            FileNotFoundError: Nothing is there, or the store has neither that checkpoint nor an older one.
            IntegrityError: No tier has a good copy.
        """
        return self.body.load(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the pointer, once everything that was saved before this call is committed. The data goes by the store's retention."""
        self.body.remove(path)

    def teardown(self) -> None:
        """Drains: all saves are committed and have their pointers, and what this object opened is closed. The next use opens it anew.

        Raises:
            SaveError: A save or a pointer failed, and was not told of yet.
            DeadlineError: Tiers have not taken what is pending for ``save.patience``; the next process or `tierstore sync` goes on.
        """
        self.body.teardown()

    def as_file(self, path: Any) -> io.BytesIO:
        """The checkpoint at `path` as a file in memory, for ``Model.load_from_checkpoint(…)``, which reads files of Lightning's only."""
        file = io.BytesIO()
        torch.save(self.body.load(path), file)
        file.seek(0)
        return file

    def latest(self) -> str | None:
        """``"@latest"`` for ``fit(ckpt_path=…)``, or None where the run has no committed checkpoint yet."""
        return self.body.latest()


class ModelCheckpointDoor(ModelCheckpoint):
    """`tierstore.integrations.lightning.TierModelCheckpoint` without its base."""

    save_last: bool | Literal["link"] | None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by Lightning."""
        if self.save_last == "link":
            self.save_last = True
        super().setup(trainer, pl_module, stage)

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        """Whether a checkpoint is there, or will be once its save is committed."""
        if super().file_exists(filepath, trainer):
            return True
        body = body_of(trainer.strategy.checkpoint_io)
        pending = trainer.is_global_zero and body is not None and body.pending(filepath)
        return bool(trainer.strategy.reduce_boolean_decision(pending, all=False))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        return last_uris(super()._find_last_checkpoints(trainer), self.dirpath)

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        if not is_tier_uri(previous):
            return bool(super()._should_remove_checkpoint(trainer, previous, current))
        return bool(previous != current) and may_remove(previous, self.dirpath, trainer.ckpt_path)


class ModelParallelDoor(ModelParallelStrategy):
    """`tierstore.integrations.lightning.TierModelParallelStrategy` without its base."""

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, True, process_group_backend, timeout)

    def setup_environment(self) -> None:
        """Called by Lightning: the ranks are there from here on."""
        super().setup_environment()
        body_or_refuse(self.checkpoint_io).join()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, sharded."""
        return model_state(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state, sharded, by parameters' names."""
        own: torch.optim.Optimizer = getattr(optimizer, "_optimizer", optimizer)
        return optimizer_state(self.model, own)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves on all ranks; errors as `TierCheckpointIO.save_checkpoint`, on all of them."""
        ranks = self._tier_ranks()
        body_or_refuse(self.checkpoint_io).save(checkpoint, ranks.share(str(filepath)), storage_options, ranks=ranks)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads into the model and its optimizers on all ranks."""
        body = body_or_refuse(self.checkpoint_io)
        strict = self.lightning_module.strict_loading
        found = load_jointly(body, checkpoint_path, self._tier_ranks(), model=self.model, optimizers=list(self.optimizers), strict=strict)
        return super().load_checkpoint(checkpoint_path, weights_only) if found is None else found

    def teardown(self) -> None:
        """Called by Lightning."""
        super().teardown()
        self.checkpoint_io.teardown()

    def _tier_ranks(self) -> StrategyRanks:
        return StrategyRanks(self.global_rank, self.broadcast, lambda value: self.reduce_boolean_decision(value, all=True))
