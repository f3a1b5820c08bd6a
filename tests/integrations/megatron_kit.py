"""What Megatron's tests run: its real save and load on the CPU over gloo, in ranks that are forks of one process.

``python megatron_kit.py FOLDER`` imports Megatron-Core once (many seconds), then forks the ranks of each scenario from there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]
GUIDE = ROOT / "docs" / "guides" / "megatron.md"


def config_of(folder: Path, run: str = "r") -> dict[str, Any]:
    node = {"name": "node", "uri": str(folder / f"node{os.environ.get('RANK', 0)}"), "scope": "node"}
    return {
        "version": 1,
        "run": run,
        "tiers": [node, {"name": "shared", "uri": str(folder / "shared")}],
        "save": {"agreement_timeout": "120s"},
    }


def store_of(folder: Path, run: str = "r", **options: Any) -> Any:
    import tierstore

    return tierstore.open(config_of(folder, run), **options)


def whole() -> Any:
    import torch

    return torch.arange(96.0).view(8, 12)


def state(rank: int, world_size: int, *, axis: int = 0, blank: bool = False, scale: float = 1.0) -> dict[str, Any]:
    """A trainer's state in small: a tensor sharded along `axis`, unevenly sharded and stacked ones, a replica, objects of each rank."""
    import torch
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.transformer.enums import AttnBackend

    def made(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, -1.0) if blank else (tensor * scale).contiguous()

    cut = [0, 3, 8] if world_size == 2 else [0, 8]
    rows = whole()[cut[rank] : cut[rank + 1]]
    uneven = ShardedTensor(
        "uneven", made(rows), rows.dtype, tuple(rows.shape), (8, 12), (cut[rank], 0), axis_fragmentations=None, replica_id=0
    )
    layer = whole()[rank * 4 : rank * 4 + 4]
    stacked = ShardedTensor.from_rank_offsets("stacked", made(layer), (0, rank, world_size), prepend_axis_num=1)
    sharded = {
        "model": {
            "w": ShardedTensor.from_rank_offsets("model.w", made(whole().chunk(world_size, axis)[rank]), (axis, rank, world_size)),
            "bias": ShardedTensor.from_rank_offsets("model.bias", made(torch.arange(5, dtype=torch.bfloat16)), replica_id=rank),
            "uneven": uneven,
            **({"stacked": stacked} if world_size == 2 else {}),
        },
        **({} if world_size == 1 else {"rng": ShardedObject("rng", None if blank else _rng(rank), (world_size,), (rank,))}),
    }
    common = {
        "args": argparse.Namespace(lr=0.1, backend=AttnBackend.flash, dtype=torch.bfloat16),
        "iteration": 5,
        "optimizer": {"step": torch.tensor(3), "param_groups": [{"betas": (0.9, 0.95)}]},
    }
    return sharded if blank else {**sharded, **common}


def _rng(rank: int) -> Any:
    import torch

    return [{"random": torch.full((4,), rank, dtype=torch.uint8), "rank": rank}]


