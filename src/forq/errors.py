"""Every error forq raises, and the exit codes of its processes.

Each class has a `code`, its name on the control socket, and the exit code that forqctl ends with.
"""

# typing.TYPE_CHECKING would import typing; forqctl imports this module at its start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta

MAX_SNOOZE_SECONDS = 365 * 86400


class ExitCode:
    """Exit codes of `forq run`, and of a queue's child to the supervisor."""

    STOPPED = 0
    FAILED = 1
    WRONG_ARGUMENTS = 2
    # From a queue's child to the supervisor.
    QUEUE_GONE = 71  # the queue was deleted
    FENCED = 72  # this processor has been removed from the queue
    # From `forq run` to systemd and operators.
    EVICTED_TOO_OFTEN = 70  # evicted from Redis repeatedly
    NO_REDIS = 75  # cannot reach Redis at start (with require_redis)
    INCOMPATIBLE = 76  # another protocol version owns the data
    CONFIG = 78  # a setting (in a child: its handler) is invalid


# A restart would fail in the same way; etc/forq.service does not try it.
FINAL_EXIT_CODES = (ExitCode.WRONG_ARGUMENTS, ExitCode.INCOMPATIBLE, ExitCode.CONFIG)

EXIT_MEANINGS = {
    ExitCode.STOPPED: "stopped on request",
    ExitCode.FAILED: "another supervisor uses this state directory, or the socket cannot be used",
    ExitCode.WRONG_ARGUMENTS: "wrong arguments",
    ExitCode.EVICTED_TOO_OFTEN: "evicted from Redis six times within 10 minutes: its heartbeats arrive too late",
    ExitCode.NO_REDIS: "Redis is unreachable at start (with --require-redis)",
    ExitCode.INCOMPATIBLE: "another protocol version owns the data in Redis",
    ExitCode.CONFIG: "a setting is invalid, or the Redis server is incompatible",
}


class ForqError(Exception):
    """Base of all errors that forq raises."""

    code = "failed"
    exit_code = 1


