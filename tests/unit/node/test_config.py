"""Configuration: sources, their order, and what is refused with which words."""

from __future__ import annotations

import tomllib
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reach.node.config import Config, ConfigError, Setting, describe, load, loopback, split_address
from reach.node.settings import Table


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "reach.toml"
    file.write_text(text)
    return file


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**({"environment": {}} | given))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_defaults_alone_are_valid() -> None:
    config = load(environment={})
    assert (config.listen, config.http, config.registry) == ("127.0.0.1:7070", "127.0.0.1:7071", "memory")
    assert config.node_id


def test_node_ids_made_for_two_nodes_of_one_host_differ() -> None:
    assert load(environment={}).node_id != load(environment={}).node_id


def test_flags_beat_variables_beat_the_file_beats_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "lane_max = 1\nmax_hops = 2\nmax_repeats = 3\n")
    config = load(file, {"REACH_MAX_HOPS": "20", "REACH_MAX_REPEATS": "30"}, {"max_repeats": "50", "lane_max": None})
    assert (config.lane_max, config.max_hops, config.max_repeats) == (1, 20, 50)


def test_a_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    file = written(tmp_path, "lane_max = 7\n")
    assert load(environment={"REACH_CONFIG": str(file)}).lane_max == 7


def test_every_setting_can_be_written_in_a_file_and_as_a_variable_and_as_a_flag(tmp_path: Path) -> None:
    plain = load(environment={})
    for setting in describe():
        value = "abc" if setting.name == "node_id" else setting.default
        if setting.kind is Table:
            continue
        if setting.kind is dict:
            text, as_toml = "", "{}"
        elif setting.kind is bool:
            text, as_toml = str(value).lower(), str(value).lower()
        elif setting.kind is str:
            text, as_toml = value, f'"{value}"'
        else:
            text, as_toml = f"{value}", f"{value}"
        from_file = load(written(tmp_path, f"{setting.name} = {as_toml}\n"), {})
        from_variable = load(environment={setting.variable: text})
        from_flag = load(environment={}, flags={setting.name: text})
        for config in (from_file, from_variable, from_flag):
            if setting.name != "node_id":
                assert getattr(config, setting.name) == getattr(plain, setting.name)


def test_unknown_settings_are_refused_with_the_nearest_one_wherever_they_stand(tmp_path: Path) -> None:
    assert "lane_max" in refused(file=written(tmp_path, "lane_maks = 1\n"))
    assert "REACH_LISTEN" in refused(environment={"REACH_LISTN": "127.0.0.1:1"})
    assert "max_hops" in refused(flags={"max_hop": "1"})


def test_the_sdks_variables_and_others_are_left_alone() -> None:
    load(
        environment={
            "REACH_URL": "x", "REACH_API_KEY": "x", "REACH_CLIENT_TLS_CA": "x", "REACH_SOAK": "1",
            "PATH": "x", "REACHES": "x",
        }
    )  # fmt: skip


@pytest.mark.parametrize("bad", ["x", "", "0", "-1", "1e9", "1.5", "nan", "inf"])
def test_a_bad_number_names_setting_source_value_and_what_is_allowed(bad: str) -> None:
    text = refused(environment={"REACH_LANE_MAX": bad})
    assert "lane_max" in text and "REACH_LANE_MAX" in text and "from 1 to 100000" in text


@pytest.mark.parametrize("written_as", ["true", '"7"', "[1]", "{a = 1}", "1979-05-27", "nan"])
def test_a_file_value_of_the_wrong_kind_is_refused(tmp_path: Path, written_as: str) -> None:
    assert "whole number" in refused(file=written(tmp_path, f"lane_max = {written_as}\n"))


