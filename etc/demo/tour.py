"""A guided tour of forq, of about two minutes: `make demo`. With --fast it does not wait for readers.

Each step says what will happen, runs the real command, and checks what it said; the exit code is 1 if something is not
so. All of it happens in a temporary directory, with the embedded server, and is gone afterwards.
"""

import argparse
import inspect
import json
import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

import handlers
import psutil
from stage import HERE, NotSo, Stage

INTERRUPTED = 130
RATE_JOBS = 15


def queues_come_up(stage: Stage) -> None:
    stage.title("1. Queues come up")
    stage.say("A supervisor starts, with a server of its own. Then we make two queues; each gets processes of its own.")
    stage.start()
    stage.say("A handler is a function of a job's data and the job itself:")
    stage.show_code(inspect.getsource(handlers.greet))
    stage.show_code(inspect.getsource(handlers.deliver))
    for name, handler in (("greetings", "greet"), ("parcels", "deliver")):
        stage.ctl("create", name, "--handler", f"handlers:{handler}", "--path", str(HERE))
        stage.wait_for(f"{name} is ready", lambda name=name: "main idle" in title_of_main(stage, name))  # type: ignore[misc]
    pid = str(stage.supervisor_pid)
    shown = stage.run("ps", "-o", "pid,args", "--forest", "-p", pid, "--ppid", pid)
    stage.claim(
        "each queue has a main and a retry process",
        all(f"forq: {name} {role}" in shown for name in ("greetings", "parcels") for role in ("main", "retry")),
    )


def title_of_main(stage: Stage, name: str) -> str:
    pid = stage.queue(name)["children"][0]["pid"]
    return " ".join(psutil.Process(pid).cmdline()) if pid is not None else ""


def jobs_flow(stage: Stage) -> None:
    stage.title("2. Jobs flow")
    stage.say("This is what the application does; drain waits until nothing is left.")
    program = HERE / "application.py"
    stage.show_code(program.read_text().partition("\n\n")[2])
    stage.run("python", str(program))
    stage.ctl("drain", "greetings")
    stage.ctl("status", "greetings")
    stage.claim("1001 jobs are done, each ran once", stage.queue("greetings")["done"] == 1001)
    stage.claim("and the handler was called 1001 times", len(stage.notes("greetings", "began")) == 1001)


def a_worker_is_killed(stage: Stage) -> None:
    stage.title("3. A worker is killed with -9")
    stage.say("A parcel is on its way when somebody kills its process. No job may be lost by that.")
    # It cannot arrive before the tour says so, however slowly somebody reads.
    door = stage.directory / "door"
    stage.ctl("push", "parcels", json.dumps({"seconds": 2, "door": str(door)}), "--id", "parcel-1")
    stage.wait_for("parcel-1 is on its way", lambda: stage.notes("parcels", "began"))
    first = stage.notes("parcels", "began")[0].pid
    stage.show_command(f"kill -9 {first}")
    os.kill(first, signal.SIGKILL)
    stage.wait_for("it runs again", lambda: len(stage.notes("parcels", "began")) == 2)
    shown = stage.ctl("job", "parcels", "parcel-1")
    stage.ctl("why", "parcels", "parcel-1")
    second = stage.notes("parcels", "began")[1].pid
    stage.claim(f"it runs again, in process {second} instead of {first}", first != second)
    stage.claim("the attempt that died is known, and counted", "stalled" in shown and "SIGKILL" in shown)
    stage.show_command("touch door")
    door.touch()
    stage.ctl("drain", "parcels")
    stage.claim("it has arrived, once", len(stage.notes("parcels", "ended")) == 1)


def daemons_are_wiped_out(stage: Stage) -> None:
    stage.title("4. A handler that leaves daemons behind")
    stage.say("This one forks twice, with a session of its own, as daemons do. Nothing of it may outlive its queue.")
    stage.show_code(inspect.getsource(handlers.leave_daemons))
    stage.ctl("create", "untidy", "--handler", "handlers:leave_daemons", "--path", str(HERE))
    stage.ctl("push", "untidy", "3")
    stage.wait_for("three daemons run", lambda: len(stage.notes("untidy", "daemon")) == 3)
    pids = [note.pid for note in stage.notes("untidy", "daemon")]
    daemons = [psutil.Process(pid) for pid in pids]
    listed = ",".join(map(str, pids))
    stage.run("ps", "-o", "pid,ppid,sid,args", "-p", listed)
    stage.claim("three daemons run", all(daemon.is_running() for daemon in daemons))
    stage.ctl("delete", "untidy", "--force")
    stage.run("ps", "-o", "pid,ppid,sid,args", "-p", listed, code=1)
    stage.claim("none of them does any more", not any(daemon.is_running() for daemon in daemons))


