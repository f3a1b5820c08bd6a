"""The whole cycle with a real S3 server as the last tier, or as the only one: save, kill, resume, load; and the server's own failures."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_kit import run_tierstore
from trainer_child import state_of

import tierstore
from tierstore.clock import SystemClock
from tierstore.config import load_config
from tierstore.errors import CondemnedError, DeadlineError, RefusedError, SaveError
from tierstore.storage.s3 import S3Storage
from tierstore.storage.s3_options import split_s3_uri
from tierstore.testing.equality import assert_same_state
from tierstore.testing.proxy import CuttingProxy, Rule
from tierstore.testing.servers import S3Server, SeaweedServer
from tierstore.tiers.log import decide_fate
from tierstore.tiers.opening import rejoin
from tierstore.tiers.recover import recover
from tierstore.tiers.session import Session

pytestmark = pytest.mark.s3

CHILD = Path(__file__).with_name("trainer_child.py")
NBYTES = 20_000_000  # three parts of a multipart upload
BLOCK = 1 << 20
WITHIN = 200


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as one:
        yield one


@pytest.fixture
def seaweed(clean_environment: None, tmp_path: Path) -> Iterator[SeaweedServer]:
    """A server of the test's own, not yet started."""
    server = SeaweedServer(tmp_path / "seaweed")
    yield server
    server.crash()  # an orderly stop takes up to 20 s, for data that nobody needs any more


def object_tier(uri: str, options: dict[str, Any], endpoint_url: str = "") -> dict[str, Any]:
    return {
        "name": "object",
        "uri": uri,
        "scope": "shared",
        "options": {**options, "endpoint_url": endpoint_url or options["endpoint_url"]},
    }


def three_tiers(folder: Path, remote: dict[str, Any], **save: Any) -> dict[str, Any]:
    """Node directory, shared directory, bucket; durable means: in the bucket."""
    near = [{"name": n, "uri": str(folder / n), "scope": s} for n, s in (("node", "node"), ("shared", "shared"))]
    return {"version": 1, "run": "cycle", "tiers": [*near, remote], "durable_at": "object", "save": save}


def alone(remote: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "run": "cycle", "tiers": [remote]}


def unfinished(server: S3Server, uri: str) -> list[str]:
    """The keys of unfinished multipart uploads below `uri`, asked of the server by another client."""
    bucket, prefix = split_s3_uri(uri)
    client = server._client()  # type: ignore[attr-defined]
    try:
        answer = client.list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix}/")
        return [upload["Key"] for upload in answer.get("Uploads") or ()]
    finally:
        client.close()


def await_parts(server: S3Server, uri: str, wanted: set[int]) -> str:
    """Waits until the one unfinished upload below `uri` holds these parts; its key."""
    bucket, prefix = split_s3_uri(uri)
    client = server._client()  # type: ignore[attr-defined]
    end = time.monotonic() + WITHIN
    try:
        while True:
            (upload,) = client.list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix}/")["Uploads"]
            there = client.list_parts(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            held = {part["PartNumber"] for part in there.get("Parts") or ()}
            if held == wanted:
                return str(upload["Key"])
            assert time.monotonic() < end, f"the server holds the parts {held}"
            time.sleep(0.01)
    finally:
        client.close()


def sweep(uri: str, options: dict[str, Any]) -> list[str]:
    """What garbage collection does about uploads that nobody will finish, without its grace."""

    async def main() -> list[str]:
        storage = S3Storage(uri, options)
        try:
            return await storage.abort_stale_uploads(-1)
        finally:
            await storage.close()

    return asyncio.run(main())


def start_child(config: dict[str, Any], steps: list[int]) -> subprocess.Popen[str]:
    plan = json.dumps({"config": config, "steps": steps, "nbytes": NBYTES})
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(CHILD), plan], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def read_until(child: subprocess.Popen[str], event: str, step: int) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if json.loads(line) == {"event": event, "step": step}:
            return
    raise AssertionError(f"the child ended first: {child.communicate()[1]}")


def test_a_trainer_killed_in_mid_upload_is_finished_by_the_next_process(
    tmp_path: Path, s3_server: S3Server, s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy
) -> None:
    held = proxy.add(Rule(method="PUT", path="partNumber=2", action="hold", times=99))
    with start_child(three_tiers(tmp_path, object_tier(s3_bucket, s3_options, proxy.endpoint_url)), [1]) as child:
        read_until(child, "committed", 1)
        assert held.reached.wait(WITHIN)
        begun = await_parts(s3_server, s3_bucket, {1, 3})  # of an upload that holds nothing yet, nobody could tell that its writer is dead
        child.kill()
        child.wait()
    remote = object_tier(s3_bucket, s3_options)
    with tierstore.open(alone(remote)) as store:
        assert store.latest() is None  # half an upload is no checkpoint

    with tierstore.open(three_tiers(tmp_path, remote)) as store:
        resumed = store.resume()
        assert resumed is not None
        assert resumed.step == 1
        assert_same_state(resumed.state, state_of(1, NBYTES))
        store.save(2, state_of(2, NBYTES)).wait("durable", WITHIN)
        store.sync(WITHIN)
    for folder in ("node", "shared"):
        shutil.rmtree(tmp_path / folder)

    # The next process went on with the very upload that the dead one had begun, from its parts: nothing is left to the sweep.
    assert begun.endswith(".safetensors")
    assert unfinished(s3_server, s3_bucket) == []
    assert sweep(s3_bucket, s3_options) == []
    with tierstore.open(alone(remote)) as store:
        for step in (1, 2):
            assert_same_state(store.load(step), state_of(step, NBYTES))


