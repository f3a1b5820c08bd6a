"""Ways to save to and load from an S3 server: tierstore by both of its clients, DCP by two, loaders, and raw clients as limits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import tierstore
from peers.base import Peer, State, Wait, nothing
from peers.files import save_file, stream
from peers.limits import memcpy

BUCKET = "bench"
OURS, OURS_DIRECT = "tierstore (s3fs)", "tierstore, client: direct"
DCP, CONNECTOR = "DCP FsspecWriter/Reader on s3fs", "s3torchconnector S3StorageWriter/Reader"
_PART, _CONCURRENT = 8 << 20, 8

Options = Mapping[str, Any]


class Remote:
    """What sessions with a bucket share: nothing lies in a folder, and nothing is removed while a benchmark runs."""

    def files(self) -> Path:
        raise NotImplementedError("its files are in a bucket")

    def discard(self) -> None:
        """The server's folder goes as a whole."""

    def close(self) -> None:
        """Nothing is kept."""


class Ours(Remote):
    def __init__(self, name: str, options: Options, *, run: str = "") -> None:
        tier = {"name": "object", "uri": f"s3://{BUCKET}/{run or name}", "options": dict(options)}
        self.store = tierstore.open({"version": 1, "run": run or name, "tiers": [tier]}, rank=0, world_size=1)
        self.step = 0

    def save(self, state: State, turn: int) -> Wait:
        self.step += 1
        ticket = self.store.save(self.step, dict(state))
        return lambda: ticket.wait("committed", timeout=600)

    def load(self, into: State) -> State:
        self.store.load(into=dict(into))
        return into

    def close(self) -> None:
        self.store.close()


class Dcp(Remote):
    def __init__(self, writer: Callable[[str], Any], reader: Callable[[str], Any], prefix: str) -> None:
        self.writer, self.reader, self.prefix = writer, reader, prefix
        self.uri = f"s3://{BUCKET}/{prefix}/0"

    def save(self, state: State, turn: int) -> Wait:
        self.uri = f"s3://{BUCKET}/{self.prefix}/{turn}"
        dcp.save(dict(state), storage_writer=self.writer(self.uri), no_dist=True)
        return nothing

    def load(self, into: State) -> State:
        dcp.load(dict(into), storage_reader=self.reader(self.uri), no_dist=True)
        return into


