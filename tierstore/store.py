"""`Store`: the public API. It only composes: staging and loading (`state/`), committing and promoting (`tiers/`), one configuration."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from tierstore.bars import closing_bars, loading_bars
from tierstore.clock import Clock, SystemClock
from tierstore.config import StoreConfig, load_config
from tierstore.config_cadence import SaveEvery, parse_every
from tierstore.config_models import hydrate_tier
from tierstore.config_uris import check_outside
from tierstore.errors import ClosedError, TierStoreError, UsageError, reason_of
from tierstore.format.manifest import LOSSY_GENERATION
from tierstore.format.objects import ObjectCodecs
from tierstore.names import Attempt, Reference, check_run, check_step, later_save_id, parse_reference
from tierstore.retention import Retention
from tierstore.state.adopt import adopt_foreign
from tierstore.state.agreement import Agreement
from tierstore.state.candidates import info_of, same_facts
from tierstore.state.codecs import default_codecs
from tierstore.state.copy_threads import CopyThreads
from tierstore.state.device_copy import DeviceCopies
from tierstore.state.export.exporting import Exported, ExportOptions
from tierstore.state.facts import checked_omit, facts_of, omitted_fact, quantise_fact
from tierstore.state.filling import fill_rules
from tierstore.state.foreign.opening import Format, look_at
from tierstore.state.image import ImagePool
from tierstore.state.jointly import jointly
from tierstore.state.lazy import Checkpoint
from tierstore.state.load import LoadOptions, load_state
from tierstore.state.ranks import JointSave, Ranks, rank_and_size, ranks_of
from tierstore.state.resuming import Resumed, resume_newest
from tierstore.state.shared_cadence import SharedCadence
from tierstore.state.stage import Prepared, StagedState, prepare, stage
from tierstore.state.stage_chunks import PlannedChunk, stage_chunks
from tierstore.tiers.cadence import Cadence
from tierstore.tiers.catalog import Catalog, CheckpointInfo, RecordCache, scan
from tierstore.tiers.exit_hook import ExitHook
from tierstore.tiers.hydrate import Hydration
from tierstore.tiers.locks import lock_path
from tierstore.tiers.log import decide_fate
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.quantised import generation_of
from tierstore.tiers.replica import Replica
from tierstore.tiers.session import Session
from tierstore.tiers.status import Status
from tierstore.tiers.ticket import Ticket
from tierstore.tiers.worker import SaveJob, Worker

__all__ = ["Prepared", "Resumed", "Store", "open"]

log = logging.getLogger(__name__)

_SETTLE_S = 5.0
"""How long a load, or the end of a store, waits for what it hydrated to count, in seconds; the files are there and used before."""

Which = int | str
"""A checkpoint as a caller names it: a step, ``latest``, ``best:METRIC``, ``tag:TAG``, or ``RUN@…`` of these."""


def open(
    source: Any,
    *,
    run: str | None = None,
    retention: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    process_group: Any = None,
    codecs: ObjectCodecs | None = None,
    clock: Clock | None = None,
) -> Store:
    """Opens a store.

    Args:
        source: A YAML file's path, a list of tier URIs (nearest first), a mapping, or a `StoreConfig`.
        run: The run's name, where the configuration does not give it.
        retention: A retention policy (a YAML file's path or a mapping) for the short form.
        rank: This process's rank among those that save together; by default its rank in the process group.
        world_size: How many processes save together; by default the size of the process group, 1 where torch.distributed is not
            initialised. ``rank=0, world_size=1`` is this process alone, whatever group it is in.
        process_group: The processes that save, load and resume together, each making the same calls in the same order; by default the
            default group. They agree through its rendezvous store, for at most ``save.agreement_timeout`` at a time.
        codecs: Codecs for the caller's own types; see `ObjectCodecs.register`.
        clock: For tests.

    Raises:
        ConfigError: The configuration is wrong; every mistake is named.
        UsageError: `rank` and `world_size` are not those of the process group.
        AccessError, TemporaryError, NotFoundError: The authority can't be used (not writable, endpoint down, bucket missing).
    """
    config = source if isinstance(source, StoreConfig) else load_config(source, run=run, retention=retention)
    return Store(config, rank=rank, world_size=world_size, process_group=process_group, codecs=codecs, clock=clock)


class Store:
    """One run's checkpoints over an ordered list of tiers. Safe from several threads; a context manager that drains on exit."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        codecs: ObjectCodecs | None = None,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Opens it: `tierstore.open` says what the arguments are.

        Args:
            progress: Told as bytes arrive on tiers, instead of the bars that `close` shows on a terminal.
        """
        rank, world_size = rank_and_size(rank, world_size, process_group)
        if config.run is None:
            raise UsageError("no run is named", hint="pass run='NAME', set run: in the configuration, or TIERSTORE_RUN")
        self.config = config
        self.run = check_run(config.run)
        self.rank, self.world_size = rank, world_size
        self._fill = fill_rules(config.load.fill)
        self._clock = clock or SystemClock()
        self._given_codecs = codecs
        self._codecs = codecs or default_codecs()
        self._session = Session.open(config, clock=self._clock, lost="read")
        self._cadence = self._new_cadence(config.save.every)
        self._cache = self._session.new_cache() if rank == 0 else RecordCache()  # of many ranks one keeps this machine's disk busy
        self._told = progress is not None
        self._worker = Worker(self._session, self.run, rank=rank, progress=progress or NO_PROGRESS, cache=self._cache)
        self._hydration = Hydration(
            self._session.tiers,
            self._clock,
            self._session.leases,
            stall_s=config.io.stall_timeout_s,
            files_in_flight=config.io.threads,
            progress=self._worker.progress,
        )
        self._retention = Retention(
            self._session,
            self.run,
            resolve=self._resolve,
            cache=self._cache,
            protected=self._worker.protected,
            busy=self._worker.writing,
        )
        self._pool = ImagePool(self._image_directory(), max_nbytes=config.io.max_inflight)
        self._threads, self._devices = CopyThreads(), DeviceCopies()
        self._told_allocating = False
        self._lock = threading.Lock()
        self._process_group = process_group
        self._ranks: Ranks | None = None
        self._together = threading.Lock()
        self._decider: SharedCadence | None = None
        self._last_save_id = ""
        self._saved: dict[int, str] = {}
        self._generation = 0
        self._pid = os.getpid()
        self._closed = False
        self._exit_hook = ExitHook(self)

    # ---- saving

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] | None = None,
        final: bool = False,
        if_exists: Literal["supersede", "refuse"] = "supersede",
        omit: Sequence[str] | None = None,
        quantise: Literal["exact", "q8", "q4"] | None = None,
    ) -> Ticket:
        """Copies `state` into host memory and returns; the rest happens in the background.

        Args:
            step: The trainer's global step, from 0.
            state: Any nesting of dicts, lists and tuples of tensors and plain objects. It may be changed as soon as `save` returns.
            metrics: Numbers that rank checkpoints, e.g. ``{"val/loss": 1.9}``.
            tags: Labels that retention and references know.
            final: Marks the run's last checkpoint.
            if_exists: What to do where this step is committed already: a new attempt that supersedes it once it commits, or refuse.
            omit: Globs of dotted names of tensors that are left out on purpose: an fp32 master that a load can make of the weights
                (``LoadOptions(fill=…)``), say. The checkpoint knows that they were there. None: as configured (``save: {omit: …}``).
            quantise: How tiers that quantise store this checkpoint: by this scheme, or ``exact``. None: as each of them says.

        Returns:
            A ticket that reports each tier: ``ticket.wait("durable")``, ``ticket.on("object", callback)``.

        Raises:
            SaveError: An earlier save failed in the background (with ``save.on_error: raise``).
            UnsupportedTypeError: The state holds something that can't be stored; names its path. Nothing was written.
            TierFullError: The nearest tier can't take it; nothing was lost.
            DeadlineError: The backlog rule is ``block``, memory is full, and no tier has taken what is in it for ``save.patience``; or
                other ranks did not come within ``save.agreement_timeout``, and are named.
            RankError: Another rank can't save; it and its reason are named. Nothing was begun on any rank, and all of them raise.
            RefusedError: The authority is empty while other tiers hold checkpoints of the store: unmounted, or lost.
        """
        self._check_usable()
        with self._one_call():
            return self._save(
                step,
                state,
                metrics=metrics,
                tags=tags,
                final=final,
                if_exists=if_exists,
                omit=self._omitted(omit),
                quantise=quantise,
            )

    def _save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None,
        tags: Sequence[str] | None,
        final: bool,
        if_exists: str,
        omit: tuple[str, ...],
        quantise: str | None,
    ) -> Ticket:
        began = self._clock.monotonic()

        def propose() -> str:
            if if_exists == "refuse":
                self._check_new(step)
            return self._next_save_id()

        joint = None if self.world_size == 1 else JointSave(self._joint_ranks(), step, propose, threads=self._threads)
        with nullcontext() if joint is None else joint.telling():
            step = check_step(step)
            _check_if_exists(if_exists)
            facts = {**facts_of(metrics, tags, final, self._clock), **quantise_fact(quantise, self._session.tiers)}
            self._session.tiers.check_writable()
            self._worker.raise_errors()
        save_id = propose() if joint is None else ""
        try:
            staged = stage(
                state,
                rank=self.rank,
                world_size=self.world_size,
                pool=self._pool,
                codecs=self._codecs,
                threads=self._threads,
                devices=self._devices,
                make_room=self._worker.make_room,
                joint=joint,
                omit=omit,
            )
            if omit:
                facts = {**facts, "omitted": omitted_fact(omit, staged.omitted)}
            attempt = Attempt(run=self.run, step=step, save_id=save_id if joint is None else joint.save_id)
            if (before := self._saved.get(step)) is not None:
                log.warning("run=%s step=%d is saved again: the new attempt supersedes %s once it commits", self.run, step, before)
            ticket = self._submit(attempt, staged, facts)
        except BaseException as error:
            if joint is not None and joint.under_way:  # the others go on: this rank's part will never come
                self._give_up(Attempt(run=self.run, step=step, save_id=joint.save_id), error)
            raise
        self._tell_allocating(staged)
        ticket.stall_s = self._clock.monotonic() - began
        self._cadence.stalled(ticket.stall_s)
        ticket.on("committed", lambda event: self._cadence.committed(self._clock.monotonic() - began))
        return ticket

    def prepare(self, state: Any, *, images: int | None = None) -> Prepared:
        """Makes and touches the memory that saves of such a state need, and plans them: then the first save is as short as later ones.

        Call it before the loop, or once the state has the structure that will be saved (an optimizer has its moments after its first
        step). Nothing is copied or written, and a second call finds all there. In a store of several ranks all of them make this call:
        who writes what is agreed on, as in a save.

        Args:
            state: What will be saved; names, shapes and dtypes count, and in a store of several ranks the values that ranks share.
            images: How many images to have; None: one, and where the nearest tier is memory, which keeps the images that were saved
                last, one more than it keeps (two if its retention does not say), and than fit into its ``capacity``.

        Returns:
            What it took.

        Raises:
            UnsupportedTypeError: The state holds something that can't be stored; names its path.
            TierFullError: There is no memory for an image. Where there is for some, there are fewer, with a warning.
            RankError, DeadlineError: Another rank failed, or did not come within ``save.agreement_timeout``; named.
        """
        self._check_usable()
        if images is not None and images < 1:
            raise UsageError(f"images={images} prepares nothing", hint="give 1 or more, or leave it out")
        with self._one_call():
            what = "preparing saves"
            joint = None if self.world_size == 1 else JointSave(self._joint_ranks(), 0, str, threads=self._threads, what=what)
            return prepare(
                state,
                images=images or self._images(),
                room=None if images or self._pool.directory is None else self.config.tiers[0].capacity,
                rank=self.rank,
                world_size=self.world_size,
                pool=self._pool,
                codecs=self._codecs,
                threads=self._threads,
                devices=self._devices,
                joint=joint,
                omit=self._omitted(None),
            )

    def _omitted(self, given: Sequence[str] | None) -> tuple[str, ...]:
        """The patterns of what a save leaves out."""
        return checked_omit((self.config.save.omit or ()) if given is None else given)

    def _images(self) -> int:
        """So many images take turns: one that is filled, and those that a memory tier keeps."""
        if self._pool.directory is None:
            return 1
        policy = self.config.retention_for(self.run)
        tier = None if policy is None else (policy.tiers or {}).get(self.config.tiers[0].name)
        rules = () if tier is None else tier.keep or ()
        return 1 + max((rule.last for rule in rules if rule.last is not None), default=1)

    def _tell_allocating(self, staged: StagedState) -> None:
        """Says once what the memory of a save cost, which no later one pays."""
        if self._told_allocating or not staged.seconds.allocate_s:
            return
        self._told_allocating = True
        log.info(
            "run=%s nbytes=%d allocate_s=%.3f of a stall of %.3f s went to memory, which later saves find; store.prepare(state) makes it",
            self.run,
            staged.nbytes,
            staged.seconds.allocate_s,
            staged.seconds.total_s,
        )

    def _submit(self, attempt: Attempt, staged: StagedState, facts: Mapping[str, Any]) -> Ticket:
        generation = max(self._generation, self._session.leases.lossy_generation)
        if generation:  # what this training was resumed from was not exact: no tier adds to that beyond what it may
            facts = {**facts, LOSSY_GENERATION: generation}
        try:
            job = SaveJob(
                attempt=attempt,
                rank=self.rank,
                world_size=self.world_size,
                shard=staged.source,
                tensors=staged.tensors,
                objects=staged.objects,
                facts=facts,
                nbytes=staged.nbytes,
                release=staged.release,
            )
            ticket = self._worker.submit(job)
            ticket.stall = staged.seconds
        except BaseException:
            staged.release()
            raise
        self._cadence.saved(attempt.step, facts["metrics"])
        with self._lock:
            self._saved[attempt.step] = attempt.save_id
        return ticket

    def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        try:
            self.condemn(attempt, f"rank {self.rank} could not save its part: {reason_of(error)}")
        except TierStoreError as failure:  # the caller's error is the one to raise; the others hear of it after save.commit_timeout
            log.error("checkpoint=%s can't be condemned: %s", attempt.folder, failure.message)

    @property
    def agreement(self) -> Agreement | None:
        """How the ranks that share this store agree on small values, made at the first use; None for a process alone.

        Raises:
            UsageError: There is no process group, or it is not the one that the store was opened for.
        """
        self._check_usable()
        return None if self.world_size == 1 else self._joint_ranks().agreement

    def _joint_ranks(self) -> Ranks:
        with self._lock:
            if self._ranks is None:
                timeout_s = self.config.save.agreement_timeout_s
                self._ranks = ranks_of(self._process_group, rank=self.rank, world_size=self.world_size, deadline_s=timeout_s)
            ranks = self._ranks
        ranks.check_same(self._opened())
        return ranks

    def _opened(self) -> dict[str, Any]:
        """What all ranks of a store have in common; a node's tiers are its own."""
        return {
            "the run": self.run,
            "the store's id": self._session.tiers.store_id,
            "the list of shared tiers": self._shared_tiers(),
            "the tier that counts as durable": self.config.durable_tier.name,
        }

    def adopt(
        self,
        source: str | os.PathLike[str],
        *,
        step: int,
        options: Mapping[str, Any] | None = None,
        format: Format = "auto",
        rename: Any = None,
        shapes: Mapping[str, Any] | None = None,
        skip_objects: bool = False,
        link: bool = False,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] | None = None,
        final: bool = False,
        if_exists: Literal["supersede", "refuse"] = "supersede",
    ) -> Ticket:
        """Takes in a checkpoint that tierstore did not write, as a checkpoint of this run; the source is only read.

        Safetensors files become shards as they are, hashed once; other tensors are streamed into new shards. Returns when all files but
        the first are in; the first one, the commit and the further tiers follow in the background.

        Args:
            source: A folder or a file, as in `tierstore.open_foreign`; so are `options`, `format`, `shapes` and `skip_objects`.
            step: The step that it will have.
            rename: Renaming rules: a YAML file's path, a list or a mapping. Names only; rules that change values belong to an export.
            link: Where the nearest tier is on the source's file system and can't share blocks with it, make hard links instead of
                copies. Who changes the source's files in place later damages the checkpoint (`verify` finds it).
            metrics: As in `save`; so are `tags`, `final` and `if_exists`.

        Raises:
            NotFoundError, FormatError, IncompleteError, UnsupportedTypeError: As `tierstore.open_foreign`; nothing was written.
            UsageError: The rules don't fit, or the store is one of several ranks.
            StorageError: No tier takes it; the attempt is condemned.
        """
        self._check_usable()
        step = check_step(step)
        if self.world_size > 1:
            raise UsageError("a store of several ranks can't adopt", hint="open the store in one process, without rank and world_size")
        _check_if_exists(if_exists)
        facts = facts_of(metrics, tags, final, self._clock)
        self._session.tiers.check_writable()
        self._worker.raise_errors()
        self._catalog()  # the new save id is to sort after those of other processes
        if if_exists == "refuse":
            self._check_new(step)
        attempt = self.new_attempt(step)
        foreign = self._session.run(look_at(source, options, format=format, shapes=shapes, skip_objects=skip_objects))
        return adopt_foreign(
            self._session,
            foreign,
            attempt,
            facts,
            rename=rename,
            link=link,
            progress=self._worker.progress,
            submit=self._worker.submit,
            condemn=self.condemn,
        )

    # ---- saving for doors that plan and stage for themselves

    @property
    def usable(self) -> bool:
        """Whether it is open, and this process's own."""
        return not self._closed and os.getpid() == self._pid

    @property
    def codecs(self) -> ObjectCodecs:
        """The codecs of this store's objects."""
        return self._codecs

    def new_attempt(self, step: int) -> Attempt:
        """Names a new attempt at saving `step`; its save id sorts after all that this store knows. One rank makes it for all."""
        self._check_usable()
        return Attempt(run=self.run, step=check_step(step), save_id=self._next_save_id())

    def stage_chunks(
        self,
        chunks: Sequence[PlannedChunk],
        *,
        objects: bytes,
        aliases: Mapping[str, str] | None = None,
        omitted: Mapping[str, int] | None = None,
    ) -> StagedState:
        """Copies this rank's chunks into an image, under the store's bound of bytes in memory; errors as `state.stage_chunks`."""
        self._check_usable()
        return stage_chunks(
            chunks,
            objects=objects,
            rank=self.rank,
            world_size=self.world_size,
            pool=self._pool,
            aliases=aliases,
            omitted=omitted,
            make_room=self._worker.make_room,
            threads=self._threads,
            devices=self._devices,
        )

    def submit(
        self,
        attempt: Attempt,
        staged: StagedState,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] | None = None,
        final: bool = False,
        quantise: Literal["exact", "q8", "q4"] | None = None,
        omit: tuple[str, ...] = (),
    ) -> Ticket:
        """Hands this rank's staged share of `attempt` to the background work; the image is released in any case.

        `omit`: the patterns by which what `staged` lacks (`StagedState.omitted`) was left out of it.

        What went wrong with earlier saves is not raised here, where other ranks have begun this one: see `raise_errors`.
        """
        self._check_usable()
        try:
            facts = {**facts_of(metrics, tags, final, self._clock), **quantise_fact(quantise, self._session.tiers)}
            if omit:
                facts = {**facts, "omitted": omitted_fact(omit, staged.omitted)}
        except BaseException:
            staged.release()
            raise
        return self._submit(attempt, staged, facts)

    def goes_back_to(self, generation: int) -> None:
        """For doors that load in their own way: `generation` quantised copies stand behind one another in what training goes on from.

        Later saves say so, and tiers that quantise store them exact where that would be one too many. What this store's own calls load
        is known already.
        """
        with self._lock:
            self._generation = max(self._generation, generation)

    def told(self, attempt: Attempt) -> None:
        """The failure of `attempt` was raised by the very call that saved it: no later call, nor `close`, raises it again."""
        self._worker.told(attempt)

    def raise_errors(self) -> None:
        """Raises what went wrong in the background and no call has raised yet, as the next save would.

        Raises:
            SaveError: Names run and step; ``__cause__`` is the reason.
        """
        self._check_usable()
        self._worker.raise_errors()

    def condemn(self, attempt: Attempt, reason: str) -> None:
        """Gives up an attempt that can't become whole, so that nobody waits for it; does nothing where it is committed already."""
        self._check_usable()
        storage = self._session.tiers.authority.storage
        self._session.run(decide_fate(storage, attempt, "condemned", {"reason": reason, "world_size": self.world_size}, self._clock))

    def should_save(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Whether ``save.every`` of the configuration asks for a save at `step` (False without such a rule); `why_save` says why.

        In a store of several ranks all of them ask at the same steps; where more than the step's number counts, rank 0 decides for all.

        Args:
            step: The step that was just trained.
            metrics: What was measured at it, for rules that go by a metric; only rank 0's count.

        Raises:
            DeadlineError: Rank 0 did not ask within ``save.agreement_timeout``.
        """
        self._check_usable()
        step, every = check_step(step), self.config.save.every
        if every is None:
            return False
        if self.world_size == 1 or every.by_step_alone:
            return self._cadence.look(step, metrics).due
        with self._together:
            self._decider = self._decider or SharedCadence(self._cadence, self._joint_ranks().agreement)
            return self._decider.due(step, metrics)

    def set_every(self, every: SaveEvery | Mapping[str, Any] | int | str) -> None:
        """Replaces ``save.every`` of the configuration, counting from now; in a store of several ranks all of them say the same.

        Args:
            every: As it is written in the configuration: ``{"auto": {"mtbf": "3h"}}``; or a number of steps, or a time: ``"10m"``.

        Raises:
            UsageError: It is no such rule.
        """
        self._check_usable()
        rule = parse_every(every)
        with self._together:
            self.config = self.config.model_copy(update={"save": self.config.save.model_copy(update={"every": rule})})
            self._cadence, self._decider = self._new_cadence(rule), None

    def why_save(self) -> str:
        """The rule of ``save.every`` in words, with what it comes to now: for ``auto``, the interval and what it was computed from."""
        return self._cadence.explain()

    # ---- looking

    def checkpoints(self) -> list[CheckpointInfo]:
        """The run's committed checkpoints, oldest step first, with the tiers that hold them; superseded and expired ones left out."""
        return [c for c in self._catalog().checkpoints if not (c.superseded or c.hidden)]

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint, or None. Computed from the tiers' logs, never from a pointer or a file's time.

        Raises:
            IntegrityError: A newer step's commit record is unreadable on every tier.
            StorageError: There is none, but the authority can't be reached.
        """
        return self._catalog().latest()

    def open_checkpoint(self, which: Which = "latest") -> Checkpoint:
        """Opens a checkpoint for reading single tensors and slices: ``ckpt["model.w"][128:256]`` reads those rows only.

        It holds a lease, so that no collector deletes it, until it is closed or nothing refers to it and its tensors any more.

        Raises:
            NotFoundError: No such run, step or tag; nearest names are suggested.
        """
        replica = self._session.open_replica(self._resolve(which))
        return Checkpoint(
            replica,
            self._session.run,
            codecs=self._codecs,
            rank=self.rank,
            world_size=self.world_size,
            note=f"step {replica.info.step} of run {replica.info.run!r}",
            on_close=replica.let_go,
        )

    # ---- loading

    def load(self, which: Which = "latest", into: Any = None, *, options: LoadOptions | None = None) -> Any:
        """Loads a checkpoint from the nearest good copies, every block proved by SHA-256.

        In a store of several ranks all of them make this call: rank 0 finds the checkpoint, all load that one, each its own part of it
        (`into`), and what one of them meets all of them raise. Another number of ranks may have saved it, in another layout.

        Args:
            which: A step, ``latest``, ``best:METRIC``, ``tag:TAG`` or a full reference.
            into: A state of the same structure whose tensors are filled in place (their identity stays); None: fresh tensors on the CPU.
            options: What to do about missing, unexpected, wrong-shape and wrong-dtype entries; strict by default.

        Returns:
            The state; `into` itself where it was given.

        Raises:
            NotFoundError: Nothing of that name.
            UsageError: `options` name a tier to hydrate onto that is none of this node's.
            StateMismatchError: `into` and the checkpoint differ; nothing was changed.
            IntegrityError: No tier has a good copy; names each tier and its reason.
            RankError, DeadlineError: Another rank failed, or did not come within ``save.agreement_timeout``; named.
        """
        ranks, what = self.agreement, f"loading {which!r} of run {self.run!r}"
        if ranks is None:
            return self._load(lambda: self._resolve(which), into, options, what)[1]
        with self._together:
            facts = same_facts(ranks, what, lambda: self._resolve(which), self._shared_tiers())
            return self._load(lambda: info_of(facts, self._catalog(facts["run"])), into, options, what)[1]

    def resume(self, into: Any = None, *, options: LoadOptions | None = None, fallback: bool = False) -> Resumed | None:
        """Loads the newest committed checkpoint, or returns None where the run has none.

        A complete attempt that a dead process left on a node tier is committed first. With ``fallback=True`` a checkpoint that is
        damaged on every tier is passed over for the next older one, with a warning; otherwise its IntegrityError is raised. So it is
        where a newer checkpoint's commit record is unreadable on every tier, or a newer attempt is staged whole and can't be committed:
        to begin from an older one, or anew, is not a guess to make.

        In a store of several ranks all of them make this call, and all get the same step, whatever each of them sees. What was loaded is
        not deleted before a save of this store is durable.

        Raises:
            IntegrityError: The newest checkpoint can't be loaded (with ``fallback=True``: none of them can).
            StorageError: Nothing was found, but the authority can't be reached; or what is staged can't be committed now.
            StateMismatchError: `into` and the checkpoint differ.
            RankError, DeadlineError: Another rank failed, or did not come within ``save.agreement_timeout``; named.
        """
        with self._one_call():
            return self._resume(lambda find, what: self._load(find, into, options, what, go_on=True), fallback=fallback)

    def find_resumable(self, *, fallback: bool = False) -> CheckpointInfo | None:
        """What `resume` would load, without loading it: for doors that load in their own way. None where the run has none.

        What a dead process left whole is committed first; all ranks make this call, and get the same checkpoint. It is not deleted
        before a save of this store is durable. Errors as `resume`.
        """
        with self._one_call():
            found = self._resume(self._hold, fallback=fallback)
        return None if found is None else found.checkpoint

    def export(
        self,
        which: Which,
        to: str | os.PathLike[str],
        options: ExportOptions | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
        dry_run: bool = False,
    ) -> Exported:
        """Writes a checkpoint for other programs: a Hugging Face directory, a DCP directory or a `torch.save` file, in bounded memory.

        Args:
            which: A step, ``latest``, ``best:METRIC``, ``tag:TAG`` or a full reference.
            to: A local path or URI; a directory that is empty, for the format ``torch`` a file.
            options: What and how; None: a Hugging Face directory of all tensors.
            storage_options: What the target's storage takes, e.g. ``{"endpoint_url": …}``.
            progress: Told how many bytes are made, and of how many; called on another thread.
            dry_run: Only plan; nothing is written.

        Raises:
            NotFoundError: No such checkpoint, or no tensor is chosen.
            UsageError: The choice, the renaming rules or the state don't fit; nothing was written.
            RefusedError: The target is not empty, and `ExportOptions.overwrite` is not set.
            IntegrityError: No tier has a good copy of something; what was written is removed.
        """
        check_outside(to, {tier.name: tier.uri for tier in self.config.tiers})
        with self.open_checkpoint(which) as checkpoint:
            return checkpoint.export(to, options, storage_options=storage_options, progress=progress, dry_run=dry_run)

    @property
    def retention(self) -> Retention:
        """What stays and what goes: pins, tags, holds, late metrics; the plan; deciding by it, and freeing."""
        self._check_usable()
        return self._retention

    # ---- background work

    def sync(self, timeout: float | None = None) -> None:
        """Works off everything pending: returns when every tier holds what it should.

        Raises:
            DeadlineError: Not done within `timeout` seconds; nothing is lost and the work goes on.
            SaveError: A save failed.
        """
        self._check_usable()
        self._worker.drain(timeout)

    def status(self) -> Status:
        """What each tier holds, what is pending, how far it lags, and its last errors."""
        self._check_usable()
        return self._worker.status()

    def hurry(self, deadline: float) -> None:
        """The process will end soon: no `sync` or `close`, and no call that waits for other ranks, one that is under way on another thread
        included, waits longer than so many seconds from now. What is left then is told as `DeadlineError`, and resumed by the next
        process or by `tierstore sync`.
        """
        self._worker.hurry(deadline)
        with self._lock:
            ranks, closed = self._ranks, self._closed
        if ranks is not None:
            ranks.agreement.hurry(deadline)
        elif self.world_size > 1 and not closed:  # it may come while `close` is under way, which is not to wait longer either
            self._joint_ranks().agreement.hurry(deadline)

    def close(self, deadline: float | None = None) -> None:
        """Drains the background work and ends the store; idempotent. Meanwhile a terminal shows a progress bar for each tier.

        Args:
            deadline: Seconds to wait; None: until done. What is left then is resumed by the next process or by `tierstore sync`.

        Raises:
            DeadlineError: Names what is pending on which tier.
            SaveError: A background save failed and was not reported before.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._exit_hook.forget()
        if os.getpid() != self._pid:
            return  # a forked child owns none of this
        try:
            with closing_bars(self._left) as bars:
                if bars is not None:
                    self._worker.tell(bars)
                self._worker.close(deadline)
        finally:
            try:
                self._session.run(self._hydration.close(_SETTLE_S))
            finally:
                self._threads.close()
                self._pool.close()
                self._session.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except TierStoreError as failure:  # the caller's own error is the one to raise
            log.error("run=%s closing failed too: %s", self.run, failure)

    def __repr__(self) -> str:
        return f"Store(run={self.run!r}, tiers={[t.name for t in self.config.tiers]})"

    def __reduce__(self) -> Any:
        return _reopen, (self.config, self.rank, self.world_size, self._given_codecs)

    # ---- inside

    def _left(self) -> dict[str, int]:
        """Tier → bytes that are not there yet; empty on all ranks but the first, which share its terminal, and where somebody is told."""
        left: dict[str, int] = {}
        for copy in self._worker.pending() if self.rank == 0 and not self._told else ():
            left[copy.tier] = left.get(copy.tier, 0) + copy.nbytes
        return left

    def _new_cadence(self, every: SaveEvery | None) -> Cadence:
        return Cadence(every, self._clock, history=lambda: self._catalog().checkpoints)

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"the store of run {self.run!r} is closed", hint="open it again with tierstore.open(...)")
        if os.getpid() != self._pid:
            raise ClosedError("this store belongs to the parent process", hint="open a store of its own in each forked process")

    def _one_call(self) -> AbstractContextManager[object]:
        """In a store of several ranks one call after the other, for each is a conversation of the ranks."""
        return self._together if self.world_size > 1 else nullcontext()

    def _check_new(self, step: int) -> None:
        if self._catalog().find(step) is not None:
            raise UsageError(
                f"step {step} of run {self.run!r} is committed already",
                hint="use another step, or if_exists='supersede' (on the command line --supersede)",
            )

    def _image_directory(self) -> Any:
        nearest = self.config.tiers[0]
        return None if nearest.durable or nearest.packs else self._session.tiers.nearest.storage.local_path(".tmp")

    def _next_save_id(self) -> str:
        """Two attempts within a millisecond, or a clock that stepped back, here or since the last process: later sorts later."""
        with self._lock:
            self._last_save_id = later_save_id(self._clock.now(), self._last_save_id)
            return self._last_save_id

    def _catalog(self, run: str | None = None) -> Catalog:
        self._check_usable()
        catalog = self._session.run(scan(self._session.tiers, run or self.run, cache=self._cache))
        if catalog.run == self.run:
            attempts = [*(c.attempt for c in catalog.checkpoints), *(c.attempt for c in catalog.incomplete)]
            newest = max((attempt.save_id for attempt in attempts), default="")
            with self._lock:
                self._last_save_id = max(self._last_save_id, newest)
        return catalog

    def _resolve(self, which: Which) -> CheckpointInfo:
        if isinstance(which, str):
            reference = parse_reference(which)
        else:
            reference = Reference(run="", selector="step", step=check_step(which))
        return self._catalog(reference.run or None).resolve(reference)

    def _load(
        self, find: Callable[[], CheckpointInfo], into: Any, options: LoadOptions | None, what: str, *, go_on: bool = False
    ) -> tuple[CheckpointInfo, Any]:
        """Finds, opens and loads a checkpoint, together with the other ranks. With `go_on` training goes on from it: its lease stays."""
        ranks = self.agreement
        if self._fill is not None and (options is None or options.fill is None):
            options = replace(options or LoadOptions(), fill=self._fill)
        replica = jointly(ranks, f"{what}: opening it", lambda: self._open_to_load(find(), options)).result
        try:
            with self._bars(wanted=replica.hydrating is not None):
                state = load_state(
                    replica,
                    self._session.run,
                    into=into,
                    options=options,
                    rank=self.rank,
                    world_size=self.world_size,
                    codecs=self._codecs,
                    ranks=ranks,
                    what=what,
                    exchange_nbytes=self.config.io.max_scratch,
                )
            if replica.hydrating is not None:
                self._session.run(self._hydration.settled(_SETTLE_S))
        except BaseException:
            replica.let_go()
            raise
        self._goes_on_from(replica)
        if go_on:
            self._worker.resumed_from(replica.info.attempt, replica.take_lease())
        replica.let_go()
        return replica.info, state

    def _goes_on_from(self, replica: Replica) -> None:
        """`Leases` adds what was really read from a quantised copy."""
        self.goes_back_to(generation_of(replica.manifest.facts))

    def _open_to_load(self, info: CheckpointInfo, options: LoadOptions | None) -> Replica:
        """Opens it; what is largely wanted of it comes nearer first, where the options or the configuration say so."""
        tier = hydrate_tier(self.config, options.hydrate if options is not None else None)
        replica = self._session.open_replica(info, objects=True)
        if tier is not None:
            replica.hydrating = self._hydration.onto(self._session.tiers.get(tier))
        return replica

    @contextmanager
    def _bars(self, *, wanted: bool) -> Iterator[None]:
        """Progress bars on this process's terminal for what a load copies; not where somebody is told, nor on any rank but the first."""
        with loading_bars() if wanted and self.rank == 0 and not self._told else nullcontext() as bars:
            if bars is not None:
                self._worker.tell(bars)
            try:
                yield
            finally:
                if bars is not None:
                    self._worker.tell(NO_PROGRESS)

    def _resume(self, load: Callable[[Callable[[], CheckpointInfo], str], tuple[CheckpointInfo, Any]], *, fallback: bool) -> Resumed | None:
        return resume_newest(
            self.agreement,
            self.run,
            adopt=self._worker.adopt,
            look=self._catalog,
            load=load,
            node_tier=str(lock_path(self._session.tiers, self.run) or ""),
            shared=self._shared_tiers(),
            fallback=fallback,
        )

    def _hold(self, find: Callable[[], CheckpointInfo], what: str) -> tuple[CheckpointInfo, None]:
        """Opens a checkpoint together with the other ranks, and keeps only its lease: training goes on from it."""
        replica = jointly(self.agreement, f"{what}: opening it", lambda: self._session.open_replica(find(), objects=True)).result
        self._goes_on_from(replica)
        self._worker.resumed_from(replica.info.attempt, replica.take_lease())
        replica.let_go()
        return replica.info, None

    def _shared_tiers(self) -> list[str]:
        return [tier.name for tier in self._session.tiers if tier.scope == "shared"]


def _check_if_exists(if_exists: str) -> None:
    if if_exists not in ("supersede", "refuse"):
        raise UsageError(f"if_exists is {if_exists!r}", hint="say 'supersede' or 'refuse'")


def _reopen(config: StoreConfig, rank: int, world_size: int, codecs: ObjectCodecs | None) -> Store:
    return Store(config, rank=rank, world_size=world_size, codecs=codecs)