class ConfigError(ForqError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "config"
    exit_code = 78


class CannotImport(ConfigError):
    """A handler cannot be imported, or cannot be called with (data, job). `traceback`: of the import, without forq's
    own frames."""

    code = "cannot_import"
    exit_code = 1

    def __init__(self, message: str, traceback: str | None = None) -> None:
        super().__init__(message)
        self.traceback = traceback


class UsageError(ForqError):
    """The arguments of a call are invalid or contradict one another."""

    code = "usage"
    exit_code = 2


class InvalidName(UsageError):
    """A queue name that is not allowed."""

    code = "invalid_name"


class InvalidId(UsageError):
    """A job id, identifier, token or type, or the key of a schedule, that is not allowed."""

    code = "invalid_id"


class InvalidData(UsageError):
    """Data that is not JSON, or too large."""

    code = "invalid_data"


class DoesNotFit(InvalidData, TypeError):
    """A value that does not fit its annotation, or that would come back from JSON as another one."""

    code = "does_not_fit"


class InvalidTask(UsageError):
    """A function that cannot be a task: for its kind, or for an annotation that cannot be converted."""

    code = "invalid_task"


class InvalidOption(UsageError):
    """A queue option that is unknown, of the wrong type or out of range."""

    code = "invalid_option"


class UnknownVerb(UsageError):
    """The control socket has no such verb."""

    code = "unknown_verb"


class PlanChanged(ForqError):
    """The config file, or what the supervisor serves, has changed since the plan was made."""

    code = "plan_changed"


class UnknownQueue(ForqError):
    """There is no queue with that name."""

    code = "unknown_queue"
    exit_code = 4


class UnknownApp(ForqError):
    """The supervisor has no app with that name."""

    code = "unknown_app"
    exit_code = 4


class UnknownSupervisor(ForqError):
    """No live supervisor on this Redis has that name or host."""

    code = "unknown_supervisor"
    exit_code = 4


class UnknownJob(ForqError):
    """The queue has no job with that id."""

    code = "unknown_job"
    exit_code = 4


class UnknownDependency(UnknownJob):
    """A job cannot wait for one that its queue does not know."""

    code = "unknown_dependency"


class UnknownBatch(ForqError):
    """The queue has no such batch."""

    code = "unknown_batch"
    exit_code = 4


class UnknownFlow(ForqError):
    """No queue has that flow."""

    code = "unknown_flow"
    exit_code = 4


class BatchEnded(ForqError):
    """The batch takes no more members."""

    code = "batch_ended"


class FlowsOff(ForqError):
    """The queue has flows = off: its jobs cannot wait for others."""

    code = "flows_off"
    exit_code = 2


class JobDead(ForqError):
    """The awaited job failed for good. `error`: name, message, kind and traceback, if kept."""

    code = "job_dead"

    def __init__(self, message: str, error: object = None) -> None:
        super().__init__(message)
        self.error = error


class NoResult(ForqError):
    """The awaited job is done, but has no result."""

    code = "no_result"


class ArgumentsDoNotFit(ForqError):
    """The stored arguments of a job do not fit the signature of its task."""

    code = "arguments_do_not_fit"


class UnknownSchedule(ForqError):
    """The queue has no schedule with that key."""

    code = "unknown_schedule"
    exit_code = 4


class Exists(ForqError):
    """A job with that id is already in the queue."""

    code = "exists"


class QueueExists(ForqError):
    """The queue exists already, with another mode or definition."""

    code = "queue_exists"


class BeingDeleted(QueueExists):
    """An earlier queue with that name is still being deleted."""

    code = "being_deleted"


class WrongMode(ForqError):
    """A queue of that mode does not support the operation."""

    code = "wrong_mode"


class LeaseLapsed(ForqError):
    """The item was not acknowledged in time and has gone back in line; another caller may have it."""

    code = "lease_lapsed"


class QueueFull(ForqError):
    """The queue holds max_items jobs; nothing was stored."""

    code = "queue_full"


class TooLate(ForqError):
    """A call that could be repeated until a certain time came later, or its queue was deleted; nothing was stored."""

    code = "too_late"


class QueueNotEmpty(ForqError):
    """The queue still holds jobs; deleting them needs force."""

    code = "queue_not_empty"


class TooManyQueues(ForqError):
    """max_queues is reached; nothing was created."""

    code = "too_many_queues"


class TooManySchedules(ForqError):
    """The queue has the maximum number of schedules; nothing was set."""

    code = "too_many_schedules"


class PermissionRefused(ForqError):
    """The caller may not use the control socket."""

    code = "permission"
    exit_code = 5


class TimedOut(ForqError):
    """No answer in time."""

    code = "timeout"
    exit_code = 6


class WaitTimeout(TimedOut):
    """The awaited job has not ended in time."""

    code = "wait_timeout"


class SupervisorUnreachable(ForqError):
    """Nothing answers at the control socket."""

    code = "unreachable"
    exit_code = 7


class RedisUnavailable(ForqError):
    """Redis cannot be reached; nothing was sent.

    The message has the text of the error below it. That one is not chained: its traceback shows frames of redis-py
    only, and would stand before the user's own.
    """

    code = "redis_unavailable"


class OutcomeUnknown(RedisUnavailable):
    """The connection broke after the call was sent: it may or may not have been carried out."""

    code = "outcome_unknown"


class NoReplica(RedisUnavailable):
    """durable="replica" was requested, but Redis has no replica; nothing was stored."""

    code = "no_replica"


class BackPressure(ForqError):
    """Redis has reached its memory limit and refuses new jobs; nothing was stored."""

    code = "back_pressure"


class IncompatibleServer(ForqError):
    """The Redis server is too old or may evict keys."""

    code = "incompatible_server"
    exit_code = 78


class IncompatibleProtocol(ForqError):
    """Another version of forq, with another protocol, owns this queue in Redis."""

    code = "incompatible_protocol"
    exit_code = 76


class Fenced(ForqError):
    """This worker is no longer registered; its jobs were recovered."""

    code = "fenced"


class Permanent(ForqError):
    """Raised by a handler: the job has failed for good and is not retried."""

    code = "permanent"
    kind = "permanent"


class Reschedule(ForqError):
    """Base of the exceptions that a handler raises to run its job again later: Snooze and RetryAt."""

    code = "reschedule"


class Snooze(Reschedule):
    """Raised by a handler: run the job again in `seconds` (a number, or a timedelta). Not a failure: the attempt is not
    counted. A job may be snoozed 1,000 times."""

    code = "snooze"

    def __init__(self, seconds: "float | timedelta", message: str = "") -> None:
        given = seconds if isinstance(seconds, int | float) else getattr(seconds, "total_seconds", str)()
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= MAX_SNOOZE_SECONDS:
            raise UsageError(
                f"Snooze({seconds!r:.100}) is not allowed: seconds from 0 to {MAX_SNOOZE_SECONDS} (365 days), or a "
                "timedelta; for a time of day: raise RetryAt(when)"
            )
        super().__init__(message or f"again in {given:g} s")
        self.seconds = float(given)


class RetryAt(Reschedule):
    """Raised by a handler: the attempt has failed; try again at `retry_at` (epoch seconds, or a datetime with a time
    zone)."""

    code = "retry_at"

    def __init__(self, retry_at: object, message: str = "") -> None:
        super().__init__(message or f"retry at {_shown_time(retry_at)}")
        self.retry_at = retry_at


def _shown_time(moment: object) -> object:
    if isinstance(moment, bool) or not isinstance(moment, int | float):
        return moment
    from forq.values import show_time  # values imports this module

    return show_time(moment)


def _subclasses(cls: type[ForqError]) -> list[type[ForqError]]:
    return [cls, *(deeper for sub in cls.__subclasses__() for deeper in _subclasses(sub))]


# Without those that only handlers raise and that cannot be built from a message.
BY_CODE: dict[str, type[ForqError]] = {
    cls.code: cls for cls in reversed(_subclasses(ForqError)) if not issubclass(cls, Reschedule)
}
