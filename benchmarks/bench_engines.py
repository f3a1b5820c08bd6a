"""What a checkpoint costs with the store against the framework's own on the local disk: DeepSpeed, Megatron-Core, torchtitan, a plain loop.

Stall per save, time until it is done, time to load; on the CPU, in one process for each framework.

python benchmarks/bench_engines.py [--nbytes 200MB] [--repeat 5] [--only deepspeed]
"""

from __future__ import annotations

import os

# Before torch comes in. DeepSpeed compiles an optimizer of its own at the first engine otherwise, for minutes.
os.environ.update(DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1", LOCAL_RANK="0")

import argparse
import importlib
import logging
import subprocess
import sys
import warnings

import torch.distributed as dist
from common import arguments, scratch

ENGINES = {"deepspeed": "deepspeed", "megatron": "megatron.core", "torchtitan": "torchtitan", "plain": "torch"}
"""What is measured, by `engines_<name>.py`, and the module that has to be there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ENGINES), help="one of them, in this process")
    args = arguments("", nbytes="200MB", parser=parser)
    if args.only is not None:
        _measure(args)
        return
    for name in ENGINES:  # a process each: they change torch and one another
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], check=False)
        if done.returncode:
            sys.exit(f"{name} failed")


def _measure(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        importlib.import_module(ENGINES[args.only])
    except ModuleNotFoundError as error:
        print(f"\n{args.only}: NOT MEASURED: {error}")
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with scratch(args.directory) as root:
        importlib.import_module(f"engines_{args.only}").measure(root, args.nbytes, args.repeat)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
