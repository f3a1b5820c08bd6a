"""`TierStorageWriter`: torch.distributed.checkpoint saves into a tierstore store.

The coordinator names the attempt when it has everybody's plan, and its save id travels in the plans. Each rank copies what it writes into
a staging image and hands that to its own background worker, as `Store.save` does; `finish` returns when the authority has committed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tierstore.dcp.differing import differing
from tierstore.dcp.orders import Orders, check_opened, check_same, check_written, whole_plan, with_orders, without
from tierstore.dcp.own import own_state
from tierstore.dcp.place import Place, moved, place_of
from tierstore.dcp.slim import slim
from tierstore.dcp.stores import Key, close_stores, shared_store, submit
from tierstore.errors import DeadlineError, SaveError, TierStoreError, UsageError, reason_of
from tierstore.format.objects import ObjectCodecs
from tierstore.names import shard_name
from tierstore.state.agreement import Agreement, telling
from tierstore.state.codecs import default_codecs
from tierstore.state.facts import checked_omit
from tierstore.store import Store
from tierstore.tier_uri import is_tier_uri
from tierstore.tiers.ticket import Ticket

__all__ = ["TierStorageWriter"]

log = logging.getLogger(__name__)

_POLL_S = 0.5


@dataclass(slots=True, kw_only=True)
class _Save:
    """One save under way in one thread."""

    place: Place
    omit: tuple[str, ...]
    local: Sequence[WriteItem] | None = None
    orders: Orders | None = None
    ticket: Ticket | None = field(default=None, repr=False)


class TierStorageWriter(StorageWriter, AsyncStager):
    """Saves with ``torch.distributed.checkpoint.save`` and ``async_save`` into a store; a returned save is committed.

    Use one writer for all saves of a run, and `close` it at the end: closing waits until every tier holds what it should. All ranks make it
    alike. It can be pickled at any time. With ``async_save`` it is its own stager: each save gets memory of its own.

    Args:
        source: ``tier://[NAME]/[config.yaml/]RUN[/step-N]``, or a configuration in any form that `tierstore.open` takes; None: the first
            ``checkpoint_id`` says it.
        run: The run, where `source` does not say it.
        store: A store to save into, in place of `source`; it stays the caller's to close. Its rank and world size must be the group's.
        codecs: Codecs for the caller's own types; see `ObjectCodecs.register`.
        metrics: Numbers that rank the checkpoints; the attribute may be set before each save.
        tags: Labels of the checkpoints; likewise.
        final: Marks the run's last checkpoint; likewise.
        omit: Globs of dotted names of tensors that are left out on purpose, as `Store.save` takes them; the same on all ranks. None: as
            configured (``save: {omit: …}``).

    Raises:
        UsageError: A malformed URI.
        ConfigError: The configuration is wrong or missing.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        source: Any = None,
        *,
        run: str | None = None,
        store: Store | None = None,
        codecs: ObjectCodecs | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        final: bool = False,
        omit: Sequence[str] | None = None,
    ) -> None:
        if store is not None and source is not None:
            raise UsageError("a writer has a store or a source, not both", hint="pass store=… alone")
        self._place = Place(config=store.config) if store is not None else None if source is None else place_of(source, run)
        self.metrics = dict(metrics or {})
        self.tags = tuple(tags)
        self.final = final
        self._codecs = codecs
        self._omit = None if omit is None else checked_omit(omit)
        self._begin(store)

    def _begin(self, store: Store | None) -> None:
        """What a process has for itself."""
        self._given = store
        self._used: set[Key] = set()
        self._current = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_given", "_used", "_current")}
        moved_here = getattr(self._current, "place", None)
        return {**state, "_place": moved_here or self._place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(None)

    @property
    def checkpoint_id(self) -> str | None:
        """Where the next save goes, as a ``tier://`` URI; None where nothing was named yet."""
        place = getattr(self._current, "place", None) or self._place
        return None if place is None else str(place)

    # ---- StorageWriter

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save. `checkpoint_id`: a ``tier://`` URI, ``step-N`` or N; options and configuration stay as they are."""
        if checkpoint_id is not None:
            self._place = self._current.place = moved(self._place, checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank.

        Raises:
            UsageError: No step is known, or the ranks are to save without talking to each other.
        """
        place = getattr(self._current, "place", None) or self._place
        if place is None:
            raise UsageError("the writer knows no place to save to", hint="pass checkpoint_id='tier:///RUN/step-N'")
        _ = place.step  # raises where none is known, before anybody plans
        grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not kwargs.get("use_collectives", True) and grouped:
            raise UsageError(
                "with use_collectives=False the ranks can't agree on a save id: each would save a checkpoint of its own share alone",
                hint="leave use_collectives=True; or save without dcp: tierstore.open(…, rank=…, world_size=…).save(step, state)",
            )
        self._current.save = _Save(place=place, omit=self._patterns(place))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Takes out what is left out on purpose; notes this rank's own items, before that and before duplicates are taken out."""
        save = self._saving()
        save.local = tuple(plan.items) if plan.usable else None
        return without(plan, save.omit)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the attempt and tells it to every rank, also to those whose plan has not changed."""
        save = self._saving()
        store = self._store(save.place, 0, len(plans))
        return with_orders(plans, store.new_attempt(save.place.step), store._opened(), save.omit)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stages this rank's share and hands it on; done when it is on a tier. Errors are in the future, those of other ranks too."""
        future: Any = Future()  # torch's stub takes no exception
        try:
            results = self._write(plan, planner)
        except Exception as error:  # noqa: BLE001 - boundary: the future carries it to DCP, which tells all ranks
            future.set_exception(error)
        else:
            future.set_result(results)
        done: Future[list[WriteResult]] = future
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Returns when the checkpoint is committed.

        Raises:
            IncompleteError: Something that was planned was written by nobody.
            SaveError, DeadlineError: It did not commit, or not within ``save.commit_timeout``.
        """
        save = self._saving()
        if save.orders is None or save.ticket is None:
            raise UsageError("finish without write_data on this rank", hint="DCP calls it on the coordinator, in the thread of the save")
        store = self._store(save.place, save.orders.rank, save.orders.world_size)
        with self._giving_up(store, save.orders, late=False):  # what is only late still commits
            check_written(metadata, results)
            save.ticket.wait("committed", store.config.save.commit_timeout_s)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for ``tier://`` URIs only; a `Path` that was one raises UsageError."""
        return is_tier_uri(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # ---- AsyncStager

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies the state into host memory that is this save's own, but for what is left out; tensors that share memory still do. Safe to
        train on afterwards."""
        # Plain memory: what a container has of /dev/shm is often little. The process executor moves what it sends there itself.
        plain = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        stager = DefaultStager(plain)  # one for each save: it would reuse its buffers
        place = getattr(self._current, "place", None) or self._place
        staged: Any = stager.stage(state_dict if place is None else slim(state_dict, self._patterns(place)))
        stager.close()
        return dict(staged)

    def synchronize_staging(self) -> None:
        """Nothing: `stage` has copied when it returns."""

    def close(self) -> None:
        """Drains what this writer's saves left to do and closes its stores; the next save opens them again. A given store stays open.

        Raises:
            SaveError: A background save or promotion failed and was not reported before.
        """
        used, self._used = self._used, set()
        close_stores(used)

    # ---- inside

    def _patterns(self, place: Place) -> tuple[str, ...]:
        """What this writer leaves out."""
        return checked_omit(place.config.save.omit or ()) if self._omit is None else self._omit

    def _saving(self) -> _Save:
        save: _Save | None = getattr(self._current, "save", None)
        if save is None:
            raise UsageError("no save is under way in this thread", hint="DCP calls set_up_storage_writer first")
        return save

    def _store(self, place: Place, rank: int, world_size: int) -> Store:
        if self._given is not None:
            store = self._given
            if (store.run, store.rank, store.world_size) != (place.run, rank, world_size):
                raise UsageError(
                    f"the given store is of run {store.run!r}, rank {store.rank} of {store.world_size}; "
                    f"this save is of run {place.run!r}, rank {rank} of {world_size}",
                    hint="open it with rank= and world_size= of the process group, or give the writer a configuration",
                )
            return store
        key, store_of_all = shared_store(place.config, rank=rank, world_size=world_size)
        self._used.add(key)
        return store_of_all

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        save = self._saving()
        orders = plan.storage_data
        if not isinstance(orders, Orders):
            raise UsageError(
                f"the plan carries no save id but {type(orders).__name__}",
                hint="all ranks save with a TierStorageWriter, and planners keep SavePlan.storage_data",
            )
        save.orders = orders
        what = f"the save of step {orders.attempt.step} of run {orders.attempt.run!r}"
        agreement = _agreement(orders, save.place.config.save.agreement_timeout_s)
        with telling(agreement, what):
            check_same(save.place, save.omit, orders)
            store = self._store(save.place, orders.rank, orders.world_size)
            check_opened(store._opened(), orders)
            plan = whole_plan(plan, planner, orders)
        with self._giving_up(store, orders, late=True):
            save.ticket = self._stage_and_submit(store, plan, planner, save, orders, agreement, what)
        file = shard_name(orders.rank, orders.world_size)
        sizes = (item.tensor_storage_size() or 0 for item in plan.items)
        return [WriteResult(index=i.index, size_in_bytes=n, storage_data=file) for i, n in zip(plan.items, sizes, strict=True)]

    def _stage_and_submit(
        self,
        store: Store,
        plan: SavePlan,
        planner: SavePlanner,
        save: _Save,
        orders: Orders,
        agreement: Agreement | None,
        what: str,
    ) -> Ticket:
        codecs = self._codecs or default_codecs()
        with telling(agreement, what):
            own = own_state(planner, plan, save.local, orders.omit)
            prints = own.fingerprints() if agreement is not None else {}
        different = frozenset[str]() if agreement is None else differing(agreement, what, prints)
        with telling(agreement, what):
            share = own.share(rank=orders.rank, differing=different, codecs=codecs)
            staged = store.stage_chunks(share.chunks, objects=share.objects, aliases=share.aliases, omitted=share.omitted)
            ticket = submit(store, orders.attempt, staged, metrics=self.metrics, tags=self.tags, final=self.final, omit=orders.omit)
            _wait_staged(ticket, patience_s=store.config.save.patience_s, timeout_s=store.config.save.commit_timeout_s)
        if agreement is not None:
            agreement.agree(what, b"", lambda reports: b"")  # a rank that failed is known to all before anybody waits for a commit
        return ticket

    @contextlib.contextmanager
    def _giving_up(self, store: Store, orders: Orders, *, late: bool) -> Iterator[None]:
        """On an error the attempt is lost: the coordinator condemns it, so that no worker waits for it; who called is told by the error.

        `late`: a deadline that passed is such an error too.
        """
        try:
            yield
        except Exception as error:
            store.told(orders.attempt)
            if orders.rank == 0 and (late or not isinstance(error, DeadlineError)):
                try:
                    store.condemn(orders.attempt, f"a rank failed to write: {reason_of(error)}")
                except TierStoreError as further:
                    log.warning("run=%s step=%d can't be condemned: %s", orders.attempt.run, orders.attempt.step, further.message)
            raise


def _agreement(orders: Orders, deadline_s: float) -> Agreement | None:
    if orders.world_size == 1:
        return None
    return Agreement.named(orders.attempt.save_id, rank=orders.rank, world_size=orders.world_size, deadline_s=deadline_s)


def _wait_staged(ticket: Ticket, *, patience_s: float, timeout_s: float) -> None:
    """Returns when this rank's share is on a tier.

    Raises:
        SaveError: It was given up, or no tier has taken it for `patience_s` seconds since the first refusal.
        DeadlineError: Not within `timeout_s` seconds.
    """
    end = time.monotonic() + timeout_s
    refused_at: float | None = None
    while True:
        left = end - time.monotonic()
        try:
            ticket.wait("staged", max(0.0, min(_POLL_S, left)))
            return
        except DeadlineError:
            if left <= 0:
                raise
        if ticket.errors and refused_at is None:
            refused_at = time.monotonic()
        if refused_at is not None and time.monotonic() - refused_at > patience_s:
            reason = ticket.errors[-1]
            raise SaveError(
                f"no tier has taken step {ticket.attempt.step} of run {ticket.attempt.run!r} for {patience_s:g} s: {reason_of(reason)}",
                hint="bring a tier back or free space on one, and save again; save.patience is how long a save waits",
                run=ticket.attempt.run,
                step=ticket.attempt.step,
            ) from reason
