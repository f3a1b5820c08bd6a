"""Bodies on their way to S3: a cheap checksum that the server checks, and SHA-256 of a block once in its life."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3_kit import FakeS3, fake_storage, refusal_of
from tiers_kit import SteppedClock, attempt_at

from tierstore.errors import IntegrityError, StorageError
from tierstore.format.digest import block_digests
from tierstore.format.index import FileEntry
from tierstore.storage import s3_checksums
from tierstore.storage.posix import PosixStorage
from tierstore.storage.s3 import S3Storage
from tierstore.testing.sources import PatternSource, pattern
from tierstore.tiers.copying import CopyContext, copy_file
from tierstore.tiers.persist import persist
from tierstore.tiers.tier import Tier, Tiers

MIB = 1 << 20
PART = 64 << 10
LARGE = s3_checksums.Checksums("auto").large


class Hashes:
    """Counts the bytes that anything hashes with SHA-256 here: tierstore, botocore, whoever asks hashlib."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        real: Callable[..., Any] = hashlib.sha256
        outer = self

        class Counting:
            def __init__(self, data: Any = b"", **_: Any) -> None:
                outer.nbytes += memoryview(data).nbytes
                self._inner = real(data)

            def update(self, data: Any) -> None:
                outer.nbytes += memoryview(data).nbytes
                self._inner.update(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

        monkeypatch.setattr(hashlib, "sha256", Counting)
        monkeypatch.setattr("botocore.auth.sha256", Counting)
        monkeypatch.setattr("botocore.httpchecksum.sha256", Counting, raising=False)


@pytest.mark.s3
def test_a_promotion_to_a_bucket_hashes_each_byte_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    data = pattern(20 * MIB + 5)
    file = FileEntry(name="shard-00000-of-00001.safetensors", nbytes=len(data), block_digests=block_digests(data, MIB))
    attempt = attempt_at(1)

    async def body() -> None:
        node, far = PosixStorage(tmp_path / "node", durable=False), S3Storage(s3_bucket, s3_options)
        near, target = Tier(name="node", storage=node, scope="shared"), Tier(name="far", storage=far, scope="shared")
        tiers = Tiers(tiers=(near, target), authority=near, durable_at=near, store_id="kit")
        await node.put(attempt.path(file.name), data)
        await far.put("warm-up", b"x")  # the client's own start
        hashes = Hashes(monkeypatch)

        async def no_damage(*_: Any) -> None:
            raise AssertionError("nothing is damaged")

        info = await copy_file(CopyContext.make(tiers, SteppedClock()), attempt, target, [near], file, MIB, no_damage)
        assert len(data) <= hashes.nbytes <= len(data) + 64 * 1024  # the proof while reading; and headers, which are signed
        assert info.checksum.startswith(f"{LARGE.name.lower()}:")
        same = await far.read(attempt.path(file.name)) == data
        assert same
        await asyncio.gather(node.close(), far.close())

    asyncio.run(body())


@pytest.mark.s3
@pytest.mark.parametrize("nbytes", [3 * MIB, 20 * MIB])
def test_a_save_whose_first_tier_is_a_bucket_hashes_each_byte_once(
    monkeypatch: pytest.MonkeyPatch, s3_bucket: str, s3_options: dict[str, Any], nbytes: int
) -> None:
    async def body() -> None:
        far = S3Storage(s3_bucket, s3_options)
        await far.put("warm-up", b"x")
        hashes = Hashes(monkeypatch)
        await persist(
            Tier(name="far", storage=far, scope="shared"),
            attempt_at(2),
            rank=0,
            world_size=1,
            shard=PatternSource(pattern(nbytes)),
            tensors=(),
            objects=b"",
            facts={},
            clock=SteppedClock(),
            authority=True,
        )
        assert nbytes <= hashes.nbytes <= nbytes + 256 * 1024
        await far.close()

    asyncio.run(body())


def test_the_same_bytes_have_the_checksums_that_the_standards_give_them() -> None:
    check = memoryview(b"123456789")
    assert s3_checksums.CRC32.of(check).hex() == "cbf43926"
    fast = s3_checksums.computable("CRC32C")
    if fast is not None:  # the extra `fast`
        assert fast.of(check).hex() == "e3069283"
    assert s3_checksums.computable("CRC64NVME") is None
    parts = [zlib.crc32(b"a").to_bytes(4, "big"), zlib.crc32(b"b").to_bytes(4, "big")]
    whole = b64encode(zlib.crc32(b"".join(parts)).to_bytes(4, "big")).decode()
    assert s3_checksums.CRC32.composite(parts) == f"{whole}-2"


@pytest.mark.parametrize(
    ("mode", "shard", "document"),
    [("auto", LARGE.name, "SHA256"), ("required", LARGE.name, "SHA256"), ("sha256", "SHA256", "SHA256"), ("off", "", "")],
)
def test_each_mode_sends_what_it_says(monkeypatch: pytest.MonkeyPatch, mode: str, shard: str, document: str) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART)
    storage._checksums = s3_checksums.Checksums(mode)

    async def body() -> None:
        await storage.put("document", b"x")
        await storage.write("shard", PatternSource(pattern(3 * PART)))
        await storage.write("short", PatternSource(pattern(100)))

    asyncio.run(body())
    for name, algorithm in (("document", document), ("shard", shard), ("short", shard)):
        told = [key for key in server.objects[f"tier/{name}"] if key.startswith("Checksum") and key != "ChecksumType"]
        assert told == ([f"Checksum{algorithm}"] if algorithm else [])


