"""The reader of foreign pickles: plain data come out, nothing is ever run, and no claim in the data costs more than the data are long."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from adopt_kit import save_dcp
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import FormatError, TierStoreError
from tierstore.format.dcp_metadata import parse_dcp_metadata
from tierstore.format.pickle_reader import Instance, read_pickle
from tierstore.format.torch_zip import parse_saved

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner) | st.tuples(inner, inner)
    ),
    max_leaves=30,
)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def refuse(module: str, name: str) -> Any:
    raise FormatError(f"{module}.{name} is not known")


def read(data: bytes, **limits: Any) -> Any:
    return read_pickle(data, "test", find=refuse, **limits)


@given(value=PLAIN, protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_values_come_out_as_pickle_itself_reads_them(value: Any, protocol: int) -> None:
    found = parse_saved(pickle.dumps(value, protocol), "test")
    assert found == value
    assert repr(found) == repr(value)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_an_error_of_ours_or_a_value(data: bytes) -> None:
    for reading in (read, parse_dcp_metadata, lambda data: parse_saved(data, "test")):
        try:
            reading(b"\x80\x02" + data)
        except TierStoreError:
            pass


@given(data=st.data())
def test_damaged_metadata_is_an_error_of_ours_or_a_value(data: st.DataObject, metadata: bytes) -> None:
    at = data.draw(st.integers(0, len(metadata) - 1))
    broken = bytearray(metadata)
    broken[at] = data.draw(st.integers(0, 255))
    try:
        parse_dcp_metadata(bytes(broken))
    except TierStoreError:
        pass


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = save_dcp({"m": {"w": torch.ones(3, 2), "n": 4}}, tmp_path_factory.mktemp("dcp") / "c")
    return (folder / ".metadata").read_bytes()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_bomb_is_refused_by_name_and_never_runs(tmp_path: Path, protocol: int) -> None:
    bomb = pickle.dumps({"a": [Bomb(tmp_path / "ran")]}, protocol)
    with pytest.raises(FormatError, match=r"system is not known"):
        read(bomb)
    with pytest.raises(FormatError, match=r"\.metadata names (posix|nt)\.system.*nothing was executed"):
        parse_dcp_metadata(bomb)
    assert isinstance(parse_saved(bomb, "test")["a"][0], Instance)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)  # noqa: S301 - the proof that it is one
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x80\x04" + b"]r" + struct.pack("<I", 0x7FFFFFFF) + b".", ""),  # a memo number costs what one number costs
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "claimed"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "claimed"),
        (b"\x80\x04\x8b" + struct.pack("<I", 1 << 20) + b"\xff" * (1 << 20) + b".", "integer of 1,048,576 bytes"),
        (b"\x80\x04" + b")" + b"\x85" * 300_000 + b"}\x94" + b"0.", ""),
        (b"\x80\x04}" + b")" + b"\x85" * 300_000 + b"Ns.", "as a key"),
        (b"\x80\x04}]Ns.", "list as a key"),
        (b"\x80\x04" + b"N" * 1001 + b".", "more than 1,000 opcodes"),
        (b"\x80\x04cos\nsystem\n.", "os.system is not known"),
        (b"\x80\x04(S'x'\nios\nsystem\n.", "opcode"),
        (b"\x80\x04\x82\x01.", "opcode"),  # extension registry
        (b"(dp0\n.", "opcode"),
        (b"\x80\x04", "malformed"),
        (b"\x80\x04u.", "malformed"),
        (b"\x80\x04NNR.", "can't be called"),
    ],
)
def test_what_a_pickle_merely_claims_costs_nothing(data: bytes, why: str) -> None:
    limits = {"max_ops": 1000} if "opcodes" in why else {}
    if not why:
        read(data)
        return
    with pytest.raises(FormatError, match=why):
        read(data, **limits)


def test_a_module_state_keeps_its_metadata_and_nothing_else() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    stream = io.BytesIO()
    pickle.dump(OrderedDict(a=1), stream, 2)
    made = OrderedDict(a=1)
    made._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    found = parse_saved(pickle.dumps(made, 2), "test")
    assert found._metadata == made._metadata == state._metadata  # type: ignore[attr-defined]
    made.other = 1  # type: ignore[attr-defined]
    with pytest.raises(FormatError, match="state for a OrderedDict"):
        parse_saved(pickle.dumps(made, 2), "test")


def test_a_name_from_a_pickle_can_t_speak_to_the_terminal() -> None:
    data = b"\x80\x02c\x1b[31mevil\nx\n)R."
    assert parse_saved(data, "test").name == r"'\x1b[31mevil.x'"
    with pytest.raises(FormatError) as error:
        parse_dcp_metadata(data)
    assert "\x1b" not in str(error.value)


class Sparse:
    """Pickles as a sparse tensor that was made of these."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_sparse_tensor, self.made_of


@pytest.mark.parametrize(
    "made_of",
    [
        ("sparse_coo", ()),
        (torch.sparse_coo, 3),
        (torch.sparse_coo, ()),
        (torch.sparse_coo, (1, 2, (3,), True)),
        (torch.sparse_csr, ((2, 2), (2, 2))),
        (torch.strided, ((2, 2),)),
    ],
)
def test_a_malformed_sparse_tensor_is_an_error_of_ours(made_of: tuple[Any, ...]) -> None:
    with pytest.raises(FormatError, match="malformed sparse tensor"):
        parse_saved(pickle.dumps(Sparse(*made_of), 2), "test")
