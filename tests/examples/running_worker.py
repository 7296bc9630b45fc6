"""The image of etc/examples/docker as a container of namespaces, with a Redis server."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forq import Client
from tests.support.drive.container import Container, container, why_not
from tests.support.drive.readme import EXAMPLES, free_port
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until

# More tasks for the worker.
TASKS = """

@app.task
def leave_orphans() -> int:
    import subprocess

    subprocess.run(["sh", "-c", "sleep 0.1 & sleep 300 & exit 0"], check=True)
    return 1
"""


class Worker(NamedTuple):
    context: Path
    container: Container
    redis: Server
    web_port: int
    metrics_port: int

    def enqueue(self, call: str) -> str:
        """In a process of the container, as the web application does."""
        done = self.container.run("python", "-c", f"from shop.tasks import *; print({call}.id)")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, id: str) -> Any:
        return Client(f"redis://127.0.0.1:{self.redis.port}").queue("shop").job(id)

    def main_process(self) -> int:
        (pid,) = [pid for pid, (_, title) in self.container.processes().items() if title.startswith("forq: shop main")]
        return pid


@contextmanager
def running_worker(directory: Path, *, settings: str = "", **how: Any) -> Iterator[Worker]:
    """`settings`: more lines of forq.toml. `how`: arguments of `container`."""
    if reason := why_not():
        pytest.skip(f"no container can be made: {reason}")
    context = directory / "docker"
    shutil.copytree(EXAMPLES / "docker", context, ignore=shutil.ignore_patterns("__pycache__", "wheels"))
    redis_port, web_port, metrics_port = free_port(), free_port(), free_port()
    config = context / "forq.toml"
    config.write_text(settings + config.read_text().replace("0.0.0.0:9464", f"127.0.0.1:{metrics_port}"))
    tasks = context / "shop/tasks.py"
    tasks.write_text(tasks.read_text() + TASKS)
    environ = {"FORQ_REDIS": f"redis://127.0.0.1:{redis_port}", **how.pop("environ", {})}
    with Server(port=redis_port) as redis, container(context, environ, **how) as started:
        started.wait_until_healthy()
        wait_until(lambda: started.run("forqctl", "status", "--check").returncode == 0, what="the queue runs")
        yield Worker(context, started, redis, web_port, metrics_port)
