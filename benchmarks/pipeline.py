"""Cost of the pipeline: a million events of real runs, ingested while its driver is killed, and audited.

    python benchmarks/pipeline.py [--events 1000000] [--kills 5] [--keep DIR]

1. Six queues with failures, retries, fail handlers and jobs that kill their process; workers are killed at random.
2. `forq pipeline ingest`, killed with -9 in mid-batch --kills times, then run to its end: rows = events, no duplicate.
3. `forq pipeline audit` of that history.
4. A DataFrame of as many rows written as jobs, killed half way and written again: exactly as many jobs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from tests.support.drive.supervisor import BIN, Forq, running
from tests.support.drive.wait import wait_until

QUEUES = 6
HANDLERS = Path(__file__).parent / "handlers"
# enqueued, claimed, done
EVENTS_PER_JOB = 3.05


def live(forq: Forq, events: int) -> None:
    per_queue = int(events / EVENTS_PER_JOB / QUEUES)
    names = [f"q{number}" for number in range(QUEUES)]
    for name in names:
        settings = ["max_retries=1", "min_backoff=50ms", "journal_max=4gb", "dead_max=1000000", "fail_min_backoff=50ms"]
        sets = [f"--set={setting}" for setting in settings]
        fail = () if name == "q0" else ("--fail-handler", "life:on_fail")
        forq.ctl("create", name, "--handler", "life:handle", "--path", str(HANDLERS), *fail, *sets)
    began = time.monotonic()
    for name in names:
        queue = forq.client().queue(name)
        for start in range(0, per_queue, 5000):
            queue.enqueue_many([{"n": n} for n in range(start, min(start + 5000, per_queue))])
    kills = 0
    while not all_quiet(forq, names):
        child = forq.child(random.choice(names))
        if child["pid"] is not None and random.random() < 0.3:
            os.kill(child["pid"], signal.SIGKILL)
            kills += 1
        time.sleep(0.2)
    print(f"{per_queue * QUEUES:,} jobs in {time.monotonic() - began:.0f} s, {kills} workers killed")


def all_quiet(forq: Forq, names: list[str]) -> bool:
    busy = ("waiting", "scheduled", "active", "fail_jobs", "retry")
    return not any(queue[key] for queue in forq.status(*names)["queues"] for key in busy)


def events_in_journals(forq: Forq) -> int:
    from forq.broker.journal import read_entry
    from forq.broker.link import Link

    link = Link(forq.url)
    total = 0
    for number in range(QUEUES):
        for stream in (f"forq:queue:{{q{number}}}:events", f"forq:queue:{{q{number}}}:fail:events"):
            start = "-"
            while entries := link.call("XRANGE", stream, start, "+", "COUNT", 1000):
                for _, flat in entries:
                    total += sum(1 for _ in read_entry(dict(zip(flat[::2], flat[1::2], strict=True))))
                start = "(" + entries[-1][0].decode()
    link.close()
    return total


def ingest(forq: Forq, history: Path, kills: int) -> None:
    command = [str(BIN / "forq"), "pipeline", "ingest", "--redis", forq.url, "--history", str(history), "--json"]
    for number in range(kills):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        before = written(history)
        wait_until(lambda before=before: written(history) > before, 180.0, "it writes")  # type: ignore[misc]
        time.sleep(random.random())
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"driver killed ({number + 1}), {written(history):,} bytes written")
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"ingest ended with {done.returncode} after {time.monotonic() - began:.1f} s: {done.stdout.strip()[-400:]}")
    if done.returncode:
        print(done.stderr[-2000:])


def written(history: Path) -> int:
    """Bytes of data; files may appear and disappear meanwhile."""
    total = 0
    for folder, _, names in os.walk(history):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size if ".parquet" in name else 0
    return total


def rows_and_keys(history: Path) -> tuple[int, int]:
    import pyarrow.dataset as dataset

    columns = ["queue", "epoch", "sequence", "position"]
    table = dataset.dataset(str(history), format="parquet", partitioning="hive", exclude_invalid_files=True).to_table(
        columns
    )
    return table.num_rows, table.group_by(columns).aggregate([]).num_rows


def audit(forq: Forq, history: Path) -> None:
    command = [str(BIN / "forq"), "pipeline", "audit", "--redis", forq.url, "--history", str(history)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"audit ended with {done.returncode} after {time.monotonic() - began:.1f} s")
    print(done.stdout[-3000:], done.stderr[-1500:] if done.returncode else "")


def journal_cost(forq: Forq, rounds: int = 5, jobs: int = 60_000) -> None:
    """Drain rate and server time of no-op jobs with and without the journal, interleaved."""
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    server = psutil.Process(next(p.pid for p in forq.processes() if "(embedded)" in " ".join(p.cmdline())))
    for number in range(rounds):
        for journal in found:
            name = f"cost-{journal}-{number}"
            forq.create(name, journal=journal, journal_max="1gb")
            forq.ctl("pause", name)
            queue = forq.client().queue(name)
            for _ in range(jobs // 5000):
                queue.enqueue_many([{"n": 1}] * 5000)
            before, began = server.cpu_times(), time.monotonic()
            forq.ctl("resume", name)
            wait_until(lambda queue=queue: queue.status()["done"] == jobs, 60.0, "drained")  # type: ignore[misc]
            seconds, after = time.monotonic() - began, server.cpu_times()
            micros = (after.user + after.system - before.user - before.system) / jobs * 1e6
            found[journal].append((jobs / seconds, micros))
            forq.ctl("delete", name, "--force")
    rates = {
        journal: [statistics.median(column) for column in zip(*runs, strict=True)] for journal, runs in found.items()
    }
    for journal, (rate, micros) in rates.items():
        print(f"journal {journal}: {rate:,.0f} jobs/s, {micros:.1f} µs of the server per job")


SINK = """
import sys
from forq.pipeline.session import spark_session
spark = spark_session("sink")
rows = spark.range({rows}).selectExpr("'sunk' as queue", "named_struct('n', id) as data", "cast(id as string) as id")
rows.write.format("forq").option("redis", {url!r}).option("run", "bench").mode("append").save()
"""


def sink(forq: Forq, rows: int) -> None:
    forq.client().create_queue("sunk", journal_max="4gb")
    program = [sys.executable, "-c", SINK.format(rows=rows, url=forq.url)]
    process = subprocess.Popen(program, start_new_session=True, stderr=subprocess.DEVNULL)
    waiting = forq.client().queue("sunk").status
    wait_until(lambda: waiting()["waiting"] > rows / 2, 300.0, "half of the rows are jobs")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    print(f"sink killed at {waiting()['waiting']:,} jobs")
    before, began = waiting()["waiting"], time.monotonic()
    subprocess.run(program, check=True, stderr=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    print(f"written again in {seconds:.1f} s with Spark's start: {waiting()['waiting']:,} jobs ({before:,} were there)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keep", metavar="DIR", help="leave the history here")
    arguments = parser.parse_args()
    history = Path(arguments.keep or tempfile.mkdtemp(prefix="forq-history-")) / "history"
    try:
        with running(settings="capacity = 1000\n") as forq:
            live(forq, arguments.events)
            events = events_in_journals(forq)
            print(f"{events:,} events in the journals")
            ingest(forq, history, arguments.kills)
            rows, keys = rows_and_keys(history)
            print(json.dumps({"events": events, "rows": rows, "keys": keys, "exact": events == rows == keys}))
            audit(forq, history)
            sink(forq, arguments.rows)
            journal_cost(forq)
    finally:
        if not arguments.keep:
            shutil.rmtree(history.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
