"""Bulk enqueues: splits jobs into chunks, packs each as one call of enqueue.lua, and notes what became of each.

1. A chunk is stored whole or not at all. While the server stores one, the next is packed and sent: at most two are
   unanswered. So a chunk may be stored although the one before was refused; PartlyStored names the jobs.
2. A chunk of plain jobs (lua/enqueue.lua, store_plain) is packed as a whole: that takes a tenth of the time.
3. The data of an iterator is packed as soon as it yields it: it may change the same object for the next job. The items
   of a list are packed together.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from forq.broker.keys import DEFAULT_PRIORITY
from forq.broker.link import NOT_CARRIED_OUT, Link, Sent
from forq.broker.record import join_bodies, pack_each, pack_end
from forq.broker.scripts import OK, Script, error_for
from forq.errors import ForqError, OutcomeUnknown
from forq.job import TraceContext, new_ids
from forq.version import PROTOCOL

# Limits of one script call. A longer call would block the server for too long.
CHUNK_JOBS = 500
CHUNK_BYTES = 512 * 1024
# Items of a list that are packed together. They may be large.
_PACKED_TOGETHER = 64
# The length of a plain job's id.
_ID_LENGTH = 32
# For ids that were generated for the call.
_GENERATED_POLICY = "refuse 0 false 0"


class NewJob(NamedTuple):
    """A checked job."""

    id: str
    priority: int
    body: bytes
    token: str
    run_at: str  # ms; '+ms' from now; '' at once
    options: str = ""  # its own (job_options.pack_options)
    after: str = ""  # what it waits for (dependencies.After.pack)
    edges: tuple[str, ...] = ()  # what waits for it, such as its batch (lua/flows.lua)


class Chunk(NamedTuple):
    """The jobs of one call, and its arguments. `linked`: some wait for others, or others wait for them."""

    ids: list[str]
    args: list[Any]
    linked: bool = False


class Result(NamedTuple):
    """A chunk with the reply to it, or with the error."""

    chunk: Chunk
    reply: list[Any] | ForqError


class PartlyStored(ForqError):
    """A bulk enqueue failed, and some of its jobs are stored or may be: `__cause__` is the first error.

    `stored`: the ids of the stored jobs. `refused`: the ids of jobs that were sent and are certainly not stored.
    `unknown`: the ids of jobs that may be stored, since the connection broke. `refused_at`, `unknown_at`: the positions
    of those jobs in the call, from 0. `sent`: the number of jobs that were sent; the others are not stored.
    """

    code = "partly_stored"

    def __init__(self, results: Sequence[Result], cause: ForqError) -> None:
        self.stored: list[str] = []
        self.refused: list[str] = []
        self.unknown: list[str] = []
        self.refused_at: list[int] = []
        self.unknown_at: list[int] = []
        self.sent = 0
        for (ids, _, _), reply in results:
            if isinstance(reply, OutcomeUnknown):
                self.unknown += ids
                self.unknown_at += range(self.sent, self.sent + len(ids))
            elif isinstance(reply, ForqError):
                self.refused += ids
                self.refused_at += range(self.sent, self.sent + len(ids))
            else:
                self.stored += stored_ids(ids, reply)
            self.sent += len(ids)
        counts = [f"{len(self.stored)} jobs were stored"]
        counts += [f"{len(self.refused)} refused"] if self.refused else []
        counts += [f"{len(self.unknown)} may be stored"] if self.unknown else []
        super().__init__(f"{cause} ({', '.join(counts)})")


class ChunkSender:
    """Sends the chunks of one call; at most two are unanswered. `results`: of those that are answered, in their order.

    After an error no further chunk may be sent.
    """

    def __init__(self, link: Link, script: Script, base: str, queue: str) -> None:
        self._link = link
        self._script = script
        self._base = base
        self._queue = queue
        self._under_way: deque[tuple[Chunk, Sent | ForqError]] = deque()
        self.results: list[Result] = []

    def send(self, chunk: Chunk, *, alone: bool) -> None:
        """`alone`: no other chunk is under way meanwhile. Raises the error of the first chunk that failed."""
        if alone or self._must_wait():
            self.finish()
        self._under_way.append((chunk, self._send(chunk)))
        self.finish(0 if alone else 1)

    def finish(self, left: int = 0) -> None:
        """Reads replies until at most so many are missing. Raises the error of the first chunk that failed."""
        while len(self._under_way) > left:
            chunk, sent = self._under_way[0]
            reply = self._reply_to(sent)
            if isinstance(reply, ForqError):
                self._finish_failed(reply)
                return
            self._under_way.popleft()
            self.results.append(Result(chunk, reply))

    def finish_all(self) -> ForqError | None:
        """The same after an error that is not of a chunk. Returns the error of the first chunk that failed."""
        try:
            self.finish()
        except ForqError as exc:
            return exc
        return None

    def check_last(self, check: Callable[[], None]) -> None:
        """An error of `check` is one of the last chunk."""
        try:
            check()
        except ForqError as exc:
            self.results[-1] = self.results[-1]._replace(reply=exc)
            raise

    def has_several_fates(self) -> bool:
        """Whether some of the jobs are stored, or refused while others may be stored."""
        unknown = [isinstance(reply, OutcomeUnknown) for _, reply in self.results if isinstance(reply, ForqError)]
        return len(unknown) < len(self.results) or len({*unknown}) > 1

    def close_if_unanswered(self) -> None:
        if self._under_way:
            self._link.close()

    def _must_wait(self) -> bool:
        """The iterator may have used the connection, or have paused."""
        return any(isinstance(sent, ForqError) or not self._link.is_under_way(sent) for _, sent in self._under_way)

    def _finish_failed(self, error: ForqError) -> None:
        """The first chunk under way has failed: reads the reply to the other, and repeats them if both may be."""
        sent_chunks = [chunk for chunk, _ in self._under_way]
        replies = [error, *(self._reply_to(sent) for _, sent in list(self._under_way)[1:])]
        self._under_way.clear()
        # If one was carried out, repeating the one before would change their order.
        if all(isinstance(reply, NOT_CARRIED_OUT) for reply in replies):
            for number, chunk in enumerate(sent_chunks):
                replies[number] = self._run(chunk)
                if isinstance(replies[number], ForqError):
                    break
        self.results += map(Result, sent_chunks, replies)
        for reply in replies:
            if isinstance(reply, ForqError):
                raise reply

    def _send(self, chunk: Chunk) -> Sent | ForqError:
        try:
            return self._link.send(self._script, self._base, PROTOCOL, *chunk.args)
        except ForqError as exc:
            return exc

    def _run(self, chunk: Chunk) -> list[Any] | ForqError:
        try:
            return self._checked(self._link.run(self._script, self._base, PROTOCOL, *chunk.args))
        except ForqError as exc:
            return exc

    def _reply_to(self, sent: Sent | ForqError) -> list[Any] | ForqError:
        if isinstance(sent, ForqError):
            return sent
        try:
            return self._checked(self._link.finish(sent))
        except ForqError as exc:
            return exc

    def _checked(self, reply: list[Any]) -> list[Any] | ForqError:
        return reply if reply[0] == OK else error_for(self._queue, reply)


def stored_ids(ids: list[str], reply: list[Any]) -> list[str]:
    """The ids under which the jobs of a call are stored: those of known tokens are older."""
    if len(reply) > 2:
        ids = list(ids)
        for number, stored_id in read_known(reply):
            ids[number - 1] = stored_id
    return ids


def read_known(reply: list[Any]) -> Iterator[tuple[int, str]]:
    """Jobs stored under another id, as (number from 1, id); a skipped job has the id ''."""
    return ((number, stored_id.decode()) for number, stored_id in zip(reply[2::2], reply[3::2], strict=True))


def chunks(jobs: Iterable[NewJob]) -> Iterator[list[NewJob]]:
    """Splits jobs into groups of at most CHUNK_JOBS and, unless one job is larger, CHUNK_BYTES."""
    chunk: list[NewJob] = []
    size = 0
    for job in jobs:
        job_size = len(job[2]) + len(job[6])
        if chunk and (len(chunk) == CHUNK_JOBS or size + job_size > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(job)
        size += job_size
    if chunk:
        yield chunk


def spell_out(jobs: Iterable[NewJob], policy: str) -> list[Any]:
    """The arguments of a call for any jobs."""
    args: list[Any] = [policy]
    for job_id, priority, body, token, run_at, options, after, edges in jobs:
        if after or edges:
            args += (job_id, "\n".join((f"{priority} {run_at} {token} {options}", after, *edges)), body)
        elif options:
            args += (job_id, f"{priority} {run_at} {token} {options}", body)
        else:
            args += (job_id, f"{priority} {run_at} {token}" if token or run_at else priority, body)
    return args


def pack_chunk(jobs: list[NewJob], policy: str, *, repeatable: bool) -> Chunk:
    """`repeatable`: the policy has terms for tokens, which calls of plain jobs ignore."""
    ids, priorities, bodies, tokens, times, options, afters, edges = map(list, zip(*jobs, strict=True))
    linked = any(afters) or any(edges)
    plain = (
        not linked
        and not repeatable
        and not any(tokens)
        and not any(times)
        and not any(options)
        and len(set(priorities)) == 1
    )
    if plain and len(jobs) > 1 and len(set(ids)) == len(ids) and {*map(len, ids)} == {_ID_LENGTH}:
        return Chunk(ids, [f"{priorities[0]} {policy}", " ".join(ids), b"", b"", *bodies])
    return Chunk(ids, spell_out(jobs, policy), linked)


def data_chunks(every_data: Iterable[Any], names: bytes, trace: TraceContext | None) -> Iterator[Chunk]:
    """Packs jobs that have only data of their own. `names`: the identifier and type of all, packed by `pack_names`."""
    if type(every_data) is list or type(every_data) is tuple:
        end = pack_end(trace)
        for each in _pack_items(every_data):
            yield _data_chunk(each, names, end)
    else:
        for each in _split(join_bodies(names, every_data, trace)):
            yield _data_chunk(each, b"", b"")


def _data_chunk(each: list[bytes], start: bytes, end: bytes) -> Chunk:
    ids = new_ids(len(each))
    if len(each) == 1:
        return Chunk(ids, [_GENERATED_POLICY, ids[0], DEFAULT_PRIORITY, start + each[0] + end])
    return Chunk(ids, [DEFAULT_PRIORITY, " ".join(ids), start, end, *each])


def _pack_items(every_data: Sequence[Any]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = at = 0
    while at < len(every_data):
        # Ends with the chunk: a wrong value in the next one must not keep it from being sent.
        number = min(_PACKED_TOGETHER, CHUNK_JOBS - len(chunk))
        part = pack_each(list(every_data[at : at + number]))
        at += number
        chunk += part
        size += sum(map(len, part))
        if size > CHUNK_BYTES:
            *full, chunk = _split(chunk)
            yield from full
            size = sum(map(len, chunk))
        if len(chunk) == CHUNK_JOBS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _split(every_body: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The same as `chunks`, for bodies."""
    chunk: list[bytes] = []
    size = 0
    for body in every_body:
        size += len(body)
        if chunk and (len(chunk) == CHUNK_JOBS or size > CHUNK_BYTES):
            yield chunk
            chunk, size = [], len(body)
        chunk.append(body)
    if chunk:
        yield chunk
