"""What DeepSpeed's tests run: real engines on the CPU over gloo, in ranks that are forks of one process.

``python deepspeed_kit.py FOLDER`` imports DeepSpeed once (many seconds), then forks the ranks of each scenario from there, and prints what
they returned as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]
GUIDE = ROOT / "docs" / "guides" / "deepspeed.md"

# DeepSpeed compiles an optimizer of its own at the first engine: importing the compiler takes longer than all else here.
os.environ.update(DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

STEPS = 3
CLIENT = {"args": argparse.Namespace(lr=0.1, name="run"), "seen": {1, 2}, "epoch": 1}


def begin() -> Any:
    """DeepSpeed, ready in this rank."""
    import deepspeed
    from deepspeed.utils import logger

    warnings.simplefilter("ignore")  # DeepSpeed's own, and torch's about what DeepSpeed calls
    logger.setLevel("CRITICAL")
    # Its all-reduce through shared memory would be compiled here, for minutes; without it DeepSpeed takes gloo's.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def engine_of(deepspeed: Any, stage: int) -> Any:
    """A small model with AdamW, a frozen parameter and a learning rate's schedule; alike on every call."""
    import torch

    torch.manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4), torch.nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return _initialized(deepspeed, model, optimizer, stage)


def _initialized(deepspeed: Any, model: Any, optimizer: Any, stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "steps_per_print": 1_000_000,
        **more,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine: Any, steps: int = STEPS) -> list[float]:
    """Trains on batches that depend on the step and the rank alone; returns the losses, exactly."""
    import torch

    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(1000 * engine.global_steps + engine.global_rank)
        loss = engine(torch.randn(4, 8, generator=generator)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def store_of(folder: Path, run: str, **options: Any) -> Any:
    """A store with a tier for each rank's node, and a shared one."""
    import tierstore

    node = {"name": "node", "uri": str(folder / f"node{os.environ.get('RANK', 0)}"), "scope": "node"}
    config = {"version": 1, "run": run, "tiers": [node, {"name": "shared", "uri": str(folder / "shared")}]}
    return tierstore.open(config, **options)


def difference(a: Any, b: Any, place: str = "") -> str:
    """The first place at which two loaded files differ, types included; empty where they are equal bit by bit."""
    import torch

    if type(a) is not type(b):
        return f"{place}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        return "" if alike else f"{place}: {a} and {b}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{place}: keys {list(a)} and {list(b)}"
        return next((found for key in a if (found := difference(a[key], b[key], f"{place}.{key}"))), "")
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{place}: lengths {len(a)} and {len(b)}"
        return next((found for n, (x, y) in enumerate(zip(a, b, strict=True)) if (found := difference(x, y, f"{place}.{n}"))), "")
    if hasattr(a, "__dict__") and not isinstance(a, type):
        return difference(vars(a), vars(b), place)
    return "" if a == b else f"{place}: {a!r} and {b!r}"


def _error(action: Callable[[], Any]) -> list[str]:
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - told to the test
        return [type(error).__name__, str(error)]
    return ["nothing raised", repr(result)]


@contextlib.contextmanager
def _warnings_of(name: str) -> Any:
    """The warnings that a logger of tierstore's gives."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


# ---- scenarios: what each rank does


def stages(rank: int, world_size: int, folder: Path) -> Any:
    """Each stage of ZeRO: what DeepSpeed writes itself, what comes back from the store, and training on from it."""
    import torch

    deepspeed = begin()
    from tierstore.integrations.deepspeed import install, write_files

    told = {}
    for stage in range(4):
        stock, ours, files = (folder / f"{name}{stage}" for name in ("stock", "ours", "files"))
        engine = engine_of(deepspeed, stage)
        train(engine)
        engine.save_checkpoint(str(stock), client_state=CLIENT)
        with store_of(folder, f"stage{stage}") as store:
            install(engine, store)
            engine.save_checkpoint(str(ours), client_state=CLIENT)
            later = train(engine)
            again = engine_of(deepspeed, stage)
            install(again, store)
            path, client = again.load_checkpoint(str(ours))
            report = {
                "losses": [later, train(again)],
                "path": os.path.relpath(path, ours),
                "client": {key: repr(client[key]) for key in CLIENT},
                "local": sorted(p.name for p in ours.iterdir()),
                "steps": [[info.step, info.tags] for info in store.checkpoints()],
            }
            with store.open_checkpoint() as checkpoint:
                report["tensors"] = {name: list(checkpoint[name].shape) for name in checkpoint}
            if stage == 3:  # the weights alone, which DeepSpeed puts together past its checkpoint engine
                weights = engine_of(deepspeed, stage)
                install(weights, store)
                weights.load_checkpoint(str(ours), load_optimizer_states=False, load_lr_scheduler_states=False)
                fresh = engine_of(deepspeed, stage)
                train(fresh, STEPS)
                x = torch.ones(4, 8)
                report["weights"] = [weights(x).tolist(), fresh(x).tolist()]
        if rank == 0:
            with store_of(folder, f"stage{stage}", rank=0, world_size=1) as alone:
                tag = write_files(alone, files)
            report["files"] = {
                path.name: difference(*(torch.load(place / tag / path.name, weights_only=False) for place in (stock, files)))
                for path in sorted((stock / tag).iterdir())
            }
            report["names"] = sorted(path.name for path in (files / tag).iterdir())
        deepspeed.comm.barrier()
        told[stage] = report
    return told


def tags(rank: int, world_size: int, folder: Path) -> Any:
    """Tags, ``latest``, and what is refused."""
    import torch

    deepspeed = begin()
    from tierstore.integrations.deepspeed import TierCheckpointEngine, install

    told: dict[str, Any] = {}
    place = folder / "ckpt"
    with store_of(folder, "tags") as store:
        engine = engine_of(deepspeed, 1)
        tier = install(engine, store)
        told["nothing yet"] = engine.load_checkpoint(str(place))
        told["installed twice"] = _error(lambda: install(engine, store))
        told["a URI as folder"] = _error(lambda: engine.save_checkpoint("tier:///tags"))
        train(engine, 1)
        tier.metrics = {"loss": 0.5}
        engine.save_checkpoint(str(place))
        tier.metrics = None
        train(engine, 1)
        engine.save_checkpoint(
            str(place), tag="best", client_state={"view": torch.zeros(10**6)[:4], "turned": torch.arange(6).view(2, 3).t()}
        )
        engine.save_checkpoint(str(place), save_latest=False)  # the same step once more, by its own tag
        told["checkpoints"] = [[info.step, sorted(info.tags), dict(info.metrics)] for info in store.checkpoints()]
        told["nbytes"] = store.checkpoints()[-1].nbytes
        told["latest"] = (place / "latest").read_text()
        told["16 bit"] = [engine.save_16bit_model(str(place)), len(store.checkpoints()), (place / "pytorch_model.bin").stat().st_size > 0]

        def loaded(tag: str | None = None) -> list[Any]:
            other = engine_of(deepspeed, 1)
            install(other, store)
            with _warnings_of("tierstore.integrations.deepspeed_parts.tags") as heard:
                path, client = other.load_checkpoint(str(place), tag=tag)
            return [os.path.relpath(path, place), other.global_steps, sorted(client), list(heard)]

        told["by tag"] = loaded("best")
        told["by step"] = loaded("global_step1")
        told["by latest"] = loaded()
        told["unknown tag"] = _error(lambda: loaded("global_step7"))
        deepspeed.comm.barrier()
        for name, text in (("uncommitted", "global_step9"), ("older", "global_step1"), ("cut short", "")):
            if rank == 0:
                (place / "latest").write_text(text)
            deepspeed.comm.barrier()
            told[f"latest {name}"] = loaded()
            deepspeed.comm.barrier()
        if rank == 0:
            (place / "latest").unlink()
        deepspeed.comm.barrier()
        told["latest lost"] = loaded()

        # One rank has something that can't be stored: with ZeRO-3 each rank saves the caller's state.
        third = engine_of(deepspeed, 3)
        install(third, store)
        train(third, 3)
        told["unstorable"] = _error(lambda: third.save_checkpoint(str(place), client_state={"hook": (lambda: 1) if rank == 1 else 1}))
        told["after it"] = [third.save_checkpoint(str(place)), store.checkpoints()[-1].step]

        later = TierCheckpointEngine(store=store, wait="staged")
        told["interface"] = _interface(later)
        engine.checkpoint_engine.wait = "staged"
        train(engine, 3)
        engine.save_checkpoint(str(place))
        tier.ticket.wait("committed", 120)

        anew = engine_of(deepspeed, 1)
        install(anew, store)
        train(anew, 1)
        with _warnings_of("tierstore.integrations.deepspeed") as heard:
            anew.save_checkpoint(str(folder / "anew"))
        told["begun anew"] = list(heard)
    deepspeed.comm.barrier()
    told["latest after staged"] = (place / "latest").read_text()
    if rank == 0:
        (place / "latest").write_text("global_step5")
    deepspeed.comm.barrier()
    with store_of(folder, "another") as empty:
        lost = engine_of(deepspeed, 1)
        install(lost, empty)
        told["store lost"] = _error(lambda: lost.load_checkpoint(str(place)))
    return told


def _interface(tier: Any) -> list[str]:
    """What of DeepSpeed's interface ours does not take as DeepSpeed gives it."""
    import inspect

    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

    wrong = (
        [] if set(inspect.signature(CheckpointCommitInfo).parameters) == {"tag", "save_dir", "save_latest"} else ["CheckpointCommitInfo"]
    )
    for name, theirs in inspect.getmembers(CheckpointEngine, inspect.isfunction):
        if not name.startswith("_"):
            wanted, given = inspect.signature(theirs).parameters, inspect.signature(getattr(type(tier), name)).parameters
            if [(p.name, p.kind) for p in wanted.values()] != [(p.name, p.kind) for p in given.values()]:
                wrong.append(name)
    known = {"create", "save", "makedirs", "load", "commit", "is_data_parallel_writer", "is_decoupled"}
    known |= {"set_commit_info", "get_commit_info", "cleanup", "preserves_storage_sharing"}
    return wrong + sorted({name for name in vars(CheckpointEngine) if not name.startswith("_")} - known)


def one_rank(rank: int, world_size: int, folder: Path) -> Any:
    """What two ranks saved, loaded by one: refused where DeepSpeed can't, whole where it can."""
    import torch

    deepspeed = begin()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from tierstore.integrations.deepspeed import install

    told: dict[str, Any] = {}
    for stage in (0, 1):
        engine = engine_of(deepspeed, stage)
        with store_of(folder, f"stage{stage}") as store:
            install(engine, store)
            told[f"stage {stage}"] = _error(lambda engine=engine, stage=stage: engine.load_checkpoint(str(folder / f"ours{stage}"))[0])  # type: ignore[misc]
            told[f"steps {stage}"] = engine.global_steps
    for stage in (1, 2, 3):
        ours = get_fp32_state_dict_from_zero_checkpoint(str(folder / f"files{stage}"))
        theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder / f"stock{stage}"))
        told[f"fp32 {stage}"] = difference(
            {k: torch.as_tensor(v) for k, v in theirs.items()}, {k: torch.as_tensor(v) for k, v in ours.items()}
        )
    return told


