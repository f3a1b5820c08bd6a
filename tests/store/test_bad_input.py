"""Bad places: what can't be configured, written, reached or entered is named with its remedy, nothing is lost, and no secret is told."""

from __future__ import annotations

import logging
import os
import subprocess
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fork_kit import run_tierstore
from store_kit import has_error

import tierstore
from tierstore.errors import (
    AccessError,
    ConfigError,
    DeadlineError,
    NotFoundError,
    SaveError,
    StorageError,
    TemporaryError,
    TierFullError,
    TierStoreError,
)
from tierstore.testing.equality import assert_same_state
from tierstore.testing.servers import S3Server
from tierstore.tiers import advance
from tierstore.tiers.copies import document_replica
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.tier import Tier
from tierstore.tiers.view import AttemptView

CANARY = "canary-5ecret-8b1f"
WITHIN = 200
MIB = 1 << 20


def state_of(step: int, nbytes: int = MIB) -> dict[str, Any]:
    return {"w": torch.full((nbytes // 4,), float(step)), "step": step}


def config_of(folder: Path, *more: dict[str, Any], **save: Any) -> dict[str, Any]:
    tiers = [{"name": n, "uri": str(folder / n), "scope": s} for n, s in (("node", "node"), ("shared", "shared"))]
    return {"version": 1, "run": "r", "tiers": [*tiers, *more], "save": save}


def object_tier(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"name": "object", "uri": uri, "scope": "shared", "options": options}


def command(config: dict[str, Any], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = folder / "tierstore.yaml"
    path.write_text(yaml.safe_dump(config))
    return run_tierstore("-c", str(path), *arguments)


def told(error: BaseException) -> str:
    """All that a person may see of an error, its causes and contexts included."""
    return "".join(traceback.format_exception(error)) + repr(error) + repr(getattr(error, "context", ""))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 100 MiB."""
    place = tmp_path / "mounted"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs: run as root, or in a container with CAP_SYS_ADMIN")
    yield place
    while os.path.ismount(place):  # a test that failed may have left one more above it
        subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


def make_read_only(place: Path, name: str) -> None:
    """A node tier has an open lock file, which no remount passes: there an empty read-only file system comes to lie above it."""
    if name == "node":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=100m", "tmpfs", str(place)], check=True)
    else:
        remount(place, "ro")


def make_writable(place: Path, name: str) -> None:
    if name == "node":
        subprocess.run(["umount", "-l", str(place)], check=True)
    else:
        remount(place, "rw")


# Configuration


def test_an_unknown_key_is_named_with_its_place_and_the_likely_one(tmp_path: Path) -> None:
    config = {**config_of(tmp_path), "durble_at": "shared"}
    with pytest.raises(ConfigError, match=r"(?s)durble_at.*durable_at"):
        tierstore.open(config)
    done = command(config, tmp_path, "ls")
    assert done.returncode == 2
    for word in ("tierstore.yaml", "durble_at", "durable_at"):
        assert word in done.stderr.replace("\n", "")  # a long path is broken over lines
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize(
    "tier",
    [
        {"uri": f"s3://key:{CANARY}@bucket/x"},
        {"uri": "s3://bucket/x", "secret": CANARY},
        {"uri": "s3://bucket/x", "options": {"secret": CANARY}, "capacity": "much"},
        {"uri": "s3://bucket/x", "options": {"secrte": CANARY}},
        {"uri": f"https://bucket.example/x?X-Amz-Signature={CANARY}"},
    ],
    ids=["in the URI", "beside the options", "beside a mistake", "misspelt", "presigned"],
)
def test_no_mistake_in_a_configuration_shows_its_secret(tier: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**config_of(tmp_path), "tiers": [tier]}
    with caplog.at_level(logging.DEBUG), pytest.raises(TierStoreError) as caught:
        tierstore.open(config)
    assert CANARY not in told(caught.value) + caplog.text
    done = command(config, tmp_path, "-vv", "ls")
    assert done.returncode != 0
    assert CANARY not in done.stdout + done.stderr


# Places that can't be written


@pytest.mark.parametrize("name", ["node", "shared"])
def test_a_tier_below_a_file_is_refused_at_opening(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "file").write_text("in the way")
    next(tier for tier in config["tiers"] if tier["name"] == name)["uri"] = str(tmp_path / "file" / "below")
    with pytest.raises(StorageError, match=rf"(?s){name}.*file.*hint:"):
        tierstore.open(config)
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("name", ["node", "shared"])
def test_a_read_only_tier_that_every_save_needs_is_refused_at_opening_and_still_read(name: str, tmp_path: Path, mounted: Path) -> None:
    config = config_of(tmp_path)
    next(tier for tier in config["tiers"] if tier["name"] == name)["uri"] = str(mounted / "tier")
    remount(mounted, "ro")
    with pytest.raises(AccessError, match=rf"(?s){name}.*hint:"):  # a new store
        tierstore.open(config)
    remount(mounted, "rw")
    with tierstore.open(config) as store:
        store.save(1, state_of(1)).wait("durable", WITHIN)
    remount(mounted, "ro")
    with pytest.raises(AccessError, match=rf"(?s){name}.*(not writable|[Rr]ead-only).*hint:"):  # one that exists
        tierstore.open(config)
    done = command(config, tmp_path, "--json", "ls")
    assert done.returncode == 0, done.stderr
    assert '"step": 1' in done.stdout or '"step":1' in done.stdout


@pytest.mark.parametrize("name", ["node", "shared"])
def test_a_tier_that_becomes_read_only_in_mid_run_is_told_and_taken_up_again(name: str, tmp_path: Path, mounted: Path) -> None:
    config = config_of(tmp_path, patience="1s")
    next(tier for tier in config["tiers"] if tier["name"] == name)["uri"] = str(mounted / "tier")
    store = tierstore.open(config)
    store.save(1, state_of(1))
    store.sync(WITHIN)
    make_read_only(mounted, name)
    ticket = store.save(2, state_of(2))
    with pytest.raises((DeadlineError, SaveError)) as waited:
        has_error(ticket).wait(name, None if name == "node" else 0.05)
    assert name in str(waited.value)
    with pytest.raises(SaveError, match=rf"step 2.*{name}.*[Rr]ead-only"):
        store.save(3, state_of(3))  # told once, at the next call; this save was not taken
    assert_same_state(store.load(1), state_of(1))
    make_writable(mounted, name)
    again = store.save(3, state_of(3))
    store.sync(WITHIN)
    again.wait(name, 0)
    for one in (ticket, again):
        one.wait("durable", WITHIN)
    store.close()
    with tierstore.open(config) as store:
        for step in (1, 2, 3):
            assert_same_state(store.load(step), state_of(step))


def test_a_far_tier_that_can_not_be_written_stops_no_save_and_is_told(
    tmp_path: Path, mounted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remount(mounted, "ro")
    config = config_of(tmp_path, {"name": "far", "uri": str(mounted / "tier"), "scope": "shared"}, patience="1s")
    store = tierstore.open(config)
    assert "tier=far" in caplog.text
    store.save(1, state_of(1)).wait("durable", WITHIN)
    with pytest.raises((SaveError, DeadlineError), match=r"(?s)step.* 1.*far"):
        store.close()
    remount(mounted, "rw")
    with tierstore.open(config) as store:
        store.sync(WITHIN)
    with tierstore.open([{"name": "far", "uri": str(mounted / "tier"), "scope": "shared"}], run="r") as store:
        assert_same_state(store.load(1), state_of(1))


# Full


@pytest.mark.parametrize("name", ["node", "shared", "only"])
def test_a_disk_that_fills_up_in_mid_save_keeps_what_it_has_and_goes_on_when_there_is_room(
    name: str, tmp_path: Path, mounted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, patience="1s")
    place = str(mounted / "tier")
    if name == "only":
        config["tiers"] = [{"name": "only", "uri": place, "scope": "shared"}]
    else:
        next(tier for tier in config["tiers"] if tier["name"] == name)["uri"] = place
    ballast = mounted / "ballast"
    with ballast.open("wb") as file:  # a tier that takes saves first keeps 64 MiB in reserve
        os.posix_fallocate(file.fileno(), 0, (95 if name == "shared" else 31) * MIB)
    store = tierstore.open(config)
    store.save(1, state_of(1, 3 * MIB))
    store.sync(WITHIN)
    second = store.save(2, state_of(2, 3 * MIB))
    with pytest.raises((DeadlineError, SaveError), match=rf"(?s)step 2.*{name}.*TierFullError.*\d+ bytes free.*\d+.*(needed|wanted)"):
        has_error(second).wait(name, None if name == "node" else 0.05)  # past the node tier: nothing to wait for
    assert {type(error) for error in second.errors} == {TierFullError}
    assert f"tier={name}" in caplog.text
    assert_same_state(store.load(1), state_of(1, 3 * MIB))
    if name == "node":
        second.wait("durable", WITHIN)
    latest = store.latest()
    assert latest is not None
    assert latest.step == (2 if name == "node" else 1)  # beside a full node tier, the shared one takes it

    ballast.unlink()
    store.sync(WITHIN)
    if name != "node":
        second.wait(name, 0)
    store.save(3, state_of(3, MIB // 2)).wait(name, WITHIN)
    store.close()
    with tierstore.open(config) as store:
        for step, nbytes in ((1, 3 * MIB), (2, 3 * MIB), (3, MIB // 2)):
            assert_same_state(store.load(step), state_of(step, nbytes))
    assert [p for p in mounted.rglob("*") if p.parent.name == ".tmp" and not p.name.endswith(".lock")] == []


# S3


def s3_cases(uri: str, options: dict[str, Any]) -> dict[str, tuple[dict[str, Any], type[TierStoreError], int]]:
    """A bad object tier, the error that it is at opening, and the command line's exit code."""
    wrong = {**options, "secret": CANARY}
    return {
        "bucket missing": (object_tier("s3://tierstore-no-such-bucket/x", options), NotFoundError, 4),
        "wrong credentials": (object_tier(uri, wrong), AccessError, 1),
        "endpoint down": (object_tier(uri, {**wrong, "endpoint_url": "http://127.0.0.1:9"}), TemporaryError, 5),
    }


CASES = ["bucket missing", "wrong credentials", "endpoint down"]


def no_secrets(folder: Path, *texts: str, secrets: Sequence[str]) -> None:
    stored = [p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "tierstore.yaml"]
    for secret in secrets:
        assert not any(secret in text for text in texts)
        assert not any(secret.encode() in data for data in stored)


@pytest.mark.s3
@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("case", CASES)
def test_a_bucket_that_is_the_authority_and_can_not_be_used_is_refused_at_opening(
    case: str, tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tier, kind, code = s3_cases(s3_bucket, s3_options)[case]
    config = {"version": 1, "run": "r", "tiers": [tier]}
    with caplog.at_level(logging.DEBUG), pytest.raises(kind, match=r"(?s)object.*hint:") as caught:
        tierstore.open(config)
    done = command(config, tmp_path, "-vv", "ls")
    assert done.returncode == code, done.stderr
    no_secrets(tmp_path, told(caught.value), caplog.text, done.stdout, done.stderr, secrets=[CANARY, s3_options["secret"]])


@pytest.mark.s3
@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("case", CASES)
def test_a_bucket_further_on_that_can_not_be_used_stops_no_save_and_gets_everything_once_it_can(
    case: str, tmp_path: Path, s3_server: S3Server, s3_bucket: str, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tier, _, _ = s3_cases(s3_bucket, s3_options)[case]
    config = config_of(tmp_path, tier, patience="1s")
    texts = []
    with caplog.at_level(logging.DEBUG):
        store = tierstore.open(config)
        assert "tier=object" in caplog.text
        ticket = store.save(1, state_of(1))
        ticket.wait("durable", WITHIN)  # on the shared tier
        assert_same_state(store.load(), state_of(1))
        texts.append(repr(store.status()))
        with pytest.raises((SaveError, DeadlineError), match=r"(?s)step.* 1.*object|object.*step.* 1") as caught:
            store.close()
    texts += [told(caught.value), caplog.text, repr(ticket.events), repr(store), repr(store.config)]
    done = command(config, tmp_path, "-vv", "status")
    assert "object" in done.stdout + done.stderr
    no_secrets(tmp_path, *texts, done.stdout, done.stderr, secrets=[CANARY, s3_options["secret"]])

    right = object_tier(s3_bucket, s3_options)
    with tierstore.open(config_of(tmp_path, right)) as store:
        store.sync(WITHIN)
    with tierstore.open({"version": 1, "run": "r", "tiers": [right]}) as store:
        assert_same_state(store.load(1), state_of(1))
    no_secrets(tmp_path, secrets=[CANARY, s3_options["secret"]])


def test_a_disk_that_is_unmounted_while_training_acknowledges_nothing_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """An empty folder is left where the shared file system was: no second store is begun there."""
    node, shared, away = tmp_path / "node", tmp_path / "shared", tmp_path / "away"
    with tierstore.open([str(node), str(shared)], run="r") as store:
        store.save(1, {"w": torch.ones(8)}).wait("committed", 200)
        store.sync(200)  # nothing else is under way that could tell of it first
        shared.rename(away)
        shared.mkdir()
        ticket = store.save(2, {"w": torch.zeros(8)})
        ticket.wait("node", 200)
        end = time.monotonic() + 200
        while not any("has lost its tierstore.json" in str(error) for error in ticket.errors):
            assert time.monotonic() < end
            with pytest.raises(DeadlineError):
                ticket.wait("committed", 0.05)
        with pytest.raises(SaveError, match="has lost its"):
            store.raise_errors()
        assert list(shared.iterdir()) == []
        shared.rmdir()
        away.rename(shared)
        ticket.wait("committed", 200)
        assert [c.step for c in store.checkpoints()] == [1, 2]


def test_a_disk_that_is_unmounted_while_it_is_copied_from_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing on it is away, not damaged: the copy to the node is completed when the disk is back."""
    node, shared, away = tmp_path / "node", tmp_path / "shared", tmp_path / "away"

    async def unmounted(context: CopyContext, view: AttemptView, tier: Tier) -> None:
        if not away.exists():
            shared.rename(away)
            shared.mkdir()
        await document_replica(context, view, tier)

    with tierstore.open([str(node), str(shared)], run="r") as store:
        with monkeypatch.context() as patch:
            patch.setattr(advance, "document_replica", unmounted)
            ticket = store.save(1, {"w": torch.ones(8)})
            ticket.wait("committed", 200)
            end = time.monotonic() + 200
            while not any("has lost its tierstore.json" in str(error) for error in ticket.errors):
                assert time.monotonic() < end, "the copy that found nothing was not said to wait for the disk"
                time.sleep(0.01)
        shared.rmdir()
        away.rename(shared)
        with pytest.raises(SaveError, match="has lost its"):
            store.raise_errors()
        store.sync(200)
    assert len(list(node.glob("r/step-*/manifest.json"))) == 1
