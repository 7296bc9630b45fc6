"""The limits of one supervisor and one server: figures, and how they grow.

    python benchmarks/scale.py [--queues 1000] [--jobs 1000000] [--scheduled 100000] [--supervisors 10] [--only ...]

1. `queues`: one supervisor with --queues queues (two processes each): start, memory, status, idle CPU, stop. While they
   run, the jobs are spread over all of them.
2. `backlog`: the jobs in one queue: their memory, and the cost of status and drain.
3. `scheduled`: jobs that are all due in the same second: how late they run.
4. `supervisors`: --supervisors of them on one server, with one queue in common: their shares, their idle traffic.

Each part has its own server on a private socket. Parts that exceed limits of this user or machine are skipped, and the
limit is named. Python's bytecode is kept in its own directory, as in an installation: with PYTHONDONTWRITEBYTECODE set,
each process would compile its handlers again, which takes longer than everything else.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import percentile
from benchmarks.processes import Requests, cpu_seconds, private_kb, pss_kb, tree, used_memory
from forq.client import new_job
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

IDLE_SECONDS = 10.0
# Counted: the supervisor has 5 per queue (a leash and a pidfd per process, a FIFO), the server 2 connections.
FDS_PER_QUEUE = 5
MB_PER_CHILD = 5


def says(what: str, value: float, unit: str, target: str = "") -> None:
    print(f"  {what:<52} {value:>12,.2f} {unit}{f'   (target {target})' if target else ''}", flush=True)


@contextmanager
def timed(what: str, target: str = "") -> Iterator[None]:
    began = time.monotonic()
    yield
    says(what, time.monotonic() - began, "s", target)


def obstacles(queues: int) -> list[str]:
    """The limits that do not allow this many queues."""
    processes = 2 * queues + 50
    wanted = {
        "ulimit -u (processes)": (processes, resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        "ulimit -n (open files)": (FDS_PER_QUEUE * queues + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "kernel.pid_max": (2 * processes, int(Path("/proc/sys/kernel/pid_max").read_text())),
        "available memory, MB": (2 * queues * MB_PER_CHILD, available_mb()),
    }
    return [
        f"{name}: {needed:,} needed, {allowed:,} allowed"
        for name, (needed, allowed) in wanted.items()
        if allowed not in (resource.RLIM_INFINITY,) and needed > allowed
    ]


def available_mb() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) // 1024


def settings(queues: int, handler: str = "still:noop") -> str:
    head = f"max_queues = {queues}\ncapacity = {20 * queues + 1000}\n"
    queue = f'handler = "{handler}"\npath = ["{HANDLERS}"]\n'
    return head + "".join(f"[queues.q{number}]\n{queue}" for number in range(queues))


def rested(forq: Forq, queues: int) -> bool:
    """Whether every queue has both processes, waiting for work. Titles show that first: polling the status of a
    thousand queues would take much of the CPU that they need to start."""
    below = Path(f"/proc/{forq.pid}/task/{forq.pid}/children").read_text().split()
    titles = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below]
    if sum(b" idle " in title or b" parked " in title for title in titles) < 2 * queues:
        return False
    children = [child["state"] for queue in forq.status()["queues"] for child in queue["children"]]
    return len(children) == 2 * queues and set(children) <= {"idle", "parked"}


@contextmanager
def bytecode() -> Iterator[None]:
    """For all processes started here."""
    with tempfile.TemporaryDirectory(prefix="forq-bytecode-") as directory:
        before = dict(os.environ)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = directory
        # The first one compiles its imports; the measured ones read the result.
        with running(settings=settings(1)) as forq:
            forq.wait_for_child("q0")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def many_queues(server: Server, given: argparse.Namespace) -> None:
    queues = given.queues
    if found := obstacles(queues):
        print(f"  skipped: the limits do not allow {queues:,} queues\n    " + "\n    ".join(found))
        return
    forq = Forq(redis=server.url, settings=settings(queues))
    try:
        with timed(f"start until all {2 * queues:,} processes wait for work", "30 s at 1,000 queues"):
            forq.start(ready=False)
            wait_until(lambda: forq.run_ctl("ping").returncode == 0, 120.0, "the supervisor answers")
            slowly(lambda: rested(forq, queues), 300.0)
        used = {process.pid: cpu_seconds(process.pid) for process in tree(forq.pid)}
        says("  CPU of the tree", sum(used.values()), "s")
        says("  CPU of the supervisor", used[forq.pid], "s")
        says("  CPU of each process of a queue, median", statistics.median(used.values()) * 1000, "ms")
        says("  CPU of the server", cpu_seconds(server.pid), "s")
        check_tree(forq, server, queues)
        spread(forq, server, queues, given.jobs)
        with timed("stop", "15 s"):
            forq.stop(120.0)
    finally:
        forq.remove()


def check_tree(forq: Forq, server: Server, queues: int) -> None:
    processes = [process.pid for process in tree(forq.pid)]
    sizes = {pid: pss_kb(pid) / 1024 for pid in processes}
    says("memory of the tree (PSS)", sum(sizes.values()), "MB")
    private = [private_kb(pid) / 1024 for pid in processes]
    says("  private memory of a process, median", statistics.median(private), "MB", "5 MB")
    says("  of the supervisor", sizes[forq.pid], "MB")
    took = []
    for _ in range(3):
        began = time.monotonic()
        forq.status()
        took.append(time.monotonic() - began)
    says("forqctl status --json, all queues, median of 3", statistics.median(took), "s", "1 s")
    before = {pid: cpu_seconds(pid) for pid in processes}
    server_before, requests = cpu_seconds(server.pid), Requests(server)
    time.sleep(IDLE_SECONDS)
    spent = {pid: cpu_seconds(pid) - before[pid] for pid in processes}
    says("idle CPU of the tree", sum(spent.values()) / IDLE_SECONDS * 100, "% of a core", "2 %")
    for pid, seconds in sorted(spent.items(), key=lambda item: -item[1])[:4]:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        says(f"  {title[:46]}", seconds / IDLE_SECONDS * 100, "%")
    says("idle CPU of the server", (cpu_seconds(server.pid) - server_before) / IDLE_SECONDS * 100, "%")
    says("requests to the server per second and queue", requests.count() / IDLE_SECONDS / queues, "/s")


def spread(forq: Forq, server: Server, queues: int, jobs: int) -> None:
    """Spreads the jobs over all queues, while their processes run."""
    client, each = forq.client(), jobs // queues
    with timed(f"{jobs:,} jobs over {queues:,} queues, enqueued and run"):
        for number in range(queues):
            client.queue(f"q{number}").enqueue_many({"n": n} for n in range(each))
        left = set(range(queues))

        def empty() -> bool:
            """Empty queues are not checked again; the first one with jobs ends the check."""
            for number in sorted(left, reverse=True):
                if client.queue(f"q{number}").status()["done"] < each:
                    return False
                left.discard(number)
            return True

        slowly(empty, 600.0, pause_seconds=0.05)


def slowly(condition: Callable[[], bool], seconds: float, pause_seconds: float = 0.5) -> None:
    """Polls twice a second: polling a thousand queues more often would be a load itself."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not idle within {seconds:.0f} s")
        time.sleep(pause_seconds)


