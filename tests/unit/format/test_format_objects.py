"""Objects: typed and lossless without pickle, or refused with the path in the state."""

from __future__ import annotations

import base64
import collections
import datetime as dt
import enum
import json
import math
import pathlib
import random
import struct
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from format_mutations import damaged
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import FormatError, IntegrityError, NotFoundError, UnsupportedTypeError, UsageError, VersionError
from tierstore.format.objects import (
    ObjectCodecs,
    Opaque,
    TensorRef,
    decode_objects,
    encode_objects,
    load_objects,
    merge_objects,
    object_ranks,
    split_objects,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray):
        layout = (a.flags.c_contiguous, a.flags.f_contiguous) == (b.flags.c_contiguous, b.flags.f_contiguous)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() and (layout or not b.flags.forc)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(k, m) and same(a[k], b[m]) for k, m in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Opaque):
        return a.tag == b.tag and same(a.value, b.value)
    return bool(a == b)


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**53, -(2**53), 2**53 + 1, -(2**53) - 1, 2**64, -(2**127), 3**3000, -(7**50_000)],
    "floats": [0.0, -0.0, 1.0, 1e300, 5e-324, 0.1, math.pi, sys.float_info.max, math.inf, -math.inf, math.nan, -math.nan],
    "nan payload": struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0],
    "complex": [1 + 2j, complex(-0.0, math.nan), complex(math.inf, -0.0)],
    "text": ["", "a", "ünï©ode 🙂", "\0\n\t", "$", "\u2028", '"\\'],
    "lone surrogates": ["\ud800", "a\udfff🙂", "\ud83d\ude42"],
    "bytes": [b"", b"\0\xff", bytes(range(256))],
    "bytearray": bytearray(b"\1\2"),
    "empty containers": [{}, [], (), set(), frozenset(), OrderedDict()],
    "nested": {"a": [({"b": ((),)},)], "c": {"d": {}}},
    "tuples": [(1,), (1, (2, (3,)))],
    "sets": [{1, 2, "a", None, (1, 2)}, frozenset({frozenset({1}), b"x"})],
    "ordered": OrderedDict([("z", 1), ("a", 2), (3, 4)]),
    "order": {"z": 1, "a": 2, "m": 3},
    "int keys": {0: "a", 1: {"step": 1}},
    "mixed keys": {"a": 1, 1: 2, (1, "x"): 3, None: 4, 2.5: 5, b"k": 6, frozenset({1}): 7, np.int64(9): 8, 1j: 9},
    "bool keys": {True: 1, False: 0},
    "dollar keys": {"$tuple": [1], "a": 2},
    "one dollar key": {"$float": "nan"},
    "surrogate keys": {"\ud800": 1},
    "ranges": [range(5), range(10, 0, -3), range(0)],
    "tensor": {"w": TensorRef("model.w"), "x": [TensorRef("ü")]},
    "opaque": Opaque("mylib.Thing", {"a": (1, 2)}),
    "python rng": random.Random(3).getstate(),
    "numpy rng": np.random.RandomState(5).get_state(),
    "numpy rng dict": np.random.RandomState(5).get_state(legacy=False),
    "numpy generators": [
        np.random.Generator(kind(7)).bit_generator.state
        for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64, np.random.MT19937)
    ],
    "numpy scalars": [
        np.float32(0.1),
        np.float16(-0.0),
        np.float64("nan"),
        np.bool_(True),
        np.int8(-1),
        np.uint64(2**64 - 1),
        np.complex64(1j),
        np.str_("ü"),
        np.str_(""),
        np.bytes_(b"ab"),
        np.datetime64("2020-01-01T00:00:00", "ns"),
        np.timedelta64(3, "D"),
        np.datetime64("NaT"),
    ],
    "numpy dtypes": [np.dtype("float32"), np.dtype(">i4"), np.dtype("U3")],
    "numpy arrays": [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3), np.int8),
        np.array(5),
        np.array(["a", "bcd"]),
        np.array([b"x", b""]),
        np.array([True, False]),
        np.arange(3, dtype=">i4"),
        np.arange(10)[::2],
        np.arange(12).reshape(3, 4).T[1:],
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.array([1 + 2j], np.complex64),
        np.array([], "U"),
        np.zeros((2, 0, 2), "S3"),
    ],
}