def test_words_are_checked() -> None:
    assert "debug, info, warning, error" in refused(environment={"REACH_LOG_LEVEL": "loud"})
    assert load(environment={"REACH_LOG_LEVEL": "DEBUG"}).log_level == "debug"


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.toml" in refused(file=tmp_path / "nowhere.toml")
    assert "not valid TOML" in refused(file=written(tmp_path, "= 1"))


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "10.0.0.1:7070", "[::]:7070", "example.org:7070"])
@pytest.mark.parametrize("name", ["listen", "http"])
def test_an_address_that_others_reach_must_be_said_aloud(address: str, name: str) -> None:
    assert "--insecure" in refused(flags={name: address})
    assert getattr(load(environment={}, flags={name: address, "insecure": True}), name) == address


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"listen": "0.0.0.0:7070", "auth": "keys", "keys_file": "k.json"}, "without tls_cert:"),
        ({"http": "0.0.0.0:7071", "auth": "keys", "keys_file": "k.json"}, "without tls_cert:"),
        ({"listen": "0.0.0.0:7070", "tls_cert": "c.pem", "tls_key": "k.pem"}, "without auth:"),
        ({"auth": "keys"}, "say where the keys are"),
        ({"auth": "keys", "keys_file": "k.json", "keys": "etcd", "registry": "etcd://127.0.0.1:1"}, "say where"),
        ({"auth": "keys", "keys": "etcd"}, "there is no etcd"),
        ({"keys_file": "k.json"}, "looks at none"),
        ({"keys": "etcd", "registry": "etcd://127.0.0.1:1"}, "looks at none"),
        ({"auth": "mtls"}, "tls_ca are needed"),
        ({"auth": "mtls", "tls_cert": "c.pem", "tls_key": "k.pem"}, "tls_ca are needed"),
        ({"tls_cert": "c.pem"}, "go together"),
        ({"tls_ca": "ca.pem"}, "there is no TLS"),
    ],
)
def test_what_was_meant_to_close_a_node_and_does_not_is_refused(flags: dict[str, object], told: str) -> None:
    assert told in refused(flags=flags)


def test_principals_that_nobody_looks_at_are_refused(tmp_path: Path) -> None:
    assert "looks at no certificate" in refused(file=written(tmp_path, '[principals."a.example"]\nadmin = true'))


