"""The table of all settings: name, type, default, range, help, and how Redis stores them.

1. SERVICE, PIPELINE, METRICS, WEB and BRIDGE are the settings of a supervisor, OPTIONS those of a queue. APP, TASK,
   DEFINITION and SCHEDULE describe what app_spec.py, queue_spec.py and schedules.py read.
2. Setting.parse reads and checks a value from TOML, JSON, a variable or a command line.
3. The functions at the end check the options of a queue and convert them to the fields in Redis.

`make settings` writes etc/forq.toml and docs/reference/settings.md from the table.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from forq.errors import InvalidOption, UsageError
from forq.paths import DEFAULT_PREFIX
from forq.values import (
    CPUS,
    OFF,
    NotAllowed,
    allowed_values,
    parse_rate,
    read_value,
    show_duration,
    show_rate,
    show_size,
    shown,
)

Value = int | float | bool | str

WORK, AUTO_RELEASE, ON_REQUEST, EXTERNAL = "work", "auto_release", "on_request", "external"
RELEASE_MODES = (AUTO_RELEASE, ON_REQUEST)
# Their jobs run no code in forq's processes: every supervisor serves them.
SHARED_MODES = (*RELEASE_MODES, EXTERNAL)
MODES = (WORK, *SHARED_MODES)

_KB, _MB, _GB = 1024, 1024**2, 1024**3
_DAY = 86400.0
_YEAR, _TEN_YEARS = 365 * _DAY, 3650 * _DAY


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `range`: the lowest and highest number, or the allowed words.

    `live`: a change takes effect in running processes. `fixed_in`: modes in which it cannot change while the queue
    exists. `stored`: kept in Redis. `sample`: shown in forq.toml instead of the default. `flag`: the metavar of its
    flag in `forq run`; None if it has no flag.
    """

    name: str
    kind: str
    default: Any
    range: tuple[Any, ...]
    help: str
    _: KW_ONLY
    # The lowest value besides 0, which means off.
    least: float = 0
    live: bool = True
    stored: bool = True
    modes: tuple[str, ...] = MODES
    fixed_in: tuple[str, ...] = ()
    defaults_in: Mapping[str, Value] = field(default_factory=dict)
    variable: str = ""
    flag: str | None = None
    sample: str = ""

    def parse(self, value: object, where: str, base: str = "") -> Any:
        """Reads and checks a value. Errors name `where`; relative paths are relative to `base`."""
        try:
            parsed = read_value(self.kind, value, base)
            if self._is_in_range(parsed):
                return parsed
            allowed = self.allowed
        except UsageError as exc:
            allowed = str(exc) if isinstance(exc, NotAllowed) else self.allowed
        if self.kind == "redis" and isinstance(value, str):
            from forq.redis_url import shown_url

            value = shown_url(value)
        raise InvalidOption(f"{where}: {self.name} = {shown(value)} is not allowed: {allowed}")

    def _is_in_range(self, value: Any) -> bool:
        if self.kind in ("int", "duration", "size"):
            return bool(self.lowest <= value <= self.highest and (not self.least or value == 0 or value >= self.least))
        if self.kind == "processes":
            return value == CPUS or bool(self.lowest <= value <= self.highest)
        return self.kind != "word" or value in self.range

    def show(self, value: Any) -> str | None:
        """A parsed value as users write it. None: not set."""
        if value is None:
            return None
        if self.kind == "duration":
            return show_duration(value)
        if self.kind == "size":
            return show_size(value)
        if self.kind == "redis":
            from forq.redis_url import shown_url

            return shown_url(value)
        if isinstance(value, bool):
            return str(value).lower()
        return ", ".join(value) if isinstance(value, tuple) else str(value)

    @property
    def lowest(self) -> Any:
        return self.range[0]

    @property
    def highest(self) -> Any:
        return self.range[-1]

    @property
    def allowed(self) -> str:
        text = self._allowed(self.least or (self.lowest if self.range else 0))
        return f"{text}, or 0" if self.least else text

    def _allowed(self, lowest: float) -> str:
        if self.kind == "int":
            return f"a whole number from {lowest} to {self.highest}"
        if self.kind == "processes":
            return f'a whole number from {lowest} to {self.highest}, or "{CPUS}"'
        if self.kind == "duration":
            return f'a duration from {show_duration(lowest)} to {show_duration(self.highest)} (such as "250ms", "5m")'
        if self.kind == "size":
            return f'a size from {show_size(int(lowest))} to {show_size(self.highest)} (such as "64kb", "1mb")'
        if self.kind == "word":
            quoted = [f'"{word}"' for word in self.range]
            return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        return allowed_values(self.kind)

    @property
    def flag_help(self) -> str:
        """The first sentence of the help."""
        sentence = self.help.partition(". ")[0].removesuffix(".")
        return f"{sentence[0].lower()}{sentence[1:]}{f' ({self.variable})' if self.variable else ''}"

    def fields(self, value: Value) -> dict[str, int]:
        """The fields in Redis: integers, durations in milliseconds, words as their place in the range."""
        if self.kind == "duration":
            return {f"{self.name}_ms": round(float(value) * 1000)}
        if self.kind == "rate":
            count, seconds = parse_rate(value)
            return {f"{self.name}_count": count, f"{self.name}_ms": round(seconds * 1000)}
        if self.kind == "word":
            return {self.name: self.range.index(value)}
        return {self.name: int(value)}

    def read_fields(self, fields: Mapping[str, str]) -> Any:
        """The value from its fields in Redis; None if they are missing or not numbers."""
        try:
            if self.kind == "duration":
                return int(fields[f"{self.name}_ms"]) / 1000
            if self.kind == "rate":
                return show_rate(int(fields[f"{self.name}_count"]), int(fields[f"{self.name}_ms"]) / 1000)
            number = int(fields[self.name])
            if self.kind == "word":
                return self.range[number]
        except (KeyError, ValueError, IndexError):
            return None
        return bool(number) if self.kind == "flag" else number