def pipeline(rank: int, world_size: int, folder: Path) -> Any:
    """Two stages of a pipeline, whose layers have files of their own."""
    import torch

    deepspeed = begin()
    from deepspeed.pipe import PipelineModule

    from tierstore.integrations.deepspeed import install

    def made() -> Any:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)]
        loss = torch.nn.MSELoss()
        model = PipelineModule(layers=layers, num_stages=2, loss_fn=loss, partition_method="uniform")
        return _initialized(deepspeed, model, torch.optim.AdamW(model.parameters(), lr=1e-2), 0, train_batch_size=8)

    def losses(engine: Any) -> list[float]:
        def batches() -> Any:
            while True:
                generator = torch.Generator().manual_seed(engine.global_steps)
                yield torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)

        return [float(engine.train_batch(data_iter=batches())) for _ in range(2)]

    engine = made()
    losses(engine)
    with store_of(folder, "pipeline") as store:
        install(engine, store)
        engine.save_checkpoint(str(folder / "pipe"))
        again = made()
        install(again, store)
        again.load_checkpoint(str(folder / "pipe"))
        with store.open_checkpoint() as checkpoint:
            names = [name for name in checkpoint if name.startswith("layer_")]
        return {"losses": [losses(engine), losses(again)], "layers": names}


