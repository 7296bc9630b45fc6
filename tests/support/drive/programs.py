"""Programs for exec handlers, written to disk by the test that needs them."""

import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until

# Answers job_finished unless `act(data, payload)` does otherwise; `say` and `answer` write messages.
PREAMBLE = """\
import json, os, signal, subprocess, sys, time

def say(topic, **payload):
    print(json.dumps({"topic": topic, "payload": payload}), flush=True)

def note(text):
    print(text, file=sys.stderr, flush=True)

"""
LOOP = """
for line in sys.stdin:
    payload = json.loads(line)["payload"]
    if act(payload["data"], payload) is not False:
        say("job_finished", uuid=payload["uuid"])
"""


def python_program(directory: Path, act: str, *, before: str = "", name: str = "program") -> str:
    """The handler `exec:…` of a program in Python; `act` is the body of act(data, payload)."""
    body = "".join(f"    {line}\n" for line in act.splitlines())
    return script(directory, f"{PREAMBLE}{before}\ndef act(data, payload):\n{body}{LOOP}", name)


def script(directory: Path, source: str, name: str = "program") -> str:
    path = directory / f"{name}.py"
    path.write_text(source)
    # Unbuffered, because a reader waits for each line.
    return f"exec:{sys.executable} -u {path}"


def shell(directory: Path, source: str, name: str = "program", *, once: bool = True) -> str:
    path = directory / f"{name}.sh"
    path.write_text(f"#!/bin/sh\n{source}\n")
    path.chmod(0o755)
    return f"exec{'-once' if once else ''}:{path}"


# Stores the data of each job in a file of the given directory, or follows an instruction in the data.
ACT = """\
if not isinstance(data, dict) or "do" not in data:
    with open(f"{sys.argv[1]}/{payload['uuid']}", "w") as out: json.dump([os.getpid(), data], out)
    return True
note(f"pid {os.getpid()}")
if data["do"] == "exit": sys.exit(3)
if data["do"] == "signal": os.kill(os.getpid(), 11)
if data["do"] == "noise": print("Listening on port 80", flush=True)
if data["do"] == "other": say("job_finished", uuid="another")
if data["do"] == "fail": say("job_failed", uuid=payload["uuid"], **data["how"])
if data["do"] == "flood":
    for _ in range(16384): os.write(2, b"x" * 65535 + b"\\n")
    print("noise " * 1000, flush=True)
if data["do"] == "sleep":
    if data.get("deaf"): signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if data.get("daemon"): daemon()
    time.sleep(data["seconds"])
    return True
return False
"""
DAEMON = """\
def daemon():
    if os.fork(): return
    os.setsid()
    if os.fork(): os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(f"daemon pid {os.getpid()}")
    time.sleep(600)
"""


def actor(directory: Path) -> str:
    return f"{python_program(directory, ACT, before=DAEMON, name='actor')} {directory}"


def create(forq: Forq, name: str, handler: str, *more: str, **options: object) -> None:
    forq.ctl("create", name, "--handler", handler, *more, *(f"--set={key}={value}" for key, value in options.items()))


def wait_for_counts(forq: Forq, name: str, processed: int, dead: int = 0) -> None:
    def reached() -> bool:
        status = forq.queue_status(name)
        return (status["done"], status["dead"]) == (processed, dead)

    wait_until(reached, 60.0, f"{processed} done and {dead} dead in {name}")


def instances(forq: Forq, name: str) -> set[int]:
    """Every process below those of the queue."""
    pids = [child["pid"] for child in forq.queue_status(name)["children"] if child["pid"]]
    found = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found |= {below.pid for below in psutil.Process(pid).children(recursive=True)}
    return found


def pids_in_log(forq: Forq, job_id: str) -> list[int]:
    """The pids that programs and their daemons logged while they had this job."""
    return [int(pid) for pid in re.findall(rf" {job_id}: (?:daemon )?pid (\d+)\n", forq.log)]
