"""S3 storage when things go wrong: each ends in a result or a typed error, with nothing published that should not be, and nothing left."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fork_kit import run_forked
from s3_kit import use

from tierstore.errors import (
    AccessError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    OutcomeUnknownError,
    TemporaryError,
    TierStoreError,
)
from tierstore.storage.s3 import S3Storage
from tierstore.testing.proxy import CuttingProxy, Rule
from tierstore.testing.servers import S3Server, SeaweedServer
from tierstore.testing.sources import GatedSource, PatternSource, pattern

pytestmark = pytest.mark.s3

T = TypeVar("T")
MIB = 1 << 20
CANARY = "canary-secret-7f3a9"


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as one:
        yield one


@pytest.fixture
def through(proxy: CuttingProxy, s3_bucket: str, s3_options: dict[str, Any]) -> dict[str, Any]:
    """The options that reach the server through the proxy."""
    return {**s3_options, "endpoint_url": proxy.endpoint_url}


def unfinished(uri: str, options: dict[str, Any]) -> list[str]:
    """The keys of unfinished multipart uploads below `uri`, asked of the server itself."""

    async def body(storage: S3Storage) -> list[str]:
        answer = await storage._requests.send("listing", "", "list_multipart_uploads", Prefix=storage._root)
        return [upload["Key"] for upload in answer.get("Uploads") or ()]

    return use(uri, options, body)


# Create-if-absent


def test_the_lost_answer_of_a_create_is_a_success(proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str) -> None:
    proxy.add(Rule(method="PUT", path="000000", action="cut-after"))

    async def body(storage: S3Storage) -> None:
        await storage.create("log/000000.json", b"mine")
        assert await storage.read("log/000000.json") == b"mine"

    use(s3_bucket, through, body)
    assert proxy.count("GET", "000000") >= 1


def test_a_create_whose_connection_is_cut_before_the_server_hears_of_it_is_tried_again(
    proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str
) -> None:
    proxy.add(Rule(method="PUT", path="000000", action="cut-before", times=3))

    async def body(storage: S3Storage) -> None:
        await storage.create("log/000000.json", b"mine")
        assert await storage.read("log/000000.json") == b"mine"

    use(s3_bucket, through, body)


def test_a_create_that_lost_with_its_answer_lost_too_names_the_winner(
    proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    use(s3_bucket, s3_options, lambda storage: storage.create("log/000000.json", b"theirs"))
    proxy.add(Rule(method="PUT", path="000000", action="cut-after"))

    async def body(storage: S3Storage) -> None:
        with pytest.raises(ConflictError) as caught:
            await storage.create("log/000000.json", b"mine")
        assert caught.value.context["existing"] == b"theirs"

    use(s3_bucket, through, body)


def test_an_outcome_that_cannot_be_read_back_is_called_unknown(proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str) -> None:
    proxy.add(Rule(method="PUT", path="000000", action="cut-after", times=99))
    proxy.add(Rule(method="GET", path="000000", action="cut-before", times=99))

    async def body(storage: S3Storage) -> None:
        with pytest.raises(OutcomeUnknownError, match=r"000000\.json"):
            await storage.create("log/000000.json", b"mine")

    use(s3_bucket, through, body)


@pytest.mark.parametrize("status", ["409 Conflict", "500 Internal Server Error"])
def test_an_unclear_refusal_of_a_create_is_read_back_and_tried_again(
    proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str, status: str
) -> None:
    code = {"409": "ConditionalRequestConflict", "500": "UnknownError"}[status[:3]]
    answer = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>?</Message></Error>".encode()
    proxy.add(Rule(method="PUT", path="000000", action="answer", status=status, body=answer, times=2))

    async def body(storage: S3Storage) -> None:
        await storage.create("log/000000.json", b"mine")
        assert await storage.read("log/000000.json") == b"mine"

    use(s3_bucket, through, body)


def test_of_eight_clients_that_race_for_a_record_one_wins(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    async def main() -> None:
        clients = [S3Storage(s3_bucket, s3_options) for _ in range(8)]
        mine = [f"client {number}".encode() for number in range(8)]
        ends = await asyncio.gather(*(c.create("log/record", data) for c, data in zip(clients, mine, strict=True)), return_exceptions=True)
        stored = await clients[0].read("log/record")
        assert [data for data, end in zip(mine, ends, strict=True) if end is None] == [stored]
        assert all(isinstance(end, ConflictError) and end.context["existing"] == stored for end in ends if end is not None)
        for client in clients:
            await client.close()

    asyncio.run(main())


# Uploads


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", r"\?uploads"), ("PUT", "partNumber=2"), ("POST", r"uploadId="), ("HEAD", "big")],
    ids=["begin", "part", "end", "check"],
)
@pytest.mark.parametrize("action", ["cut-before", "cut-after", "answer"])
def test_an_upload_outlives_a_failure_of_any_of_its_requests(
    proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str, s3_options: dict[str, Any], method: str, path: str, action: Any
) -> None:
    rule = proxy.add(Rule(method=method, path=path, action=action, times=2))
    data = pattern(20 * MIB + 3)

    async def body(storage: S3Storage) -> None:
        info = await storage.write("big", PatternSource(data))
        assert info.nbytes == len(data)
        assert info.checksum.startswith("crc32")
        assert info.etag
        same = await storage.read("big") == data
        assert same

    use(s3_bucket, through, body)
    assert rule.matched >= 1
    if (path, action) != (r"\?uploads", "cut-after"):  # an upload whose making was never answered is the sweep's
        assert unfinished(s3_bucket, s3_options) == []


def test_an_upload_that_fails_for_good_leaves_nothing(
    proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    proxy.add(Rule(method="PUT", path="partNumber=2", action="answer", status="403 Forbidden", body=denied, times=99))

    async def body(storage: S3Storage) -> None:
        with pytest.raises(AccessError, match="big"):
            await storage.write("big", PatternSource(pattern(20 * MIB)))
        assert await storage.list() == []

    use(s3_bucket, through, body)
    assert unfinished(s3_bucket, s3_options) == []


def test_a_cancelled_upload_leaves_no_orphan(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    async def body(storage: S3Storage) -> None:
        source = GatedSource(pattern(40 * MIB), at=35 * MIB)
        writing = asyncio.ensure_future(storage.write("big", source))
        await source.reached.wait()
        assert len((await storage._requests.send("x", "", "list_multipart_uploads", Prefix=storage._root))["Uploads"]) == 1
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await storage.list() == []

    use(s3_bucket, s3_options, body)
    assert unfinished(s3_bucket, s3_options) == []


def test_an_upload_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    data = pattern(40 * MIB)
    with SeaweedServer(tmp_path / "seaweed") as server:
        server.make_bucket("restarted")

        async def body(storage: S3Storage) -> None:
            source = GatedSource(data, at=35 * MIB)
            writing = asyncio.ensure_future(storage.write("run/big", source))
            await source.reached.wait()
            await asyncio.to_thread(server.crash)
            source.gate.set()
            await asyncio.to_thread(server.start)
            (end,) = await asyncio.gather(writing, return_exceptions=True)
            if isinstance(end, BaseException):  # failed cleanly: nothing is there, and the caller tries again
                assert isinstance(end, TemporaryError | DeadlineError | NotFoundError), repr(end)
                assert await storage.list() == []
                await storage.abort_stale_uploads(-1)  # whose end the server, down as it was, could not be told
                await storage.write("run/big", PatternSource(data))
            same = await storage.read("run/big") == data
            assert same
            assert [info.path for info in await storage.list()] == ["run/big"]

        use("s3://restarted/tier", server.options(), body, attempts=6)
        assert unfinished("s3://restarted/tier", server.options()) == []


def test_a_server_that_stays_down_in_mid_upload_is_reported_and_a_later_sweep_cleans_up(tmp_path: Path) -> None:
    with SeaweedServer(tmp_path / "seaweed") as server:
        server.make_bucket("down")

        async def fails(storage: S3Storage) -> None:
            source = GatedSource(pattern(40 * MIB), at=35 * MIB)
            writing = asyncio.ensure_future(storage.write("big", source))
            await source.reached.wait()
            await asyncio.to_thread(server.crash)
            source.gate.set()
            with pytest.raises(TemporaryError, match=r"does not answer|broke"):
                await writing

        use("s3://down/tier", server.options(), fails, attempts=1)
        server.start()

        async def later(storage: S3Storage) -> None:
            assert await storage.list() == []
            assert await storage.abort_stale_uploads(3600) == []
            assert await storage.abort_stale_uploads(-1) == ["big"]
            await storage.write("big", PatternSource(pattern(20 * MIB)))

        use("s3://down/tier", server.options(), later)
        assert unfinished("s3://down/tier", server.options()) == []


def test_the_sweep_of_stale_uploads_stays_below_its_prefix(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    async def begin(storage: S3Storage) -> None:
        await storage._requests.send("x", "k", "create_multipart_upload", Key=storage._root + "theirs")

    async def sweep(storage: S3Storage) -> list[str]:
        return await storage.abort_stale_uploads(-1)

    use(s3_bucket + "-other", s3_options, begin)
    assert use(s3_bucket, s3_options, sweep) == []
    assert use(s3_bucket + "-other", s3_options, sweep) == ["theirs"]


@pytest.mark.parametrize("point", ["s3.before-complete", "s3.after-complete"])
@pytest.mark.parametrize("nbytes", [1000, 20 * MIB])
def test_a_process_killed_around_completion_leaves_all_or_nothing(
    s3_bucket: str, s3_options: dict[str, Any], tmp_path: Path, point: str, nbytes: int
) -> None:
    program = (
        "import asyncio, pickle, sys\nfrom pathlib import Path\n"
        "from tierstore.testing.sources import PatternSource, pattern\n"
        "storage, nbytes = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "asyncio.run(storage.write('file', PatternSource(pattern(nbytes))))\n"
    )
    (tmp_path / "plan").write_bytes(pickle.dumps((S3Storage(s3_bucket, s3_options), nbytes)))
    ended = run_forked(program, str(tmp_path / "plan"), env={"TIERSTORE_CRASH_AT": point})
    assert ended.returncode == 86, ended.stderr

    async def body(storage: S3Storage) -> list[bytes]:
        found = [await storage.read(info.path) for info in await storage.list()]
        await storage.abort_stale_uploads(-1)
        return found

    whole = use(s3_bucket, s3_options, body) == ([pattern(nbytes)] if point == "s3.after-complete" else [])
    assert whole
    assert unfinished(s3_bucket, s3_options) == []


# Reads


def test_a_broken_read_goes_on_where_it_stopped(proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str) -> None:
    data = pattern(6 * MIB)

    async def body(storage: S3Storage) -> None:
        await storage.put("file", data)
        proxy.clear()
        proxy.add(Rule(method="GET", path="file", action="cut-body", nbytes=2 * MIB, times=2))
        same = await storage.read("file", 7, 6 * MIB - 7) == data[7:]
        assert same

    use(s3_bucket, through, body)
    assert proxy.count("GET", "file") == 3
    assert proxy.body_nbytes < 6 * MIB  # the rest only: what had arrived was not fetched again


def test_a_stalled_server_ends_in_a_deadline_that_names_the_object(proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str) -> None:
    proxy.add(Rule(path="file", action="stall", times=99))
    name = s3_bucket + "/a/file"

    async def body(storage: S3Storage) -> None:
        for call in (
            storage.read("a/file"),
            storage.stat("a/file"),
            storage.put("a/file", b"x"),
            storage.write("a/file", PatternSource(b"y")),
        ):
            with pytest.raises(DeadlineError) as caught:
                await call
            assert name in str(caught.value)

    use(s3_bucket, through, body, request_timeout_s=0.4, stall_timeout_s=0.4, attempts=1)


def test_a_stall_in_mid_upload_is_noticed_and_the_upload_aborted(
    proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.add(Rule(method="PUT", path="partNumber=3", action="stall", times=99))

    async def body(storage: S3Storage) -> None:
        patient = storage._requests.watched

        def watched(doing: str, key: str, call: Any, seconds: float, *rest: Any) -> Any:
            return patient(doing, key, call, seconds / 300 if "part 3" in doing else seconds, *rest)  # the others take what they need

        monkeypatch.setattr(storage._requests, "watched", watched)
        with pytest.raises(DeadlineError, match="part 3 of 3"):
            await storage.write("big", PatternSource(pattern(20 * MIB)))

    use(s3_bucket, through, body, stall_timeout_s=60, attempts=1)
    assert unfinished(s3_bucket, s3_options) == []


# Throttling


def test_throttling_is_waited_out(proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str) -> None:
    proxy.add(Rule(action="answer", times=2))

    async def body(storage: S3Storage) -> None:
        await storage.put("file", b"x")
        assert await storage.read("file") == b"x"

    use(s3_bucket, through, body)


def test_throttling_that_stays_is_a_temporary_error(proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str) -> None:
    proxy.add(Rule(action="answer", times=999))

    async def body(storage: S3Storage) -> None:
        for call in (
            storage.read("file"),
            storage.put("file", b"x"),
            storage.create("file", b"x"),
            storage.list(),
            storage.delete(["file"]),
        ):
            with pytest.raises(TemporaryError, match="slow down"):
                await call

    use(s3_bucket, through, body, attempts=1)


# Wrong configuration


def test_a_missing_bucket_is_named_with_its_remedy(s3_options: dict[str, Any]) -> None:
    async def body(storage: S3Storage) -> None:
        calls = (
            storage.read("file"),
            storage.put("file", b"x"),
            storage.create("file", b"x"),
            storage.list(),
            storage.children(),
            storage.stat("file"),
            storage.write("file", PatternSource(pattern(9 * MIB))),
        )
        for call in calls:
            with pytest.raises(NotFoundError, match="no-such-bucket") as caught:
                await call
            assert "aws s3 mb s3://no-such-bucket" in caught.value.hint

    use("s3://no-such-bucket/tier", s3_options, body)


@pytest.mark.parametrize("wrong", [{"secret": CANARY}, {"key": "wrong-key-id"}], ids=["secret", "key"])
def test_wrong_credentials_are_an_access_error_that_names_the_key_only(
    s3_bucket: str, s3_options: dict[str, Any], wrong: dict[str, str]
) -> None:
    options = {**s3_options, **wrong}

    async def body(storage: S3Storage) -> None:
        for call in (storage.read("file"), storage.put("file", b"x"), storage.create("file", b"x"), storage.list(), storage.stat("file")):
            with pytest.raises(AccessError) as caught:
                await call
            assert options["key"] in str(caught.value)
            assert options["secret"] not in str(caught.value)

    use(s3_bucket, options, body)


def test_an_endpoint_that_is_down_is_named(tmp_path: Path, s3_options: dict[str, Any]) -> None:
    endpoint = "http://127.0.0.1:9"  # nobody listens there, as on no port that was just free
    options = {**s3_options, "endpoint_url": endpoint}

    async def body(storage: S3Storage) -> None:
        for call in (storage.read("file"), storage.put("file", b"x"), storage.create("file", b"x"), storage.list()):
            with pytest.raises(TemporaryError, match="does not answer") as caught:
                await call
            assert endpoint in str(caught.value)

    use("s3://bucket/tier", options, body, attempts=2)


def test_a_skewed_clock_is_named_with_its_skew(proxy: CuttingProxy, through: dict[str, Any], s3_bucket: str) -> None:
    skewed = b"<?xml version='1.0'?><Error><Code>RequestTimeTooSkewed</Code><Message>?</Message></Error>"
    there = (datetime.now(timezone.utc) + timedelta(hours=1)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    proxy.add(Rule(action="answer", status="403 Forbidden", body=skewed, headers=f"Date: {there}\r\n"))

    async def body(storage: S3Storage) -> None:
        with pytest.raises(AccessError, match=r"clock, which is 3[56]\d\d s behind") as caught:
            await storage.read("file")
        assert "NTP" in caught.value.hint

    use(s3_bucket, through, body)


# Credentials


def test_no_error_log_or_repr_shows_a_secret(
    proxy: CuttingProxy, s3_bucket: str, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Every failing answer, cut and stall, with a canary for a secret and a token; debug logs of tierstore and s3fs included."""
    options = {**s3_options, "endpoint_url": proxy.endpoint_url, "secret": CANARY, "token": CANARY + "-token"}
    for name in ("tierstore", "s3fs", "fsspec", "asyncio", "aiobotocore", "botocore.credentials", "botocore.parsers"):
        caplog.set_level(logging.DEBUG, logger=name)
    codes = ("AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "NoSuchBucket", "NoSuchKey", "SlowDown", "InternalError")
    rules = [
        Rule(action="answer", status=status, body=f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode(), times=99)
        for code in (*codes, "RequestTimeTooSkewed", "Odd")
        for status in ("403 Forbidden", "503 Slow Down")
    ]
    actions: tuple[Any, ...] = ("cut-before", "cut-after", "stall")
    rules += [Rule(action=action, times=99) for action in actions]
    seen: list[str] = []

    async def body(storage: S3Storage) -> None:
        seen.append(repr(storage) + storage.uri + str(storage.capabilities))
        for rule in rules:
            proxy.clear()
            proxy.add(rule)
            for call in (
                storage.read("f"),
                storage.put("f", b"x"),
                storage.create("f", b"x"),
                storage.list(),
                storage.delete(["f"]),
            ):
                with pytest.raises(TierStoreError) as caught:
                    await call
                error = caught.value
                seen.append("".join(traceback.format_exception(error)) + repr(error) + repr(error.context) + error.hint)

    use(s3_bucket, options, body, attempts=1, request_timeout_s=0.3, stall_timeout_s=0.3)
    assert len(seen) > 100
    assert not [text for text in seen if CANARY in text]
    assert CANARY not in caplog.text
