"""Every interleaving of a few actors: each works on one storage in memory, and asks for its turn before every operation on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import ConflictError, NotFoundError
from tierstore.storage.contract import Capabilities, FileInfo

Actor = Callable[["Shared"], Coroutine[Any, Any, Any]]


@dataclass(kw_only=True)
class Shared:
    """Files in memory, with the operations that a log needs. `turn` is awaited before each operation that `stops` names."""

    files: dict[str, bytes] = field(default_factory=dict)
    turn: Callable[[], Coroutine[Any, Any, None]] | None = None
    stops: tuple[str, ...] = ("list", "create", "delete")
    uri: str = "memory:"
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(create=True, checksums=False, part_nbytes=1 << 20, local=False))

    async def _ask(self, operation: str) -> None:
        if self.turn is not None and operation in self.stops:
            await self.turn()

    async def list(self, folder: str = "") -> list[FileInfo]:
        await self._ask("list")
        return [FileInfo(path=p, nbytes=len(d)) for p, d in sorted(self.files.items()) if p.startswith(f"{folder}/")]

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        await self._ask("read")
        if path not in self.files:
            raise NotFoundError(f"no {path}")
        return self.files[path]

    async def create(self, path: str, data: bytes) -> None:
        await self._ask("create")
        if self.files.setdefault(path, data) != data:
            raise ConflictError(f"{path} exists", existing=self.files[path])

    async def delete(self, paths: Sequence[str]) -> None:
        await self._ask("delete")
        for path in paths:
            self.files.pop(path, None)


def interleavings(files: dict[str, bytes], *actors: tuple[Actor, str]) -> Iterator[tuple[Shared, list[Any]]]:
    """Runs the actors once for every order of their operations; yields the storage and each actor's result or exception.

    Beside each actor stand the operations before which it hands over.
    """
    ahead: list[list[int]] = [[]]
    loop = asyncio.new_event_loop()
    try:
        while ahead:
            prefix = ahead.pop()
            shared, results, choices = loop.run_until_complete(_play(files, actors, prefix))
            for depth in range(len(prefix), len(choices)):
                chosen, able = choices[depth]
                ahead += [[*(c for c, _ in choices[:depth]), other] for other in able if other != chosen]
            yield shared, results
    finally:
        loop.close()


async def _play(
    files: dict[str, bytes], actors: Sequence[tuple[Actor, str]], prefix: Sequence[int]
) -> tuple[Shared, list[Any], list[tuple[int, list[int]]]]:
    """One order: the choices of `prefix`, then always the first actor that waits for its turn."""
    truth = dict(files)
    waiting: dict[int, list[asyncio.Future[None]]] = {}
    moved = asyncio.Event()

    def turn_of(number: int) -> Callable[[], Coroutine[Any, Any, None]]:
        async def turn() -> None:
            mine = asyncio.get_running_loop().create_future()
            waiting.setdefault(number, []).append(mine)
            moved.set()
            await mine

        return turn

    tasks = []
    for number, (actor, stops) in enumerate(actors):
        task = asyncio.ensure_future(actor(Shared(files=truth, turn=turn_of(number), stops=tuple(stops.split()))))
        task.add_done_callback(lambda _: moved.set())
        tasks.append(task)
    choices: list[tuple[int, list[int]]] = []
    while not all(task.done() for task in tasks):
        able = sorted(waiting)
        if len(able) < sum(not task.done() for task in tasks):  # somebody still works towards its next operation
            moved.clear()
            await moved.wait()
            continue
        chosen = prefix[len(choices)] if len(choices) < len(prefix) else able[0]
        choices.append((chosen, able))
        waiting[chosen].pop(0).set_result(None)
        if not waiting[chosen]:
            del waiting[chosen]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return Shared(files=truth), results, choices