# Tables of the config file besides the settings of SERVICE.
SECTIONS = ("apps", "queues", "pipeline", "bridge", "metrics", "web")


def _rows(*rows: Setting, **same: Any) -> dict[str, Setting]:
    return {row.name: replace(row, **same) for row in rows}


# fmt: off
SERVICE: Mapping[str, Setting] = _rows(
    Setting("state_dir", "path", None, (),
            "Directory for the lock, the sockets, the definitions of queues, the logs and the data of the embedded "
            'server. "": $STATE_DIRECTORY (set by systemd), else /var/lib/forq for root, else '
            "$XDG_STATE_HOME/forq.", variable="FORQ_STATE_DIR", flag="DIR"),
    Setting("socket", "path", None, (),
            'Path of the control socket, used by forqctl. "": control.sock in the state directory.',
            variable="FORQ_SOCKET", flag="PATH"),
    Setting("redis", "redis", None, (),
            "Address of Redis: redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://..., unix:///PATH, "
            'redis+cluster://HOST,HOST or redis+sentinel://HOST,HOST/MASTER. "": start an embedded server in the state '
            "directory. See docs/guide/redis.md.", variable="FORQ_REDIS", flag="URL"),
    Setting("embedded_server", "program", None, (),
            'Program of the embedded server, Redis or Valkey 7.0 or newer: a path, or a name on PATH. "": '
            "valkey-server or redis-server on PATH, else the one installed with forq."),
    Setting("prefix", "prefix", DEFAULT_PREFIX, (),
            "Prefix of every key in Redis. Handlers inherit it; other programs need FORQ_PREFIX, or "
            "Client(prefix=...).", variable="FORQ_PREFIX"),
    Setting("require_redis", "flag", False, (False, True),
            "Exit with code 75 if Redis is unreachable at start, instead of waiting for it.", flag=""),
    Setting("max_queues", "int", 1000, (1, 100_000), "Maximum number of queues in Redis."),
    Setting("heartbeat", "duration", 5.0, (0.05, 3600.0), "Interval of the supervisor's heartbeats to Redis."),
    Setting("expiry", "duration", 15.0, (0.1, _DAY),
            "A supervisor without a heartbeat for this long is considered dead. At least twice `heartbeat`."),
    Setting("capacity", "int", 0, (0, 10**9),
            "Capacity units of this supervisor; each running job uses its queue's `size`. 0: 100 per CPU."),
    Setting("capacity_aging", "duration", 1.0, (0.001, _DAY),
            "When capacity is short, the queue with the higher `priority` goes first. Each time a queue waits this "
            "long, its priority rises by one."),
    Setting("mode", "word", WORK, MODES, "Mode of queues that do not set their own."),
    Setting("stop_grace", "duration", 10.0, (0.0, _DAY), "`stop_grace` of queues that do not set their own."),
    Setting("failed_log_max", "size", 64 * _MB, (64 * _KB, 64 * _GB),
            "Size at which a queue's failed log (logs/NAME/failed.jsonl in the state directory) is rotated; 10 files "
            "are kept."),
    Setting("tracing", "tracing", OFF, (),
            'An OpenTelemetry span per attempt: "otlp" or "file:PATH" (docs/guide/tracing.md).'),
    Setting("log_max", "size", 8 * _MB, (64 * _KB, 64 * _GB),
            "Maximum size of each of the two files with a queue's output (logs/NAME/output.jsonl and output.1.jsonl in "
            "the state directory, docs/guide/logs.md). The output also goes to stderr."),
    Setting("log_format", "word", "auto", ("auto", "json", "text"),
            'Format of the log on stderr. "auto": JSON if stderr is the systemd journal, else text.'),
    Setting("log_level", "word", "info", ("debug", "info", "warning", "error"),
            "Lowest level logged, for forq's own messages and for those of handlers."),
    Setting("log_redact", "patterns", (), (),
            "Regular expressions. Matches (only the groups, if the expression has any) are replaced by [redacted] in "
            "the log and in the output of queues."),
    Setting("control_group", "group", None, (),
            'Group whose members may use the control socket. "": only root and the user of the supervisor.'),
    Setting("control_read_group", "group", None, (),
            "Group with read-only access: status, jobs, job, why, ping, version and supervisors, without the data of "
            "jobs (docs/guide/security.md)."),
    Setting("remote_control", "word", "off", ("off", "read", "full"),
            'Requests from other hosts, through Redis (docs/guide/security.md). "read": status, why, ping, version. '
            '"full": also kill, stack, logs and restart, by everyone with the Redis password of a supervisor.'),
    Setting("titles", "word", "full", ("full", "plain"),
            'Process titles, which every user of the machine can read (ps). "plain": without job ids and progress.'),
    Setting("cgroup", "word", "auto", ("auto", "off"),
            '"auto": where permitted, use control groups (cgroup v2) to kill the processes of a queue and to enforce '
            "its limits."),
    live=False,
    stored=False,
)

