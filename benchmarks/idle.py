"""Cost of an idle tree of 50 queues: CPU, wakeups, Redis commands and memory; and how soon a new queue consumes.

python benchmarks/idle.py [--queues 50] [--seconds 30]
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import private_kb, pss_kb
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wakeups(pid: int) -> int:
    """How often the threads of this process have blocked."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def commands(forq: Forq) -> dict[str, int]:
    link = forq.client().link()
    lines = link.call("INFO", "commandstats").decode().splitlines()
    counts = (line.removeprefix("cmdstat_").split(":") for line in lines if line.startswith("cmdstat_"))
    return {name: int(rest.split(",")[0].removeprefix("calls=")) for name, rest in counts}


def create_to_consuming(forq: Forq, number: int) -> float:
    name = f"fresh{number}"
    began = time.monotonic()
    forq.create(name, "record")
    job_id = forq.client().queue(name).enqueue(1)
    wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])
    ended = next(t.time for t in forq.traces("end") if t.job == job_id)
    return ended - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queues", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    with running() as forq:
        starts = [create_to_consuming(forq, number) for number in range(10)]
        for number in range(10, arguments.queues):
            forq.create(f"fresh{number}", "record")
        wait_until(
            lambda: all(c["state"] in ("idle", "parked") for q in forq.status()["queues"] for c in q["children"])
        )
        time.sleep(5)  # lets titles and heartbeats of the last jobs settle: the idle tree is measured
        pids = {process.pid: " ".join(process.cmdline()).strip()[:24] for process in forq.processes()}
        before, ticks_before = commands(forq), {pid: ticks(pid) for pid in pids}
        wakeups_before = {pid: wakeups(pid) for pid in pids}
        time.sleep(arguments.seconds)
        after = commands(forq)
        spent = {pid: ticks(pid) - ticks_before[pid] for pid in pids}
        woken = {pid: (wakeups(pid) - wakeups_before[pid]) / arguments.seconds for pid in pids}
        queue_pids = [c["pid"] for q in forq.status()["queues"] for c in q["children"]]
        private = [private_kb(pid) for pid in queue_pids]
        shares = [pss_kb(pid) for pid in queue_pids]
        print(f"{arguments.queues} queues, {len(pids)} processes, {arguments.seconds:.0f} s, nothing to do")
        total = sum(spent.values())
        hz = os.sysconf("SC_CLK_TCK")
        print(
            f"CPU of the whole tree: {total} ticks of 1/{hz} s, {total / hz / arguments.seconds * 100:.2f} % of a core"
        )
        for pid, used in sorted(spent.items(), key=lambda item: -item[1])[:4]:
            print(f"    {used:4} ticks  {pids[pid]}")
        print(f"wakeups of the whole tree: {sum(woken.values()):.1f} per second")
        for pid, per_second in sorted(woken.items(), key=lambda item: -item[1])[:7]:
            print(f"    {per_second:6.2f} per second  {pids[pid]}")
        used_commands = {name: after[name] - before.get(name, 0) for name in after}
        used_commands = {name: count for name, count in used_commands.items() if count}
        calls = sum(count for name, count in used_commands.items() if name in ("fcall", "blmove", "blpop"))
        print(f"Redis commands from clients: {calls / arguments.seconds / len(queue_pids):.3f} per second and child")
        print(f"    {used_commands}")
        print(
            f"private memory per child: median {statistics.median(private)} kB, max {max(private)} kB; "
            f"PSS median {statistics.median(shares)} kB"
        )
        print(
            f"create -> first job ran (forqctl's start included): median {statistics.median(starts) * 1000:.0f} ms, "
            f"max {max(starts) * 1000:.0f} ms"
        )


if __name__ == "__main__":
    main()
