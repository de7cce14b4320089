"""Order of sources, origins, and the sentence for every kind of mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import Config
from cluster.config_options import RANGES, options
from cluster.config_sources import Loaded, load
from cluster.errors import UsageError


def from_yaml(tmp_path: Path, text: str, env: dict[str, str] | None = None, **flags: tuple[str, Any]) -> Loaded:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, env or {}, {path.replace("__", "."): given for path, given in flags.items()})


def test_nothing_given_is_the_defaults() -> None:
    loaded = load(None, {}, {})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert set(loaded.origins) == {option.path for option in options()}


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    text = "pool: {tokens: 100, block_tokens: 8}\nhttp: {port: 1}\n"
    env = {"KVATLAS_POOL__TOKENS": "200", "KVATLAS_HTTP__PORT": "2"}
    loaded = from_yaml(tmp_path, text, env, http__port=("--port", 3))
    assert (loaded.config.pool.block_tokens, loaded.config.pool.tokens, loaded.config.http.port) == (8, 200, 3)
    assert loaded.origins["pool.block_tokens"] == f"file {tmp_path / 'config.yaml'}"
    assert loaded.origins["pool.tokens"] == "env KVATLAS_POOL__TOKENS"
    assert loaded.origins["http.port"] == "flag --port"


def test_every_option_has_an_environment_variable() -> None:
    env = {option.env: str(option.default) for option in options() if option.default != ""}
    loaded = load(None, env, {})
    assert loaded.config == Config()
    assert {loaded.origins[option.path] for option in options() if option.env in env} == {f"env {name}" for name in env}


def test_config_file_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("http: {port: 9}\n")
    assert load(None, {"KVATLAS_CONFIG": str(file)}, {}).config.http.port == 9


def test_empty_file_and_empty_sections_are_fine(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "").config == Config()
    assert from_yaml(tmp_path, "pool:\nhttp: {}\n").config == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pol: {tokens: 1}", ["section pol", "did you mean pool?"]),
        ("pool: {token: 1}", ["option pool.token", "did you mean pool.tokens?"]),
        ("zzzzz: {}", ["section zzzzz", "kvatlas config"]),
        ("pool: 3", ["section pool", "3", "indent"]),
        ("- 1", ["the file", "indent"]),
        ("pool: {tokens: many}", ["pool.tokens", "'many'", "a whole number"]),
        ("pool: {tokens: true}", ["pool.tokens", "True", "a whole number"]),
        ("pool: {tokens: 1.5}", ["pool.tokens", "1.5", "a whole number"]),
        ("pool: {tokens: [1]}", ["pool.tokens", "[1]"]),
        ("pool: {tokens: -1}", ["pool.tokens", "-1", "from 0 to"]),
        ("http: {port: 70000}", ["http.port", "70000", "from 1 to 65,535"]),
        ("engine: {stall_s: .nan}", ["engine.stall_s", "nan"]),
        ("router: {policy: luck}", ["router.policy", "'luck'", "cost", "round_robin"]),
        ("cluster: {replicas: 0}", ["cluster.replicas", "from 1 to"]),
        ("cluster: {id: 'a b'}", ["cluster.id", "'a b'", "letters, digits"]),
        ("cluster: {secret: short}", ["cluster.secret", "at least 16 characters"]),
        ("directory: {redis_url: 'localhost:6379'}", ["directory.redis_url", "HOST[:PORT]"]),
        ("pool: {scope: rack}", ["pool.scope", "'rack'", "replica", "node"]),
        ("pool: {guard: maybe}", ["pool.guard", "'maybe'", "true or false"]),
        ("pool: {orphan_ttl_s: -1}", ["pool.orphan_ttl_s", "-1", "at least 0"]),
        ("engine: {mode: turbo}", ["engine.mode", "'turbo'", "exact", "fast"]),
        ("http: {host: 5}", ["http.host", "5", "text"]),
        ("a: b: c", ["line 1", "YAML"]),
        ("pool:\n  tokens: 1\n  tokens: 2", ["line 3", "tokens is set twice"]),
        ("\tx", ["line 1", "YAML"]),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_fix(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_yaml(tmp_path, text)
    for word in [*words, str(tmp_path / "config.yaml")]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_variable_suggests_the_near_one() -> None:
    with pytest.raises(UsageError, match=r"KVATLAS_POOL__TOKEN .*did you mean KVATLAS_POOL__TOKENS\?"):
        load(None, {"KVATLAS_POOL__TOKEN": "1"}, {})


def test_documented_other_variables_and_foreign_ones_are_left_alone() -> None:
    env = {"KVATLAS_CACHE_DIR": "/x", "KVATLAS_RUNTIME_DIR": "/y", "PATH": "z", "kvatlas_pool__tokens": "1"}
    assert load(None, env, {}).config == Config()


def test_unknown_flag_path_names_the_flag() -> None:
    with pytest.raises(UsageError, match=r"engine\.mod in --set: did you mean engine\.mode\?"):
        load(None, {}, {"engine.mod": ("--set", "fast")})


def test_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "no.yaml", {}, {})


def test_a_bad_secret_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        load(None, {}, {"http.admin_key": ("--set", ["hunter2"])})
    assert "hunter2" not in str(caught.value)


def test_admin_key_from_a_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("  s3cret\n")
    loaded = load(None, {"KVATLAS_HTTP__ADMIN_KEY_FILE": str(key)}, {})
    assert loaded.config.http.admin_key == "s3cret"
    assert loaded.origins["http.admin_key"] == f"file {key}"
    assert "s3cret" not in repr(loaded.config)


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_useless_admin_key_file_is_refused(tmp_path: Path, content: str | None) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_text(content)
    with pytest.raises(UsageError, match="admin_key_file"):
        load(None, {"KVATLAS_HTTP__ADMIN_KEY_FILE": str(key)}, {})


def test_two_admin_keys_are_refused(tmp_path: Path) -> None:
    env = {"KVATLAS_HTTP__ADMIN_KEY": "a", "KVATLAS_HTTP__ADMIN_KEY_FILE": str(tmp_path)}
    with pytest.raises(UsageError, match="keep one"):
        load(None, env, {})


def test_every_number_has_a_range_that_allows_its_default() -> None:
    numbers = {option.path: option.default for option in options() if option.kind in (int, float)}
    assert set(numbers) == set(RANGES)
    for path, default in numbers.items():
        assert RANGES[path].low <= default <= RANGES[path].high


def test_variables_that_kubernetes_sets_for_services_are_not_ours() -> None:
    env = {
        "KVATLAS_REDIS_PORT": "tcp://10.0.0.1:6379",
        "KVATLAS_REDIS_SERVICE_HOST": "10.0.0.1",
        "KVATLAS_SERVICE_PORT": "6379",
        "KVATLAS_REDIS_SERVICE_PORT_METRICS": "1",
        "KVATLAS_REDIS_PORT_6379_TCP": "tcp://10.0.0.1:6379",
        "KVATLAS_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
    }
    assert load(None, env, {}).config == Config()
    for typo in ("KVATLAS_REDIS", "KVATLAS_HTTP__PORT_", "KVATLAS_HTP__PORT", "KVATLAS_PORTS"):
        with pytest.raises(UsageError, match=typo):
            load(None, {typo: "1"}, {})


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:6379/0",
        "rediss://:p%40ss@h.example:6379",
        "redis://user:pw@[::1]:6379/2",
        "unix:///run/r.sock",
    ],
)
def test_addresses_of_redis(url: str) -> None:
    assert load(None, {"KVATLAS_DIRECTORY__REDIS_URL": url}, {}).config.directory.redis_url == url


@pytest.mark.parametrize(
    "url", ["redis://", "redis://h:port", "redis://h:6379/db", "http://h", "h:6379", "redis://h:0", "redis://:pw@"]
)
def test_addresses_that_are_none_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(UsageError, match="redis://") as caught:
        load(None, {"KVATLAS_DIRECTORY__REDIS_URL": url}, {})
    assert "pw" not in str(caught.value)


KEY = "alice-0123456789-key"


@pytest.mark.parametrize("form", ["variable", "file"])
def test_api_keys_are_never_shown(tmp_path: Path, form: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}\n")
    env = (
        {"KVATLAS_HTTP__API_KEYS": f"alice:{KEY}"} if form == "variable" else {"KVATLAS_HTTP__API_KEYS_FILE": str(file)}
    )
    loaded = load(None, env, {})
    assert KEY not in repr(loaded)
    assert (loaded.config.http.api_keys, loaded.config.http.api_keys_file) == (
        (f"alice:{KEY}", "") if form == "variable" else ("", str(file))
    )


@pytest.mark.parametrize(
    ("http", "words"),
    [
        ({"api_keys": "alice"}, ["http.api_keys", "entry 1", "NAME:KEY"]),
        ({"api_keys": "alice:short"}, ["http.api_keys", "entry 1", "5 characters"]),
        ({"api_keys": " "}, ["http.api_keys", "no key"]),
        ({"api_keys_file": "FILE"}, ["http.api_keys_file", "FILE", "entry 2"]),
        ({"api_keys_file": "FILE.none"}, ["http.api_keys_file", "FILE.none", "No such file"]),
        ({"api_keys": f"alice:{KEY}", "api_keys_file": "FILE"}, ["keep one"]),
        ({"salt_per_key": "true"}, ["http.salt_per_key", "http.api_keys_file"]),
    ],
)
def test_a_mistake_about_api_keys_is_named_with_its_fix(tmp_path: Path, http: dict[str, str], words: list[str]) -> None:
    file = str(tmp_path / "keys")
    Path(file).write_text(f"alice:{KEY}\nbob-and-{KEY}\n")
    env = {f"KVATLAS_HTTP__{name.upper()}": value.replace("FILE", file) for name, value in http.items()}
    with pytest.raises(UsageError) as caught:
        load(None, env, {})
    for word in words:
        assert word.replace("FILE", file) in str(caught.value)
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("origins", "is_right"),
    [
        ("https://a.example.com", True),
        ("http://localhost:3000 https://b.example.com  http://[::1]:8080", True),
        ("*", False),
        ("https://*.example.com", False),
        ("null", False),
        ("https://a.example.com/", False),
        ("https://a.example.com/chat", False),
        ("https://A.example.com", False),
        ("https://a.example.com,https://b.example.com", False),
        ("a.example.com", False),
        ("https://a.example.com:0", False),
    ],
)
def test_origins_are_exact(origins: str, is_right: bool) -> None:
    if is_right:
        assert load(None, {"KVATLAS_HTTP__CORS_ORIGINS": origins}, {}).config.http.cors_origins == origins
        return
    with pytest.raises(UsageError, match=r"http\.cors_origins cannot be .* exact origins"):
        load(None, {"KVATLAS_HTTP__CORS_ORIGINS": origins}, {})


def test_a_deterministic_engine_needs_mode_fast(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "engine: {deterministic: true}").config.engine.deterministic
    with pytest.raises(
        UsageError, match=r"engine.deterministic .*file .* needs engine.mode fast, which is exact \(env"
    ):
        from_yaml(tmp_path, "engine: {deterministic: true}", {"KVATLAS_ENGINE__MODE": "exact"})