PIPELINE: Mapping[str, Setting] = _rows(
    Setting("history", "history", None, (),
            'Location of the history: a directory, or a file system URL that Spark supports. "": history in the '
            "state directory."),
    Setting("every", "duration", 60.0, (1.0, _DAY), "Interval between runs."),
    live=False,
    stored=False,
)

METRICS: Mapping[str, Setting] = _rows(
    Setting("listen", "listen", "127.0.0.1:9464", (),
            "HOST:PORT, or the path of a Unix socket. There is no authentication: listen on a private address."),
    Setting("health_seconds", "duration", 60.0, (0.1, _DAY),
            "/healthz reports a queue as stuck if jobs are waiting and none has started or ended for this long."),
    live=False,
    stored=False,
)

WEB: Mapping[str, Setting] = _rows(
    Setting("listen", "listen", "127.0.0.1:9465", (),
            "HOST:PORT, or the path of a Unix socket. On a loopback address or a Unix socket the rules of the control "
            "socket apply to the local user; any other address needs `users` or `proxies`."),
    Setting("read_only", "flag", False, (False, True), "Show everything, change nothing."),
    Setting("users", "path", None, (),
            'File of users and password hashes, written by `forq web-user FILE NAME`. "": no passwords.',
            sample='"web-users"'),
    Setting("proxies", "names", (), (),
            'Addresses or networks of the proxies that authenticate users, or "unix" for a proxy that connects to the '
            "Unix socket.", sample='["10.0.0.5"]'),
    Setting("proxy_header", "header", "X-Forwarded-User", (), "The header in which such a proxy names the user."),
    Setting("proxy_actors", "names", (), (),
            "Users of the proxy that may act; the others may only read. []: all may act."),
    Setting("hosts", "names", (), (),
            "Names under which browsers reach the dashboard, besides localhost and the address of `listen`.",
            sample='["forq.example.com"]'),
    live=False,
    stored=False,
)

