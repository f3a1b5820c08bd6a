"""The document that proves a quantised copy: what was written is read, and what nobody writes is refused."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest

from tierstore.errors import FormatError
from tierstore.format.quantised import QuantisedCopy, QuantisedFile, decode_quantised, encode_quantised

SAVE_ID = "01HZZZZZZZZZZZZZZZZZZZZZZZ"


def file_of(name: str, **tensors: dict[str, Any]) -> QuantisedFile:
    return QuantisedFile(name=name, footer="sha256:" + "0" * 64, stored_nbytes=5, tensors=tensors)


def copy_of(*files: QuantisedFile) -> QuantisedCopy:
    return QuantisedCopy.of("run", 1, SAVE_ID, generation=1, scheme="q8", files=files)


def test_errors_are_the_worst_and_the_mean_of_all_tensors_and_schemes_are_joined() -> None:
    first = file_of("b", m={"scheme": "q8", "max_error": 0.5, "mean_error": 0.1}, v={"scheme": "q8"})
    second = file_of("a", m={"scheme": "q4", "max_error": 0.25, "mean_error": 0.3})
    copy = copy_of(first, second)
    assert (copy.scheme, copy.max_error, copy.mean_error) == ("q4+q8", 0.5, pytest.approx(0.2))
    assert [file.name for file in copy.files] == ["a", "b"]
    assert decode_quantised(encode_quantised(copy)) == copy


def test_a_copy_of_which_no_error_is_known_is_read_as_it_was_written() -> None:
    copy = decode_quantised(encode_quantised(copy_of(file_of("a", v={"scheme": "q4", "kind": "second"}))))
    assert copy.scheme == "q4"
    assert math.isnan(copy.max_error)
    assert math.isnan(copy.mean_error)


def test_errors_that_footers_claim_may_be_anything() -> None:
    huge = sys.float_info.max
    copy = copy_of(
        file_of("a", m={"max_error": huge, "mean_error": huge}, n={"max_error": True, "mean_error": huge}, o={"mean_error": "x"})
    )
    assert decode_quantised(encode_quantised(copy)) == copy
    assert (copy.max_error, copy.mean_error) == (huge, math.inf)


def test_names_that_stand_twice_or_lead_out_of_the_folder_are_refused() -> None:
    copy = copy_of(file_of("a"))
    for wrong in (replace(copy, files=(file_of("a"), file_of("a"))), replace(copy, files=(file_of("../a"),))):
        data = encode_quantised(wrong)
        with pytest.raises(FormatError):
            decode_quantised(data)
