"""Megatron's strategies that save into a store."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    SaveCommonStrategy,
)
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from tierstore.errors import TierStoreError, UsageError
from tierstore.integrations.committing import wait_committed
from tierstore.integrations.megatron_parts.home import BACKEND, VERSION, Home, step_of
from tierstore.integrations.megatron_parts.layout import share_of
from tierstore.names import Attempt
from tierstore.state.agreement import telling
from tierstore.tiers.ticket import Ticket

__all__ = ["EitherSaveCommonStrategy", "TierSaveCommonStrategy", "TierSaveShardedStrategy", "wait_for_mark"]

_POLL_S = 0.1


class TierSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves sharded state, and the common state that was handed over, as one checkpoint of a store.

    Args:
        source: An open store, or what `tierstore.open` takes.
        run: The run, where `source` does not say it.

    Attributes:
        metrics: Numbers that rank the checkpoints; may be set before each save, rank 0's count.
        tags: Labels; likewise.
        final: Marks the run's last checkpoint; likewise.
        ticket: The newest save's; None before the first.
        begun: How many saves have come as far as to this strategy.
    """

    def __init__(self, source: Any, *, run: str | None = None) -> None:
        super().__init__(BACKEND, VERSION)
        self.home = source if isinstance(source, Home) else Home(source, run)
        self.metrics: Mapping[str, float] = {}
        self.tags: tuple[str, ...] = ()
        self.final = False
        self.ticket: Ticket | None = None
        self.begun = 0
        self._common: tuple[str, Any] | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def hand_over(self, common: Any, checkpoint_dir: Any) -> None:
        """Gives it the common state of the checkpoint that is saved next."""
        self._common = (os.fspath(checkpoint_dir), common)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Saves; returns when the checkpoint is committed.

        Raises:
            UnsupportedTypeError: An object can't be stored; names its place. On the other ranks a RankError.
            SaveError: It did not commit.
        """
        self._finish(*self._begin(sharded_state_dict, checkpoint_dir))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Copies the state into host memory; the background work of this process does the rest.

        The request's function runs in a process that Megatron forks or spawns: it only waits, until this one says that the checkpoint is
        committed or failed. The request is finalised by raising the error, if there is one.
        """
        ticket, what = self._begin(sharded_state_dict, checkpoint_dir)
        folder = tempfile.mkdtemp(prefix="tierstore-megatron-")
        mark = os.path.join(folder, "settled")
        timeout_s = self.home.store.config.save.commit_timeout_s
        threading.Thread(target=_settle, args=(ticket, timeout_s, mark), daemon=True, name="tierstore-settle").start()

        def finalize() -> None:
            with contextlib.suppress(OSError):
                os.unlink(mark)
                os.rmdir(folder)
            self._finish(ticket, what)

        return AsyncRequest(wait_for_mark, (mark, os.getpid()), [finalize])

    # ---- inside

    def _begin(self, sharded_state_dict: Any, checkpoint_dir: Any) -> tuple[Ticket, str]:
        self.begun += 1
        store = self.home.store
        common, self._common = self._common, None
        what = f"the save of {os.path.basename(os.path.normpath(os.fspath(checkpoint_dir)))} of run {store.run!r}"
        agreement = store.agreement
        with telling(agreement, what):
            step = step_of(checkpoint_dir)
            state = self._common_state(common, checkpoint_dir)
            share = share_of(nested_values(sharded_state_dict), state if store.rank == 0 else None, rank=store.rank, codecs=store.codecs)
            store.raise_errors()
            attempt = store.new_attempt(step)
        if agreement is not None:
            attempt = Attempt(run=store.run, step=step, save_id=agreement.share(what, attempt.save_id.encode()).decode())
        try:
            with telling(agreement, what):
                staged = store.stage_chunks(share.chunks, objects=share.objects, aliases=share.aliases)
                ticket = store.submit(attempt, staged, metrics=self.metrics, tags=self.tags, final=self.final)
            if agreement is not None:
                agreement.agree(what, b"", lambda reports: b"")  # a rank that failed is known to all before anybody waits for a commit
        except Exception:
            if store.rank == 0:
                with contextlib.suppress(TierStoreError):
                    store.condemn(attempt, "a rank failed to stage its part")
            raise
        self.ticket = ticket
        return ticket, what

    def _common_state(self, handed: tuple[str, Any] | None, checkpoint_dir: Any) -> Any:
        folder = os.fspath(checkpoint_dir)
        stock = Path(folder, COMMON_STATE_FNAME)
        if handed is None or os.path.normpath(handed[0]) != os.path.normpath(folder):
            raise UsageError(
                f"the common state of {folder} was not given to the store: Megatron has written it to {stock} alone",
                hint="save with tierstore.integrations.megatron.save, or call register(…) once before dist_checkpointing.save",
            )
        if self.home.store.rank == 0:
            stock.unlink(missing_ok=True)  # what Megatron's own strategy wrote is a pickle, and nobody's to read
        return handed[1]

    def _finish(self, ticket: Ticket, what: str) -> None:
        wait_committed(self.home.store, ticket, what)


class TierSaveCommonStrategy(SaveCommonStrategy):
    """Hands the common state to a `TierSaveShardedStrategy`, which stores it with the rest."""

    def __init__(self, sharded: TierSaveShardedStrategy) -> None:
        super().__init__("torch", 1)  # what Megatron writes down as the common backend, whichever it was
        self._sharded = sharded

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        self._sharded.hand_over(common_state_dict, checkpoint_dir)


class EitherSaveCommonStrategy(SaveCommonStrategy):
    """Megatron's own common strategy, which also shows the state to ours: whether the store takes it the sharded strategy decides."""

    def __init__(self, sharded: TierSaveShardedStrategy, stock: SaveCommonStrategy) -> None:
        super().__init__(stock.backend, stock.version)
        self.stock, self._sharded = stock, sharded

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        self.stock.save_common(common_state_dict, checkpoint_dir)
        self._sharded.hand_over(common_state_dict, checkpoint_dir)

    def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> None:
        self.stock.save_sharded_objects(sharded_objects_state_dict, checkpoint_dir)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


def wait_for_mark(mark: str, trainer: int) -> None:
    """What Megatron runs in a process of its own: returns when the trainer has made the file `mark`, or is gone. It uses nothing else."""
    while not os.path.exists(mark) and (os.getpid() == trainer or os.getppid() == trainer):
        time.sleep(_POLL_S)


def _settle(ticket: Ticket, timeout_s: float, mark: str) -> None:
    with contextlib.suppress(TierStoreError):  # finalize tells it
        ticket.wait("committed", timeout_s)
    with contextlib.suppress(OSError):  # the trainer did not wait for it
        Path(mark).touch()