@pytest.mark.parametrize("case", sorted(VALUES))
def test_a_value_comes_back_with_its_type_order_and_bits(case: str) -> None:
    data = encode_objects({"v": VALUES[case]})
    assert same(decode_objects(data), {"v": VALUES[case]})
    assert encode_objects(decode_objects(data)) == data


def test_an_rng_goes_on_where_it_was() -> None:
    source = random.Random(1)
    generator = np.random.default_rng(2)
    generator.random(3, dtype=np.float32)
    state = {"python": source.getstate(), "numpy": generator.bit_generator.state}
    expected = source.random(), generator.random(4).tolist()
    read = decode_objects(encode_objects(state))
    other, fresh = random.Random(9), np.random.default_rng(9)
    other.setstate(read["python"])
    fresh.bit_generator.state = read["numpy"]
    assert (other.random(), fresh.random(4).tolist()) == expected


def test_plain_values_stay_plain_for_a_person_to_read() -> None:
    data = encode_objects({"epoch": 3, "lr": 0.001, "names": ["a", "b"], "nothing": None, "betas": (0.9, 0.99), "state": {0: {}}})
    assert json.loads(data)["tree"] == {
        "epoch": 3,
        "lr": 0.001,
        "names": ["a", "b"],
        "nothing": None,
        "betas": {"$tuple": [0.9, 0.99]},
        "state": {"$dict": [[0, {}]]},
    }


def test_arrays_that_come_back_are_writable_and_own_their_memory() -> None:
    read = decode_objects(encode_objects([np.arange(3), np.zeros(0)]))
    read[0][0] = 7
    assert read[0].tolist() == [7, 1, 2]
    assert read[1].flags.writeable


def test_a_shared_value_is_stored_at_each_place() -> None:
    shared = [1]
    assert decode_objects(encode_objects({"a": shared, "b": shared})) == {"a": [1], "b": [1]}


def test_equal_sets_have_equal_bytes() -> None:
    one, two = set([0, 8, 16]), set([16, 8, 0])  # noqa: C405 - these collide: their order is that of insertion
    assert list(one) != list(two)
    assert encode_objects(one) == encode_objects(two)


class Point(NamedTuple):
    x: int


class Colour(enum.IntEnum):
    RED = 1


class MyDict(dict):  # type: ignore[type-arg]
    pass


class MyStr(str):
    __slots__ = ()


REFUSED: dict[str, Any] = {
    "namedtuple": Point(1),
    "int enum": Colour.RED,
    "dict subclass": MyDict(),
    "str subclass": MyStr("a"),
    "defaultdict": collections.defaultdict(list),
    "counter": collections.Counter("ab"),
    "deque": collections.deque([1]),
    "datetime": dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc),
    "timedelta": dt.timedelta(1),
    "path": pathlib.PurePosixPath("/a"),
    "function": len,
    "class": int,
    "object": object(),
    "ellipsis": ...,
    "slice": slice(1, 2),
    "generator": np.random.default_rng(1),
    "memoryview": memoryview(b"a"),
    "object array": np.array([object()]),
    "structured array": np.zeros(2, [("a", "i4")]),
    "structured scalar": np.zeros(2, [("a", "i4")])[0],
    "masked array": np.ma.array([1, 2]),
    "long double": np.longdouble(1),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_not_lossless_is_refused_with_its_path(case: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        encode_objects({"optimizer": {"state": {0: [1, {"foo": REFUSED[case]}]}}})
    assert caught.value.context["path"] == "state['optimizer']['state'][0][1]['foo']"
    assert "state['optimizer']['state'][0][1]['foo']" in str(caught.value)
    assert caught.value.hint


def test_a_refused_key_is_named() -> None:
    with pytest.raises(UnsupportedTypeError, match=r"state\['a'\] key .*RED"):
        encode_objects({"a": {Colour.RED: 1}})


def test_a_cycle_and_absurd_nesting_are_refused() -> None:
    cycle: dict[str, Any] = {"a": []}
    cycle["a"].append(cycle)
    with pytest.raises(UnsupportedTypeError, match=r"state\['a'\]\[0\] contains itself"):
        encode_objects(cycle)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsupportedTypeError, match="deeper than 100"):
        encode_objects(deep)
    level: Any = 1
    for number in range(100):
        level = ({"x": level}, [level], (level,), {1: level})[number % 4]
    assert same(decode_objects(encode_objects(level)), level)