def test_payloads_are_signed_until_the_server_shows_that_it_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART)

    async def body() -> None:
        await storage.put("first", b"x")
        assert server.signed == {True: 1}
        await storage.write("second", PatternSource(pattern(3 * PART)))
        assert server.signed == {True: 1, False: 3}
        storage._checksums.sent = False  # it takes none any more
        await storage.write("third", PatternSource(pattern(3 * PART)))
        assert server.signed == {True: 4, False: 3}

    asyncio.run(body())


class Deaf(FakeS3):
    """A server that ignores checksum headers, as old radosgw does."""

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return await super().call(method, **{n: v for n, v in arguments.items() if not n.startswith("Checksum")})


def test_a_server_that_ignores_checksums_gets_signed_payloads_and_fails_only_where_they_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Deaf()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART)
    asyncio.run(storage.write("file", PatternSource(pattern(3 * PART))))
    assert server.signed == {True: 3}
    storage._checksums = s3_checksums.Checksums("required")
    with pytest.raises(StorageError, match="returned no"):
        asyncio.run(storage.write("file", PatternSource(pattern(3 * PART))))


class Refusing(FakeS3):
    """A server that refuses checksum headers."""

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        if any(name.startswith("Checksum") and name != "ChecksumMode" for name in arguments):
            await asyncio.sleep(0)
            raise refusal_of("NotImplemented", 501)
        return await super().call(method, **arguments)


def test_a_server_that_refuses_checksums_gets_none_also_from_requests_that_were_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Refusing()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART)

    async def body() -> None:
        await asyncio.gather(
            *(storage.put(f"document-{n}", b"x") for n in range(5)), storage.write("file", PatternSource(pattern(3 * PART)))
        )

    asyncio.run(body())
    assert len(server.objects) == 6
    assert server.signed == {True: 8}


def test_an_object_that_is_not_what_was_sent_is_noticed_by_its_composite(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART)
    complete = server.complete_multipart_upload

    def damaged(**arguments: Any) -> dict[str, Any]:
        answer = complete(**arguments)
        server.objects["tier/file"][LARGE.argument] = "AAAAAA==-3"
        return answer

    server.complete_multipart_upload = damaged  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="other bytes"):
        asyncio.run(storage.write("file", PatternSource(pattern(3 * PART))))
