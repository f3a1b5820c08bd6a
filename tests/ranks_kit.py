"""What the tests with several ranks share: starting them in a gloo group within milliseconds, and collecting what they return.

A rank's body is a function of a test module, ``body(rank, world_size, folder, **values)``; it returns a JSON value. Each rank is a
fork of a server that has imported torch once; it has the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from fork_kit import SERVER, FrameworkServer

from tierstore.state.agreement import Agreement

Body = Callable[..., Any]


def run_ranks(
    world_size: int,
    body: Body,
    folder: Path,
    *,
    timeout_s: float = 240.0,
    may_die: Mapping[int, int] | None = None,
    server: FrameworkServer | None = None,
    **values: Any,
) -> list[Any]:
    """Runs `body` in `world_size` ranks of a gloo group; returns what each returned (None where it died as allowed).

    Args:
        world_size: How many ranks.
        body: A function at the top of a module; see above.
        folder: Its place; the ranks' results and errors lie there too.
        timeout_s: After this all of them are killed and the test fails, naming who was still running.
        may_die: Rank → the exit code that it may (and must) end with, e.g. ``{1: -9}``.
        server: Where the ranks come from; None: from `SERVER`.
        values: Further keyword arguments of `body`; they are pickled.

    Raises:
        AssertionError: A rank failed, hung, or did not die as it should; with the tracebacks of all of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    room = folder / f"ranks-{time.monotonic_ns()}"
    room.mkdir()
    ranks = [SERVER.Process(target=_main, args=(body, rank, world_size, folder, room, values)) for rank in range(world_size)]
    for process in ranks:
        if server is None:
            process.start()
        else:
            server.start(process)
    end = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hung:
        ranks[rank].kill()
        ranks[rank].join()
    allowed = dict(may_die or {})
    wrong = [rank for rank, process in enumerate(ranks) if process.exitcode != allowed.get(rank, 0)]
    if hung or wrong:
        told = "\n".join(f"--- rank {r}, exit code {p.exitcode}\n{_read(room / f'{r}.error')}" for r, p in enumerate(ranks))
        raise AssertionError(f"ranks {hung} hung, ranks {wrong} ended badly\n{told}")
    return [json.loads(_read(room / f"{rank}.json") or "null") for rank in range(world_size)]


def wait_only_for(agreement: Agreement, dead: Collection[int], died: Path | None = None) -> None:
    """From now on the deadline of `agreement` on this rank holds for the ranks `dead` alone: those that live are waited for like all else.

    Who waits for a deadline wants a short one, and a machine may stand still for longer than that, with any of the others. Nor has it
    begun before the file `died` is there, which `die` makes: for ranks that die in the midst of it, and may be late before that.
    """
    get = agreement._get

    def patiently(key: str, end: float) -> bytes | None:
        """Rank 0 says what ends in ``all``, and what it tells unasked; else the rank at the end of the key does."""
        last = key.rpartition("/")[2]
        speaker = int(last) if last.isdigit() and not key.startswith("told/") else 0
        if speaker not in dead:
            return get(key, end + 200.0)
        while died is not None and not died.exists() and not agreement._store.check([key]) and time.monotonic() < end + 200.0:
            time.sleep(0.01)
        return get(key, end)

    agreement._get = patiently  # type: ignore[method-assign]


def die(died: Path | None = None) -> None:
    """SIGKILL to this rank: no handler runs. `died`: a file that says so to the others."""
    if died is not None:
        died.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _main(body: Body, rank: int, world_size: int, folder: Path, room: Path, values: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    errors = open(room / f"{rank}.error", "w", buffering=1)  # noqa: SIM115 - lives as long as the process
    os.dup2(errors.fileno(), 2)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{room}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
        )
        dist.barrier()  # a rank that ends at once would close the connections that another one is still making
        result = body(rank, world_size, folder, **values)
        (room / f"{rank}.json").write_text(json.dumps(result))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - boundary of the process: told in the test's own failure
        traceback.print_exc(file=errors)
        errors.flush()
        os._exit(1)  # another rank may wait for this one: it is to see the connection close, not an orderly end that waits itself
    sys.stdout.flush()
