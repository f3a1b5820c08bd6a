"""Hugging Face Transformers: each checkpoint that a `Trainer` writes goes through the tiers, and training goes on from one that is whole.

The Trainer has no hook for its storage. It writes ``OUTPUT_DIR/checkpoint-N`` and then calls ``on_save``: there `TierCheckpointCallback`
takes the folder's files into a checkpoint of step N (`tierstore.state.folder`) and returns as soon as they are copied.
`resume_from_checkpoint` puts the newest committed one back as a folder, for ``trainer.train(resume_from_checkpoint=…)``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tierstore.integrations.needs import needs

with needs("transformers", extra="transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tierstore.errors import IntegrityError, UsageError
from tierstore.integrations.folders import committed_step, newest_folders, opened
from tierstore.state.folder import folder_state
from tierstore.state.folder_ranks import restore_once_a_node, share_files
from tierstore.state.folder_restore import restore_folder, same_folder
from tierstore.store import Store
from tierstore.store import open as open_store
from tierstore.tiers.catalog import CheckpointInfo
from tierstore.tiers.ticket import Ticket

__all__ = ["TierCheckpointCallback", "resume_from_checkpoint"]

log = logging.getLogger(__name__)

_FOLDER = re.compile(r"checkpoint-(\d{1,18})")
_SENTINEL = "checkpoint-is-incomplete.txt"
"""What the Trainer's SIGTERM checkpoint (``enable_jit_checkpoint``) leaves in a folder that it did not finish."""
_STATE = "trainer_state.json"
_NO_METRICS = ("step", "epoch")


