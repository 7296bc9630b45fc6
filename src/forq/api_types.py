"""The types of arguments and results of the Python API: words as Literals, dicts as TypedDicts."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, Required, TypedDict

# As given by a user: "30s", 30, 0.5, timedelta(minutes=5).
Duration = str | float | timedelta
Mode = Literal["work", "auto_release", "on_request", "external"]
IfExists = Literal["update", "skip", "refuse"]
UpdateRunAt = bool | Literal["if_later", "if_earlier"]
Durable = Literal["replica"]
Overlap = Literal["skip", "queue"]
Flows = Literal["off", "auto", "on"]
# When a job may run that waits for others: once all are done; once all have ended, however; once one is dead.
When = Literal["done", "ended", "dead"]
CatchUp = Literal["once", "all", "none"]
# States of `Queue.jobs`; `Queue.job` shows a blocked job as the job that it waits for.
State = Literal["waiting", "scheduled", "active", "blocked", "held", "retry", "done", "dead"]
JobState = Literal["waiting", "scheduled", "active", "held", "retry", "done", "dead"]
# Of a job that a held one waits for; "gone": nothing is known about it. Its end may not have been followed yet.
DependencyState = Literal[
    "waiting",
    "scheduled",
    "active",
    "blocked",
    "held",
    "retry",
    "done",
    "released",
    "dead",
    "expired",
    "cancelled",
    "dropped",
    "gone",
]
RemoteControl = Literal["off", "read", "full"]
# "undelivered": in the outbox of a Django project.
RefState = Literal["waiting", "scheduled", "active", "held", "retry", "done", "dead", "gone", "undelivered"]


class SupportsRef(Protocol):
    """A job of a queue, such as a `forq.app.JobRef`."""

    @property
    def id(self) -> str: ...

    @property
    def queue(self) -> str: ...


# The jobs that a new job waits for.
After = str | SupportsRef | Sequence[str | SupportsRef]


class WorkQueueOptions(TypedDict, total=False):
    """Options of a queue of mode work; docs/reference/settings.md explains them."""

    max_items: int
    max_data: int | str
    stop_grace: Duration
    processes: int | Literal["cpus"]
    concurrency: int
    max_jobs: int
    max_age: Duration
    max_memory: int | str
    memory_limit: int | str
    pids_limit: int
    address_limit: int | str
    open_files_limit: int
    nice: int
    size: int
    priority: int
    timeout: Duration
    max_timeouts: int
    max_stalls: int
    max_retries: int
    min_backoff: Duration
    max_backoff: Duration
    jitter: int
    retry_lane_retries: int
    fail_max_retries: int
    fail_min_backoff: Duration
    fail_max_backoff: Duration
    fail_timeout: Duration
    fail_size: int
    rate: str
    burst: int
    max_active: int
    keep_done: Duration
    done_max: int
    dead_max: int
    dead_ttl: Duration
    dedup_ttl: Duration
    flows: Flows
    journal: bool
    journal_max: int | str


class QueueOptions(WorkQueueOptions, total=False):
    """Options of a queue of any mode, for `create_queue`."""

    release_interval: Duration
    release_retries: int
    retry_interval: Duration
    lease: Duration
    item_timeout: Duration


class OwnOptions(TypedDict, total=False):
    """Options of one job, which override those of its queue; docs/guide/producing.md explains them."""

    timeout: Duration | None
    max_retries: int | None
    backoff: Duration | Sequence[Duration] | None
    expires_in: Duration | None
    keep_done: Duration | None


class OwnOptionsInfo(TypedDict, total=False):
    """The options that a job has of its own, as text."""

    timeout: str
    max_retries: int
    backoff: list[str]
    keep_done: str
    # Of held jobs; of others, `expires_at` is the time.
    expires_in: str


class ProgressInfo(TypedDict):
    fraction: float
    text: str
    at: float


class DependencyInfo(TypedDict, total=False):
    """A job or batch that a held job waits for. `state`: None for batches, and in another `queue`. `run_at`: of a
    scheduled job."""

    kind: Required[Literal["job", "batch"]]
    id: Required[str]
    state: Required[DependencyState | None]
    run_at: float
    queue: str


class MemberInfo(TypedDict):
    """The batch of a member: its home and id, and the member's number there."""

    queue: str
    id: str
    number: int


