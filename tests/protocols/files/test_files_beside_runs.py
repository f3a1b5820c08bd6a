"""Files and checkpoints in the same tiers: neither is taken for the other, and the verbs for runs leave files alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import make_store, shell_on
from files_kit import bytes_of, content, opened, the_file, until_pending_on
from tiers_kit import failing, flip

from tierstore.config import load_config
from tierstore.errors import TemporaryError, TierStoreError
from tierstore.tiers.catalog import runs
from tierstore.tiers.session import Session

TIERS = ("nvme", "pfs", "object")
VERBS = (
    ["ls"],
    ["status"],
    ["verify", "--level", "full"],
    ["du"],
    ["df"],
    ["plan"],
    ["prune", "--yes"],
    ["gc", "--yes"],
    ["recover", "--yes"],
    ["repair", "--yes"],
    ["sync"],
)


def lying(folder: Path) -> dict[str, bytes]:
    """Every file below ``.files`` of every tier."""
    return {str(p.relative_to(folder)): p.read_bytes() for tier in TIERS for p in (folder / tier / ".files").rglob("*") if p.is_file()}


def test_what_is_done_to_runs_does_nothing_to_files_and_the_other_way_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_store(tmp_path)
    config.write_text(config.read_text().replace("256KiB", "10MiB"))
    with opened(config) as (session, files):
        before = session.run(runs(session.tiers))
        for path in ("llama", "llama/config.json", "llama/step-0000010000-01M8N4GC4PZMGV76TDT52MGPWM/x", "notes.txt"):
            session.run(files.put(path, bytes_of(len(path), 5000)))
        session.run(files.make_folder("empty"))
        session.run(files.sync(120))
        assert session.run(runs(session.tiers)) == before == ["llama"]
        assert [one.path for one in session.run(files.list(recursive=False))] == ["empty", "llama", "llama", "notes.txt"]
    kept = lying(tmp_path)
    assert len(kept) == 3 * 9
    shell = shell_on(config, monkeypatch)
    said = ""
    for verb in VERBS:
        result = shell(*verb)
        said += f"$ {' '.join(verb)}\n{result.output}\n"
    assert ".files" not in said
    assert lying(tmp_path) == kept
    with Session.open(load_config(config)) as session:
        assert session.run(runs(session.tiers)) == ["llama"]


def test_sync_carries_files_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_store(tmp_path)
    down = {"object": failing(TemporaryError("down"), "write", "put")}
    with opened(config, wrap=down, drain=None) as (session, files):
        session.run(files.put("gone.txt", b"y"))
        session.run(files.remove(["gone.txt"]))
        session.run(files.put("notes.txt", b"x" * 5000))
        until_pending_on(files, "object", "down")
        with pytest.raises(TierStoreError):
            session.run(files.sync(0.2))
    shell = shell_on(config, monkeypatch)
    told = [(v["path"], v["tier"], v["nbytes"], v["state"]) for v in shell.of_type("file", "sync", "--dry-run")]
    assert told == [("gone.txt", "object", 0, "pending"), ("notes.txt", "object", 5000, "pending")]
    shown = shell("sync")
    assert "gone.txt remove from object" in shown.output
    assert "notes.txt copy to object, 4.9KiB" in shown.output.replace("4.88KiB", "4.9KiB")
    assert shell.of_type("file", "sync") == []
    with opened({"tiers": [str(tmp_path / "object")]}) as (session, files):
        assert content(session, files, "notes.txt") == b"x" * 5000
    (usage,) = [v for v in shell.of_type("tier", "df") if v["tier"] == "object"]
    assert 5000 < usage["plain_nbytes"] < usage["store_nbytes"]


def test_verify_finds_what_is_damaged_of_files_and_repair_mends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_store(tmp_path)
    config.write_text(config.read_text().replace("256KiB", "64MiB"))
    with opened(config) as (session, files):
        for name in ("bits", "short", "lost", "entry", "good"):
            session.run(files.put(f"d/{name}", bytes_of(len(name), 2_500_000)))
        session.run(files.put("d/empty", b""))
        session.run(files.make_folder("made"))
    shell = shell_on(config, monkeypatch)
    shell("repair")  # the store's own broken attempt stays as it is
    assert not [f for f in shell.of_type("finding", "verify", "--level", "full") if f["code"] >= "V120"]
    flip(the_file(tmp_path / "nvme", "d/bits@/*.data"), 1_200_000)
    short = the_file(tmp_path / "pfs", "d/short@/*.data")
    short.write_bytes(short.read_bytes()[:-1])
    the_file(tmp_path / "object", "d/lost@/*.data").unlink()
    flip(the_file(tmp_path / "pfs", "d/entry@/*.json"))
    for path in (tmp_path / "object" / ".files" / "d" / "good@").iterdir():
        path.unlink()

    def found(*level: str, code: int) -> list[tuple[str, str, str, list[int]]]:
        findings = shell.of_type("finding", "verify", *level, code=code)
        return sorted((f["code"], f["tier"], f["file"], f["blocks"]) for f in findings if f["code"] >= "V120")

    quick = [("V120", "object", "d/lost", []), ("V120", "pfs", "d/short", []), ("V123", "object", "d/good", [])]
    assert found(code=6) == quick
    deep = sorted([*quick, ("V121", "nvme", "d/bits", [1]), ("V122", "pfs", "d/entry", [])])
    assert found("--level", "full", code=6) == deep
    assert "d/bits" in shell("verify", "--level", "full").output
    assert shell("repair", "-n").output.count("would be mended") >= 4
    assert found("--level", "full", code=6) == deep
    assert shell("repair").exit_code == 0
    assert found("--level", "full", code=0) == [("V123", "object", "d/good", [])]
    shell("sync")
    assert found("--level", "full", code=0) == []
    for path in (tmp_path / tier / ".files" / "d" / "bits@" for tier in TIERS):
        flip(next(path.glob("*.data")))
    assert shell("repair").exit_code == 6
    assert "no tier has a good copy of 'd/bits'" in shell("repair").output.replace("\n", " ")