class TierCheckpointCallback(TrainerCallback):
    """``Trainer(…, callbacks=[TierCheckpointCallback(store)])``: every checkpoint that the Trainer saves is also one of the store.

    A save costs the Trainer one copy into host memory; the rest happens in the background. An error there is raised by the next save, or
    at the end of training, which waits until every tier has what it should. With several processes all of them have the callback; each
    file is stored by one of those that see it.

    The checkpoint's metrics are what the Trainer logged at its step (``eval_loss``, ``loss`` …): retention and ``best:eval_loss`` go by
    them.

    Args:
        store: A store that is open, or what `tierstore.open` takes: then it is opened when training begins and closed when it ends.
        run: The run's name, where `store` is not open yet and does not name it.
        keep_local: How many of the Trainer's own folders stay, the newest; older ones are removed once they are durable in the store, and
            never the one that the Trainer calls its best. 0: the newest goes too, as soon as it is durable. None: none is removed.
        tags: Labels of every checkpoint.
    """

    def __init__(self, store: Any, *, run: str | None = None, keep_local: int | None = None, tags: Sequence[str] | None = None) -> None:
        if keep_local is not None and (isinstance(keep_local, bool) or not isinstance(keep_local, int) or keep_local < 0):
            raise UsageError(f"keep_local is {keep_local!r}", hint="say how many folders stay: 0, 1, 2 …, or None for all")
        self._source = store
        self._run = run
        self._keep_local = keep_local
        self._tags = tuple(tags or ())
        self._store: Store | None = store if isinstance(store, Store) else None
        self._tickets: dict[int, Ticket] = {}
        self._resumed_step: int | None = None
        self._last_step: int | None = None
        self._before: dict[int, tuple[int, int] | None] = {}

    @property
    def store(self) -> Store:
        """The store; with a source it is open from the beginning of training to its end.

        Raises:
            UsageError: It is not open.
        """
        if self._store is None:
            raise UsageError(
                "the store is opened when training begins", hint="pass an open store: TierCheckpointCallback(tierstore.open(…))"
            )
        return self._store

    @property
    def tickets(self) -> Mapping[int, Ticket]:
        """By step: how far the saves of this training have come; with `keep_local`, those whose folders are still there."""
        return dict(self._tickets)

    # ---- what the Trainer calls

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if state.is_hyper_param_search:
            raise UsageError(
                "a hyperparameter search trains many models with the same steps, which would be one run of the store",
                hint="train without TierCheckpointCallback, or each trial by itself with a run of its own",
            )
        if self._store is None:
            self._store = open_store(self._source, run=self._run)
        store = self._store
        if (store.rank, store.world_size) != (args.process_index, args.world_size):
            raise UsageError(
                f"the store was opened as rank {store.rank} of {store.world_size}, the Trainer is rank {args.process_index} of "
                f"{args.world_size}",
                hint="open the store after TrainingArguments was made, which starts torch.distributed",
            )
        newest = store.latest() if store.rank == 0 else None
        if newest is not None and newest.step > state.global_step:
            log.warning(
                "run=%s has step %d already, and training begins at step %d. resume_from_checkpoint(store, output_dir) of "
                "tierstore.integrations.transformers goes on from there; something new is a run with another name",
                store.run,
                newest.step,
                state.global_step,
            )
        self._resumed_step = self._last_step = state.global_step or None
        self._before = {step: _mark(folder / _STATE) for step, folder in _local(Path(args.output_dir))}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self._save(args, state, state.global_step)
        self._clean(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if args.enable_jit_checkpoint and (step := self._jit_step(args, state)) is not None:
            self._save(args, state, step)
        self.store.sync()
        self._clean(args, state)
        if not isinstance(self._source, Store):
            store, self._store = self.store, None
            store.close()

    # ---- inside

    def _save(self, args: TrainingArguments, state: TrainerState, step: int) -> None:
        store = self.store
        folder = _folder(args.output_dir, step)
        what = f"storing {folder.name} of run {store.run!r}"
        share = share_files(store.agreement, folder, what, ignore=(_SENTINEL,))
        self._last_step = step
        self._tickets[step] = store.save(
            step,
            folder_state(folder, share.files, as_tensors=share.as_tensors),
            metrics=_metrics(state, step),
            tags=self._tags,
            final=0 < state.max_steps <= step,
        )

    def _jit_step(self, args: TrainingArguments, state: TrainerState) -> int | None:
        """What the Trainer saved on SIGTERM, for which it calls no ``on_save``; it may have trained a step more since. Rank 0 looks."""
        found = [
            step
            for step, folder in _local(Path(args.output_dir))
            if (self._last_step or 0) < step <= state.global_step
            and not (folder / _SENTINEL).exists()
            and _mark(folder / _STATE) not in (None, self._before.get(step))
        ]
        newest = max(found, default=None)
        if self.store.agreement is None:
            return newest
        told: int | None = json.loads(self.store.agreement.share("looking for a checkpoint saved on SIGTERM", json.dumps(newest).encode()))
        return told

    def _clean(self, args: TrainingArguments, state: TrainerState) -> None:
        """Removes local folders; of the ranks that see the same ones, the node's first does so, and a second one does no harm."""
        if self._keep_local is None or args.local_process_index != 0:
            return
        best = {Path(state.best_model_checkpoint).name} if state.best_model_checkpoint else set()
        if state.best_global_step is not None:
            best.add(f"checkpoint-{state.best_global_step}")
        local = dict(_local(Path(args.output_dir)))
        durable = {step for step, ticket in self._tickets.items() if ticket.done("durable")}
        if self._resumed_step is not None and durable:
            durable.add(self._resumed_step)  # training began from it, and what came after is safe
        old = sorted(local)[: max(0, len(local) - self._keep_local)]
        for step in old:
            if step in durable and local[step].name not in best:
                _remove(local[step])
        self._tickets = {step: ticket for step, ticket in self._tickets.items() if step in local or not ticket.done("durable")}


def resume_from_checkpoint(
    store: Any,
    output_dir: str | os.PathLike[str],
    *,
    run: str | None = None,
    which: int | Literal["latest"] = "latest",
    fallback: bool = False,
    best: bool = True,
) -> str | None:
    """Puts the newest committed checkpoint into ``OUTPUT_DIR/checkpoint-N``: ``trainer.train(resume_from_checkpoint=THIS)``.

    Never a half one: only what is committed counts, every byte is proved, and the folder appears when all of it is there. A local folder of
    that step that differs, and those of later steps, which the store never committed (the Trainer may have died while it wrote them), are
    moved aside to ``aside-checkpoint-N``. One that is equal stays as it is. With several processes all of them make this call, after
    `TrainingArguments` was made.

    Args:
        store: A store that is open, or what `tierstore.open` takes.
        output_dir: The Trainer's.
        run: The run's name, where `store` is not open yet and does not name it.
        which: Another step than the newest.
        fallback: Where the newest is damaged on every tier, take the next older one, with a warning; otherwise that is an error.
        best: Put the folder of the best checkpoint back too, for ``load_best_model_at_end``, where the store has it still.

    Returns:
        The folder's path; None where the run has no checkpoint: then train from the beginning.

    Raises:
        NotFoundError: There is no step `which`.
        UsageError: The run's checkpoints were not saved from folders.
        IntegrityError: The newest one is damaged on every tier.
        RankError, DeadlineError: Another rank failed, or did not come.
    """
    with opened(store, run) as found:
        candidates = newest_folders(found, fallback=fallback) if which == "latest" else [committed_step(found, which)]
        for place, info in enumerate(candidates):
            target = _folder(output_dir, info.step)
            restore = partial(_restore, found, info, target, best)
            try:
                restore_once_a_node(found.agreement, f"restoring {target}", str(target), info.nbytes, restore)
            except IntegrityError as error:
                if not fallback or place + 1 == len(candidates):
                    raise
                log.warning("run=%s step=%d is damaged everywhere and is passed over: %s", found.run, info.step, error.message)
                continue
            return str(target)
    return None


def _restore(store: Store, info: CheckpointInfo, target: Path, best: bool) -> None:
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    with store.open_checkpoint(info.step) as checkpoint:
        if target.exists():
            if same_folder(checkpoint, target):
                log.info("folder=%s is the store's step %d already", target, info.step)
            else:
                _move_aside(target, f"it is not what the store has of step {info.step}")
        if not target.exists():
            restore_folder(checkpoint, target)
    for step, folder in sorted(_local(parent)):
        if step > info.step:
            _move_aside(folder, f"the store has no good checkpoint of it; training goes on from step {info.step}")
    if best:
        _restore_best(store, target)


def _restore_best(store: Store, target: Path) -> None:
    try:
        step = json.loads((target / _STATE).read_text(encoding="utf-8")).get("best_global_step")
    except (FileNotFoundError, ValueError, AttributeError):
        return
    if type(step) is not int or _folder(target.parent, step).exists():
        return
    if all(info.step != step for info in store.checkpoints()):
        log.warning("run=%s has step %d no more, the best one: load_best_model_at_end won't find it", store.run, step)
        return
    with store.open_checkpoint(step) as checkpoint:
        restore_folder(checkpoint, _folder(target.parent, step))


def _folder(output_dir: str | os.PathLike[str], step: int) -> Path:
    return Path(output_dir) / f"checkpoint-{step}"


def _local(output_dir: Path) -> Iterator[tuple[int, Path]]:
    """The Trainer's folders, by step: ``checkpoint-12-notes`` is none of them."""
    try:
        entries = list(output_dir.iterdir())
    except FileNotFoundError:
        return
    for path in entries:
        found = _FOLDER.fullmatch(path.name)
        if found and path.is_dir() and not path.is_symlink():
            yield int(found[1]), path


def _move_aside(folder: Path, why: str) -> None:
    """Under a name that the Trainer's own search and rotation pass over."""
    names: Iterator[str] = (f"aside-{folder.name}{f'-{number}' if number else ''}" for number in range(1_000_000))
    target = next(path for path in map(folder.parent.joinpath, names) if not os.path.lexists(path))
    os.rename(folder, target)
    log.warning("folder=%s was moved aside to %s: %s", folder, target.name, why)


def _remove(folder: Path) -> None:
    """Out of sight first: nothing is to pick up half of it."""
    gone = folder.parent / f".removing-{secrets.token_hex(8)}"
    try:
        os.rename(folder, gone)
    except FileNotFoundError:
        return  # another node was first
    shutil.rmtree(gone, ignore_errors=True)
    log.info("folder=%s was removed: the store has it", folder)


def _mark(file: Path) -> tuple[int, int] | None:
    """What tells a file from the one that was there before; None where there is none."""
    try:
        facts = file.stat()
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def _metrics(state: TrainerState, step: int) -> dict[str, float]:
    """The numbers that the Trainer logged at a step."""
    found: dict[str, float] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != step:
            continue
        for name, value in entry.items():
            if name not in _NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                found.setdefault(name, float(value))
    return found
