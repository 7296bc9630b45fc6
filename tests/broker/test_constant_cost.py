"""Enqueue and claim cost the same however many jobs wait: measured in the server's own time, not ours."""

import pytest

from forq.broker.producing import new_job
from tests.support.one_queue import OneQueue

FEW, MANY = 10, 200_000
ROUNDS, CALLS = 5, 200


def fill(queue: OneQueue, number: int) -> None:
    body = new_job(1).body
    for start in range(0, number, 5000):
        ids = [f"f{n}" for n in range(start, min(start + 5000, number))]
        queue.redis.hset(queue.key("jobs"), mapping=dict.fromkeys(ids, b"p5 1\n" + body))
        queue.redis.rpush(queue.key("pending"), *ids)


def measure(queue: OneQueue) -> tuple[float, set[str]]:
    """Microseconds per call of enqueue and turn, the best of some rounds, and the commands that were used."""
    worker = queue.worker(f"w{len(queue.workers)}")
    best, used = float("inf"), set()
    for ends in range(CALLS, CALLS * ROUNDS + 1, CALLS):
        queue.redis.config_resetstat()
        for number in range(ends - CALLS, ends):
            queue.enqueue(f"{worker.name}-{number}")
            [claimed] = worker.whole_turn(want=1).jobs[::2]
            worker.number += 1
            worker.consumer.turn(worker.number, [claimed, worker.fence, 1], [], 0, 0)
        stats = queue.redis.info("commandstats")
        best = min(best, stats["cmdstat_fcall"]["usec_per_call"])
        used = set(stats) - {"cmdstat_info", "cmdstat_config|resetstat"}
    return best, used


@pytest.mark.spec("R1", "R2")
def test_enqueue_and_claim_cost_the_same_with_10_and_with_200000_waiting(queue: OneQueue) -> None:
    fill(queue, FEW)
    few, used_with_few = measure(queue)
    fill(queue, MANY)
    assert queue.viewer.counts().waiting >= MANY
    many, used_with_many = measure(queue)
    assert used_with_many == used_with_few
    assert many < 2 * few, f"{few:.1f} us per call with few waiting, {many:.1f} us with many"
