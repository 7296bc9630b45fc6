"""Reads facts from a supervisor's control socket and from Redis, and sends actions there.

1. `redis` runs a verb that needs only Redis, in a thread.
2. `supervisor` sends a verb over the control socket; without a supervisor it goes to the one that runs the queue,
   through Redis, if that one allows remote control.
3. `change` carries out an action: through the supervisor if there is one, as forqctl does, else in Redis.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from forq.broker.control import ANSWER_SECONDS, Control
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.supervisors import Supervisors
from forq.broker.targets import find_target
from forq.errors import (
    ForqError,
    InvalidData,
    RedisUnavailable,
    SupervisorUnreachable,
    TimedOut,
    UnknownQueue,
    UsageError,
)
from forq.procs import jsonrpc
from forq.remote_control import REMOTE_VERBS
from forq.services.redis_verbs import RedisVerbs
from forq.settings import parse_options
from forq.web.processes import Memory, ProcessRow, process_tree

# Longest wait for Redis and for the supervisor. A restart waits for the import of the handler.
REDIS_SECONDS = 5.0
SUPERVISOR_SECONDS = 10.0
LONGEST_VERBS = {
    "queue.restart": 90.0,
    "stack": 15.0,
    # These scan up to 10,000 jobs.
    **dict.fromkeys(("cancel", "dead.retry", "dead.discard"), 30.0),
}
# How soon a drain that is not possible fails.
EARLY_SECONDS = 0.3
# The process tree may take a tenth of the time.
TREE_REST = 10
MAX_ANSWER_BYTES = 16 << 20
# What a page shows of a job's output, parts that are read per request, and jobs whose lines are kept.
LOG_LINES = 500
LOG_CHARACTERS = 200_000
LOG_PARTS = 50
MAX_LOGS = 100
# Slow reads, such as searches, occupy a thread each.
THREADS = 4

T = TypeVar("T")

log = logging.getLogger("forq.web")


class Source:
    """`control_socket`: None without a supervisor."""

    def __init__(self, url: str, prefix: str, control_socket: str | None = None) -> None:
        self.url = url
        self.prefix = prefix
        self._control = None if control_socket is None else ControlConnection(control_socket)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="forq-web")
        # Separate threads: searches, and waiting for Redis, must not delay the snapshots that all pages need, nor reads
        # that need no Redis.
        self._sampling = ThreadPoolExecutor(1, thread_name_prefix="forq-web-sample")
        self._local_reads = ThreadPoolExecutor(1, thread_name_prefix="forq-web-proc")
        self._remote = ThreadPoolExecutor(THREADS, thread_name_prefix="forq-web-remote")
        # Why the last snapshot had no answer from Redis; "": it had.
        self.redis_error = ""
        self._tree: tuple[float, list[ProcessRow]] = (float("-inf"), [])
        self._local = threading.local()
        self._memory = Memory()
        self._logs: OrderedDict[tuple[str, str], _JobLog] = OrderedDict()
        self._draining: dict[str, asyncio.Task[Any]] = {}

    @property
    def has_supervisor(self) -> bool:
        return self._control is not None

    async def redis(self, verb: str, **params: Any) -> Any:
        """Runs a verb of RedisVerbs."""
        return await self.run(lambda: self._verbs().table()[verb](params))

    async def supervisor(self, verb: str, **params: Any) -> Any:
        """A verb about processes."""
        if self._control is not None:
            return await self._control.call(verb, params, seconds=LONGEST_VERBS.get(verb, SUPERVISOR_SECONDS))
        return await self._in(self._remote, lambda: self._ask_elsewhere(verb, params))

    async def change(self, verb: str, **params: Any) -> Any:
        if self._control is not None or verb in REMOTE_VERBS:
            return await self.supervisor(verb, **params)
        if verb in ("queue.pause", "queue.resume"):
            return await self.redis("pause", paused=verb == "queue.pause", **params)
        if verb == "queue.set":
            # Parsed by the supervisor otherwise.
            params["options"] = parse_options(params["options"], f"queue {params['name']!r}")
        return await self.redis(verb.removeprefix("queue."), **params)

    async def run(self, work: Callable[[], T]) -> T:
        """Reads or changes Redis in a thread. Fails at once while Redis does not answer."""
        if self.redis_error:
            raise RedisUnavailable(self.redis_error)
        return await self._in(self._threads, work)

    async def option_fields(self, name: str) -> dict[str, str]:
        """The options of a queue as Redis stores them (Setting.read_fields)."""
        base = queue_base(self.prefix, name)
        flat = await self.run(lambda: self.link().call("HGETALL", f"{base}:options"))
        if not flat:
            raise UnknownQueue(f"there is no queue {name!r}: it never existed, or was deleted")
        return dict(zip((field.decode() for field in flat[::2]), (value.decode() for value in flat[1::2]), strict=True))

    async def sample(self, work: Callable[[], T]) -> T:
        """In the thread of the snapshots."""
        return await self._in(self._sampling, work)

    async def _in(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def pss(self, pids: Iterable[int]) -> dict[int, int | None]:
        """The memory of processes of this host."""
        wanted = list(pids)
        return await self._in(self._local_reads, lambda: self._memory.pss(wanted)) if wanted else {}

    async def process_tree(self, root: int) -> list[ProcessRow]:
        """The process `root` and all below it. Shared by all viewers, and rarer if it takes long."""

        def read() -> list[ProcessRow]:
            began = time.monotonic()
            if began >= self._tree[0]:
                rows = process_tree(root)
                ended = time.monotonic()
                self._tree = ended + min(10.0, TREE_REST * (ended - began)), rows
            return self._tree[1]

        return await self._in(self._local_reads, read)

    async def job_log(self, queue: str, job_id: str) -> list[dict[str, Any]]:
        """The last lines of a job's output. Reads only what was written since the call before."""
        log = self._logs.setdefault((queue, job_id), _JobLog())
        self._logs.move_to_end((queue, job_id))
        while len(self._logs) > MAX_LOGS:
            self._logs.popitem(last=False)
        async with log.reading:
            for _ in range(LOG_PARTS):
                answer = await self.supervisor("logs", name=queue, job=job_id, cursor=log.cursor)
                log.add(answer["records"])
                log.cursor = answer["cursor"]
                if not answer["more"]:
                    break
        return list(log.records)

    async def drain(self, name: str) -> None:
        """Starts to wait until no job of the queue is waiting or active; meanwhile its state is draining."""
        if self._control is None:
            raise UsageError("only the dashboard of a supervisor can drain a queue: forqctl drain, or client.drain")
        if name in self._draining:
            return
        # A connection of its own: it may take as long as the jobs do.
        connection = ControlConnection(self._control.path)
        task = self._draining[name] = asyncio.create_task(_drain(connection, name))

        def ended(done: asyncio.Task[None]) -> None:
            self._draining.pop(name, None)
            if not done.cancelled() and (error := done.exception()) is not None:
                log.info("drain ended queue=%s error=%s", name, error)

        task.add_done_callback(ended)
        done, _ = await asyncio.wait({task}, timeout=EARLY_SECONDS)
        if done:
            task.result()

    def link(self) -> Link:
        """This thread's connection."""
        if not hasattr(self._local, "link"):
            self._local.link = Link(self.url, name="forq-web", timeout_seconds=REDIS_SECONDS)
        return self._local.link  # type: ignore[no-any-return]  # attributes of a thread-local have no type

    async def close(self) -> None:
        for task in list(self._draining.values()):
            task.cancel()
        if self._control is not None:
            await self._control.close()
        for threads in (self._threads, self._sampling, self._local_reads, self._remote):
            threads.shutdown(wait=False, cancel_futures=True)

    def _verbs(self) -> RedisVerbs:
        if not hasattr(self._local, "verbs"):
            self._local.verbs = RedisVerbs(self.link(), self.prefix)
        return self._local.verbs  # type: ignore[no-any-return]

    def _ask_elsewhere(self, verb: str, params: dict[str, Any]) -> Any:
        link = self.link()
        target = find_target(Supervisors(link, self.prefix), verb, params, on=None)
        control = Control(link, self.prefix)
        sent = control.send(target.supervisor, verb, target.params, read_seconds=ANSWER_SECONDS)
        return control.wait_for_answer(sent, ANSWER_SECONDS + target.work_seconds)