def experts(rank: int, world_size: int, folder: Path) -> Any:
    """A layer of two experts, one on each rank, with files of their own."""
    import torch

    deepspeed = begin()
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    from tierstore.integrations.deepspeed import install

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2, k=1, use_rts=False)
            self.out = torch.nn.Linear(8, 1)

        def forward(self, x: Any) -> Any:
            return self.out(self.moe(x)[0])

    def made() -> Any:
        torch.manual_seed(0)
        model = Net()
        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
        return _initialized(deepspeed, model, torch.optim.AdamW(groups, lr=1e-2), 0)

    engine = made()
    train(engine, 1)
    with store_of(folder, "experts") as store:
        install(engine, store)
        engine.save_checkpoint(str(folder / "moe"))
        again = made()
        install(again, store)
        again.load_checkpoint(str(folder / "moe"))
        return {"losses": [train(engine, 2), train(again, 2)]}


# ---- the guide's script, killed


def guide(folder: Path) -> Any:
    """The guide's script with its configuration, by two ranks: to the end; and killed while a save commits, then started again."""
    text = GUIDE.read_text(encoding="utf-8")
    files = dict(re.findall(r"<!-- file: (\S+) -->\n+```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    told: dict[str, Any] = {}
    for name in ("whole", "killed"):
        place = folder / name
        place.mkdir(parents=True)
        for file, body in files.items():
            (place / file).write_text(body)
        if name == "killed":
            ranks = _start(place, "first", crash_at="persist.before-part:3")
            ranks[1].join(200)
            assert ranks[0].exitcode is None, ranks[0].exitcode  # it waits for the other's part
            os.kill(ranks[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
            ranks[0].join(200)
            told["when killed"] = [
                [r.exitcode for r in ranks],
                (place / "ckpt" / "latest").read_text(),
                (place / "first-0.out").read_text(),
            ]
        ranks = _start(place, "last")
        for process in ranks:
            process.join(200)
        told[name] = [[process.exitcode for process in ranks], (place / "last-0.out").read_text()]
    return told


def _start(place: Path, attempt: str, crash_at: str = "") -> list[Any]:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_script, args=(place, attempt, rank, crash_at)) for rank in range(2)]
    for process in ranks:
        process.start()
    return ranks


def _script(place: Path, attempt: str, rank: int, crash_at: str) -> None:
    """A rank as torchrun starts it, but that a file is the rendezvous."""
    import torch
    import torch.distributed as dist

    os.chdir(place)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    if crash_at and rank == 1:
        import tierstore.crashpoints as crashpoints  # has read the environment already, before the fork

        crashpoints._AT, _, crashpoints._NTH = crash_at.partition(":")
    out = open(place / f"{attempt}-{rank}.out", "w", buffering=1)  # noqa: SIM115 - lives as long as the process
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    sys.stdout = out
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous-{attempt}", rank=rank, world_size=2)
    begin()
    runpy.run_path(str(place / "train.py"), run_name="__main__")


def main(folder: Path, chosen: list[str]) -> None:
    import deepspeed  # noqa: F401 - once, for all ranks
    import ranks_kit
    import torch._dynamo
    import torch.distributed.checkpoint  # noqa: F401

    import tierstore.integrations.deepspeed  # noqa: F401

    ranks_kit.SERVER = multiprocessing.get_context("fork")  # type: ignore[assignment]
    told: dict[str, Any] = {}
    for body, world_size in ((stages, 2), (one_rank, 1), (tags, 2), (pipeline, 2), (experts, 2), (guide, 0)):
        if chosen and body.__name__ not in chosen:
            continue
        began = time.monotonic()
        place = folder / ("stages" if body is one_rank else body.__name__)
        told[body.__name__] = ranks_kit.run_ranks(world_size, body, place, timeout_s=200) if world_size else guide(place)
        print(f"{body.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
