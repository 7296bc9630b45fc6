"""The outbox: lines for the failed log on their way from Redis to disk.

The script that buries a job pushes its line to `outbox` and publishes a message. A scribe takes lines (collect), writes
them, and removes them once they are on disk (forget): a line may be written twice but is never lost.
"""

import hashlib
from typing import Any

import orjson

from forq.broker.keys import outbox_channels, outbox_key, queue_base, taken_outbox_name
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.broker.scripts import OK, error_for, script
from forq.errors import InvalidData
from forq.job_options import unpack_options
from forq.redis_url import database_of

MAX_LINES = 500
MAX_BYTES = 1024 * 1024


class Outbox:
    """The outboxes of all queues, for the scribe of one processor."""

    def __init__(self, link: Link, prefix: str, processor: str, expiry_ms: int) -> None:
        self._link = link
        self._prefix = prefix
        self._processor = processor
        self._expiry_ms = expiry_ms

    def waiting(self, queues: list[str]) -> list[str]:
        """The queues that have lines to write, in one round trip."""
        if not queues:
            return []
        bases = [queue_base(self._prefix, queue) for queue in queues]
        taken = taken_outbox_name(self._processor)
        found = self._link.pipeline([("EXISTS", outbox_key(base), f"{base}:{taken}") for base in bases])
        return [queue for queue, lists in zip(queues, found, strict=True) if lists]

    def collect(self, queue: str, max_lines: int = MAX_LINES) -> list[bytes]:
        """Takes lines. Lines taken earlier and not forgotten come first, without new ones."""
        base = queue_base(self._prefix, queue)
        reply = self._link.run(script("collect"), base, self._processor, self._expiry_ms, max_lines, MAX_BYTES)
        if reply[0] != OK:
            raise error_for(queue, reply)
        return reply[1:]

    def forget(self, queue: str, lines: list[bytes]) -> bool:
        """Removes taken lines that are on disk; False if they are no longer there."""
        return forget(self._link, queue_base(self._prefix, queue), taken_outbox_name(self._processor), lines)


def forget(link: Link, base: str, name: str, lines: list[bytes]) -> bool:
    """Removes exactly these lines from the head of a list of the queue."""
    sha = hashlib.sha1(b"\n".join(lines), usedforsecurity=False).hexdigest()
    return bool(link.run(script("forget"), base, name, len(lines), sha)[1])


def read_line(queue: str, line: bytes) -> dict[str, Any]:
    """The failed log's entry for a dead job; a broken line is kept as text."""
    try:
        entry = orjson.loads(line)
        # The fourth element, the trace context, is not logged.
        identifier, job_type, data, *_ = entry["body"]
        retries, stalls, timeouts = entry["counts"]
        options = unpack_options(entry.get("options", "")).show()
        return {
            "queue": queue,
            "id": entry["id"],
            "identifier": identifier or entry["id"],
            "type": job_type,
            "priority": int(entry["priority"]),
            "data": data,
            "error": entry["error"],
            "retry_count": retries,
            "stall_count": stalls,
            "timeout_count": timeouts,
            "enqueued_at": int(entry["enqueued_us"]) / 1e6,
            "died_at": int(entry["died_ms"]) / 1000,
            "fence": int(entry["fence"]),
            **({"options": options} if options else {}),
        }
    except (ValueError, TypeError, KeyError, InvalidData) as exc:
        return {"queue": queue, "error": f"broken line: {exc!r}", "line": line.decode(errors="replace")}


class OutboxSubscription(Subscription):
    """Receives the names of queues with new lines."""

    def __init__(self, url: str, prefix: str, name: str) -> None:
        super().__init__(url, outbox_channels(prefix, database_of(url)), name=name)

    def receive_queues(self) -> set[str]:
        """The queues with new lines. Call it when the descriptor is readable."""
        return {message for _, message in self.receive()}
