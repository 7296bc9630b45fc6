"""The settings of one supervisor, read once at start: from the command line, else the environment, else the config
file, else the default. Every mistake is a ConfigError with its place, the given value, and the allowed ones."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forq import paths
from forq.app_spec import AppSpec, QueueOverride, read_app_flag, read_apps, read_override
from forq.errors import ConfigError, InvalidOption, UsageError
from forq.job import OFF, can_trace
from forq.procs.cgroups import process_count, usable_cpus
from forq.procs.ownership import refuse_changeable, strict_modes
from forq.queue_spec import QueueSpec
from forq.schedules import read_schedules
from forq.settings import (
    BRIDGE,
    PIPELINE,
    SECTIONS,
    SERVICE,
    WORK,
    Value,
    defaults,
    read_section,
    read_service,
)
from forq.supervisor.embedded import check_socket_path
from forq.supervisor.listeners import MetricsConfig, WebConfig, read_metrics, read_web
from forq.values import shown

UNITS_PER_CPU = 100
PIPELINE_QUEUE = "forq-pipeline"
PIPELINE_HANDLER = "forq.pipeline.ingest:ingest"
# So that its job never becomes dead: without it, journals fill up and lose entries.
_PIPELINE_OPTIONS = {"max_retries": 10**6, "max_timeouts": 10**6, "max_stalls": 10**6, "timeout": "1h", "size": 1}
DEFAULT_FILE = Path("/etc/forq/forq.toml")


@dataclass(frozen=True)
class Config:
    """The settings of `forq run`. `redis` None means the embedded server."""

    file: Path | None
    state_dir: Path
    socket: Path
    redis: str | None
    prefix: str
    require_redis: bool
    max_queues: int
    heartbeat_seconds: float
    expiry_seconds: float
    stop_grace_seconds: float
    failed_log_max: int
    capacity: int
    capacity_aging_seconds: float
    control_group: str | None
    cgroup: str
    embedded_server: str | None
    # Default for queues without a mode.
    mode: str
    tracing: str
    log_format: str
    log_level: str
    log_max: int
    log_redact: tuple[str, ...]
    control_read_group: str | None
    remote_control: str
    titles: str
    apps: tuple[AppSpec, ...] = ()
    queues: tuple[QueueSpec, ...] = ()
    # Tables [queues.NAME] for queues of apps.
    overrides: Mapping[str, QueueOverride] = field(default_factory=dict)
    # Whether changed files of apps are loaded at once (`forq run --reload`).
    reload: bool = False
    pipeline: "Pipeline | None" = None
    bridges: "tuple[BridgeConfig, ...]" = ()
    metrics: MetricsConfig | None = None
    web: WebConfig | None = None
    # By queue and key, as given in the config file.
    schedules: Mapping[str, Mapping[str, Mapping[str, object]]] = field(default_factory=dict)

    def options_of(self, queue: QueueSpec) -> dict[str, Value]:
        """All options of a queue: its own, else the default of the config file, else of forq."""
        return {**defaults(queue.mode), "stop_grace": self.stop_grace_seconds, **queue.options}


@dataclass(frozen=True)
class Pipeline:
    """The section [pipeline]: forq's own queue that turns journals into history."""

    history: str
    every_seconds: float

    def spec(self, where: str) -> QueueSpec:
        mapping = {"mode": WORK, "handler": PIPELINE_HANDLER, **_PIPELINE_OPTIONS}
        return QueueSpec.from_mapping(PIPELINE_QUEUE, mapping, where)


@dataclass(frozen=True)
class BridgeConfig:
    """A section [[bridge]]: its socket, and the interval within which its workers must send a message."""

    listen: Path
    tick_seconds: float


def load(argv_overrides: Mapping[str, object], environ: Mapping[str, str]) -> Config:
    """`argv_overrides`: settings by name, and `config` (the file), `apps` and `reload`; None is a flag that was not
    given."""
    try:
        return _load({name: value for name, value in argv_overrides.items() if value is not None}, environ)
    except UsageError as exc:
        raise ConfigError(str(exc)) from exc


