"""Every error forq raises.

Each class has a `code`, its name on the control socket, and the exit code that forqctl ends with.
"""


class ForqError(Exception):
    """Base of all errors that forq raises."""

    code = "failed"
    exit_code = 1


class ConfigError(ForqError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "config"
    exit_code = 78


class CannotImport(ConfigError):
    """A handler cannot be imported, or cannot be called with (data, job). `traceback`: where, if Python can tell; only
    what is not forq's own."""

    code = "cannot_import"
    exit_code = 1

    def __init__(self, message: str, traceback: str | None = None) -> None:
        super().__init__(message)
        self.traceback = traceback


class UsageError(ForqError):
    """A call was made with arguments that make no sense together."""

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


class InvalidOption(UsageError):
    """A queue option that is unknown, of the wrong type or out of range."""

    code = "invalid_option"


class UnknownVerb(UsageError):
    """The control socket has no such verb."""

    code = "unknown_verb"


class UnknownQueue(ForqError):
    """There is no queue of that name."""

    code = "unknown_queue"
    exit_code = 4


class UnknownJob(ForqError):
    """The queue has no job with that id."""

    code = "unknown_job"
    exit_code = 4


class JobDead(ForqError):
    """The job that was waited for failed for good. `error`: name, message, kind and traceback, if that is kept."""

    code = "job_dead"

    def __init__(self, message: str, error: object = None) -> None:
        super().__init__(message)
        self.error = error


class NoResult(ForqError):
    """The job that was waited for is done, and there is no result of it."""

    code = "no_result"


class UnknownSchedule(ForqError):
    """The queue has no schedule of that key."""

    code = "unknown_schedule"
    exit_code = 4


class Exists(ForqError):
    """A job with that id is already in the queue."""

    code = "exists"


class QueueExists(ForqError):
    """The queue exists already, with another mode or definition."""

    code = "queue_exists"


class BeingDeleted(QueueExists):
    """An earlier queue of that name has not been cleared away yet."""

    code = "being_deleted"


class WrongMode(ForqError):
    """What was asked for is not what a queue of that mode does."""

    code = "wrong_mode"


class LeaseLapsed(ForqError):
    """The item was not acknowledged in time: it has gone back in line, and somebody else may have it."""

    code = "lease_lapsed"


class QueueFull(ForqError):
    """The queue holds max_items jobs; nothing was stored."""

    code = "queue_full"


class QueueNotEmpty(ForqError):
    """The queue still holds jobs; deleting them needs force."""

    code = "queue_not_empty"


class TooManyQueues(ForqError):
    """max_queues is reached; nothing was created."""

    code = "too_many_queues"


class TooManySchedules(ForqError):
    """The queue has as many schedules as it may; nothing was set."""

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
    """The job that was waited for has not ended in time."""

    code = "wait_timeout"


class SupervisorUnreachable(ForqError):
    """Nothing answers at the control socket."""

    code = "unreachable"
    exit_code = 7


class RedisUnavailable(ForqError):
    """Redis cannot be reached; nothing was sent."""

    code = "redis_unavailable"


class OutcomeUnknown(RedisUnavailable):
    """The connection broke after the call was sent: it may or may not have been carried out."""

    code = "outcome_unknown"


class NoReplica(RedisUnavailable):
    """A job was to be stored on a replica too, and there is none; nothing was stored."""

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
    """This worker is no longer registered: what it holds has been given to others."""

    code = "fenced"


class Permanent(ForqError):
    """Raised by a handler: the job has failed and is not to be tried again."""

    code = "permanent"
    kind = "permanent"


class RetryAt(ForqError):
    """Raised by a handler: try again at `retry_at` (epoch seconds, or a datetime with a time zone)."""

    code = "retry_at"

    def __init__(self, retry_at: object, message: str = "") -> None:
        super().__init__(message or f"retry at {_shown_time(retry_at)}")
        self.retry_at = retry_at


def _shown_time(moment: object) -> object:
    if isinstance(moment, bool) or not isinstance(moment, int | float):
        return moment
    from forq.values import show_time  # which needs the errors

    return show_time(moment)


def _subclasses(cls: type[ForqError]) -> list[type[ForqError]]:
    return [cls, *(deeper for sub in cls.__subclasses__() for deeper in _subclasses(sub))]


# RetryAt is left out: it is for handlers, and not made from a message.
BY_CODE: dict[str, type[ForqError]] = {cls.code: cls for cls in reversed(_subclasses(ForqError)) if cls is not RetryAt}