async def _drain(connection: "ControlConnection", name: str) -> None:
    try:
        await connection.call("queue.drain", {"name": name}, seconds=None)
    finally:
        await connection.close()


class _JobLog:
    """The lines of one job that were read so far."""

    def __init__(self) -> None:
        self.records: deque[dict[str, Any]] = deque()
        self.cursor: Any = None
        self.reading = asyncio.Lock()
        self._characters = 0

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Keeps the last ones."""
        for record in records:
            self.records.append(record)
            self._characters += len(record["message"])
            while len(self.records) > LOG_LINES or (self._characters > LOG_CHARACTERS and len(self.records) > 1):
                self._characters -= len(self.records.popleft()["message"])


class ControlConnection:
    """A connection to the control socket. Opened by the first call, and again after it broke."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_id = 0
        self._opening = asyncio.Lock()

    async def call(self, method: str, params: dict[str, Any], *, seconds: float | None = SUPERVISOR_SECONDS) -> Any:
        """The result of one request. Raises the supervisor's error, SupervisorUnreachable or TimedOut."""
        try:
            async with asyncio.timeout(seconds):
                writer = await self._connected()
                self._last_id += 1
                number = self._last_id
                answer = self._answers[number] = asyncio.get_running_loop().create_future()
                try:
                    writer.write(jsonrpc.request(number, method, params))
                    await writer.drain()
                    return await answer
                finally:
                    self._answers.pop(number, None)
        except TimeoutError:
            raise TimedOut(f"no answer from the supervisor at {self.path} within {seconds or 0:g} s") from None
        except OSError as exc:
            raise SupervisorUnreachable(f"cannot reach the supervisor at {self.path}: {exc.strerror or exc}") from exc

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._disconnect(SupervisorUnreachable("the dashboard is closing"))

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._opening:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self.path, limit=MAX_ANSWER_BYTES)
                self._reading = asyncio.create_task(self._read(reader))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        error: ForqError = SupervisorUnreachable(f"the supervisor at {self.path} closed the connection")
        try:
            while line := await reader.readline():
                number, answer = jsonrpc.read_answer(line)
                if number is None and isinstance(answer, ForqError):
                    error = answer
                    break
                waiting = self._answers.get(number) if isinstance(number, int) else None
                if waiting is None or waiting.done():
                    continue
                if isinstance(answer, ForqError):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
        except (OSError, ValueError, InvalidData) as exc:  # ValueError: the line is too long
            error = SupervisorUnreachable(f"connection to the supervisor at {self.path} broke: {exc}")
        self._disconnect(error)

    def _disconnect(self, error: ForqError) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(error)
