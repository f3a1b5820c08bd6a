"""Quantised copies: made where a tier asks for them, proved by their own chain, read last and aloud, and counted nowhere."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_tiers_kit import MOMENTS, Place, adam_state
from tiers_kit import SteppedClock

from tierstore.config import load_config
from tierstore.config_packing import QuantiseConfig
from tierstore.errors import FormatError, IntegrityError, RefusedError, TierStoreError, UsageError
from tierstore.format.digest import digest_of
from tierstore.format.quantised import QuantisedCopy, QuantisedFile, decode_quantised, encode_quantised
from tierstore.storage.contract import PackedFacts
from tierstore.testing.bucket import Bucket
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.bring import BRING, bring
from tierstore.tiers.catalog import CheckpointInfo, scan
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.gc.standing import copies_standing
from tierstore.tiers.log import read_log
from tierstore.tiers.log_facts import fold, quantised_text
from tierstore.tiers.promote import promote
from tierstore.tiers.quantised import Lossy, QuantisedReader, lossy_blocks, quantising
from tierstore.tiers.recover import recover
from tierstore.tiers.repair import repair
from tierstore.tiers.retention.facts import counted_copies, held_nbytes, holds, tier_facts
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tier
from tierstore.tiers.verify import verify

WARNING = "NOT read exactly"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


@pytest.fixture
def config(place: Place) -> dict[str, Any]:
    """Far away the moments are quantised."""
    return place.config(codec="zstd", quantise="q8")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One checkpoint with a quantised copy, made once."""
    with pytest.MonkeyPatch.context() as patch:
        place = Place(tmp_path_factory.mktemp("template"), patch)
        place.save(place.config(codec="zstd", quantise="q8"), 1)
    return place


@pytest.fixture
def saved(place: Place, template: Place) -> None:
    """The tiers of the test hold that checkpoint."""
    place.take(template)


def info_of(session: Session, step: int = 1) -> CheckpointInfo:
    found = session.run(scan(session.tiers, "r")).find(step)
    assert found is not None
    return found


def moments(state: dict[str, Any]) -> list[torch.Tensor]:
    return [state["optim"]["w"][name] for name in MOMENTS]


def without_moments(state: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in state["optim"]["w"].items() if name not in MOMENTS}
    return {**state, "optim": {"w": kept}}


def is_near(state: dict[str, Any], wanted: dict[str, Any], *, step_error: float) -> bool:
    """All but the moments bit for bit; the step that these lead to by so much, as a share of the exact one (L2); zeros exact."""
    assert_same_state(without_moments(state), without_moments(wanted))
    (m, v), (m_exact, v_exact) = moments(state), moments(wanted)
    assert torch.equal(v == 0, v_exact == 0)
    step, exact = m / (v.sqrt() + 1e-8), m_exact / (v_exact.sqrt() + 1e-8)
    error = float((step - exact).norm() / exact.norm())
    return 0 < error < step_error


# ---- made


@pytest.mark.usefixtures("saved")
def test_a_quantised_copy_is_recorded_as_one_and_proved_from_the_record_down(place: Place, config: dict[str, Any]) -> None:
    with place.session(config, create=False) as session:
        info = info_of(session)
        assert info.replicas == {"node": "complete", "shared": "complete", "far": "quantised"}
        told = info.quantised_on("far")
        assert told is not None
        document = place.bucket._files[info.attempt.quantised_path]
        assert told["digest"] == digest_of(document)
        assert (told["scheme"], told["generation"]) == ("q8", 1)
        assert 0 < told["mean_error"] < told["max_error"]
        copy = decode_quantised(document)
        facts = session.run(session.tiers.get("far").storage.packed_facts(info.attempt.path(copy.files[0].name)))  # type: ignore[attr-defined]
        assert [file.footer for file in copy.files] == [facts.digest]
        assert {name: t["scheme"] for file in copy.files for name, t in file.tensors.items()} == {f"optim.w.{m}": "q8" for m in MOMENTS}
        assert set(copy.files[0].tensors["optim.w.exp_avg"]) >= {"max_error", "mean_error", "kind"}
        assert info.taken_on("far") < 0.6 * info.nbytes
        # Its own record lies beside it: where the log is lost, what is left is still proved.
        beside = [json.loads(place.bucket._files[name]) for name in place.names("/.log/") if name.endswith("1.json")]
        assert [record["data"]["quantised"]["digest"] for record in beside if record["kind"] == "replicated"] == [told["digest"]]


