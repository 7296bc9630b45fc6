"""Jobs that must outlive the server they are sent to: stored on a replica too before the producer hears that they are.

1. Without a replica nothing is sent (NoReplica).
2. After the write, WAIT tells how many replicas have it. If none has, in time, the outcome is unknown, never good: the
   jobs are on the master, and lost if that is lost before a replica has them.
"""

from forq.broker.keys import durable_mark
from forq.broker.link import Link
from forq.errors import NoReplica, OutcomeUnknown, UsageError
from forq.names import shown

REPLICA = "replica"
# Replicas that keep up answer within a round trip; the caller's connection must be more patient than this.
WAIT_MS = 1000


def check_durable(durable: object) -> bool:
    """Whether a replica is asked for."""
    if durable not in (None, REPLICA):
        raise UsageError(f"durable {shown(durable)} is not allowed: 'replica', or None for the master alone")
    return durable is not None


def check_has_replica(link: Link, base: str) -> None:
    info = link.call("INFO", "replication", at=base)
    if b"state=online" not in info:
        raise NoReplica(f"Redis at {link.shown_url} has no replica that is in sync; nothing was stored")


def wait_for_replica(link: Link, base: str) -> None:
    """What the last call wrote is on a replica when this returns; else OutcomeUnknown."""
    stored = "what was sent is stored on the master, but not known to be on a replica"
    try:
        acknowledged = link.acknowledged(base, durable_mark(base), WAIT_MS)
    except OutcomeUnknown as exc:
        raise OutcomeUnknown(f"{stored}: {exc}") from exc
    if acknowledged < 1:
        raise OutcomeUnknown(f"{stored}: none acknowledged it within {WAIT_MS / 1000:g} s")
