"""A server that lost its last writes: it starts on the append-only file of another one, cut at any byte."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.drive.server import Server

Snapshot = dict[bytes, object]


def growing_file(server: Server) -> Path:
    """The file that the server appends to."""
    [found] = (server.directory / "appendonlydir").glob("*.incr.aof")
    return found


@contextmanager
def durable_server() -> Iterator[Server]:
    """A server that writes to its file before it answers; only the disk can lag behind."""
    with Server(appendonly=True) as server:
        with server.connect() as redis:
            redis.config_set("appendfsync", "no")
        yield server


@contextmanager
def cut_copy(server: Server, size: int) -> Iterator[Server]:
    """Another server, started on the first `size` bytes of this one's file."""
    copy = Server(appendonly=True)
    try:
        shutil.copytree(server.directory / "appendonlydir", copy.directory / "appendonlydir")
        with open(growing_file(copy), "r+b") as file:
            file.truncate(size)
        copy.start()
        yield copy
    finally:
        copy.remove()


def snapshot(redis: Any) -> Snapshot:
    """All keys of a server, without expiry times."""
    read = {
        b"string": lambda key: redis.get(key),
        b"list": lambda key: redis.lrange(key, 0, -1),
        b"hash": lambda key: redis.hgetall(key),
        b"set": lambda key: redis.smembers(key),
        b"zset": lambda key: redis.zrange(key, 0, -1, withscores=True),
        b"stream": lambda key: redis.xrange(key),
    }
    return {key: read[redis.type(key)](key) for key in redis.keys("*")}