def a_job_hangs(stage: Stage) -> None:
    stage.title("5. A job that hangs")
    stage.say(
        "Its timeout is four seconds. Until then we can look where it is; then it is killed, with its stack kept."
    )
    stage.show_code(inspect.getsource(handlers.hang))
    arguments = ("--set", "timeout=4s", "--set", "max_timeouts=0")
    stage.ctl("create", "stuck", "--handler", "handlers:hang", "--path", str(HERE), *arguments)
    stage.ctl("push", "stuck", "null", "--id", "hanging")
    stage.wait_for("it hangs", lambda: stage.notes("stuck", "began"))
    stack = stage.run("forqctl", "stack", "stuck")
    stage.wait_for("it is dead", lambda: stage.queue("stuck")["dead"] == 1)
    stage.ctl("why", "stuck", "hanging")
    shown = stage.ctl("dead", "show", "stuck", "hanging")
    where = "in wait_for_a_reply_that_never_comes"
    # On a slow machine its time may be over before anybody looks.
    stage.claim("it was seen where it hangs", where in stack or "no job is running" in stack)
    stage.claim("the stack at its end is kept", where in shown and "TimeoutError" in shown)


def a_rate_limit(stage: Stage) -> None:
    stage.title("6. A rate limit")
    stage.say(f"At most five jobs per second may begin, over all machines. {RATE_JOBS} are pushed at once.")
    arguments = ("--set", "rate=5/1s", "--set", "burst=1")
    stage.ctl("create", "polite", "--handler", "handlers:greet", "--path", str(HERE), *arguments)
    many = stage.directory / "polite.jsonl"
    many.write_text(
        "".join(f'{{"id": "p{number}", "data": {{"name": "guest {number}"}}}}\n' for number in range(RATE_JOBS))
    )
    stage.ctl("push", "polite", "--records", "--file", many.name)
    stage.ctl("status", "polite")
    stage.ctl("drain", "polite")
    times = sorted(note.time for note in stage.notes("polite", "began"))
    seconds = times[-1] - times[0]
    # 14 intervals of 200 ms; the clocks of Redis and of the handler are read at different moments.
    stage.claim(
        f"all {RATE_JOBS} ran, within {seconds:.1f} s and not sooner", len(times) == RATE_JOBS and seconds > 2.6
    )


def the_audit(stage: Stage) -> None:
    stage.title("7. The audit")
    stage.say("Each queue has a journal, chained by hashes. The audit reads them all: was anything lost, or doubled?")
    if find_spec("pyspark") is None:
        print("  The audit needs Spark, which is not installed: pip install 'forq[pipeline,java]' (500 MB).")
        print("  Then, with a supervisor running: forq pipeline audit")
        return
    said = stage.run("forq", "pipeline", "audit").splitlines()[-1]
    stage.claim("it says that all is clean", said.endswith(": clean"))


STEPS = (
    queues_come_up,
    jobs_flow,
    a_worker_is_killed,
    daemons_are_wiped_out,
    a_job_hangs,
    a_rate_limit,
    the_audit,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tour.py", description="a guided tour of forq, of about two minutes")
    parser.add_argument("--fast", action="store_true", help="without pauses for readers")
    parser.add_argument(
        "--no-audit", dest="audit", action="store_false", help="without the last step, which needs Spark"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    steps = [step for step in STEPS if args.audit or step is not the_audit]
    with Stage(args.fast) as stage:
        try:
            for step in steps:
                step(stage)
        except NotSo as exc:
            print(f"\nNOT SO: {exc}\n\nThe supervisor's log:\n{stage.log()}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted; cleaning up", file=sys.stderr)
            return INTERRUPTED
        stage.title("That was it")
        stage.say("Everything was as the tour said. Next: README.md, or `make run` for a supervisor to play with.")
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