def plain(value: Any) -> Any:
    """A loaded state as JSON values."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else repr(value)


def _error(action: Callable[[], Any]) -> list[str]:
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - told to the test
        return [" ".join(kind.__name__ for kind in type(error).__mro__[:4]), str(error)]
    return ["nothing raised", repr(result)]


# ---- scenarios: what each rank does


def layouts(rank: int, world_size: int, folder: Path) -> Any:
    """Saved with one sharding, loaded with another, by all the ways to call it."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    from tierstore.integrations import megatron

    told: dict[str, Any] = {}
    with store_of(folder) as store:
        megatron.save(state(rank, world_size), "iter_0000001", source=store, content_metadata={"version": 2})
        told["other axis"] = plain(megatron.load(state(rank, world_size, axis=1, blank=True), "iter_0000001", source=store))

        wrapped = FullyParallelSaveStrategyWrapper(megatron.TierSaveShardedStrategy(store))
        megatron.save(state(rank, world_size), "iter_0000002", wrapped)
        told["fully parallel"] = plain(megatron.load(state(rank, world_size, blank=True), "iter_0000002", source=store))["model"]

        # Megatron's own calls, as Megatron-LM makes them.
        saving = megatron.register(store)
        saving.metrics = {"loss": 0.25}
        place = folder / "ckpt" / "iter_0000003"
        if rank == 0:
            place.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state(rank, world_size), str(place), ("tierstore", 1), content_metadata={"version": 3})
        told["local"] = sorted(path.name for path in place.iterdir())
        told["checkpoints"] = [[info.step, dict(info.metrics)] for info in store.checkpoints()]
        told["is one"] = dist_checkpointing.check_is_distributed_checkpoint(str(place))
        told["common"] = plain(dist_checkpointing.load_common_state_dict(str(place)))
        told["metadata"] = dist_checkpointing.load_content_metadata(str(place))
        told["registered"] = plain(dist_checkpointing.load(state(rank, world_size, axis=1, blank=True), str(place)))
        told["plain tensors"] = plain(dist_checkpointing.load_plain_tensors(str(place)))["model.w"]
        less = state(rank, world_size, blank=True)
        del less["rng"], less["model"]["bias"]
        _, missing, unexpected = dist_checkpointing.load(less, str(place), strict="return_all")
        told["strict"] = [sorted(missing), sorted(unexpected)]

        shard = dist_checkpointing.ShardedTensor.from_rank_offsets

        def other(tensors: dict[str, Any], **options: Any) -> list[str]:
            """Loads with other tensors under these keys; the last entry: what became of another one."""
            wanted = state(rank, world_size, blank=True)
            for key, tensor in tensors.items():
                changed = tensor if isinstance(tensor, dist_checkpointing.ShardedTensor) else shard(f"model.{key}", tensor, replica_id=rank)
                wanted["model"][key] = changed
            found = _error(lambda: dist_checkpointing.load(wanted, str(place), **options))
            return [*found, str(wanted["model"]["uneven"].data.flatten()[0].item())]

        longer, double = torch.full((10, 12), -1.0), torch.zeros(5)
        told["missing"] = other({"x": torch.zeros(3), "y": torch.zeros(3)})
        told["shape"] = other({"w": longer})
        told["dtype"] = other({"bias": double})
        casting = megatron.TierLoadShardedStrategy(store, allow_cast=True)
        told["cast"] = [other({"bias": double}, sharded_strategy=casting)[0], double.tolist()]
        told["padded"] = [other({"w": shard("model.w", longer, replica_id=rank, allow_shape_mismatch=True)})[0], longer.tolist()]
        if rank == 0:  # a folder that Megatron's own strategies wrote
            stock = folder / "ckpt" / "stock"
            stock.mkdir()
            (stock / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
            torch.save({"iteration": 9}, stock / "common.pt")
            told["stock"] = dist_checkpointing.load_common_state_dict(str(stock))
        torch.distributed.barrier()
        told["by itself"] = _error(lambda: _unregistered(store, rank, world_size, folder))
        bad = state(rank, world_size)
        if rank == 1:
            bad["rng"].data = [lambda: 1]
        told["unstorable"] = _error(lambda: megatron.save(bad, "iter_0000004", source=store))
        clash = state(rank, world_size)
        clash["model"]["w"].global_offset = (0, 0)
        told["overlap"] = _error(lambda: megatron.save(clash, "iter_0000004", source=store))
        told["gone"] = _error(lambda: megatron.load(state(rank, world_size, blank=True), "iter_0000009", source=store))
        told["steps"] = [info.step for info in store.checkpoints()]
    return told


def _unregistered(store: Any, rank: int, world_size: int, folder: Path) -> None:
    """Our sharded strategy without `register`: Megatron keeps the common state to itself."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.base import StrategyAction, default_strategies

    from tierstore.integrations import megatron

    table = default_strategies[StrategyAction.SAVE_COMMON.value]
    either, table["torch", 1] = table["torch", 1], table["torch", 1].stock
    place = folder / "unregistered" / "iter_0000004"
    if rank == 0:
        place.mkdir(parents=True)
    torch.distributed.barrier()
    try:
        dist_checkpointing.save(state(rank, world_size), str(place), megatron.TierSaveShardedStrategy(store))
    finally:
        table["torch", 1] = either


def background(rank: int, world_size: int, folder: Path) -> Any:
    """An async save as Megatron's queue makes it, whose state changes at once; then one whose ranks die before it commits."""
    import torch
    from megatron.core import dist_checkpointing

    from tierstore import crashpoints
    from tierstore.integrations import megatron
    from tierstore.tiers import persist

    told: dict[str, Any] = {}
    both_saved = threading.Event()

    def die(point: str) -> None:
        """Rank 1's persisting stops here; not before both ranks are out of the call, for in it they would wait for a dead one."""
        if point == "persist.before-part":
            both_saved.wait(120)
            os._exit(crashpoints.CRASH_EXIT)

    store = store_of(folder)
    megatron.register(store)
    for step in (1, 2):
        place = folder / "ckpt" / f"iter_{step:07d}"
        if rank == 0:
            place.mkdir(parents=True)
        torch.distributed.barrier()
        if step == 2 and rank == 1:
            persist.reach = die  # type: ignore[assignment]
        saved = state(rank, world_size, scale=float(step))
        tensors = [value.data for value in saved["model"].values()]
        request = dist_checkpointing.save(saved, str(place), ("tierstore", 1), async_sharded_save=True)
        for tensor in tensors:
            tensor.fill_(float("nan"))  # training goes on
        told["local before"] = sorted(path.name for path in place.iterdir())
        process = multiprocessing.get_context("fork").Process(target=request.async_fn, args=request.async_fn_args)
        process.start()
        if step == 2:
            torch.distributed.barrier()
            if rank == 0:
                os._exit(9)
            both_saved.set()
            threading.Event().wait(120)  # until the crash point
        process.join(120)
        told["exit code"] = process.exitcode
        for finalize in request.finalize_fns:
            finalize()
        told["local after"] = sorted(path.name for path in place.iterdir())
        told["loaded"] = plain(dist_checkpointing.load(state(rank, world_size, axis=1, blank=True), str(place)))
        (folder / f"told{rank}.json").write_text(json.dumps(told))
    return None


def after_death(rank: int, world_size: int, folder: Path) -> Any:
    """What Megatron-LM finds then, on nodes whose local files are gone."""
    import torch
    from megatron.core import dist_checkpointing

    from tierstore.integrations import megatron

    with store_of(folder) as store:
        megatron.register(store)
        root = folder / f"fresh{rank}"
        place = megatron.point_at(root, source=store)
        assert place is not None
        loaded = plain(dist_checkpointing.load(state(rank, world_size, axis=1, blank=True), place))
        torch.distributed.barrier()
        with store_of(folder, "nothing") as empty:
            nothing = megatron.point_at(folder / f"empty{rank}", source=empty)
        told = json.loads((folder / f"told{rank}.json").read_text())
        local = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        tracker = (root / "latest_checkpointed_iteration.txt").read_text()
        return {**told, "place": os.path.basename(place), "again": loaded, "nothing": nothing, "local fresh": local, "tracker": tracker}


def gpt(rank: int, world_size: int, folder: Path) -> Any:
    """A real GPT model: tensor-parallel over two ranks, loaded by one; each by a URI."""
    import torch
    import yaml
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    import tierstore.dcp
    from tierstore.integrations import megatron

    def made(parallel: int) -> Any:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(parallel, 1, create_gloo_process_groups=False)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            ffn_hidden_size=32,
            use_cpu_initialization=True,
            tensor_model_parallel_size=parallel,
        )
        torch.manual_seed(1)
        return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)

    file = folder / f"store{rank}.yaml"
    file.write_text(yaml.safe_dump(config_of(folder)))
    two = made(2)
    megatron.save(two.sharded_state_dict(), f"tier://{file}/gpt/step-100", content_metadata={"tp": 2})
    one = made(1)
    expected = {key: value.clone() for key, value in one.state_dict().items() if isinstance(value, torch.Tensor)}
    for parameter in one.parameters():
        parameter.data.zero_()
    megatron.load(one.sharded_state_dict(), f"tier://{file}/gpt")
    equal = all(torch.equal(value, one.state_dict()[key]) for key, value in expected.items())
    tierstore.dcp.close()
    return {"tensors": len(expected), "equal": equal, "sharded": tuple(two.decoder.layers[0].mlp.linear_fc1.weight.shape)}


