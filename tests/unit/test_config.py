"""Configuration: what a file says becomes values, and what it says wrongly is answered with file, line, key, reason and remedy."""

from __future__ import annotations

import pickle
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import (
    AutoEvery,
    BetterEvery,
    DynamicEvery,
    EveryRule,
    KeepRule,
    RetentionConfig,
    StoreConfig,
    TierConfig,
    find_config,
    load_config,
)
from tierstore.errors import ConfigError

COMPLETE = """\
version: 1
run: llama-8b-sft
tiers:
  - {name: memory, uri: /dev/shm/tierstore, scope: node, durable: false, capacity: 96GiB}
  - {name: nvme,   uri: /nvme/tierstore,    scope: node, capacity: 2TiB}
  - {name: pfs,    uri: /lustre/proj/ckpt,  scope: shared}
  - name: object
    uri: s3://ckpt/llama
    scope: shared
    options: {endpoint_url: "http://127.0.0.1:9000"}
    codec: zstd
    max_bandwidth: 2GiB/s
durable_at: pfs
save:
  every: {steps: 500}
  on_error: raise
  backlog: skip_oldest
retention:
  group_by: [run]
  timezone: UTC
  keep:
    - last: 5
    - every: {steps: 5000}
    - within: 12h
    - daily: 7
    - best: {metric: val/loss, mode: min, count: 3, missing: keep}
    - steps: [0, 1000]
    - tags: ["release/*"]
    - final: true
  tiers:
    memory: {keep: [{last: 2}]}
    nvme:   {keep: [{last: 2}], evict: {high_watermark: 85%, low_watermark: 70%, min_free: 200GiB}}
    pfs:    {keep: [{last: 10}, {best: {metric: val/loss, mode: min}}], max_bytes: 60TiB}
  protect: {min_copies: 1, min_keep: 1, min_age: 1h}
  gc: {undelete_window: 24h, orphan_grace: 24h, lease_ttl: 10m, max_clock_skew: 5m, max_delete_fraction: 50%, multipart_grace: 24h}
overrides:
  - match: {run: "debug/*"}
    retention: {keep: [{last: 1}]}
"""

