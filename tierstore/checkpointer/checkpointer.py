"""`Checkpointer`: saving when it is due, resuming, and stopping in time, for a training loop without a framework."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from tierstore.checkpointer.ending import Ending, OnPreempt, seconds_of
from tierstore.checkpointer.line import Line
from tierstore.checkpointer.parts import Parts
from tierstore.checkpointer.stopping import Stopping
from tierstore.config import load_config
from tierstore.config_cadence import parse_every
from tierstore.errors import DeadlineError, RankError, RefusedError, SaveError, TierFullError, TierStoreError, UsageError
from tierstore.preemption import Preemption
from tierstore.state.agreement import telling
from tierstore.state.load import LoadOptions
from tierstore.store import Store, open
from tierstore.tiers.catalog import CheckpointInfo
from tierstore.tiers.ticket import Ticket

__all__ = ["Checkpointer"]

log = logging.getLogger(__name__)

_WITHOUT_RULE: Mapping[str, Any] = {"auto": {}}


class Checkpointer:
    """Keeps a training loop's state in a store: a context manager around the loop. The state's parts are read and set in place.

    In a job of several ranks all of them make the same calls at the same steps. Make it in the main thread, where signals are handled.
    """

    def __init__(
        self,
        source: Any,
        *,
        run: str | None = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        extra: Mapping[str, Any] | None = None,
        rng: bool = True,
        every: Any = None,
        best: str | Mapping[str, str] | None = None,
        on_preempt: OnPreempt = "save",
        on_warning: Literal["save", "stop"] = "save",
        deadline: float | str = 25.0,
        signals: bool = True,
        prepare: bool = False,
        progress: bool | Literal["auto"] = "auto",
    ) -> None:
        """Opens the store; nothing is loaded or saved yet.

        Args:
            source: An open `Store`, which stays its caller's to close; or what `tierstore.open` takes.
            run: The run's name; not with an open store.
            model: A `torch.nn.Module`: plain, compiled, DDP, FSDP2 or tensor-parallel.
            optimizer: Its optimizer.
            scheduler: Whatever has `state_dict` and `load_state_dict`; so are `sampler` and the values of `extra`.
            sampler: What knows the position in the data: a sampler, a stateful data loader.
            extra: Name → further ones: an average of the weights, a gradient scaler, a second model.
            rng: Save and restore the random states of Python, numpy, torch and the CUDA device, each rank its own.
            every: When a save is due: a number of steps, a time (``"10m"``), or what ``save.every`` may be in a configuration. It wins over
                the configuration's. Without either: ``{"auto": {}}``.
            best: The metric that `best` goes by, less is better; ``{"metric": "acc", "mode": "max"}`` where it is not.
            on_preempt: At SIGTERM: ``save`` the step; or only ``finish`` the saves under way; or ``abandon`` those too.
            on_warning: At SIGUSR1: ``save`` and go on, or ``stop`` as at SIGTERM.
            deadline: Seconds, or a duration, from SIGTERM on: what is not done by then is given up.
            signals: Whether to handle signals.
            prepare: Make the memory that saves need in the first call of `step`, when the optimizer has its state: the first save is then
                as short as later ones (`Store.prepare`).
            progress: Whether to draw a line; ``"auto"``: where standard error is a terminal, on rank 0.

        Raises:
            UsageError: Something is not as described here, or the store's errors: see `tierstore.open`.
        """
        if on_preempt not in ("save", "finish", "abandon"):
            raise UsageError(f"on_preempt is {on_preempt!r}", hint="say 'save', 'finish' or 'abandon'")
        if on_warning not in ("save", "stop"):
            raise UsageError(f"on_warning is {on_warning!r}", hint="say 'save' or 'stop'")
        deadline_s = seconds_of(deadline)
        self._best = _best(best)
        self._parts = Parts(model=model, optimizer=optimizer, others={"scheduler": scheduler, "sampler": sampler, **(extra or {})}, rng=rng)
        rule = None if every is None else parse_every(every)
        self._owns = not isinstance(source, Store)
        self.store: Store = _open(source, run)
        """The store that it saves into."""
        try:
            self._set_every(rule)
            self._line = Line(
                self.store.run,
                [tier.name for tier in self.store.config.tiers],
                self.store.why_save,
                shown=False if self.store.rank else None if progress == "auto" else progress,
            )
            stop, save = (("SIGTERM", "SIGUSR1"), ()) if on_warning == "stop" else (("SIGTERM",), ("SIGUSR1",))
            self._signals = Preemption(stop=stop if signals else (), save=save if signals else ())
            agreement = self.store.agreement
            self._stopping = Stopping(
                self._signals,
                agreement.aside("signals") if agreement is not None else None,
                rank=self.store.rank,
                world_size=self.store.world_size,
                deadline_s=deadline_s,
            )
            self._ending = Ending(self.store, self._signals, policy=on_preempt, deadline_s=deadline_s)
        except BaseException:
            if self._owns:
                self.store.close()
            raise
        self._signals.install()
        self._next: int | None = None
        self._total: int | None = None
        self._tickets: list[Ticket] = []
        self._prepare = prepare
        self._closed = False

    # ---- the loop

    @property
    def values(self) -> dict[str, Any]:
        """Plain values that are saved and restored with the rest: counters, the best loss so far."""
        return self._parts.values

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to end: the machine is about to be taken away. All ranks see it after the same step."""
        return bool(self._ending.stopped_by)

    @property
    def stopped_by(self) -> str:
        """What training was stopped by, e.g. ``SIGTERM``; empty while it was not."""
        return self._ending.stopped_by

    def resume(self, *, fallback: bool = False, options: LoadOptions | None = None) -> int:
        """Restores everything from the newest committed checkpoint.

        Args:
            fallback: Go back to an older one, with a warning, where the newest is damaged on every tier.
            options: What may differ between what is there and what was saved.

        Returns:
            The step to go on with: the one after that which was saved; 0 where the run is new.

        Raises:
            StateMismatchError: What is there is not what was saved; names it, e.g. a tensor of another shape.
            TierStoreError: As `Store.resume`.
        """
        self._check_open()
        found = self._load(lambda into, how: self.store.resume(into, options=how, fallback=fallback), options)
        self._next = 0 if found is None else found.step + 1
        if found is not None:
            log.info("run=%s resumed from step %d", self.store.run, found.step)
        return self._next

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left of `total`, numbered from 0; resumes first, if that was not done. The last one is saved as the final one.

        It ends early where `should_stop`.
        """
        start = self.resume() if self._next is None else self._next
        self._total = total
        self._line.of(total)
        for step in range(start, total):
            if self.should_stop:
                return
            yield step

    def step(self, n: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """To be called when step `n` is trained: saves if that is due, or asked for by a signal.

        Args:
            n: The step, from 0. The optimizer has made its step.
            metrics: What was measured at it: numbers, or tensors of one. They rank checkpoints.

        Returns:
            Whether it was saved.

        Raises:
            RefusedError: The run has checkpoints, and `resume` was not called.
            TierStoreError: As `Store.save`.
        """
        self._check_open()
        self._check_resumed()
        self._line.at(n)
        if self._prepare:
            self._prepare = False
            self._make_memory(n)
        answer = None if self.should_stop else self._stopping.arrive()
        if answer is not None and answer.request.stop:
            self._line.end()
            return self._ending.stop(answer, n, lambda: self._prepared(n, metrics, tags=("preempted",)))
        last = self._total is not None and n == self._total - 1
        if answer is not None:
            if answer.alone:
                log.error("%s on rank %d: not all ranks agreed in time to save at step %d", answer.request.name, answer.rank, n)
                return False
            log.warning("%s on rank %d: step %d is saved, and training goes on", answer.request.name, answer.rank, n)
        every = self.store.config.save.every
        asked = None if every is None or every.by_step_alone else _numbers(metrics)
        if answer is None and not last and not self.store.should_save(n, asked):
            return False
        return self._ending.in_time(lambda: self.save(n, metrics, final=last))

    def save(
        self,
        n: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        tags: Sequence[str] = (),
        final: bool = False,
        quantise: Literal["exact", "q8", "q4"] | None = None,
    ) -> Ticket:
        """Saves step `n` now, due or not; returns as soon as the state is copied into host memory.

        Args:
            n: The step.
            metrics: What was measured at it.
            tags: Labels that references and retention know.
            final: Marks the run's last checkpoint.
            quantise: As `Store.save`.

        Raises:
            RefusedError: The run has checkpoints, and `resume` was not called.
            TierStoreError: As `Store.save`.
        """
        self._check_open()
        self._check_resumed()
        return self._prepared(n, metrics, tags=tags, final=final, quantise=quantise)()

    # ---- looking and loading

    def best(self) -> CheckpointInfo | None:
        """The best checkpoint by the metric that `best=` names, or None; of equal ones the newest.

        Waits for saves that are not committed yet.

        Raises:
            UsageError: No metric was named.
        """
        if self._best is None:
            raise UsageError("no metric says which checkpoint is the best", hint="make the Checkpointer with best='val/loss'")
        metric, sign = self._best
        self._settle()
        ranked = [c for c in self.store.checkpoints() if c.loadable and c.metrics.get(metric, float("nan")) == c.metrics.get(metric)]
        return max(ranked, key=lambda c: (sign * c.metrics[metric], c.step), default=None)

    def load(self, which: int | str = "latest", *, options: LoadOptions | None = None) -> int:
        """Restores everything from a checkpoint: a step, ``latest``, ``best:METRIC``, ``tag:TAG``; ``best`` goes by `best`.

        Returns:
            Its step.

        Raises:
            NotFoundError: There is no such checkpoint.
            StateMismatchError: As `resume`.
        """
        self._check_open()
        self._settle()
        if which == "best" and (found := self.best()) is not None:
            which = found.step
        elif which == "best":
            which = f"best:{self._best[0]}" if self._best is not None else which  # whose error names what there is
        step = self.store.load(which, into={"checkpointer": None}, options=LoadOptions(unexpected="ignore"))["checkpointer"]["step"]
        self._load(lambda into, how: self.store.load(step, into, options=how), options, step=step)
        return int(step)

    # ---- ending

    def close(self) -> None:
        """Ends it: handlers are put back, and a store of its own is drained and closed. After SIGTERM within the deadline.

        Raises:
            SaveError: A save in the background failed and was not reported before.
            DeadlineError: Tiers kept failing for ``save.patience``; names what is pending.
        """
        if self._closed:
            return
        self._closed = True
        self._line.end()
        try:
            if self._owns:
                self._ending.in_time(self.store.close)
        finally:
            self._stopping.close()
            self._signals.restore()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except TierStoreError as failure:
            if error is None:
                raise
            log.error("run=%s closing failed too: %s", self.store.run, failure)  # the caller's own error is the one to raise

    def __repr__(self) -> str:
        return f"Checkpointer({self.store!r})"

    # ---- inside

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the Checkpointer is closed", hint="make another one")

    def _set_every(self, rule: Any) -> None:
        configured = self.store.config.save.every
        if rule is None and configured is None:
            rule = parse_every(_WITHOUT_RULE)
            log.info("run=%s neither every= nor save.every says when to save: by what a save costs (auto)", self.store.run)
        elif rule is not None and configured is not None and rule != configured:
            log.warning("run=%s every=%s wins over save.every of the configuration, %s", self.store.run, _told(rule), _told(configured))
        if rule is not None:
            self.store.set_every(rule)

    def _check_resumed(self) -> None:
        """The first save of a run that has checkpoints, by one who did not look at them, would put a young state above an old one."""
        if self._next is not None:
            return
        agreement, what = self.store.agreement, f"looking whether run {self.store.run!r} is new"
        with telling(agreement, what):
            newest = self.store.latest() if self.store.rank == 0 else None
        step = None if newest is None else newest.step
        if agreement is not None:
            step = json.loads(agreement.share(what, json.dumps(step).encode()))
        if step is not None:
            raise RefusedError(
                f"run {self.store.run!r} has checkpoints up to step {step}, and this training did not resume from them",
                hint="call `start = ckpt.resume()` before the loop and begin at `start`; to begin anew, name another run",
            )
        self._next = 0

    def _settle(self) -> None:
        """Waits, with patience, until what was saved here is committed; what fails is the next save's to raise."""
        for ticket in self._tickets:
            try:
                ticket.wait("committed", self.store.config.save.patience_s)
            except (SaveError, DeadlineError) as error:
                log.warning("%s", error.message)

    def _load(self, load: Callable[[Any, LoadOptions], Any], options: LoadOptions | None, step: int | None = None) -> Any:
        parts, how = self._parts, self._parts.options(options)
        into = parts.space(None)
        if parts.sharded:
            if step is None:
                first = self.store.resume({"checkpointer": None}, options=LoadOptions(unexpected="ignore", missing="keep"))
                step = None if first is None else first.step
            if step is not None:
                with self.store.open_checkpoint(step) as stored:
                    into = parts.space(stored)
        found = load(into, how)
        if found is not None:
            parts.restore(into, self.store.rank)
            how.ranks.warn()  # type: ignore[union-attr]
        return found

    def _make_memory(self, n: int) -> None:
        """Only a matter of speed: where there is no room now, a save may still find some, or another tier."""
        try:
            prepared = self.store.prepare(self._parts.capture(n, self.store.world_size))
        except (TierFullError, RankError) as error:  # a RankError is another rank's TierFullError, or will come again at the save
            log.warning("run=%s nothing was prepared for saves: %s", self.store.run, error.message)
        else:
            log.info("run=%s prepared for saves of %d bytes in %.3f s", self.store.run, prepared.nbytes, prepared.seconds)

    def _prepared(
        self,
        n: int,
        metrics: Mapping[str, Any] | None,
        *,
        tags: Sequence[str],
        final: bool = False,
        quantise: Literal["exact", "q8", "q4"] | None = None,
    ) -> Callable[[], Ticket]:
        """The state is looked at here, in the thread that trains; the call that is returned may be made in another."""
        state, numbers = self._parts.capture(n, self.store.world_size), _numbers(metrics)

        def save() -> Ticket:
            ticket = self.store.save(n, state, metrics=numbers, tags=tags, final=final, quantise=quantise)
            self._tickets = [*(t for t in self._tickets if not t.done("committed")), ticket]
            self._line.saved(ticket)
            log.info("run=%s step=%d saved, training waited %.1f ms", self.store.run, n, 1000 * ticket.stall_s)
            return ticket

        return save


def _open(source: Any, run: str | None) -> Store:
    if not isinstance(source, Store):
        return open(load_config(source, run=run))
    if run is not None and run != source.run:
        raise UsageError(f"the store is of run {source.run!r}, not {run!r}", hint="leave run= out where an open store is given")
    return source


def _best(best: str | Mapping[str, str] | None) -> tuple[str, float] | None:
    if best is None:
        return None
    if isinstance(best, str):
        return best, -1.0
    if set(best) - {"metric", "mode"} or "metric" not in best or best.get("mode", "min") not in ("min", "max"):
        raise UsageError(f"best is {best!r}", hint="write best='val/loss', or best={'metric': 'acc', 'mode': 'max'}")
    return best["metric"], 1.0 if best.get("mode") == "max" else -1.0


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics as numbers; a tensor of one waits for its device, so that this is done only where they are needed."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in (metrics or {}).items()}


def _told(rule: Any) -> Any:
    with contextlib.suppress(AttributeError):
        return rule.model_dump(exclude_none=True)
    return rule
