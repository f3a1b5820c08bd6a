"""Hugging Face Accelerate: its ``save_state`` and ``load_state`` through the tiers.

Model weights and optimizer states go straight into the checkpoint, as tensors with names: Accelerate's own hooks hand them over before
it would write them. What else it saves (schedulers, random states of each process, samplers, registered objects, the scaler) it writes
into a temporary folder, which becomes a part of the checkpoint (`tierstore.state.folder`). Under FSDP, DeepSpeed and Megatron-LM
Accelerate writes models and optimizers into that folder too, in its own way.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierstore.integrations.needs import needs

with needs("accelerate", extra="transformers"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

from tierstore.errors import UsageError
from tierstore.integrations.folders import newest_folders
from tierstore.state.folder import FILES, FOLDER, HEADERS, folder_state
from tierstore.state.folder_ranks import restore_once_a_node, share_files
from tierstore.state.folder_restore import restore_folder
from tierstore.state.load import LoadOptions
from tierstore.store import Store, Which
from tierstore.tiers.ticket import Ticket

__all__ = ["load_state", "save_state"]

log = logging.getLogger(__name__)

_WRITES_ITSELF = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Here Accelerate lets models and optimizers write their own files: hooks get no weights."""
_MODEL, _OPTIMIZER, _FACTS = "model", "optimizer", "accelerate"


def save_state(
    accelerator: Accelerator,
    store: Store,
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    tags: Sequence[str] | None = None,
    final: bool = False,
    scratch: str | os.PathLike[str] | None = None,
    **save_model_func_kwargs: Any,
) -> Ticket:
    """``accelerator.save_state()`` into a store; returns as soon as all is copied into host memory. All processes make this call.

    Accelerate's rotation (``ProjectConfiguration(total_limit=…)``) has no part in it: the store's retention decides what stays.

    Args:
        accelerator: With everything prepared and registered.
        store: Opened after the accelerator was made, which starts torch.distributed.
        step: From 0.
        metrics: Numbers that rank checkpoints; so are `tags` and `final` as in `Store.save`.
        tags: Labels.
        final: It is the run's last.
        scratch: Where the temporary folder is made; None: the system's place for temporaries.
        **save_model_func_kwargs: As in ``Accelerator.save_state``.

    Raises:
        UsageError: The store was opened for other processes; two models or optimizers can't be told apart.
        TierStoreError: As `Store.save`.
    """
    _check(accelerator, store)
    direct = accelerator.distributed_type not in _WRITES_ITSELF
    taken: dict[str, Any] = {}

    def take(models: list[Any], weights: list[Any], output_dir: str) -> None:
        for number, state in enumerate(weights):
            # Of a wrapped model without the wrapper's prefix, so that another number of processes can load it.
            plain = accelerator.unwrap_model(models[number]).state_dict() if len(weights) == len(models) else {}
            taken[_name(_MODEL, number)] = plain if len(plain) == len(state) else state
        weights.clear()

    what = f"saving step {step} of run {store.run!r}"
    with _scratch_folder(store, scratch, what, own=direct) as folder, _without_naming(accelerator):
        handle = accelerator.register_save_state_pre_hook(take)  # the last one: it takes what hooks of the program's own leave
        try:
            with _optimizers(accelerator, direct) as optimizers:
                accelerator.save_state(str(folder), **save_model_func_kwargs)
        finally:
            handle.remove()
        for number, optimizer in enumerate(optimizers):
            taken[_name(_OPTIMIZER, number)] = optimizer.state_dict()
        facts = {"version": 1, "processes": accelerator.num_processes, "direct": direct}
        share = share_files(None if direct else store.agreement, folder, what)
        files = folder_state(folder, share.files, reserved=(_MODEL, _OPTIMIZER, _FACTS, *taken), as_tensors=share.as_tensors)
        return store.save(step, {**files, _FACTS: facts, **taken}, metrics=metrics, tags=tags, final=final)


