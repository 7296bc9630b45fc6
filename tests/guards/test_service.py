"""Answers of a supervisor: each command with --json, the control socket itself, the metrics page.

They run one after the other on a queue whose jobs wait, so that the answers are the same in each run; values that still
differ (pids, times, sizes) are replaced by their type.
"""

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.guards.recording import compare, same_python
from tests.support.drive.supervisor import HANDLERS, Forq
from tests.support.drive.wait import wait_until

pytestmark = same_python
# Keys whose values differ from run to run.
VOLATILE = re.compile(r"pid|fence|bytes|seconds|(.*_)?(seconds|ms|at)")


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    forq = Forq()
    forq.config.write_text(f'[metrics]\nlisten = "{forq.directory}/metrics.sock"\n')
    try:
        forq.start()
        yield forq
    finally:
        forq.remove()


def normal(value: Any, forq: Forq, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: normal(each, forq, name) for name, each in value.items()}
    if isinstance(value, list) and key == "held":
        # Depends on which request came first.
        return sorted((normal(each, forq) for each in value), key=lambda each: str(each["worker"]))
    if isinstance(value, list):
        return [normal(each, forq, key) for each in value]
    if isinstance(value, str):
        return words(value, forq)
    if isinstance(value, int | float) and not isinstance(value, bool) and VOLATILE.fullmatch(key):
        return f"<{type(value).__name__}>"
    return value


def words(text: str, forq: Forq) -> str:
    text = text.replace(str(forq.directory), "<dir>").replace(str(HANDLERS), "<handlers>")
    text = re.sub(r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)?", "<time>", text)
    text = re.sub(r"\b[0-9a-f]{32}\b|\b[0-9a-f]{40}\b", "<hex>", text)
    text = re.sub(r"\b(Redis|Valkey) \d+\.\d+\.\d+", "<server>", text)
    return re.sub(r"\bpid \d+", "pid <pid>", text)


COMMANDS = [
    ["ping"],
    ["version"],
    ["create", "mails", "--handler", "traced:record", "--path", str(HANDLERS), "--set", "max_retries=2"],
    ["create", "mails", "--handler", "traced:record", "--path", str(HANDLERS)],
    ["create", "odd name", "--handler", "traced:record"],
    ["pause", "mails"],
    ["push", "mails", '{"n": 1}', "--id", "one"],
    ["push", "mails", '{"n": 2}', "--id", "two", "--in", "1h", "--priority", "3"],
    ["push", "mails", "{"],
    ["push", "nowhere", "1"],
    ["status"],
    ["status", "mails"],
    ["jobs", "mails"],
    ["job", "mails", "one"],
    ["job", "mails", "unknown"],
    ["why", "mails", "one"],
    ["why", "mails", "two"],
    ["set", "mails", "max_retries=3"],
    ["set", "mails", "max_retries=many"],
    ["cancel", "mails", "two"],
    ["schedule", "mails", "nightly", "--cron", "0 3 * * *", "--data", '{"n": 3}'],
    ["unschedule", "mails", "nightly"],
    ["dead", "list", "mails"],
    ["dead", "retry", "mails", "unknown"],
    ["stack", "mails"],
    ["kill", "mails", "one"],
    ["remove", "mails", "one"],
    ["resume", "mails"],
    ["drain", "mails"],
    ["delete", "mails"],
    ["delete", "mails"],
]


def test_every_command_with_json(forq: Forq) -> None:
    lines = []
    for command in COMMANDS:
        done = forq.run_ctl(*command, "--json")
        lines.append(words(f"$ forqctl {' '.join(command)}", forq))
        if done.stdout:
            answer = json.dumps(normal(json.loads(done.stdout), forq), indent=1, ensure_ascii=False)
            lines += answer.splitlines()
        lines += [f"stderr: {words(line, forq)}" for line in done.stderr.splitlines()]
        lines.append(f"exit {done.returncode}")
        if "two" in command and command[0] == "push":
            # The previous job woke it.
            forq.wait_for_child("mails", "parked")
    compare("json.txt", "\n".join(lines) + "\n")


REQUESTS = [
    b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}',
    b'{"jsonrpc": "2.0", "id": 2, "method": "version"}',
    b'{"jsonrpc": "2.0", "id": 3, "method": "no such method"}',
    b'{"jsonrpc": "2.0", "id": 4, "method": "push", "params": {"name": "nowhere", "data": 1}}',
    b'{"jsonrpc": "2.0", "id": 5, "method": "queue.pause", "params": {"wrong": 1}}',
    b'{"jsonrpc": "2.0", "id": 6, "method": "jobs", "params": []}',
    b'{"jsonrpc": "1.0", "id": 7, "method": "ping"}',
    b'{"id": 8}',
    b"[]",
    b"not JSON",
    b"",
]


def test_a_session_with_the_control_socket(forq: Forq) -> None:
    lines = []
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(10)
        link.connect(str(forq.state_dir / "control.sock"))
        stream = link.makefile("rb")
        for request in REQUESTS:
            link.sendall(request + b"\n")
            # A line that is not a request may get no answer: the next one shows that.
            lines.append(f"> {request.decode()}")
            if request:
                answer = json.loads(stream.readline())
                lines.append(f"< {json.dumps(normal(answer, forq), ensure_ascii=False)}")
    compare("control.txt", "\n".join(lines) + "\n")


def test_the_metrics_page(forq: Forq) -> None:
    forq.create("measured")
    forq.client().queue("measured").enqueue(1)
    wait_until(lambda: re.search(r'forq_done_total.*"measured".* 1.0', page(forq)), what="its job is on the page")
    wait_until(lambda: 'role="retry",state="parked"' in page(forq), what="its retry process has started")
    lines = [re.sub(r" [-+0-9.e]+(Inf|NaN)?$", " <number>", words(line, forq)) for line in page(forq).splitlines()]
    compare("metrics.txt", "\n".join(lines) + "\n")


def page(forq: Forq) -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(10)
        link.connect(str(forq.directory / "metrics.sock"))
        link.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return link.makefile("rb").read().decode().partition("\r\n\r\n")[2]
