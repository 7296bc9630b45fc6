"""Every key name in Redis, in one place.

All keys of a queue start with the same base, which carries the hash tag `{name}`, so that they sit on one cluster
node. Lua scripts get the base as their only key and append the names listed here.
"""

from forq.paths import DEFAULT_PREFIX as DEFAULT_PREFIX

# What may follow BASE ':' (a test compares this with what the scripts use).
QUEUE_KEYS = (
    "pending",  # list: hints (ids) of waiting jobs of priority 5; workers block on it
    "pending:0-9",  # list: the same for the other priorities
    "pending:swept",  # list: those that come before all in `pending`, while stale hints are taken out of it
    "pending:0-9:swept",  # list: the same for the other priorities
    "retry:swept",  # list: the same for the retry lane
    "jobs",  # hash: id -> record, live jobs only
    "active",  # hash: id -> WORKER:FENCE of the worker that runs it
    "progress",  # hash: id -> FRACTION MS TEXT, of active jobs that have told
    "blocked",  # hash: id -> what dispatches of an active id ask for
    "stale",  # hash: PRIORITY:ID -> number of hints to ignore; swept -> number of hints in all :swept lists
    "scheduled",  # zset: ids by due time (ms, with a sequence in the fraction)
    "retry",  # list: hints of jobs in the retry lane
    "suspects",  # zset: jobs that run alone next time, since one may have killed its process, by their enqueue time
    "fail:*",  # the fail queue: the same keys once more, for the permanent failures that a fail handler gets
    "attempts",  # hash: id -> its last attempts that did not succeed, as JSON lines
    "failed",  # list: what the retry child blocks on
    "awaiters",  # hash: AWAITER -> EXPIRES_MS ARRIVAL VIA ID, of those who await an item (release modes); expires
    "awaiting",  # zset: ID ARRIVAL AWAITER of those who can be handed an item, in that order; expires
    "awaiter:A",  # list: what this awaiter was handed, or that it was rung, or what it has acknowledged; expires
    "leases",  # zset: items that are handed over, by the time (ms) at which they go back
    "accepted",  # zset: jobs that external workers have accepted, by the time (ms) of their last sign of life
    "workers",  # zset: external workers by the time (ms) they were last seen
    "progress",  # hash: id -> FRACTION MS TEXT, how far a job is that says so
    "expiries",  # zset: items by the time (ms) at which they are given up
    "done",  # zset: done jobs that are kept, by the time they ended (ms)
    "done:jobs",  # hash: id -> ENDED_MS FENCE MICROS, result, record and attempts of a done job
    "waiters",  # hash: id -> UNTIL_MS MARK: until when somebody waits for the end of that job, and which it is; expires
    "told:MARK:ID",  # string: how the job of this mark ended, and its result, for those who wait; expires
    "dead",  # zset: id@fence by time of death (ms)
    "dead:jobs",  # hash: id@fence -> record and error
    "outbox",  # list: lines for the failed log that no scribe has taken yet
    "outbox:P",  # list: lines that the scribe of processor P is writing
    "processors",  # zset: processor by the time (ms) at which it counts as silent
    "processor:P:workers",  # hash: worker -> number of its last turn
    "processor:P:positions",  # hash: worker -> its position at the last heartbeat
    "processor:P:worker:W:processing",  # list: ids this worker holds
    "processor:P:worker:W:wake",  # list: kicks for a worker that may not claim
    "limited",  # zset: PROCESSOR WORKER of those that may not claim now (rate, max_active), by when (µs) they came
    "evicting",  # hash: processor -> cause, of those that are being evicted and still have workers
    "graves",  # zset: removed workers and evicted processors by the time (ms) they are forgotten
    "options",  # hash: epoch, protocol, mode, paused, options
    "counts",  # hash: fence, journal sequence, hash and bytes, hints in other lists, ids dropped
    "processed:count",
    "failed:count",
    "events",  # stream: the journal; outlives the queue by 7 days
    "journal:watermarks",  # hash: consumer -> stream id up to which it has read the journal for good; outlives it too
    "durable",  # string: written before somebody waits for replicas, so that there is something to wait for; expires
    "token:EPOCH:T",  # string: id stored under this dispatch token; expires
    "schedules",  # hash: KEY -> definition of a periodic job
    "schedules:next",  # zset: KEY by its next tick (ms)
    "schedules:runs",  # hash: KEY -> LAST_RUN_MS RUNS SKIPPED MISSED
    "deleted",  # string: the queue of this name was deleted, for supervisors that have not noticed; expires
    "freed",  # string: when the name of a deleted queue was last made free (us), for those who are making one; expires
    "trash",  # set: epochs of deleted queues of this name whose records are still here
    "trash:EPOCH:jobs",  # hash: records of a deleted queue until they are in the failed log
    "trash:EPOCH:dead:jobs",
    "trash:EPOCH:outbox",  # list: lines of a deleted queue that were not written yet
)

