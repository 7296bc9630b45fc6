"""What can be replayed: a look at Redis for each job that was picked, made by Spark's tasks, many jobs per call.

Nothing is changed here. A job is READY (its data is there, and no live job has its id), it was replayed ALREADY (its
token is remembered), or there is a reason why it cannot be.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any

import orjson
from pyspark.sql import Row

from forq.broker.dead import read_dead
from forq.broker.keys import main_queue, queue_base, token_key
from forq.broker.link import Link
from forq.broker.record import unpack
from forq.errors import InvalidData

READY, ALREADY = "ready", "already"
LOOKED = (
    "queue string, job string, fence long, state string, target string, outcome string, identifier string, "
    "type string, priority int, data string, token string"
)
_COLUMNS = tuple(column.split()[0] for column in LOOKED.split(","))
_LONGEST_TOKEN = 128
# Records may be large: as many as this are held at a time.
_JOBS_PER_CALL = 200

_FATES = {
    "revived": "it was revived since then",
    "discarded": "it was discarded",
    "forgotten": "it was forgotten (dead_ttl, dead_max); its line may be in the failed log (forqctl recover)",
    "deleted": "its queue was deleted; its line may be in the failed log (forqctl recover)",
}
IS_DONE = "it is done, so its data is gone"
IS_RELEASED = "it was released, so its data is gone"
IS_FAIL_JOB = "it is a fail job, which nobody but forq makes"
NOT_DEAD = "it is no longer among the dead jobs"
IS_LIVE = "a live job has its id"
BROKEN = "its record is broken"
NO_QUEUE = "there is no such queue any more"


@dataclass(frozen=True, slots=True)
class Look:
    """Where to look; a plain value, since it travels to Spark's workers."""

    redis: str
    prefix: str
    to: str | None

    def __call__(self, rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
        """Rows with queue, job, fence, state and fate become rows of LOOKED."""
        link = Link(self.redis, name="forq-replay")
        walk = iter(rows)
        try:
            while some := [row.asDict() for row in islice(walk, _JOBS_PER_CALL)]:
                for found in self._look(link, some):
                    yield tuple(found.get(name) for name in _COLUMNS)
        finally:
            link.close()

    def _look(self, link: Link, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        by_queue: dict[str, list[dict[str, Any]]] = defaultdict(list)
        looked = []
        for row in rows:
            fate = row.pop("fate")
            row["target"] = self.to or row["queue"]
            row["token"] = token_for(row["queue"], row["job"], row["fence"])
            row["outcome"] = _known_reason(row)
            if row["outcome"] is None:
                row["outcome"] = _FATES.get(fate, NOT_DEAD)
                by_queue[row["queue"]].append(row)
            looked.append(row)
        for queue, dead in by_queue.items():
            self._look_at_queue(link, queue, dead)
        return looked

    def _look_at_queue(self, link: Link, queue: str, rows: list[dict[str, Any]]) -> None:
        source, target = queue_base(self.prefix, queue), queue_base(self.prefix, rows[0]["target"])
        epoch = link.call("HGET", f"{target}:options", "epoch")
        if epoch is None:
            for row in rows:
                row["outcome"] = NO_QUEUE
            return
        members = [f"{row['job']}@{row['fence']}" for row in rows]
        packed, *known = link.pipeline(
            [
                ("HMGET", f"{source}:dead:jobs", *members),
                *(("HEXISTS", f"{target}:jobs", row["job"]) for row in rows),
                *(("EXISTS", token_key(target, epoch.decode(), row["token"])) for row in rows),
            ]
        )
        live, replayed = known[: len(rows)], known[len(rows) :]
        for row, record, is_live, was_replayed in zip(rows, packed, live, replayed, strict=True):
            if was_replayed:
                row["outcome"] = ALREADY
            elif record is not None:
                row.update(_with_data(record) if not is_live else {"outcome": IS_LIVE})


def token_for(queue: str, job: str, fence: int) -> str:
    """The same for the same life, whenever and wherever to it is replayed."""
    token = f"replay:{queue}:{job}@{fence}"
    return token if len(token) <= _LONGEST_TOKEN else f"replay:{sha256(token.encode()).hexdigest()}"


def _known_reason(row: dict[str, Any]) -> str | None:
    if main_queue(row["queue"]) != row["queue"]:
        return IS_FAIL_JOB
    return {"done": IS_DONE, "released": IS_RELEASED}.get(row["state"])


def _with_data(packed: bytes) -> dict[str, Any]:
    try:
        record = unpack(read_dead(packed)[0])
    except InvalidData:
        return {"outcome": BROKEN}
    return {
        "outcome": READY,
        "identifier": record.identifier,
        "type": record.type,
        "priority": record.priority,
        "data": orjson.dumps(record.data).decode(),
    }
