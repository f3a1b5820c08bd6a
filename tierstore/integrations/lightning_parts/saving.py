"""The body of `TierCheckpointIO`: Lightning's checkpoints as checkpoints of a store, with a pointer at each path."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch.distributed as dist

import tierstore
from tierstore.config import load_config
from tierstore.errors import NotFoundError, SaveError, TierStoreError, UsageError
from tierstore.format.objects import ObjectCodecs
from tierstore.integrations.lightning_parts.contents import (
    explained,
    lightning_codecs,
    load_here,
    monitored,
    options_of,
    warn_of_link,
)
from tierstore.integrations.lightning_parts.finding import find_named, find_pointed
from tierstore.integrations.lightning_parts.pictures import (
    Pictures,
    Relation,
    apply_pointer,
    compare,
    pictures_of,
    pointer_for,
    same_tensors,
    units_of,
)
from tierstore.integrations.lightning_parts.pointers import Pointer, path_of, read_pointer, remove_file, siblings, write_pointer
from tierstore.integrations.lightning_parts.publishing import Publisher
from tierstore.names import Attempt
from tierstore.state.lazy import Checkpoint
from tierstore.store import Store
from tierstore.tiers.exit_hook import ExitHook
from tierstore.tiers.ticket import Ticket

__all__ = ["TAG", "Body", "Plain", "Ranks", "Wait"]

log = logging.getLogger(__name__)

Wait = Literal["staged", "committed", "durable"]

TAG = "lightning"
"""Every checkpoint that a path of Lightning points to has this tag, for retention: ``keep: [{tags: [lightning]}]``."""

_STEP, _WEIGHTS, _OPTIMIZERS = "global_step", "state_dict", "optimizer_states"
_WAITED_FOR = "hpc_ckpt_"
"""What Lightning saves under such names when SLURM ends the job: the process may be gone a moment later."""

_Way = Relation | Literal["new"]


class Plain(Protocol):
    """Lightning's own `TorchCheckpointIO`: for files that are no pointers."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Writes a file."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a file."""


class Ranks(Protocol):
    """How the ranks of a strategy agree, where all of them save and load together."""

    def all(self, value: bool) -> bool:
        """Whether it is true on all ranks."""


@dataclass(slots=True, kw_only=True)
class _Last:
    """The newest save of this process: what may be saved again at the same step, under another path."""

    attempt: Attempt
    ticket: Ticket
    pictures: Pictures
    metrics: dict[str, float]
    paths: dict[str, Pictures] = field(default_factory=dict)