def load_state(
    accelerator: Accelerator,
    store: Store,
    which: Which = "latest",
    *,
    scratch: str | os.PathLike[str] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> int | None:
    """``accelerator.load_state()`` from a store: only what is committed, every byte proved. All processes make this call.

    Another number of processes than saved may load what is not sharded (DDP, one process): a process beyond those that saved keeps its
    random state, as Accelerate does it.

    Args:
        accelerator: With the same things prepared and registered as when it was saved.
        store: Opened after the accelerator was made.
        which: A step, ``latest``, ``best:METRIC``, ``tag:TAG``.
        scratch: Where the temporary folder is made; None: the system's place for temporaries.
        load_kwargs: As in ``Accelerator.load_state``; so are `load_model_func_kwargs`.
        **load_model_func_kwargs: ``map_location`` and others.

    Returns:
        The step; None where the run has no checkpoint and the latest one is asked for.

    Raises:
        NotFoundError: There is no such checkpoint.
        StateMismatchError: Models or optimizers differ from what was saved; names the tensors.
        UsageError: The checkpoint was not saved by `save_state`.
        IntegrityError: There are no good bytes.
    """
    _check(accelerator, store)
    step = _find(store, which)
    if step is None:
        return None
    what = f"loading step {step} of run {store.run!r}"
    with store.open_checkpoint(step) as checkpoint:
        objects = checkpoint.objects
        facts = objects.get(_FACTS) if isinstance(objects, dict) else None
        if not isinstance(facts, dict):
            raise UsageError(
                f"step {step} of run {store.run!r} was not saved by tierstore.integrations.accelerate",
                hint="load it with Store.load, or what saved it",
            )
        direct = accelerator.distributed_type not in _WRITES_ITSELF
        if facts.get("direct") != direct:
            how = "without" if facts.get("direct") else "with"
            raise UsageError(
                f"step {step} of run {store.run!r} was saved {how} FSDP, DeepSpeed or Megatron-LM: such files are others",
                hint="load it with the same kind of launch",
            )
        with _scratch_folder(store, scratch, what, own=direct) as folder:
            place = folder / "state"
            if direct:
                restore_folder(checkpoint, place)
            else:
                nbytes = checkpoint.replica.index.nbytes
                restore_once_a_node(store.agreement, what, str(place), nbytes, lambda: _restored(checkpoint, place))

            def fill(models: list[Any], input_dir: str) -> None:
                _fill(accelerator, store, step, objects, models, optimizers)
                models.clear()

            handle = accelerator.register_load_state_pre_hook(fill)
            try:
                with _optimizers(accelerator, direct) as optimizers:
                    accelerator.load_state(str(place), load_kwargs=load_kwargs, **load_model_func_kwargs)
            finally:
                handle.remove()
            if not direct and store.agreement is not None:
                store.agreement.share(f"{what}: done with the folder", b"")
    if accelerator.num_processes > facts["processes"] and accelerator.process_index >= facts["processes"]:
        log.warning("step %d was saved by %d processes: this one has no random state in it", step, facts["processes"])
    return step


def _restored(checkpoint: Any, place: Path) -> None:
    restore_folder(checkpoint, place)


def _fill(accelerator: Accelerator, store: Store, step: int, objects: Mapping[str, Any], models: list[Any], optimizers: list[Any]) -> None:
    """Loads into the models in place, and hands the optimizers their states."""
    into: dict[str, Any] = {}
    for number, model in enumerate(models):
        name = _name(_MODEL, number)
        plain, stored = accelerator.unwrap_model(model).state_dict(), objects.get(name, {})
        whole = model.state_dict() if plain.keys() != stored.keys() else plain
        into[name] = whole if whole.keys() == stored.keys() else plain
    into.update({_name(_OPTIMIZER, number): None for number in range(len(optimizers))})
    if not into:
        return
    others = tuple(f"{name}{end}" for name in (FILES, HEADERS, FOLDER, _FACTS) for end in ("", ".*"))
    loaded = store.load(step, into, options=LoadOptions(allow_unexpected=others))
    for number, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(loaded[_name(_OPTIMIZER, number)])


def _find(store: Store, which: Which) -> int | None:
    """The step, the same on all ranks."""
    if which == "latest":
        newest = newest_folders(store)
        return newest[0].step if newest else None
    with store.open_checkpoint(which) as checkpoint:
        replica: Any = checkpoint.replica
        step = replica.info.step
    return int(step) if store.agreement is None else int(store.agreement.share("choosing a checkpoint", str(step).encode()))


def _check(accelerator: Accelerator, store: Store) -> None:
    if (store.rank, store.world_size) != (accelerator.process_index, accelerator.num_processes):
        raise UsageError(
            f"the store was opened as rank {store.rank} of {store.world_size}, the Accelerator is process {accelerator.process_index} of "
            f"{accelerator.num_processes}",
            hint="open the store after Accelerator() was made, which starts torch.distributed",
        )


def _name(kind: str, number: int) -> str:
    """As Accelerate numbers its files: ``model``, ``model_1``, ``model_2``."""
    return f"{kind}_{number}" if number else kind


@contextmanager
def _scratch_folder(store: Store, base: str | os.PathLike[str] | None, what: str, *, own: bool) -> Iterator[Path]:
    """A temporary folder, of this process's own or one that the processes of a node share; removed at the end."""
    token = secrets.token_hex(8)
    if not own and store.agreement is not None:
        token = store.agreement.share(f"{what}: naming a folder", token.encode()).decode()
    folder = Path(base or tempfile.gettempdir()) / f"tierstore-{token}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=not own)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _optimizers(accelerator: Accelerator, direct: bool) -> Iterator[list[Any]]:
    """The optimizers, which Accelerate does not see meanwhile: it has hooks for weights, and none for these, twice as large."""
    if not direct:
        yield []
        return
    found = accelerator._optimizers
    accelerator._optimizers = []
    try:
        yield found
    finally:
        accelerator._optimizers = found


@contextmanager
def _without_naming(accelerator: Accelerator) -> Iterator[None]:
    """With automatic names Accelerate would write elsewhere, and remove old folders before the new one is there."""
    project = accelerator.project_configuration
    before, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
    try:
        yield
    finally:
        project.automatic_checkpoint_naming = before
