"""Uploads of packed files, whose length shows only at their end: they go on where they stopped, and leave nothing when they fail."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from fork_kit import run_forked
from packing_kit import MIB, SHARD, training_shard
from s3_kit import FakeS3, fake_storage, refusal_of

from tierstore.errors import IntegrityError, TemporaryError
from tierstore.storage.packed import PackedStorage, Packing
from tierstore.storage.s3 import S3Storage
from tierstore.storage.sources import BytesSource
from tierstore.testing.proxy import CuttingProxy, Rule
from tierstore.testing.servers import S3Server
from tierstore.testing.sources import FailingSource, GatedSource, GrowingSource, PatternSource, pattern

PART = 64 << 10
PROGRAM = (
    "import asyncio, pickle, sys\nfrom pathlib import Path\n"
    "from tierstore.storage.sources import BytesSource\n"
    "storage, path, data = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
    "asyncio.run(storage.write_on(path, BytesSource(data)))\n"
)


@pytest.mark.s3
def test_a_killed_upload_of_a_packed_file_goes_on_with_its_parts(s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> None:
    data = training_shard(layers=3, rows=1500)  # 28 MB packed
    packing = Packing(master_once=True)
    uri = f"{s3_bucket}/{tmp_path.name}"
    with CuttingProxy(s3_server.endpoint_url) as proxy:
        proxy.add(Rule(method="PUT", path="partNumber=", action="stall"))  # it is on its way when the process dies, and never arrives
        options = {**s3_server.options(), "endpoint_url": proxy.endpoint_url}
        killed = PackedStorage(S3Storage(uri, options, part_nbytes=5 * MIB, concurrency=2), packing)
        (tmp_path / "plan").write_bytes(pickle.dumps((killed, SHARD, data)))
        ended = run_forked(PROGRAM, str(tmp_path / "plan"), env={"TIERSTORE_CRASH_AT": "s3.after-part:3"})
    assert ended.returncode == 86, ended.stderr

    with CuttingProxy(s3_server.endpoint_url) as proxy:
        options = {**s3_server.options(), "endpoint_url": proxy.endpoint_url}
        inner = S3Storage(uri, options, part_nbytes=5 * MIB, concurrency=2)

        async def body() -> None:
            storage = PackedStorage(inner, packing)
            assert await storage.list() == [info for info in await storage.list() if info.path == ".packed"]
            (upload,) = (await inner._requests.send("x", "", "list_multipart_uploads", Prefix=inner._root))["Uploads"]
            there = await inner._requests.send("x", "", "list_parts", Key=upload["Key"], UploadId=upload["UploadId"])
            held = len(there["Parts"])
            assert held == 3
            proxy.clear()
            info = await storage.write_on(SHARD, BytesSource(data))
            assert info.stored_nbytes is not None
            parts = -(-info.stored_nbytes // (5 * MIB))
            assert proxy.count("PUT", "partNumber=") == parts - held > 0
            assert proxy.count("POST", "uploads") == 0  # no new one was begun
            assert (info.path, info.nbytes) == (SHARD, len(data))
            assert info.checksum.endswith(f"-{parts}")
            same = await storage.read(SHARD) == data
            assert same
            await storage.close()

        asyncio.run(body())


# Without sockets


def growing(nbytes: int) -> GrowingSource:
    return GrowingSource(PatternSource(pattern(nbytes)), bound=100 * PART)


@pytest.mark.parametrize("nbytes", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 7])
def test_what_ends_within_one_part_is_one_request_and_the_rest_has_no_empty_part(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server)

    async def body() -> None:
        for write in (storage.write, storage.write_on):
            server.counts.clear()
            info = await write("file", growing(nbytes))
            assert info.nbytes == nbytes
            assert server.objects["tier/file"]["data"] == pattern(nbytes)
            parts = 0 if nbytes < PART else -(-nbytes // PART)
            if nbytes == PART:  # its end shows only when more is asked for
                assert server.counts["put_object"] + server.counts["upload_part"] == 1
            else:
                assert (server.counts["upload_part"], server.counts["put_object"]) == (parts, int(not parts))
        assert not server.uploads

    asyncio.run(body())


def interrupted(server: FakeS3, storage: S3Storage, nbytes: int, parts: int) -> None:
    async def body() -> None:
        gated = GatedSource(pattern(nbytes), at=parts * PART)
        begun = asyncio.ensure_future(storage.write_on("file", GrowingSource(gated, bound=100 * PART)))
        await gated.reached.wait()
        for _ in range(10_000):
            if any(len(upload.parts) >= parts for upload in server.uploads.values()):
                break
            await asyncio.sleep(0.001)
        begun.cancel()
        await asyncio.wait([begun])

    asyncio.run(body())
    assert [len(upload.parts) for upload in server.uploads.values()] == [parts]


def test_an_interrupted_upload_goes_on_without_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server)
    nbytes = 9 * PART + 100
    interrupted(server, storage, nbytes, 4)
    server.counts.clear()
    assert asyncio.run(storage.write_on("file", growing(nbytes))).nbytes == nbytes
    assert server.counts["upload_part"] == 6
    assert server.counts["create_multipart_upload"] == 0
    assert server.objects["tier/file"]["data"] == pattern(nbytes)
    assert not server.uploads


def test_parts_of_other_bytes_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server)
    interrupted(server, storage, 9 * PART, 4)
    data = pattern(7 * PART + 5, seed=3)
    asyncio.run(storage.write_on("file", GrowingSource(PatternSource(data), bound=100 * PART)))
    assert server.objects["tier/file"]["data"] == data


def test_the_lost_answer_of_a_completion_is_proved_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server)
    nbytes = 5 * PART + 5
    interrupted(server, storage, nbytes, 2)
    complete = server.complete_multipart_upload

    def lost(**arguments: Any) -> dict[str, Any]:
        complete(**arguments)
        raise refusal_of("InternalError", 500)

    monkeypatch.setattr(server, "complete_multipart_upload", lost)
    assert asyncio.run(storage.write_on("file", growing(nbytes))).nbytes == nbytes
    assert server.objects["tier/file"]["data"] == pattern(nbytes)


def test_an_upload_that_another_process_ended_is_proved_though_the_end_was_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server, concurrency=1)
    nbytes = 40 * PART + 5
    interrupted(server, storage, nbytes, 2)
    upload_part = server.upload_part

    def ended(**arguments: Any) -> dict[str, Any]:
        if server.uploads:  # the other process sends the rest, and completes
            (upload_id,) = server.uploads
            whole = pattern(nbytes)
            for number in range(41):
                from tierstore.storage.s3_client import Body

                upload_part(
                    UploadId=upload_id,
                    PartNumber=number + 1,
                    Body=Body(memoryview(whole[number * PART : (number + 1) * PART]), signed=True),
                )
            parts = server.uploads[upload_id].parts
            listed = [{"PartNumber": number, "ETag": parts[number]["ETag"]} for number in sorted(parts)]
            server.complete_multipart_upload(Key="tier/file", UploadId=upload_id, MultipartUpload={"Parts": listed})
        return upload_part(**arguments)

    monkeypatch.setattr(server, "upload_part", ended)
    assert asyncio.run(storage.write_on("file", growing(nbytes))).nbytes == nbytes
    assert server.objects["tier/file"]["data"] == pattern(nbytes)


@pytest.mark.parametrize("at", [0, 3 * PART, 5 * PART])
def test_a_damaged_source_leaves_nothing_on_the_server(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server)
    nbytes = 5 * PART + 5
    interrupted(server, storage, nbytes, 2)
    with pytest.raises(IntegrityError, match="damaged at byte"):
        asyncio.run(storage.write_on("file", GrowingSource(FailingSource(pattern(nbytes), at=at), bound=100 * PART)))
    assert not server.uploads
    assert not server.objects


def test_a_failure_that_may_pass_leaves_the_parts_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server, attempts=1)
    server.failures = [("complete_multipart_upload", refusal_of("InternalError", 500))]
    with pytest.raises(TemporaryError):
        asyncio.run(storage.write_on("file", growing(5 * PART + 5)))
    assert len(server.uploads) == 1
    server.counts.clear()
    asyncio.run(storage.write_on("file", growing(5 * PART + 5)))
    assert server.counts["upload_part"] == 0
    assert server.objects["tier/file"]["data"] == pattern(5 * PART + 5)
