"""Enqueue and claim cost the same for any number of waiting jobs, measured in server time."""

import pytest

from forq.broker.enqueue import new_job
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue

FEW, MANY = 10, 200_000
# A round is shorter than a scheduler time slice, so some rounds run undisturbed while other tests use the CPU.
ROUNDS, CALLS = 60, 10


def fill(queue: OneQueue, number: int) -> None:
    body = new_job(1).body
    for start in range(0, number, 5000):
        ids = [f"f{n}" for n in range(start, min(start + 5000, number))]
        queue.redis.hset(queue.key("jobs"), mapping=dict.fromkeys(ids, b"p5 1\n" + body))
        queue.redis.rpush(queue.key("pending"), *ids)


def run_round(queue: OneQueue, worker: HandWorker, start: int) -> tuple[float, set[str]]:
    """Returns microseconds per call of enqueue and turn, and the commands used."""
    queue.redis.config_resetstat()
    for number in range(start, start + CALLS):
        queue.enqueue(f"j{number}")
        [claimed] = worker.whole_turn(want=1).jobs[::2]
        worker.number += 1
        worker.consumer.turn(worker.number, [claimed, worker.fence, 1], [], 0, 0)
    stats = queue.redis.info("commandstats")
    return stats["cmdstat_fcall"]["usec_per_call"], set(stats) - {"cmdstat_info", "cmdstat_config|resetstat"}


@pytest.mark.spec("R1", "R2")
def test_enqueue_and_claim_cost_the_same_with_10_and_with_200000_waiting(redis_url: str) -> None:
    with one_queue(redis_url, "few") as short, one_queue(redis_url, "many") as long:
        fill(short, FEW)
        fill(long, MANY)
        assert long.inspector.counts().waiting >= MANY
        workers = [(short, short.worker()), (long, long.worker())]
        # Alternating, so that other load on the machine affects both.
        rounds = [[run_round(*each, start) for each in workers] for start in range(0, ROUNDS * CALLS, CALLS)]
    assert all(used_with_few == used_with_many for (_, used_with_few), (_, used_with_many) in rounds[1:])
    few, many = (min(costs) for costs in zip(*([cost for cost, _ in pair] for pair in rounds), strict=True))
    assert many < 2 * few, f"{few:.1f} us per call with few waiting, {many:.1f} us with many"
