"""The names of all Redis keys and channels.

All keys of a queue start with its base, which contains the hash tag `{name}`, so they are on one cluster node. Scripts
get the base as their only key and append the names listed here.
"""

from forq.paths import DEFAULT_PREFIX as DEFAULT_PREFIX

# The names after BASE ':' (a test compares them with the scripts).
QUEUE_KEYS = (
    "pending",  # list: hints (ids) of waiting jobs of priority 5; workers block on it
    "pending:0-9",  # list: hints of the other priorities
    "pending:swept",  # list: hints that come before those in `pending`, while stale ones are removed
    "pending:0-9:swept",  # list: for the other priorities
    "retry:swept",  # list: for the retry lane
    "jobs",  # hash: id -> record, live jobs only
    "active",  # hash: id -> WORKER:FENCE of the worker that runs it
    "progress",  # hash: id -> FRACTION MS TEXT, of active jobs that report progress
    "blocked",  # hash: id -> the enqueues of an active id, combined into one
    "held",  # hash: id -> NONCE WHEN USE RUN_AT COUNT OPEN of a job that waits for others
    "held:jobs",  # hash: id -> its record
    "held:open",  # hash: ID NUMBER -> a dependency that has not ended
    "inputs",  # hash: ID -> COUNT USE; ID NUMBER -> how that dependency ended, and its result
    "sources",  # hash: a job that others wait for -> its groups of edges
    "edges",  # hash: GROUP INDEX -> an edge to a held job
    "resolving",  # list: groups of edges whose source has ended, for pulse
    "dead:holds",  # hash: id@fence -> what a dead job waited for
    "dead:inputs",  # hash: id@fence NUMBER -> a result that a dead job used
    "batches",  # hash: batch -> STATE USE ADDED OPEN DONE DEAD OTHER AT_MS
    "batch:members",  # hash: BATCH NUMBER -> QUEUE ID SECONDS of a member that has not ended
    "batch:results",  # hash: BATCH NUMBER -> how a member ended, and its result
    "batch:children",  # hash: BATCH NUMBER -> members that this one added; BATCH NUMBER.N -> the number of one of them
    "flow:F",  # string: the plan of a flow; expires
    "checks",  # zset: batches and held jobs, by the time (ms) at which they are looked after
    "reports",  # hash: queue -> 1, of queues with reports
    "reports:QUEUE",  # list: ends that this queue waits for
    "ends",  # hash: id -> how it ended, of the last jobs
    "ends:old",  # hash: of those before
    "stale",  # hash: PRIORITY:ID -> number of hints to ignore; swept -> number of hints in all :swept lists
    "scheduled",  # zset: ids by due time (ms, with a sequence in the fraction)
    "retry",  # list: hints of jobs in the retry lane
    "suspects",  # zset: suspects (they run alone next time), by their enqueue time
    "fail:*",  # the fail queue: the same keys again, for the fail jobs of dead jobs
    "attempts",  # hash: id -> its last unsuccessful attempts, as JSON lines
    "failed",  # list: tokens on which the retry process blocks
    "awaiters",  # hash: AWAITER -> EXPIRES_MS ARRIVAL VIA ID, of all awaiters (release modes); expires
    "awaiting",  # zset: ID ARRIVAL AWAITER of awaiters that can get a lease, in that order; expires
    "awaiter:A",  # list: this awaiter's lease, notification, or last acknowledged item; expires
    "leases",  # zset: leased items, by the time (ms) at which they go back
    "accepted",  # zset: jobs that external workers have accepted, by the time (ms) of the last message about them
    "workers",  # zset: external workers by the time (ms) they were last seen
    "expiries",  # zset: items by the time (ms) at which they expire
    "done",  # zset: done jobs that are kept, by the time they ended (ms)
    "done:own",  # zset: done jobs with a keep_done of their own, by the time until which they are kept (ms)
    "done:jobs",  # hash: id -> ENDED_MS FENCE MICROS, result, record and attempts of a done job
    "waiters",  # hash: id -> UNTIL_MS MARK: clients wait for the end of that job until then; expires
    "told:MARK:ID",  # string: how the job with this mark ended, and its result, for clients that wait; expires
    "dead",  # zset: id@fence by time of death (ms)
    "dead:jobs",  # hash: id@fence -> record and error
    "outbox",  # list: lines for the failed log that no scribe has taken
    "outbox:P",  # list: lines that the scribe of processor P has taken
    "processors",  # zset: processor by the time (ms) at which it counts as dead
    "processor:P:workers",  # hash: worker -> number of its last turn
    "processor:P:positions",  # hash: worker -> its position at the last heartbeat
    "processor:P:worker:W:processing",  # list: ids that this worker holds
    "processor:P:worker:W:wake",  # list: wakes a worker that may not claim
    "limited",  # zset: PROCESSOR WORKER of workers that may not claim (rate, max_active), by arrival (µs)
    "evicting",  # hash: processor -> cause, of processors being evicted that still have workers
    "graves",  # zset: removed workers and evicted processors, by the time (ms) at which they are forgotten
    "options",  # hash: epoch, protocol, mode, paused, options
    "summary",  # string: what every call reads, such as the number and hash of the last journal entry (summary.lua)
    "counts",  # hash: what few calls need, such as the number of lost journal entries
    "processed:count",
    "failed:count",
    "events",  # stream: the journal; outlives the queue by 7 days
    "journal:watermarks",  # hash: consumer -> last stream id that it has read and saved; outlives the queue too
    "durable",  # string: a write for WAIT to wait for; expires
    "token:EPOCH:T",  # string: id stored under this token; expires
    "schedules",  # hash: KEY -> definition of a periodic job
    "schedules:next",  # zset: KEY by its next tick (ms)
    "schedules:runs",  # hash: KEY -> LAST_RUN_MS RUNS SKIPPED MISSED
    "schedules:paused",  # hash: KEY -> time of the pause (ms), of those that are paused
    "deleted",  # string: the queue was deleted, for supervisors that have not noticed; expires
    "freed",  # string: when the name of a deleted queue was last freed (us), for clients that create one; expires
    "trash",  # set: epochs of deleted queues of this name whose records still exist
    "trash:EPOCH:jobs",  # hash: records of a deleted queue until they are in the failed log
    "trash:EPOCH:dead:jobs",
    "trash:EPOCH:outbox",  # list: unwritten lines of a deleted queue
)