BRIDGE: Mapping[str, Setting] = _rows(
    Setting("listen", "path", None, (), "Path of the Unix socket.", sample='"bridge.sock"'),
    Setting("tick", "duration", 3.0, (0.1, 3600.0),
            "Interval at which a worker must send a message. After 3 silent ticks it is considered gone."),
    live=False,
    stored=False,
)

# Read by app_spec.py.
APP: Mapping[str, Setting] = _rows(
    Setting("app", "text", None, (),
            '"package.module:attribute", a forq.App of the name in the header of this table. "package.module" alone '
            "means its attribute `app`. Also `forq run --app`, with the current directory as `path`.",
            sample='"hello:app"'),
    Setting("path", "path or list", None, (),
            "Directory, or list of directories, prepended to the sys.path of the app.", sample='["examples"]'),
    live=False,
    stored=False,
)

# Read by app_spec.py.
TASK: Mapping[str, Setting] = _rows(
    Setting("timeout", "duration", None, (0.0, _YEAR), "Time limit of an attempt. 0: no limit.", sample='"30s"'),
    Setting("max_retries", "int", None, (0, 10**6), "Retries before the job is dead.", sample="5"),
    Setting("backoff", "duration or list", None, (), "Delays before the first, second ... retry; the last one repeats.",
            sample='["1s", "10s", "1m"]'),
    Setting("keep_done", "duration", None, (0.0, _YEAR), "How long results are kept. 0: not at all.",
            sample='"1h"'),
    live=False,
    stored=False,
)

# Read by queue_spec.py.
DEFINITION: Mapping[str, Setting] = _rows(
    Setting("mode", "word", WORK, MODES,
            '"work" runs the jobs; "auto_release" and "on_request" release them to callers (docs/guide/releases.md); '
            '"external" passes them to workers in other languages (docs/guide/external-workers.md). Cannot change '
            "while the queue exists.", fixed_in=MODES),
    Setting("handler", "handler", None, (),
            '"package.module:function", or "package.module" with a function `handle`, called as handle(data, job). Or '
            'a program: "exec:/path/program ARGS..." keeps running, "exec-once:/path/program ARGS..." starts for each '
            "job.", sample='"hello:handle"', modes=(WORK,)),
    Setting("fail_handler", "handler", None, (),
            "Handler for jobs that failed for good, in the same form.", sample='"hello:handle"', modes=(WORK,)),
    Setting("path", "path or list", None, (),
            "Directory, or list of directories, prepended to the sys.path of the handlers.",
            sample='["examples"]', modes=(WORK,)),
    Setting("handlers", "table", None, (),
            "Handlers by job type, in addition to `handler` or instead of it.",
            sample='{ greeting = "hello:greet" }', modes=(WORK,)),
    Setting("app", "text", None, (),
            "NAME of a table [apps.NAME] whose lifespan and hooks the handlers of this queue use. Not needed for "
            "queues that the app itself defines.", sample='"example"', modes=(WORK,)),
    live=False,
    stored=False,
)

