"""recover: pushes the jobs of a failed log to their queues again. Running it again pushes only lines that were left."""

from __future__ import annotations

import os
import sys
from hashlib import sha256

from forq.ctl.client import connect
from forq.ctl.tables import printable, show_json
from forq.ctl.verbs.push import Chunk
from forq.errors import ForqError, InvalidData, UnknownQueue, UsageError
from forq.names import check_job_id, check_queue_name, check_type
from forq.procs import wire
from forq.progress_line import ProgressLine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any, BinaryIO

    from forq.ctl.client import Client

# A line has the data, which must fit in a request, and the error with its traceback.
MAX_LINE_BYTES = 2 * wire.MAX_LINE_BYTES
# What a request has besides the job.
REQUEST_BYTES = 1024
# Of the lines that are left: there may be as many as the file has.
NAMED_LEFT = 10


def recover(args: Namespace) -> int:
    if args.queue is not None:
        check_queue_name(args.queue)
    path = args.file if args.file == "-" else os.path.abspath(args.file)
    try:
        file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115 (stdin must stay open)
        client = None if args.dry_run else connect(args)
        recovery = Recovery(client, "stdin" if path == "-" else path, lines=not args.json)
        recovery.read(file, args.queue)
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}") from exc
    counts = {
        "recovered": recovery.recovered,
        "already_there": recovery.known,
        "left": recovery.left,
        "broken": recovery.broken,
    }
    if args.json:
        show_json(counts | {"dry_run": args.dry_run})
    else:
        verb = "would push" if args.dry_run else "recovered"
        others = f"already there {recovery.known}, left {recovery.left}, broken {recovery.broken}"
        print(f"{verb} {recovery.recovered}, {others}")
    if recovery.left:
        again = "run the same command again when the jobs that have their ids have ended"
        print(f"forqctl: lines that were left: {recovery.left}; {again}", file=sys.stderr)
    return 1 if recovery.broken or recovery.left else 0


class Recovery:
    """One run over one file. Without a client it only reads."""

    def __init__(self, client: Client | None, path: str, *, lines: bool) -> None:
        self.recovered = self.known = self.left = self.broken = 0
        self._client = client
        self._path = path
        self._progress = ProgressLine(lines=lines)
        self._queue = ""
        self._chunk = Chunk()

    def read(self, file: BinaryIO, queue: str | None) -> None:
        size, consumed, number = os.fstat(file.fileno()).st_size, 0, 0
        try:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                consumed += len(line)
                self._take(line, number, queue)
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES + 1)
                    consumed += len(line)
                self._progress.bar(consumed, size, f"{self.recovered} jobs recovered")
            self._send()
        except ForqError as exc:
            raise type(exc)(f"{self._path}: {exc}; recovered before: {self.recovered}") from exc
        finally:
            self._progress.clear()

    def _take(self, line: bytes, number: int, queue: str | None) -> None:
        if not line.strip():
            return
        try:
            own, job = job_on(line)
            size = len(wire.encode(job)) + 1
            if size + REQUEST_BYTES > wire.MAX_LINE_BYTES:
                raise InvalidData("the job is too large for the control socket")
        except UsageError as exc:
            self._name_broken(number, exc)
            return
        if (queue or own) != self._queue or not self._chunk.has_room_for(size):
            self._send()
        self._queue = queue or own
        self._chunk.add(job, size, number)

    def _name_broken(self, number: int, exc: ForqError) -> None:
        self.broken += 1
        self._name(number, str(exc))

    def _name(self, number: int, text: str) -> None:
        self._progress.clear()
        print(f"forqctl: {printable(f'{self._path}: line {number}: {text}')}", file=sys.stderr)

    def _send(self) -> None:
        chunk, self._chunk = self._chunk, Chunk()
        if not chunk.jobs:
            return
        try:
            self._push(chunk.jobs, chunk.numbers)
        except InvalidData:
            # One of them is more than the queue takes: which one shows when they go one by one.
            for job, number in zip(chunk.jobs, chunk.numbers, strict=True):
                try:
                    self._push([job], [number])
                except InvalidData as exc:
                    self._name_broken(number, exc)
        except UnknownQueue as exc:
            raise UnknownQueue(f"line {chunk.first_line}: no queue {self._queue!r}") from exc
        except ForqError as exc:
            raise type(exc)(f"lines {chunk.first_line} to {chunk.last_line}: {exc}") from exc

    def _push(self, jobs: list[dict[str, Any]], numbers: list[int]) -> None:
        if self._client is None:
            self.recovered += len(jobs)
            return
        answer = self._client.call("recover", {"name": self._queue, "jobs": jobs})
        self.recovered += answer["recovered"]
        self.known += answer["known"]
        for at in answer["left"][: max(0, NAMED_LEFT - self.left)]:
            self._name(numbers[at], f"left: job {jobs[at]['id']} of queue {self._queue} is live")
        self.left += len(answer["left"])


def job_on(line: bytes) -> tuple[str, dict[str, Any]]:
    """The queue of a line of the failed log, and the job as the verb `recover` takes it."""
    if len(line) > MAX_LINE_BYTES:
        raise InvalidData(f"longer than {MAX_LINE_BYTES} bytes")
    entry = wire.decode(line)
    if not isinstance(entry, dict) or "data" not in entry:
        raise InvalidData('not an object with "data"')
    queue, job_id = check_queue_name(entry.get("queue")), check_job_id(entry.get("id"))
    job: dict[str, Any] = {"id": job_id, "data": entry["data"], "token": token_of(entry)}
    identifier, priority, job_type = entry.get("identifier"), entry.get("priority"), entry.get("type")
    if identifier is not None and identifier != job_id:
        if not isinstance(identifier, str):
            raise InvalidData("identifier is not text")
        job["identifier"] = identifier
    if priority is not None:
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 9:
            raise InvalidData("priority is not a number from 0 to 9")
        job["priority"] = priority
    if job_type is not None:
        job["type"] = check_type(job_type)
    return queue, job


def token_of(entry: dict[str, Any]) -> str:
    """The same for every line about the same end of the same job."""
    end = entry.get("fence") if entry.get("fence") is not None else entry.get("enqueued_at")
    return "recover:" + sha256(f"{entry['queue']}\0{entry['id']}\0{end}".encode()).hexdigest()[:32]