class JobInfo(TypedDict, total=False):
    """One job. Its other fields depend on its state (docs/reference/protocol.md#job). Times are epoch seconds.

    A job whose record is broken has `id`, `state` and the error only.
    """

    id: Required[str]
    state: Required[JobState]
    identifier: Required[str]
    type: Required[str | None]
    data: Required[Any]
    priority: Required[int]
    enqueued_at: Required[float]
    retry_count: Required[int]
    stall_count: Required[int]
    timeout_count: Required[int]
    suspect: bool
    trace: dict[str, str]
    # Of jobs that have some.
    snooze_count: int
    options: OwnOptionsInfo
    expires_at: float
    tick: float
    run_at: float | None
    attempts: Required[list[dict[str, Any]]]
    blocked_behind: bool
    progress: Required[ProgressInfo | None]
    # Active jobs.
    worker: str
    fence: int
    removed: bool
    # Held jobs: what they wait for (the first 100), how many these are, and how many have ended.
    when: When
    with_results: bool
    waits_for: list[DependencyInfo]
    waits_for_count: int
    waited_for: int
    # Live jobs for which others wait: the first 20 of them, and how many there are, with those cancelled since.
    dependants: list[str]
    dependant_count: int
    # The batch whose callback the job is, and that to which a live job belongs.
    batch: str
    member_of: MemberInfo
    # Done jobs.
    ended_at: float
    run_seconds: float | None
    result: Any
    result_error: str
    # Dead jobs, and jobs whose record is broken.
    died_at: float
    error: Any
    record_error: str


class JobBrief(TypedDict):
    """A job of a page."""

    id: str
    identifier: str
    state: State


class JobDetails(JobBrief, total=False):
    """A job of a page with details. Times are epoch seconds. A broken record has only `record_error`."""

    type: str | None
    priority: int
    enqueued_at: float
    run_at: float | None
    retry_count: int
    stall_count: int
    timeout_count: int
    suspect: bool
    record_error: str
    # Active jobs.
    worker: str
    removed: bool
    # Held jobs: the number of jobs that they wait for.
    waits_for_count: int
    # Active, done and dead jobs.
    fence: int
    # Dead jobs. `error`: the name of the exception; `attempts`: the number of those that are kept.
    died_at: float
    error: str | None
    message: str | None
    attempts: int
    # Done jobs.
    ended_at: float
    run_seconds: float | None


class DeadBrief(TypedDict):
    """A dead job of a page. `error`: the name of its exception. `died_at`: epoch seconds. `attempts`: those that are
    kept, at most 10."""

    id: str
    fence: int
    identifier: str
    type: str | None
    died_at: float
    attempts: int
    error: str | None
    message: str | None


class JournalCounts(TypedDict):
    entries: int
    bytes: int
    trimmed: int
    lost: int


class LimitCounts(TypedDict):
    rate: str
    max_active: int
    may_begin: int
    limited_workers: int


class QueueStatus(TypedDict):
    """The counts of a queue; docs/design/states.md explains them."""

    waiting: int
    scheduled: int
    blocked: int
    held: int
    retry: int
    active: int
    dead: int
    kept: int
    fail_jobs: int
    done: int
    failed: int
    in_flight: int
    oldest_waiting_seconds: float | None
    paused: bool
    mode: Mode
    dropped: int
    journal: JournalCounts
    epoch: int
    journal_sequence: int
    journal_hash: str
    awaiters: int
    next_due_seconds: float | None
    limits: LimitCounts | None
    overdue: int


class BatchInfo(TypedDict):
    """A batch and its members: all, those that have not ended, and how the others have ended. `progress`: the share
    that has ended."""

    id: str
    queue: str
    state: Literal["open", "sealed", "cancelled", "done", "failed", "abandoned"]
    members: int
    open: int
    done: int
    dead: int
    other: int
    progress: float
    ended_at: float | None


class ScheduleInfo(TypedDict, total=False):
    """A schedule. A broken one has only `queue`, `key`, `rule` (None), `origin`, `error`, its times and counts."""

    queue: Required[str]
    key: Required[str]
    rule: Required[str | None]
    every: float | None
    cron: str | None
    zone: str | None
    data: Any
    jitter: float
    priority: int
    type: str | None
    overlap: Overlap
    catch_up: CatchUp
    origin: str | None
    error: str
    paused: Required[bool]
    next_at: Required[float | None]
    last_at: Required[float | None]
    runs: Required[int]
    skipped: Required[int]
    missed: Required[int]


class SupervisorInfo(TypedDict):
    """A live supervisor of this Redis. `duplicates`: processors on the same host with the same state directory or
    config file. `version_skew`: another supervisor has a newer version."""

    processor: str
    host: str
    pid: int
    version: str
    protocol: int
    queues: list[str]
    processes: int
    state_dir: str
    config: str | None
    remote_control: RemoteControl
    heartbeat_age_seconds: float
    duplicates: list[str]
    version_skew: bool


class KillInfo(TypedDict):
    """A job that is being killed. `others`: jobs of the same process, which end first."""

    id: str
    pid: int
    outcome: Literal["cancelled", "interrupted"]
    others: list[str]


class StackInfo(TypedDict):
    """Where a running job is; for a process that is still starting, `job` and `seconds` are None."""

    role: str
    pid: int
    job: str | None
    seconds: float | None
    stack: str | None


class LogRecord(TypedDict, total=False):
    """A line of output; docs/guide/logs.md explains the other fields."""

    time: Required[str]
    level: Required[str]
    message: Required[str]
    queue: str
    job: str | None
    pid: int
    stream: str
    logger: str