# The names after PREFIX '{control}' ':' (same test). No producer may write them (etc/redis-acl.conf).
CONTROL_KEYS = (
    "supervisors",  # zset: processor of each live supervisor by the time (ms) at which it counts as dead
    "about",  # hash: processor -> its host, version, queues … as JSON
    "requests:P",  # list: ID DEADLINE_MS JSON of requests that supervisor P has not read; expires
    "taken:P:ID",  # string: 1 if P has read this request, 2 if it has answered; expires
    "answer:P:ID",  # list: the answer to this request; expires
)

# The channels after BASE '@' DB ':' (same test). DB, because messages reach all databases of a server.
CHANNELS = (
    "due",  # ms until the new head of `scheduled` is due; and other messages for pulse
    "progress",  # the jobs whose progress has changed or ended
    "outbox",  # there are lines for the failed log
    "handed:C",  # an awaiter of clerk C has an entry in its list
    "ended:ID",  # how that job ended, for clients that wait
)

# The channels after PREFIX '{control}' '@' DB ':'.
CONTROL_CHANNELS = (
    "requests:P",  # there is a request to supervisor P
    "answered:ID",  # there is an answer to this request
)

DEFAULT_PRIORITY = 5


def registry_key(prefix: str) -> str:
    return f"{prefix}queues"


def deleted_queues_key(prefix: str) -> str:
    """A zset: names of deleted queues by the time (ms) of the last deletion, while the journal is kept."""
    return f"{prefix}queues:deleted"


def control_base(prefix: str) -> str:
    """The base of the keys about supervisors. One hash tag for all of them, so they are on one cluster node."""
    return f"{prefix}{{control}}"


def answer_key(base: str, processor: str, request: str) -> str:
    """Derived by both sides: a request cannot name the key that its answer is written to."""
    return f"{base}:answer:{processor}:{request}"


