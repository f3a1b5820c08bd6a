"""A door whose framework is not installed, or is too old, says which extra installs it."""

from __future__ import annotations

import pytest
from fork_kit import run_forked

from tierstore.integrations.needs import needs

DOORS = {
    "accelerate": ("accelerate", "transformers"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "lightning": ("lightning", "lightning"),
    "megatron": ("megatron", "megatron"),
    "pytorch_lightning": ("lightning_fabric", "lightning"),
    "transformers": ("transformers", "transformers"),
}
"""By the door's name: the package that it imports first, and the extra that has it."""

ABSENT = """
import importlib, sys
for name in [*sys.modules]:  # what the server of forks has imported
    if name.split(".")[0] == sys.argv[2] or name.startswith("tierstore.integrations"):
        del sys.modules[name]
sys.modules[sys.argv[2]] = None  # as if it were not installed
try:
    importlib.import_module("tierstore.integrations." + sys.argv[1])
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize("door", DOORS)
def test_a_door_without_its_framework_names_the_extra(door: str) -> None:
    package, extra = DOORS[door]
    told = run_forked(ABSENT, door, package, merged=True)
    assert f"pip install 'tierstore[{extra}]'" in told.stdout, told.stdout


def test_a_framework_without_the_name_that_is_wanted_is_called_so() -> None:
    with (
        pytest.raises(ImportError, match=r"(?s)cannot import name 'Nothing' from 'json'.*hint: pip install 'tierstore\[x\]'"),
        needs("json", extra="x"),
    ):
        from json import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_what_a_framework_itself_misses_stays_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_there'$"), needs("json", extra="x"):
        import not_there  # type: ignore[import-not-found]  # noqa: F401