@pytest.mark.parametrize("address", ["", "7070", "localhost", "a:b", "::1:7070", "h:70000", ":7070", "h:-1", "h:٣"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    assert "listen" in refused(flags={"listen": address})
    if address:
        assert "advertise" in refused(flags={"advertise": address})


def test_loopback_is_told_apart() -> None:
    assert loopback("127.0.0.1:1") and loopback("[::1]:1") and loopback("localhost:1") and loopback("127.9.9.9:1")
    assert not loopback("0.0.0.0:1") and not loopback("[::]:1") and not loopback("localhost.example:1")
    assert split_address("[::1]:7070") == ("::1", 7070)


def test_http_can_be_switched_off() -> None:
    assert load(environment={"REACH_HTTP": ""}).http == ""


@pytest.mark.parametrize(
    "registry", ["etcd://127.0.0.1:1", "etcd://localhost:1,[::1]:3", "etcds://a:1,b:2,[::1]:3", "memory"]
)
def test_registries_are_accepted(registry: str) -> None:
    assert load(environment={"REACH_REGISTRY": registry}).registry == registry


@pytest.mark.parametrize("registry", ["etcd", "etcd://", "etcd://a", "etcd://a:1,", "redis://a:1", "Memory"])
def test_other_registries_are_refused(registry: str) -> None:
    assert "registry" in refused(environment={"REACH_REGISTRY": registry})


def test_settings_that_do_not_fit_together_are_refused() -> None:
    assert "lease_ttl_s" in refused(flags={"heartbeat_interval_s": "20"})
    assert "resume_window_s" in refused(flags={"settle_min_s": "20"})
    assert "registry_tls_key" in refused(flags={"registry_tls_cert": __file__})
    assert "cannot be read" in refused(flags={"registry_tls_ca": "/nowhere/ca.pem"})


def test_etcd_on_another_machine_needs_tls_or_the_word_that_it_has_none() -> None:
    away = {"registry": "etcd://127.0.0.1:1,etcd-2:2"}
    assert "etcd-2:2 is another machine, without TLS" in refused(flags=away)
    for more in ({"insecure": True}, {"registry_tls_ca": __file__}, {"registry_tls_ca": "system"}):
        load(environment={}, flags={**away, **more})
    load(environment={}, flags={"registry": "etcds://etcd-2:2"})


def test_a_user_needs_a_password_and_a_password_a_user(tmp_path: Path) -> None:
    for flags in ({"registry_user": "reach"}, {"registry_password": "hunter2"}):
        said = refused(flags=flags)
        assert "registry_user and registry_password" in said
        assert "hunter2" not in said


def test_the_password_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    file = written(tmp_path, "hunter2 \nand a note\n")
    flags = {"registry_user": "reach", "registry_password_file": str(file)}
    assert load(environment={}, flags=flags).registry_password == "hunter2 "
    assert "one of them" in refused(flags={**flags, "registry_password": "x"})


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe"])
def test_a_password_file_without_a_password_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    said = refused(flags={"registry_user": "reach", "registry_password_file": str(file)})
    assert f"registry_password_file is '{file}'" in said


def test_an_address_that_holds_a_password_is_refused_without_repeating_it() -> None:
    for registry in ("etcd://reach:hunter2@127.0.0.1:1", "etcd://127.0.0.1:1,a:hunter2@b:1", "hunter2@a:1"):
        said = refused(flags={"registry": registry})
        assert "registry_password_file" in said
        assert "hunter2" not in said


def test_places_for_conversations_states_fit_the_registry(tmp_path: Path) -> None:
    etcd, directory = {"registry": "etcd://127.0.0.1:2379"}, {"snapshots": "directory", "snapshots_dir": str(tmp_path)}
    assert "snapshots_shared" in refused(flags={**etcd, **directory})
    assert "snapshots_dir" in refused(flags={"snapshots": "directory"})
    assert "no etcd" in refused(flags={"snapshots": "etcd"})
    assert "no other node" in refused(flags={**etcd, "snapshots": "memory"})
    assert "auto" in refused(flags={"snapshots": "s3"})
    for flags in ({**etcd, **directory, "snapshots_shared": True}, {**etcd, "snapshots": "etcd"}, directory, etcd):
        load(environment={}, flags=flags)


def test_tables_are_read_from_files_and_variables(tmp_path: Path) -> None:
    file = written(tmp_path, '[aliases]\nsummarize = "text_summarize"\n[policies]\nplanner = "LEAST_LOAD"\n')
    config = load(file, {})
    assert dict(config.aliases) == {"summarize": "text_summarize"}
    assert dict(config.policies) == {"planner": "LEAST_LOAD"}
    assert dict(load(environment={"REACH_ALIASES": "a=b, c=d"}).aliases) == {"a": "b", "c": "d"}


def test_an_unknown_policy_is_refused_with_the_nearest() -> None:
    assert "did you mean LEAST_LOAD" in refused(environment={"REACH_POLICIES": "planner=LEAST_LOADED"})
    assert "NAME=VALUE" in refused(environment={"REACH_POLICIES": "planner"})


def test_secrets_are_not_shown() -> None:
    config = load(environment={"REACH_REGISTRY_USER": "reach", "REACH_REGISTRY_PASSWORD": "hunter2"})
    assert config.registry_password == "hunter2"
    assert "hunter2" not in repr(config)
    assert "hunter2" not in refused(environment={"REACH_REGISTRY_PASSWORD": "hunter2\x00"})


def test_a_config_cannot_be_changed() -> None:
    config = load(environment={})
    with pytest.raises(FrozenInstanceError):
        config.lane_max = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.aliases["a"] = "b"  # type: ignore[index]


def test_every_setting_is_documented_with_both_ends_and_a_default_within_its_bounds() -> None:
    table = describe()
    assert [setting.name for setting in table] == [each.name for each in fields(Config)]
    for setting in table:
        assert setting.meaning.endswith(".")
        if setting.kind in (int, float):
            assert setting.least is not None and setting.most is not None and setting.low and setting.high
            assert setting.least <= setting.default <= setting.most
            assert setting.kind is int or setting.unit == "s"


NUMBERS = [setting for setting in describe() if setting.kind in (int, float)]


@given(st.sampled_from(NUMBERS), st.floats(allow_nan=True, allow_infinity=True))
def test_no_number_outside_its_bounds_gets_through(setting: Setting, value: float) -> None:
    assert setting.least is not None and setting.most is not None
    try:
        config = load(environment={setting.variable: repr(value)})
    except ConfigError:
        return
    assert setting.least <= getattr(config, setting.name) <= setting.most


@given(st.text())
def test_no_text_in_a_file_raises_anything_but_a_configuration_error(text: str) -> None:
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    for name in parsed:
        with pytest.raises(ConfigError):
            load(environment={}, flags={name: parsed[name]})
