"""Layouts for a job's record: four of them with the same bare claim-and-settle script, on one server.

    python benchmarks/layouts.py [--jobs 60000] [--rounds 3]

No fencing, counters or journal: only the cost of the layout itself. Rounds are interleaved; best of each.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forq.broker.link import Link
from forq.broker.scripts import Script
from forq.job import new_id
from tests.support.drive.server import Server

RECORD = b'p5 1700000000000000\n[null,null,{"to":"someone@example.org","n":12345}]'
BATCHES = (1, 8, 64, 256)

# ARGV: want, then the ids to settle. Ids move from `{q}p` to `{q}w`; the answer is id, record, id, record ...
_CLAIM = """
local settled = {}
for i = 2, #ARGV do settled[i - 1] = ARGV[i] end
if #settled > 0 then redis.call('LTRIM', '{q}w', #settled, -1) %(settle)s end
local ids = redis.call('LPOP', '{q}p', ARGV[1])
if not ids then return {} end
redis.call('RPUSH', '{q}w', unpack(ids))
%(load)s
"""
_INTERLEAVE = "local out = {} for i, id in ipairs(ids) do out[2 * i - 1] = id out[2 * i] = records[i] end return out"
LAYOUTS = {
    "record in the list": ("", "return ids"),
    "one hash of records": (
        "redis.call('HDEL', '{q}jobs', unpack(settled))",
        "local records = redis.call('HMGET', '{q}jobs', unpack(ids)) " + _INTERLEAVE,
    ),
    "one string per job": (
        "for i, id in ipairs(settled) do settled[i] = '{q}job:' .. id end redis.call('UNLINK', unpack(settled))",
        "local keys = {} for i, id in ipairs(ids) do keys[i] = '{q}job:' .. id end "
        "local records = redis.call('MGET', unpack(keys)) " + _INTERLEAVE,
    ),
    "one hash per job": (
        "for i, id in ipairs(settled) do settled[i] = '{q}job:' .. id end redis.call('UNLINK', unpack(settled))",
        "local records = {} for i, id in ipairs(ids) do records[i] = redis.call('HGET', '{q}job:' .. id, 'r') "
        "redis.call('HSET', '{q}job:' .. id, 'state', 'active') end " + _INTERLEAVE,
    ),
}


def as_function(name: str, source: str) -> Script:
    """A library with one function."""
    body = source.partition("\n")[2]
    called = f"local function call(KEYS, ARGV)\n{body}\nend"
    library = f"#!lua name={name}\n{called}\nredis.register_function('{name}', call)\n"
    return Script(verb=name, name=name, library=library, source=source)


def claim_source(layout: str) -> str:
    """The script that settles some jobs and claims others."""
    settle, load = LAYOUTS[layout]
    return _CLAIM % {"settle": settle, "load": load}


def fill(link: Link, layout: str, count: int) -> float:
    """Stores the jobs; returns the memory of each, in bytes."""
    link.call("FLUSHALL")
    before = used_memory(link)
    for start in range(0, count, 1000):
        ids = [new_id() for _ in range(min(1000, count - start))]
        commands: list[tuple[object, ...]] = []
        if layout == "record in the list":
            commands.append(("RPUSH", "{q}p", *(job_id.encode() + RECORD for job_id in ids)))
        else:
            commands.append(("RPUSH", "{q}p", *ids))
        if layout == "one hash of records":
            commands.append(("HSET", "{q}jobs", *(part for job_id in ids for part in (job_id, RECORD))))
        elif layout == "one string per job":
            commands += [("SET", f"{{q}}job:{job_id}", RECORD) for job_id in ids]
        elif layout == "one hash per job":
            commands += [("HSET", f"{{q}}job:{job_id}", "r", RECORD, "state", "waiting") for job_id in ids]
        link.pipeline(commands)
    return (used_memory(link) - before) / count


def used_memory(link: Link) -> int:
    lines = link.call("INFO", "memory").decode().splitlines()
    return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


def drain(link: Link, layout: str, count: int, batch: int) -> float:
    """Jobs per second."""
    source = claim_source(layout)
    script = as_function("layout", source)
    width = 1 if layout == "record in the list" else 2
    settled: list[bytes] = []
    ran = 0
    began = time.perf_counter()
    while ran < count:
        flat = link.run(script, "{q}", batch, *settled)
        settled = flat[::width]
        ran += len(settled)
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    server = Server()
    server.start()
    best: dict[tuple[str, int], float] = {}
    memory: dict[str, float] = {}
    try:
        link = Link(server.url)
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for layout in LAYOUTS:
                for batch in BATCHES:
                    jobs = min(arguments.jobs, 4000 * batch)
                    memory[layout] = fill(link, layout, jobs)
                    best[layout, batch] = max(best.get((layout, batch), 0.0), drain(link, layout, jobs, batch))
    finally:
        server.remove()
    print("jobs/s at a batch of " + "".join(f"{batch:>10}" for batch in BATCHES) + "   bytes/job")
    for layout in LAYOUTS:
        rates = "".join(f"{best[layout, batch]:>10,.0f}" for batch in BATCHES)
        print(f"{layout:20} {rates} {memory[layout]:>11.0f}")


if __name__ == "__main__":
    main()
