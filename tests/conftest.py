"""What every test stands on: a clean environment, deterministic property tests, and the switch for the long ones."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

LONG = "TIERSTORE_TEST_LONG"

# Derandomised: what CI finds, a second run finds too. The long profile explores.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=100, print_blob=True)
hypothesis.settings.register_profile(
    "long", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help=f"repeat random and exhaustive checks much longer (or {LONG}=1)")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("long" if _is_long(config) else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long runs take as long as they take, where a test does not say its own limit."""
    if _is_long(config):
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(3600))


def _is_long(config: pytest.Config) -> bool:
    return bool(config.getoption("--long")) or os.environ.get(LONG, "") not in ("", "0")


@pytest.fixture(scope="session")
def long_run(pytestconfig: pytest.Config) -> bool:
    """Whether loops should run long: ``rounds = 500 if long_run else 10``."""
    return _is_long(pytestconfig)


@pytest.fixture(autouse=True, scope="session")
def clean_environment() -> Iterator[None]:
    """No test, nor any process that it starts, sees the developer's AWS or tierstore settings, or a proxy before 127.0.0.1.

    ``TIERSTORE_TEST_*`` stay: they are addressed to the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_") or (name.startswith("TIERSTORE_") and not name.startswith("TIERSTORE_TEST_")):
                patch.delenv(name)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG"):
            patch.setenv(name, os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        patch.setenv("no_proxy", "127.0.0.1,localhost")
        yield
