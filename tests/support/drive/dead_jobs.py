"""Dead jobs for the tests of the admin, written to Redis as the broker's scripts write them."""

import json
from typing import Any

from redis import Redis

from forq.broker.keys import DEFAULT_PREFIX, queue_base


def bury(
    url: str,
    queue: str,
    member: str,
    *,
    died_ms: int = 5_000,
    data: Any = None,
    job_type: str | None = None,
    error: str = "no",
    attempts: int = 1,
    packed: bytes | None = None,
) -> None:
    failure = {"name": "ValueError", "message": error, "kind": "retriable"}
    made = [
        {"started_at": 0.5, "ended_at": 1.0, "outcome": "failed", "cause": "exception", "error": failure}
    ] * attempts
    trace = f"line 1\nline 2 of the traceback {error}"
    parts = [
        "c5 1000000 0 0 0",
        json.dumps([None, job_type, data]),
        json.dumps({**failure, "traceback": trace}),
        json.dumps(made),
    ]
    base = queue_base(DEFAULT_PREFIX, queue)
    with Redis.from_url(url) as redis:
        redis.zadd(f"{base}:dead", {member: died_ms})
        redis.hset(f"{base}:dead:jobs", member, "\n".join(parts).encode() if packed is None else packed)
