"""The settings of one supervisor, read once at its start.

A setting is taken from the command line, else the environment, else the config file, else its default.
Every mistake is a ConfigError that says where it is, what was given, and what is allowed.
"""

import grp
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from forq import places
from forq.errors import ConfigError, InvalidOption, UsageError
from forq.log_format import FORMATS, LEVELS
from forq.names import shown
from forq.options import WORK, Option, QueueSpec, Value, check_mode, defaults, nearest
from forq.redaction import Redaction
from forq.redis_address import ALLOWED, read_address, shown_url
from forq.schedules import read_schedules
from forq.supervisor.embedded import check_socket_path
from forq.supervisor.metrics_place import MetricsPlace, read_metrics
from forq.supervisor.ownership import refuse_changeable, strict_modes
from forq.trace_context import FILE, OFF, OTLP, can_trace

UNITS_PER_CPU = 100
PIPELINE_QUEUE = "forq-pipeline"
PIPELINE_HANDLER = "forq.pipeline.task:ingest"
# It is never given up: what it has not read is still in the journals, or shows there as a gap.
_PIPELINE_OPTIONS = {"max_retries": 10**6, "max_timeouts": 10**6, "max_stalls": 10**6, "timeout": "1h", "size": 1}
DEFAULT_FILE = Path("/etc/forq/forq.toml")
ENVIRONMENT = {"state_dir": "FORQ_STATE_DIR", "socket": "FORQ_SOCKET", "redis": "FORQ_REDIS", "prefix": "FORQ_PREFIX"}

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{0,64}")


@dataclass(frozen=True)
class Config:
    """What `forq run` runs with. `redis` None means the embedded server."""

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
    queues: tuple[QueueSpec, ...]
    # Of the queues that do not say theirs.
    mode: str = WORK
    tracing: str = OFF
    pipeline: "Pipeline | None" = None
    bridges: "tuple[BridgePlace, ...]" = ()
    metrics: MetricsPlace | None = None
    log_format: str = "auto"
    log_level: str = "info"
    log_max: int = 8 * 1024**2
    log_redact: tuple[str, ...] = ()
    control_read_group: str | None = None
    titles: str = "full"
    # Of each queue of the file its schedules, by key, as they were given.
    schedules: Mapping[str, Mapping[str, Mapping[str, object]]] = field(default_factory=dict)

    def options_of(self, queue: QueueSpec) -> dict[str, Value]:
        """All options of a queue: its own, else the service's default, else forq's."""
        return {**defaults(queue.mode), "stop_grace": self.stop_grace_seconds, **queue.options}


@dataclass(frozen=True)
class Pipeline:
    """The queue of forq's own that turns journals into history: where to, how often."""

    history: str
    every_seconds: float

    def spec(self, where: str) -> QueueSpec:
        mapping = {"mode": WORK, "handler": PIPELINE_HANDLER, **_PIPELINE_OPTIONS}
        return QueueSpec.from_mapping(PIPELINE_QUEUE, mapping, where)


@dataclass(frozen=True)
class BridgePlace:
    """A bridge that the supervisor runs: where it listens, and how often its workers have to say something."""

    listen: Path
    tick_seconds: float


@dataclass(frozen=True)
class Given:
    """A value as somebody wrote it: where, and what relative paths in it are relative to."""

    key: str
    value: object
    where: str
    base: Path

    def refuse(self, allowed: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.key} = {shown(self.value)} is not allowed: {allowed}")


def load(argv_overrides: Mapping[str, object], environ: Mapping[str, str]) -> Config:
    """argv_overrides holds settings by name, and `config`, the file; None stands for a flag that was not given."""
    flags = {name: value for name, value in argv_overrides.items() if value is not None}
    file = _find_file(flags.pop("config", None), environ)
    table = _read_toml(file, strict=strict_modes(environ)) if file else {}
    queue_tables = table.pop("queues", {})
    pipeline = _read_pipeline(table.pop("pipeline"), file) if file and "pipeline" in table else None
    bridges = _read_bridges(table.pop("bridge", []), file) if file else ()
    metrics = read_metrics(table.pop("metrics"), file) if file and "metrics" in table else None
    given = _in_file(table, file) | _in_environment(environ) | _on_command_line(flags)
    values = {name: read(given[name]) if name in given else None for name, read in _SETTINGS.items()}
    mode = str(values["mode"] or WORK)
    schedules = _take_schedules(queue_tables, file) if file else {}
    config = _assemble(values, file, _read_queues(queue_tables, file, mode) if file else (), given)
    config = replace(config, bridges=bridges, schedules=schedules, metrics=metrics)
    return config if pipeline is None else _with_pipeline(config, pipeline)


