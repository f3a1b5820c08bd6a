"""Loading into what the caller has: in place, strict by default, nothing changed on a mismatch (CASES 59 to 61, 68, 69)."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from state_kit import ImageReader, run, staged

from tierstore.errors import IncompleteError, IntegrityError, NotFoundError, StateMismatchError, UnsupportedTypeError, UsageError
from tierstore.format.index import Index, TensorEntry
from tierstore.state.image import ImagePool
from tierstore.state.load import LoadOptions, load_state
from tierstore.state.stage import stage
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.reads import Want

Point = namedtuple("Point", "x y")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return net, optimizer


def mismatch(reader: ImageReader, into: Any, **options: Any) -> StateMismatchError:
    with pytest.raises(StateMismatchError) as caught:
        load_state(reader, run, into=into, options=LoadOptions(**options))
    assert reader.wants == []
    return caught.value


# ---- in place


def test_module_and_optimizer_are_filled_in_place() -> None:
    net, optimizer = trained()
    reader = staged({"model": net.state_dict(), "optim": optimizer.state_dict(), "step": 7, "best": {"loss": 0.5}})
    other, other_optimizer = trained()
    into = {"model": other.state_dict(), "optim": other_optimizer.state_dict(), "step": 0, "best": {"loss": 9.0}}
    identity = {name: (id(p), p.data_ptr()) for name, p in other.named_parameters()}
    loaded = load_state(reader, run, into=into)
    assert loaded is into
    assert_same_state(loaded, {"model": net.state_dict(), "optim": optimizer.state_dict(), "step": 7, "best": {"loss": 0.5}})
    assert {name: (id(p), p.data_ptr()) for name, p in other.named_parameters()} == identity
    assert_same_state(dict(other.named_parameters()), dict(net.named_parameters()))
    assert_same_state(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_leaves_that_require_grad_are_filled_without_autograd() -> None:
    leaf, parameter = torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(3))
    load_state(staged({"leaf": torch.ones(3), "parameter": torch.ones(3)}), run, into={"leaf": leaf, "parameter": parameter})
    for tensor in (leaf, parameter):
        assert tensor.is_leaf
        assert tensor.requires_grad
        assert tensor.grad_fn is None
        assert torch.equal(tensor, torch.ones(3))


def test_contiguous_targets_are_read_into_directly_and_need_no_scratch() -> None:
    state = {"w": torch.randn(300, 400), "b": torch.randn(7)}
    reader = staged(state)
    into = {"w": torch.empty(300, 400), "b": torch.empty(7)}
    load_state(reader, run, into=into)
    assert_same_state(into, state)
    assert [type(want) for want in reader.wants] == [Want] * 2
    assert reader.calls == 1


@pytest.mark.parametrize("scratch", [64, 1000, 64 << 20])
def test_strided_targets_are_gathered_from_pieces_of_bounded_length(monkeypatch: pytest.MonkeyPatch, scratch: int) -> None:
    monkeypatch.setattr("tierstore.state.boxes.SPAN_NBYTES", scratch)
    state = {"t": torch.randn(40, 30), "s": torch.randn(50), "c": torch.randn(2, 3, 8, 8), "z": torch.randn(20, 2, dtype=torch.complex128)}
    into = {
        "t": torch.zeros(30, 40).t(),
        "s": torch.zeros(150)[::3],
        "c": torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "z": torch.zeros(2, 20, dtype=torch.complex128).t(),
    }
    strides = {name: tensor.stride() for name, tensor in into.items()}
    load_state(staged(state), run, into=into)
    assert_same_state(into, state)
    assert {name: tensor.stride() for name, tensor in into.items()} == strides


def test_inference_tensors_are_filled_whoever_delivers() -> None:
    with torch.inference_mode():
        into = {"t": torch.zeros(30, 40).t(), "b": torch.zeros(5, dtype=torch.bfloat16)}
    state = {"t": torch.randn(40, 30), "b": torch.arange(5.0)}
    with torch.inference_mode():
        load_state(staged(state), run, into=into, options=LoadOptions(dtype="cast"))
    assert torch.equal(into["t"], state["t"])
    assert torch.equal(into["b"].float(), state["b"])


def test_a_conjugate_target_takes_the_values_it_shows() -> None:
    base = torch.zeros(3, dtype=torch.complex64)
    load_state(staged({"c": torch.tensor([1 + 2j, 3j, 4])}), run, into={"c": base.conj()})
    assert torch.equal(base, torch.tensor([1 - 2j, -3j, 4]))


def test_values_beside_tensors_are_replaced_in_any_container() -> None:
    stored = {"l": [torch.ones(1), 5, {"x": "new"}], "t": (torch.ones(1), 6), "p": [1, 2, 3], "n": {1: (torch.ones(1),)}}
    tensors = [torch.zeros(1) for _ in range(3)]
    into: dict[str, Any] = {"l": [tensors[0], 0, {"x": "old"}], "t": (tensors[1], 0), "p": [], "n": {1: (tensors[2],)}}
    inner, nested = into["l"], into["n"][1]
    loaded = load_state(staged(stored), run, into=into)
    assert_same_state(loaded, stored)
    assert loaded["l"] is inner
    assert loaded["l"][0] is tensors[0]
    assert loaded["t"][0] is tensors[1]
    assert loaded["n"][1] is nested


def test_a_named_tuple_in_into_keeps_its_type() -> None:
    into = {"p": Point(torch.zeros(1), 0)}
    load_state(staged({"p": (torch.ones(1), 4)}), run, into=into)
    assert type(into["p"]) is Point
    assert into["p"].y == 4
    assert into["p"].x == 1


def test_the_root_may_be_a_tensor_a_list_or_a_tuple() -> None:
    target = torch.zeros(3)
    assert load_state(staged(torch.ones(3)), run, into=target) is target
    assert torch.equal(target, torch.ones(3))
    row = [torch.zeros(2), 0]
    assert load_state(staged([torch.ones(2), 8]), run, into=row) is row
    assert row[1] == 8
    pair = load_state(staged((torch.ones(2), 8)), run, into=(torch.zeros(2), 0))
    assert pair[1] == 8


def test_none_takes_what_is_stored_freshly_loaded() -> None:
    net, optimizer = trained()
    reader = staged({"model": net.state_dict(), "optim": optimizer.state_dict()})
    loaded = load_state(reader, run, into={"model": model().state_dict(), "optim": None})
    assert_same_state(loaded["optim"], optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_sparse_target_is_filled_in_place_whatever_it_held() -> None:
    target = torch.sparse_coo_tensor(size=(3, 3))
    loaded = load_state(staged({"s": torch.eye(3).to_sparse()}), run, into={"s": target})
    assert loaded["s"] is target
    assert torch.equal(target.to_dense(), torch.eye(3))


def test_tensors_tied_in_into_are_read_once() -> None:
    weight = torch.randn(50, 50)
    target = torch.nn.Parameter(torch.zeros(50, 50))
    reader = staged({"a": weight, "b": weight})
    load_state(reader, run, into={"a": target, "b": target})
    assert torch.equal(target, weight)
    assert reader.nbytes_read == weight.nbytes


def test_one_target_for_two_equal_copies_is_filled_and_for_different_ones_refused() -> None:
    weight = torch.randn(50, 50)
    target = torch.zeros(50, 50)
    load_state(staged({"a": weight, "b": weight.clone()}), run, into={"a": target, "b": target})
    assert torch.equal(target, weight)
    target.zero_()
    with pytest.raises(StateMismatchError, match="two different ones: 'a' and 'b'"):
        load_state(staged({"a": weight, "b": weight + 1}), run, into={"a": target, "b": target})
    assert not target.any()


def test_untied_targets_of_tied_tensors_each_get_the_values() -> None:
    weight = torch.randn(5)
    into = {"a": torch.zeros(5), "b": torch.zeros(5), "v": torch.zeros(2)}
    load_state(staged({"a": weight, "b": weight, "v": weight[1:3]}), run, into=into)
    assert_same_state(into, {"a": weight, "b": weight, "v": weight[1:3]})


@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")])
def test_a_further_name_of_a_tied_tensor_is_not_unexpected(order: tuple[str, str]) -> None:
    weight = torch.randn(4)
    into = {"z": {"embed": torch.zeros(4)}}
    stored = {"a": {"head": weight}, "z": {"embed": weight}} if order[0] == "head" else {"z": {"embed": weight}, "a": {"head": weight}}
    load_state(staged(stored), run, into=into)
    assert torch.equal(into["z"]["embed"], weight)


# ---- strict


def test_every_difference_is_in_one_error_with_the_nearest_names_and_nothing_changes() -> None:
    reader = staged({"m": {"w": torch.ones(2), "layers.0.bias": torch.ones(3), "d": torch.ones(2), "x": torch.ones(1)}, "step": 3})
    into = {
        "m": {"w": torch.zeros(9), "layers.0.bais": torch.zeros(3), "d": torch.zeros(2, dtype=torch.bfloat16), "x": torch.zeros(1)},
        "other": 0,
    }
    error = mismatch(reader, into)
    assert error.context == {
        "missing": ("m.layers.0.bais", "other"),
        "unexpected": ("step", "m.layers.0.bias"),
        "shape": ("m.w",),
        "dtype": ("m.d",),
        "kind": (),
    }
    assert "nearest stored: m.layers.0.bias" in error.message
    assert "[9] in `into`, [2] stored" in error.message
    assert "is bfloat16 in `into`, float32 stored" in error.message
    assert not into["m"]["x"].any()
    assert into["other"] == 0


def test_a_long_list_of_differences_is_cut() -> None:
    error = mismatch(staged({str(i): torch.ones(1) for i in range(100)}), {"a": {str(i): torch.ones(1) for i in range(100)}})
    assert error.message.count("\n") == 21
    assert "180 more" in error.message
    assert len(error.context["missing"]) == 100


@pytest.mark.parametrize("options", [{}, {"unexpected": "ignore"}, {"missing": "keep", "unexpected": "ignore"}])
def test_an_empty_target_is_an_error_and_not_silence(options: Any) -> None:
    mismatch(staged({"w": torch.ones(2)}), {}, **options)
    mismatch(staged({"optim": {"state": {0: torch.ones(2)}}}), {"optim": {"state": {}}}, **options)


def test_nothing_into_nothing_is_fine() -> None:
    assert load_state(staged({}), run, into={}) == {}


def test_an_optimizer_that_has_not_stepped_is_told_what_to_do() -> None:
    optimizer = trained()[1]
    fresh = torch.optim.AdamW(model().parameters(), lr=0.1)
    error = mismatch(staged({"optim": optimizer.state_dict()}), {"optim": fresh.state_dict()})
    assert "optim.state.0.exp_avg" in error.message
    assert "None in `into`" in error.hint


def test_a_missing_optimizer_entry_is_named_and_can_be_allowed_by_pattern() -> None:
    optimizer = trained()[1]
    stored = optimizer.state_dict()
    del stored["state"][0]["exp_avg"]
    reader = staged({"optim": stored})
    target = trained()[1].state_dict()
    before = target["state"][0]["exp_avg"].clone()
    assert mismatch(reader, {"optim": target}).context["missing"] == ("optim.state.0.exp_avg",)
    load_state(reader, run, into={"optim": target}, options=LoadOptions(allow_missing=("optim.state.*.exp_avg",)))
    assert torch.equal(target["state"][0]["exp_avg"], before)
    assert torch.equal(target["state"][0]["exp_avg_sq"], optimizer.state_dict()["state"][0]["exp_avg_sq"])


@pytest.mark.parametrize(("missing", "unexpected"), list(product(("error", "keep"), ("error", "ignore"))))
def test_the_strictness_matrix(missing: Any, unexpected: Any) -> None:
    options = LoadOptions(missing=missing, unexpected=unexpected)
    lacks = {"w": torch.zeros(1), "extra": torch.zeros(1), "k": 1}
    has_less = {"w": torch.zeros(1)}
    full = {"w": torch.ones(1), "v": torch.ones(1)}
    for into, ok in ((has_less, unexpected == "ignore"), (lacks, missing == "keep" and unexpected == "ignore")):
        reader = staged(full)
        if not ok:
            mismatch(reader, into, missing=missing, unexpected=unexpected)
            assert into["w"] == 0
            continue
        load_state(reader, run, into=into, options=options)
        assert into["w"] == 1
        assert "v" not in into
    assert lacks["extra"] == 0
    reader = staged({"w": torch.ones(1)})
    if missing == "error":
        assert set(mismatch(reader, lacks, missing=missing, unexpected=unexpected).context["missing"]) == {"extra", "k"}
    else:
        load_state(reader, run, into=lacks, options=options)
        assert lacks["k"] == 1


def test_unexpected_entries_can_be_allowed_by_pattern() -> None:
    reader = staged({"w": torch.ones(1), "a.lora_A": torch.ones(1), "b": {"lora_B": torch.ones(1)}})
    into = {"w": torch.zeros(1)}
    load_state(reader, run, into=into, options=LoadOptions(allow_unexpected=("*lora_*",)))
    assert into["w"] == 1


def test_a_wrong_shape_can_be_skipped() -> None:
    into = {"head": torch.zeros(3), "w": torch.zeros(2)}
    load_state(staged({"head": torch.ones(5), "w": torch.ones(2)}), run, into=into, options=LoadOptions(shape="skip"))
    assert_same_state(into, {"head": torch.zeros(3), "w": torch.ones(2)})


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.float32, torch.bfloat16), (torch.int64, torch.float16), (torch.float8_e4m3fn, torch.float32)]
)
def test_a_wrong_dtype_is_refused_unless_cast_is_asked_for(stored: torch.dtype, wanted: torch.dtype) -> None:
    values = torch.tensor([1.0, -2.0, 3.0]).to(stored)
    into = {"w": torch.zeros(3, dtype=wanted)}
    assert mismatch(staged({"w": values}), into).context["dtype"] == ("w",)
    load_state(staged({"w": values}), run, into=into, options=LoadOptions(dtype="cast"))
    assert_same_state(into, {"w": values.to(wanted)})


def test_a_cast_that_torch_has_not_is_refused_before_anything_is_read() -> None:
    into = {"w": torch.zeros(3), "v": torch.zeros(1)}
    error = mismatch(staged({"w": torch.empty(3, dtype=torch.float4_e2m1fn_x2), "v": torch.ones(1)}), into, dtype="cast")
    assert "can't convert" in error.message
    assert into["v"] == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.ones(1), 5),
        (5, torch.ones(1)),
        ({"a": torch.ones(1)}, torch.ones(1)),
        (torch.ones(1), {"a": torch.ones(1)}),
        ([torch.ones(1)], {"a": torch.ones(1)}),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (torch.eye(2), torch.eye(2).to_sparse()),
        (None, torch.ones(1)),
    ],
)
def test_another_kind_of_thing_is_always_an_error(stored: Any, wanted: Any) -> None:
    reader = staged({"x": stored, "w": torch.ones(1)})
    error = mismatch(reader, {"x": wanted, "w": torch.ones(1)}, missing="keep", unexpected="ignore", shape="skip", dtype="cast")
    assert error.context["kind"] == ("x",)


def test_targets_that_cannot_be_filled_are_refused_by_place() -> None:
    reader = staged({"w": torch.ones(4)})
    with pytest.raises(UnsupportedTypeError, match=r"into\['w'\] is on the meta device"):
        load_state(reader, run, into={"w": torch.empty(4, device="meta")})
    assert "expanded" in mismatch(reader, {"w": torch.zeros(1).expand(4)}).message


def test_into_must_be_a_state() -> None:
    with pytest.raises(UsageError, match=r"state_dict\(\)"):
        load_state(staged({}), run, into=torch.nn.Linear(1, 1))


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="missing='maybe'"):
        LoadOptions(missing="maybe")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"allow_missing='\*'"):
        LoadOptions(allow_missing="*")  # type: ignore[arg-type]


# ---- parts


def test_names_select_places_of_into() -> None:
    net, optimizer = trained()
    reader = staged({"model": net.state_dict(), "optim": optimizer.state_dict(), "step": 3})
    into = {"model": model().state_dict(), "step": 0}
    load_state(reader, run, into=into, names=["model.*"])
    assert_same_state(into, {"model": net.state_dict(), "step": 0})
    with pytest.raises(StateMismatchError, match=r"model\.9\.w"):
        load_state(reader, run, into={"model": {"9.w": torch.ones(1)}}, names=["model.9*"])


def test_names_without_into_give_a_flat_dict() -> None:
    reader = staged({"a": {"x": torch.ones(1), "y": torch.zeros(1)}, "b": torch.ones(2)})
    assert_same_state(load_state(reader, run, names=["a.*"]), {"a.x": torch.ones(1), "a.y": torch.zeros(1)})
    assert reader.nbytes_read == 8
    with pytest.raises(NotFoundError, match="no tensor of the checkpoint matches"):
        load_state(reader, run, names=["c*"])


def test_a_flat_checkpoint_fills_a_nested_state_by_name() -> None:
    reader = staged({"model.w": torch.ones(2), "model.b": torch.zeros(1), "optim.0.step": torch.ones(())})
    into = {"model": {"w": torch.zeros(2), "b": torch.ones(1)}, "optim": {0: {"step": torch.zeros(())}}}
    load_state(reader, run, into=into)
    assert_same_state(into, {"model": {"w": torch.ones(2), "b": torch.zeros(1)}, "optim": {0: {"step": torch.ones(())}}})
    reader.wants.clear()
    error = mismatch(reader, {"model": {"w": torch.zeros(2), "c": torch.ones(1)}})
    assert error.context["missing"] == ("model.c",)
    assert error.context["unexpected"] == ("model.b", "optim.0.step")


# ---- damage


class Lacking(ImageReader):
    """A checkpoint whose index lost an extent or a tensor."""

    def __init__(self, *args: Any, lost: str, keep: int) -> None:
        super().__init__(*args)
        real = self._index
        entry = real.find(lost)
        cut = TensorEntry(name=entry.name, dtype=entry.dtype, shape=entry.shape, extents=entry.extents[:keep])

        class Patched(Index):
            def find(self, name: str, box: Sequence[range] | None = None) -> TensorEntry:
                if name == lost and not keep:
                    raise NotFoundError("gone")
                return cut if name == lost else real.find(name)

        self._index = Patched(columns=real.columns, block_nbytes=real.block_nbytes)


@pytest.mark.parametrize("into", [False, True])
def test_a_tensor_that_the_index_lost_is_damage_and_not_a_mismatch(into: bool) -> None:
    pool = ImagePool(None, max_nbytes=1 << 20)
    reader = Lacking([stage({"w": torch.ones(3)}, pool=pool)], lost="w", keep=0)
    with pytest.raises(IncompleteError, match="its index does not"):
        load_state(reader, run, into={"w": torch.zeros(3)} if into else None)


def test_an_error_while_reading_reaches_the_caller() -> None:
    reader = staged({"w": torch.ones(3)})

    async def fail(wants: Any) -> None:
        raise IntegrityError("no tier has it")

    reader.read = fail  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="no tier has it"):
        load_state(reader, run)