class Body:
    """Saves, loads, removes; see `TierCheckpointIO`. Nothing is opened before the first use: it can be made anywhere, and pickled."""

    def __init__(self, source: Any, *, plain: Plain, run: str | None, retention: Any, codecs: ObjectCodecs | None, wait: Wait) -> None:
        if wait not in ("staged", "committed", "durable"):
            raise UsageError(f"wait is {wait!r}", hint="say 'staged', 'committed' or 'durable'")
        if isinstance(source, Store) and any(option is not None for option in (run, retention, codecs)):
            raise UsageError("run, retention and codecs belong to opening a store", hint="give them to tierstore.open(...)")
        if not isinstance(source, Store):
            load_config(source, run=run, retention=retention)  # a mistake in it is told now, and not at the first save, after an epoch
        self._plain = plain
        self._wait_for: Wait = wait
        self._source, self._run, self._retention, self._codecs = source, run, retention, codecs
        self._together = False
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._store: Store | None = None
        self._publisher = Publisher(write=self._write_now, remove=self._remove_now)
        self._last: _Last | None = None
        self._going_on_from: Checkpoint | None = None
        self._loaded_from = ""
        self._begun = False  # whether this process has loaded or saved something
        self._pid = os.getpid()
        self._exit_hook: ExitHook | None = None

    def __getstate__(self) -> dict[str, Any]:
        keep = ("_plain", "_wait_for", "_source", "_run", "_retention", "_codecs", "_together")
        return {name: getattr(self, name) for name in keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._begin()

    # ---- the store

    def join(self) -> None:
        """From now on all ranks of the default process group save and load together."""
        if isinstance(self._source, Store) and self._source.world_size != dist.get_world_size():
            raise UsageError(
                "TierCheckpointIO has a store of this process alone, and the strategy saves on all ranks",
                hint="pass TierCheckpointIO what tierstore.open takes, e.g. a YAML file's path: it is opened when the ranks are there",
            )
        self._together = True

    def store(self) -> Store:
        """The store, opened at the first use: of this process alone, or of all ranks (see `join`)."""
        with self._lock:
            if os.getpid() != self._pid:  # forked: the parent's store, thread and saves are the parent's
                self._begin()
            if self._store is not None and self._store.usable:
                return self._store
            self._store = self._opened()
            if self._exit_hook is not None:
                self._exit_hook.forget()
            self._exit_hook = ExitHook(self)  # AsyncCheckpointIO does not pass `teardown` on; runs before the store's own
            return self._store

    def _opened(self) -> Store:
        source, run, codecs = self._source, self._run, self._codecs
        if isinstance(source, Store):
            if source.usable:
                return source
            run, codecs, source = source.run, source.codecs, source.config
        alone: dict[str, Any] = {} if self._together else {"rank": 0, "world_size": 1}
        return tierstore.open(source, run=run, retention=self._retention, codecs=lightning_codecs(codecs), **alone)

    # ---- saving

    def save(self, checkpoint: dict[str, Any], path: object, storage_options: Any = None, *, ranks: Ranks | None = None) -> None:
        """Saves, or adds a path to what was saved at this step already; see `TierCheckpointIO.save_checkpoint`."""
        where = path_of(path)
        options = options_of(storage_options)
        if not isinstance(checkpoint.get(_STEP), int) or _WEIGHTS not in checkpoint:
            self._plain.save_checkpoint(checkpoint, where)  # a launcher hands weights over in a file of its own
            return
        self._publisher.raise_error()
        warn_of_link(where)
        metrics = {**monitored(checkpoint, where), **options.get("metrics", {})}
        tags = [TAG, *options.get("tags", ())]
        with explained():
            seen = pictures_of(checkpoint, self.store().codecs)
            self._warn_of_later_steps(checkpoint[_STEP])
            last = self._last_at(checkpoint[_STEP])
            way = self._way(last, checkpoint, seen, ranks)
            if way == "differs" and ranks is None:
                self._save_apart(checkpoint, where)
                return
            if last is not None and way == "same":
                self._save_again(last, where, seen, metrics, tags)
            else:
                if way == "differs":
                    log.warning("step=%d was saved with other values before: %s supersedes that", checkpoint[_STEP], where)
                others = last.paths if last is not None and way == "more" else {}
                last = self._save_anew(checkpoint, {**others, where: seen}, seen, metrics, tags, final=bool(options.get("final", False)))
        timeout_s = self.store().config.save.commit_timeout_s
        if self._wait_for == "durable":
            last.ticket.wait("durable", timeout_s)
        if self._wait_for != "staged" or os.path.basename(where).startswith(_WAITED_FOR):
            last.ticket.wait("committed", timeout_s)
            self._publisher.settle(where, timeout_s)
            self._publisher.raise_error()

    def _warn_of_later_steps(self, step: int) -> None:
        """At the first save of a training that was not resumed: what it saves takes the place of what the run has at the same steps."""
        begun, self._begun = self._begun, True
        newest = None if begun else self.store().latest()
        if newest is not None and newest.step >= step and self.store().rank == 0:
            log.warning(
                'run=%s has step %d already, and this training, which was not resumed, saves step %d. fit(ckpt_path="@latest") goes on '
                "from there; something new is a run with another name",
                self.store().run,
                newest.step,
                step,
            )

    def _save_anew(
        self,
        checkpoint: dict[str, Any],
        paths: dict[str, Pictures],
        seen: Pictures,
        metrics: dict[str, float],
        tags: list[str],
        *,
        final: bool,
    ) -> _Last:
        """A save of its own; a larger one takes over the paths that pointed to the smaller one of its step."""
        ticket = self.store().save(checkpoint[_STEP], checkpoint, metrics=metrics, tags=tags, final=final)
        last = _Last(attempt=ticket.attempt, ticket=ticket, pictures=seen, metrics=metrics, paths=paths)
        self._last = last
        self._let_source_go_after(ticket)
        self._publish(last, paths)
        return last

    def _save_again(self, last: _Last, path: str, seen: Pictures, metrics: dict[str, float], tags: list[str]) -> None:
        late = {name: value for name, value in metrics.items() if last.metrics.get(name) != value}
        last.metrics.update(late)
        last.paths[path] = seen

        def decide() -> None:
            store = self._store
            if store is None or not store.usable:
                return
            if late:
                store.retention.set_metrics(last.attempt.step, late)
            store.retention.tag(last.attempt.step, tags)

        self._publish(last, {path: seen}, decide)

    def _save_apart(self, checkpoint: dict[str, Any], path: str) -> None:
        log.warning(
            "step=%d is saved already, with other values: %s is a plain file of Lightning's, for a run has one checkpoint at a step",
            checkpoint[_STEP],
            path,
        )
        self._plain.save_checkpoint(checkpoint, path)

    def _publish(self, last: _Last, paths: Mapping[str, Pictures], then: Callable[[], None] | None = None) -> None:
        if self.store().rank == 0:
            pointers = {path: pointer_for(last.attempt, last.pictures, seen) for path, seen in paths.items()}
            self._publisher.publish(last.ticket, pointers, then=then)

    def _last_at(self, step: int) -> _Last | None:
        last = self._last
        if last is None or last.attempt.step != step:
            return None
        return last if last.ticket.failure is None or last.ticket.done("committed") else None

    def _way(self, last: _Last | None, checkpoint: Mapping[str, Any], seen: Pictures, ranks: Ranks | None) -> _Way:
        """How a checkpoint is saved: anew, as a further path to the last save, as a larger save of its step, or as a plain file."""
        found: _Way = "new" if last is None else compare(last.pictures, seen)
        if ranks is not None:  # all ranks go the same way
            ways: tuple[_Way, ...] = ("new", "more", "same")
            return next((way for way in ways if ranks.all(found == way)), "differs")
        if last is not None and found == "unknown":
            return self._compare_stored(last, checkpoint, seen)
        if found == "new" and _OPTIMIZERS not in checkpoint and self._stored(checkpoint[_STEP]):
            return "differs"  # weights alone never take the place of a whole checkpoint that an earlier process saved
        return found

    def _compare_stored(self, last: _Last, checkpoint: Mapping[str, Any], seen: Pictures) -> _Way:
        """Of copies of tensors: whether they say what is stored. Waits for the commit."""
        try:
            last.ticket.wait("committed")
            stored = dict(units_of(self.store().load(last.attempt.step)))
        except (SaveError, NotFoundError):
            return "new"
        found: _Way = "same"
        for unit, value in units_of(checkpoint):
            if seen[unit].small is not None:
                continue
            if unit not in last.pictures:
                found = "more"
            elif not same_tensors(stored.get(unit), value):
                return "differs"
        return found

    def _stored(self, step: int) -> bool:
        return any(info.attempt.step == step for info in self.store().checkpoints())

    # ---- loading

    def load(self, path: object, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads what a path stands for; see `TierCheckpointIO.load_checkpoint`."""
        where = path_of(path)
        pointer = self.find(where)
        if pointer is None:
            self._begun = True
            return self._plain.load_checkpoint(where, map_location=map_location, weights_only=weights_only)
        store = self.store()
        opened = store.open_checkpoint(f"{pointer.run}@{pointer.step}")
        try:
            state = apply_pointer(pointer, opened.state(), store.codecs)
        except BaseException:
            opened.close()
            raise
        self.going_on_from(opened)
        self._leave_to_rank_0()
        return state if map_location is None else load_here(state, map_location)

    def find(self, path: str) -> Pointer | None:
        """The committed checkpoint that a path stands for, with a warning where it is another one than the pointer names.

        Args:
            path: A pointer's, or ``@latest``, ``@12000``, ``@best:METRIC``, ``@tag:TAG`` for a checkpoint of the store by name.

        Returns:
            None where a file that is no pointer, or a folder, is there.

        Raises:
            FileNotFoundError: Nothing is there; or the checkpoint is gone, and there is none before it (`NotFoundError`).
        """
        if path.startswith("@"):
            return find_named(self.store(), path)
        self._publisher.settle(path, self.store().config.save.commit_timeout_s)
        pointer = read_pointer(path)
        self._loaded_from = path
        return None if pointer is None else find_pointed(self.store(), pointer, path)

    def latest(self) -> str | None:
        """``"@latest"``, or None where the run has no committed checkpoint: for ``ckpt_path=``."""
        info = self.store().latest()
        self._leave_to_rank_0()
        return None if info is None else "@latest"

    def going_on_from(self, opened: Checkpoint | None) -> None:
        """Keeps what training goes on from, until a later save is durable."""
        with self._lock:
            before, self._going_on_from = self._going_on_from, opened
            self._begun = self._begun or opened is not None
        if before is not None:
            before.close()

    def _let_source_go_after(self, ticket: Ticket) -> None:
        source = self._going_on_from
        if source is None:
            return

        def let_go() -> None:
            with self._lock:
                if self._going_on_from is not source:
                    return
                self._going_on_from = None
            source.close()

        ticket.on("durable", lambda event: self._publisher.call(let_go))  # not on the thread that tells of it

    def _leave_to_rank_0(self) -> None:
        """In a group of which rank 0 saves, the others opened the store to read from it only."""
        if not self._together and dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
            self.going_on_from(None)
            if self._store is not None and self._store is not self._source:
                self._store.close()

    # ---- removing and ending

    def remove(self, path: object) -> None:
        """Removes what is at `path` once what was saved so far is committed; never what training was resumed from."""
        where = path_of(path)
        if where == self._loaded_from:
            log.info("%s stays: training was resumed from it", where)
            return
        self._publisher.remove(where)

    def pending(self, path: object) -> bool:
        """Whether a pointer is to be written at `path` once its save is committed."""
        return self._publisher.pending(path_of(path))

    def _write_now(self, path: str, pointer: Pointer) -> None:
        try:
            before = read_pointer(path)
        except (OSError, TierStoreError):  # nothing is there, or it is damaged: it is replaced
            before = None
        write_pointer(path, pointer)
        if before is not None and (before.run, before.step) != (pointer.run, pointer.step):
            self._untag(path, before)

    def _remove_now(self, path: str) -> None:
        pointer = remove_file(path)
        if pointer is not None:
            self._untag(path, pointer)

    def _untag(self, path: str, pointer: Pointer) -> None:
        """Where no path of the folder points to a checkpoint any more, retention hears of it."""
        store = self._store
        if store is None or not store.usable or pointer.run != store.run or siblings(path, pointer):
            return
        try:
            store.retention.untag(pointer.step, [TAG])
        except TierStoreError as error:  # it is gone already, or can't be reached: it is kept for longer, which does no harm
            log.info("step=%d keeps its tag %r: %s", pointer.step, TAG, error.message)

    def teardown(self) -> None:
        """Drains: every save is committed and has its pointers; a store that was opened here is closed. The next use opens it anew.

        Raises:
            SaveError: A save or a pointer failed, and was not told of yet.
            DeadlineError: Tiers don't take what is pending.
        """
        if os.getpid() != self._pid or self._store is None:
            return
        under_way = sys.exc_info()[1]
        try:
            self._drain(self._store)
        except TierStoreError as error:
            if under_way is None:
                raise
            log.error("ending the checkpoints of Lightning failed too: %s", error)  # training's own error is the one to raise

    def close(self) -> None:
        """What is done at the end of the interpreter, where nobody called `teardown`."""
        self.teardown()

    def _drain(self, store: Store) -> None:
        patience_s = store.config.save.patience_s
        self._publisher.flush(patience_s)
        self.going_on_from(None)
        try:
            if store.usable and store is self._source:
                store.raise_errors()
            elif store.usable:
                store.close()
        finally:
            self._publisher.give_up(patience_s)
            for path in self._publisher.held_back():
                log.warning("%s stays: the save that was to replace it is not committed", path)
            self._store = None
            if self._exit_hook is not None:
                self._exit_hook.forget()
        self._publisher.raise_error()
