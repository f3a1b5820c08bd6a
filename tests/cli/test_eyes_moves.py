"""``push`` and ``pull``: chosen checkpoints onto chosen tiers, never half visible, also where a copy was dropped; retention has its say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_kit import Shell, make_store, shell_on

from tierstore.cli.find import find_checkpoint
from tierstore.config import load_config
from tierstore.tiers import bring as bringing
from tierstore.tiers.session import Session


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("moves") / "store")


@pytest.fixture
def shell(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    shutil.copytree(made.parent, tmp_path / "store")
    return shell_on(tmp_path / "store" / made.name, monkeypatch)


@pytest.fixture
def free(shell: Shell) -> Shell:
    """The same store without a policy, and with room: nothing is asked."""
    text = shell.config.read_text().replace("retention: retention.yaml\n", "").replace(", capacity: 256KiB", "")
    shell.config.write_text(text)
    return shell


def states(shell: Shell, *arguments: object, code: int = 0) -> list[tuple[int, str, str]]:
    return [(v["step"], v["tier"], v["state"]) for v in shell.of_type("copy", *arguments, code=code)]


def tiers_of(shell: Shell, step: int) -> dict[str, str]:
    return next(c["tiers"] for c in shell.of_type("checkpoint", "ls") if c["step"] == step)


def test_push_copies_what_a_further_tier_lacks_and_says_what_is_there(free: Shell) -> None:
    assert states(free, "push", "@12500", "-n") == [(12500, "object", "planned")]
    assert "object" not in tiers_of(free, 12500)
    assert states(free, "push", "@12500", "@12000") == [(12000, "object", "already"), (12500, "object", "done")]
    assert tiers_of(free, 12500)["object"] == "complete"
    assert free("verify", "@12500", "--level", "full").exit_code == 0


def test_pull_takes_back_what_a_node_tier_had_dropped(free: Shell) -> None:
    assert free("evict", "@11000", "--tier", "nvme", "-y").exit_code == 0
    marker = next((free.folder / "nvme/llama/.log").glob("step-0000011000-*/evicted*"))
    assert states(free, "pull", "@11000") == [(11000, "nvme", "done")]
    assert not marker.exists()
    assert tiers_of(free, 11000)["nvme"] == "complete"
    assert list(free.folder.glob("nvme/llama/.log/step-0000011000-*/receipt-00000.json"))
    assert free("verify", "@11000", "--level", "full", "--tier", "nvme").exit_code == 0
    assert states(free, "pull", "@11000") == [(11000, "nvme", "already")]
    assert free.of_type("sync", "sync")[0]["failed"] == 0  # a worker takes it for its own copy


@pytest.mark.parametrize("tier", ["pfs", "object"])
def test_a_copy_that_was_dropped_comes_back_also_where_the_log_decides(free: Shell, tier: str) -> None:
    assert free("evict", "@11000", "--tier", tier, "-y").exit_code == 0
    assert states(free, "push", "@11000") == ([(11000, "object", "already")] if tier == "pfs" else [])  # not by itself
    assert tier not in tiers_of(free, 11000)
    assert states(free, "pull" if tier == "pfs" else "push", "@11000", "--to", tier) == [(11000, tier, "done")]
    assert tiers_of(free, 11000) == {"nvme": "complete", "pfs": "complete", "object": "complete"}
    assert free("verify", "@11000", "--level", "full").exit_code == 0
    assert free("evict", "@11000", "--tier", "nvme", "-y").exit_code == 0  # it counts again


@pytest.mark.parametrize(
    ("tier", "point"),
    [("nvme", "promote.before-manifest"), ("pfs", "promote.before-manifest"), ("object", "promote.after-file")],
)
def test_what_was_interrupted_is_not_there_and_goes_on(free: Shell, tier: str, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free("evict", "@11000", "--tier", tier, "-y").exit_code == 0
    verb = "push" if tier == "object" else "pull"

    class Killed(Exception):
        pass

    def die(name: str) -> None:
        if name == point:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("tierstore.tiers.copying.reach" if point == "promote.after-file" else "tierstore.tiers.copies.reach", die)
        assert "internal: Killed" in free(verb, "@11000", "--to", tier).stderr
    assert tiers_of(free, 11000).get(tier) in ("evicting", None)
    assert free("verify", "@11000", "--level", "full").exit_code == 0  # nothing that counts is damaged
    assert states(free, verb, "@11000", "--to", tier) == [(11000, tier, "done")]
    assert tiers_of(free, 11000)[tier] == "complete"


def test_a_collector_leaves_alone_what_is_being_brought_back(free: Shell) -> None:
    assert free("evict", "@11000", "--tier", "object", "-y").exit_code == 0
    folder = next((free.folder / "pfs/llama").glob("step-0000011000-*"))
    rest = free.folder / "object/llama" / folder.name
    shutil.copytree(folder, rest)
    with Session.open(load_config(free.config)) as session:
        _, info = find_checkpoint(session, "@11000")
        lease = session.leases.hold(info, kind=bringing.BRING)

        async def begin() -> None:
            lease.begin()
            assert await lease.settled()

        session.run(begin())
        assert any("is copying it" in v["why"] for v in free.of_type("waiting", "gc", "-y"))
        assert (rest / "manifest.json").exists()
    free("gc", "-y")
    assert not rest.exists() or not list(rest.iterdir())


def test_files_that_a_collector_takes_away_meanwhile_are_copied_once_more(free: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had looked before the lease was there: it deletes what it listed, when it likes."""
    assert free("evict", "@11000", "--tier", "object", "-y").exit_code == 0
    taken: list[str] = []
    real = bringing.record_replica

    async def take_away(context: object, view: object, target: object, copied: object) -> None:
        await real(context, view, target, copied)  # type: ignore[arg-type]
        if not taken:
            victim = next((free.folder / "object/llama").glob("step-0000011000-*/shard-*"))
            victim.unlink()
            taken.append(victim.name)

    monkeypatch.setattr(bringing, "record_replica", take_away)
    assert states(free, "push", "@11000", "--to", "object") == [(11000, "object", "done")]
    assert taken
    assert free("verify", "@11000", "--level", "full").exit_code == 0


