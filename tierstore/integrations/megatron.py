"""Megatron-Core: ``dist_checkpointing`` saves into a store and loads from it, in any parallel layout.

`save` and `load` stand for Megatron's functions of these names; ``checkpoint_dir`` may be a ``tier://`` URI. `register` is for programs
that call Megatron's own (Megatron-LM): the strategies then go by the names that Megatron keeps them under, and a local folder
``iter_0000100`` holds one small file, ``metadata.json``, which Megatron writes when the checkpoint is committed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierstore.integrations.needs import needs

with needs("megatron", extra="megatron"):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.base import (
        StrategyAction,
        default_strategies,
        get_default_strategy,
        register_default_strategy,
    )

from tierstore.dcp.place import place_of
from tierstore.errors import NotFoundError, UsageError
from tierstore.integrations.local_files import write_whole
from tierstore.integrations.megatron_parts.home import BACKEND, VERSION, Home, MegatronMismatchError, step_of
from tierstore.integrations.megatron_parts.loading import EitherLoadCommonStrategy, TierLoadCommonStrategy, TierLoadShardedStrategy
from tierstore.integrations.megatron_parts.saving import EitherSaveCommonStrategy, TierSaveCommonStrategy, TierSaveShardedStrategy
from tierstore.state.agreement import telling
from tierstore.store import Store
from tierstore.tier_uri import is_tier_uri

__all__ = [
    "MegatronMismatchError",
    "TierLoadCommonStrategy",
    "TierLoadShardedStrategy",
    "TierSaveCommonStrategy",
    "TierSaveShardedStrategy",
    "load",
    "point_at",
    "register",
    "save",
]

_COMMON = ("torch", 1)
"""The name of the common strategy that Megatron takes when it saves: it allows for no other."""

_TRACKER = "latest_checkpointed_iteration.txt"


def register(source: Any, *, run: str | None = None) -> TierSaveShardedStrategy:
    """Puts the strategies into Megatron's registry, for this process: saves with ``sharded_strategy=("tierstore", 1)`` go to the store.

    Loads find it by the folder's ``metadata.json``; folders that other strategies wrote load as before. The step of a checkpoint is the
    number that its folder's name ends with. Calling it again replaces the store.

    Args:
        source: An open store of all ranks (it stays the caller's to close), or what `tierstore.open` takes.
        run: The run, where `source` does not say it.

    Returns:
        The strategy that saves: wrap it (``FullyParallelSaveStrategyWrapper``), set its `metrics`.
    """
    home = Home(source, run)
    saving = TierSaveShardedStrategy(home)
    stock_save = get_default_strategy(StrategyAction.SAVE_COMMON, *_COMMON)
    stock_load = get_default_strategy(StrategyAction.LOAD_COMMON, *_COMMON)
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, saving)
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, TierLoadShardedStrategy(home))
    save_common = EitherSaveCommonStrategy(saving, getattr(stock_save, "stock", stock_save))
    load_common = EitherLoadCommonStrategy(TierLoadCommonStrategy(home), getattr(stock_load, "stock", stock_load))
    register_default_strategy(StrategyAction.SAVE_COMMON, *_COMMON, save_common)
    register_default_strategy(StrategyAction.LOAD_COMMON, *_COMMON, load_common)
    return saving


def save(
    sharded_state_dict: Any, checkpoint_dir: Any, sharded_strategy: Any = None, *, source: Any = None, **options: Any
) -> AsyncRequest | None:
    """`dist_checkpointing.save` into a store.

    Args:
        sharded_state_dict: As there; Megatron changes it.
        checkpoint_dir: ``tier://…/RUN/step-100``; or, with `source`, a name that ends with the step (nothing is made of it).
        sharded_strategy: A `TierSaveShardedStrategy`, or a wrapper around one; None: one is made of `checkpoint_dir` or `source`.
        source: An open store, or what `tierstore.open` takes, where `checkpoint_dir` is no URI.
        **options: As there: `validate_access_integrity`, `async_sharded_save`, `content_metadata` …

    Returns:
        With ``async_sharded_save=True`` the request to schedule; finalising it raises where the checkpoint did not commit.

    Raises:
        UnsupportedTypeError: A value can't be stored; names its place. On the other ranks a RankError.
        SaveError: It did not commit.
        CheckpointingException: Megatron's own, for a sharding that does not fit.
    """
    strategy = sharded_strategy or TierSaveShardedStrategy(_home(checkpoint_dir, source))
    ours = _inmost(strategy)
    if not isinstance(ours, TierSaveShardedStrategy):
        raise UsageError(f"sharded_strategy is a {type(ours).__name__}", hint="pass a TierSaveShardedStrategy, or a wrapper around one")
    step = _step(checkpoint_dir)
    with contextlib.ExitStack() as cleaning:
        folder = os.path.join(cleaning.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-megatron-")), f"iter_{step:07d}")
        os.mkdir(folder)
        with _default(StrategyAction.SAVE_COMMON, TierSaveCommonStrategy(ours)), _heard(ours, step):
            request = dist_checkpointing.save(sharded_state_dict, folder, sharded_strategy=strategy, **options)
        if request is not None:  # Megatron writes into the folder when the request is finalised
            request.add_finalize_fn(cleaning.pop_all().close)
        return request


def load(sharded_state_dict: Any, checkpoint_dir: Any, sharded_strategy: Any = None, *, source: Any = None, **options: Any) -> Any:
    """`dist_checkpointing.load` from a store; all ranks load the same checkpoint, saved by any number of ranks in any layout.

    Args:
        sharded_state_dict: As there.
        checkpoint_dir: ``tier://…/RUN[/step-100 | @REFERENCE]`` (without: the latest); or, with `source`, a name that ends with the step.
        sharded_strategy: A `TierLoadShardedStrategy`, or a wrapper around one; None: one is made of `checkpoint_dir` or `source`.
        source: An open store, or what `tierstore.open` takes, where `checkpoint_dir` is no URI.
        **options: As there: `validate_access_integrity`, `strict`.

    Raises:
        NotFoundError: No such run, step or tag.
        MegatronMismatchError: Keys are missing, shapes or dtypes differ; a `CheckpointingException` too.
        IntegrityError: There are no good bytes.
    """
    strategy = sharded_strategy or TierLoadShardedStrategy(_home(checkpoint_dir, source))
    ours = _inmost(strategy)
    if not isinstance(ours, TierLoadShardedStrategy):
        raise UsageError(f"sharded_strategy is a {type(ours).__name__}", hint="pass a TierLoadShardedStrategy, or a wrapper around one")
    step = _found(checkpoint_dir, ours.home)
    with tempfile.TemporaryDirectory(prefix="tierstore-megatron-") as root:
        folder = _pointer(root, step)
        common = TierLoadCommonStrategy(ours.home)
        return dist_checkpointing.load(sharded_state_dict, folder, sharded_strategy=strategy, common_strategy=common, **options)


def point_at(root: str | os.PathLike[str], which: int | str = "latest", *, source: Any, run: str | None = None) -> str | None:
    """Makes the local files by which Megatron-LM finds a checkpoint: on a node that has none, or after a crash between commit and file.

    Args:
        root: Megatron-LM's ``--load``: gets ``iter_0000100/metadata.json`` and ``latest_checkpointed_iteration.txt``.
        which: A step, ``latest``, ``best:METRIC``, ``tag:TAG``.
        source: An open store, or what `tierstore.open` takes.
        run: The run, where `source` does not say it.

    Returns:
        The checkpoint's folder; None: the run has no committed checkpoint, and nothing was written.

    Raises:
        NotFoundError: No such step or tag.
    """
    store = Home(source, run).store
    try:
        step = _step_of_reference(store, which)
    except NotFoundError:
        if which != "latest" or store.latest() is not None:
            raise
        return None
    folder = _pointer(root, step)
    write_whole(Path(root, _TRACKER), lambda file: file.write(str(step).encode()))
    return folder


# ---- inside


def _home(checkpoint_dir: Any, source: Any) -> Home:
    if source is not None:
        return Home(source)
    if not is_tier_uri(checkpoint_dir):
        raise UsageError(f"{checkpoint_dir!r} names no store", hint="pass a tier:// URI as checkpoint_dir, or source=")
    return Home(place_of(checkpoint_dir).config)


def _step(checkpoint_dir: Any) -> int:
    return place_of(checkpoint_dir).step if is_tier_uri(checkpoint_dir) else step_of(checkpoint_dir)


def _found(checkpoint_dir: Any, home: Home) -> int:
    """The step to load; what ``latest`` and its like mean rank 0 says for all."""
    if not is_tier_uri(checkpoint_dir):
        return step_of(checkpoint_dir)
    reference = place_of(checkpoint_dir).reference
    if reference is not None and reference.step is not None:
        return reference.step
    which = "latest" if reference is None else str(reference).rpartition("@")[2]
    store, what = home.store, f"looking for {checkpoint_dir}"
    if which == "latest":
        newest = store.find_resumable()  # what a dead process left whole is committed, and it is not deleted meanwhile
        if newest is not None:
            return newest.step
    agreement = store.agreement
    if agreement is None:
        return _step_of_reference(store, which)
    with telling(agreement, what):
        found = _step_of_reference(store, which) if store.rank == 0 else 0
    return int(agreement.share(what, str(found).encode()))


def _step_of_reference(store: Store, which: int | str) -> int:
    with store.open_checkpoint(which) as checkpoint:
        replica: Any = checkpoint.replica
        return int(replica.info.step)


def _pointer(root: Any, step: int) -> str:
    folder = os.path.join(os.fspath(root), f"iter_{step:07d}")
    os.makedirs(folder, exist_ok=True)
    save_config(CheckpointingConfig(BACKEND, VERSION), folder)
    return folder


def _inmost(strategy: Any) -> Any:
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    return strategy


@contextlib.contextmanager
def _heard(ours: TierSaveShardedStrategy, step: int) -> Iterator[None]:
    """What Megatron refuses on rank 0 alone, before it comes to the strategy, the other ranks hear: they wait there."""
    before = ours.begun
    try:
        yield
    except BaseException as error:
        store = ours.home.store
        if ours.begun == before and store.agreement is not None:
            store.agreement.tell(f"the save of step {step} of run {store.run!r}", error)
        raise


@contextlib.contextmanager
def _default(action: StrategyAction, strategy: Any) -> Iterator[None]:
    """Megatron's registry holds `strategy` for this call: its `save` takes a common strategy from nowhere else."""
    table = default_strategies[action.value]
    before = table[_COMMON]
    table[_COMMON] = strategy
    try:
        yield
    finally:
        table[_COMMON] = before
