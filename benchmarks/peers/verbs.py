"""The verbs that every Python peer understands; what differs between peers is in NAME_peer.py.

    NAME_peer.py one SECONDS MAX     enqueue one by one, for so long or so many; prints `JOBS SECONDS`
    NAME_peer.py bulk COUNT          enqueue with the peer's bulk call; prints the same
    NAME_peer.py arrivals FILE MS    enqueue at the times in FILE (ns from the start), jobs that take MS ms
    NAME_peer.py work                consume until killed

From the environment: BENCH_SOCKET (for PostgreSQL the folder of its socket); BENCH_CONCURRENCY (a number; 0: what is
fastest); BENCH_DURABLE=1: the settings under which the peer loses least; BENCH_TYPED=1: jobs with two typed arguments
instead of a dict. Without a bulk call, `bulk` enqueues one by one. Peers whose environment has uvloop use it.
"""

import asyncio
import contextlib
import inspect
import os
import sys
import time

try:
    import uvloop
except ImportError:
    run = asyncio.run
else:
    run = uvloop.run

SOCKET = os.environ.get("BENCH_SOCKET", "")
CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "0"))
DURABLE = os.environ.get("BENCH_DURABLE") == "1"
TYPED = os.environ.get("BENCH_TYPED") == "1"
SUBJECT = "welcome"
CHUNK = 1000
WARM_UP = 20


async def one(send, seconds, most):
    for n in range(WARM_UP):
        await _call(send, {"n": n})
    began = time.perf_counter()
    count = 0
    while count < most and time.perf_counter() - began < seconds:
        await _call(send, {"n": count})
        count += 1
    print(count, time.perf_counter() - began, flush=True)


async def bulk(send_many, count):
    began = time.perf_counter()
    for start in range(0, count, CHUNK):
        await _call(send_many, [{"n": n} for n in range(start, min(start + CHUNK, count))])
    print(count, time.perf_counter() - began, flush=True)


async def arrivals(send, path, ms):
    with open(path) as file:
        times = [int(line) for line in file]
    extra = {"ms": ms} if ms else {}
    began = time.monotonic_ns()
    for n, offset in enumerate(times):
        ahead = began + offset - time.monotonic_ns()
        if ahead > 0:
            time.sleep(ahead / 1e9)
        # The intended send time: a slow enqueue counts as part of the job's wait.
        await _call(send, {"n": n, "at": began + offset, **extra})


async def _call(function, argument):
    result = function(argument)
    if inspect.isawaitable(result):
        await result


def _at_once(send, most):

    async def send_many(arguments):
        for start in range(0, len(arguments), most):
            await asyncio.gather(*(send(argument) for argument in arguments[start : start + most]))

    return send_many


def _typed(send):
    return lambda argument: send(argument["n"], SUBJECT)


def main(send, send_many, work, prepare=None, within=None, at_once=0):
    """`send`: takes the arguments of a job. `send_many`: takes a list of dicts. `prepare`: run first, in the event loop
    of the verbs that enqueue. `within`: a context manager around them. `work`: an ordinary function. `at_once`: without
    `send_many`, so many calls of an asynchronous `send` at a time."""
    verb, *rest = sys.argv[1:]
    if verb == "work":
        work()
        return

    if TYPED:
        send = _typed(send)
    if at_once:
        send_many = _at_once(send, at_once)

    async def enqueue():
        async with within or contextlib.nullcontext():
            await enqueue_within()

    async def enqueue_within():
        if prepare is not None:
            await _call(lambda _: prepare(), None)
        if verb == "one":
            await one(send, float(rest[0]), int(rest[1]))
        elif verb == "arrivals":
            await arrivals(send, rest[0], float(rest[1]))
        elif send_many is not None:
            await bulk(send_many, int(rest[0]))
        else:
            await one(send, 3600.0, int(rest[0]) - WARM_UP)

    run(enqueue())
