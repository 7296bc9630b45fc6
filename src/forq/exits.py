"""Exit codes of `forq run`, and of a queue's child to the supervisor."""

STOPPED = 0
FAILED = 1
# From a queue's child to the supervisor.
QUEUE_GONE = 71  # the queue was deleted
FENCED = 72  # this processor has been removed from the queue
# From `forq run` to systemd and operators.
EVICTED_TOO_OFTEN = 70  # evicted from Redis repeatedly
NO_REDIS = 75  # cannot reach Redis at start (with require_redis)
INCOMPATIBLE = 76  # another protocol version owns the data
CONFIG = 78  # a setting (in a child: its handler) is invalid

# A restart would fail in the same way; etc/forq.service does not try it.
WRONG_ARGUMENTS = 2
FINAL = (WRONG_ARGUMENTS, INCOMPATIBLE, CONFIG)

MEANINGS = {
    STOPPED: "stopped on request",
    FAILED: "another supervisor uses this state directory, or the socket cannot be used",
    WRONG_ARGUMENTS: "wrong arguments",
    EVICTED_TOO_OFTEN: "evicted from Redis six times within 10 minutes: its heartbeats arrive too late",
    NO_REDIS: "Redis is unreachable at start (with --require-redis)",
    INCOMPATIBLE: "another protocol version owns the data in Redis",
    CONFIG: "a setting is invalid, or the Redis server is incompatible",
}
