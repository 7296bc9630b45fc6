"""Runs attempts of exec handlers without a queue."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from forq import Job
from forq.workers.attempt import describe_failure
from forq.workers.exec_handlers import ExecHandler, ProgramFailed

Made = Callable[[str], ExecHandler]


def job(job_id: str = "j1", counts: tuple[int, int, int] = (0, 0, 0)) -> Job:
    return Job("q", job_id, "mine", "mail", 3, 1700000000.5, 9, counts)


def failure_of(handler: Callable[[Any, Job], None], data: Any = None, of: Job | None = None) -> dict[str, Any]:
    with pytest.raises(ProgramFailed) as caught:
        handler(data, of or job())
    return orjson.loads(describe_failure(caught.value).error)  # type: ignore[no-any-return]


def pid_of(handler: ExecHandler) -> int:
    (program,) = handler.programs()
    return program.pid
