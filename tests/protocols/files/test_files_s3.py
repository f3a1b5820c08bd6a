"""Files end to end on a real S3 server: as the authority, as the last tier, and alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from files_kit import FAST, bytes_of, content, stored, write

from tierstore.config import load_config
from tierstore.errors import ConflictError, TemporaryError
from tierstore.tiers.files.files import Files
from tierstore.tiers.files.syncing import sync_files
from tierstore.tiers.session import Session

pytestmark = pytest.mark.s3
BIG = 10 << 20
"""More than one part of an upload."""


@contextmanager
def opened_on(tiers: list[Any], **options: Any) -> Iterator[tuple[Session, Files]]:
    with Session.open(load_config({"tiers": tiers})) as session:
        files = Files(session, options=FAST, **options)
        yield session, files
        session.run(files.close(60))


def test_files_go_to_a_bucket_and_come_back_from_it(tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]) -> None:
    far = {"name": "far", "uri": s3_bucket, "options": s3_options}
    odd = "d/a b+c#é%40@.txt"
    with opened_on([str(tmp_path / "node"), str(tmp_path / "shared"), far]) as (session, files):
        write(session, files, "d/big", bytes_of(1, BIG))
        session.run(files.put(odd, b"odd"))
        session.run(files.put("d/empty", b""))
        session.run(files.make_folder("made"))
        write(session, files, "d/replaced", bytes_of(2, 5000))
        write(session, files, "d/replaced", bytes_of(3, 5000))
        session.run(files.put("d/gone", b"x"))
        session.run(files.remove(["d/gone"]))
    with opened_on([far]) as (session, files):  # the bucket alone
        assert content(session, files, "d/big") == bytes_of(1, BIG)
        assert content(session, files, odd) == b"odd"
        assert content(session, files, "d/empty") == b""
        assert content(session, files, "d/replaced") == bytes_of(3, 5000)
        assert content(session, files, "d/gone") is None
        version = session.run(files.look_up("d/big"))
        assert version is not None
        assert session.run(files.read(version, BIG - 70_000, 60_000)) == bytes_of(1, BIG)[BIG - 70_000 : BIG - 10_000]
        listed = [(one.path, one.nbytes, one.is_folder) for one in session.run(files.list())]
        assert listed == [
            ("d", 0, True),
            (odd, 3, False),
            ("d/big", BIG, False),
            ("d/empty", 0, False),
            ("d/replaced", 5000, False),
            ("made", 0, True),
        ]
        found = session.run(files.look_up("d"))
        assert found is not None
        assert found.is_folder
        assert session.run(files.look_up("made")) is not None
        stored_there = session.run(session.tiers.nearest.storage.list(".files/d/replaced@"))
        assert len(stored_there) == 2  # the older version is gone


def test_a_bucket_that_decides_has_one_creator_and_shows_other_nodes_what_is_published(
    tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    bucket = {"name": "object", "uri": s3_bucket, "options": s3_options}
    outcomes: list[str] = []
    with opened_on([str(tmp_path / "a"), bucket], ack="authority") as (session, files):
        session.run(files.put("first", b"1"))  # the store is there

    def race(node: str) -> None:
        with opened_on([str(tmp_path / node), bucket], ack="authority") as (session, files):
            try:
                session.run(files.put("only", node.encode(), exclusive=True))
            except ConflictError:
                return
            outcomes.append(node)

    racers = [threading.Thread(target=race, args=(node,)) for node in ("a", "b", "c")]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(200)
    (winner,) = outcomes
    with opened_on([str(tmp_path / "d"), bucket]) as (session, files):
        assert content(session, files, "only") == winner.encode()
        session.run(files.copy("only", "moved"))
        session.run(files.remove(["only"]))
    with opened_on([str(tmp_path / "e"), bucket]) as (session, files):
        assert [one.path for one in session.run(files.list())] == ["first", "moved"]


def test_a_bucket_that_was_emptied_is_filled_again(tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]) -> None:
    far = {"name": "far", "uri": s3_bucket, "options": s3_options}
    tiers = [str(tmp_path / "node"), str(tmp_path / "shared"), far]
    with opened_on(tiers) as (session, files):
        write(session, files, "d/f", bytes_of(1, 50_000))
        session.run(files.sync(60))
        storage = session.tiers.get("far").storage
        session.run(storage.delete([info.path for info in session.run(storage.list(".files"))]))
    with Session.open(load_config({"tiers": tiers})) as session:
        report = session.run(sync_files(session), 60)
        assert [one.path for one in report.lacking] == ["d/f"]
        assert not report.left
    with opened_on([far]) as (session, files):
        assert content(session, files, "d/f") == bytes_of(1, 50_000)
    assert sorted(stored(tmp_path / "shared")) == ["d/f@.data", "d/f@.json"]


def test_without_the_bucket_that_decides_the_node_goes_on_and_the_bucket_gets_it_later(
    tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = {"name": "object", "uri": s3_bucket, "options": s3_options}
    with opened_on([str(tmp_path / "node"), bucket], ack="nearest") as (session, files):
        storage = session.tiers.get("object").storage

        async def down(*arguments: Any) -> Any:
            raise TemporaryError("the endpoint is down")

        with monkeypatch.context() as patch:
            for name in ("list", "put", "write", "stat", "children"):
                patch.setattr(storage, name, down)
            session.run(files.put("f", b"bytes"))
            assert content(session, files, "f") == b"bytes"
            assert [one.path for one in session.run(files.list())] == ["f"]
        session.run(files.sync(60))
    with opened_on([bucket]) as (session, files):
        assert content(session, files, "f") == b"bytes"
