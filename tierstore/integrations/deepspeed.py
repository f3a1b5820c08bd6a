"""DeepSpeed: its engines save into a store and load from it, with ``save_checkpoint`` and ``load_checkpoint`` as they are.

DeepSpeed hands its checkpoint engine one nested state for each file that it would write, and then says `commit`. Here nothing is written
before that: at `commit` all ranks save what they were given as ONE checkpoint of the store, with real tensors under the files' names
(``mp_rank_00_model_states.module.embed.weight``) and plain objects as typed values; nothing is pickled, nothing is unpickled.

DeepSpeed looks for a checkpoint's files with ``glob`` and ``os.path.exists``, and finds the newest by a file ``latest`` that it writes with
a plain ``open``. So `install` puts something around two methods of the engine: while it loads, a temporary folder holds an empty file of
each name; and ``latest`` is written in one piece, after the commit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from tierstore.integrations.needs import needs

with needs("deepspeed", extra="deepspeed"):
    from deepspeed import comm
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

import tierstore
from tierstore.errors import NotFoundError, StateMismatchError, UsageError
from tierstore.integrations.committing import wait_committed
from tierstore.integrations.deepspeed_parts.tags import (
    ABOUT,
    LATEST,
    SUFFIX,
    Chosen,
    choose,
    files_in,
    name_of,
    number_in,
    stands_for,
    within,
)
from tierstore.integrations.local_files import write_whole
from tierstore.integrations.plain_types import register_deepspeed, register_plain
from tierstore.state.agreement import telling
from tierstore.state.jointly import jointly
from tierstore.state.lazy import Checkpoint
from tierstore.store import Store
from tierstore.tier_uri import is_tier_uri
from tierstore.tiers.ticket import Ticket, TicketEvent
from tierstore.units import format_some

__all__ = ["TierCheckpointEngine", "install", "write_files"]

log = logging.getLogger(__name__)

Wait = Literal["committed", "staged"]


class TierCheckpointEngine(CheckpointEngine):
    """DeepSpeed's checkpoint engine over a store; `install` puts it into an engine.

    Args:
        config_params: DeepSpeed's own configuration; not used.
        store: The store, opened by all ranks that train together. Its codecs get those of DeepSpeed's own small types.
        step: Gives the training step of a save; None: the number at the end of its tag.
        wait: When a save returns: ``committed``, as DeepSpeed's own do, or ``staged``: as soon as the state is copied, and what goes wrong
            later is raised by the next save.

    Attributes:
        metrics: Numbers that rank the checkpoints; may be set before each save, rank 0's count.
        final: Marks the run's last checkpoint; likewise.
        ticket: The newest save's, see `tierstore.Ticket`; None before the first.
    """

    def __init__(self, config_params: Any = None, *, store: Store, step: Callable[[], int] | None = None, wait: Wait = "committed") -> None:
        super().__init__(config_params)
        if wait not in ("committed", "staged"):
            raise UsageError(f"wait is {wait!r}", hint="say 'committed' or 'staged'")
        self.name = "TierCheckpointEngine"
        self.store = store
        self.wait = wait
        self.metrics: Mapping[str, float] | None = None
        self.final = False
        self.ticket: Ticket | None = None
        self._step = step
        self._info = CheckpointCommitInfo(tag="", save_dir="", save_latest=False)
        self._files: dict[str, Any] = {}
        self._labels: dict[int, set[str]] | None = None
        self._open: tuple[str, Checkpoint, Any] | None = None
        self._resumed = False
        self._pointing = threading.Lock()
        self._pointed = ""
        register_plain(store.codecs)
        register_deepspeed(store.codecs)

    # ---- DeepSpeed's interface

    def create(self, info: CheckpointCommitInfo | str) -> None:
        """Begins a checkpoint; older versions of DeepSpeed give its tag alone."""
        self._info = info if isinstance(info, CheckpointCommitInfo) else CheckpointCommitInfo(tag=info, save_dir="", save_latest=False)
        self._files = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder, but none for the files of a checkpoint: they lie in the store."""
        if within(path, self._info) is None:
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Takes a file's state for the checkpoint that is under way, by reference: `commit` copies it, before training goes on.

        A path outside of the checkpoint's folder (``save_16bit_model``) is for other programs, and is written there as a file.
        """
        name = within(path, self._info)
        if name is None:
            write_whole(Path(path), partial(torch.save, state_dict))
            return
        if not name or name == ABOUT or name in self._files:
            raise UsageError(
                f"{path!r} can't be a file of the checkpoint {self._info.tag!r}", hint="each file is saved once, by a name of its own"
            )
        self._files[name] = state_dict

    def commit(self, info: CheckpointCommitInfo | str) -> bool:
        """Saves what this rank was given, together with all other ranks, as one checkpoint.

        Raises:
            UnsupportedTypeError: A value has a type that can't be stored; names its place. On the other ranks a RankError.
            SaveError: It did not commit; or, with ``wait="staged"``, an earlier one did not.
            TierFullError, DeadlineError: As `tierstore.Store.save`.
        """
        files, self._files = self._files, {}
        tag = info.tag if isinstance(info, CheckpointCommitInfo) else info
        agreement, what = self.store.agreement, f"the DeepSpeed checkpoint {tag!r}"
        anybody = bool(files)
        if agreement is not None:
            anybody = agreement.agree(what, b"1" if files else b"", lambda values: b"".join(values)) != b""
        if not anybody:
            return True  # save_16bit_model: its one file was written as such
        with telling(agreement, what):
            step = self._step() if self._step is not None else number_in(tag)
            labels = self._labels_for(tag, step) if self.store.rank == 0 else []
            self.store.raise_errors()
        state = {ABOUT: {"version": 1, "tag": tag}, **files}
        ticket = self.ticket = self.store.save(step, state, metrics=self.metrics, tags=labels, final=self.final)
        if self.wait == "committed":
            wait_committed(self.store, ticket, what)
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """A file's state, from the nearest good copy, every block proved; on the CPU, from where DeepSpeed copies it into its tensors."""
        if self._open is None:
            raise UsageError(
                f"nothing is open to load {path!r} from", hint="call the engine's load_checkpoint, of one that install() was called on"
            )
        folder, checkpoint, tree = self._open
        name = name_of(os.path.relpath(path, folder))
        if name not in tree or name == ABOUT:
            raise NotFoundError(
                f"the checkpoint has no file {name + SUFFIX!r}, but {format_some(files_in(tree), 8)}",
                hint="load with as many ranks of each kind as saved, or make a universal checkpoint of write_files()",
            )
        return checkpoint.build(tree[name])

    def preserves_storage_sharing(self) -> bool:
        """No: of a tensor only what it shows is stored, so that nothing has to be cloned before."""
        return False

    def cleanup(self) -> None:
        """Nothing: see `close`."""

    def close(self) -> None:
        """Drains the store and closes it: returns when every tier holds what it should.

        Raises:
            SaveError: A background save or promotion failed and was not reported before.
        """
        self.store.close()

    # ---- what goes around the engine's methods

    def point(self, save_dir: str, tag: str) -> None:
        """Writes ``latest``, when the newest save is committed: now, or, where it is only staged, then."""
        ticket = self.ticket
        if ticket is None:
            return

        def write(event: TicketEvent | None = None) -> None:
            with self._pointing:
                if ticket.attempt.save_id > self._pointed:  # a later save may have committed before
                    write_whole(Path(save_dir, LATEST), lambda file: file.write(tag.encode()))
                    self._pointed = ticket.attempt.save_id

        if self.wait == "committed":
            write()
        else:
            ticket.on("committed", write)

    def choose(self, load_dir: str, tag: str | None) -> Chosen | None:
        """Which checkpoint all ranks load; rank 0 looks. None: there is none, and nothing says that there should be.

        Raises:
            NotFoundError: `tag`, or all that ``latest`` could mean, is not committed.
            RankError: On other ranks, where rank 0 has failed.
            IntegrityError: Without `tag`: the newest is damaged on every tier; name an older one.
        """
        if tag is None:
            self.store.find_resumable()  # what a dead process left whole is committed, and what is newest is not deleted meanwhile
        agreement, what = self.store.agreement, f"looking for {tag or 'the latest DeepSpeed checkpoint'!r} of run {self.store.run!r}"
        if agreement is None:
            return choose(self.store, load_dir, tag)
        with telling(agreement, what):
            found = choose(self.store, load_dir, tag) if self.store.rank == 0 else None
        told = agreement.share(what, json.dumps(found and [found.tag, found.step, found.save_id]).encode())
        heard = json.loads(told)
        return None if heard is None else Chosen(tag=heard[0], step=heard[1], save_id=heard[2])

    @contextlib.contextmanager
    def opened(self, chosen: Chosen, *, real: bool = False) -> Iterator[str]:
        """While it lasts `load` reads `chosen`. Gives a folder in which DeepSpeed finds its files' names; with `real`, the files."""
        what = f"opening step {chosen.step} of run {self.store.run!r}"
        checkpoint, tree = jointly(self.store.agreement, what, lambda: self._opened(chosen)).result
        with contextlib.closing(checkpoint), tempfile.TemporaryDirectory(prefix="tierstore-deepspeed-") as folder:
            place = os.path.join(folder, chosen.tag)
            for name in files_in(tree):
                path = Path(place, name + SUFFIX)
                path.parent.mkdir(parents=True, exist_ok=True)
                if real:
                    torch.save(checkpoint.build(tree[name]), path)
                else:
                    path.touch()
            Path(folder, LATEST).write_text(chosen.tag)
            self._open = (place, checkpoint, tree)
            self._resumed = True
            try:
                yield folder
            finally:
                self._open = None

    # ---- inside

    def _opened(self, chosen: Chosen) -> tuple[Checkpoint, Any]:
        checkpoint = self.store.open_checkpoint(chosen.step)
        try:
            replica: Any = checkpoint.replica
            seen = replica.info.attempt.save_id
            if seen != chosen.save_id:
                raise NotFoundError(
                    f"rank 0 chose {chosen.save_id} of step {chosen.step}; this rank sees {seen}",
                    hint="a save went on meanwhile: load again",
                )
            tree = checkpoint.trees().united()[0]
            if not isinstance(tree, dict) or ABOUT not in tree:
                raise StateMismatchError(
                    f"step {chosen.step} of run {self.store.run!r} was not saved by DeepSpeed",
                    hint="load it with tierstore.open(…).load(); or name a tag: load_checkpoint(…, tag=…)",
                )
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint, tree

    def _labels_for(self, tag: str, step: int) -> list[str]:
        """The tags of a checkpoint of `step`: one that DeepSpeed makes itself says the step already, and need not be a label."""
        if self._labels is None:
            self._labels = {info.step: set(info.tags) for info in self.store.checkpoints()}
            if not self._resumed and (newest := max(self._labels, default=-1)) >= step:
                log.warning(
                    "run=%s has step %d already, and this training, which loaded nothing, saves step %d. engine.load_checkpoint goes on "
                    "from what is there; something new is a run with another name",
                    self.store.run, newest, step,
                )  # fmt: skip
        labels = self._labels.setdefault(step, set())  # a second tag at one step supersedes the first one's checkpoint: it keeps both
        if stands_for(tag) != step:
            labels.add(tag)
        return sorted(labels)


