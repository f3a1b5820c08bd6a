"""Renaming rules: what they make equals what torch makes, slices of it read only what they need, and every mistake names its rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_kit import numbers, saved

from tierstore.errors import NotFoundError, UsageError
from tierstore.state.renaming import parse_rules
from tierstore.testing.equality import assert_same_state


def renamed(names: list[str], rules: Any) -> dict[str, str]:
    return parse_rules(rules).rename(names)


def test_rules_apply_in_order_each_to_what_the_ones_before_made() -> None:
    rules = [
        {"match": r"model\.(.*)", "to": r"\1"},
        {"match": r"(\w+)\.w", "to": r"layers.\1.weight"},
        {"match": r".*\.freq", "drop": True},
    ]
    names = ["model.a.w", "model.b.w", "model.b.freq", "step"]
    assert renamed(names, rules) == {"layers.a.weight": "model.a.w", "layers.b.weight": "model.b.w", "step": "step"}


def test_a_name_is_matched_as_a_whole() -> None:
    assert renamed(["w", "w2"], [{"match": "w", "to": "v"}]) == {"v": "w", "w2": "w2"}


def test_rules_come_from_a_file_and_mistakes_name_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("others: drop\nrules:\n  - {match: 'a\\.(?P<rest>.*)', to: '\\g<rest>'}\n  - match: b\n    to: c\n")
    assert renamed(["a.x", "b", "y"], path) == {"x": "a.x", "c": "b"}
    path.write_text("rules:\n  - {match: a, to: b}\n  - {match: c, too: d}\n")
    with pytest.raises(UsageError, match="rule 2 in line 3: 'too' is no key"):
        parse_rules(path)
    path.write_text("rules: [{match: a, to: b")
    with pytest.raises(UsageError, match="not valid YAML"):
        parse_rules(str(path))
    with pytest.raises(NotFoundError, match=r"absent\.yaml can't be read"):
        parse_rules(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"match": "nothing", "to": "x"}], "rule 1 .* matches no tensor"),
        ([{"match": "(a|b)", "to": "x"}], "'a' and 'b' would both be called 'x'"),
        ([{"match": "a", "to": "b"}], "'a' and 'b' would both be called 'b'"),
        ({"rules": [{"match": "a", "to": "x"}], "others": "error"}, "1 tensors are matched by no rule, e.g. 'b'"),
        ([{"match": "a"}], "rule 1: it does nothing"),
        ([{"match": "a(", "to": "x"}], "is no regular expression"),
        ([{"match": "a", "to": r"\1"}], "invalid group reference"),
        ([{"match": "a", "to": "x", "drop": True}], "a dropped tensor needs no name"),
        ([{"match": "a", "to": ["x", "y"], "split": {"axis": 0}, "fuse": {"axis": 0}}], "both split and fuse"),
        ([{"match": "a", "to": ["x", "y"], "split": {"sizes": [1]}}], "makes 1 parts, and `to` has 2 names"),
        ([{"match": "a", "to": "x{i}", "split": {"axis": 0}}], "nothing says into how many parts"),
        ([{"match": "a", "to": ["x", "y"], "split": {"sizes": [1, 0]}}], "sizes is"),
        ([{"match": "a", "to": "x", "fuse": {"axis": 0}}], "nothing says which tensor is which member"),
        ([{"match": "a", "to": "x", "fuse": {"by": 1}}], "by is 1"),
        ([{"match": ["a", "b"], "to": "x"}], "match is a list"),
        ([{"match": "a", "permute": [0, 2]}], "permute is"),
        ([{"match": "a", "permute": [1, 0], "transpose": True}], "both transpose and permute"),
        ([{"match": "(a)(.*)", "to": r"\2"}], "gives 'a' an empty name"),
        ("rules.txt.that.is.not", "can't be read"),
        ({"rule": []}, "'rule' is no key"),
        ({"rules": 3}, "no list of rules"),
        ({"rules": [], "others": "perhaps"}, "others is 'perhaps'"),
        ([3], "3 is no rule"),
    ],
)
def test_a_mistake_is_named_with_its_rule_before_anything_is_read(rules: Any, message: str) -> None:
    with pytest.raises((UsageError, NotFoundError), match=message):
        renamed(["a", "b"], rules)


def test_what_changes_values_is_refused_where_only_names_can_change() -> None:
    with pytest.raises(UsageError, match=r"rule 2 .* changes tensors' values"):
        renamed(["a", "b"], [{"match": "a", "to": "x"}, {"match": "b", "transpose": True}])


def test_an_optional_rule_may_match_nothing() -> None:
    assert renamed(["a"], [{"match": "b", "drop": True, "optional": True}]) == {"a": "a"}


HEADS, WIDTH, HIDDEN = 3, 4, 10


def heads_apart(fused: torch.Tensor, number: int) -> torch.Tensor:
    """GPT-NeoX's layout: [heads, 3, width, hidden]."""
    return fused.view(HEADS, 3, WIDTH, HIDDEN)[:, number].reshape(HEADS * WIDTH, HIDDEN)


