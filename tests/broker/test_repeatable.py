"""Enqueues that may be repeated until a certain time: the server itself refuses a late repeat."""

import pytest

from forq.broker.enqueue import Repeatable, Update, new_job
from forq.errors import TooLate, UnknownQueue
from tests.support.drive.one_queue import OneQueue, one_queue


def enqueue(queue: OneQueue, job_id: str, epoch: str, until_ms: int, keep_until_ms: int | None = None) -> list[str]:
    terms = Repeatable(epoch, until_ms, until_ms if keep_until_ms is None else keep_until_ms)
    return queue.producer.enqueue([new_job(1, id=job_id, token="t")], Update(repeatable=terms))


def test_a_repeat_in_time_returns_the_first_id(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        terms = queue.producer.token_terms()
        assert enqueue(queue, "a", terms.epoch, terms.now_ms + 60_000) == ["a"]
        assert enqueue(queue, "b", terms.epoch, terms.now_ms + 60_000) == ["a"]
        assert queue.state().jobs == {"a"}


def test_a_late_call_is_refused_and_stores_nothing(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        terms = queue.producer.token_terms()
        with pytest.raises(TooLate, match="the time to repeat"):
            enqueue(queue, "a", terms.epoch, terms.now_ms - 1)
        assert queue.state().jobs == set()
        assert queue.redis.keys("*:token:*") == []


def test_a_call_for_an_earlier_queue_of_the_name_is_refused(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        terms = queue.producer.token_terms()
        queue.registry.delete(queue.name, force=True)
        queue.registry.purge(queue.name, lambda dropped: None)
        with pytest.raises(UnknownQueue):
            queue.producer.token_terms()
        queue.create()
        assert queue.producer.token_terms().epoch != terms.epoch
        with pytest.raises(TooLate):
            enqueue(queue, "a", terms.epoch, terms.now_ms + 60_000)
        assert queue.state().jobs == set()


def test_a_token_outlives_the_time_of_repeats_whatever_dedup_ttl_is(redis_url: str) -> None:
    with one_queue(redis_url, dedup_ttl_ms=1000) as queue:
        terms = queue.producer.token_terms()
        assert terms.dedup_ttl_ms == 1000
        enqueue(queue, "a", terms.epoch, terms.now_ms + 1000, terms.now_ms + 600_000)
        [token] = queue.redis.keys("*:token:*")
        assert 600_000 < queue.redis.pttl(token) <= 910_000


def test_a_long_dedup_ttl_is_not_shortened(redis_url: str) -> None:
    with one_queue(redis_url, dedup_ttl_ms=86_400_000) as queue:
        terms = queue.producer.token_terms()
        enqueue(queue, "a", terms.epoch, terms.now_ms + 1000)
        [token] = queue.redis.keys("*:token:*")
        assert queue.redis.pttl(token) > 86_000_000
