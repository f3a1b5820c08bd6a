"""Interrupted multipart uploads go on from their parts: what is missing is sent, nothing is trusted unseen, live ones are left alone."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_kit import run_forked
from s3_kit import FakeS3, fake_storage, refusal_of

from tierstore.errors import AccessError, IntegrityError, NotFoundError, TemporaryError
from tierstore.storage.s3 import S3Storage
from tierstore.storage.s3_checksums import SHA256
from tierstore.testing.proxy import CuttingProxy, Rule
from tierstore.testing.servers import S3Server
from tierstore.testing.sources import FailingSource, GatedSource, PatternSource, pattern

MIB = 1 << 20
KIB = 1 << 10
PART = 64 * KIB
PROGRAM = (
    "import asyncio, pickle, sys\nfrom pathlib import Path\n"
    "from tierstore.testing.sources import PatternSource, pattern\n"
    "storage, nbytes = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
    "asyncio.run(storage.write_on('file', PatternSource(pattern(nbytes))))\n"
)


# On servers: a process is killed, the next one goes on


@pytest.fixture(params=["real", "moto"])
def any_server(request: pytest.FixtureRequest) -> S3Server:
    server: S3Server = request.getfixturevalue("s3_server" if request.param == "real" else "moto_server")
    return server


@pytest.mark.s3
@pytest.mark.parametrize("arrives", [False, True], ids=["lost", "unanswered"])
def test_a_killed_process_leaves_parts_and_the_next_one_sends_only_the_missing_ones(
    any_server: S3Server, tmp_path: Path, arrives: bool
) -> None:
    """One part is on its way when the process dies: its server never hears of it, or has taken it in and could not say so."""
    uri, nbytes, parts = f"s3://{any_server.make_bucket('resumed')}/{tmp_path.name}", 30 * MIB + 17, 7
    with CuttingProxy(any_server.endpoint_url) as proxy:
        one = proxy.add(Rule(method="PUT", path="partNumber=", action="silence" if arrives else "stall"))
        others = proxy.add(Rule(method="PUT", path="partNumber=", action="hold", times=10**9))
        killed = S3Storage(uri, {**any_server.options(), "endpoint_url": proxy.endpoint_url}, part_nbytes=5 * MIB, concurrency=2)
        (tmp_path / "plan").write_bytes(pickle.dumps((killed, nbytes)))
        waiting = threading.Thread(target=lambda: ((one.silenced if arrives else one.reached).wait(100), others.release()))
        waiting.start()
        ended = run_forked(PROGRAM, str(tmp_path / "plan"), env={"TIERSTORE_CRASH_AT": "s3.after-part:3"})
        waiting.join()
    assert ended.returncode == 86, ended.stderr

    with CuttingProxy(any_server.endpoint_url) as proxy:
        options = {**any_server.options(), "endpoint_url": proxy.endpoint_url}
        storage = S3Storage(uri, options, part_nbytes=5 * MIB, concurrency=2)

        async def body() -> None:
            (upload,) = (await storage._requests.send("x", "", "list_multipart_uploads", Prefix=storage._root))["Uploads"]
            there = await storage._requests.send("x", "", "list_parts", Key=upload["Key"], UploadId=upload["UploadId"])
            held = len(there["Parts"])
            assert held == 3 + arrives
            proxy.clear()
            info = await storage.write_on("file", PatternSource(pattern(nbytes)))
            assert proxy.count("PUT", "partNumber=") == parts - held
            assert proxy.count("POST", "uploads") == 0  # no new one was begun
            assert info.nbytes == nbytes
            assert info.checksum.startswith("crc32")
            same = await storage.read("file") == pattern(nbytes)
            assert same
            left = await storage._requests.send("x", "", "list_multipart_uploads", Prefix=storage._root)
            assert not left.get("Uploads")
            await storage.close()

        asyncio.run(body())


@pytest.mark.s3
def test_two_processes_that_go_on_with_the_same_upload_both_end_well(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    data = pattern(25 * MIB + 5)

    async def main() -> None:
        first, second = (S3Storage(s3_bucket, s3_options, part_nbytes=5 * MIB, concurrency=2, attempts=3) for _ in range(2))
        gated = GatedSource(data, at=12 * MIB)
        begun = asyncio.ensure_future(first.write_on("file", gated))
        await gated.reached.wait()
        begun.cancel()
        await asyncio.wait([begun])
        infos = await asyncio.gather(*(one.write_on("file", PatternSource(data)) for one in (first, second)))
        assert {info.nbytes for info in infos} == {len(data)}
        # SeaweedFS shows an upload again of which a part arrives after its completion: the sweep's, and no loss to the object.
        assert set(await first.abort_stale_uploads(-1)) <= {"file"}
        same = await first.read("file") == data
        assert same
        await asyncio.gather(first.close(), second.close())

    asyncio.run(main())


@pytest.mark.s3
def test_the_lost_answer_of_a_resumed_completion_is_proved_by_what_is_there(
    s3_server: S3Server, s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    data = pattern(15 * MIB + 5)
    with CuttingProxy(s3_server.endpoint_url) as proxy:

        async def main() -> None:
            storage = S3Storage(
                s3_bucket, {**s3_options, "endpoint_url": proxy.endpoint_url}, part_nbytes=5 * MIB, concurrency=2, attempts=3
            )
            gated = GatedSource(data, at=12 * MIB)
            begun = asyncio.ensure_future(storage.write_on("file", gated))
            await gated.reached.wait()
            begun.cancel()
            await asyncio.wait([begun])
            rule = proxy.add(Rule(method="POST", path="uploadId=", action="cut-after", times=1))
            proxy.requests.clear()
            info = await storage.write_on("file", PatternSource(data))
            assert rule.matched == 1
            assert proxy.count("POST", "uploadId=") == 1  # asked once: the object proved itself
            assert info.nbytes == len(data)
            await storage.close()

        asyncio.run(main())


# Without sockets: what is trusted, chosen, left and ended


def interrupted(server: FakeS3, storage: S3Storage, data: bytes, *, parts: int) -> str:
    """An upload of which the server holds the first `parts` parts; its id."""
    before = set(server.uploads)

    async def body() -> None:
        gated = GatedSource(data, at=parts * PART)
        begun = asyncio.ensure_future(storage.write_on("file", gated))
        await gated.reached.wait()
        for _ in range(10_000):
            if any(set(range(1, parts + 1)) <= set(server.uploads[one].parts) for one in set(server.uploads) - before):
                break
            await asyncio.sleep(0.001)
        begun.cancel()
        await asyncio.wait([begun])
        assert begun.cancelled()

    asyncio.run(body())
    (made,) = set(server.uploads) - before
    assert len(server.uploads[made].parts) >= parts
    for number in list(server.uploads[made].parts):
        if number > parts:
            del server.uploads[made].parts[number]
    return made


@pytest.fixture
def server() -> FakeS3:
    return FakeS3()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, server: FakeS3, quick_retries: None) -> S3Storage:
    return fake_storage(monkeypatch, server, part_nbytes=PART, concurrency=3, attempts=3)


@pytest.mark.parametrize("page", [1, 2, 1000])
@pytest.mark.parametrize("told", [False, True])
def test_parts_are_found_on_all_pages_by_checksum_or_etag(server: FakeS3, storage: S3Storage, page: int, told: bool) -> None:
    server.tells_part_checksums = told
    data = pattern(9 * PART + 1)
    interrupted(server, storage, data, parts=5)
    server.uploads["upload-of-another-key"] = type(next(iter(server.uploads.values())))("tier/file2", {}, "", server.at)
    server.page = page
    server.counts.clear()
    asyncio.run(storage.write_on("file", PatternSource(data)))
    assert server.counts["upload_part"] == 5
    assert server.objects["tier/file"]["data"] == data
    assert list(server.uploads) == ["upload-of-another-key"]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("wrong", ["bytes", "size"])
def test_a_part_with_other_bytes_is_sent_again(server: FakeS3, storage: S3Storage, wrong: str, told: bool) -> None:
    server.tells_part_checksums = told
    data = pattern(6 * PART)
    upload = server.uploads[interrupted(server, storage, data, parts=4)]
    stored = upload.parts[2]
    fake = bytes(stored["data"][:-1]) + (b"" if wrong == "size" else b"\x00")

    class Sent:
        def read(self) -> bytes:
            return fake

    wrong_sum = {name: SHA256.composite([fake])[:8] for name in stored["told"]}
    server.upload_part(UploadId=next(iter(server.uploads)), PartNumber=2, Body=Sent(), **wrong_sum)  # type: ignore[arg-type]
    server.counts.clear()
    asyncio.run(storage.write_on("file", PatternSource(data)))
    assert server.counts["upload_part"] == 3
    assert server.objects["tier/file"]["data"] == data


def test_of_several_uploads_the_fullest_goes_on_older_ones_end_newer_ones_stay(server: FakeS3, storage: S3Storage) -> None:
    data = pattern(8 * PART)
    ids = []
    for parts in (2, 5, 1):
        held, server.uploads = server.uploads, {}  # each of them begins without seeing the others
        ids.append(interrupted(server, storage, data, parts=parts))
        server.uploads |= {f"{upload}-{parts}": one for upload, one in server.uploads.items()}
        del server.uploads[ids[-1]]
        ids[-1] = f"{ids[-1]}-{parts}"
        server.uploads |= held
        server.pass_time(60)
    server.counts.clear()
    asyncio.run(storage.write_on("file", PatternSource(data)))
    assert server.counts["upload_part"] == 3
    assert server.objects["tier/file"]["data"] == data
    assert set(server.uploads) == {ids[2]}


def test_an_upload_that_holds_nothing_yet_may_be_a_live_one_s_and_is_left_to_its_writer_or_the_sweep(
    server: FakeS3, storage: S3Storage
) -> None:
    data = pattern(3 * PART)
    empty = interrupted(server, storage, data, parts=0)
    server.pass_time(60)
    asyncio.run(storage.write_on("file", PatternSource(data)))
    assert server.objects["tier/file"]["data"] == data
    assert list(server.uploads) == [empty]
    assert asyncio.run(storage.abort_stale_uploads(59)) == ["file"]
    assert server.uploads == {}


def test_a_failure_that_may_pass_leaves_the_parts_and_one_for_good_leaves_nothing(server: FakeS3, storage: S3Storage) -> None:
    data = pattern(6 * PART)

    async def body() -> None:
        server.failures = [("complete_multipart_upload", refusal_of("InternalError", 500)) for _ in range(20)]
        with pytest.raises(TemporaryError):
            await storage.write_on("file", PatternSource(data))
        assert [len(upload.parts) for upload in server.uploads.values()] == [6]
        server.failures = [("upload_part", refusal_of("AccessDenied", 403))]
        server.counts.clear()
        next(iter(server.uploads.values())).parts.pop(6)
        with pytest.raises(AccessError):
            await storage.write_on("file", PatternSource(data))
        assert len(server.uploads) == 1  # credentials are mended, the parts are as good then
        with pytest.raises(IntegrityError):
            await storage.write_on("file", FailingSource(data, at=5 * PART))
        assert server.uploads == {}
        server.failures = [("upload_part", refusal_of("AccessDenied", 403))]
        with pytest.raises(AccessError):
            await storage.write("file", PatternSource(data))
        assert server.uploads == {}  # a plain write never leaves any

    asyncio.run(body())


@pytest.mark.parametrize("method", ["upload_part", "complete_multipart_upload"])
@pytest.mark.parametrize("completed", [True, False])
def test_an_upload_that_another_process_ended_is_found_done_or_begun_again(
    server: FakeS3, storage: S3Storage, method: str, completed: bool
) -> None:
    data = pattern(6 * PART)
    interrupted(server, storage, data, parts=3)
    before = server.call

    async def ends_it(called: str, **arguments: Any) -> dict[str, Any]:
        if called == method and server.counts["ended"] == 0:
            server.counts["ended"] += 1
            (upload_id,) = server.uploads
            upload = server.uploads[upload_id]
            if completed:
                for number in range(1, 7):
                    sent = memoryview(data)[(number - 1) * PART : number * PART]
                    server.upload_part(UploadId=upload_id, PartNumber=number, Body=type("B", (), {"read": lambda self, s=sent: s})())
                lines = [{"PartNumber": n, "ETag": upload.parts[n]["ETag"]} for n in range(1, 7)]
                server.complete_multipart_upload(Key=upload.key, UploadId=upload_id, MultipartUpload={"Parts": lines})
            else:
                server.abort_multipart_upload(UploadId=upload_id)
        return await before(called, **arguments)

    server.call = ends_it  # type: ignore[method-assign]
    info = asyncio.run(storage.write_on("file", PatternSource(data)))
    assert info.nbytes == len(data)
    assert server.objects["tier/file"]["data"] == data
    assert server.uploads == {}
    assert server.counts["ended"] == 1


def test_a_server_that_does_not_list_uploads_gets_a_new_one(server: FakeS3, storage: S3Storage) -> None:
    data = pattern(3 * PART)
    server.failures = [("list_multipart_uploads", refusal_of("NotImplemented", 501))]
    asyncio.run(storage.write_on("file", PatternSource(data)))
    assert server.objects["tier/file"]["data"] == data


def test_the_sweep_leaves_an_old_upload_alone_that_somebody_goes_on_with(server: FakeS3, storage: S3Storage) -> None:
    data = pattern(8 * PART)
    old = interrupted(server, storage, data, parts=2)
    server.pass_time(10 * 86400)
    assert asyncio.run(storage.stale_uploads(7 * 86400)) == ["file"]
    server.uploads[old].parts[2]["at"] = server.at  # gone on with just now
    server.pass_time(3600)
    assert asyncio.run(storage.abort_stale_uploads(7 * 86400)) == []
    assert list(server.uploads) == [old]
    server.pass_time(8 * 86400)
    assert asyncio.run(storage.abort_stale_uploads(7 * 86400)) == ["file"]
    assert server.uploads == {}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_interrupts_and_whoever_joins_the_object_is_whole_in_the_end(server: FakeS3, storage: S3Storage, seed: int) -> None:
    """Three writers of one path, random failures and cancellations, again and again: each ends in the whole object or a typed error."""
    chance = random.Random(seed)
    data = pattern(7 * PART + 3)
    codes: list[Callable[[], Exception]] = [
        lambda: refusal_of("InternalError", 500),
        lambda: refusal_of("SlowDown", 503),
        lambda: refusal_of("NoSuchUpload", 404),
        lambda: ConnectionResetError("cut"),
    ]

    async def body() -> None:
        for _ in range(6):
            methods = ("upload_part", "complete_multipart_upload", "list_parts", "head_object")
            server.failures = [(chance.choice(methods), chance.choice(codes)()) for _ in range(chance.randrange(4))]
            writers = [asyncio.ensure_future(storage.write_on("file", PatternSource(data))) for _ in range(3)]
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                writers[0].cancel()
            for end in await asyncio.gather(*writers, return_exceptions=True):
                if isinstance(end, BaseException):
                    assert isinstance(end, TemporaryError | NotFoundError | asyncio.CancelledError), repr(end)
        server.failures = []
        await storage.write_on("file", PatternSource(data))
        assert server.objects["tier/file"]["data"] == data
        await storage.abort_stale_uploads(-1)
        assert server.uploads == {}

    asyncio.run(body())