# Codecs


def codecs() -> ObjectCodecs:
    made = ObjectCodecs()
    made.register(Point, "test.Point", lambda p: {"x": p.x}, lambda v: Point(v["x"]))
    made.register(pathlib.PurePosixPath, "path", str, pathlib.PurePosixPath)
    made.register(MyDict, "test.MyDict", lambda d: list(d.items()), lambda v: MyDict(v))
    return made


def test_a_registered_type_comes_back_as_itself_nested_and_as_a_key() -> None:
    tree = {"p": [Point(3)], "d": MyDict(a=Point(2**80)), pathlib.PurePosixPath("/x"): 1}
    read = decode_objects(encode_objects(tree, codecs()), codecs())
    assert same(read["d"]["a"], Point(2**80))
    assert type(read["d"]) is MyDict
    assert read == tree


def test_without_codecs_a_tag_stays_opaque_and_writes_back_unchanged() -> None:
    data = encode_objects({"p": Point(3), pathlib.PurePosixPath("/x"): 1}, codecs())
    read = decode_objects(data)
    assert read == {"p": Opaque("test.Point", {"x": 3}), Opaque("path", "/x"): 1}
    assert encode_objects(read) == data
    assert decode_objects(data, ObjectCodecs(), lenient=True) == read
    with pytest.raises(FormatError, match=r"state\['p'\].*unknown tag '\$test.Point'"):
        decode_objects(data, ObjectCodecs())


