"""Python processes that start in milliseconds: each is a fork of one server a test process, which has imported torch and tierstore.

A fresh Python that imports both costs two seconds of CPU, so only what is about importing or the interpreter's end starts one.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tierstore import crashpoints

SERVER = multiprocessing.get_context("forkserver")
"""Makes processes as `multiprocessing` does: ``SERVER.Process(target=function, args=…)``."""
SERVER.set_forkserver_preload(
    [
        "hypothesis",  # as pytest: a child imports the test's module, for the function that it is to run
        "pytest",
        "torch",
        "torch._dynamo",  # else imported at the first optimizer or DTensor, for 0.6 s of CPU in each process
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "tierstore.checkpointer",
        "tierstore.cli.look",
        "tierstore.cli.main",
        "tierstore.dcp",
        "tierstore.storage.s3",
        "tierstore.store",
        "tierstore.tiers.gc.collect",
    ]
)


class FrameworkServer:
    """A server beside `SERVER`, whose forks have imported a training framework too, which costs seconds and which few tests need.

    Python knows one fork server a process, and whoever names its imports last names them for all: so no test sets those of `SERVER`.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(preload))

    def start(self, process: BaseProcess) -> None:
        """Starts a `SERVER.Process` as a fork of this server."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forkserver, "connect_to_new_process", self._server.connect_to_new_process)
            process.start()


def run_forked(
    code: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 120.0,
    merged: bool = False,
) -> CompletedProcess[str]:
    """``python -c CODE ARGUMENTS``, but in a fork of the server; no handlers of `atexit` run at its end.

    Args:
        code: Python, run as ``__main__``.
        arguments: Its ``sys.argv[1:]``.
        env: Environment variables to set, also TIERSTORE_CRASH_AT; the others are those of the test now.
        cwd: Its working directory; None: that of the test now.
        timeout_s: Seconds after which it is killed and the test fails.
        merged: Standard error goes where standard output goes.

    Returns:
        Exit status (negative: the signal that ended it) and output, as of `subprocess.run`.

    Raises:
        AssertionError: It had not ended in time; with what it had printed.
    """
    with tempfile.TemporaryDirectory() as room:
        out, err = Path(room, "out"), Path(room, "out" if merged else "err")
        process = SERVER.Process(
            target=_run, args=(code, arguments, {**os.environ, **(env or {})}, str(cwd or Path.cwd()), str(out), str(err))
        )
        process.start()
        process.join(timeout_s)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        told = [path.read_text() if path.exists() else "" for path in (out, Path(room, "err"))]
        assert not late, f"a child had not ended after {timeout_s:.0f} s:\n{told[0]}\n{told[1]}"
        assert process.exitcode is not None
        return CompletedProcess(args=["python", "-c", code, *arguments], returncode=process.exitcode, stdout=told[0], stderr=told[1])


def end_of(target: Callable[..., None], *arguments: object) -> int | None:
    """The exit status of a process that is a fork of the server and calls ``target(*arguments)``; killed after 200 seconds."""
    child = SERVER.Process(target=target, args=arguments)
    child.start()
    child.join(200)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode


def set_out(environment: Mapping[str, str], errors: str) -> None:
    """First of all in a fork of the server: standard error goes to the file `errors`, and `environment` counts, TIERSTORE_CRASH_AT too."""
    fd = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    os.environ.update(environment)
    importlib.reload(crashpoints)  # it was imported before the environment named a point; `reach` sees what is read now


def run_tierstore(*arguments: str, env: Mapping[str, str] | None = None, merged: bool = False) -> CompletedProcess[str]:
    """``tierstore ARGUMENTS`` as a process of its own, by a fork of the server."""
    return run_forked("from tierstore.__main__ import main; main()", *arguments, env=env, merged=merged)


def _run(code: str, arguments: tuple[str, ...], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    importlib.reload(crashpoints)  # it was imported before the environment named a point; `reach` sees what is read now
    exec(compile(code, "<forked>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
