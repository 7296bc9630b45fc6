"""etc/examples/docker: its Dockerfile in namespaces instead of Docker, with forq as PID 1; and its compose file."""

import os
import re
import shlex
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest

from forq.supervisor.supervisor import STOP_MARGIN_SECONDS
from forq.values import parse_duration
from tests.docs.pages import ROOT, blocks
from tests.examples.running_worker import Worker
from tests.support.drive.container import Image, instructions
from tests.support.drive.readme import EXAMPLES, check_installed, commands_with_output
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.one_server

DOCKER = EXAMPLES / "docker"


def test_pid_1_stops_within_its_grace_and_finishes_the_running_job(worker: Worker) -> None:
    init = psutil.Process(worker.container.pid)
    assert init.uids().real == 10001
    assert re.search(r"^NSpid:.*\t1$", Path(f"/proc/{init.pid}/status").read_text(), re.MULTILINE)
    assert worker.container.run("touch", "/srv/shop/x").stderr.endswith("Read-only file system\n")
    job = worker.enqueue("bill.enqueue(1, seconds=2)")
    wait_until(lambda: worker.job(job)["state"] == "active", what="the job runs")
    began = time.monotonic()
    init.send_signal(signal.SIGTERM)
    assert worker.container.process.wait(30) == 0
    assert time.monotonic() - began < 10
    assert worker.job(job)["state"] == "done"
    assert '"message":"stopped"' in worker.container.log


def test_pid_1_leaves_neither_orphans_nor_zombies(worker: Worker) -> None:
    def orphans() -> list[tuple[str, str]]:
        found = worker.container.processes().values()
        return [(state, title) for state, title in found if not title.startswith("forq: ")]

    job = worker.enqueue("leave_orphans.enqueue()")
    wait_until(lambda: worker.job(job)["state"] == "done", what="the job is done")
    # What a job leaves belongs to its process. An idle one sleeps, so that it reaps after its next job at the latest.
    wait_until(lambda: (psutil.STATUS_SLEEPING, "sleep 0.1") not in orphans(), what="an orphan has ended")
    worker.enqueue("bill.enqueue(1)")
    wait_until(lambda: orphans() == [(psutil.STATUS_SLEEPING, "sleep 300")], what="the ended orphan is reaped")
    # What `docker exec` leaves belongs to PID 1.
    worker.container.begin("sh", "-c", "sleep 0.1 & sleep 301 & exit 0").wait(30)
    wait_until(lambda: (psutil.STATUS_ZOMBIE, "sleep") in orphans(), what="PID 1 has adopted the processes")
    os.kill(worker.main_process(), signal.SIGKILL)
    wait_until(lambda: orphans() == [], what="everything is killed and reaped")
    wait_until(lambda: worker.container.run("forqctl", "status", "--check").returncode == 0, what="a new process runs")


def test_the_commands_of_the_readme_work_in_the_container(worker: Worker) -> None:
    web = worker.container.begin(
        *(str(worker.web_port) if word == "8000" else word for word in service("web")["command"])
    )
    try:
        answers = ["curl", "-s", "-o", os.devnull, f"localhost:{worker.web_port}"]
        wait_until(lambda: subprocess.run(answers, check=False).returncode == 0, 30, "the web application is up")
        for command, expected in readme_session():
            for port, free in (("8000", worker.web_port), ("9464", worker.metrics_port)):
                command = command.replace(port, str(free))
            inside = command.removeprefix("docker compose exec worker ")
            if inside == command:
                done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
            else:
                done = worker.container.run(*shlex.split(inside))
            pattern = ".*".join(map(re.escape, expected.split("…")))
            assert re.fullmatch(pattern, done.stdout.strip()), f"{command}: {done.stdout}{done.stderr}"
    finally:
        worker.container.end(web)


def readme_session() -> list[tuple[str, str]]:
    (session,) = [block for block in blocks(DOCKER / "README.md") if block.language == "console"]
    return commands_with_output(session.text)


def service(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"][name]


def test_the_image_needs_only_packages_of_the_tests_and_copies_files_that_exist() -> None:
    check_installed(DOCKER / "requirements.txt")
    copied = [value.split()[0] for name, value in instructions(DOCKER / "Dockerfile") if name == "COPY"]
    ignored = (DOCKER / ".dockerignore").read_text().splitlines()
    for source in copied:
        # The README makes the wheels.
        assert source in ("--from=build", "wheels") or (DOCKER / source).exists()
        assert source == "--from=build" or f"!{source}" in ignored
    assert "--wheel-dir wheels" in (DOCKER / "README.md").read_text()


def test_docker_waits_longer_than_forq_needs_to_stop() -> None:
    grace_seconds = parse_duration(tomllib.loads((DOCKER / "forq.toml").read_text())["stop_grace"])
    assert parse_duration(service("worker")["stop_grace_period"]) > grace_seconds + STOP_MARGIN_SECONDS
    # A shell around it would get the signal instead.
    assert Image.read(DOCKER).command[0] == "forq"
    assert service("worker")["read_only"] is True
    assert service("worker")["environment"] == service("web")["environment"]


def test_the_dockerfile_of_the_guide_is_that_of_the_example_without_the_wheels() -> None:
    (shown,) = [block for block in blocks(ROOT / "docs/guide/containers.md") if block.language == "dockerfile"]
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    assert shown.text.splitlines() == [
        line for number, line in enumerate(lines) if not re.match("#|.*wheels", line) and (line or number > 3)
    ]