def _find_file(flag: object, environ: Mapping[str, str]) -> Path | None:
    for where, name in (("--config", flag), ("FORQ_CONFIG", environ.get("FORQ_CONFIG"))):
        if name:
            file = Path(os.path.abspath(str(name)))
            if not file.is_file():
                raise ConfigError(f"{where}: there is no file {file}")
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


def _in_file(table: Mapping[str, object], file: Path | None) -> dict[str, Given]:
    for name in table:
        if name not in _SETTINGS:
            known = [*_SETTINGS, "queues", "pipeline", "bridge", "metrics"]
            raise ConfigError(f"{file}: there is no setting {shown(name)}{nearest(name, known)}")
    base = file.parent if file else Path.cwd()
    return {name: Given(name, value, str(file), base) for name, value in table.items()}


def _in_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    given = {name: (variable, environ.get(variable)) for name, variable in ENVIRONMENT.items()}
    return {name: Given(name, value, variable, Path.cwd()) for name, (variable, value) in given.items() if value}


def _on_command_line(flags: Mapping[str, object]) -> dict[str, Given]:
    for name in flags:
        if name not in _SETTINGS:
            raise ConfigError(f"command line: there is no setting {shown(name)}{nearest(name, _SETTINGS)}")
    return {name: Given(name, value, f"--{name.replace('_', '-')}", Path.cwd()) for name, value in flags.items()}


def _read_queues(tables: object, file: Path, mode: str) -> tuple[QueueSpec, ...]:
    if not isinstance(tables, dict):
        raise ConfigError(f"{file}: queues = {shown(tables)} is not allowed: tables [queues.NAME]")
    return tuple(_read_queue(name, table, file, mode) for name, table in tables.items())


def _take_schedules(tables: object, file: Path) -> dict[str, dict[str, dict[str, object]]]:
    """Takes the schedules out of the tables of the queues; what else is in them is read afterwards."""
    queues = (
        {name: table for name, table in tables.items() if isinstance(table, dict)} if isinstance(tables, dict) else {}
    )
    try:
        return {
            name: read_schedules(table.pop("schedules", {}), f"{file}: [queues.{name}]")
            for name, table in queues.items()
        }
    except UsageError as exc:
        raise ConfigError(str(exc)) from exc


def _read_queue(name: str, table: object, file: Path, mode: str) -> QueueSpec:
    where = f"{file}: [queues.{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {shown(table)} is not allowed: a table of options")
    path = table.get("path")
    folders = [path] if isinstance(path, str) else path
    if isinstance(folders, list):
        table = {**table, "path": [_absolute(folder, file.parent) for folder in folders]}
    try:
        return QueueSpec.from_mapping(name, table, where, mode)
    except UsageError as exc:
        raise ConfigError(str(exc)) from exc


def _read_pipeline(table: object, file: Path) -> Pipeline:
    where = f"{file}: [pipeline]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {shown(table)} is not allowed: a table with history and every")
    for name in table:
        if name not in ("history", "every"):
            raise ConfigError(f"{where}: there is no setting {shown(name)}{nearest(name, ('history', 'every'))}")
    history = table.get("history", "")
    if not isinstance(history, str) or "\0" in history:
        raise ConfigError(f"{where}: history = {shown(history)} is not allowed: a directory or a file-system URL")
    every = Option("every", "duration", 60.0, 1.0, 86400.0, "")
    # A directory is relative to this file; hdfs://… and the like are taken as they are.
    place = history if not history or "://" in history else os.path.abspath(file.parent / history)
    return Pipeline(place, float(_number_reader(every)(Given("every", table.get("every", 60.0), where, file.parent))))