def _load(flags: dict[str, object], environ: Mapping[str, str]) -> Config:
    file = _find_file(flags.pop("config", None), environ)
    app_flags, reload = flags.pop("apps", ()), bool(flags.pop("reload", False))
    table = _read_toml(file, strict=strict_modes(environ)) if file else {}
    sections = {name: table.pop(name) for name in SECTIONS if name in table}
    values, sources = read_service(table, str(file or ""), environ, flags)
    state_dir = Path(values.pop("state_dir") or paths.state_dir())
    socket = Path(values.pop("socket") or state_dir / paths.SOCKET_NAME)
    capacity = values.pop("capacity") or UNITS_PER_CPU * usable_cpus()
    named = {f"{name}_seconds" if SERVICE[name].kind == "duration" else name: value for name, value in values.items()}
    config = Config(file=file, state_dir=state_dir, socket=socket, capacity=capacity, reload=reload, **named)
    config = replace(config, apps=_read_apps(sections.get("apps", {}), str(file or ""), app_flags))
    if reload and not config.apps:
        raise ConfigError("--reload: there is no app to watch: add --app package.module:app, or a table [apps.NAME]")
    if file:
        config = _with_sections(config, file, sections)
    _check_together(config, sources)
    return config


def _with_sections(config: Config, file: Path, sections: Mapping[str, Any]) -> Config:
    queues = sections.get("queues", {})
    schedules = _take_schedules(queues, file)
    specs, overrides = _read_queues(queues, file, config)
    config = replace(
        config,
        schedules=schedules,
        queues=specs,
        overrides=overrides,
        bridges=_read_bridges(sections.get("bridge", []), file),
        metrics=read_metrics(sections["metrics"], file) if "metrics" in sections else None,
        web=read_web(sections["web"], file) if "web" in sections else None,
    )
    return _with_pipeline(config, sections["pipeline"], file) if "pipeline" in sections else config


def _find_file(flag: object, environ: Mapping[str, str]) -> Path | None:
    for where, name in (("--config", flag), ("FORQ_CONFIG", environ.get("FORQ_CONFIG"))):
        if name:
            file = Path(os.path.abspath(str(name)))
            if not file.is_file():
                raise ConfigError(f"{where}: no such file: {file}")
            return file
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def _read_toml(file: Path, *, strict: bool) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            if strict:
                refuse_changeable(file, "config file", os.fstat(stream.fileno()))
            return tomllib.load(stream)
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: not valid TOML: {exc}") from exc


def _read_apps(tables: object, file: str, flags: object) -> tuple[AppSpec, ...]:
    """The apps of the config file, and those of --app that the file does not name."""
    apps = {app.app: app for app in read_apps(tables, file)}
    for given in flags if isinstance(flags, list | tuple) else ():
        app = read_app_flag(given, _current_directory())
        apps.setdefault(app.app, app)
    return tuple(apps.values())


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError as exc:
        raise ConfigError(f"--app: the current directory cannot be used: {exc.strerror}; cd to another one") from exc


def _read_queues(tables: object, file: Path, config: Config) -> tuple[tuple[QueueSpec, ...], dict[str, QueueOverride]]:
    """The queues of the config file; and its tables for queues that apps define."""
    if not isinstance(tables, dict):
        raise ConfigError(f"{file}: queues = {shown(tables)} is not allowed: use tables [queues.NAME]")
    specs: list[QueueSpec] = []
    overrides: dict[str, QueueOverride] = {}
    for name, table in tables.items():
        if config.apps and isinstance(table, dict) and _is_override(table, config.mode):
            overrides[name] = read_override(name, table, f"{file}: [queues.{name}]")
        else:
            specs.append(_read_queue(name, table, file, config))
    return tuple(specs), overrides


def _is_override(table: Mapping[str, object], default_mode: str) -> bool:
    has_handler = any(key == "handler" or key.partition(".")[0] == "handlers" for key in table)
    return not has_handler and table.get("mode", default_mode) == WORK


def _take_schedules(tables: object, file: Path) -> dict[str, dict[str, dict[str, object]]]:
    """Removes the schedules from the tables of the queues and returns them."""
    queues = (
        {name: table for name, table in tables.items() if isinstance(table, dict)} if isinstance(tables, dict) else {}
    )
    return {
        name: read_schedules(table.pop("schedules", {}), f"{file}: [queues.{name}]") for name, table in queues.items()
    }


def _read_queue(name: str, table: object, file: Path, config: Config) -> QueueSpec:
    where = f"{file}: [queues.{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {shown(table)} is not allowed: use a table of options")
    path = table.get("path")
    folders = [path] if isinstance(path, str) else path
    if isinstance(folders, list):
        table = {**table, "path": [_absolute(folder, file.parent) for folder in folders]}
    spec = QueueSpec.from_mapping(
        name, {key: value for key, value in table.items() if key != "app"}, where, config.mode
    )
    return _with_app(spec, table["app"], where, config.apps) if "app" in table else spec