def test_a_failing_codec_is_named_with_the_path() -> None:
    broken = ObjectCodecs()
    broken.register(Point, "test.Point", lambda p: 1 / 0, lambda v: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(UnsupportedTypeError, match=r"state\['p'\] could not be encoded by the codec 'test.Point': ZeroDivisionError"):
        encode_objects({"p": Point(1)}, broken)
    with pytest.raises(FormatError, match=r"state\['p'\] .*ZeroDivisionError"):
        decode_objects(encode_objects({"p": Point(1)}, codecs()), broken)


@pytest.mark.parametrize("tag", ["tuple", "tensor", "", "$x", "a b", "1a", "x" * 101])
def test_a_tag_that_can_not_be_is_refused(tag: str) -> None:
    with pytest.raises(UsageError):
        ObjectCodecs().register(Point, tag, str, lambda v: Point(v))
    with pytest.raises(UnsupportedTypeError):
        encode_objects(Opaque(tag, 1))


def test_a_type_or_tag_is_registered_once_and_copies_are_independent() -> None:
    one = codecs()
    two = one.copy()
    with pytest.raises(UsageError, match="already"):
        one.register(Point, "other.Point", str, lambda v: Point(v))
    with pytest.raises(UsageError, match="already"):
        one.register(Colour, "test.Point", int, Colour)
    two.register(Colour, "test.Colour", int, Colour)
    assert one.find(Colour) is None
    assert two.decode("test.Colour", 1) is Colour.RED
    with pytest.raises(FormatError, match="unknown tag"):
        one.decode("test.Colour", 1)


# Decoding from outside


def tree_of(tree: Any) -> bytes:
    return json.dumps({"format": "tierstore.objects.rank", "format_version": "1.0", "tree": tree}).encode()


def array(**changes: Any) -> dict[str, Any]:
    return {"$array": {"dtype": "<i4", "shape": [1], "order": "C", "data": base64.b64encode(bytes(4)).decode()} | changes}


MALFORMED: dict[str, tuple[Any, str]] = {
    "tag beside keys": ({"$tuple": [], "a": 1}, "beside other keys"),
    "two tags": ({"$tuple": [], "$set": []}, "beside other keys"),
    "empty tag": ({"$": 1}, "malformed tag"),
    "tuple of a number": ({"$tuple": 1}, "not a list"),
    "dict of numbers": ({"$dict": [1]}, "pairs"),
    "dict of triples": ({"$dict": [[1, 2, 3]]}, "pairs"),
    "dict key twice": ({"$dict": [[1, 2], [1.0, 3]]}, "twice"),
    "dict key list": ({"$dict": [[[], 2]]}, "can't be one"),
    "dict key array": ({"$dict": [[array(), 2]]}, "can't be one"),
    "set of lists": ({"$set": [[]]}, "can't be in one"),
    "set twice": ({"$set": [1, True]}, "twice"),
    "int text": ({"$int": "12x"}, "no tagged int"),
    "int small": ({"$int": "12"}, "no tagged int"),
    "int number": ({"$int": 12}, "without a text"),
    "int underscore": ({"$int": "1_000_000_000_000_000_000"}, "no tagged int"),
    "int long": ({"$int": "1" * 5000}, "no tagged int"),
    "float text": ({"$float": "NaN"}, "no tagged float"),
    "float bits": ({"$float": "nan:0000000000000000"}, "no tagged float"),
    "complex": ({"$complex": [1.0]}, "no complex"),
    "complex ints": ({"$complex": [1, 2]}, "no complex"),
    "range step 0": ({"$range": [0, 1, 0]}, "no range"),
    "bytes": ({"$bytes": "a"}, "no base64"),
    "bytes unicode": ({"$bytes": "ü"}, "no base64"),
    "bytes list": ({"$bytes": []}, "without a text"),
    "str": ({"$str": "/w=="}, "no tagged text"),
    "tensor": ({"$tensor": 3}, "without a text"),
    "dtype object": ({"$dtype": "|O"}, "none that is stored"),
    "dtype struct": ({"$dtype": "i4,i4"}, "none that is stored"),
    "dtype void": ({"$dtype": "|V8"}, "none that is stored"),
    "dtype longdouble": ({"$dtype": "<f16"}, "none that is stored"),
    "dtype odd": ({"$dtype": "<i3"}, "does not exist"),
    "array fields": ({"$array": {}}, "fields"),
    "array list": ({"$array": []}, "fields"),
    "array order": (array(order="K"), "do not fit"),
    "array length": (array(shape=[2]), "do not fit"),
    "array negative": (array(shape=[-1]), "absurd"),
    "array absurd": (array(shape=[1 << 62, 0], data=""), "absurd"),
    "array absurd zero": (array(shape=[1 << 61, 1 << 61, 0], data=""), "numpy refuses"),
    "array of no bytes": (array(dtype="|S0", shape=[1 << 61], data=""), "."),
    "array text": (array(dtype="<U1", data=base64.b64encode(b"\xff" * 4).decode()), "no Unicode"),
    "scalar text": ({"$scalar": {"dtype": ">U1", "data": base64.b64encode(b"\xff" * 4).decode()}}, "no Unicode"),
    "scalar length": ({"$scalar": {"dtype": "<i4", "data": ""}}, "numpy scalar of 0 bytes"),
}


@pytest.mark.parametrize("case", sorted(MALFORMED))
def test_malformed_objects_are_refused_with_their_path(case: str) -> None:
    tree, says = MALFORMED[case]
    with pytest.raises(FormatError, match=says) as caught:
        decode_objects(tree_of({"a": [tree]}))
    assert "state['a'][0]" in str(caught.value)


def test_foreign_documents_are_refused() -> None:
    for data in (b"", b"{}", b"[]", b"3", b"\xff", b'{"format":"tierstore.objects.rank"}', b"[" * 200_000):
        with pytest.raises(FormatError):
            decode_objects(data)
    with pytest.raises(FormatError, match="tree is missing"):
        decode_objects(b'{"format":"tierstore.objects.rank","format_version":"1.0"}')
    with pytest.raises(VersionError, match=r"2\.0"):
        decode_objects(tree_of(1).replace(b"1.0", b"2.0"))
    with pytest.raises(FormatError, match=r"deeper than|too deep"):
        decode_objects(tree_of(1).replace(b": 1}", b": " + b"[" * 400 + b"]" * 400 + b"}"))
    with pytest.raises(FormatError, match="split_objects"):
        decode_objects(merge_objects({0: tree_of(1)}))


# All ranks


def test_identical_ranks_are_stored_once_and_each_gets_its_own_back() -> None:
    parts = {rank: encode_objects({"rng": rank if rank == 2 else 0, "big": "x" * 10_000}) for rank in range(4)}
    merged = merge_objects(parts)
    assert len(merged) < 21_000
    assert object_ranks(merged) == {0: 0, 1: 0, 2: 1, 3: 0}
    assert {rank: split_objects(merged, rank) for rank in parts} == parts
    with pytest.raises(NotFoundError, match="no objects of rank 4: it was saved by 4 ranks"):
        split_objects(merged, 4)


def a_training_state(rank: int, stage: int = 0) -> dict[str, Any]:
    layers = range(100 * stage, 100 * stage + 100)
    return {
        "model": {f"layers.{i}.weight": TensorRef(f"layers.{i}.weight") for i in layers},
        "optim": [{"step": 3.0, "m": TensorRef(f"m.{i}"), 7: i} for i in layers],
        "rng": bytes([rank % 256]) * 64,
        "loader": {"at": rank, "seen": [1, 2]},
    }


@pytest.mark.parametrize("stages", [1, 7])
def test_what_ranks_have_in_common_is_stored_once(stages: int) -> None:
    parts = {rank: encode_objects(a_training_state(rank, rank % stages)) for rank in range(200)}
    merged = merge_objects(parts)
    assert len(merged) < stages * len(parts[0]) + 200 * 250
    document = load_objects(merged)
    assert len(document.trees) == stages
    assert {rank: document.split(rank) for rank in parts} == parts
    assert split_objects(merged, 123) == parts[123]
    assert dict(document) == {(rank,): data for rank, data in parts.items()}
    assert len(set(object_ranks(merged).values())) == 200
    assert merge_objects(parts) == merged


def test_numbers_that_only_look_equal_are_kept_apart() -> None:
    values = [1, True, 1.0, 0, -0.0, 0.0, False, None, "1", [1], [True], 12, 1.5, 10**40]
    parts = {
        rank: encode_objects({"same": ["x" * 50] * 20, "value": value, "more": {"n": [value, 1]}}) for rank, value in enumerate(values)
    }
    merged = merge_objects(parts)
    assert len(json.loads(merged)["trees"]) == 1
    assert {rank: split_objects(merged, rank) for rank in parts} == parts


@given(pick=st.data())
def test_trees_that_differ_anywhere_come_back_as_they_were(pick: st.DataObject) -> None:
    leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, -0.0, 1.0, "", "a", 'é"', "long" * 30])
    trees = st.recursive(leaves, lambda t: st.lists(t, max_size=4) | st.dictionaries(st.sampled_from("abcd"), t, max_size=4), max_leaves=12)
    base = pick.draw(trees)
    parts = {}
    for rank in range(pick.draw(st.integers(1, 6))):
        own = pick.draw(trees) if pick.draw(st.booleans()) else base
        parts[rank] = encode_objects({"same": "x" * pick.draw(st.sampled_from([0, 300])), "own": own, "list": [base, own, 1]})
    merged = merge_objects(parts)
    document = load_objects(merged)
    assert {rank: document.split(rank) for rank in parts} == parts
    assert {rank: data for ranks, data in document for rank in ranks} == parts


