"""Digests and the JSON documents: manifest, records, receipt, descriptor. Bounded, versioned, exact."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from format_mutations import damaged
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import FormatError, IntegrityError, UsageError, VersionError
from tierstore.format.descriptor import Descriptor, decode_descriptor, encode_descriptor
from tierstore.format.digest import (
    BLOCK_NBYTES,
    bad_blocks,
    block_count,
    block_digests,
    check_digest,
    digest_of,
    file_digest,
)
from tierstore.format.document import decode_document, encode_document
from tierstore.format.manifest import FileRecord, Manifest, decode_manifest, encode_manifest
from tierstore.format.receipt import Receipt, decode_receipt, encode_receipt
from tierstore.format.record import FIRST_KINDS, KINDS, Record, decode_record, encode_record

AT = datetime(2026, 11, 29, 16, 30, 0, 123456, tzinfo=timezone.utc)
SAVE_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
DIGEST = digest_of(b"x")


def a_manifest() -> Manifest:
    files = (
        FileRecord(name="index.safetensors", nbytes=10, digest=DIGEST, kind="index", head_nbytes=8, head_digest=digest_of(b"head")),
        FileRecord(name="shard-00000-of-00001.safetensors", nbytes=1 << 40, digest=DIGEST, kind="shard"),
    )
    return Manifest(
        store_id="01ARZ",
        run="team/llama",
        step=10**15 - 1,
        save_id=SAVE_ID,
        world_size=1,
        block_nbytes=BLOCK_NBYTES,
        created_at=AT,
        files=files,
        tensors=3,
        extents=4,
        nbytes=(1 << 40) + 10,
        metrics={"val/loss": 2.5, "nan": math.nan, "inf": -math.inf, "count": 3.0},
        tags=("a", "release/1"),
        final=True,
        facts={"versions": {"tierstore": "0.1.0"}, "hosts": ["ü"]},
    )


def a_record(seq: int = 1, kind: str = "pinned") -> Record:
    return Record(seq=seq, kind=kind, at=AT, nonce="0" * 31 + "f", actor="host:1", data={"name": "keep", "x": [1, None, math.inf]})


DOCUMENTS: dict[str, tuple[bytes, Callable[[bytes], Any], str]] = {
    "manifest": (encode_manifest(a_manifest()), decode_manifest, "tierstore.manifest"),
    "record": (encode_record(a_record()), decode_record, "tierstore.record"),
    "receipt": (encode_receipt(Receipt(part_digest=DIGEST, rank=2, world_size=3)), decode_receipt, "tierstore.receipt"),
    "descriptor": (encode_descriptor(Descriptor(store_id=SAVE_ID)), decode_descriptor, "tierstore.store"),
}


# Digests


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 128, 1000])
def test_blocks_are_hashed_one_by_one_and_a_file_over_them(nbytes: int) -> None:
    data = bytes(i % 251 for i in range(nbytes))
    digests = block_digests(data, 64)
    expected = [hashlib.sha256(data[i : i + 64]).digest() for i in range(0, nbytes, 64)]
    assert digests == b"".join(expected) == block_digests(memoryview(bytearray(data)), 64)
    assert len(expected) == block_count(nbytes, 64)
    assert file_digest(digests) == "sha256:" + hashlib.sha256(digests).hexdigest()
    assert bad_blocks(digests, b"".join(expected)) == []


def test_blocks_that_differ_are_named_by_number() -> None:
    promised = block_digests(bytes(300), 64)
    changed = bytearray(300)
    changed[64] = changed[299] = 1
    assert bad_blocks(block_digests(changed, 64), promised) == [1, 4]
    assert bad_blocks(promised[:64], promised) == [2, 3, 4]
    assert bad_blocks(promised, promised[:64]) == [2, 3, 4]


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "0" * 63, "sha256:" + "G" * 64, "sha256:" + "A" * 64, "md5:" + "0" * 64, None, 3, DIGEST + "\n"]
)
def test_what_is_no_digest_is_refused(text: Any) -> None:
    with pytest.raises(FormatError, match="is no digest"):
        check_digest(text)
    assert check_digest(DIGEST) == DIGEST


def test_absurd_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        block_count(5, 0)
    with pytest.raises(ValueError, match="whole number"):
        file_digest(b"123")


# Documents


def unsealed(data: bytes) -> dict[str, Any]:
    """A document's fields without its seal, to change them."""
    body: dict[str, Any] = json.loads(data)
    body.pop("self_digest", None)
    return body