OPTIONS: Mapping[str, Setting] = {
    **_rows(
        Setting("max_items", "int", 0, (0, 10**12),
                "Maximum number of jobs in the queue; more are refused. 0: no limit."),
        Setting("max_data", "size", _MB, (1, 64 * _MB),
                "Maximum size of a job's data as JSON, with identifier and type."),
        Setting("stop_grace", "duration", 10.0, (0.0, _DAY),
                "Time for a running job to finish when its process must stop.", stored=False),
    ),
    **_rows(
        Setting("processes", "processes", 1, (1, 256),
                'Main processes of the queue on this supervisor, each with `concurrency` workers. "cpus": one per CPU '
                "that the supervisor may use (affinity and cgroup quota).", modes=(WORK,), stored=False),
    ),
    **_rows(
        Setting("concurrency", "int", 1, (1, 256), "Number of workers (threads) in each main process of the queue."),
        Setting("max_jobs", "int", 0, (0, 10**9), "Replace the process after this many jobs. 0: never."),
        Setting("max_age", "duration", 0.0, (0.0, _YEAR), "Replace the process at this age, between jobs. 0: never."),
        Setting("max_memory", "size", 0, (0, 1024 * _GB),
                "Replace the process when it uses this much memory (PSS), between jobs. 0: never."),
        Setting("memory_limit", "size", 0, (0, 1024 * _GB),
                "Kill the process and its descendants when they use this much memory while a job runs; the attempt "
                "fails with cause oom. 0: no limit.", least=16 * _MB),
        Setting("pids_limit", "int", 0, (0, 4_194_304),
                "Kill the process and its descendants when they have this many processes and threads; the attempt "
                "fails with cause pids. 0: no limit.", least=8),
        Setting("address_limit", "size", 0, (0, 1024 * _GB),
                "Address space of each process; beyond it allocations fail. 0: no limit.", least=256 * _MB),
        Setting("open_files_limit", "int", 0, (0, 1_048_576),
                "Open files of each process; beyond it opening fails. 0: same as the supervisor.",
                least=64),
        Setting("nice", "int", 0, (0, 19), "Niceness of the process; higher values get less CPU."),
        modes=(WORK,),
        live=False,
        stored=False,
    ),
    **_rows(
        Setting("size", "int", 10, (1, 10**6), "Capacity units per running job, at most `capacity`."),
        Setting("priority", "int", 0, (-100, 100),
                "When capacity is short, the queue with the higher priority goes first."),
        Setting("timeout", "duration", 60.0, (0.0, _YEAR),
                "Time limit of one attempt; a process that exceeds it is killed. 0: no limit."),
        Setting("max_timeouts", "int", 3, (0, 10**6), "Timeouts allowed before the job is dead."),
        modes=(WORK,),
    ),
    **_rows(
        Setting("max_stalls", "int", 3, (0, 10**6), "Process crashes allowed before the job is dead."),
        Setting("max_retries", "int", 10, (0, 10**6), "Retries allowed before the job is dead."),
        Setting("min_backoff", "duration", 2.0, (0.0, _TEN_YEARS),
                "Delay before the first retry. It doubles each time."),
        Setting("max_backoff", "duration", 300.0, (0.0, _TEN_YEARS), "Maximum delay before a retry."),
        Setting("jitter", "int", 0, (0, 100), "Random variation of the delay before a retry, in percent."),
        modes=(WORK, EXTERNAL),
    ),
    **_rows(
        Setting("retry_lane_retries", "int", 0, (0, 10**6),
                "Further retries in the retry lane, while no other job is waiting in the queue.",
                modes=(WORK, AUTO_RELEASE, EXTERNAL), fixed_in=(AUTO_RELEASE,), defaults_in={AUTO_RELEASE: 3}),
    ),
    **_rows(
        Setting("fail_max_retries", "int", 100, (0, 10**6), "Retries allowed for a fail handler."),
        Setting("fail_min_backoff", "duration", 10.0, (0.0, _TEN_YEARS),
                "Delay before the first retry of a fail handler. It doubles each time."),
        Setting("fail_max_backoff", "duration", 900.0, (0.0, _TEN_YEARS),
                "Maximum delay before a retry of a fail handler."),
        Setting("fail_timeout", "duration", 60.0, (0.0, _YEAR),
                "Time limit of one run of the fail handler. 0: no limit."),
        Setting("fail_size", "int", 2, (1, 10**6), "Capacity units per running fail handler, at most `capacity`."),
        modes=(WORK,),
        # Stored as the options of the fail queue, without the prefix fail_.
        stored=False,
    ),
    **_rows(
        Setting("rate", "rate", OFF, (),
                'Jobs that may start per interval, over all machines: "50/1s", "100/1m" (docs/guide/limits.md).'),
        Setting("burst", "int", 0, (0, 10**6),
                "Jobs that may start at once within the rate. 0: what the rate allows in 100 ms, at least 1."),
        Setting("max_active", "int", 0, (0, 10**6),
                "Jobs that may run at once, over all machines. 0: no limit."),
        Setting("keep_done", "duration", 0.0, (0.0, _YEAR),
                "How long a done job and its result are kept (docs/guide/results.md). 0: not kept."),
        Setting("done_max", "int", 10_000, (0, 10**7), "Maximum number of done jobs kept."),
        modes=(WORK, EXTERNAL),
    ),
    **_rows(
        Setting("dead_max", "int", 10_000, (0, 10**9), "Maximum number of dead jobs kept."),
        Setting("dead_ttl", "duration", 7 * _DAY, (1.0, _TEN_YEARS), "How long a dead job is kept."),
        # Each job from a bridge has its own token.
        Setting("dedup_ttl", "duration", _DAY, (1.0, _YEAR),
                "How long the token of an enqueue is remembered.", defaults_in={EXTERNAL: 3600.0}),
        Setting("flows", "word", "auto", ("off", "auto", "on"),
                'Jobs that wait for others (docs/guide/flows.md). "auto": possible, and costs nothing before the first '
                'such job; "on": also remembers how jobs ended before it.'),
        Setting("journal", "flag", True, (False, True), "Write the events of the queue to its journal."),
        Setting("journal_max", "size", 16 * _MB, (64 * _KB, 64 * _GB),
                "Maximum size of the journal; older entries are trimmed."),
    ),
    **_rows(
        Setting("release_interval", "duration", 0.1, (0.001, _DAY),
                "Interval between attempts to release an item, over all hosts."),
        Setting("release_retries", "int", 10, (0, 10**6),
                "Retries of an item without an awaiter, before it moves to the retry lane."),
        Setting("retry_interval", "duration", 0.2, (0.0, _DAY),
                "Delay before an item without an awaiter is tried again, behind the others."),
        modes=(AUTO_RELEASE,),
        fixed_in=(AUTO_RELEASE,),
    ),
    **_rows(
        Setting("lease", "duration", 10.0, (0.1, _DAY),
                "Time to acknowledge an item. An item that is not acknowledged goes back in line.",
                modes=SHARED_MODES, defaults_in={EXTERNAL: 9.0}),
        Setting("item_timeout", "duration", 0.0, (0.0, _TEN_YEARS),
                "Age at which an item becomes dead and goes to the failed log. 0: never.", modes=RELEASE_MODES),
        fixed_in=RELEASE_MODES,
    ),
}

