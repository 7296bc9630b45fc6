"""Default locations: the state directory, the control socket, Redis and the key prefix."""

import os

SOCKET_NAME = "control.sock"
SYSTEM_SOCKET = "/run/forq/control.sock"
DEFAULT_PREFIX = "forq:"


def state_dir() -> str:
    """FORQ_STATE_DIR, else systemd's STATE_DIRECTORY, else /var/lib/forq for root, else the user's state directory."""
    environ = os.environ
    if chosen := environ.get("FORQ_STATE_DIR"):
        return os.path.abspath(chosen)
    # systemd joins several directories with colons; the first is the main one.
    if given := environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return given
    if os.geteuid() == 0:
        return "/var/lib/forq"
    base = environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "forq")


def control_socket() -> str:
    """The first candidate that exists; if none does, the last one."""
    candidates = control_socket_candidates()
    return next((path for path in candidates if os.path.lexists(path)), candidates[-1])


def control_socket_candidates() -> list[str]:
    """The paths to try, in this order; only one if the environment names it."""
    if chosen := os.environ.get("FORQ_SOCKET"):
        return [os.path.abspath(chosen)]
    beside_state = os.path.join(state_dir(), SOCKET_NAME)
    return [beside_state] if os.environ.get("FORQ_STATE_DIR") else [beside_state, SYSTEM_SOCKET]


def redis_url() -> str:
    """FORQ_REDIS, else the embedded server of the local state directory."""
    return os.environ.get("FORQ_REDIS") or f"unix://{os.path.join(state_dir(), 'redis.sock')}"


def key_prefix() -> str:
    """The prefix of all keys: FORQ_PREFIX, which handlers and services inherit, else forq:."""
    return os.environ.get("FORQ_PREFIX", DEFAULT_PREFIX)
