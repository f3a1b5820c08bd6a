"""What the tests of files share: a store on folders, opened as a process of one node would, and looks at what lies on its tiers."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from folder_kit import files_below
from fork_kit import run_forked

from tierstore.clock import Clock
from tierstore.config import Ack, load_config
from tierstore.errors import TierStoreError
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.files.files import Files
from tierstore.tiers.files.mover import MoverOptions
from tierstore.tiers.session import Session

BLOCK = 4096
FAST = MoverOptions(retry_first_s=0.01, retry_most_s=0.05, patience_s=5.0)
Wrap = Mapping[str, Callable[[Storage], Storage]]


def store(root: Path, *, node: str = "node", tiers: Sequence[str] = ("node", "shared", "far"), **more: Any) -> dict[str, Any]:
    """A configuration on folders of `root`; `node`: which node's own tier."""
    entries = [
        {"name": t, "uri": str(root / (node if t == "node" else t)), "scope": "node" if t == "node" else "shared", "durable": True}
        for t in tiers
    ]
    return {"tiers": entries, "durable_at": entries[-1]["name"], "io": {"block_size": "4KiB"}, **more}


@contextmanager
def opened(
    config: Mapping[str, Any] | Path,
    *,
    ack: Ack | None = None,
    wrap: Wrap | None = None,
    clock: Clock | None = None,
    durable: bool = False,
    options: MoverOptions = FAST,
    drain: float | None = 120.0,
) -> Iterator[tuple[Session, Files]]:
    """A process's files; `drain`: how long its end waits for the mover, in seconds, and how it complains; None: it ends at once."""

    def opener(tier: Any, config: Any) -> Storage:
        storage: Storage = PosixStorage(Path(tier.uri), durable=durable)
        return wrap[tier.name](storage) if wrap and tier.name in wrap else storage

    with Session.open(load_config(config), opener=opener, clock=clock) as session:
        files = Files(session, ack=ack, options=options)
        try:
            yield session, files
        except BaseException:
            with suppress(TierStoreError):
                session.run(files.close(0.0))
            raise
        if drain is None:
            with suppress(TierStoreError):
                session.run(files.close(0.0))
        else:
            session.run(files.close(drain))


def write(session: Session, files: Files, path: str, data: bytes, *, exclusive: bool = False) -> None:
    """As the file system writes: piece by piece into a spool, then published."""
    spool = files.spool()
    for begin in range(0, len(data), 5000):
        spool.write(data[begin : begin + 5000])
    session.run(files.publish(path, spool, exclusive=exclusive))


def content(session: Session, files: Files, path: str) -> bytes | None:
    """What a reader gets; None where it is told that there is no such file."""
    version = session.run(files.look_up(path))
    return None if version is None else session.run(files.read(version))


def until_pending_on(files: Files, tier: str, reason: str) -> None:
    """Until all that is pending is so on `tier`, and for this reason: the others have what they should have."""
    end = time.monotonic() + 120
    while {one.tier for one in files.pending()} != {tier} or any(reason not in one.reason for one in files.pending()[:1]):
        assert time.monotonic() < end, files.pending()
        time.sleep(0.01)


def stored(folder: Path, suffix: str = "") -> list[str]:
    """The files of a tier below ``.files`` by their paths, without versions: ``a/b.txt@.data``."""
    root = folder / ".files"
    names = [str(p.relative_to(root)) for p in files_below(root)]
    short = [re.sub(r"/\d{10,15}(-[0-9A-Z]{26})?(-\d+)?(\.\w+)$", r"\3", name) for name in names]
    return [name for name in short if name.endswith(suffix)]


def the_file(folder: Path, pattern: str) -> Path:
    (found,) = (folder / ".files").glob(pattern)
    return found


def bytes_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def child(script: str, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Runs Python code in a process of its own that knows this kit; returns its exit status and output."""
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]\n{script}"
    done = run_forked(code, *arguments, env=env, merged=True)
    return done.returncode, done.stdout