def test_the_bucket_alone_is_enough_and_it_is_said_loudly_that_the_authority_is_lost(
    tmp_path: Path, s3_server: S3Server, s3_bucket: str, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = three_tiers(tmp_path, object_tier(s3_bucket, s3_options))
    with tierstore.open(config) as store:
        for step in (1, 2):
            store.save(step, state_of(step, NBYTES)).wait("durable", WITHIN)
    for folder in ("node", "shared"):
        shutil.rmtree(tmp_path / folder)
    caplog.clear()
    with caplog.at_level(logging.WARNING), tierstore.open(config) as store:
        assert_same_state(store.load(), state_of(2, NBYTES))
        assert_same_state(store.load(1), state_of(1, NBYTES))
        assert "the authority's log knows nothing of it" in caplog.text
        assert "tierstore recover" in caplog.text
        with pytest.raises(RefusedError, match="is empty, but object holds checkpoints"):
            store.resume()
    with Session.open(load_config(config), lost="recover") as session:
        assert session.run(recover(session.tiers, "cycle", clock=SystemClock())).ok
        session.run(rejoin(session.tiers))
    with tierstore.open(config) as store:
        resumed = store.resume()
        assert resumed is not None
        assert resumed.step == 2
        assert_same_state(resumed.state, state_of(2, NBYTES))
        store.save(3, state_of(3, NBYTES)).wait("durable", WITHIN)
    assert unfinished(s3_server, s3_bucket) == []


def test_a_bucket_is_the_only_tier_and_the_authority(
    s3_server: S3Server, s3_bucket: str, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = alone(object_tier(s3_bucket, s3_options))
    with tierstore.open(config) as store:
        for step in (1, 2):
            ticket = store.save(step, state_of(step, NBYTES), metrics={"loss": 1 / step})
            ticket.wait("durable", WITHIN)
            assert {"staged", "committed", "durable"} <= {event.level for event in ticket.events}
            assert ticket.errors == ()
        assert_same_state(store.load("best:loss"), state_of(2, NBYTES))
    with start_child(config, [3]) as child:
        read_until(child, "durable", 3)
        child.kill()
        child.wait()
    with tierstore.open(config) as store:
        resumed = store.resume()
        assert resumed is not None
        assert resumed.step == 3
        assert_same_state(resumed.state, state_of(3, NBYTES))
        assert [c.attempt.step for c in store.checkpoints()] == [1, 2, 3]
    assert unfinished(s3_server, s3_bucket) == []
    # That a request had to be tried again, by a server that was busy, is no complaint of the store.
    ours = [record for record in caplog.records if record.name.startswith("tierstore.")]
    assert [record.getMessage() for record in ours if not record.name.startswith("tierstore.storage.s3")] == []


def test_of_two_who_decide_a_checkpoint_in_the_bucket_the_first_wins_and_the_other_is_told(
    s3_server: S3Server, s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy
) -> None:
    commit = proxy.add(Rule(method="PUT", path=r"000000\.json", action="hold"))
    store = tierstore.open(alone(object_tier(s3_bucket, s3_options, proxy.endpoint_url)))
    ticket = store.save(1, state_of(1, NBYTES))
    assert commit.reached.wait(WITHIN)

    async def condemn() -> str:
        storage = S3Storage(s3_bucket, s3_options)
        try:
            return (await decide_fate(storage, ticket.attempt, "condemned", {"reason": "a rival"}, SystemClock())).kind
        finally:
            await storage.close()

    assert asyncio.run(condemn()) == "condemned"
    commit.release()
    with pytest.raises(SaveError, match="a rival") as caught:
        ticket.wait("committed", WITHIN)
    assert isinstance(caught.value.__cause__, CondemnedError)
    assert store.latest() is None
    with pytest.raises(SaveError, match="step 1"):
        store.close()
    assert asyncio.run(condemn()) == "condemned"  # still the rival's record: nothing wrote over it
    assert unfinished(s3_server, s3_bucket) == []


@pytest.mark.parametrize("how", ["stop", "crash"])
def test_a_server_that_goes_down_in_mid_upload_stops_no_training_and_gets_everything_when_it_is_back(
    how: str, tmp_path: Path, seaweed: SeaweedServer
) -> None:
    seaweed.start()
    uri = f"s3://{seaweed.make_bucket('cycle')}/store"
    with CuttingProxy(seaweed.endpoint_url) as proxy:
        held = proxy.add(Rule(method="PUT", path="partNumber=2", action="hold"))
        with tierstore.open(three_tiers(tmp_path, object_tier(uri, seaweed.options(), proxy.endpoint_url))) as store:
            tickets = [store.save(1, state_of(1, NBYTES))]
            assert held.reached.wait(WITHIN)
            await_parts(seaweed, uri, {1, 3})  # an upload that holds something is gone on with, however long the server is away
            getattr(seaweed, how)()
            held.release()
            for step in (2, 3):  # training goes on, and its saves commit
                tickets.append(store.save(step, state_of(step, NBYTES)))
                tickets[-1].wait("committed", WITHIN)
            assert not any(ticket.done("durable") for ticket in tickets)
            seaweed.start()
            store.sync(WITHIN)
            for ticket in tickets:
                ticket.wait("durable", 0)
    assert unfinished(seaweed, uri) == []
    for folder in ("node", "shared"):
        shutil.rmtree(tmp_path / folder)
    with tierstore.open(alone(object_tier(uri, seaweed.options()))) as store:
        for step in (1, 2, 3):
            assert_same_state(store.load(step), state_of(step, NBYTES))


def test_an_endpoint_that_is_down_for_the_whole_run_is_named_at_close_and_the_next_process_finishes(
    tmp_path: Path, seaweed: SeaweedServer, caplog: pytest.LogCaptureFixture
) -> None:
    uri = "s3://cycle/store"
    config = three_tiers(tmp_path, object_tier(uri, seaweed.options()), patience="1s")
    store = tierstore.open(config)
    assert "tier=object can't be reached" in caplog.text
    tickets = [store.save(step, state_of(step, NBYTES)) for step in (1, 2, 3)]
    for ticket in tickets:
        ticket.wait("committed", WITHIN)
    with pytest.raises(DeadlineError, match="object") as waited:
        tickets[0].wait("durable", 0.1)
    assert waited.value.context["step"] == 1
    with pytest.raises(DeadlineError) as caught:
        store.close()
    assert "object: steps 1, 2, 3" in str(caught.value)
    assert "kept failing" in str(caught.value)
    assert "tierstore sync" in str(caught.value)
    assert {(p.tier, p.attempt.step) for p in caught.value.context["pending"]} == {("object", s) for s in (1, 2, 3)}

    seaweed.start()
    seaweed.make_bucket("cycle")
    written = tmp_path / "tierstore.yaml"
    patient = three_tiers(
        tmp_path, object_tier(uri, seaweed.options()), patience="60s"
    )  # a server that has just started may refuse for a while
    written.write_text(json.dumps(patient))  # JSON is YAML
    done = run_tierstore("-c", str(written), "sync", "--no-progress")
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in ("node", "shared"):
        shutil.rmtree(tmp_path / folder)
    with tierstore.open(alone(object_tier(uri, seaweed.options()))) as store:
        for step in (1, 2, 3):
            assert_same_state(store.load(step), state_of(step, NBYTES))
    assert unfinished(seaweed, uri) == []


def test_single_tensors_and_rows_come_out_of_the_bucket_for_hardly_more_than_their_bytes(
    s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy
) -> None:
    state = state_of(1, NBYTES)
    weight = state["model"]["weight"]
    with tierstore.open(alone(object_tier(s3_bucket, s3_options))) as store:
        store.save(1, state).wait("durable", WITHIN)
    with tierstore.open(alone(object_tier(s3_bucket, s3_options, proxy.endpoint_url))) as store:
        checkpoint = store.open_checkpoint(1)
        lease = checkpoint.replica.lease  # type: ignore[attr-defined]
        assert store._session.run(lease.settled())  # its look at the log goes on in the background, and is no reading of tensors
        proxy.clear()
        assert checkpoint["model.weight"].shape == weight.shape
        assert proxy.body_nbytes == 0  # nothing is read before it is asked for
        for first, last in ((20_000, 60_000), (0, len(weight) // 8), (len(weight) - 9000, len(weight)), (7, 8)):
            proxy.clear()
            assert torch.equal(checkpoint["model.weight"][first:last], weight[first:last])
            wanted = weight[first:last].nbytes
            assert wanted <= proxy.body_nbytes <= 1.05 * wanted + 2 * BLOCK
            assert checkpoint.replica.bytes_fetched["object"] >= proxy.body_nbytes
        proxy.clear()
        assert torch.equal(checkpoint["model.half"].full(), state["model"]["half"])
        assert proxy.body_nbytes <= 2 * BLOCK
        proxy.clear()
        assert_same_state(store.load(1), state)
        assert proxy.body_nbytes <= 1.05 * NBYTES + 2 * BLOCK
