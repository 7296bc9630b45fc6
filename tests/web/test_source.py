"""The connection to the supervisor: answers in any order, its end, and answers that never come."""

import asyncio
import json
import mmap
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from forq.errors import SupervisorUnreachable, TimedOut, UnknownQueue
from forq.web.processes import Memory, process_tree
from forq.web.source import ControlConnection

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def talk(path: Path, serve: Serve, ask: Callable[[ControlConnection], Awaitable[object]]) -> object:
    async def both() -> object:
        server = await asyncio.start_unix_server(serve, path)
        connection = ControlConnection(str(path))
        try:
            return await ask(connection)
        finally:
            await connection.close()
            server.close()

    return asyncio.run(both())


def answer(number: int, result: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode() + b"\n"


def test_answers_may_come_in_any_order(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = [json.loads(await reader.readline()) for _ in range(3)]
        for request in reversed(requests):
            writer.write(answer(request["id"], request["params"]["n"]))

    async def ask(connection: ControlConnection) -> object:
        return await asyncio.gather(*(connection.call("echo", {"n": n}) for n in range(3)))

    assert talk(tmp_path / "c.sock", serve, ask) == [0, 1, 2]


def test_an_error_of_the_supervisor_is_raised(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = json.loads(await reader.readline())["id"]
        error = {"code": -32000, "message": "no queue 'x'", "data": {"code": "unknown_queue"}}
        writer.write(json.dumps({"jsonrpc": "2.0", "id": number, "error": error}).encode() + b"\n")

    async def ask(connection: ControlConnection) -> object:
        return await connection.call("queue.pause", {"name": "x"})

    with pytest.raises(UnknownQueue, match="no queue 'x'"):
        talk(tmp_path / "c.sock", serve, ask)


def test_all_calls_fail_when_the_connection_breaks_and_the_next_one_connects_again(tmp_path: Path) -> None:
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        number = json.loads(await reader.readline())["id"]
        if len(connections) > 1:
            writer.write(answer(number, "again"))
            return
        await reader.readline()
        writer.close()

    async def ask(connection: ControlConnection) -> object:
        broken = await asyncio.gather(*(connection.call("ping", {}) for _ in range(2)), return_exceptions=True)
        assert [type(each) for each in broken] == [SupervisorUnreachable] * 2
        return await connection.call("ping", {})

    assert talk(tmp_path / "c.sock", serve, ask) == "again"


def test_a_late_answer_is_dropped(tmp_path: Path) -> None:

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = json.loads(await reader.readline())["id"]
        second = json.loads(await reader.readline())["id"]
        writer.write(answer(first, "late") + answer(second, "in time"))

    async def ask(connection: ControlConnection) -> object:
        with pytest.raises(TimedOut, match=r"within 0\.05 s"):
            await connection.call("ping", {}, seconds=0.05)
        return await connection.call("ping", {})

    assert talk(tmp_path / "c.sock", serve, ask) == "in time"


def test_without_a_supervisor_the_error_names_its_socket(tmp_path: Path) -> None:
    async def ask() -> None:
        await ControlConnection(str(tmp_path / "none.sock")).call("ping", {})

    with pytest.raises(SupervisorUnreachable, match=r"none\.sock"):
        asyncio.run(ask())


def test_an_answer_that_is_no_answer_breaks_the_connection(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"hello\n")

    async def ask(connection: ControlConnection) -> object:
        return await connection.call("ping", {})

    with pytest.raises(SupervisorUnreachable, match="broke"):
        talk(tmp_path / "c.sock", serve, ask)


def test_the_tree_begins_with_its_root_and_has_parents_before_children() -> None:
    rows = process_tree(os.getppid())
    assert rows[0].pid == os.getppid()
    mine = next(row for row in rows if row.pid == os.getpid())
    assert mine.depth == 1
    assert mine.rss_bytes > 1 << 20


def test_a_process_that_has_ended_has_no_tree() -> None:
    assert process_tree(2**22 - 1) == []


def test_memory_is_measured_once_per_interval() -> None:
    clock = [0.0]
    memory = Memory(now=lambda: clock[0])
    first = memory.pss([os.getpid(), 2**22 - 1])
    assert (first[os.getpid()] or 0) > 1 << 20
    assert first[2**22 - 1] is None
    # Not on the heap, which may have room from before.
    block = mmap.mmap(-1, 16 << 20)
    for at in range(0, len(block), mmap.PAGESIZE):
        block[at] = 1
    assert memory.pss([os.getpid()])[os.getpid()] == first[os.getpid()]
    clock[0] += 6.0
    assert (memory.pss([os.getpid()])[os.getpid()] or 0) > (first[os.getpid()] or 0) + (8 << 20)
    block.close()