def test_a_rank_written_in_another_way_is_stored_whole_and_means_the_same() -> None:
    """Another version may put spaces elsewhere."""
    parts = {0: encode_objects(a_training_state(0)), 1: json.dumps(json.loads(encode_objects(a_training_state(1))), indent=1).encode()}
    document = load_objects(merge_objects(parts))
    assert len(document.trees) == 2
    assert document.split(1) == encode_objects(a_training_state(1))


@pytest.mark.parametrize("bad", ["NaN", '{"a":1,"a":1}', "9" * 60, "[1", '"\\ud800"', "1 2", "[[[[1,]]]]"])
def test_a_malformed_part_that_begins_like_another_is_refused(bad: str) -> None:
    good = encode_objects({"same": "x" * 500, "value": 0, "end": [1, 2]})
    assert good.count(b'"value":0') == 1
    with pytest.raises(FormatError):
        merge_objects({0: good, 1: good.replace(b'"value":0', b'"value":' + bad.encode())})


@pytest.mark.parametrize(
    "changes",
    [
        3,
        [3],
        [[0]],
        [[1, []]],
        [[-1, []]],
        [[True, []]],
        [[0, 3]],
        [[0, [[[], 1]]]],
        [[0, [["a", 1]]]],
        [[0, [[["x"], 1]]]],
        [[0, [[[0], 1]]]],
        [[0, [[["a", 2], 1]]]],
        [[0, [[["a", -1], 1]]]],
        [[0, [[["a", "0"], 1]]]],
        [[0, [[["a", True], 1]]]],
        [[0, [[["a", 0, 0], 1]]]],
        [[0, [[["a"], 1], [["a"], 2]]]],
        [[0, [[["a"], [3]], [["a", 0], 2]]]],
        [[0, [[["a", 0], 2], [["a"], [3]]]]],
        [[0, [[["a"] * 200, 1]]]],
    ],
)
def test_malformed_changes_are_refused(changes: Any) -> None:
    body = {"format": "tierstore.objects", "format_version": "1.0", "ranks": [[0, 0], [1, 1]], "trees": [{"a": [1, 2]}], "changes": changes}
    with pytest.raises(FormatError):
        split_objects(json.dumps(body).encode(), 1)