def alone(rank: int, world_size: int, folder: Path) -> Any:
    """What two ranks saved, loaded by one; and by the other doors."""
    import torch
    import torch.distributed.checkpoint as dcp

    from tierstore.dcp import TierStorageReader
    from tierstore.integrations import megatron

    with store_of(folder) as store:
        loaded = plain(megatron.load(state(0, 1, blank=True), "iter_0000001", source=store))
        direct = store.load(1)
        through_dcp = {"sharded": {"model.w": torch.zeros(8, 12)}}
        reader = TierStorageReader(config_of(folder))
        dcp.load(through_dcp, storage_reader=reader, checkpoint_id="step-1")
        reader.close()
        return {"loaded": loaded, "direct": plain(direct), "dcp": plain(through_dcp["sharded"]["model.w"])}


def guide(rank: int, world_size: int, folder: Path) -> Any:
    """The guide's scripts, word for word."""
    import contextlib
    import io
    import runpy

    import torch.distributed as dist

    text = GUIDE.read_text(encoding="utf-8")
    files = dict(re.findall(r"<!-- file: (\S+) -->\n+```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    place = folder / "guide"
    if rank == 0:
        place.mkdir()
        for name, body in files.items():
            (place / name).write_text(body)
    dist.barrier()
    os.chdir(place)
    told = []
    for name in sorted(name for name in files if name.endswith(".py")):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(name, run_name="__main__")
        told.append([name, out.getvalue()])
    return told


def main(folder: Path, chosen: list[str]) -> None:
    import ranks_kit
    import torch.distributed.checkpoint  # noqa: F401 - once, for all ranks

    import tierstore.integrations.megatron  # noqa: F401

    warnings.simplefilter("ignore")  # Megatron's own, about what is not installed
    ranks_kit.SERVER = multiprocessing.get_context("fork")  # type: ignore[assignment]
    told: dict[str, Any] = {}
    may_die = {"background": {0: 9, 1: 86}}
    for body, world_size in ((layouts, 2), (alone, 1), (background, 2), (after_death, 2), (gpt, 2), (guide, 2)):
        name = body.__name__
        if chosen and name not in chosen:
            continue
        began = time.monotonic()
        place = folder / {"alone": "layouts", "after_death": "background"}.get(name, name)
        told[name] = ranks_kit.run_ranks(world_size, body, place, timeout_s=150, may_die=may_die.get(name))
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
        (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
