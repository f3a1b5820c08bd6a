"""docs/reference/configuration.md says what the models are: its file parses, and every key stands in it with its default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from tierstore.config import IoConfig, SaveConfig, StoreConfig, load_config
from tierstore.config_retention import GcConfig, ProtectConfig
from tierstore.errors import ConfigError
from tierstore.units import parse_duration, parse_percent, parse_size

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return [text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if name == language]


def models_below(annotation: Any, seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in seen:
            seen.add(annotation)
            yield annotation
            for info in annotation.model_fields.values():
                yield from models_below(info.annotation, seen)
    else:
        for inner in get_args(annotation):
            yield from models_below(inner, seen)


MODELS = list(models_below(StoreConfig, set()))


def test_the_complete_file_of_the_page_is_a_configuration(tmp_path: Path) -> None:
    complete = blocks(PAGE, "yaml")[0]
    (tmp_path / "tierstore.yaml").write_text(complete, encoding="utf-8")
    config = load_config(tmp_path / "tierstore.yaml", env={})
    assert config.retention is not None
    assert set(yaml.safe_load(complete)) == {info.alias or name for name, info in StoreConfig.model_fields.items()}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: p.stem)
def test_every_configuration_in_the_documents_parses(page: Path, tmp_path: Path) -> None:
    for text in blocks(page.read_text(encoding="utf-8"), "yaml"):
        if re.search(r"^keep:", text, re.MULTILINE):  # a retention policy in a file of its own
            (tmp_path / "retention.yaml").write_text(text, encoding="utf-8")
            named = [{"name": name, "uri": f"/{name}"} for name in ("nvme", "pfs", "object")]
            assert load_config({"tiers": named}, retention=tmp_path / "retention.yaml", env={}).retention
        elif "tiers:" in text:
            (tmp_path / "tierstore.yaml").write_text(text, encoding="utf-8")
            assert load_config(tmp_path / "tierstore.yaml", env={"S3_KEY": "k", "S3_SECRET": "s", "HOME": "/home/me"}).tiers


def test_the_walk_finds_the_nested_models() -> None:
    assert {"TierConfig", "KeepRule", "BestRule", "EvictConfig", "GcConfig", "Match", "AutoEvery"} <= {m.__name__ for m in MODELS}


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_key_is_on_the_page(model: type[BaseModel]) -> None:
    keys = {info.alias or name for name, info in model.model_fields.items()}
    assert not {key for key in keys if not re.search(rf"`[^`]*\b{key}\b[^`]*`", PAGE)}


@pytest.mark.parametrize("model", [SaveConfig, IoConfig, ProtectConfig, GcConfig])
def test_the_defaults_on_the_page_are_the_models(model: type[BaseModel]) -> None:
    values: dict[str, object] = {}
    for name, info in model.model_fields.items():
        row = re.search(rf"^\| `{info.alias or name}` \| `([^`]+)` \|", PAGE, re.MULTILINE)
        assert row is not None or info.default is None, name
        if row is not None:
            values[name] = info.default
            assert any(info.default == parsed for parsed in readings(row[1])), f"{name} is {info.default}, the page says {row[1]}"
    assert values


def readings(text: str) -> Iterator[object]:
    yield text
    yield int(text) if text.isdigit() else None
    for parse in (parse_size, parse_duration, parse_percent):
        try:
            yield parse(text)
        except ValueError:
            continue


def test_the_mistakes_on_the_page_are_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tierstore.yaml").write_text("run: x\ntiers:\n  - uri: /a\n    capacity: 96G\n  - /b\n\n\n\ndurble_at: pfs\n", encoding="utf-8")
    shown = next(block for block in blocks(PAGE, "") if "mistakes in" in block)
    with pytest.raises(ConfigError) as caught:
        load_config("tierstore.yaml", env={})
    assert str(caught.value).strip() == shown.strip()