def grouped(fused: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Megatron's grouped queries: [groups, (queries + 2) * width, hidden]."""
    return fused.view(HEADS, 12, HIDDEN)[:, begin:end].reshape(-1, HIDDEN)


QKV = numbers(HEADS * 3 * WIDTH, HIDDEN)
CASES: list[tuple[str, dict[str, torch.Tensor], list[dict[str, Any]], dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]]]] = [
    ("transpose", {"w": numbers(5, 7)}, [{"match": "w", "transpose": True}], {"w": lambda s: s["w"].T}),
    ("permute", {"w": numbers(2, 3, 4)}, [{"match": "w", "to": "v", "permute": [2, 0, 1]}], {"v": lambda s: s["w"].permute(2, 0, 1)}),
    (
        "split in equal parts",
        {"w": numbers(6, 4)},
        [{"match": "w", "to": ["a", "b"], "split": {"axis": 1}}],
        {"a": lambda s: s["w"][:, :2], "b": lambda s: s["w"][:, 2:]},
    ),
    (
        "split by sizes, negative axis, numbered",
        {"w": numbers(6, 5)},
        [{"match": "w", "to": "w.{i}", "split": {"axis": -1, "sizes": [1, 4]}}],
        {"w.0": lambda s: s["w"][:, :1], "w.1": lambda s: s["w"][:, 1:]},
    ),
    (
        "fused query, key and value, head by head",
        {"qkv": QKV},
        [{"match": "qkv", "to": ["q", "k", "v"], "split": {"axis": 0, "heads": HEADS}}],
        {name: lambda s, i=i: heads_apart(s["qkv"], i) for i, name in enumerate("qkv")},
    ),
    (
        "grouped queries, head by head, by sizes",
        {"qkv": QKV},
        [{"match": "qkv", "to": ["q", "k", "v"], "split": {"heads": HEADS, "sizes": [8, 2, 2]}}],
        {"q": lambda s: grouped(s["qkv"], 0, 8), "k": lambda s: grouped(s["qkv"], 8, 10), "v": lambda s: grouped(s["qkv"], 10, 12)},
    ),
    (
        "query, key and value woven together, and apart again",
        {"q": numbers(24, 5), "k": numbers(6, 5, start=500), "v": numbers(6, 5, start=900)},
        [
            {"match": ["q", "k", "v"], "to": "qkv", "fuse": {"heads": HEADS}},
            {"match": "qkv", "to": ["q", "k", "v"], "split": {"heads": HEADS, "sizes": [8, 2, 2]}},
        ],
        {name: lambda s, name=name: s[name] for name in "qkv"},
    ),
    (
        "fuse along an axis, patterns give the order",
        {name: numbers(2, 3, start=20 * i) for i, name in enumerate(("l.0.gate", "l.0.up", "l.1.up", "l.1.gate"))},
        [{"match": [r"l\.(\d)\.gate", r"l\.(\d)\.up"], "to": r"l.\1.gate_up", "fuse": {"axis": 0}}],
        {f"l.{i}.gate_up": lambda s, i=i: torch.cat([s[f"l.{i}.gate"], s[f"l.{i}.up"]]) for i in range(2)},
    ),
    (
        "experts stacked by their numbers, transposed",
        {f"e.{i}.w": numbers(3, 2, start=10 * i) for i in range(11)},
        [{"match": r"e\.(\d+)\.w", "to": "experts", "fuse": {"stack": True, "by": 1}, "permute": [0, 2, 1]}],
        {"experts": lambda s: torch.stack([s[f"e.{i}.w"].T for i in range(11)])},
    ),
    (
        "experts unstacked",
        {"experts": numbers(3, 4, 2)},
        [{"match": "experts", "to": "e.{i}.w", "split": {"axis": 1, "unstack": True}}],
        {f"e.{i}.w": lambda s, i=i: s["experts"][:, i] for i in range(4)},
    ),
    (
        "scalars stacked",
        {"s.0": torch.tensor(1.5), "s.1": torch.tensor(2.5)},
        [{"match": r"s\.(\d)", "to": "s", "fuse": {"stack": True, "by": 1}}],
        {"s": lambda s: torch.tensor([1.5, 2.5])},
    ),
    (
        "a vector unstacked",
        {"v": numbers(3)},
        [{"match": "v", "to": "s.{i}", "split": {"unstack": True}}],
        {f"s.{i}": lambda s, i=i: torch.tensor(float(i)) for i in range(3)},
    ),
]


