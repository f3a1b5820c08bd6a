"""The project's own files: what they promise to each other and to whoever starts a server from them."""

from __future__ import annotations

import re
import runpy
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import tierstore

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


def test_the_installed_version_is_the_packages() -> None:
    assert metadata("tierstore")["Version"] == tierstore.__version__


def test_every_dependency_has_a_lower_bound() -> None:
    required = metadata("tierstore").get_all("Requires-Dist") or []
    assert not [line for line in required if not re.search(r"[<>=]=", line.split(";")[0]) and not line.startswith("tierstore[")]
    assert len(required) > 12


def test_make_takes_over_exactly_the_torch_that_the_package_accepts() -> None:
    oldest = runpy.run_path(str(ROOT / "tools" / "make_venv.py"))["OLDEST_TORCH"]
    assert f"torch>={oldest[0]}.{oldest[1]}" in (metadata("tierstore").get_all("Requires-Dist") or [])


@pytest.mark.parametrize(
    ("version", "machine", "cpu"),
    [
        ("2.13.0+cpu", "x86_64", True),
        ("2.13.0", "x86_64", False),
        ("2.13.0+cu130", "x86_64", False),
        ("2.13.0", "aarch64", True),
        ("", "aarch64", False),
    ],
)
def test_make_knows_a_cpu_build_by_its_version_and_platform(monkeypatch: pytest.MonkeyPatch, version: str, machine: str, cpu: bool) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert runpy.run_path(str(ROOT / "tools" / "make_venv.py"))["_is_cpu_build"](version) is cpu


@pytest.mark.parametrize("service", sorted(COMPOSE["services"]))
def test_compose_pins_images_by_tag_and_digest(service: str) -> None:
    assert re.fullmatch(r"quay\.io/minio/\w+:RELEASE\.[0-9TZ-]+@sha256:[0-9a-f]{64}", COMPOSE["services"][service]["image"])


@pytest.mark.parametrize("service", sorted(COMPOSE["services"]))
def test_compose_says_when_a_service_is_ready(service: str) -> None:
    assert COMPOSE["services"][service]["healthcheck"]["test"]


def test_compose_is_reachable_from_this_machine_only() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_tests_know_the_keys_and_the_bucket_of_compose() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    fixtures = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"\$\{(TIERSTORE_TEST_S3_\w+):-([^}]+)\}", text))
    assert set(defaults) == {"TIERSTORE_TEST_S3_KEY", "TIERSTORE_TEST_S3_SECRET", "TIERSTORE_TEST_S3_BUCKET"}
    for name, default in defaults.items():
        assert f'"{name}", "{default}"' in fixtures


def test_ci_runs_the_readmes_test_command_last() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines
    assert lines[-1].split() == ["make", "--no-print-directory", "test"]
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