def install(engine: Any, source: Any, *, run: str | None = None, wait: Wait = "committed") -> TierCheckpointEngine:
    """Makes a DeepSpeed engine save into a store and load from it; all ranks call it after ``deepspeed.initialize``.

    ``save_dir`` holds nothing then but ``latest``. Checkpoints have the engine's ``global_steps`` as step; a tag of the caller's own
    becomes a label (``tag:best``).

    Args:
        engine: What ``deepspeed.initialize`` returned first.
        source: An open store (it stays the caller's to close), or what `tierstore.open` takes.
        run: The run, where `source` does not say it.
        wait: When a save returns; see `TierCheckpointEngine`.

    Raises:
        UsageError: The engine has another checkpoint engine or state that DeepSpeed copies past it.
        ConfigError: The configuration is wrong or missing.
    """
    before = engine.checkpoint_engine
    if type(before) is not TorchCheckpointEngine:
        raise UsageError(
            f"the engine saves with {type(before).__name__}",
            hint="take checkpoint.writer and datastates out of DeepSpeed's configuration, and install once",
        )
    if engine.zero_nvme_offload_optimizer():
        raise UsageError(
            "DeepSpeed copies an optimizer state that is offloaded to NVMe past its checkpoint engine, straight to save_dir",
            hint="offload it to the CPU (offload_optimizer.device: cpu), or save without tierstore",
        )
    store = source if isinstance(source, Store) else tierstore.open(source, run=run)
    if (store.rank, store.world_size) != (comm.get_rank(), comm.get_world_size()):
        raise UsageError(
            f"the store is of rank {store.rank} of {store.world_size}, DeepSpeed's of rank {comm.get_rank()} of {comm.get_world_size()}",
            hint="open it after deepspeed.initialize, without rank and world_size",
        )
    tier = TierCheckpointEngine(store=store, step=lambda: int(engine.global_steps), wait=wait)
    engine.checkpoint_engine = tier
    engine.save_checkpoint = _saving(engine, tier, engine.save_checkpoint)
    engine.load_checkpoint = _loading(engine, tier, engine.load_checkpoint)
    engine._copy_recovery_script = _no_scripts  # zero_to_fp32.py reads files that are not there: see write_files
    return tier


