"""A guided tour of forq in about two minutes: `make demo`. With --fast it does not pause for readers.

Each step announces what will happen, runs real commands, and checks the result; the exit code is 1 if a check fails.
Everything runs in a temporary directory with the embedded server, and is removed at the end.
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
from stage import HERE, CheckFailed, Stage

INTERRUPTED = 130
RATE_JOBS = 15


def start_queues(stage: Stage) -> None:
    stage.title("1. Start queues")
    stage.explain(
        "We start a supervisor with an embedded server and create two queues. Each queue gets its own processes."
    )
    stage.start()
    stage.explain("A handler is a function that takes a job's data and the job:")
    stage.show_code(inspect.getsource(handlers.greet))
    stage.show_code(inspect.getsource(handlers.deliver))
    for name, handler in (("greetings", "greet"), ("parcels", "deliver")):
        stage.ctl("create", name, "--handler", f"handlers:{handler}", "--path", str(HERE))
        stage.wait_for(f"{name} is ready", lambda name=name: "main idle" in title_of_main(stage, name))  # type: ignore[misc]
    pid = str(stage.supervisor_pid)
    shown = stage.run("ps", "-o", "pid,args", "--forest", "-p", pid, "--ppid", pid)
    stage.check(
        "each queue has a main and a retry process",
        all(f"forq: {name} {role}" in shown for name in ("greetings", "parcels") for role in ("main", "retry")),
    )


def title_of_main(stage: Stage, name: str) -> str:
    pid = stage.queue(name)["children"][0]["pid"]
    return " ".join(psutil.Process(pid).cmdline()) if pid is not None else ""


def run_jobs(stage: Stage) -> None:
    stage.title("2. Run jobs")
    stage.explain("The application below enqueues jobs; drain waits until the queue is empty.")
    program = HERE / "application.py"
    stage.show_code(program.read_text().partition("\n\n")[2])
    stage.run("python", str(program))
    stage.ctl("drain", "greetings")
    stage.ctl("status", "greetings")
    stage.check("1001 jobs are done, each ran once", stage.queue("greetings")["done"] == 1001)
    stage.check("the handler was called 1001 times", len(stage.notes("greetings", "began")) == 1001)


def kill_a_worker(stage: Stage) -> None:
    stage.title("3. Kill a worker with -9")
    stage.explain("We kill the process of a running job. The job must not be lost.")
    # The job waits for this file, so that it does not end before the kill.
    door = stage.directory / "door"
    stage.ctl("push", "parcels", json.dumps({"seconds": 2, "door": str(door)}), "--id", "parcel-1")
    stage.wait_for("parcel-1 runs", lambda: stage.notes("parcels", "began"))
    first = stage.notes("parcels", "began")[0].pid
    stage.show_command(f"kill -9 {first}")
    os.kill(first, signal.SIGKILL)
    stage.wait_for("it runs again", lambda: len(stage.notes("parcels", "began")) == 2)
    shown = stage.ctl("job", "parcels", "parcel-1")
    stage.ctl("why", "parcels", "parcel-1")
    second = stage.notes("parcels", "began")[1].pid
    stage.check(f"it runs again, in process {second} instead of {first}", first != second)
    stage.check("the killed attempt is listed and counted", "stalled" in shown and "SIGKILL" in shown)
    stage.show_command("touch door")
    door.touch()
    stage.ctl("drain", "parcels")
    stage.check("it was completed once", len(stage.notes("parcels", "ended")) == 1)


def kill_daemons(stage: Stage) -> None:
    stage.title("4. Kill daemons of a handler")
    stage.explain("This handler forks twice and starts a new session, as daemons do. No process may outlive its queue.")
    stage.show_code(inspect.getsource(handlers.leave_daemons))
    stage.ctl("create", "untidy", "--handler", "handlers:leave_daemons", "--path", str(HERE))
    stage.ctl("push", "untidy", "3")
    stage.wait_for("three daemons run", lambda: len(stage.notes("untidy", "daemon")) == 3)
    pids = [note.pid for note in stage.notes("untidy", "daemon")]
    daemons = [psutil.Process(pid) for pid in pids]
    listed = ",".join(map(str, pids))
    stage.run("ps", "-o", "pid,ppid,sid,args", "-p", listed)
    stage.check("three daemons run", all(daemon.is_running() for daemon in daemons))
    stage.ctl("delete", "untidy", "--force")
    stage.run("ps", "-o", "pid,ppid,sid,args", "-p", listed, code=1)
    stage.check("none of them is left", not any(daemon.is_running() for daemon in daemons))


def time_out_a_job(stage: Stage) -> None:
    stage.title("5. Time out a job")
    stage.explain(
        "This job hangs, and its timeout is four seconds. We can see its stack while it runs, and after it was killed."
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
    # On a slow machine it may have timed out before.
    stage.check("its stack shows where it hangs", where in stack or "no job is running" in stack)
    stage.check("the stack at the timeout was kept", where in shown and "TimeoutError" in shown)


def limit_the_rate(stage: Stage) -> None:
    stage.title("6. Limit the rate")
    stage.explain(f"At most five jobs per second may start, on all machines together. We push {RATE_JOBS} at once.")
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
    # 14 intervals of 200 ms, less some tolerance: Redis and the handler read their clocks at different times.
    stage.check(f"all {RATE_JOBS} ran, spread over {seconds:.1f} s", len(times) == RATE_JOBS and seconds > 2.6)


def audit_the_journals(stage: Stage) -> None:
    stage.title("7. Audit the journals")
    stage.explain(
        "Each queue has a journal, chained by hashes. The audit checks all journals for lost or duplicated jobs."
    )
    if find_spec("pyspark") is None:
        print("  The audit needs Spark, which is not installed: pip install 'forq[pipeline,java]' (500 MB).")
        print("  Then, with a supervisor running: forq pipeline audit")
        return
    verdict = stage.run("forq", "pipeline", "audit").splitlines()[-1]
    stage.check("the audit found nothing wrong", verdict.endswith(": clean"))


STEPS = (
    start_queues,
    run_jobs,
    kill_a_worker,
    kill_daemons,
    time_out_a_job,
    limit_the_rate,
    audit_the_journals,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tour.py", description="a guided tour of forq in about two minutes")
    parser.add_argument("--fast", action="store_true", help="do not pause for readers")
    parser.add_argument("--no-audit", dest="audit", action="store_false", help="skip the last step, which needs Spark")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    steps = [step for step in STEPS if args.audit or step is not audit_the_journals]
    with Stage(args.fast) as stage:
        try:
            for step in steps:
                step(stage)
        except CheckFailed as exc:
            print(f"\nCHECK FAILED: {exc}\n\nThe supervisor's log:\n{stage.log()}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted; cleaning up", file=sys.stderr)
            return INTERRUPTED
        stage.title("Done")
        stage.explain("All checks passed. Next: read README.md, or run `make run` to try forq yourself.")
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