@pytest.mark.usefixtures("saved")
def test_a_quantised_copy_is_made_once(place: Place, config: dict[str, Any]) -> None:
    before = dict(place.bucket._files)
    with place.session(config) as session:
        assert session.run(promote(session.tiers, info_of(session).attempt, "far", clock=session.clock)).done
    assert place.bucket._files == before


@pytest.mark.parametrize(("wanted", "state", "scheme"), [("exact", "complete", ""), ("q4", "quantised", "q4"), (None, "quantised", "q8")])
def test_each_save_may_say_how_it_is_quantised(place: Place, config: dict[str, Any], wanted: str | None, state: str, scheme: str) -> None:
    place.save(config, 1, quantise=wanted)
    with place.session(config, create=False) as session:
        info = info_of(session)
        assert info.replicas["far"] == state
        assert (info.quantised_on("far") or {"scheme": ""})["scheme"] == scheme


def test_a_scheme_that_is_none_is_told_before_anything_is_staged(place: Place, config: dict[str, Any]) -> None:
    with place.open(config) as store:
        with pytest.raises(UsageError, match="'q9' is no scheme"):
            store.save(1, adam_state(1), quantise="q9")  # type: ignore[arg-type]
        assert store.checkpoints() == []


def test_a_scheme_where_no_tier_quantises_is_told_before_anything_is_staged(place: Place) -> None:
    with place.open(place.config(codec="zstd")) as store:
        with pytest.raises(UsageError, match="this store has none"):
            store.save(1, adam_state(1), quantise="q8")
        store.save(1, adam_state(1), quantise="exact").wait("far", timeout=200)
        assert [info.step for info in store.checkpoints()] == [1]


def test_what_is_excluded_stays_exact(place: Place) -> None:
    config = place.config(codec="zstd", quantise={"scheme": "q8", "exclude": ["*exp_avg"], "min_numel": 10})
    place.save(config, 1)
    place.lose_exact_shards()
    with place.open(config) as store:
        state = store.load()
    assert torch.equal(moments(state)[0], moments(adam_state(1))[0])
    assert not torch.equal(moments(state)[1], moments(adam_state(1))[1])


# ---- read


