"""The worker: saves flow through all tiers in the background, bounded, reported, and never lost."""

from __future__ import annotations

from pathlib import Path

from tierstore.testing.flows import LoopSession, folder_tiers, new_attempt, save_job
from tierstore.tiers.jobs import WorkerOptions
from tierstore.tiers.worker import Worker

LAYOUT = {"memory": "node", "nvme": "node", "pfs": "shared", "object": "shared"}
FAST = WorkerOptions(poll_s=0.01, retry_first_s=0.01, retry_most_s=0.05, patience_s=2.0)


def test_a_save_reaches_every_tier_and_each_replica_is_complete_in_itself(tmp_path: Path) -> None:
    with LoopSession(folder_tiers(tmp_path, LAYOUT, durable_at="object")) as session:
        worker = Worker(session, "r", options=FAST)
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("durable", 20)
        worker.close(20)
        assert all(ticket.done(level) for level in ("staged", "committed", "durable", *LAYOUT))
        assert [e.level for e in ticket.events][:2] == ["staged", "memory"]
        for tier in LAYOUT:
            files = {p.name for p in (tmp_path / tier / ticket.attempt.folder).iterdir()}
            assert {"manifest.json", "index.safetensors", "objects.json", "part-00000.safetensors"} <= files
            assert (tmp_path / tier / ticket.attempt.record_path(0)).read_bytes()