Load = Callable[..., StoreConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a text as a file, with an environment of its own."""

    def load_text(text: str, env: Mapping[str, str] | None = None, **more: Any) -> StoreConfig:
        path = tmp_path / "store.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, env=env or {}, **more)

    return load_text


def mistakes_of(attempt: Callable[[], object]) -> list[dict[str, Any]]:
    with pytest.raises(ConfigError) as caught:
        attempt()
    return list(caught.value.context["mistakes"])


def only_mistake(attempt: Callable[[], object]) -> dict[str, Any]:
    mistakes = mistakes_of(attempt)
    assert len(mistakes) == 1, mistakes
    return mistakes[0]


# ---- what is right


def test_a_codec_and_a_scheme_can_be_named_or_given_with_their_keys(load: Load) -> None:
    short, full = (
        load(f"tiers:\n- /a\n- /b\n- {{uri: 's3://b/x', codec: {codec}, quantise: {quantise}}}").tiers[2]
        for codec, quantise in (
            ("zstd", "q8"),
            ("{name: zstd, level: 0, threads: 2}", "{scheme: q8, min_numel: 4096, max_generation: 1}"),
        )
    )
    assert short == full
    assert (short.codec.name, short.codec.level, short.codec.threads) == ("zstd", 0, 2)
    assert short.quantise is not None
    assert (short.quantise.scheme, short.quantise.exclude, short.quantise.max_generation) == ("q8", None, 1)
    rule = "{scheme: q4, include: ['*m1'], exclude: ['*embed*'], min_numel: 9, max_generation: 3}"
    given = load(f"tiers:\n- /a\n- /b\n- {{uri: /c, quantise: {rule}}}").tiers[2].quantise
    assert given is not None
    assert (given.scheme, given.include, given.exclude, given.min_numel, given.max_generation) == ("q4", ("*m1",), ("*embed*",), 9, 3)
    assert load("tiers:\n- /a\n- /b\n- {uri: /c, quantise: off}").tiers[2].quantise is None


@pytest.mark.parametrize("codec", ["{level: 3}", "{threads: 4}", "{}", "off", ""])
def test_a_codec_that_is_not_named_is_a_mistake_and_not_taken_for_none(load: Load, codec: str) -> None:
    with pytest.raises(ConfigError, match=r"codec.*: (missing|it must say which)") as caught:
        load(f"tiers:\n- /a\n- uri: s3://b/x\n  codec: {codec}")
    assert "zstd" in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "told", "packs", "master_once", "unchanged_once"),
    [
        ("/a", "", False, False, False),
        ("s3://b/x", "", False, False, False),
        ("/a", "codec: zstd", True, False, False),
        ("s3://b/x", "codec: zstd", True, True, True),
        ("s3://b/x", "codec: zstd, master_once: false", True, False, True),
        ("s3://b/x", "codec: zstd, master_once: false, unchanged_once: false", True, False, False),
        ("/a", "codec: raw, master_once: true", True, True, False),
        ("/a", "unchanged_once: true", True, False, True),
    ],
)
def test_what_is_stored_once_is_on_by_itself_where_a_remote_tier_compresses(
    load: Load, uri: str, told: str, packs: bool, master_once: bool, unchanged_once: bool
) -> None:
    tier = load(f"tiers:\n- {{uri: '{uri}', {told}}}").tiers[0]
    assert (tier.packs, tier.stores_master_once, tier.stores_unchanged_once) == (packs, master_once, unchanged_once)


def test_the_short_form_stores_everything_as_it_is() -> None:
    assert not any(tier.packs for tier in load_config(["/a", "/b", "s3://b/x"], run="r", env={}).tiers)


def test_copies_that_are_not_exact_are_none_that_min_copies_could_count(load: Load) -> None:
    text = "tiers:\n- {uri: /a, scope: shared}\n- {uri: /c, quantise: q8}\nretention: {keep: [{last: 1}], protect: {min_copies: 2}}"
    with pytest.raises(ConfigError, match="only 1 durable tiers with exact copies"):
        load(text)


def test_the_complete_file_is_read_as_written(load: Load) -> None:
    config = load(COMPLETE)
    memory, nvme, pfs, s3 = config.tiers
    assert (config.version, config.run, config.durable_at) == (1, "llama-8b-sft", "pfs")
    assert memory == TierConfig(name="memory", uri="/dev/shm/tierstore", scope="node", durable=False, capacity=96 * 2**30)
    assert nvme == TierConfig(name="nvme", uri="/nvme/tierstore", scope="node", durable=True, capacity=2 * 2**40)
    assert pfs == TierConfig(name="pfs", uri="/lustre/proj/ckpt", scope="shared", durable=True)
    assert s3 == TierConfig(
        name="object",
        uri="s3://ckpt/llama",
        scope="shared",
        durable=True,
        options={"endpoint_url": "http://127.0.0.1:9000"},
        codec="zstd",
        max_bandwidth=2**31,
    )
    assert config.authority is pfs
    assert config.durable_tier is pfs
    assert config.save.every is not None
    assert (config.save.every.steps, config.save.on_error, config.save.backlog) == (500, "raise", "skip_oldest")

    policy = config.retention
    assert policy is not None
    assert [rule.kind for rule in policy.keep] == ["last", "every", "within", "daily", "best", "steps", "tags", "final"]
    last, every, within, daily, best, steps, tags, final = policy.keep
    assert (last.last, every.every, within.within_s, daily.daily) == (5, EveryRule(steps=5000), 43200.0, 7)
    assert best.best is not None
    assert (best.best.metric, best.best.mode, best.best.count, best.best.missing) == ("val/loss", "min", 3, "keep")
    assert (steps.steps, tags.tags, final.final) == ((0, 1000), ("release/*",), True)
    assert policy.tiers is not None
    assert policy.tiers["memory"].keep == (KeepRule(last=2),)
    evict = policy.tiers["nvme"].evict
    assert evict is not None
    assert (evict.high_watermark, evict.low_watermark, evict.min_free_nbytes) == (0.85, 0.7, 200 * 2**30)
    assert policy.tiers["pfs"].max_nbytes == 60 * 2**40
    assert (policy.protect.min_copies, policy.protect.min_keep, policy.protect.min_age_s) == (1, 1, 3600.0)
    gc = policy.gc
    assert (gc.undelete_window_s, gc.orphan_grace_s, gc.multipart_grace_s) == (86400.0, 86400.0, 86400.0)
    assert (gc.lease_ttl_s, gc.max_clock_skew_s, gc.max_delete_fraction) == (600.0, 300.0, 0.5)


def test_an_override_replaces_the_keys_that_it_gives_for_the_runs_that_match(load: Load) -> None:
    config = load(COMPLETE)
    debug = config.retention_for("debug/x")
    assert debug is not None
    assert debug.keep == (KeepRule(last=1),)
    assert config.retention is not None
    assert debug.gc == config.retention.gc
    assert config.retention_for("sft") == config.retention


def test_of_several_overrides_the_first_that_matches_counts() -> None:
    source = {
        "tiers": ["/a"],
        "overrides": [{"match": {"run": f"{p}*"}, "retention": {"keep": [{"last": n}]}} for p, n in (("d", 1), ("", 2))],
    }
    config = load_config(source, env={})
    assert [config.retention_for(run).keep[0].last for run in ("debug", "sft")] == [1, 2]  # type: ignore[union-attr]


def test_defaults_keep_everything_and_lose_nothing(load: Load) -> None:
    config = load("tiers: [/a]")
    assert config.retention is None
    assert config.run is None
    assert (config.save.every, config.save.on_error, config.save.backlog) == (None, "raise", "block")
    assert config.io.block_nbytes == 2**20


@pytest.mark.parametrize(
    ("every", "expected"),
    [("{steps: 500}", ("steps", 500)), ("{seconds: 600}", ("seconds", 600.0)), ("{auto: {mtbf: 3h}}", ("auto", 10800.0))],
)
def test_a_save_is_due_by_steps_seconds_or_failure_rate(load: Load, every: str, expected: tuple[str, float]) -> None:
    given_every = load(f"tiers: [/a]\nsave: {{every: {every}}}").save.every
    assert given_every is not None
    found = {"steps": given_every.steps, "seconds": given_every.seconds, "auto": given_every.auto and given_every.auto.mtbf_s}
    assert {name: value for name, value in found.items() if value is not None} == dict([expected])


def test_rules_for_saving_that_go_by_a_metric_and_several_at_once(load: Load) -> None:
    text = """
        tiers: [/a]
        save:
          every:
            any:
              - {better: {metric: val/loss, mode: min, by: 0.01}}
              - {dynamic: {metric: loss, change: 5%, least: 50, most: 2000}}
              - {auto: {least: 1m, most: 1h}}
              - any: [{steps: 500}]
    """
    every = load(textwrap.dedent(text)).save.every
    assert every is not None
    better, dynamic, auto, steps = every.rules
    assert better.better == BetterEvery(metric="val/loss", mode="min", by=0.01)
    assert dynamic.dynamic == DynamicEvery(metric="loss", change=0.05, least=50, most=2000)
    assert auto.auto == AutoEvery(least_s=60.0, most_s=3600.0)
    assert (steps.steps, every.by_step_alone, steps.by_step_alone) == (500, False, True)


def test_what_a_read_costs_is_configured_in_part_or_whole_or_not_at_all(load: Load) -> None:
    text = "tiers:\n- {uri: /a, read: {latency: 20ms, bandwidth: 100MiB/s}}\n- {uri: /b, read: {latency: 1s}}\n- /c"
    tiers = load(text).tiers
    assert [(t.read.latency_s, t.read.bandwidth) for t in tiers] == [(0.02, 100 * 2**20), (1.0, None), (None, None)]


def test_the_file_for_io_has_units(load: Load) -> None:
    io = load("tiers: [/a]\nio: {threads: 2, block_size: 64KiB, max_inflight: 3GiB, request_timeout: 5s, stall_timeout: 1m}").io
    assert (io.threads, io.block_nbytes, io.max_inflight, io.request_timeout_s, io.stall_timeout_s) == (
        2,
        65536,
        3 * 2**30,
        5.0,
        60.0,
    )


# ---- the short form


def test_bare_uris_are_node_shared_and_object() -> None:
    config = load_config(["/nvme/ckpt", "/lustre/ckpt", "s3://bucket/ckpt"], run="sft-7", env={})
    assert [(t.name, t.uri, t.scope, t.durable) for t in config.tiers] == [
        ("node", "/nvme/ckpt", "node", True),
        ("shared", "/lustre/ckpt", "shared", True),
        ("object", "s3://bucket/ckpt", "shared", True),
    ]
    assert config.run == "sft-7"
    assert config.authority.name == "shared"
    assert config.durable_tier.name == "shared"


@pytest.mark.parametrize(
    ("uris", "expected"),
    [
        (["/a"], [("shared", "shared", True)]),
        (["s3://b"], [("object", "shared", True)]),
        (["s3://b", "s3://c/x"], [("object", "shared", True), ("object-2", "shared", True)]),
        (["/a", "/b", "/c"], [("node", "node", True), ("shared", "shared", True), ("shared-2", "shared", True)]),
        (["/dev/shm/t", "/b"], [("memory", "node", False), ("shared", "shared", True)]),
        (["/a", "sftp://host/x"], [("node", "node", True), ("sftp", "shared", True)]),
        (["/a", "abfs://container@account.dfs.core.windows.net/x"], [("node", "node", True), ("object", "shared", True)]),
        (["s3://b", {"uri": "/a", "name": "object"}], [("object-2", "shared", True), ("object", "shared", True)]),
    ],
)
def test_names_scopes_and_durability_of_bare_uris(uris: list[Any], expected: list[tuple[str, str, bool]]) -> None:
    assert [(t.name, t.scope, t.durable) for t in load_config(uris, env={}).tiers] == expected


def test_what_a_tier_says_itself_wins_over_what_its_uri_suggests() -> None:
    tiers = [{"uri": "/dev/shm/t", "name": "ram", "durable": True}, {"uri": "/b", "scope": "node"}]
    config = load_config(tiers, env={})
    assert [(t.name, t.scope, t.durable) for t in config.tiers] == [("ram", "node", True), ("node", "node", True)]
    assert config.authority.name == "ram"


def test_with_node_tiers_only_the_first_durable_one_is_the_authority() -> None:
    config = load_config([{"uri": "/dev/shm/t", "scope": "node"}, {"uri": "/b", "scope": "node"}], env={})
    assert config.authority.uri == "/b"


def test_paths_are_normalised_and_relative_ones_stand_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["./a/../b/", Path("/x//y"), "file:///z%20y/", "s3://bucket/p/"], env={})
    assert [t.uri for t in config.tiers] == [f"{tmp_path}/b", "/x/y", "/z y", "s3://bucket/p"]


def test_relative_paths_in_a_file_stand_on_its_folder(load: Load, tmp_path: Path) -> None:
    assert [t.uri for t in load("tiers: [ckpt, ../shared]").tiers] == [f"{tmp_path}/ckpt", f"{tmp_path.parent}/shared"]


def test_a_tilde_is_the_home_of_the_environment() -> None:
    assert load_config(["~/a"], env={"HOME": "/home/me"}).tiers[0].uri == "/home/me/a"


@pytest.mark.parametrize("uri", [Path("s3://bucket/x"), "s3:/bucket/x"])
def test_a_uri_that_pathlib_has_collapsed_is_refused(uri: Any) -> None:
    mistake = only_mistake(lambda: load_config(["/a", uri], env={}))
    assert mistake["key"] == "tiers[1].uri"
    assert "//" in mistake["reason"] + mistake["remedy"]
    assert mistake["remedy"]


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("s3://", "no bucket"),
        ("s3:///x", "no bucket"),
        ("", "empty"),
        ("/a\nb", "control"),
        ("s3://b/../c", "segments"),
        ("s3://b/c//d", "segments"),
        ("s3://b/c?key=v", "query"),
        ("simplecache::s3://b", "chained"),
        ("file://relative", "absolute"),
        (7, "text"),
    ],
)
def test_a_uri_that_names_no_place_is_refused(uri: Any, reason: str) -> None:
    mistake = only_mistake(lambda: load_config([{"uri": uri}], env={}))
    assert mistake["key"] == "tiers[0].uri"
    assert reason in mistake["reason"]


def test_a_retention_policy_can_stand_in_a_file_of_its_own(load: Load, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("keep: [{last: '${N:-4}'}]\n")
    in_file = load("tiers: [/a]\nretention: policy.yaml")
    short = load_config(["/a"], retention=tmp_path / "policy.yaml", env={"N": "4"})
    given_mapping = load_config(["/a"], retention={"keep": [{"last": 4}]}, env={})
    given_model = load_config(["/a"], retention=RetentionConfig(keep=(KeepRule(last=4),)), env={})
    assert in_file.retention == short.retention == given_mapping.retention == given_model.retention


def test_a_mistake_in_the_policys_own_file_names_that_file(load: Load, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("# ours\nkeep:\n  - last: 0\n")
    mistake = only_mistake(lambda: load("tiers: [/a]\nretention: policy.yaml"))
    assert (mistake["file"], mistake["line"], mistake["key"]) == (str(tmp_path / "policy.yaml"), 3, "keep[0].last")


def test_a_given_policy_replaces_the_files(load: Load) -> None:
    config = load(COMPLETE, retention={"keep": [{"last": 1}]})
    assert config.retention == RetentionConfig(keep=(KeepRule(last=1),))
    mistake = only_mistake(lambda: load(COMPLETE, retention={"keep": []}))
    assert (mistake["file"], mistake["key"]) == ("the retention argument", "keep")


def test_a_store_config_is_taken_as_it_is_and_can_get_another_run() -> None:
    config = load_config(["/a"], run="x", env={})
    assert load_config(config, env={}) is config
    assert load_config(config, run="y", env={}).run == "y"
    assert load_config(config, run="y", env={}).tiers == config.tiers


# ---- the environment


def test_the_run_comes_from_the_argument_before_the_environment_before_the_file(load: Load) -> None:
    text, env = "run: filed\ntiers: [/a]", {"TIERSTORE_RUN": "environs"}
    assert load(text).run == "filed"
    assert load(text, env).run == "environs"
    assert load(text, env, run="argued").run == "argued"


def test_a_bad_run_is_blamed_on_where_it_came_from(load: Load) -> None:
    assert only_mistake(lambda: load("tiers: [/a]", {"TIERSTORE_RUN": "../x"}))["file"] == "TIERSTORE_RUN"
    assert only_mistake(lambda: load("tiers: [/a]", run="a b"))["file"] == "the run argument"
    assert only_mistake(lambda: load("run: .x\ntiers: [/a]"))["line"] == 1


def test_variables_are_expanded_with_defaults_and_escapes() -> None:
    source = {
        "run": "${USER_NAME}-$$x",
        "tiers": [{"uri": "${PLACE:-s3://b}/ckpt", "capacity": "${GIB}GiB", "options": {"nested": ["${PLACE:-}"]}}],
        "io": {"threads": "${THREADS}"},
    }
    config = load_config(source, env={"USER_NAME": "me", "GIB": "2", "PLACE": "", "THREADS": "3"}, run="r")
    assert (config.run, config.tiers[0].uri, config.tiers[0].capacity, config.io.threads) == ("r", "s3://b/ckpt", 2**31, 3)
    assert config.tiers[0].options == {"nested": [""]}
    assert load_config({"run": "cost=$$5@x", "tiers": ["/a"]}, env={"x": "no"}, retention=None, run="ok").run == "ok"


@pytest.mark.parametrize(
    ("text", "expected"), [("$$", "$"), ("a$b", "a$b"), ("$$${X}", "$1"), ("${X:-d}", "1"), ("${E:-d}", "d"), ("${E}", ""), ("${U:-}", "")]
)
def test_expansion_follows_the_shells_rules(text: str, expected: str) -> None:
    config = load_config([{"uri": "s3://b", "options": {"o": text}}], env={"X": "1", "E": ""})
    assert config.tiers[0].options["o"] == expected


def test_every_missing_variable_is_named_once_with_its_key_and_line(load: Load) -> None:
    mistakes = mistakes_of(lambda: load("tiers:\n  - uri: ${ROOT}/x\n    capacity: ${CAP}\nio:\n  threads: ${N}"))
    assert [(m["line"], m["key"]) for m in mistakes] == [(2, "tiers[0].uri"), (3, "tiers[0].capacity"), (5, "io.threads")]
    assert [name in m["reason"] and name in m["remedy"] for m, name in zip(mistakes, ("ROOT", "CAP", "N"), strict=True)] == [True] * 3


@pytest.mark.parametrize("text", ["${", "${}", "${1X}", "${a b}"])
def test_a_malformed_variable_is_a_mistake(text: str) -> None:
    assert "names no variable" in only_mistake(lambda: load_config([{"uri": "s3://b", "options": {"o": text}}], env={}))["reason"]


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_RUN", "from-outside")
    assert load_config(["/a"]).run == "from-outside"


def test_the_configuration_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no configuration") as caught:
        find_config(env={})
    assert caught.value.hint.startswith("name one with -c FILE")
    (tmp_path / "compose.yml").write_text("services: {}")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "mine.yaml").write_text("run: sft\ntiers: [/a]\n")
    with pytest.raises(ConfigError, match="no configuration") as caught:
        find_config(env={})
    assert caught.value.hint.startswith("did you mean -c mine.yaml?")
    (tmp_path / "tierstore.yaml").write_text("tiers: [/a]")
    assert find_config(env={}) == "tierstore.yaml"
    assert find_config(env={"TIERSTORE_CONFIG": "/e.yaml"}) == "/e.yaml"
    assert find_config("mine.yaml", env={"TIERSTORE_CONFIG": "/e.yaml"}) == "mine.yaml"


# ---- what is wrong: one class of mistake after the other

POLICY = "tiers: [/a]\nretention: {keep: [{last: 1}], "

WRONG: list[tuple[str, str, int, str, str, str]] = [
    # text, key, line, value, reason, remedy
    ("tierz: [/a]\ntiers: [/b]", "tierz", 1, "['/a']", "unknown key", "did you mean 'tiers'?"),
    ("tiers:\n  - uri: /a\n    codek: raw", "tiers[0].codek", 3, "'raw'", "unknown key", "did you mean 'codec'?"),
    ("tiers:\n  - {uri: /a, endpoint_url: x}", "tiers[0].endpoint_url", 2, "'x'", "unknown key", "go under options"),
    ("tiers:\n  - {name: a}", "tiers[0].uri", 2, "", "missing", "add uri: s3://bucket/prefix"),
    ("run: x", "tiers", 1, "", "missing", "configuration.md"),
    ("tiers: []", "tiers", 1, "[]", "empty", "leave the key out"),
    ("tiers: /a", "tiers", 1, "'/a'", "must be a list", "write it as a list"),
    ("tiers: [5]", "tiers[0]", 1, "5", "must be a mapping", "name, uri, scope"),
    ("tiers: [/a, /a]", "tiers[1].uri", 1, "'/a'", "same place as tiers[0]", "place of its own"),
    ("tiers: [/a, /a/b]", "tiers[1].uri", 1, "'/a/b'", "lies inside", "place of its own"),
    ("tiers: [s3://b, s3://b/x]", "tiers[1].uri", 1, "'s3://b/x'", "lies inside", "place of its own"),
    ("tiers:\n- {uri: /a, name: x}\n- {uri: /b, name: x}", "tiers[1].name", 3, "'x'", "tiers[0] has this name", "its own name"),
    ("tiers:\n- {uri: /a, name: A B}", "tiers[0].name", 2, "'A B'", "lower-case", ""),
    ("tiers:\n- {uri: /a, name: durable}", "tiers[0].name", 2, "'durable'", "a level", ""),
    ("tiers:\n- {uri: /a, scope: shared}\n- {uri: /b, scope: node}", "tiers[1].scope", 3, "'node'", "after the shared tier", "nearest"),
    ("tiers:\n- {uri: /a, scope: global}", "tiers[0].scope", 2, "'global'", "one of node, shared", "scope: node"),
    ("tiers:\n- {uri: /a, codec: zsdt}", "tiers[0].codec", 2, "'zsdt'", "one of raw, zstd", "did you mean 'zstd'?"),
    ("tiers:\n- {uri: /a, codec: 5}", "tiers[0].codec", 2, "5", "must be a mapping", "name, level, threads"),
    ("tiers:\n- {uri: /a, codec: {name: ztsd}}", "tiers[0].codec.name", 2, "'ztsd'", "one of raw, zstd", "did you mean 'zstd'?"),
    ("tiers:\n- {uri: /a, codec: {name: zstd, levle: 3}}", "tiers[0].codec.levle", 2, "3", "unknown key", "did you mean 'level'?"),
    ("tiers:\n- {uri: /a, codec: {name: zstd, level: 22}}", "tiers[0].codec.level", 2, "22", "less than or equal to 19", "level: 0"),
    ("tiers:\n- {uri: /a, codec: {name: zstd, threads: 0}}", "tiers[0].codec.threads", 2, "0", "greater than or equal to 1", "threads: 2"),
    ("tiers:\n- {uri: /a, master_once: yes please}", "tiers[0].master_once", 2, "'yes please'", "true or false", "master_once: true"),
    ("tiers:\n- /a\n- /b\n- {uri: /c, quantise: q9}", "tiers[2].quantise", 4, "'q9'", "one of q8, q4", "write quantise: q8"),
    ("tiers:\n- /a\n- /b\n- {uri: /c, quantise: true}", "tiers[2].quantise", 4, "True", "by which scheme", "quantise: q8"),
    ("tiers:\n- /a\n- /b\n- {uri: /c, quantise: {}}", "tiers[2].quantise.scheme", 4, "", "missing", "add scheme: q8"),
    (
        "tiers:\n- /a\n- /b\n- {uri: /c, quantise: {scheme: q8, exclud: [x]}}",
        "tiers[2].quantise.exclud",
        4,
        "['x']",
        "unknown key",
        "'exclude'",
    ),
    ("tiers:\n- {uri: /a, quantise: q8}\n- /b", "tiers[0].quantise", 2, "'q8'", "an ordinary resume reads", "add a tier behind them"),
    ("tiers:\n- /a\n- {uri: /b, quantise: q4}\n- /c", "tiers[1].quantise", 3, "'q4'", "decides what is committed", "quantise on shared-2"),
    (
        "tiers:\n- /a\n- /b\n- {uri: /c, quantise: q8, name: c}\ndurable_at: c",
        "tiers[2].quantise",
        4,
        "'q8'",
        "durable_at",
        "leave quantise out",
    ),
    ("tiers:\n- {uri: /a, capacity: 96}", "tiers[0].capacity", 2, "96", "no unit", "96GiB"),
    ("tiers:\n- {uri: /a, capacity: 96G}", "tiers[0].capacity", 2, "'96G'", "no unit that is known", "write 96GiB or 96GB"),
    ("tiers:\n- {uri: /a, capacity: 0GiB}", "tiers[0].capacity", 2, "'0GiB'", "at least one byte", "write e.g."),
    ("tiers:\n- {uri: /a, capacity: -1GiB}", "tiers[0].capacity", 2, "'-1GiB'", "not a size", "write e.g."),
    ("tiers:\n- {uri: /a, max_bandwidth: 2GiB}", "tiers[0].max_bandwidth", 2, "'2GiB'", "'/s'", "write 2GiB/s"),
    ("tiers:\n- {uri: /a, read: 20ms}", "tiers[0].read", 2, "'20ms'", "must be a mapping", "latency, bandwidth"),
    ("tiers:\n- {uri: /a, read: {latency: 20}}", "tiers[0].read.latency", 2, "20", "no unit", "duration with its unit"),
    ("tiers:\n- {uri: /a, read: {latency: 2m}}", "tiers[0].read.latency", 2, "'2m'", "more than 60s", "latency: 20ms"),
    ("tiers:\n- {uri: /a, read: {latency: 0s}}", "tiers[0].read.latency", 2, "'0s'", "more than nothing", "write e.g."),
    ("tiers:\n- {uri: /a, read: {bandwidth: 1GiB}}", "tiers[0].read.bandwidth", 2, "'1GiB'", "'/s'", "write 1GiB/s"),
    ("tiers:\n- {uri: /a, read: {bandwith: 1GiB/s}}", "tiers[0].read.bandwith", 2, "'1GiB/s'", "unknown key", "did you mean 'bandwidth'?"),
    ("tiers: [/a]\nio: {max_scratch: 1MiB}", "io.max_scratch", 2, "'1MiB'", "64MiB at least", "max_scratch: 256MiB"),
    ("tiers:\n- {uri: /a, options: x}", "tiers[0].options", 2, "***", "must be a mapping", ""),
    ("tiers:\n- {uri: /a, options: {key: k}}", "tiers[0].options", 2, "", "takes no options (key)", "remove them"),
    ("tiers:\n- {uri: /a, durable: maybe}", "tiers[0].durable", 2, "'maybe'", "true or false", "durable: true"),
    ("tiers: [/dev/shm/x]", "tiers", 1, "", "would survive a power loss", "durable: true"),
    ("tiers:\n- {uri: /dev/shm/x, scope: shared}\n- /b", "tiers[0].durable", 2, "False", "decides what is committed", "durable"),
    ("tiers: [/a, /b]\ndurable_at: object", "durable_at", 2, "'object'", "no tier has this name", "name one of shared"),
    ("tiers: [/a, /b]\ndurable_at: node", "durable_at", 2, "'node'", "lost with the node", "name one of shared"),
    ("version: 2\ntiers: [/a]", "version", 1, "2", "reads version 1", "upgrade"),
    ("run: 5\ntiers: [/a]", "run", 1, "5", "must be text", 'run: "5"'),
    ("run: a b\ntiers: [/a]", "run", 1, "'a b'", "can't name a run", "letters"),
    ("tiers: [/a]\nsave: {every: {dynamic: {metric: l, least: 9, most: 5}}}", "save.every.dynamic", 2, "", "least is more than most", ""),
    ("tiers: [/a]\nsave: {every: {auto: {least: 2h, most: 1h}}}", "save.every.auto", 2, "", "least is longer than most", ""),
    ("tiers: [/a]\nsave: {every: {any: []}}", "save.every.any", 2, "[]", "it is empty", ""),
    ("tiers: [/a]\nsave: {every: {}}", "save.every", 2, "", "has none", ""),
    ("tiers: [/a]\nsave: {every: {steps: 5, seconds: 5}}", "save.every", 2, "", "steps and seconds together", ""),
    ("tiers: [/a]\nsave: {every: {steps: 0}}", "save.every.steps", 2, "0", "greater than or equal to 1", "steps: 5"),
    ("tiers: [/a]\nsave: {every: {steps: true}}", "save.every.steps", 2, "True", "whole number", ""),
    ("tiers: [/a]\nsave: {every: {steps: 1.5}}", "save.every.steps", 2, "1.5", "whole number", ""),
    ("tiers: [/a]\nsave: {every: {seconds: 10m}}", "save.every.seconds", 2, "'10m'", "plain number", "seconds: 600"),
    ("tiers: [/a]\nsave: {backlog: skip_old}", "save.backlog", 2, "'skip_old'", "one of block, skip_oldest", "did you mean 'skip_oldest'?"),
    ("tiers: [/a]\nsave: yes", "save", 2, "True", "must be a mapping", "every, on_error, backlog"),
    ("tiers: [/a]\nio: {block_size: 3MiB}", "io.block_size", 2, "'3MiB'", "power of two", "96GiB"),
    ("tiers: [/a]\nio: {block_nbytes: 1MiB}", "io.block_nbytes", 2, "'1MiB'", "unknown key", ""),
    ("tiers: [/a]\nretention: {}", "retention.keep", 2, "", "missing", "keep: [{last: 5}]"),
    ("tiers: [/a]\nretention: {keep: []}", "retention.keep", 2, "[]", "empty", "never taken for"),
    ("tiers: [/a]\nretention: {keep: {last: 5}}", "retention.keep", 2, "{'last': 5}", "must be a list", "[{last: 5}]"),
    ("tiers: [/a]\nretention: {keep: [{last: 0}]}", "retention.keep[0].last", 2, "0", "greater than or equal to 1", "last: 5"),
    ("tiers: [/a]\nretention: {keep: [{last: -1}]}", "retention.keep[0].last", 2, "-1", "greater than or equal to 1", "last: 5"),
    ("tiers: [/a]\nretention: {keep: [{lasst: 1}]}", "retention.keep[0].lasst", 2, "1", "unknown key", "did you mean 'last'?"),
    ("tiers: [/a]\nretention: {keep: [{within_s: 5}]}", "retention.keep[0].within_s", 2, "5", "unknown key", "did you mean 'within'?"),
    ("tiers: [/a]\nretention: {keep: [{}]}", "retention.keep[0]", 2, "", "has none", ""),
    ("tiers: [/a]\nretention: {keep: [{last: 1, within: 5m}]}", "retention.keep[0]", 2, "", "not last and within together", ""),
    ("tiers: [/a]\nretention: {keep: [{within: 12}]}", "retention.keep[0].within", 2, "12", "no unit", "12h"),
    ("tiers: [/a]\nretention: {keep: [{within: 0h}]}", "retention.keep[0].within", 2, "'0h'", "more than nothing", "12h"),
    ("tiers: [/a]\nretention: {keep: [{best: {metric: l}}]}", "retention.keep[0].best.mode", 2, "", "missing", "add mode: min"),
    ("tiers: [/a]\nretention: {keep: [{steps: []}]}", "retention.keep[0].steps", 2, "[]", "empty", ""),
    ("tiers: [/a]\nretention: {keep: [{steps: [-1]}]}", "retention.keep[0].steps[0]", 2, "-1", "greater than or equal to 0", ""),
    ("tiers: [/a]\nretention: {keep: [{tags: []}]}", "retention.keep[0].tags", 2, "[]", "empty", ""),
    ("tiers: [/a]\nretention: {keep: [{tags: ['a++b']}]}", "retention.keep[0].tags", 2, "['a++b']", "empty tag", ""),
    ("tiers: [/a]\nretention: {keep: [{final: false}]}", "retention.keep[0].final", 2, "False", "can only be true", "leave the rule out"),
    (POLICY + "group_by: [tag]}", "retention.group_by[0]", 2, "'tag'", "must be one of run, tags", "did you mean 'tags'?"),
    (POLICY + "group_by: [tags]}", "retention.group_by", 2, "['tags']", "write [run], or [run, tags]", "group_by: ['run']"),
    (POLICY + "timezone: Europe/Berlyn}", "retention.timezone", 2, "'Europe/Berlyn'", "no time zone", "Europe/Berlin"),
    (POLICY + "tiers: {x: {max_bytes: 1GiB}}}", "retention.tiers.x", 2, "", "no tier has this name", "shared"),
    (POLICY + "tiers: {shared: {}}}", "retention.tiers.shared", 2, "", "says nothing", ""),
    (POLICY + "tiers: {shared: {keep: []}}}", "retention.tiers.shared.keep", 2, "[]", "empty", ""),
    (POLICY + "tiers: {shared: {evict: {high_watermark: 85%}}}}", "retention.tiers.shared.evict", 2, "", "go together", ""),
    (
        POLICY + "tiers: {shared: {evict: {high_watermark: 60%, low_watermark: 70%}}}}",
        "retention.tiers.shared.evict",
        2,
        "",
        "below high_watermark",
        "",
    ),
    (POLICY + "protect: {min_copies: 0}}", "retention.protect.min_copies", 2, "0", "greater than", ""),
    (POLICY + "protect: {min_copies: 2}}", "retention.protect.min_copies", 2, "2", "only 1 durable", "at most 1"),
    (POLICY + "gc: {max_delete_fraction: 0%}}", "retention.gc.max_delete_fraction", 2, "'0%'", "range", "0% to 100%"),
    ("tiers: [/a]\noverrides: []", "overrides", 2, "[]", "empty", ""),
    ("tiers: [/a]\noverrides: [{match: {run: x}, retention: {}}]", "overrides[0].retention", 2, "", "says nothing", ""),
    ("tiers: [/a]\noverrides: [{match: {run: x}, retention: {timezone: UTC}}]", "overrides[0].retention.keep", 2, "", "missing", "keep:"),
    ("tiers: [/a]\ntiers: [/b]", "tiers", 2, "", "stands twice: here and in line 1", "keep one"),
    ("tiers: [/a]\nsave: {backlog: block, backlog: block}", "save.backlog", 2, "", "stands twice", "keep one"),
    ("tiers: [/a]\n5: x", "5", 2, "", "a key must be text", "quote"),
    ("tiers: !!python/tuple [/a]", "tiers", 1, "", "tag", "plain values"),
    ("tiers: [/a]\nrun: !!python/object/apply:os.system [ls]", "run", 2, "", "tag", "plain values"),
    ("tiers: [/a]\nrun: 2026-13-45", "run", 2, "", "can't be read as 'timestamp'", "quote"),
    ("tiers: &x [*x]", "tiers[0]", 1, "", "endless", "write the values out"),
]


@pytest.mark.parametrize(("text", "key", "line", "value", "reason", "remedy"), WRONG, ids=[f"{w[1]}: {w[4]}" for w in WRONG])
def test_a_mistake_is_told_with_file_line_key_value_reason_and_remedy(
    load: Load, tmp_path: Path, text: str, key: str, line: int, value: str, reason: str, remedy: str
) -> None:
    mistake = only_mistake(lambda: load(text))
    assert (mistake["file"], mistake["key"], mistake["line"]) == (str(tmp_path / "store.yaml"), key, line)
    assert (mistake["value"] or "") == value
    assert reason in mistake["reason"]
    assert remedy in mistake["remedy"]
    assert mistake["remedy"]
    with pytest.raises(ConfigError) as caught:
        load(text)
    told = str(caught.value)
    assert f"store.yaml:{line}: {key}" in told
    assert mistake["reason"] in told
    assert mistake["remedy"] in told


def test_all_mistakes_of_a_file_are_told_together_in_its_order(load: Load) -> None:
    text = "versio: 1\ntiers:\n  - {uri: /a, capacity: 5}\n"
    text += "  - {uri: '${NO}'}\n  - {uri: 's3:/x', codec: no}\nio:\n  threads: 0\n  threads: 1\n"
    with pytest.raises(ConfigError) as caught:
        load(text)
    mistakes = caught.value.context["mistakes"]
    assert [(m["line"], m["key"]) for m in mistakes] == [
        (1, "versio"),
        (3, "tiers[0].capacity"),
        (4, "tiers[1].uri"),
        (5, "tiers[2].uri"),
        (5, "tiers[2].codec"),
        (8, "io.threads"),
    ]
    assert str(caught.value).startswith("6 mistakes in ")
    assert all(m["remedy"] in str(caught.value) for m in mistakes)


def test_all_mistakes_across_keys_are_told_together(load: Load) -> None:
    text = "tiers: [{uri: /a, name: x}, {uri: /a, name: x}]\ndurable_at: y\nretention: {keep: [{last: 1}], tiers: {z: {max_bytes: 1GiB}}}"
    assert [m["key"] for m in mistakes_of(lambda: load(text))] == ["tiers[1].name", "tiers[1].uri", "durable_at", "retention.tiers.z"]


@pytest.mark.parametrize(
    ("text", "line"),
    [("tiers: [/a", 1), ("tiers:\n\t- /a", 2), ("a: b: c", 1), ("tiers: ['/a]", 1), ("x: *y", 1), ("a: 1\n---\nb: 2", 2)],
)
def test_a_syntax_error_is_told_with_its_line_and_alone(load: Load, text: str, line: int) -> None:
    mistake = only_mistake(lambda: load(text))
    assert "not valid YAML" in mistake["reason"]
    assert mistake["line"] is not None
    assert abs(mistake["line"] - line) <= 1


@pytest.mark.parametrize("text", ["", "# nothing", "5", "- /a", "tiers"])
def test_a_file_that_is_no_mapping_is_refused(load: Load, text: str) -> None:
    assert "mapping" in only_mistake(lambda: load(text))["reason"]


def test_a_text_that_can_not_be_yaml_is_refused(load: Load) -> None:
    assert "not valid YAML" in only_mistake(lambda: load("tiers: [\x07]"))["reason"]
    assert "nested too deeply" in only_mistake(lambda: load("[" * 5000))["reason"]


def test_aliases_of_aliases_end_in_an_error_not_in_memory(load: Load) -> None:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert any("endless" in m["reason"] for m in mistakes_of(lambda: load(laughs)))


def test_anchors_and_merges_work_and_own_keys_win(load: Load) -> None:
    config = load("tiers:\n  - &near {uri: /a, capacity: 1GiB, name: a}\n  - {<<: *near, uri: /b, name: b}")
    assert [(t.uri, t.capacity) for t in config.tiers] == [("/a", 2**30), ("/b", 2**30)]


def test_a_missing_file_suggests_the_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "tierstore.yaml").write_text("tiers: [/a]")
    with pytest.raises(ConfigError, match="no configuration file") as caught:
        load_config(tmp_path / "tierstor.yaml", env={})
    assert "tierstore.yaml" in caught.value.hint


def test_a_missing_policy_file_is_told_as_one(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"there is no retention policy file .*nope\.yaml") as caught:
        load("tiers: [/a]\nretention: nope.yaml")
    assert "`retention:`" in caught.value.hint


def test_what_is_no_readable_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path, env={})
    with pytest.raises(ConfigError, match="is a URI"):
        load_config("s3://key:hunter2@bucket/x", env={})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary", env={})
    (tmp_path / "huge").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="larger than 1MiB"):
        load_config(tmp_path / "huge", env={})
    with pytest.raises(ConfigError, match="can't be a int"):
        load_config(5, env={})  # type: ignore[arg-type]


# ---- secrets

SECRETS = {
    "key": "AKIAHUNTER",
    "secret": "hunter2",
    "client_kwargs": {"aws_session_token": "hunter3", "region_name": "eu"},
    "password": "hunter4",
}


def test_no_secret_shows_in_repr_or_in_the_redacted_form() -> None:
    config = load_config([{"uri": "s3://b", "options": SECRETS}], env={})
    shown = repr(config) + str(config) + repr(config.tiers[0]) + repr(config.redacted())
    assert "hunter" not in shown.lower()
    assert "eu" in repr(config.redacted())
    assert config.tiers[0].options == SECRETS


@pytest.mark.parametrize(
    "tier",
    [
        {"uri": "s3://AKIAHUNTER:hunter2@bucket/x"},
        {"uri": "s3://AKIAHUNTER:hunt/er2hunter@bucket/x"},
        {"uri": "https://hunter@host/x"},
        {"uri": "/a", "secret": "hunter2"},
        {"uri": "/a", "optoins": {"secret": "hunter2", "key": "hunter"}},
        {"uri": "/a", "options": "secret=hunter2://hunter:hunter@x", "name": "B"},
        {"uri": "s3://b", "options": {"token": "${hunter"}},
        {"uri": "s3://b", "options": {"client_kwargs": {"aws_secret_access_key": "hunter2${"}}},
    ],
)
def test_no_message_shows_a_secret(tier: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([tier], env={})
    error = caught.value
    shown = (
        str(error)
        + repr(error.context["mistakes"])
        + repr(error.__cause__)
        + repr(error.__context__ if not error.__suppress_context__ else "")
    )
    assert "hunter2" not in shown
    assert "AKIAHUNTER" not in shown


def test_credentials_in_a_uri_are_refused_with_a_better_place_for_them() -> None:
    mistake = only_mistake(lambda: load_config(["s3://key:hunter2@bucket/x"], env={}))
    assert mistake["value"] == "'s3://***@bucket/x'"
    assert "options" in mistake["remedy"]


def test_a_syntax_error_near_a_secret_does_not_show_it(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load("tiers:\n  - uri: s3://b\n    options: {secret: hunter2")
    assert "hunter2" not in str(caught.value)


# ---- models in Python


def test_models_take_plain_bytes_and_seconds_in_python_and_check_them_too() -> None:
    tier = TierConfig(name="x", uri="/a", scope="shared", durable=True, capacity=5, max_bandwidth=7)
    assert StoreConfig(tiers=(tier,)).authority is tier
    with pytest.raises(ValueError, match="greater than 0"):
        TierConfig(name="x", uri="/a", scope="shared", durable=True, capacity=0)
    with pytest.raises(ValueError, match="same place"):
        StoreConfig(tiers=(tier, tier))


def test_a_configuration_is_immutable_and_survives_a_pickle() -> None:
    config = load_config(["/a", "s3://b"], env={})
    with pytest.raises(ValueError, match="frozen"):
        config.run = "x"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own bytes


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["tiers", "uri", "keep", "last", "retention", "run", "io", "x"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_any_value_is_a_configuration_or_a_config_error_with_remedies(value: Any) -> None:
    source = value if isinstance(value, dict) else {"tiers": value}
    try:
        config, remedies = load_config(source, env={}), ["none needed"]
    except ConfigError as error:
        config, remedies = None, [m["remedy"] for m in error.context.get("mistakes", ())] or [error.hint]
    assert config is None or config.tiers
    assert all(remedies)


@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        load_config(path, env={})
    assert caught.value.hint


def test_equal_configurations_have_one_fingerprint_whichever_of_their_texts_are_one_object() -> None:
    def told(name: str, durable_at: str, key: str = "a") -> str:
        options = {"key": key, "secret": "b"}
        return load_config({"tiers": [{"name": name, "uri": "s3://bucket/x", "options": options}], "durable_at": durable_at}).fingerprint

    once = "".join(["sha", "red"])
    assert told(once, once) == told(once, "".join(["sha", "red"]))
    config = load_config({"tiers": [{"name": once, "uri": "/x", "durable": True}], "durable_at": once})
    assert pickle.loads(pickle.dumps(config)).fingerprint == config.fingerprint  # noqa: S301 - our own
    assert told(once, once, key="another") != told(once, once)
