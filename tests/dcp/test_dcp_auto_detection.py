"""tier:// checkpoint ids: through our functions, and through torch's own ones after the opt-in."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, config_file

import tierstore.dcp
from tierstore.dcp import stores
from tierstore.errors import UsageError

pytestmark = pytest.mark.filterwarnings(IGNORED)


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    yield f"tier://{config_file(tmp_path)}/team/run"
    tierstore.dcp.disable_auto_detection()
    tierstore.dcp.close()


def test_our_functions_know_tier_ids_and_leave_others_to_torch(uri: str, tmp_path: Path) -> None:
    before = threading.enumerate()
    tierstore.dcp.save({"a": torch.ones(3), "n": {1: {"x": 4}}}, checkpoint_id=f"{uri}/step-3", no_dist=True)
    future = tierstore.dcp.async_save({"a": torch.full((3,), 2.0)}, checkpoint_id=f"{uri}/step-4", no_dist=True)
    future.result()  # type: ignore[union-attr]
    opened = [thread for thread in threading.enumerate() if thread.name.startswith("tierstore") and thread not in before]
    tierstore.dcp.close()
    for thread in opened:
        thread.join(200)  # those for system calls end by themselves, nobody waits for them
    assert not [thread for thread in opened if thread.is_alive()]
    assert opened
    into = {"a": torch.zeros(3), "n": {1: {"x": 0}}}
    tierstore.dcp.load(into, checkpoint_id=f"{uri}/step-3", no_dist=True)
    assert (into["a"].tolist(), into["n"]) == ([1, 1, 1], {1: {"x": 4}})  # type: ignore[union-attr]
    for reference in ("@latest", "", "@4"):
        last = {"a": torch.zeros(3)}
        tierstore.dcp.load(last, checkpoint_id=f"{uri}{reference}", no_dist=True)
        assert last["a"].tolist() == [2, 2, 2]
    tierstore.dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    tierstore.dcp.load(stock := {"a": torch.zeros(1)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert stock["a"].tolist() == [1]
    assert (tmp_path / "stock" / ".metadata").exists()


def test_torchs_own_functions_find_tier_ids_after_the_opt_in_only(uri: str, tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(3)}, checkpoint_id=f"{uri}/files", no_dist=True)  # files, by torch's writer for fsspec
    with tierstore.open(tmp_path / "store.yaml", run="team/run") as store:
        assert store.checkpoints() == []
    tierstore.dcp.enable_auto_detection()
    tierstore.dcp.enable_auto_detection()
    dcp.save({"a": torch.ones(3)}, checkpoint_id=f"{uri}/step-3", no_dist=True)
    dcp.async_save({"a": torch.full((3,), 2.0)}, checkpoint_id=f"{uri}/step-4", no_dist=True).result()
    into = {"a": torch.zeros(3)}
    dcp.load(into, checkpoint_id=f"{uri}/step-4", no_dist=True)
    assert into["a"].tolist() == [2, 2, 2]
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert (tmp_path / "stock" / ".metadata").exists()
    tierstore.dcp.disable_auto_detection()
    assert dcp.state_dict_saver._storage_setup.__module__.startswith("torch.")


def test_a_damaged_uri_is_refused_by_all_of_them_and_no_folder_is_made(uri: str, tmp_path: Path) -> None:
    """CASES.md 85: stock writes a local folder ``tier:``."""
    before = sorted(tmp_path.iterdir())
    damaged = Path("tier:///team/run/step-1")
    tierstore.dcp.enable_auto_detection()
    for save in (tierstore.dcp.save, dcp.save):
        with pytest.raises(UsageError, match="pathlib"):
            save({"a": torch.ones(1)}, checkpoint_id=damaged, no_dist=True)
    for load in (tierstore.dcp.load, dcp.load):
        with pytest.raises(UsageError, match="pathlib"):
            load({"a": torch.ones(1)}, checkpoint_id=damaged, no_dist=True)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_while_another_thread_opens_a_store_has_stores_of_its_own(uri: str) -> None:
    """The module's lock was held in the parent at that instant, and stayed so for ever in the child."""
    with stores._REGISTRY.lock:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                tierstore.dcp.save({"a": torch.ones(2)}, checkpoint_id=f"{uri}/step-1", no_dist=True)
                tierstore.dcp.close()
                status = 0
            finally:
                os._exit(status)
        end = time.monotonic() + 200
        while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            threading.Event().wait(0.01)
        if done == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert done == (pid, 0)
