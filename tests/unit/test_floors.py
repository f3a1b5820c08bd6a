"""The floors of the design: who may import whom, and that looking at checkpoints never loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tierstore"

FLOORS: dict[str, int] = {
    "config": 0,
    "config_cadence": 0,
    "config_document": 0,
    "config_explain": 0,
    "config_mistakes": 0,
    "config_models": 0,
    "config_retention": 0,
    "config_uris": 0,
    "config_packing": 0,
    "config_tiers": 0,
    "config_values": 0,
    "errors": 0,
    "units": 0,
    "clock": 0,
    "names": 0,
    "tier_uri": 0,
    "crashpoints": 0,
    "format": 1,
    "storage": 2,
    "tiers": 3,
    "state": 4,
    "retention": 4,
    "bars": 4,
    "store": 5,
    "cli": 6,
    "agent": 6,
    "web": 6,
    "fs": 6,
    "dcp": 6,
    "preemption": 5,
    "checkpointer": 6,
    "integrations": 7,
    "__main__": 8,
}
"""The floor of each module or package directly below `tierstore`."""

DOORS = 6
BESIDE = "testing"
"""Stands beside the floors: may use all of them but the doors; only itself and the demo may use it."""

OPEN_TO_TESTING = ("tierstore.cli.demo",)
TORCH_FLOOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement: `module` imports `target`, a full dotted name."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module} (line {self.line}) imports {self.target}"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import in the module, also inside functions and under TYPE_CHECKING: knowing a name is depending on it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=module, target=alias.name, line=node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            for alias in node.names:
                # `from tierstore import names` means the module, `from tierstore import open` the package root.
                inner = node.module == "tierstore" and alias.name in (*FLOORS, BESIDE)
                target = f"{node.module}.{alias.name}" if inner else str(node.module)
                yield Import(module=module, target=target, line=node.lineno)


def unit(module: str) -> str:
    """The module or package directly below `tierstore` that `module` belongs to; empty for the root."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def breach(item: Import) -> str:
    """What is wrong with an import; empty if nothing is."""
    ours, top = unit(item.module), item.target.split(".")[0]
    if not ours:
        return ""  # the root only names its public API lazily; test_the_package_root_imports_nothing_by_itself holds it to that
    floor = FLOORS.get(ours, DOORS - 1 if ours == BESIDE else None)
    if floor is None:
        return f"{ours} stands on no floor"
    if top in ("torch", "safetensors.torch") and floor < TORCH_FLOOR:
        return f"torch is for floor {TORCH_FLOOR} and the doors"
    if top != "tierstore" or unit(item.target) == ours:
        return ""
    theirs = unit(item.target)
    if not theirs and floor >= DOORS:
        return ""  # a door may use the public API as a user does
    if theirs == BESIDE:
        return "" if item.module.startswith(OPEN_TO_TESTING) else "testing is for tests and the demo"
    if theirs not in FLOORS:
        return f"{theirs or 'the package root'} stands on no floor"
    if ours == BESIDE:
        return "" if FLOORS[theirs] < DOORS else "testing does not use doors"
    if FLOORS[theirs] == floor == DOORS:
        return "doors do not know each other"
    return "" if FLOORS[theirs] < floor or FLOORS[theirs] == floor == 0 else "it looks upward"


def test_a_module_imports_only_from_lower_floors() -> None:
    found = [item for name, path in modules().items() for item in imports_of(name, path.read_text(encoding="utf-8"))]
    breaches = [f"{item}: {why}" for item in found if (why := breach(item))]
    assert not breaches, "\n".join(breaches)
    assert len(found) > 100


def test_every_module_stands_on_a_floor() -> None:
    homeless = {unit(name) for name in modules()} - set(FLOORS) - {BESIDE, ""}
    assert not homeless, f"give them a floor in FLOORS: {sorted(homeless)}"


def test_floor_zero_has_no_circles() -> None:
    """On floor 0 modules may use each other, so circles are looked for there."""
    ground = {name: path for name, path in modules().items() if FLOORS.get(unit(name)) == 0}
    edges = {name: {i.target for i in imports_of(name, path.read_text(encoding="utf-8"))} & set(ground) for name, path in ground.items()}
    while edges:
        free = {name for name, targets in edges.items() if not targets & set(edges)}
        assert free, f"these import each other in a circle: {sorted(edges)}"
        edges = {name: targets for name, targets in edges.items() if name not in free}


@pytest.mark.parametrize(
    ("module", "line", "why"),
    [
        ("tierstore.format.index", "from tierstore.storage.contract import Storage", "upward"),
        ("tierstore.format.index", "import tierstore.tiers.log", "upward"),
        ("tierstore.storage.posix", "def f():\n    from tierstore.tiers.log import append", "upward"),
        ("tierstore.tiers.log", "import torch", "torch"),
        ("tierstore.tiers.log", "from torch import Tensor", "torch"),
        ("tierstore.cli.main", "from tierstore.dcp import Reader", "doors"),
        ("tierstore.cli.main", "from tierstore.testing.servers import seaweed_server", "testing"),
        ("tierstore.tiers.log", "from tierstore.testing import faults", "testing"),
        ("tierstore.testing.servers", "from tierstore.cli.main import main", "doors"),
        ("tierstore.tiers.log", "from tierstore import open", "no floor"),
        ("tierstore.novel", "import os", "no floor"),
    ],
)
def test_the_checker_sees_a_breach(module: str, line: str, why: str) -> None:
    assert [w for item in imports_of(module, line) if why in (w := breach(item))]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tierstore.tiers.log", "from tierstore.storage.contract import Storage"),
        ("tierstore.tiers.log", "from tierstore.tiers.tier import Tier"),
        ("tierstore.tiers.log", "from tierstore import names"),
        ("tierstore.state.image", "import torch"),
        ("tierstore.cli.demo_train", "from tierstore.testing.servers import seaweed_server"),
        ("tierstore.testing.conformance", "from tierstore.storage.contract import Storage"),
        ("tierstore.config", "from tierstore.errors import ConfigError"),
        ("tierstore.cli.demo_train", "import tierstore"),
        ("tierstore.cli.demo", "from tierstore import __version__"),
    ],
)
def test_the_checker_lets_the_design_through(module: str, line: str) -> None:
    assert not [why for item in imports_of(module, line) if (why := breach(item))]


def test_only_config_reads_the_environment() -> None:
    """Crash points excepted: they must work before anything is configured. Doors and testing may set up child processes."""
    readers = [
        f"{name} line {node.lineno}"
        for name, path in modules().items()
        if FLOORS.get(unit(name), DOORS) < DOORS and unit(name) not in ("config", "crashpoints", BESIDE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    ]
    assert not readers, readers


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tierstore", ("torch", "numpy", "pydantic", "fsspec")),
        ("tierstore.config", ("torch", "numpy", "fsspec", "s3fs", "aiobotocore", "typer")),
        ("tierstore.cli.main", ("torch",)),
    ],
)
def test_importing_does_not_load_what_it_does_not_need(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(sorted(set({absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_package_root_imports_nothing_by_itself() -> None:
    code = "import sys, tierstore; print([m for m in sys.modules if m.startswith('tierstore.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    import tierstore

    assert dir(tierstore) == sorted(tierstore.__all__)
    for name in tierstore.__all__:
        assert getattr(tierstore, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tierstore.nonsense