def _read_bridges(tables: object, file: Path) -> tuple[BridgePlace, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: bridge = {shown(tables)} is not allowed: tables [[bridge]]")
    bridges = tuple(_read_bridge(table, f"{file}: [[bridge]]", file.parent) for table in tables)
    if len({bridge.listen for bridge in bridges}) < len(bridges):
        raise ConfigError(f"{file}: [[bridge]]: two bridges cannot listen at the same path")
    return bridges


def _read_bridge(table: Mapping[str, object], where: str, base: Path) -> BridgePlace:
    for name in table:
        if name not in ("listen", "tick"):
            raise ConfigError(f"{where}: there is no setting {shown(name)}{nearest(name, ('listen', 'tick'))}")
    listen = _read_path(Given("listen", table.get("listen", ""), where, base))
    if listen is None:
        raise ConfigError(f"{where}: listen is needed: the path of a Unix socket")
    check_socket_path(listen)
    tick = Given("tick", table.get("tick", _BRIDGE_TICK.default), where, base)
    return BridgePlace(listen, float(_number_reader(_BRIDGE_TICK)(tick)))


def _with_pipeline(config: Config, pipeline: Pipeline) -> Config:
    if find_spec("pyspark") is None:
        raise ConfigError(f"{config.file}: [pipeline] needs Spark: pip install 'forq[pipeline]'")
    if any(queue.name == PIPELINE_QUEUE for queue in config.queues):
        raise ConfigError(f"{config.file}: [queues.{PIPELINE_QUEUE}] is not allowed: [pipeline] makes that queue")
    history = pipeline.history or str(config.state_dir / "history")
    mine = replace(pipeline, history=history)
    queues = (*config.queues, mine.spec(f"{config.file}: [pipeline]"))
    return replace(config, queues=queues, pipeline=mine)


def _absolute(folder: object, base: Path) -> object:
    return os.path.abspath(base / folder) if isinstance(folder, str) else folder


def _assemble(
    values: Mapping[str, object], file: Path | None, queues: tuple[QueueSpec, ...], given: Mapping[str, Given]
) -> Config:
    state_dir = cast(Path | None, values["state_dir"]) or Path(places.state_dir())
    config = Config(
        file=file,
        state_dir=state_dir,
        socket=cast(Path | None, values["socket"]) or state_dir / "control.sock",
        redis=cast(str | None, values["redis"]),
        prefix="forq:" if values["prefix"] is None else str(values["prefix"]),
        require_redis=bool(_or_default("require_redis", values)),
        max_queues=int(_or_default("max_queues", values)),
        heartbeat_seconds=float(_or_default("heartbeat", values)),
        expiry_seconds=float(_or_default("expiry", values)),
        stop_grace_seconds=float(_or_default("stop_grace", values)),
        failed_log_max=int(_or_default("failed_log_max", values)),
        capacity=int(_or_default("capacity", values)) or UNITS_PER_CPU * len(os.sched_getaffinity(0)),
        capacity_aging_seconds=float(_or_default("capacity_aging", values)),
        control_group=cast(str | None, values["control_group"]),
        cgroup=str(values["cgroup"] or "auto"),
        embedded_server=cast(str | None, values["embedded_server"]),
        tracing=str(values["tracing"] or OFF),
        queues=queues,
        mode=str(values["mode"] or WORK),
        log_format=str(values["log_format"] or "auto"),
        log_level=str(values["log_level"] or "info"),
        log_max=int(_or_default("log_max", values)),
        log_redact=cast("tuple[str, ...]", values["log_redact"] or ()),
        control_read_group=cast(str | None, values["control_read_group"]),
        titles=str(values["titles"] or "full"),
    )
    _check_together(config, given)
    return config


def _or_default(name: str, values: Mapping[str, object]) -> Value:
    value = values[name]
    return _NUMBERS[name].default if value is None else cast(Value, value)


def _check_together(config: Config, given: Mapping[str, Given]) -> None:
    where = given["expiry"].where if "expiry" in given else given["heartbeat"].where if "heartbeat" in given else ""
    if config.expiry_seconds < 2 * config.heartbeat_seconds:
        raise ConfigError(
            f"{where}: expiry = {config.expiry_seconds:g}s is not allowed: at least twice heartbeat "
            f"({config.heartbeat_seconds:g}s), or a single late heartbeat would look like a death"
        )
    if len(config.queues) > config.max_queues:
        raise ConfigError(f"{config.file}: {len(config.queues)} queues, but max_queues = {config.max_queues}")
    for queue in config.queues:
        try:
            check_size(config.options_of(queue), config.capacity, f"{config.file}: [queues.{queue.name}]")
        except InvalidOption as exc:
            raise ConfigError(str(exc)) from exc
    check_socket_path(config.socket)


def check_size(options: Mapping[str, Value], capacity: int, where: str) -> None:
    """A job that needs more than there is would wait for ever."""
    for name in ("size", "fail_size"):
        if int(options.get(name, 0)) > capacity:
            raise InvalidOption(f"{where}: {name} = {options[name]} is not allowed: capacity is {capacity} units")


def capacity_warning(options: Mapping[str, Value], capacity: int) -> str | None:
    """What to say if more workers are asked for than can ever run jobs at the same time; None if all can."""
    workers, size = int(options.get("concurrency", 1)), int(options.get("size", 1))
    if workers * size <= capacity:
        return None
    most, fitting = capacity // size, capacity // workers
    jobs = "1 of its jobs runs" if most == 1 else f"{most} of its jobs run"
    return (
        f"concurrency = {workers} with size = {size} needs {workers * size} units, and capacity is {capacity}: at most "
        f"{jobs} at the same time; for all {workers}, set capacity = {workers * size} in the config file"
        + (f" or size = {fitting}" if fitting else "")
    )


def _read_redis(given: Given) -> str | None:
    if given.value == "":
        return None
    if not isinstance(given.value, str):
        raise given.refuse(ALLOWED)
    try:
        read_address(given.value)
    except UsageError:
        raise replace(given, value=shown_url(given.value)).refuse(ALLOWED) from None
    return given.value


def _read_path(given: Given) -> Path | None:
    if not isinstance(given.value, str | os.PathLike) or "\0" in str(given.value):
        raise given.refuse("a path, as text")
    return Path(os.path.abspath(given.base / given.value)) if str(given.value) else None


def _read_program(given: Given) -> str | None:
    """A bare name stays one: it is looked for on PATH."""
    path = _read_path(given)
    return str(path) if path and "/" in str(given.value) else str(given.value) or None


def _read_prefix(given: Given) -> str:
    # Braces would take the hash tag away from the queue's name.
    if not isinstance(given.value, str) or not _PREFIX.fullmatch(given.value):
        raise given.refuse("up to 64 of A-Z a-z 0-9 _ . : -")
    return given.value


def _read_group(given: Given) -> str | None:
    if not isinstance(given.value, str):
        raise given.refuse("the name of a group, as text")
    if given.value == "":
        return None
    try:
        return grp.getgrnam(given.value).gr_name
    except (KeyError, ValueError) as exc:
        raise given.refuse("a group of this machine") from exc


def _read_patterns(given: Given) -> tuple[str, ...]:
    allowed = "a list of regular expressions, as text"
    if not isinstance(given.value, list) or not all(isinstance(pattern, str) for pattern in given.value):
        raise given.refuse(allowed)
    try:
        Redaction(given.value)
    except re.error as exc:
        raise given.refuse(f"{allowed} ({exc})") from exc
    return tuple(given.value)


def _read_tracing(given: Given) -> str:
    setting = given.value
    if isinstance(setting, str) and setting.startswith(FILE) and len(setting) > len(FILE):
        setting = FILE + os.path.abspath(given.base / setting.removeprefix(FILE))
    elif setting not in (OFF, OTLP):
        raise given.refuse('"off", "otlp" or "file:PATH"')
    if setting != OFF and not can_trace(str(setting)):
        raise ConfigError(f"{given.where}: tracing = {shown(setting)} needs OpenTelemetry: pip install 'forq[tracing]'")
    return str(setting)


def _word_reader(allowed: tuple[str, ...]) -> Callable[[Given], str]:
    def read(given: Given) -> str:
        if given.value not in allowed:
            raise given.refuse(" or ".join(f'"{word}"' for word in allowed))
        return str(given.value)

    return read


def _read_mode(given: Given) -> str:
    try:
        return check_mode(given.value, given.where)
    except UsageError as exc:
        raise ConfigError(str(exc)) from exc


def _number_reader(option: Option) -> Callable[[Given], Value]:
    def read(given: Given) -> Value:
        try:
            return option.parse(given.value, given.where)
        except UsageError as exc:
            raise ConfigError(str(exc)) from exc

    return read


_BRIDGE_TICK = Option("tick", "duration", 3.0, 0.1, 3600.0, "how often a worker of a bridge has to say something")
_NUMBERS = {
    option.name: option
    for option in (
        Option("require_redis", "flag", False, False, True, "give up at start when Redis cannot be reached"),
        Option("max_queues", "int", 1000, 1, 100_000, "queues that may exist"),
        Option("heartbeat", "duration", 5.0, 0.05, 3600.0, "how often the supervisor tells Redis that it lives"),
        Option("expiry", "duration", 15.0, 0.1, 86400.0, "how long it is believed to live without a heartbeat"),
        Option("capacity", "int", 0, 0, 10**9, "units that running jobs may hold (0 = 100 per CPU)"),
        Option("capacity_aging", "duration", 1.0, 0.001, 86400.0, "waiting time that counts as one level of priority"),
        Option("stop_grace", "duration", 10.0, 0.0, 86400.0, "stop_grace of the queues that do not set their own"),
        Option(
            "failed_log_max", "size", 64 * 1024**2, 64 * 1024, 64 * 1024**3, "size at which a failed log is rotated"
        ),
        Option("log_max", "size", 8 * 1024**2, 64 * 1024, 64 * 1024**3, "size of each of a queue's two output files"),
    )
}

_SETTINGS: Mapping[str, Callable[[Given], object]] = {
    "state_dir": _read_path,
    "socket": _read_path,
    "redis": _read_redis,
    "prefix": _read_prefix,
    "control_group": _read_group,
    "control_read_group": _read_group,
    "cgroup": _word_reader(("auto", "off")),
    "embedded_server": _read_program,
    "mode": _read_mode,
    "tracing": _read_tracing,
    "log_format": _word_reader(FORMATS),
    "log_level": _word_reader(LEVELS),
    "log_redact": _read_patterns,
    "titles": _word_reader(("full", "plain")),
    **{name: _number_reader(option) for name, option in _NUMBERS.items()},
}