def long_backlog(server: Server, given: argparse.Namespace) -> None:
    with running(redis=server.url) as forq:
        forq.create("long", "noop")
        forq.ctl("pause", "long")
        queue, memory = forq.client().queue("long"), used_memory(server)
        with timed(f"{given.jobs:,} jobs into one queue"):
            queue.enqueue_many({"n": n} for n in range(given.jobs))
        says("memory of the server per waiting job", (used_memory(server) - memory) / given.jobs, "bytes")
        with timed("forqctl status long", "1 s"):
            forq.status("long")
        with timed("drained"):
            forq.ctl("resume", "long")
            wait_until(lambda: queue.status()["done"] == given.jobs, 600.0, "the queue is empty")
        says("remaining memory of the server (journal)", (used_memory(server) - memory) / 1e6, "MB")


def due_at_once(server: Server, given: argparse.Namespace) -> None:
    with running(redis=server.url) as forq:
        # This handler writes one line per job: a slower drain, but each job records when it ran.
        forq.create("due", "record")
        queue, lead_seconds = forq.client().queue("due"), 3 + given.scheduled / 10_000
        offset = time.time() - time.monotonic()
        due = time.time() + lead_seconds
        with timed(f"{given.scheduled:,} jobs scheduled for the same second"):
            queue.enqueue_jobs(new_job({"n": n}, run_at=due) for n in range(given.scheduled))
        if time.time() > due:
            print("  they were due before all were stored: this machine is too busy for this figure")
        wait_until(lambda: queue.status()["done"] == given.scheduled, 600.0, "all have run")
        late_ms = [(trace.time + offset - due) * 1000 for trace in forq.traces("end")]
        says("delay of the first", min(late_ms), "ms")
        says("median delay", percentile(late_ms, 50), "ms")
        says("the last within", max(late_ms), "ms")
        says("jobs that ran too early", sum(late < -1.0 for late in late_ms), "")


def many_supervisors(server: Server, given: argparse.Namespace) -> None:
    count = given.supervisors
    with ExitStack() as stack:
        with timed(f"start of {count} supervisors, one after the other"):
            every = [
                stack.enter_context(running(redis=server.url, settings=settings(1, "traced:record")))
                for _ in range(count)
            ]
        for forq in every:
            forq.wait_for_child("q0")
        requests = Requests(server)
        time.sleep(IDLE_SECONDS)
        says("idle: requests per second and supervisor", requests.count() / IDLE_SECONDS / count, "/s")
        queue, jobs = every[0].client().queue("q0"), min(given.jobs, 200_000)
        with timed(f"{jobs:,} jobs of their one queue, enqueued and run"):
            queue.enqueue_many({"n": n} for n in range(jobs))
            wait_until(lambda: queue.status()["done"] == jobs, 300.0, "all have run")
        shares = [len(forq.traces("end")) for forq in every]
        says("fewest jobs of one supervisor", min(shares), "jobs")
        says("most jobs of one supervisor", max(shares), "jobs")


PARTS: dict[str, Callable[[Server, argparse.Namespace], None]] = {
    "queues": many_queues,
    "backlog": long_backlog,
    "scheduled": due_at_once,
    "supervisors": many_supervisors,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queues", type=int, default=1_000)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--scheduled", type=int, default=100_000)
    parser.add_argument("--supervisors", type=int, default=10)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    given = parser.parse_args()
    with bytecode():
        run_parts(given)


def run_parts(given: argparse.Namespace) -> None:
    for name in given.only.split(","):
        server = Server()
        print(name, flush=True)
        try:
            server.start()
            PARTS[name](server, given)
        except AssertionError as exc:
            print(f"  failed: {str(exc)[:300]}")
        finally:
            server.remove()


if __name__ == "__main__":
    main()