def test_a_tier_that_would_drop_it_at_once_is_told_and_asked_for(shell: Shell) -> None:
    shell.config.write_text(shell.config.read_text().replace("256KiB", "1GiB"))
    assert shell("evict", "@11000", "--tier", "nvme", "-y").exit_code == 0
    refused = shell("pull", "@11000")
    assert refused.exit_code == 7
    assert "nvme would drop llama@11000 again with the next gc: nvme keeps last 1" in refused.stderr
    assert "tierstore hold" in refused.stderr
    assert shell.of_type("copy", "pull", "@11000", "-n")[0]["reason"] == "nvme keeps last 1"
    assert states(shell, "pull", "@11000", "-y") == [(11000, "nvme", "done")]
    shell("gc", "-y")
    assert "nvme" not in tiers_of(shell, 11000)  # as was said
    shell("hold", "@11000", "--name", "eval", "--reason", "evaluation")
    assert states(shell, "pull", "@11000") == [(11000, "nvme", "done")]
    shell("gc", "-y")
    assert tiers_of(shell, 11000)["nvme"] == "complete"


def test_what_can_not_be_moved_says_why(shell: Shell) -> None:
    assert shell("pull", "@11000", "--to", "nvm").exit_code == 2
    assert "did you mean 'nvme'" in shell("pull", "@11000", "--to", "nvm").stderr
    assert shell("pull", "@7").exit_code == 4
    assert shell("push", "@11000", "--tier", "object").exit_code == 2
    shell("evict", "@11000", "--tier", "nvme", "-y")
    assert "tierstore pull" in shell("push", "@11000", "--to", "nvme").stderr
    shell("prune", "-y")
    expired = next(c["step"] for c in shell.of_type("checkpoint", "ls") if c["state"] == "expired")
    shell("evict", f"@{expired}", "--tier", "object", "-y")
    gone = shell("push", f"@{expired}", "--to", "object", "-y")
    assert (gone.exit_code, "tierstore undelete" in gone.stderr) == (7, True)
