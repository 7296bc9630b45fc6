"""Sources of settings, their precedence, and error messages."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from forq.errors import ConfigError
from forq.procs.cgroups import usable_cpus
from forq.queue_spec import QueueSpec
from forq.redis_url import shown_url
from forq.settings import OPTIONS, SERVICE, defaults
from forq.supervisor import config as config_module
from forq.supervisor.config import BridgeConfig, Config, Pipeline, load

ROOT = Path(__file__).resolve().parent.parent.parent
Load = Callable[..., Config]


@pytest.fixture(autouse=True)
def no_system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ignores the /etc/forq/forq.toml of this machine."""
    file = tmp_path / "system.toml"
    monkeypatch.setattr(config_module, "DEFAULT_FILE", file)
    monkeypatch.delenv("FORQ_STATE_DIR", raising=False)
    monkeypatch.setenv("STATE_DIRECTORY", "/srv/state")
    return file


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    def load_text(text: str, environ: dict[str, str] | None = None, **flags: object) -> Config:
        file = tmp_path / "forq.toml"
        file.write_text(text)
        return load({"config": str(file), **flags}, environ or {})

    return load_text


@pytest.fixture(autouse=True)
def spark_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that Spark is installed: the meaning of settings does not depend on it."""
    monkeypatch.setattr(config_module, "find_spec", lambda name: object())


def test_without_settings_the_defaults_apply() -> None:
    assert load({}, {}) == Config(
        file=None,
        state_dir=Path("/srv/state"),
        socket=Path("/srv/state/control.sock"),
        redis=None,
        prefix="forq:",
        require_redis=False,
        max_queues=1000,
        heartbeat_seconds=5.0,
        expiry_seconds=15.0,
        stop_grace_seconds=10.0,
        failed_log_max=64 * 1024**2,
        capacity=100 * usable_cpus(),
        capacity_aging_seconds=1.0,
        control_group=None,
        cgroup="auto",
        embedded_server=None,
        mode="work",
        tracing="off",
        log_format="auto",
        log_level="info",
        log_max=8 * 1024**2,
        log_redact=(),
        control_read_group=None,
        remote_control="off",
        titles="full",
        queues=(),
    )


def test_a_world_writable_config_file_is_refused(load_text: Load, tmp_path: Path) -> None:
    load_text("")
    os.chmod(tmp_path / "forq.toml", 0o666)
    with pytest.raises(ConfigError, match=r"forq\.toml can be changed by everybody, .*: chmod o-w /.*/forq\.toml \(or"):
        load_text("")


def test_the_sample_with_all_lines_uncommented_equals_the_defaults(load_text: Load) -> None:
    enabled = re.sub(r"(?m)^#(?=\[|\w+ = )", "", (ROOT / "etc" / "forq.toml").read_text())
    config = load_text(enabled)
    queue, gate, pipeline = config.queues
    defaults_of_all: dict[str, object] = {
        "file": None,
        "apps": (),
        "queues": (),
        "pipeline": None,
        "metrics": None,
        "web": None,
        "bridges": (),
        "schedules": {},
    }
    assert config.__dict__ | defaults_of_all == load({}, {}).__dict__
    assert config.schedules["example"].keys() == {"nightly"}
    assert (pipeline.name, pipeline.handler) == ("forq-pipeline", "forq.pipeline.ingest:ingest")
    assert config.pipeline == Pipeline("/srv/state/history", 60.0)
    assert config.metrics is not None
    assert (config.metrics.listen, config.metrics.health_seconds) == ("127.0.0.1:9464", 60.0)
    assert config.web is not None
    assert (config.web.listen, config.web.read_only, config.web.proxies) == ("127.0.0.1:9465", False, ("10.0.0.5",))
    assert [bridge.tick_seconds for bridge in config.bridges] == [3.0]
    assert queue.options == defaults("work")
    releasing = {name for name, option in OPTIONS.items() if "work" not in option.modes}
    assert gate.options == {name: defaults("auto_release")[name] for name in {*releasing, "retry_lane_retries"}}
    assert config.options_of(gate) == defaults("auto_release")
    for name in SERVICE:
        assert re.search(rf"(?m)^{name} = ", enabled), f"{name} is not in the sample"


def test_the_default_capacity_follows_the_cpus_that_the_process_may_use(
    load_text: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "usable_cpus", lambda: 3)
    assert load_text("").capacity == 300


def test_a_size_above_the_capacity_is_refused(load_text: Load) -> None:
    with pytest.raises(ConfigError, match=r"\[queues.q\]: size = 31 is not allowed: capacity is 30 units"):
        load_text('capacity = 30\n[queues.q]\nhandler = "m:f"\nsize = 31')
    assert load_text('capacity = 30\n[queues.q]\nhandler = "m:f"\nsize = 30').capacity == 30


def test_the_shipped_sample_equals_the_defaults() -> None:
    config = load({"config": ROOT / "etc" / "forq.toml"}, {})
    assert config.__dict__ | {"file": None} == load({}, {}).__dict__


def test_the_example_of_make_run_loads() -> None:
    config = load({"config": ROOT / "etc" / "examples" / "sample.toml"}, {})
    assert {queue.name: queue.path for queue in config.queues} == {
        "hello": (str(ROOT / "etc" / "examples"),),
        "slow": (str(ROOT / "etc" / "examples"),),
    }


def test_flags_override_the_environment_which_overrides_the_file(load_text: Load) -> None:
    text = 'redis = "redis://file"\nstate_dir = "/file"\nsocket = "/file.sock"\n'
    environ = {"FORQ_REDIS": "redis://env", "FORQ_STATE_DIR": "/env"}
    config = load_text(text, environ, redis="redis://flag", state_dir=None)
    assert (config.redis, config.state_dir, config.socket) == ("redis://flag", Path("/env"), Path("/file.sock"))


def test_the_config_file_comes_from_the_flag_the_variable_or_the_system(tmp_path: Path, no_system_file: Path) -> None:
    files = {name: tmp_path / f"{name}.toml" for name in ("flag", "variable")}
    for name, file in files.items():
        file.write_text(f'prefix = "{name}:"')
    no_system_file.write_text('prefix = "system:"')
    environ = {"FORQ_CONFIG": str(files["variable"])}
    assert load({"config": str(files["flag"])}, environ).prefix == "flag:"
    assert load({}, environ).prefix == "variable:"
    assert load({}, {}).prefix == "system:"


def test_an_empty_variable_counts_as_unset() -> None:
    config = load({}, {"FORQ_CONFIG": "", "FORQ_STATE_DIR": "", "FORQ_REDIS": ""})
    assert config == load({}, {})


def test_relative_paths_in_the_file_are_relative_to_it(load_text: Load, tmp_path: Path) -> None:
    config = load_text(
        'state_dir = "s"\nembedded_server = "./bin/srv"\n[queues.q]\nhandler = "m:f"\npath = ["lib", "/x"]'
    )
    assert config.state_dir == tmp_path / "s"
    assert config.embedded_server == str(tmp_path / "bin" / "srv")
    assert config.queues[0].path == (str(tmp_path / "lib"), "/x")


def test_a_bare_server_name_is_looked_up_on_path(load_text: Load) -> None:
    assert load_text('embedded_server = "redis-server"').embedded_server == "redis-server"


def test_queues_are_read_with_types_and_options(load_text: Load) -> None:
    config = load_text(
        '[queues.emails]\nhandler = "m:f"\nhandlers.big = "m:g"\nmax_items = 5\n[queues.b]\nhandler = "m"'
    )
    assert config.queues == (
        QueueSpec("emails", "work", "m:f", {"big": "m:g"}, (), {"max_items": 5}),
        QueueSpec("b", "work", "m", {}, (), {}),
    )


def test_stop_grace_of_a_queue_overrides_the_one_of_the_service(load_text: Load) -> None:
    config = load_text('stop_grace = "3s"\n[queues.a]\nhandler = "m"\n[queues.b]\nhandler = "m"\nstop_grace = "4s"')
    options = [config.options_of(queue) for queue in config.queues]
    assert [each["stop_grace"] for each in options] == [3.0, 4.0]
    assert set(options[0]) == set(defaults("work"))


def test_the_mode_of_a_queue_overrides_the_one_of_the_service(load_text: Load) -> None:
    config = load_text('mode = "on_request"\n[queues.a]\n[queues.b]\nmode = "work"\nhandler = "m:f"')
    assert [(queue.name, queue.mode) for queue in config.queues] == [("a", "on_request"), ("b", "work")]
    assert config.mode == "on_request"
    assert load_text("").mode == "work"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('mode = "auto"', r'forq\.toml: mode = \'auto\' is not allowed: "work", "auto_release", "on_request"'),
        ("[queues.q]\nmode = 3", r"\[queues\.q\]: mode = 3 is not allowed"),
        (
            '[queues.q]\nmode = "on_request"\nrelease_interval = "1s"',
            r"\[queues\.q\]: release_interval is an option of mode auto_release, not of mode on_request",
        ),
        ('[queues.q]\nmode = "on_request"\nhandler = "m:f"', r"handler is not allowed: a queue of mode on_request"),
        ("x = 1\ny = \n", r"forq\.toml: not valid TOML: .*line 2"),
        ("heartbeet = 5", r"forq\.toml: there is no setting 'heartbeet'; did you mean heartbeat\?"),
        ("max_queues = 0", r"forq\.toml: max_queues = 0 is not allowed: a whole number from 1 to 100000"),
        ('heartbeat = "often"', r"forq\.toml: heartbeat = 'often' is not allowed: a duration from 50ms"),
        ("require_redis = 1", "require_redis = 1 is not allowed: true or false"),
        ('heartbeat = "10s"', "expiry = 15s is not allowed: at least twice heartbeat"),
        ('prefix = "a{b"', "prefix = 'a{b' is not allowed"),
        ('cgroup = "on"', 'cgroup = \'on\' is not allowed: "auto" or "off"'),
        ("state_dir = 3", "state_dir = 3 is not allowed: a path"),
        ('control_group = "no-such-group"', "a group that exists on this machine"),
        ('control_read_group = "no-such-group"', "a group that exists on this machine"),
        ('titles = "short"', 'titles = \'short\' is not allowed: "full" or "plain"'),
        ('log_redact = "x"', "log_redact = 'x' is not allowed: a list of regular expressions, as text"),
        ('log_redact = ["(x"]', r"a list of regular expressions, as text \(missing \)"),
        ("queues = 3", r"queues = 3 is not allowed: use tables \[queues.NAME\]"),
        ("[queues]\na = 3", r"\[queues.a\]: 3 is not allowed"),
        ('[queues.a]\nhandler = "m"\nconcurrency = 999', r"forq\.toml: \[queues.a\]: concurrency = 999 .* 1 to 256"),
        ("[queues.a]\n", r"\[queues.a\]: a queue of mode work needs handler"),
        ('[queues."a b"]\nhandler = "m"', r"\[queues.a b\]: queue name 'a b' is not allowed"),
        ('max_queues = 1\n[queues.a]\nhandler = "m"\n[queues.b]\nhandler = "m"', "2 queues, but max_queues = 1"),
        (f'socket = "/{"s" * 107}"', "has 108 bytes, but Linux allows 107"),
    ],
)
def test_an_error_in_the_file_reports_place_value_and_allowed_values(load_text: Load, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_text(text)


def test_an_error_reports_the_variable_or_flag_it_came_from() -> None:
    with pytest.raises(ConfigError, match="FORQ_REDIS: redis = 'http://x' is not allowed"):
        load({}, {"FORQ_REDIS": "http://x"})
    with pytest.raises(ConfigError, match="--redis: redis = 'http://x' is not allowed"):
        load({"redis": "http://x"}, {})
    with pytest.raises(ConfigError, match="--config: no such file: /no/such"):
        load({"config": "/no/such"}, {})


def test_config_errors_exit_with_78() -> None:
    assert ConfigError.exit_code == 78


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://u:p@h:1/2", "rediss://h", "unix:///run/r.sock?db=1", "redis://[::1]:5"]
)
def test_redis_urls_of_the_three_schemes_are_accepted(url: str) -> None:
    assert load({"redis": url}, {}).redis == url


@pytest.mark.parametrize(
    "url",
    [
        "host:6379",
        "redis://",
        "redis://h:port",
        "redis://h:99999",
        "redis://h:0",
        "redis://h/first",
        "unix:///run/r.sock?db=first",
        "unix://",
        "unix:/x",
        "unix://x/y",
        5,
    ],
)
def test_other_redis_urls_are_refused_with_the_allowed_forms(url: object) -> None:
    with pytest.raises(ConfigError, match=r"redis = .* is not allowed: redis://.*rediss://.*unix:///PATH"):
        load({"redis": url}, {})


def test_a_refused_url_does_not_show_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"redis": "redis://me:hush/hush@h:port?password=hush"}, {})
    assert "hush" not in str(caught.value)
    assert shown_url("redis://me:hush@h/0") == "redis://***@h/0"


def test_the_pipeline_has_its_own_queue(load_text: Load, tmp_path: Path) -> None:
    config = load_text('[pipeline]\nhistory = "h"\nevery = "5m"\n')
    assert config.pipeline == Pipeline(str(tmp_path / "h"), 300.0)
    assert [queue.name for queue in config.queues] == ["forq-pipeline"]
    assert load_text('[pipeline]\nhistory = "hdfs://h/x"\n').pipeline == Pipeline("hdfs://h/x", 60.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pipeline = 1", "a table with history and every"),
        ('[pipeline]\nhistroy = "x"', "there is no setting 'histroy'; did you mean history"),
        ('[pipeline]\nevery = "0s"', "every = '0s' is not allowed: a duration from 1s to 1d"),
        ("[pipeline]\nhistory = 5", "history = 5 is not allowed: a directory or a file-system URL"),
        ('[pipeline]\n[queues.forq-pipeline]\nhandler = "m:f"', "[pipeline] makes that queue"),
    ],
)
def test_an_invalid_pipeline_is_refused_with_the_reason(load_text: Load, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_text(text)


def test_a_pipeline_without_spark_is_refused_and_the_error_names_the_extra(
    load_text: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'forq\[pipeline\]'"):
        load_text("[pipeline]")


def test_bridges_listen_at_paths_relative_to_the_file(load_text: Load, tmp_path: Path) -> None:
    config = load_text('[[bridge]]\nlisten = "b.sock"\n\n[[bridge]]\nlisten = "/run/b.sock"\ntick = "1s"\n')
    assert config.bridges == (BridgeConfig(tmp_path / "b.sock", 3.0), BridgeConfig(Path("/run/b.sock"), 1.0))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bridge = 1", r"tables \[\[bridge\]\]"),
        ("[bridge]\nlisten = 'x'", r"tables \[\[bridge\]\]"),
        ("[[bridge]]\ntick = '1s'", "listen is required"),
        ("[[bridge]]\nlisten = 7", "a path, as text"),
        ("[[bridge]]\nlisten = 'x'\ntik = 1", "no setting 'tik'; did you mean tick"),
        ("[[bridge]]\nlisten = 'x'\ntick = 0", "tick = 0 is not allowed"),
        ("[[bridge]]\nlisten = 'x'\n[[bridge]]\nlisten = './x'", "two bridges cannot listen at the same path"),
        (f"[[bridge]]\nlisten = '/{'x' * 120}'", "socket path"),
    ],
)
def test_an_invalid_bridge_is_refused(load_text: Load, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_text(text)


def test_schedules_are_read_with_their_queue(load_text: Load) -> None:
    table = '[queues.q]\nhandler = "m:f"\n[queues.q.schedules.night]\ncron = "30 2 * * *"\ndata = {n = 1}\n'
    config = load_text(table + '[queues.r]\nmode = "on_request"\n')
    assert config.schedules == {"q": {"night": {"cron": "30 2 * * *", "data": {"n": 1}}}, "r": {}}
    assert [queue.name for queue in config.queues] == ["q", "r"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('night = "30 2 * * *"', r"\[queues.q\]: schedules = .* is not allowed: tables"),
        ('night.cron = "30 2 * *"', r"schedule 'night': cron '30 2 \* \*' is not allowed: 5 fields"),
        ('night.every = "1h"\nnight.zone = "UTC"', "schedule 'night': zone needs cron"),
        ('"a b".every = "1h"', "schedule key 'a b' is not allowed"),
        ('night.every = "1h"\nnight.data = 2026-01-01', "schedule 'night': not JSON"),
    ],
)
def test_invalid_schedules_are_refused_with_their_place(load_text: Load, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_text('[queues.q]\nhandler = "m:f"\n[queues.q.schedules]\n' + text)


@pytest.mark.parametrize("value", ["jaeger", "file:", True, 7])
def test_an_unknown_tracing_value_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r'tracing = .* is not allowed: "off", "otlp" or "file:PATH"'):
        load({"tracing": value}, {})


def test_tracing_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forq.job.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install 'forq\[tracing\]'"):
        load({"tracing": "otlp"}, {})