# What may follow BASE '@' DB ':' (the same test): published messages reach all databases of a server.
CHANNELS = (
    "due",  # ms until the new head of `scheduled` is due; or what else pulse is to look at
    "progress",  # the jobs whose progress has changed or is over
    "outbox",  # there are lines for the failed log
    "handed:C",  # an awaiter that the clerk C speaks for has something in its list
    "ended:ID",  # how that job ended, for those who wait
)

DEFAULT_PRIORITY = 5


def registry_key(prefix: str) -> str:
    return f"{prefix}queues"


def deleted_queues_key(prefix: str) -> str:
    """A zset: names by the time (ms) at which a queue of that name was deleted last, while its journal is kept."""
    return f"{prefix}queues:deleted"


# What forq itself calls the fail queue of queue NAME: NAME#fail. No queue of a user's can be called so.
_FAIL = "#fail"


def fail_queue(name: str) -> str:
    return name + _FAIL


def main_queue(name: str) -> str:
    """The queue that a fail queue belongs to; of any other queue itself."""
    return name.removesuffix(_FAIL)


def queue_base(prefix: str, name: str) -> str:
    if name.endswith(_FAIL):
        return f"{prefix}queue:{{{name.removesuffix(_FAIL)}}}:fail"
    return f"{prefix}queue:{{{name}}}"


def workers_key(base: str, processor: str) -> str:
    return f"{base}:processor:{processor}:workers"


def due_channels(prefix: str, db: int) -> str:
    """The pattern of the channels on which queues tell when their next scheduled job is due, and of what pulse should
    look at."""
    return f"{prefix}queue:*@{db}:due"


def progress_channels(prefix: str, db: int) -> str:
    """The pattern of the channels on which queues tell whose progress has changed or is over."""
    return f"{prefix}queue:*@{db}:progress"


def outbox_channels(prefix: str, db: int) -> str:
    """The pattern of the channels on which queues tell that they have lines for the failed log."""
    return f"{prefix}queue:*@{db}:outbox"


def ended_channel(base: str, db: int, job_id: str) -> str:
    """Where those who wait for the end of a job hear of it."""
    return f"{base}@{db}:ended:{job_id}"


def queue_of_channel(channel: str) -> str:
    """The queue's name in a channel of it."""
    name = channel.partition("{")[2].partition("}")[0]
    return fail_queue(name) if "}:fail@" in channel else name


def pending_key(base: str, priority: int = DEFAULT_PRIORITY) -> str:
    return f"{base}:pending" if priority == DEFAULT_PRIORITY else f"{base}:pending:{priority}"


def swept_key(place: str) -> str:
    """The first hints of a list, while stale ones are taken out of it."""
    return f"{place}:swept"


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


def handed_channels(prefix: str, db: int, clerk: str) -> str:
    """The pattern of the channels on which a clerk hears of awaiters that it speaks for."""
    return f"{prefix}queue:*@{db}:handed:{clerk}"


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
