"""docs/reference/api.md shows the signatures that the DCP door has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import tierstore.dcp

API = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
PAGE = API[API.index("## tierstore.dcp") :]
SHOWN = dict(re.findall(r"^```text\n(\w+)(\(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("name", sorted(set(tierstore.dcp.__all__) - {"TierLoadPlanner", "TierSavePlanner"}))
def test_the_page_shows_the_signature_of(name: str) -> None:
    target = getattr(tierstore.dcp, name)
    shown = re.sub(r",\)", ")", re.sub(r"\(\s+", "(", re.sub(r",\s+\)", ")", re.sub(r"\s*\n\s*", " ", SHOWN[name]))))
    parts, keyword = [], False
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            parts, keyword = [*parts, "*"], True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        parts.append(f"{star}{parameter.name}: {parameter.annotation}{default}")
    result = "" if inspect.isclass(target) else f" -> {inspect.signature(target).return_annotation}"
    assert shown == f"({', '.join(parts)}){result}"


def test_every_public_name_is_on_the_page() -> None:
    assert not [name for name in tierstore.dcp.__all__ if f"`{name}`" not in PAGE and name not in SHOWN]