def _with_app(spec: QueueSpec, given: object, where: str, apps: tuple[AppSpec, ...]) -> QueueSpec:
    """The queue, with the lifespan and the hooks of an app for its handlers."""
    app = next((app for app in apps if app.name is not None and app.name == given), None)
    if app is None:
        known = ", ".join(app.name for app in apps if app.name is not None) or "none"
        raise ConfigError(f"{where}: app = {shown(given)} is not allowed: no table [apps.NAME] has this name ({known})")
    if spec.mode != WORK:
        raise ConfigError(f"{where}: app is not allowed: a queue of mode {spec.mode} runs no code")
    return replace(spec, app=app.app, path=(*spec.path, *(each for each in app.path if each not in spec.path)))


def _read_bridges(tables: object, file: Path) -> tuple[BridgeConfig, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: bridge = {shown(tables)} is not allowed: use tables [[bridge]]")
    bridges = tuple(_read_bridge(table, f"{file}: [[bridge]]", file) for table in tables)
    if len({bridge.listen for bridge in bridges}) < len(bridges):
        raise ConfigError(f"{file}: [[bridge]]: two bridges cannot listen at the same path")
    return bridges


def _read_bridge(table: Mapping[str, object], where: str, file: Path) -> BridgeConfig:
    given = read_section(BRIDGE, table, where, str(file.parent))
    if given["listen"] is None:
        raise ConfigError(f"{where}: listen is required: the path of a Unix socket")
    check_socket_path(Path(given["listen"]))
    return BridgeConfig(Path(given["listen"]), given["tick"])


def _with_pipeline(config: Config, table: object, file: Path) -> Config:
    where = f"{file}: [pipeline]"
    given = read_section(PIPELINE, table, where, str(file.parent))
    if find_spec("pyspark") is None:
        raise ConfigError(f"{where} needs Spark: pip install 'forq[pipeline]'")
    if any(queue.name == PIPELINE_QUEUE for queue in config.queues):
        raise ConfigError(f"{file}: [queues.{PIPELINE_QUEUE}] is not allowed: [pipeline] makes that queue")
    pipeline = Pipeline(given["history"] or str(config.state_dir / "history"), given["every"])
    return replace(config, queues=(*config.queues, pipeline.spec(where)), pipeline=pipeline)


def _absolute(folder: object, base: Path) -> object:
    return os.path.abspath(base / folder) if isinstance(folder, str) else folder


def _check_together(config: Config, sources: Mapping[str, str]) -> None:
    if config.expiry_seconds < 2 * config.heartbeat_seconds:
        where = sources.get("expiry") or sources.get("heartbeat")
        raise ConfigError(
            f"{where}: expiry = {config.expiry_seconds:g}s is not allowed: at least twice heartbeat "
            f"({config.heartbeat_seconds:g}s), or a single late heartbeat would look like a death"
        )
    if config.tracing != OFF and not can_trace(config.tracing):
        raise ConfigError(
            f"{sources['tracing']}: tracing = {shown(config.tracing)} needs OpenTelemetry: pip install 'forq[tracing]'"
        )
    if len(config.queues) > config.max_queues:
        raise ConfigError(f"{config.file}: {len(config.queues)} queues, but max_queues = {config.max_queues}")
    for queue in config.queues:
        check_size(config.options_of(queue), config.capacity, f"{config.file}: [queues.{queue.name}]")
    check_socket_path(config.socket)


def check_size(options: Mapping[str, Value], capacity: int, where: str) -> None:
    """Raises InvalidOption if a job needs more units than the capacity: it would wait forever."""
    for name in ("size", "fail_size"):
        if int(options.get(name, 0)) > capacity:
            raise InvalidOption(f"{where}: {name} = {options[name]} is not allowed: capacity is {capacity} units")


def capacity_warning(options: Mapping[str, Value], capacity: int) -> str | None:
    """The warning if the capacity is too small for all workers of a queue to run jobs at the same time; else None."""
    processes, concurrency = process_count(options), int(options.get("concurrency", 1))
    workers, size = processes * concurrency, int(options.get("size", 1))
    if workers * size <= capacity:
        return None
    most, fitting = capacity // size, capacity // workers
    given = f"processes = {processes} and concurrency = {concurrency}" if processes > 1 else f"concurrency = {workers}"
    jobs = "1 of its jobs runs" if most == 1 else f"{most} of its jobs run"
    return (
        f"{given} with size = {size} needs {workers * size} units, but capacity is {capacity}: at most "
        f"{jobs} at the same time; for all {workers}, set capacity = {workers * size} in the config file"
        + (f" or size = {fitting}" if fitting else "")
    )