@pytest.mark.usefixtures("saved")
def test_exact_copies_are_read_first_and_nothing_is_said(place: Place, config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    for path in (place.root / "node").rglob("shard-*"):
        path.unlink()
    with place.open(config) as store:
        assert_same_state(store.load(), adam_state(1))
    assert WARNING not in caplog.text


@pytest.mark.usefixtures("saved")
def test_a_quantised_copy_is_read_where_no_exact_one_is_left_and_says_so_once(
    place: Place, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    place.lose_exact_shards()
    with place.open(config) as store:
        resumed = store.resume()
        assert resumed is not None
        assert is_near(resumed.state, adam_state(1), step_error=0.05)
        with store.open_checkpoint() as checkpoint:
            rows = checkpoint["optim.w.exp_avg_sq"][100:103]
    assert torch.equal(rows, moments(resumed.state)[1][100:103])
    warned = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert len(warned) == 2  # for each time that it was opened
    assert all(r.levelno == logging.WARNING for r in caplog.records if WARNING in r.getMessage())
    assert "tier far, q8 (steps off by" in warned[0]
    assert "shared: there is no file" in warned[0]


def test_rows_of_weights_are_exact_from_a_quantised_copy_and_nothing_is_said(
    place: Place, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    large = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(9))  # blocks of its own
    with place.open(config) as store:
        store.save(1, {**adam_state(1), "large": large}).wait("far", timeout=200)
    place.lose_exact_shards()
    with place.open(config) as store, store.open_checkpoint() as checkpoint:
        got = checkpoint["large"][400:408]
        assert torch.equal(got, large[400:408])
        assert WARNING not in caplog.text
        checkpoint["optim.w.exp_avg"][0:1]
        assert WARNING in caplog.text


@pytest.mark.parametrize("block_size", ["64KiB", "4MiB"])
def test_digests_over_blocks_of_another_size_prove_what_is_exact(place: Place, block_size: str) -> None:
    config = place.config(codec="zstd", quantise="q8", more={"io": {"block_size": block_size}})
    place.save(config, 1)
    place.lose_exact_shards()
    with place.open(config) as store:
        assert is_near(store.load(), adam_state(1), step_error=0.05)


@pytest.mark.parametrize("damage", ["frame", "footer", "document", "no document"])
@pytest.mark.usefixtures("saved")
def test_what_does_not_prove_is_not_read(place: Place, config: dict[str, Any], damage: str) -> None:
    place.lose_exact_shards()
    shard, document = place.names("shard-")[0], place.names("quantised.json")[0]
    if damage == "frame":
        place.flip(shard, int(len(place.bucket._files[shard]) * 0.9))
    elif damage == "footer":
        place.flip(shard, len(place.bucket._files[shard]) - 40)
    elif damage == "document":
        place.bucket._set(document, place.bucket._files[document].replace(b'"mean_error": 0.0', b'"mean_error": 0.1'))
    else:
        place.remove(document)
    with place.open(config) as store, pytest.raises(IntegrityError, match="far: "):
        store.load()


# ---- counts nowhere, and is no source


@pytest.mark.usefixtures("saved")
def test_a_quantised_copy_counts_nowhere(place: Place, config: dict[str, Any]) -> None:
    with place.session(config) as session:
        info = info_of(session)
        facts = fold(session.run(read_log(session.tiers.authority.storage, info.attempt)))
        standing = session.run(copies_standing(session.tiers, info.attempt, facts, without="shared"))
        assert standing.standing == ()
        assert "far has a quantised copy only" in standing.missing
        assert counted_copies(info, tier_facts(session.tiers)) == ("shared",)
        assert holds(info, "far")
        assert held_nbytes(info, "far") == info.taken_on("far") < info.nbytes
    with place.open({**config, "retention": {"keep": [{"last": 1}]}}) as store, pytest.raises(RefusedError):
        store.retention.evict(1, "shared")


@pytest.mark.usefixtures("saved")
def test_nothing_is_copied_or_mended_from_a_quantised_copy(place: Place, config: dict[str, Any]) -> None:
    place.lose_exact_shards()
    shutil.rmtree(place.root / "node")
    with place.session(config) as session:
        info = info_of(session)
        context = CopyContext.make(session.tiers, session.clock)
        lease = session.leases.hold(info, kind=BRING)
        with pytest.raises(TierStoreError, match="no good copy"):
            session.run(bring(context, info.attempt, session.tiers.get("node"), lease=lease))
        report = session.run(repair(session.tiers, "r", clock=session.clock, only=["shared"]))
        assert [u.file for u in report.unmended] == ["shard-00000-of-00001.safetensors"]
        assert report.mended == ()
    assert list(place.root.rglob("shard-*")) == []


# ---- verified and mended


@pytest.mark.parametrize(("damage", "code"), [("frame", "V103"), ("exact frame", "V103"), ("footer", "V103"), ("no document", "V124")])
@pytest.mark.usefixtures("saved")
def test_damage_in_a_quantised_copy_is_found_and_mended_from_an_exact_one(
    place: Place, config: dict[str, Any], damage: str, code: str
) -> None:
    shard, document = place.names("shard-")[0], place.names("quantised.json")[0]
    good = place.bucket._files[shard], place.bucket._files[document]
    with place.session(config) as session:
        assert session.run(verify(session.tiers, "r", level="full")).findings == ()
        if damage == "no document":
            place.remove(document)
        else:
            at = {"frame": 0.9, "exact frame": 0.3}.get(damage)
            place.flip(shard, len(good[0]) - 40 if at is None else int(at * len(good[0])))
        found = session.run(verify(session.tiers, "r", level="full", only=["far"]))
        assert code in {f.code for f in found.damage}
        assert session.run(repair(session.tiers, "r", clock=session.clock)).exit_code == 0
        assert (place.bucket._files[shard], place.bucket._files[document]) == good
        assert session.run(verify(session.tiers, "r", level="full")).damage == ()
        info = info_of(session)
        assert info.replicas["far"] == "quantised"
        assert counted_copies(info, tier_facts(session.tiers)) == ("shared",)
    place.lose_exact_shards()
    with place.open(config) as store:
        assert is_near(store.load(), adam_state(1), step_error=0.05)


@pytest.mark.usefixtures("saved")
def test_a_damaged_quantised_copy_stays_as_it_is_where_no_exact_one_is_left(place: Place, config: dict[str, Any]) -> None:
    place.lose_exact_shards()
    shard = place.names("shard-")[0]
    place.flip(shard, int(0.9 * len(place.bucket._files[shard])))
    before = place.bucket._files[shard]
    with place.session(config) as session:
        report = session.run(repair(session.tiers, "r", clock=session.clock, only=["far"]))
        assert [(u.tier, u.file) for u in report.unmended] == [("far", "shard-00000-of-00001.safetensors")]
    assert place.bucket._files[shard] == before


# ---- exact after all


@pytest.mark.usefixtures("saved")
def test_what_was_resumed_from_a_quantised_copy_is_stored_exact(
    place: Place, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    place.lose_exact_shards()
    caplog.set_level(logging.INFO, "tierstore.tiers.copies")
    with place.open(config) as store:
        resumed = store.resume()
        assert resumed is not None
        store.save(2, resumed.state).wait("far", timeout=200)
    assert "is stored exact: the training was resumed from a quantised copy" in caplog.text
    with place.session(config, create=False) as session:
        assert info_of(session, 2).replicas["far"] == "complete"
    for path in [p for name in ("node", "shared") for p in (place.root / name).rglob("*0000000002*/shard-*")]:
        path.unlink()
    with place.open(config) as store:  # the lineage stays what it was
        assert_same_state(store.load(2), resumed.state)
        store.save(3, adam_state(3)).wait("far", timeout=200)
    with place.session(config, create=False) as session:
        assert info_of(session, 3).replicas["far"] == "complete"


def test_more_generations_are_quantised_where_the_tier_says_so(place: Place) -> None:
    config = place.config(codec="zstd", quantise={"scheme": "q8", "max_generation": 2})
    place.save(config, 1)
    for step, state in ((2, "quantised"), (3, "complete")):
        place.lose_exact_shards()
        with place.open(config) as store:
            resumed = store.resume()
            assert resumed is not None
            store.save(step, resumed.state).wait("far", timeout=200)
        with place.session(config, create=False) as session:
            info = info_of(session, step)
            assert info.replicas["far"] == state
            assert (info.quantised_on("far") or {"generation": None})["generation"] == (2 if state == "quantised" else None)


@pytest.mark.usefixtures("saved")
def test_a_training_that_read_exact_copies_has_no_generation(place: Place, config: dict[str, Any]) -> None:
    place.save(config, 2)
    with place.open(config) as store:
        resumed = store.resume()
        assert resumed is not None
        store.save(3, resumed.state).wait("far", timeout=200)
    with place.session(config, create=False) as session:
        assert info_of(session, 3).replicas["far"] == "quantised"


@pytest.mark.usefixtures("saved")
def test_an_exact_copy_can_be_asked_for_in_the_place_of_a_quantised_one(place: Place, config: dict[str, Any]) -> None:
    with place.session(config) as session:
        context, info = CopyContext.make(session.tiers, session.clock), info_of(session)

        def push(*, exact: bool) -> bool:
            lease = session.leases.hold(info, kind=BRING)
            return session.run(bring(context, info.attempt, session.tiers.get("far"), lease=lease, exact=exact))

        assert not push(exact=False)
        assert push(exact=True)
        assert not push(exact=True)
        info = info_of(session)
        assert info.replicas["far"] == "complete"
        assert counted_copies(info, tier_facts(session.tiers)) == ("shared", "far")
        assert place.names("quantised.json") == []
        assert session.run(verify(session.tiers, "r", level="full")).damage == ()
    place.lose_exact_shards()
    with place.open(config) as store:
        assert_same_state(store.load(), adam_state(1))


def exact_while_it_is_read(place: Place, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, damaged: bool) -> list[str]:
    """Only the bucket's quantised copy is left; when its shard is read, another process has just put an exact one in its place.

    Returns the names of shards that were put there, as they are. `damaged`: a byte of a moment is wrong in it.
    """
    quantised, log, swapped = dict(place.bucket._files), place.root / "shared" / "r" / ".log", list[str]()
    shutil.copytree(log, place.root / "log")
    with place.session(config) as session:
        context, info = CopyContext.make(session.tiers, session.clock), info_of(session)
        lease = session.leases.hold(info, kind=BRING)
        assert session.run(bring(context, info.attempt, session.tiers.get("far"), lease=lease, exact=True))
    exact = dict(place.bucket._files)
    (name,) = place.names("shard-")
    if damaged:
        at = exact[name].find(adam_state(1)["optim"]["w"]["exp_avg"].numpy().view(np.uint16)[100, ::2].tobytes())
        assert at > 0
        exact[name] = exact[name][:at] + bytes([exact[name][at] ^ 1]) + exact[name][at + 1 :]
    hold(place, quantised)
    shutil.rmtree(log)
    shutil.copytree(place.root / "log", log)
    place.lose_exact_shards()
    real = Bucket.read_into

    async def read_into(self: Bucket, path: str, offset: int, buffer: memoryview) -> None:
        if path == name and not swapped:
            swapped.append(name)
            hold(place, exact)
        await real(self, path, offset, buffer)

    monkeypatch.setattr(Bucket, "read_into", read_into)
    return swapped


def hold(place: Place, files: dict[str, bytes]) -> None:
    """The bucket has these files and no others."""
    for name in place.names(""):
        place.remove(name)
    for name, data in files.items():
        place.bucket._set(name, data)


@pytest.mark.usefixtures("saved")
def test_a_quantised_copy_that_becomes_exact_while_it_is_read_is_read_anew(
    place: Place, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swapped = exact_while_it_is_read(place, config, monkeypatch, damaged=False)
    with place.open(config) as store:
        assert_same_state(store.load(), adam_state(1))
    assert swapped
    assert WARNING not in caplog.text


@pytest.mark.usefixtures("saved")
def test_what_became_exact_while_it_was_read_is_proved_by_its_digests(
    place: Place, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = exact_while_it_is_read(place, config, monkeypatch, damaged=True)
    with place.open(config) as store, pytest.raises(IntegrityError, match="no tier has a good copy"):
        store.load()
    assert swapped


@pytest.mark.usefixtures("saved")
def test_a_copy_that_is_written_anew_again_and_again_is_given_up(
    place: Place, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = QuantisedReader.look, list[str]()

    async def look(self: QuantisedReader, name: str) -> Lossy:
        asked.append(name)
        return replace(await real(self, name), footer=str(len(asked)))

    monkeypatch.setattr(QuantisedReader, "look", look)
    place.lose_exact_shards()
    with place.open(config) as store, pytest.raises(TierStoreError, match="was written anew each time it was read"):
        store.load()


class Killed(BaseException):
    """The process ends here."""


POINTS = ("promote.after-file", "quantise.before-document", "quantise.after-document", "promote.before-replicated")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("then", ["q8", "exact"])
def test_a_copy_that_was_interrupted_is_finished_as_it_is_wanted_by_then(
    place: Place, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, point: str, then: str
) -> None:
    """Shards that are there, but not exact, never become part of a copy that is said to be."""
    with place.open({**config, "tiers": config["tiers"][:2]}) as store:
        store.save(1, adam_state(1)).wait("committed", timeout=200)

    def reach(name: str) -> None:
        if name == point:
            raise Killed

    with place.session(config) as session:
        info = info_of(session)
        with monkeypatch.context() as patch:
            for module in ("copies", "copying"):
                patch.setattr(f"tierstore.tiers.{module}.reach", reach)
            with pytest.raises(Killed):
                session.run(promote(session.tiers, info.attempt, "far", clock=session.clock))
        assert not info_of(session).replicated
        assert counted_copies(info_of(session), tier_facts(session.tiers)) == ("shared",)
    config = config if then == "q8" else place.config(codec="zstd")
    with place.session(config) as session:
        assert session.run(promote(session.tiers, info.attempt, "far", clock=session.clock)).done
        info = info_of(session)
        assert info.replicas["far"] == ("quantised" if then == "q8" else "complete")
        assert len(place.names("quantised.json")) == (then == "q8")
        assert session.run(verify(session.tiers, "r", level="full", only=["far"])).damage == ()
    place.lose_exact_shards()
    with place.open(config) as store:
        if then == "q8":
            assert is_near(store.load(), adam_state(1), step_error=0.05)
        else:
            assert_same_state(store.load(), adam_state(1))


# ---- where all else is lost


@pytest.mark.parametrize("folder", [False, True])
def test_a_quantised_copy_alone_is_loaded_and_recover_takes_it_for_no_authoritys(
    place: Place, config: dict[str, Any], caplog: pytest.LogCaptureFixture, folder: bool
) -> None:
    if folder:  # whose threads prove what they read
        config = place.config(uri=str(place.root / "far"), codec="zstd", quantise="q8")
    place.save(config, 1)
    place.lose_near()
    with place.session(config, create=False) as session:
        info = info_of(session)
        assert info.authority_lost
        assert (dict(info.replicas), info.usable, info.loadable) == ({"far": "quantised"}, False, True)
    with place.open(config) as store:
        assert is_near(store.load(), adam_state(1), step_error=0.05)
    assert WARNING in caplog.text
    with Session.open(load_config(config), create=True, lost="recover") as session:
        report = session.run(recover(session.tiers, "r", clock=session.clock))
        assert [(one.quantised, one.sources, one.nbytes, one.error) for one in report.rebuilt] == [(True, ("far",), 0, "")]
        info = info_of(session)
        assert not info.authority_lost
        assert (dict(info.replicas), info.dropped) == ({"far": "quantised"}, frozenset({"shared"}))
    assert not [p for name in ("node", "shared") for p in (place.root / name).rglob("shard-*")]
    with place.open(config) as store:
        assert is_near(store.load(), adam_state(1), step_error=0.05)
    with place.session(config, create=False) as session:
        assert info_of(session).quarantined == frozenset()


@pytest.mark.usefixtures("saved")
def test_a_quantised_copy_whose_record_is_lost_with_the_log_is_known_by_what_lies_beside_it(place: Place, config: dict[str, Any]) -> None:
    for name in place.names("000001.json"):
        place.remove(name)
    place.lose_near()
    with place.open(config) as store:
        assert is_near(store.load(), adam_state(1), step_error=0.05)
    with Session.open(load_config(config), lost="recover") as session:
        assert info_of(session).quantised_on("far") == {}
        assert session.run(recover(session.tiers, "r", clock=session.clock)).ok
        info = info_of(session)
        assert (info.quantised_on("far") or {})["digest"] == digest_of(place.bucket._files[info.attempt.quantised_path])
        assert session.run(verify(session.tiers, "r", level="full", only=["far"])).damage == ()


def test_a_quantised_copy_goes_with_what_proves_it(place: Place, config: dict[str, Any]) -> None:
    clock = SteppedClock()
    with place.open(config, clock) as store:
        for step in (1, 2):
            store.save(step, adam_state(step)).wait("far", timeout=200)
            clock.advance(7200)
    place.free(config, clock)
    assert [name for name in place.bucket._files if "step-0000000001" in name] == []
    assert len(place.names("quantised.json")) == 1


# ---- pure


def tier_of(place: Place, config: dict[str, Any]) -> Tier:
    with place.session(config) as session:
        return session.tiers.get("far")


def test_when_a_tier_quantises(place: Place, config: dict[str, Any]) -> None:
    tier = tier_of(place, config)
    assert quantising(tier, {}).scheme == "q8"
    assert quantising(tier, {"quantise": "q4"}).scheme == "q4"
    assert quantising(tier, {"quantise": "q77"}).scheme == "q8"  # of a newer version: the tier's own
    assert quantising(tier, {"quantise": "exact"}).hints.exact
    assert quantising(tier, {}, exact=True).hints.exact
    assert quantising(tier, {"lossy_generation": 1}).why_exact
    assert quantising(tier, {"lossy_generation": True}).scheme == "q8"
    twice = replace(tier, quantise=QuantiseConfig(scheme="q8", max_generation=2))
    assert (quantising(twice, {"lossy_generation": 1}).scheme, quantising(twice, {"lossy_generation": 1}).generation) == ("q8", 2)
    assert quantising(replace(tier, quantise=None), {"quantise": "q8"}).hints.exact


def test_blocks_of_two_sizes_are_related() -> None:
    facts = PackedFacts(digest="", stored_nbytes=0, lossy=frozenset({1, 3}), refers_to=(), quantised={}, block_nbytes=1 << 20)
    assert lossy_blocks(facts, 1 << 20) == {1, 3}
    assert lossy_blocks(facts, 1 << 19) == {2, 3, 6, 7}
    assert lossy_blocks(facts, 1 << 21) == {0, 1}


def a_copy(**changed: Any) -> QuantisedCopy:
    tensors = {"a": {"scheme": "q8", "max_error": 0.5, "mean_error": 0.1}, "b": {"scheme": "q8", "max_error": 0.25, "mean_error": 0.3}}
    file = QuantisedFile(name="shard-00000-of-00001.safetensors", footer="sha256:" + "0" * 64, stored_nbytes=7, tensors=tensors)
    settings: dict[str, Any] = {"generation": 1, "scheme": "", "files": [file], **changed}
    return QuantisedCopy.of("r", 1, "01ARZ3NDEKTSV4RRFFQ69G5FAV", **settings)


def test_the_document_keeps_what_it_was_given() -> None:
    copy = a_copy()
    assert (copy.scheme, copy.max_error, copy.mean_error) == ("q8", 0.5, 0.2)
    assert decode_quantised(encode_quantised(copy)) == copy
    none = a_copy(files=[], scheme="q4")
    assert none.scheme == "q4"
    assert none.max_error != none.max_error
    assert decode_quantised(encode_quantised(none)).files == ()
    assert (
        quantised_text({"scheme": "q8", "max_error": 0.031, "mean_error": 0.004})
        == "q8 (steps off by 0.4 % on average, by 0.031 of their RMS at worst)"
    )
    assert quantised_text({"scheme": "q4", "max_error": 4.474}) == "q4 (steps off by 4.5 of their RMS at worst)"
    assert quantised_text({}) == "quantised"
    assert quantised_text({"scheme": "q8", "max_error": float("nan"), "mean_error": float("nan")}).endswith("was not measured)")


def test_errors_that_nobody_can_measure_are_not_told_as_none(place: Place, config: dict[str, Any]) -> None:
    """Second moments below zero are stored as they are, the first ones beside them quantised: there is no step that could be off."""
    state = adam_state(1)
    state["optim"]["w"]["exp_avg_sq"] = -1 - state["optim"]["w"]["exp_avg_sq"]
    with place.open(config) as store:
        store.save(1, state).wait("far", timeout=200)
    with place.session(config) as session:
        told = info_of(session).quantised_on("far")
    assert told is not None
    assert quantised_text(told) == "q8 (how far steps are off was not measured)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"generation": 1', b'"generation": 0'),
        (b'"name": "shard-00000', b'"name": "../shard-00000'),
        (b'"stored_nbytes": 7', b'"stored_nbytes": -7'),
        (b"sha256:0000", b"sha256:xyz0"),
        (b'"tierstore.quantised"', b'"tierstore.manifest"'),
        (b'"scheme": "q8",\n ', b'"scheme": 8,\n '),
    ],
)
def test_a_document_that_was_changed_is_refused(old: bytes, new: bytes) -> None:
    data = encode_quantised(a_copy())
    assert old in data
    with pytest.raises(FormatError):
        decode_quantised(data.replace(old, new))
