"""tier:// URIs: what each form names, and that every damaged one is refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError, UsageError
from tierstore.names import Reference
from tierstore.tier_uri import TierPlace, TierUri, is_tier_uri, locate_config, parse_tier_uri, split_tier_uri


def step(number: int) -> Reference:
    return Reference(run="", selector="step", step=number)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tier:///run1", TierUri(run="run1")),
        ("tier:///run1/step-100", TierUri(run="run1", reference=step(100))),
        ("tier:///team/run1/step-0000000100", TierUri(run="team/run1", reference=step(100))),
        ("tier:///run1@12000", TierUri(run="run1", reference=step(12000))),
        ("tier:///run1@latest", TierUri(run="run1", reference=Reference(run="", selector="latest"))),
        ("tier:///run1@best:val/loss", TierUri(run="run1", reference=Reference(run="", selector="best", argument="val/loss"))),
        ("tier:///run1@tag:v/step-3", TierUri(run="run1", reference=Reference(run="", selector="tag", argument="v/step-3"))),
        ("tier://prod/run1/step-1", TierUri(name="prod", run="run1", reference=step(1))),
        ("tier:///etc/a b/store.yaml/t/run/step-7", TierUri(config="/etc/a b/store.yaml", run="t/run", reference=step(7))),
        ("tier:////etc/store.yml/run", TierUri(config="/etc/store.yml", run="run")),
        ("tier:///a.yaml/b.yaml/step-1", TierUri(config="/a.yaml", run="b.yaml", reference=step(1))),
        ("tier:///run.yaml", TierUri(run="run.yaml")),
    ],
)
def test_every_form_names_what_the_grammar_says(text: str, expected: TierUri) -> None:
    assert parse_tier_uri(text) == expected
    assert parse_tier_uri(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tier:/run/step-1",
        "s3://b/run",
        "tier://run",
        "tier:///",
        "tier://x/",
        "tier://na me/run",
        "tier:///run?x=1",
        "tier:///run#x",
        "tier:///run\n/step-1",
        "tier:///.hidden/step-1",
        "tier:///a//b/step-1",
        "tier:///../x/step-1",
        "tier:///store.yaml/step-1",
        "tier://n/store.yaml/run/step-1",
        "tier:///run@whatever",
        "tier:///run@best:",
        "tier:///step-1",
    ],
)
def test_what_is_malformed_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_tier_uri(text)
    assert caught.value.hint


def test_a_uri_that_pathlib_collapsed_is_refused_before_a_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES.md 85."""
    monkeypatch.chdir(tmp_path)
    damaged = Path("tier:///run/step-1")
    for use in (is_tier_uri, parse_tier_uri):
        with pytest.raises(UsageError, match="pathlib") as caught:
            use(damaged)
        assert "str" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_other_things_are_no_tier_uris() -> None:
    assert not any(map(is_tier_uri, ["/a/b", "s3://b/x", Path("/a/tier"), 5, None, "tier:/x"]))
    assert is_tier_uri("TIER:///run")


@given(st.text(max_size=40))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    try:
        found = parse_tier_uri("tier://" + text)
    except UsageError:
        return
    assert parse_tier_uri(str(found)) == found


def test_the_configuration_is_found_in_the_path_by_name_or_where_the_command_line_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env: dict[str, str] = {}
    with pytest.raises(ConfigError, match="no configuration"):
        locate_config(parse_tier_uri("tier:///run"), env=env)
    with pytest.raises(UsageError, match=r"prod\.yaml"):
        locate_config(parse_tier_uri("tier://prod/run"), env=env)
    (tmp_path / "conf").mkdir()
    for name in ("main.yaml", "prod.yml"):
        (tmp_path / "conf" / name).write_text("version: 1\n")
    env = {"TIERSTORE_CONFIG": str(tmp_path / "conf" / "main.yaml")}
    assert locate_config(parse_tier_uri("tier:///run"), env=env) == str(tmp_path / "conf" / "main.yaml")
    assert locate_config(parse_tier_uri("tier://prod/run"), env=env) == str(tmp_path / "conf" / "prod.yml")
    assert locate_config(parse_tier_uri("tier:///x/y.yaml/run"), env=env) == "/x/y.yaml"


_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/?"), min_size=1, max_size=12).filter(
    lambda name: not name.lower().endswith((".yaml", ".yml"))
)
_PATHS = st.lists(_NAMES, max_size=4).map("/".join)
_TIERS = st.lists(st.sampled_from(["/nvme/a b", "s3://bucket/prefix", "/x&y=z", "memory://m", "/%41/ü?"]), max_size=3).map(tuple)


@given(_PATHS, _TIERS, st.sampled_from(["", "nearest"]))
def test_a_file_s_uri_leads_back_to_its_place_and_path(path: str, tiers: tuple[str, ...], ack: str) -> None:
    for place in (TierPlace(tiers=tiers, ack=ack), TierPlace(name="prod", ack=ack), TierPlace(config="/etc/store.yaml", ack=ack)):
        assert split_tier_uri(place.uri(path)) == (place, path)


@pytest.mark.parametrize(
    ("text", "place", "path"),
    [
        ("tier:///a/b", TierPlace(), "a/b"),
        ("tier://prod", None, ""),
        ("tier://prod/", TierPlace(name="prod"), ""),
        ("tier:///etc/s.yaml/a/b.txt", TierPlace(config="/etc/s.yaml"), "a/b.txt"),
        ("tier:///a?config=conf/s.yaml", TierPlace(config="conf/s.yaml"), "a"),
        ("tier:///a?tier=/n&tier=s3%3A%2F%2Fb%2Fp&ack=durable", TierPlace(tiers=("/n", "s3://b/p"), ack="durable"), "a"),
        ("tier:///a?tier=/n&/step-1/x?.bin", TierPlace(tiers=("/n",)), "a/step-1/x?.bin"),
        ("tier:///a/part-?.parquet", TierPlace(), "a/part-?.parquet"),
        ("tier:///a?b=c", TierPlace(), "a?b=c"),
        ("tier:///a?teir=/n", None, ""),
        ("tier:///a?tiers=/n", None, ""),
        ("tier:///a?tier=/n&x=y", None, ""),
        ("tier:///a?tier=", None, ""),
        ("tier:///a?ack=nearest&ack=durable", None, ""),
        ("tier://prod/a?tier=/n", None, ""),
    ],
)
def test_a_file_s_uri_says_place_and_path(text: str, place: TierPlace | None, path: str) -> None:
    if place is None:
        with pytest.raises(UsageError) as caught:
            split_tier_uri(text)
        assert caught.value.hint
    else:
        assert split_tier_uri(text) == (place, path)


def test_a_checkpoint_s_uri_takes_a_configuration_in_its_query_and_nothing_else() -> None:
    assert parse_tier_uri("tier:///run/step-3?config=/etc/s.yaml") == TierUri(config="/etc/s.yaml", run="run", reference=step(3))
    for query in ("tier=/nvme", "ack=nearest"):
        with pytest.raises(UsageError, match="only files"):
            parse_tier_uri(f"tier:///run/step-3?{query}")
