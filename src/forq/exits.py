"""Exit codes: what a process that ends tells whoever started it."""

STOPPED = 0
FAILED = 1
# Of a queue's child, to the supervisor.
QUEUE_GONE = 71  # the queue was deleted
FENCED = 72  # this processor has been removed from the queue
# Of `forq run`, to systemd and operators.
LOST_PLACE = 70  # removed from Redis again and again
NO_REDIS = 75  # cannot reach Redis at start (with require_redis)
INCOMPATIBLE = 76  # another protocol version owns the data
CONFIG = 78  # a setting, or of a child: its handler, cannot be used

# After these another start would say the same: etc/forq.service does not try it.
WRONG_ARGUMENTS = 2
FINAL = (WRONG_ARGUMENTS, INCOMPATIBLE, CONFIG)

# For people: what each code of `forq run` says.
MEANINGS = {
    STOPPED: "it was stopped",
    FAILED: "another supervisor has this state directory, or the socket cannot be used",
    WRONG_ARGUMENTS: "wrong arguments",
    LOST_PLACE: "it was removed from Redis six times within 10 minutes: its heartbeats do not get through in time",
    NO_REDIS: "Redis cannot be reached at start, with --require-redis",
    INCOMPATIBLE: "another protocol version owns the data in Redis",
    CONFIG: "a setting is wrong, or the Redis server cannot be used",
}
