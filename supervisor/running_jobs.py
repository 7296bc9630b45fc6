"""The verbs about jobs that run in this supervisor's processes: kill, stack."""

import time
from collections.abc import Callable
from typing import Any

from forq.errors import UnknownJob
from forq.procs.process import stack_of_thread
from forq.supervisor.connection import Request
from forq.supervisor.queue_process import QueueProcess
from forq.supervisor.queues import Queues
from forq.values import check_job_id


class RunningJobs:
    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def table(self) -> dict[str, Callable[[Request], None]]:
        return {"kill": self.kill, "stack": self.stack}

    def kill(self, request: Request) -> None:
        """Ends a running job; it is cancelled, or with `retry` given back uncounted."""
        unit, job_id = self._queues.find(request.params.get("name")), check_job_id(request.params.get("id"))
        found = unit.running_job(job_id)
        if found is None:
            raise UnknownJob(f"queue {unit.spec.name!r} runs no job {job_id!r} in a process of this supervisor")
        process, slot, word = found
        outcome = "interrupted" if request.params.get("retry") else "cancelled"
        process.condemn(slot, word, outcome, "killed")
        request.reply(
            {
                "id": job_id,
                "pid": process.pid,
                "outcome": outcome,
                # The process is killed when these have ended.
                "others": [
                    other.job.decode("utf-8", "replace") for other in process.busy() if other.number != slot.number
                ],
            }
        )

    def stack(self, request: Request) -> None:
        """Where each running job of the queue is."""
        processes = self._queues.find(request.params.get("name")).busy_processes()
        stacks: list[dict[str, Any]] = []
        left = set(processes)

        def dumped(process: QueueProcess, dump: str) -> None:
            stacks.extend(_read_dump(process, dump))
            left.discard(process)
            if not left:
                request.reply({"stacks": stacks})

        for process in processes:
            process.stacks.take(lambda dump, process=process: dumped(process, dump))  # type: ignore[misc]
        if not processes:
            request.reply({"stacks": []})


def _read_dump(process: QueueProcess, dump: str) -> list[dict[str, Any]]:
    """One entry per running job; of a process that is still starting, one for its main thread."""
    now_ns = time.monotonic_ns()
    common = {"role": process.role.name.lower(), "pid": process.pid}
    if not process.ready:
        return [{**common, "job": None, "seconds": None, "stack": dump.strip() or None}]
    return [
        {
            **common,
            "job": slot.job.decode("utf-8", "replace"),
            "seconds": round((now_ns - slot.started_ns) / 1e9, 3),
            "stack": stack_of_thread(dump, slot.thread) or None,
        }
        for slot in process.busy()
    ]