@pytest.mark.parametrize("name", ["record", "receipt", "descriptor"])
def test_any_flipped_bit_in_a_sealed_document_is_found_out(name: str) -> None:
    data, decode, _ = DOCUMENTS[name]
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(flipped))
        except (FormatError, VersionError):
            continue
        assert found == decode(data)  # blanks between values, or the seal's own name


def test_a_document_is_canonical_and_readable() -> None:
    one = encode_document("k", {"b": 1, "a": {"y": (1, 2), "x": math.nan}})
    assert one == encode_document("k", {"a": {"x": math.nan, "y": [1, 2]}, "b": 1})
    assert one.startswith(b'{\n "a": {\n  "x": {\n   "$float": "nan"\n  }')
    assert one.endswith(b"\n")
    assert decode_document(one, "k")["a"]["y"] == [1, 2]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"a": {1: 2}}, "k.a: 1 can't be a key"),
        ({"a": [{"$float": "x"}]}, r"k.a\[0\]: '\$float' can't be a key"),
        ({"a": {1}}, "k.a: a set"),
        ({"a": 1 << 130}, "too large"),
        ({"a": "\ud800"}, "Unicode"),
    ],
)
def test_what_a_document_can_not_hold_is_refused_with_its_place(body: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        encode_document("k", body)


def test_absurd_nesting_is_refused_both_ways() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(UsageError, match="deeper"):
        encode_document("k", {"a": deep})
    data = json.dumps({"format": "k", "format_version": "1.0", "a": deep}).encode()
    with pytest.raises(FormatError, match="deeper"):
        decode_document(data, "k")
    with pytest.raises(FormatError, match="too deep"):
        decode_document(b"[" * 1_000_000, "k")


def test_surrogate_pairs_are_read_and_lone_ones_refused() -> None:
    def document(text: str) -> bytes:
        return b'{"format":"k","format_version":"1.0","a":"' + text.encode() + b'"}'

    assert decode_document(document("\\ud83d\\ude42"), "k")["a"] == "🙂"
    with pytest.raises(FormatError, match="lone surrogates"):
        decode_document(document("\\ude42\\ud83d"), "k")


def test_a_document_over_its_bound_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(FormatError, match="1,001 bytes are more than the 1,000 allowed"):
        decode_document(b"x" * 1001, "k", max_nbytes=1000)


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_versions_newer_major_refused_by_name_newer_minor_read_with_unknown_fields_missing_refused(name: str) -> None:
    data, decode, kind = DOCUMENTS[name]
    body = unsealed(data)
    assert decode(json.dumps(body | {"format_version": "1.99", "unknown": {"x": 1}}).encode()) == decode(data) or name in ("manifest",)
    with pytest.raises(VersionError, match=rf"{kind} has format version 2.0.*1.x") as caught:
        decode(json.dumps(body | {"format_version": "2.0"}).encode())
    assert "upgrade" in caught.value.hint
    for bad in (None, 1, "1", "1.0.0", "x", "-1.0", "01.0", ""):
        with pytest.raises(FormatError, match="format_version"):
            decode(json.dumps(body | {"format_version": bad}).encode())
    with pytest.raises(FormatError, match="says it is 'other'"):
        decode(json.dumps(body | {"format": "other"}).encode())


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_each_missing_or_mistyped_field_is_named(name: str) -> None:
    data, decode, _ = DOCUMENTS[name]
    body = unsealed(data)
    for field in set(body) - {"format", "format_version"}:
        with pytest.raises(FormatError, match=f"{field!r} is missing"):
            decode(json.dumps({k: v for k, v in body.items() if k != field}).encode())
        for wrong in ([[]], {"a": {"b": []}}, -1, "\x00?", None, 1 << 70):
            if not (field in ("facts", "data") and isinstance(wrong, dict)) and not (
                field in ("actor", "store_id") and isinstance(wrong, str)
            ):
                with pytest.raises(FormatError, match=field):
                    decode(json.dumps(body | {field: wrong}).encode())


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
@given(pick=st.data())
def test_a_damaged_document_is_answered_with_an_integrity_error_only(name: str, pick: st.DataObject) -> None:
    data, decode, _ = DOCUMENTS[name]
    try:
        decode(pick.draw(damaged(data)))
    except IntegrityError:
        pass


# Manifest


def test_a_manifest_reads_back_nan_and_infinities_included() -> None:
    read = decode_manifest(encode_manifest(a_manifest()))
    assert math.isnan(read.metrics["nan"])
    assert dataclasses.replace(read, metrics={}) == dataclasses.replace(a_manifest(), metrics={})
    assert {k: v for k, v in read.metrics.items() if k != "nan"} == {"val/loss": 2.5, "inf": -math.inf, "count": 3.0}


@pytest.mark.parametrize("bad", ["../x", "/x", "a//b", "a/./b", "", "a\x00", "a\nb", "a\\b", "..", "x" * 300, "\ud800"])
def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(bad: str) -> None:
    body = json.loads(encode_manifest(a_manifest()))
    body["files"][0]["name"] = bad
    with pytest.raises(FormatError):
        decode_manifest(json.dumps(body).encode())
    files = (dataclasses.replace(a_manifest().files[0], name=bad), a_manifest().files[1])
    with pytest.raises(FormatError, match="unsafe"):
        encode_manifest(dataclasses.replace(a_manifest(), files=files))


@pytest.mark.parametrize(
    "change", [{"head_nbytes": 0}, {"head_nbytes": 11}, {"head_nbytes": -1}, {"head_digest": "x"}, {"head_digest": None}]
)
def test_a_manifest_with_an_absurd_head_is_refused_and_one_without_is_read(change: dict[str, Any]) -> None:
    body = json.loads(encode_manifest(a_manifest()))
    file = body["files"][0]
    body["files"][0] = {name: value for name, value in (file | change).items() if value is not None}
    with pytest.raises(FormatError, match="head_"):
        decode_manifest(json.dumps(body).encode())
    body["files"][0] = {name: value for name, value in file.items() if not name.startswith("head_")}
    assert decode_manifest(json.dumps(body).encode()).files[0].head_nbytes == 0


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    manifest = a_manifest()
    for change, says in (
        ({"files": (manifest.files[0], manifest.files[0])}, "twice"),
        ({"files": (dataclasses.replace(manifest.files[0], kind="blob"), manifest.files[1])}, "unknown kinds"),
        ({"nbytes": 5}, "nbytes is 5"),
    ):
        with pytest.raises(UsageError, match=says):
            encode_manifest(dataclasses.replace(manifest, **change))
    body = json.loads(encode_manifest(manifest))
    with pytest.raises(FormatError, match="twice"):
        decode_manifest(json.dumps(body | {"files": body["files"] + body["files"][:1]}).encode())
    with pytest.raises(FormatError, match="sum"):
        decode_manifest(json.dumps(body | {"nbytes": 5}).encode())


# Records


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_record_reads_back(kind: str) -> None:
    record = a_record(0 if kind in FIRST_KINDS else 7, kind)
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (a_record(1, "committed"), "can't be number 1"),
        (a_record(0, "pinned"), "can't be number 0"),
        (a_record(1, "deleted"), "unknown"),
        (a_record(10**6), "out of range"),
        (dataclasses.replace(a_record(), nonce="12"), "nonce"),
    ],
)
def test_a_malformed_record_is_not_written(record: Record, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        encode_record(record)


def test_a_kind_of_a_newer_minor_version_is_read_and_an_unknown_one_of_ours_is_not() -> None:
    body = unsealed(encode_record(a_record())) | {"kind": "archived"}
    with pytest.raises(FormatError, match="unknown value 'archived'"):
        decode_record(json.dumps(body).encode())
    assert decode_record(json.dumps(body | {"format_version": "1.1"}).encode()).kind == "archived"
    with pytest.raises(FormatError, match="can't be 'archived' in record 0"):
        decode_record(json.dumps(body | {"format_version": "1.1", "seq": 0}).encode())


def test_a_receipt_of_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(FormatError, match="'rank'"):
        decode_receipt(encode_receipt(Receipt(part_digest=DIGEST, rank=3, world_size=3)))