@pytest.mark.parametrize(("state", "rules", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_rules_make_is_what_torch_makes(tmp_path: Path, state: dict[str, Any], rules: Any, wanted: dict[str, Any]) -> None:
    with saved(tmp_path, state) as checkpoint:
        made = checkpoint.renamed(rules)
        assert set(made) == set(wanted)
        for name, make in wanted.items():
            truth = make(state)
            assert made[name].shape == truth.shape
            assert torch.equal(made[name].full(), truth), name
            for axis in range(truth.ndim):  # slices of every axis, with steps
                key = (*[slice(None)] * axis, slice(1, None, 2))
                assert torch.equal(made[name][key], truth[key]), (name, key)
        into = {name: torch.zeros_like(make(state)) for name, make in wanted.items()}
        made.load(into)
        assert_same_state(into, {name: make(state).contiguous() for name, make in wanted.items()})
        assert_same_state(made.state(), {name: make(state).contiguous() for name, make in wanted.items()})


def test_rules_of_rules_and_a_choice_before_them(tmp_path: Path) -> None:
    state = {"model": {"a": numbers(4, 2), "b": numbers(4, 2, start=50)}, "optim": {"a": numbers(4, 2, start=90)}, "step": 3}
    with saved(tmp_path, state) as checkpoint:
        made = checkpoint.renamed([{"match": ["a", "b"], "to": "ab", "fuse": {"axis": 1}}], strip="model.")
        again = made.renamed([{"match": "ab", "transpose": True}])
        assert list(again) == ["ab"]
        assert torch.equal(again["ab"].full(), torch.cat([state["model"]["a"], state["model"]["b"]], 1).T)
        assert torch.equal(again["ab"][1:3, 2:], torch.cat([state["model"]["a"], state["model"]["b"]], 1).T[1:3, 2:])
        with pytest.raises(NotFoundError, match="no tensor 'a'"):
            made["a"]
        with pytest.raises(UsageError, match=r"'optim\.a' is chosen and does not begin with 'model\.'"):
            checkpoint.renamed([], include=("*.a",), strip="model.")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"match": r"e\.(\d)", "to": "e", "fuse": {"stack": True, "by": 1}}], r"'e' lacks its member 1; there are 'e\.0', 'e\.2'"),
        ([{"match": [r"(\w)\.0", r"(\w)\.1"], "to": r"\1", "fuse": {"axis": 0}}], r"'e' lacks its member '\(\\\\w\)\\\\.1'"),
        ([{"match": r"(e)\.(\d)", "to": r"\1", "fuse": {"by": 1}}], "is 'e', not the member's number"),
        ([{"match": r"e\.(\d)", "to": "e", "fuse": {"by": 1, "parts": 1}}], "has more members than 1"),
        ([{"match": ["e.*", r"e\.2"], "to": "e", "fuse": {"axis": 0}}], r"'e\.2' is matched by two of its patterns"),
        ([{"match": r"e\..", "to": "e{i}", "split": {"parts": 3}}], r"axis 0 of shape \[4, 2\] is not 3 equal parts"),
        ([{"match": r"e\.0", "to": ["a", "b"], "split": {"sizes": [1, 2]}}], "add up to 3, but axis 0"),
        ([{"match": r"e\.0", "to": ["a", "b"], "split": {"axis": 2}}], "has no axis 2"),
        ([{"match": r"e\.0", "to": ["a", "b"], "split": {"heads": 3}}], "has no 3 equal heads"),
        ([{"match": r"e\.0", "permute": [0, 1, 2]}], "has not 3 axes to permute"),
        ([{"match": [r"e\.0", "h"], "to": "x", "fuse": {"axis": 0}}], "a float32 and a float16 tensor can't be one"),
        ([{"match": [r"e\.0", "o"], "to": "x", "fuse": {"axis": 0}}], r"shapes \[4, 2\] and \[4, 3\] can't be joined along axis 0"),
        ([{"match": [r"e\.0", "o"], "to": "x", "fuse": {"stack": True}}], "can't be stacked"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named_with_rule_and_tensor(tmp_path: Path, rules: Any, message: str) -> None:
    state = {"e.0": numbers(4, 2), "e.2": numbers(4, 2), "h": numbers(4, 2, dtype=torch.float16), "o": numbers(4, 3)}
    with saved(tmp_path, state) as checkpoint, pytest.raises(UsageError, match=message) as caught:
        checkpoint.renamed(rules)
    assert "rule 1" in str(caught.value)


def test_a_slice_of_a_renamed_tensor_reads_only_what_it_needs(tmp_path: Path) -> None:
    state = {"l.0.q": torch.rand(4096, 1024), "l.0.k": torch.rand(4096, 1024)}
    with saved(tmp_path, state) as checkpoint:
        made = checkpoint.renamed([{"match": [r"(.*)\.q", r"(.*)\.k"], "to": r"\1.qk", "fuse": {"axis": 0}}])
        tensor = made["l.0.qk"]
        before = checkpoint.replica.bytes_fetched.total()
        assert torch.equal(tensor[5000:5512], state["l.0.k"][904:1416])
        assert checkpoint.replica.bytes_fetched.total() - before <= (2 << 20) + (2 << 20)  # and a block per end
