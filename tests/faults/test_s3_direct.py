"""Ranges that are read beside s3fs (``client: direct``): exact, retried, cancelled and refused as the contract says, signed once."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from s3_kit import use

from tierstore.errors import AccessError, ConfigError, DeadlineError, IntegrityError, NotFoundError, TemporaryError
from tierstore.storage._http_range import RangeRead
from tierstore.storage._threads import DaemonPool
from tierstore.storage.s3 import S3Storage
from tierstore.storage.s3_direct import DirectReads
from tierstore.testing.proxy import CuttingProxy, Rule
from tierstore.testing.servers import S3Server
from tierstore.testing.sources import pattern

pytestmark = pytest.mark.s3

T = TypeVar("T")
MIB = 1 << 20
DATA = pattern(6 * MIB + 77)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as one:
        yield one


@pytest.fixture
def options(proxy: CuttingProxy, s3_options: dict[str, Any]) -> dict[str, Any]:
    return {**s3_options, "endpoint_url": proxy.endpoint_url, "client": "direct"}


@pytest.fixture(autouse=True)
def _stored(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    use(s3_bucket, s3_options, lambda storage: storage.put("file", DATA))


class Counted:
    """How often a storage's client and its direct reads were asked for a range."""

    def __init__(self, storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signed = self.direct = self.by_client = 0
        direct = storage._direct
        assert direct is not None
        here, run = direct._here(), direct.run
        sign = here._sign

        async def counted_sign(key: str) -> Any:
            self.signed += 1
            self.by_client -= 1  # it is asked, but sends nothing
            return await sign(key)

        async def counted_run(key: str, read: Any) -> bool:
            self.direct += 1
            return await run(key, read)

        fs = storage._requests.client().fs
        call = fs._call_s3

        async def counted_call(method: str, *rest: Any, **arguments: Any) -> Any:
            self.by_client += method == "get_object"
            return await call(method, *rest, **arguments)

        monkeypatch.setattr(here, "_sign", counted_sign)
        monkeypatch.setattr(direct, "run", counted_run)
        monkeypatch.setattr(fs, "_call_s3", counted_call)


def test_ranges_of_one_object_are_signed_once_and_each_is_one_request(
    proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(storage: S3Storage) -> None:
        counted = Counted(storage, monkeypatch)
        memory = memoryview(bytearray(len(DATA)))
        await storage.read_into("file", 0, memory[:MIB])  # the first short one is the client's
        await asyncio.gather(*(storage.read_into("file", at, memory[at : at + MIB]) for at in range(MIB, len(DATA) - MIB, MIB)))
        await storage.read_into("file", 6 * MIB, memory[6 * MIB :])  # short: the client's
        assert memory == DATA
        assert (counted.signed, counted.direct, counted.by_client) == (1, 5, 2)

    use(s3_bucket, options, body)
    assert proxy.count("GET", "/file") == 7
    assert proxy.body_nbytes == len(DATA)


def test_connections_are_used_again(proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str) -> None:
    async def body(storage: S3Storage) -> None:
        for _ in range(4):
            assert await storage.read("file", 5, 5 * MIB) == DATA[5 : 5 + 5 * MIB]
        assert storage._direct is not None
        assert len(proxy._connections) <= 2  # the proxy has a task for each

    use(s3_bucket, options, body)


def test_a_broken_read_goes_on_where_it_stopped(proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str) -> None:
    proxy.add(Rule(method="GET", path="/file", action="cut-body", nbytes=2 * MIB, times=2))
    seen: list[tuple[int, bytes]] = []

    async def body(storage: S3Storage) -> None:
        memory = memoryview(bytearray(len(DATA)))
        await storage.read_proved("file", 0, memory, lambda at, piece: seen.append((at, bytes(piece))))
        assert memory == DATA

    use(s3_bucket, options, body)
    assert proxy.body_nbytes < len(DATA) + MIB
    assert b"".join(piece for _, piece in seen) == DATA  # each byte once, in whole units
    assert all(at % MIB == 0 and (len(piece) % MIB == 0 or at + len(piece) == len(DATA)) for at, piece in seen)


def test_what_the_proof_raises_ends_the_read_and_passes(options: dict[str, Any], s3_bucket: str, proxy: CuttingProxy) -> None:
    def refuse(at: int, piece: memoryview) -> None:
        raise ValueError("not these bytes")

    async def body(storage: S3Storage) -> None:
        with pytest.raises(ValueError, match="not these bytes"):
            await storage.read_proved("file", 0, memoryview(bytearray(len(DATA))), refuse)

    use(s3_bucket, options, body)
    assert proxy.count("GET", "/file") == 1  # it is no failure of the transfer


@pytest.mark.parametrize("client", ["direct", "s3fs"])
def test_proofs_see_every_byte_once_whoever_reads(s3_bucket: str, s3_options: dict[str, Any], client: str) -> None:
    seen: list[tuple[int, bytes]] = []

    async def body(storage: S3Storage) -> None:
        memory = memoryview(bytearray(5 * MIB + 3))
        await storage.read_proved("file", MIB, memory, lambda at, piece: seen.append((at, bytes(piece))), unit=2 * MIB)

    use(s3_bucket, {**s3_options, "client": client}, body)
    assert b"".join(piece for _, piece in sorted(seen)) == DATA[MIB : 6 * MIB + 3]
    assert all((at - MIB) % (2 * MIB) == 0 for at, _ in seen)


def test_a_cancelled_read_writes_no_more(
    proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[RangeRead] = []
    run = DirectReads.run

    async def noted(self: DirectReads, key: str, read: RangeRead) -> bool:
        reads.append(read)
        return await run(self, key, read)

    monkeypatch.setattr(DirectReads, "run", noted)
    held = proxy.add(Rule(method="GET", path="/file", action="hold"))

    async def body(storage: S3Storage) -> None:
        memory = memoryview(bytearray(5 * MIB))
        task = asyncio.ensure_future(storage.read_into("file", 0, memory))
        assert await asyncio.to_thread(held.reached.wait, 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 120)
        held.release()
        assert reads[0]._socket is None  # its thread has let go of the connection, and was waited for
        assert await storage.read("file", 0, 5 * MIB) == DATA[: 5 * MIB]
        assert bytes(memory) == bytes(5 * MIB)

    use(s3_bucket, options, body)


def test_a_server_that_falls_silent_ends_in_a_deadline(proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str) -> None:
    proxy.add(Rule(method="GET", path="/file", action="stall", times=99))

    async def body(storage: S3Storage) -> None:
        with pytest.raises(DeadlineError, match="file"):
            await storage.read("file", 0, 5 * MIB)

    use(s3_bucket, options, body, stall_timeout_s=0.2, attempts=1)


def test_refusals_are_the_clients_to_tell(proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str) -> None:
    async def body(storage: S3Storage) -> None:
        with pytest.raises(NotFoundError, match="no such object"):
            await storage.read("missing", 0, 5 * MIB)
        for offset, nbytes in ((3 * MIB, 5 * MIB), (20 * MIB, 5 * MIB)):
            with pytest.raises(IntegrityError, match=rf"has {len(DATA)} bytes"):
                await storage.read("file", offset, nbytes)
        proxy.add(Rule(method="GET", path="/file", action="answer", times=2))
        assert await storage.read("file", 0, 5 * MIB) == DATA[: 5 * MIB]  # 503 is waited out

    use(s3_bucket, options, body)


def test_a_server_that_takes_no_such_request_is_left_to_the_client(proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str) -> None:
    """Who refuses three in a row what the client may do is not asked this way again for a while."""
    denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"

    async def body(storage: S3Storage) -> None:
        for number in range(5):
            proxy.clear()
            if number < 3:
                proxy.add(Rule(method="GET", path="/file", action="answer", status="403 Forbidden", body=denied))
            assert await storage.read("file", 0, 5 * MIB) == DATA[: 5 * MIB]
            assert proxy.count("GET", "/file") == (2 if number < 3 else 1)

    use(s3_bucket, options, body)


def test_wrong_credentials_are_an_access_error(options: dict[str, Any], s3_bucket: str) -> None:
    async def body(storage: S3Storage) -> None:
        with pytest.raises(AccessError):
            await storage.read("file", 0, 5 * MIB)

    use(s3_bucket, {**options, "secret": "wrong"}, body)


def test_keys_of_the_environment_and_odd_names_are_signed_by_the_client(
    options: dict[str, Any], s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("key"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.pop("secret"))
    odd = "ünï cödé+a=b&c,d@e%41"

    async def body(storage: S3Storage) -> None:
        await storage.put(odd, DATA)
        counted = Counted(storage, monkeypatch)
        assert await storage.read(odd, 1, 5 * MIB) == DATA[1 : 1 + 5 * MIB]
        assert (counted.direct, counted.by_client) == (1, 0)

    use(s3_bucket, options, body)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy"])
def test_where_the_client_goes_through_a_proxy_it_reads_itself(
    options: dict[str, Any], s3_bucket: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    async def body(storage: S3Storage) -> None:
        assert storage._direct is not None
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
        assert await storage._direct._here().sign(storage._key("file")) is None

    use(s3_bucket, options, body)


def test_a_forked_child_has_connections_and_threads_of_its_own(options: dict[str, Any], s3_bucket: str) -> None:
    storage = S3Storage(s3_bucket, options)

    async def read(offset: int, *, last: bool) -> bool:
        data = await storage.read("file", offset, 5 * MIB)
        if last:
            await storage.close()
        return data == DATA[offset : offset + 5 * MIB]

    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(read(0, last=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: that is what is tested
            pid = os.fork()
        if pid == 0:
            right = False
            try:
                asyncio.set_event_loop(None)
                child = asyncio.new_event_loop()
                right = child.run_until_complete(read(3, last=True))
            finally:
                os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert loop.run_until_complete(read(7, last=True))
    finally:
        loop.close()


def test_another_value_is_refused(s3_bucket: str) -> None:
    with pytest.raises(ConfigError, match="'client' of an S3 tier is none of s3fs, direct"):
        S3Storage(s3_bucket, {"client": "curl"})


def test_without_the_option_nothing_is_read_beside_the_client(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    assert S3Storage(s3_bucket, s3_options)._direct is None


def test_an_endpoint_that_is_down_is_the_clients_to_tell(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    async def body(storage: S3Storage) -> None:
        with pytest.raises(TemporaryError, match="does not answer"):
            await storage.read("file", 0, 5 * MIB)

    use(s3_bucket, {**s3_options, "endpoint_url": "http://127.0.0.1:9", "client": "direct"}, body, attempts=1)


def test_a_read_that_is_cancelled_twice_still_waits_for_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    class Read:
        def run(self) -> bool:
            began.set()
            go.wait(120)
            ended.set()
            return True

        def abort(self) -> None:
            """It is deaf for a while, as a thread in a system call is."""

    async def main() -> None:
        reads = DirectReads.__new__(DirectReads)
        pool = DaemonPool(1, "test")
        monkeypatch.setattr(reads, "_here", lambda: SimpleNamespace(pool=pool))
        task = asyncio.ensure_future(reads.run("key", Read()))  # type: ignore[arg-type]
        assert await asyncio.to_thread(began.wait, 120)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        pool.shutdown()

    asyncio.run(main())