def write_files(store: Store, to: str | os.PathLike[str], tag: str | None = None) -> str:
    """Writes a checkpoint as the files that DeepSpeed itself writes, for its tools: ``zero_to_fp32``, ``ds_to_universal``.

    Args:
        store: The store, of one process.
        to: A folder; the files come into ``to/tag/``, and ``to/latest`` names the tag.
        tag: Which; None: the newest committed one.

    Returns:
        The tag.

    Raises:
        NotFoundError: There is none.
        IntegrityError: There are no good bytes.
    """
    tier = TierCheckpointEngine(store=store)
    chosen = choose(store, os.fspath(to), tag)
    if chosen is None:
        raise NotFoundError(f"run {store.run!r} has no committed checkpoint", hint="`tierstore ls` shows what there is")
    checkpoint, tree = tier._opened(chosen)
    with contextlib.closing(checkpoint):
        for name in files_in(tree):
            state = checkpoint.build(tree[name])
            write_whole(Path(to, chosen.tag, name + SUFFIX), partial(torch.save, state))
    write_whole(Path(to, LATEST), lambda file: file.write(chosen.tag.encode()))
    return chosen.tag


# ---- around the engine's methods


def _saving(engine: Any, tier: TierCheckpointEngine, stock: Callable[..., Any]) -> Callable[..., Any]:
    def save_checkpoint(
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        _check_local(save_dir)
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        done = stock(
            save_dir,
            tag=tag,
            client_state=dict(client_state or {}),
            save_latest=False,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if save_latest:
            if engine.global_rank == 0:
                tier.point(save_dir, tag)
            comm.barrier()
        return done

    return save_checkpoint


def _loading(engine: Any, tier: TierCheckpointEngine, stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        _check_local(load_dir)
        if engine.load_universal_checkpoint():
            raise UsageError(
                "a universal checkpoint is a folder of DeepSpeed's own files",
                hint="write_files(store, folder), ds_to_universal, load_checkpoint, and install() after that",
            )
        chosen = tier.choose(load_dir, tag)
        if chosen is None:
            log.warning("run=%s has no committed checkpoint: nothing is loaded", tier.store.run)
            return None, None
        asked = dict(zip(("load_module_strict", "load_optimizer_states"), args, strict=False)) | kwargs
        # ZeRO-3 then reads its files past the checkpoint engine, to put the weights together.
        real = engine.zero_optimization_partition_weights() and not asked.get("load_optimizer_states", True)
        with tier.opened(chosen, real=real) as folder:
            path, client_state = stock(folder, chosen.tag, *args, **kwargs)
        return path and os.path.join(load_dir, os.path.relpath(path, folder)), client_state

    return load_checkpoint


def _no_scripts(save_path: str) -> None:
    return None


def _check_local(folder: Any) -> None:
    if is_tier_uri(folder):
        raise UsageError(
            f"{folder!r} is no folder: only the file `latest` comes there",
            hint="name the store where you call install(engine, store), and pass a local folder",
        )
