"""Damage to packed files that the quick level of `verify` is to see, though their names tell the raw file's length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packed_tiers_kit import Place, adam_state

from tierstore.format.packed.footer import decode_footer, encode_footer, footer_nbytes
from tierstore.format.packed.types import Footer
from tierstore.tiers.verify import verify


@pytest.mark.parametrize("how", ["shorter", "longer"])
def test_a_packed_file_of_another_length_is_found_without_reading_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    place = Place(tmp_path, monkeypatch)
    config = place.config(codec="zstd")
    place.save(config, 1)
    (shard,) = [name for name in place.names("shard-") if name.endswith(".packed")]
    data = place.bucket._files[shard]
    place.bucket._set(shard, data[:-1000] if how == "shorter" else data + bytes(1000))
    with place.session(config) as session:
        report = session.run(verify(session.tiers, "r", level="quick"))
    assert [(f.code, f.tier, f.file) for f in report.damage] == [("V103", "far", "shard-00000-of-00001.safetensors")]
    assert report.nbytes_read == 0


def refer_elsewhere(place: Place, step: int, change: Callable[[Footer], Footer]) -> None:
    """Writes the footer of a step's packed shard anew."""
    (shard,) = [name for name in place.names(f"step-{step:010d}-") if name.endswith(".packed")]
    data = place.bucket._files[shard]
    nbytes = footer_nbytes(data, len(data))
    place.bucket._set(shard, data[:-nbytes] + encode_footer(change(decode_footer(data, len(data)))))


def raw(place: Place, step: int) -> str:
    """The path of a step's shard."""
    (shard,) = [name for name in place.names(f"step-{step:010d}-") if name.endswith(".packed")]
    return shard.rsplit(".", 2)[0]


def quickly(place: Place, config: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Code, step and detail of what the quick level finds damaged on the packed tier, but for changed ETags; it reads no payload."""
    with place.session(config) as session:
        report = session.run(verify(session.tiers, "r", level="quick"))
    assert report.nbytes_read == 0
    return [(f.code, f.attempt.step if f.attempt else -1, f.detail) for f in report.damage if f.tier == "far" and f.code != "V109"]


def test_a_footer_that_no_writer_of_ours_made_is_found_without_reading_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, monkeypatch)
    config = place.config(codec="zstd", unchanged_once=True)
    with place.open(config) as store:
        for step in (1, 2, 3):  # the later two take nearly all bytes from the first
            store.save(step, {**adam_state(1), "step": step}).wait("far", timeout=200)
    first, second, third = (raw(place, step) for step in (1, 2, 3))
    folder, _, name = first.rpartition("/")
    gone = tuple(f"{folder[:-26]}00{folder[-24:-6]}{number:06d}/{name}" for number in range(20_000))
    good = {shard: place.bucket._files[shard] for shard in place.names(".packed") if "shard-" in shard}
    assert quickly(place, config) == []

    def found(step: int, change: Callable[[Footer], Footer]) -> tuple[str, str]:
        """Code and detail of the one finding, about this step; the tier is as good as before afterwards."""
        refer_elsewhere(place, step, change)
        ((code, about, detail),) = quickly(place, config)
        for shard, data in good.items():
            place.bucket._set(shard, data)
        assert about == step
        assert len(detail) < 1000
        return code, detail

    for path, why in (
        ("tierstore.json", "is no shard"),
        (f"{folder}/manifest.json", "is no shard"),
        (second, "was not saved before it"),
        (third, "was not saved before it"),
        (f"q/{first.partition('/')[2]}", "was not saved before it"),
    ):
        code, detail = found(2, lambda footer, path=path: replace(footer, files=("", path)))  # type: ignore[misc]
        assert (code, path in detail, why in detail) == ("V103", True, True)

    refer_elsewhere(place, 3, lambda footer: replace(footer, files=("", second)))  # a circle: one of the two was not saved earlier
    code, detail = found(2, lambda footer: replace(footer, files=("", third)))
    assert (code, third in detail) == ("V103", True)

    code, detail = found(2, lambda footer: replace(footer, runs=tuple(replace(run, source=run.source + 10**9) for run in footer.runs)))
    assert (code, first in detail, "which has" in detail) == ("V103", True, True)
    assert found(2, lambda footer: replace(footer, files=("", gone[0])))[0] == "V101"
    code, detail = found(2, lambda footer: replace(footer, files=(*footer.files, *gone[:60])))
    assert (code, gone[4] in detail, gone[5] in detail, "and 55 more" in detail) == ("V101", True, False, True)
    before = place.bucket.total
    code, detail = found(2, lambda footer: replace(footer, files=(*footer.files, *gone)))
    assert (code, "20,001 checkpoints" in detail) == ("V103", True)
    assert place.bucket.total - before < 100
