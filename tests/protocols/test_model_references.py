"""The model of references between checkpoints' files: the protocol holds in every state, and none of its checks can be left out."""

from __future__ import annotations

import dataclasses

import pytest
from model_references import Rules, explore


def test_whoever_can_be_read_has_all_files_that_it_refers_to_and_in_the_end_everything_goes() -> None:
    states, broken, ends = explore(Rules())
    assert not broken, broken
    assert ends
    assert states > 10_000


@pytest.mark.parametrize("check", [field.name for field in dataclasses.fields(Rules)])
def test_without_any_of_the_checks_something_breaks(check: str) -> None:
    _, broken, _ = explore(dataclasses.replace(Rules(), **{check: False}))
    assert broken


def test_a_save_straight_to_a_tier_may_refer_before_it_commits() -> None:
    states, broken, ends = explore(Rules(), direct=True)
    assert not broken, broken
    assert ends
    assert states > 500


@pytest.mark.parametrize(
    "check", ["record_first", "writer_asks", "by_number", "looks_at_shards", "looks_at_fate", "fate_first", "commit_wins"]
)
def test_nor_can_a_save_straight_to_a_tier_do_without(check: str) -> None:
    """The others are about copies that were dropped, and about who writes a file again."""
    _, broken, _ = explore(dataclasses.replace(Rules(), **{check: False}), direct=True)
    assert broken
