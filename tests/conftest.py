"""What every test stands on: a clean environment, deterministic property tests, and the switch for the long ones."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.loaders
import hypothesis
import pytest
import tenacity
from shaking import WAYS, Shaking

from tierstore.testing.servers import MotoServer, NamedServer, S3Server, SeaweedServer

LONG = "TIERSTORE_TEST_LONG"

SLOW = (
    "tests/ranks",
    "tests/dcp",
    "tests/integrations",
    "tests/cli/test_demo",
    "tests/docs/test_examples",
    "tests/faults",
    "tests/integrations",
    "tests/crash",
    "tests/adopt",
    "tests/store",
    "tests/soak",
    "tests/stateful",
    "tests/protocols/test_repair",
    "tests/protocols/test_store_crash_states",
    "tests/protocols/test_worker",
)
"""Where the slow tests are."""

# Derandomised: what CI finds, a second run finds too. The long profile explores. A machine that stands still for a second is no fault
# of a strategy: how long making examples takes fails nothing.
PATIENT: dict[str, Any] = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=60, **PATIENT)
hypothesis.settings.register_profile("long", max_examples=2000, **PATIENT)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help=f"repeat random and exhaustive checks much longer (or {LONG}=1)")
    parser.addoption("--shake", type=int, metavar="SEED", help="run each test with threads and loop that come late, early or in fits")
    parser.addoption("--shake-way", choices=WAYS, help="one way of shaking for all tests")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("long" if _is_long(config) else "ci")
    if (seed := config.getoption("--shake")) is not None:
        config.pluginmanager.register(Shaking(seed, config.getoption("--shake-way")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow files go first, so that no worker has one left at the end. Long runs take as long as they take, where a test says no limit."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW))  # stable: within a file nothing moves
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
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test, nor any process that it starts, sees the developer's AWS or tierstore settings, or a proxy before 127.0.0.1.

    Nor does one write into the developer's caches.

    ``TIERSTORE_TEST_*`` stay: they are addressed to the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_") or (name.startswith("TIERSTORE_") and not name.startswith("TIERSTORE_TEST_")):
                patch.delenv(name)
        patch.delenv("COLUMNS", raising=False)  # xdist says 80, which breaks lines
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG"):
            patch.setenv(name, os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        patch.setenv("no_proxy", "127.0.0.1,localhost")
        yield


@pytest.fixture(autouse=True, scope="session")
def cheap_fsync(pytestconfig: pytest.Config) -> Iterator[None]:
    """In this process fsync only proves its descriptor: no test cuts the power, and the disk's milliseconds add up to minutes.

    What is flushed and when is proved on the calls (tests/protocols/test_posix_crash_states.py and others that record or fail them);
    the processes that tests start flush for real, and so does everything with ``--long``.
    """
    if _is_long(pytestconfig):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: os.fstat(fd if isinstance(fd, int) else fd.fileno()) and None)
        yield


@pytest.fixture(autouse=True, scope="session")
def listings_beside_deletions() -> Iterator[None]:
    """A folder that goes while `Path.rglob` lists it has nothing in it, as from Python 3.13: stores work while tests look around."""
    list_it = getattr(Path, "_scandir", None)
    if list_it is None:
        yield
        return

    def list_what_is_there(folder: Path) -> Any:
        try:
            return list_it(folder)
        except FileNotFoundError:
            return contextlib.nullcontext(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "_scandir", list_what_is_there)
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_descriptions() -> Iterator[None]:
    """botocore's descriptions of S3 are read once a process, not once a storage: hundreds of tests open one, for 0.2 s of CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.session.create_loader", functools.cache(botocore.loaders.create_loader))
        yield


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to S3 is tried as often as ever, but with next to no pauses between: for endpoints that stay down."""
    monkeypatch.setattr("tierstore.storage.s3_client.wait_exponential", lambda **_: tenacity.wait_fixed(0.01))
    monkeypatch.setattr("tierstore.storage.s3_client.wait_random", lambda *_: tenacity.wait_fixed(0.01))


# S3 servers. Each pytest-xdist worker is a process with servers of its own.


@pytest.fixture(scope="session")
def s3_server(clean_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server: SeaweedFS, or the one that TIERSTORE_TEST_S3 names (MinIO: `docker compose up`)."""
    named = os.environ.get("TIERSTORE_TEST_S3")
    if named:
        key = os.environ.get("TIERSTORE_TEST_S3_KEY", "tierstore-test")  # the defaults are docker-compose.yml's
        yield NamedServer(named, key, os.environ.get("TIERSTORE_TEST_S3_SECRET", "tierstore-test-secret"))
        return
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server
        server.crash()  # an orderly stop takes up to 20 s, for data that nobody needs any more


@pytest.fixture(scope="session")
def moto_server(clean_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    """moto's server: quick, no authentication."""
    with MotoServer(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def _s3_bucket_name(s3_server: S3Server) -> str:
    if "TIERSTORE_TEST_S3" in os.environ:
        return s3_server.make_bucket(os.environ.get("TIERSTORE_TEST_S3_BUCKET", "tierstore-test"))
    return s3_server.make_bucket(f"tierstore-test-{secrets.token_hex(4)}")


@pytest.fixture
def s3_bucket(_s3_bucket_name: str) -> str:
    """The URI of a fresh prefix in the session's bucket of `s3_server`: ``s3://BUCKET/PREFIX``."""
    return f"s3://{_s3_bucket_name}/{secrets.token_hex(8)}"


@pytest.fixture
def s3_options(s3_server: S3Server) -> dict[str, Any]:
    """The options that reach `s3_server`."""
    return s3_server.options()