def test_reading_one_rank_leaves_the_others_as_they_are() -> None:
    parts = {rank: encode_objects(a_training_state(rank)) for rank in range(3)}
    document = load_objects(merge_objects(parts))
    for _ in range(2):
        assert {rank: document.split(rank) for rank in (2, 0, 1)} == parts


def test_merging_nothing_or_malformed_parts_is_refused() -> None:
    with pytest.raises(UsageError, match="no rank"):
        merge_objects({})
    with pytest.raises(FormatError):
        merge_objects({0: b"{}"})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"ranks": [], "trees": []},
        {"ranks": [[0, 1]], "trees": [1]},
        {"ranks": [[0, 0], [0, 0]], "trees": [1]},
        {"ranks": [[-1, 0]], "trees": [1]},
        {"ranks": [[0]], "trees": [1]},
        {"ranks": [[True, 0]], "trees": [1]},
        {"ranks": 3, "trees": [1]},
    ],
)
def test_a_malformed_table_of_ranks_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        split_objects(json.dumps({"format": "tierstore.objects", "format_version": "1.0"} | body).encode(), 0)


KEYS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.tuples(st.integers(), st.text(max_size=3))
)
LEAVES = (
    KEYS
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=20).map(bytearray)
    | st.text(st.characters(codec=None), max_size=6)
    | st.integers(-(2**2000), 2**2000)
    | st.sets(KEYS, max_size=4)
    | st.frozensets(KEYS, max_size=4)
    | st.builds(TensorRef, st.text(max_size=5))
    | st.floats(width=32).map(np.float32)
    | st.lists(st.integers(-128, 127), max_size=6).map(lambda v: np.array(v, np.int8))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4).map(OrderedDict)
        | st.builds(Opaque, st.sampled_from(["a.B", "torch.Size"]), inner)
    ),
    max_leaves=12,
)


@given(tree=TREES)
def test_any_tree_comes_back_exactly(tree: Any) -> None:
    data = encode_objects(tree)
    read = decode_objects(data)
    assert same(read, tree)
    assert encode_objects(read) == data
    assert split_objects(merge_objects({3: data}), 3) == data


SEED_CASES = ("ints", "floats", "complex", "bytes", "sets", "mixed keys", "tensor", "opaque", "ranges", "numpy arrays", "numpy scalars")
SEED = encode_objects({case: VALUES[case][:6] if case == "ints" else VALUES[case] for case in SEED_CASES})
MERGED = merge_objects(
    {0: encode_objects({"a": (1, 2), "b": ["x"] * 20}), 1: encode_objects([b"x"]), 2: encode_objects({"a": (1, 3), "b": ["x"] * 20})}
)


@given(data=damaged(SEED))
def test_damaged_objects_are_answered_with_an_integrity_error_only(data: bytes) -> None:
    try:
        encode_objects(decode_objects(data))
    except IntegrityError:
        pass


@given(data=damaged(MERGED))
def test_damaged_objects_of_all_ranks_are_answered_with_an_integrity_error_only(data: bytes) -> None:
    try:
        for rank in object_ranks(data):
            decode_objects(split_objects(data, rank))
    except IntegrityError:
        pass
