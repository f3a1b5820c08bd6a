"""Damage to packed files that the quick level of `verify` is to see, though their names tell the raw file's length."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_tiers_kit import Place

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