class RawClient(Remote):
    """One object of the state's size, from a file in memory and into a buffer that was touched."""

    def __init__(self, put: Callable[[Path, str], object], get: Callable[[str, memoryview], object], key: str) -> None:
        self.put, self.get, self.key = put, get, key
        self.image: torch.Tensor | None = None
        descriptor, path = tempfile.mkstemp(prefix=f"tierstore-bench-{os.getpid()}-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.close(descriptor)
        self.path = Path(path)

    def save(self, state: State, turn: int) -> Wait:
        """The image is made at the first call, which warms up."""
        if self.image is None:
            self.image = torch.empty(sum(t.nbytes for t in state.values()), dtype=torch.uint8)
            memcpy(state, self.image)
            self.path.write_bytes(memoryview(self.image.numpy()))
        self.put(self.path, self.key)
        return nothing

    def load(self, into: State) -> State:
        assert self.image is not None
        self.get(self.key, memoryview(self.image.numpy()))
        return into

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


class Streamed(Remote):
    """runai-model-streamer on a safetensors file that was put there once; it only loads."""

    def __init__(self, options: Options, client: Any) -> None:
        os.environ.update(
            AWS_ENDPOINT_URL=options["endpoint_url"], RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0", AWS_REGION=options["region_name"]
        )
        self.client, self.key = client, "streamed/state.safetensors"

    def save(self, state: State, turn: int) -> Wait:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            save_file(state, path)
            self.client.upload_file(str(path), BUCKET, self.key)
        return nothing

    def load(self, into: State) -> State:
        return stream(f"s3://{BUCKET}/{self.key}", into)


def remote_peers(options: Options) -> list[Peer]:
    """Everyone who saves to and loads from the server that the options name."""
    return [
        _peer(
            OURS,
            "SHA-256 of every block; loads prove every block",
            lambda: Ours("ours", {**options, "client": "s3fs"}),
            kind="ours",
            proves=True,
        ),
        _peer(
            OURS_DIRECT,
            "the same, ranges over connections of its own",
            lambda: Ours("ours-direct", {**options, "client": "direct"}),
            kind="ours",
            proves=True,
        ),
        _peer(DCP, "no hash, no check", lambda: Dcp(*fsspec_ends(options), "dcp")),
        _peer(CONNECTOR, "no hash, no check", lambda: Dcp(*connector_ends(options), "connector"), needs=("s3torchconnector.dcp",)),
        _peer(
            "boto3 transfer manager, defaults",
            "8 MiB parts, 8 threads; CRC32, signed payload",
            lambda: _boto3(options, "boto3-defaults", unsigned=False),
            kind="limit",
        ),
        _peer(
            "boto3 transfer manager, unsigned",
            "8 MiB parts, 8 threads; no checksum",
            lambda: _boto3(options, "boto3", unsigned=True),
            kind="limit",
        ),
        _peer(
            "obstore, unsigned", "8 MiB parts and ranges, 8 in flight", lambda: _obstore(options), kind="limit", needs=("obstore.store",)
        ),
        _peer("s3fs", "put_file, cat_ranges of 8 MiB", lambda: _s3fs(options), kind="limit"),
    ]


def remote_loaders(options: Options) -> list[Peer]:
    """Who only loads."""
    return [
        _peer(
            "runai-model-streamer from S3, copied into place",
            "one safetensors file; no check",
            lambda: Streamed(options, boto3_client(options, unsigned=True)),
            needs=("runai_model_streamer", "runai_model_streamer_s3"),
        )
    ]


def for_s3fs(options: Options) -> dict[str, Any]:
    """The same options as bare s3fs takes them."""
    rest = {key: value for key, value in options.items() if key not in ("region_name", "client")}
    return {**rest, "client_kwargs": {"region_name": options["region_name"]}}


def fsspec_ends(options: Options) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    """DCP's writer and reader on s3fs."""
    return lambda uri: FsspecWriter(uri, **for_s3fs(options)), lambda uri: FsspecReader(uri, **for_s3fs(options))


def connector_ends(options: Options) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    """s3torchconnector's writer and reader; credentials come from the environment."""
    return lambda uri: s3torchconnector_writer(uri, options["endpoint_url"]), lambda uri: s3torchconnector_reader(
        uri, options["endpoint_url"]
    )


def s3torchconnector_reader(uri: str, endpoint_url: str) -> Any:
    from s3torchconnector.dcp import S3StorageReader

    return _at(S3StorageReader("us-east-1", uri), endpoint_url, reading=True)


def s3torchconnector_writer(uri: str, endpoint_url: str) -> Any:
    from s3torchconnector.dcp import S3StorageWriter

    return _at(S3StorageWriter("us-east-1", uri, thread_count=4), endpoint_url, reading=False)


def _at(end: Any, endpoint_url: str, *, reading: bool) -> Any:
    """Its public constructors take no endpoint: the file system beneath does, through its client."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    client = S3Client("us-east-1", endpoint=endpoint_url, s3client_config=S3ClientConfig(force_path_style=True))
    more = {"reader_constructor": end._reader_constructor} if reading else {}
    end.fs = S3FileSystem("us-east-1", s3_client=client, **more)
    return end


def boto3_client(options: Options, *, unsigned: bool) -> Any:
    import boto3
    from botocore.config import Config

    checks = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"} if unsigned else {}
    s3 = {"addressing_style": "path", **({"payload_signing_enabled": False} if unsigned else {})}
    return boto3.session.Session().client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name=options["region_name"],
        config=Config(max_pool_connections=32, s3=s3, **checks),
    )


def _boto3(options: Options, key: str, *, unsigned: bool) -> RawClient:
    from boto3.s3.transfer import TransferConfig

    client = boto3_client(options, unsigned=unsigned)
    config = TransferConfig(multipart_chunksize=_PART, max_concurrency=_CONCURRENT)
    body = {} if unsigned else {"ChecksumAlgorithm": "CRC32"}

    def put(path: Path, key: str) -> None:
        client.upload_file(str(path), BUCKET, key, Config=config, ExtraArgs=body)

    def piece(key: str, part: memoryview, at: int) -> None:
        answer = client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={at}-{at + len(part) - 1}")["Body"]
        got = 0
        while got < len(part):
            got += answer.readinto(part[got:])

    return RawClient(put, lambda key, buffer: in_pieces(lambda part, at: piece(key, part, at), buffer), f"raw/{key}")


def _obstore(options: Options) -> RawClient:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region=options["region_name"],
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )

    def put(path: Path, key: str) -> None:
        obstore.put(store, key, path, use_multipart=True, chunk_size=_PART, max_concurrency=_CONCURRENT)

    def piece(key: str, part: memoryview, at: int) -> None:
        part[:] = memoryview(obstore.get_range(store, key, start=at, length=len(part)))

    return RawClient(put, lambda key, buffer: in_pieces(lambda part, at: piece(key, part, at), buffer), "raw/obstore")


def _s3fs(options: Options) -> RawClient:
    import s3fs

    fs = s3fs.S3FileSystem(**for_s3fs(options), skip_instance_cache=True)

    def put(path: Path, key: str) -> None:
        fs.put_file(str(path), f"{BUCKET}/{key}", chunksize=_PART, max_concurrency=_CONCURRENT)

    def get(key: str, buffer: memoryview) -> None:
        starts = list(range(0, len(buffer), _PART))
        ends = [min(at + _PART, len(buffer)) for at in starts]
        for at, data in zip(starts, fs.cat_ranges([f"{BUCKET}/{key}"] * len(starts), starts, ends, batch_size=_CONCURRENT), strict=True):
            buffer[at : at + len(data)] = data

    return RawClient(put, get, "raw/s3fs")


def in_pieces(read: Callable[[memoryview, int], object], buffer: memoryview) -> None:
    """Reads 8 MiB at a time, by eight threads."""
    with ThreadPoolExecutor(_CONCURRENT) as pool:
        list(pool.map(lambda at: read(buffer[at : at + _PART], at), range(0, len(buffer), _PART)))


def _peer(name: str, note: str, make: Callable[[], Any], **more: Any) -> Peer:
    return Peer(name=name, note=note, open=lambda folder: make(), syncs=True, **more)
