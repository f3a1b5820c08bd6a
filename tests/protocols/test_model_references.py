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