def taken_key(base: str, processor: str, request: str) -> str:
    return f"{base}:taken:{processor}:{request}"


def requests_channel(base: str, db: int, processor: str) -> str:
    """The channel that wakes the pulse of a supervisor."""
    return f"{base}@{db}:requests:{processor}"


def answered_channel(base: str, db: int, request: str) -> str:
    return f"{base}@{db}:answered:{request}"


# The fail queue of queue NAME is NAME#fail, which is not a valid name for users.
_FAIL = "#fail"


def fail_queue(name: str) -> str:
    return name + _FAIL


def main_queue(name: str) -> str:
    """The queue that a fail queue belongs to; for any other queue itself."""
    return name.removesuffix(_FAIL)


def queue_base(prefix: str, name: str) -> str:
    if name.endswith(_FAIL):
        return f"{prefix}queue:{{{name.removesuffix(_FAIL)}}}:fail"
    return f"{prefix}queue:{{{name}}}"


def workers_key(base: str, processor: str) -> str:
    return f"{base}:processor:{processor}:workers"


def due_channels(prefix: str, db: int) -> str:
    """The pattern of all queues' channels for pulse."""
    return f"{prefix}queue:*@{db}:due"


def progress_channels(prefix: str, db: int) -> str:
    """The pattern of all queues' channels for progress."""
    return f"{prefix}queue:*@{db}:progress"


def outbox_channels(prefix: str, db: int) -> str:
    """The pattern of all queues' channels for new outbox lines."""
    return f"{prefix}queue:*@{db}:outbox"


def ended_channel(base: str, db: int, job_id: str) -> str:
    """The channel that announces the end of a job."""
    return f"{base}@{db}:ended:{job_id}"


def queue_of_channel(channel: str) -> str:
    """The name of the queue that a channel belongs to."""
    name = channel.partition("{")[2].partition("}")[0]
    return fail_queue(name) if "}:fail@" in channel else name


def pending_key(base: str, priority: int = DEFAULT_PRIORITY) -> str:
    return f"{base}:pending" if priority == DEFAULT_PRIORITY else f"{base}:pending:{priority}"


def swept_key(list_key: str) -> str:
    """The first hints of a list, while stale ones are removed from it."""
    return f"{list_key}:swept"


def retry_key(base: str) -> str:
    return f"{base}:retry"


def suspects_key(base: str) -> str:
    return f"{base}:suspects"


def events_key(base: str) -> str:
    return f"{base}:events"


def watermarks_key(base: str) -> str:
    return f"{base}:journal:watermarks"


def processing_key(base: str, processor: str, worker: str) -> str:
    return f"{base}:processor:{processor}:worker:{worker}:processing"


def wake_key(base: str, processor: str, worker: str) -> str:
    return f"{base}:processor:{processor}:worker:{worker}:wake"


def awaiter_key(base: str, awaiter: str) -> str:
    return f"{base}:awaiter:{awaiter}"


def handed_channel(base: str, db: int, clerk: str) -> str:
    """The channel of one queue for the awaiters of a clerk."""
    return f"{base}@{db}:handed:{clerk}"


def handed_channels(prefix: str, db: int, clerk: str) -> str:
    """The pattern of all queues' channels for the awaiters of a clerk."""
    return f"{prefix}queue:*@{db}:handed:{clerk}"


# Before the queue's name in the name of a list of reports.
QUEUE_OF_REPORTS = "reports:"


def reports_key(base: str, destination: str) -> str:
    return f"{base}:{QUEUE_OF_REPORTS}{destination}"


def outbox_key(base: str) -> str:
    return f"{base}:outbox"


def taken_outbox_name(processor: str) -> str:
    return f"outbox:{processor}"


def trashed_outbox_name(epoch: str) -> str:
    return f"trash:{epoch}:outbox"


def trash_keys(base: str, epoch: str) -> tuple[str, str]:
    return f"{base}:trash:{epoch}:jobs", f"{base}:trash:{epoch}:dead:jobs"


def durable_mark(base: str) -> str:
    return f"{base}:durable"


def token_key(base: str, epoch: str, token: str) -> str:
    return f"{base}:token:{epoch}:{token}"