# Read by schedules.py.
SCHEDULE: Mapping[str, Setting] = _rows(
    Setting("every", "duration", None, (0.1, _TEN_YEARS), "Interval between ticks, instead of `cron`."),
    Setting("cron", "text", None, (), "Times of the ticks: minute hour day month weekday.", sample='"30 2 * * *"'),
    Setting("zone", "text", "UTC", (), "Time zone of `cron`.", sample='"Europe/Berlin"'),
    Setting("data", "JSON", None, (), "Data of the jobs: any JSON value.", sample="{}"),
    Setting("priority", "int", 5, (0, 9), "Priority of the jobs; 0 goes first."),
    Setting("type", "text", None, (), "Type of the jobs.", sample='"greeting"'),
    Setting("overlap", "word", "skip", ("skip", "queue"),
            'While the job of an earlier tick is unfinished: "skip" the tick, or "queue" its job anyway.'),
    Setting("catch_up", "word", "once", ("once", "all", "none"),
            'For ticks missed because no supervisor ran: one job ("once"), one per tick ("all"), or none ("none").'),
    Setting("jitter", "duration", 0.0, (0.0, _DAY), "Each job starts up to this much after its tick, at random."),
)
# fmt: on


def read_service(
    in_file: Mapping[str, object], file: str, environ: Mapping[str, str], flags: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of each setting, from its flag, else its variable, else the file, else its default; and the source of
    each value that was given."""
    _check_names(in_file, (*SERVICE, *SECTIONS), file)
    _check_names(flags, SERVICE, "command line")
    given = {name: (value, file, os.path.dirname(file)) for name, value in in_file.items()}
    variables = {name: row.variable for name, row in SERVICE.items() if environ.get(row.variable)}
    given |= {name: (environ[variable], variable, "") for name, variable in variables.items()}
    given |= {name: (value, f"--{name.replace('_', '-')}", "") for name, value in flags.items()}
    values = {name: row.parse(*given[name]) if name in given else row.default for name, row in SERVICE.items()}
    return values, {name: where for name, (_, where, _) in given.items()}


def read_section(rows: Mapping[str, Setting], given: object, where: str, base: str) -> dict[str, Any]:
    """The settings of a table of the config file, with defaults."""
    if not isinstance(given, Mapping):
        raise InvalidOption(f"{where}: {shown(given)} is not allowed: it must be a table with {' and '.join(rows)}")
    _check_names(given, rows, where)
    return {name: row.parse(given[name], where, base) if name in given else row.default for name, row in rows.items()}


def _check_names(given: Iterable[str], known: Collection[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidOption(f"{where}: there is no setting {shown(name)}{suggestion(name, known)}")


def option_names() -> dict[str, str]:
    """The help of every option by name, for shell completion."""
    return {name: option.help for name, option in OPTIONS.items()}


def defaults(mode: str = WORK) -> dict[str, Value]:
    """The defaults of all options of this mode."""
    own = (option for option in OPTIONS.values() if mode in option.modes)
    return {option.name: option.defaults_in.get(mode, option.default) for option in own}


def fixed_options(mode: str) -> frozenset[str]:
    """The options that cannot change while a queue of this mode exists."""
    return frozenset(option.name for option in OPTIONS.values() if mode in option.fixed_in)


def parse_options(given: Mapping[str, object], where: str, mode: str | None = None) -> dict[str, Value]:
    """Checks and converts the given options. Without a mode, options of all modes are allowed."""
    for name in given:
        if name not in OPTIONS:
            known = OPTIONS if mode is None else defaults(mode)
            raise InvalidOption(f"{where}: there is no option {shown(name)}{suggestion(name, known)}")
    if mode is not None:
        check_options_of_mode(given, mode, where)
    return {name: OPTIONS[name].parse(value, where) for name, value in given.items()}


def check_options_of_mode(names: Iterable[str], mode: str, where: str) -> None:
    for name in names:
        modes = OPTIONS[name].modes
        if mode not in modes:
            raise InvalidOption(f"{where}: {name} is an option of mode {' or '.join(modes)}, not of mode {mode}")


def check_changes(names: Iterable[str], mode: str, queue: str) -> None:
    """Refuses options that are fixed, or that need a new process."""
    check_options_of_mode(names, mode, queue)
    for name in names:
        if mode in OPTIONS[name].fixed_in:
            raise InvalidOption(f"{name} of {queue} cannot be changed: it is fixed while the queue exists")
        if not OPTIONS[name].live:
            raise InvalidOption(f"{name} of {queue} takes effect only in a new process: use `forqctl create` again")


def check_mode(mode: object, where: str) -> str:
    return str(DEFINITION["mode"].parse(mode, where))


def suggestion(name: str, valid: Iterable[str]) -> str:
    """For an error about an unknown name: the closest valid name, else all of them."""
    import difflib

    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; valid names: {', '.join(names)}"


def stored(options: Mapping[str, Value]) -> dict[str, int]:
    """The options that Redis stores, as its fields."""
    kept: dict[str, int] = {}
    for name, option in OPTIONS.items():
        if option.stored and name in options:
            kept |= option.fields(options[name])
    return kept


def stored_for_fail_queue(options: Mapping[str, Value]) -> dict[str, int]:
    """The options of the fail queue: fail_max_retries becomes max_retries, and so on. It has no size limits: a job
    that failed for good must be stored."""
    return changed_for_fail_queue(options) | {"max_items": 0, "max_data": 2**40, "retry_lane_retries": 0}


def changed_for_fail_queue(options: Mapping[str, Value]) -> dict[str, int]:
    """The options among these that apply to the fail queue, under its names.

    A fail handler that times out or crashes is retried as often as one that raises.
    """
    own = {name.removeprefix("fail_"): value for name, value in options.items() if name.startswith("fail_")}
    if "max_retries" in own:
        own["max_stalls"] = own["max_timeouts"] = own["max_retries"]
    if "priority" in options:
        own["priority"] = options["priority"]
    return stored(own)


def stored_defaults(mode: str = WORK) -> dict[str, int]:
    return stored(defaults(mode))


def stored_fixed(mode: str) -> frozenset[str]:
    """The fields in Redis that cannot change while a queue of this mode exists."""
    return frozenset(stored({name: defaults(mode)[name] for name in fixed_options(mode)}))


def shown_option(name: str, value: str) -> str:
    """A field of Redis as the option that users write."""
    if name.endswith("_ms"):
        return f"{name.removesuffix('_ms')} = {show_duration(int(value) / 1000)}"
    return f"{name} = {value}"
