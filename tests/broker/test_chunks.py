"""Bulk enqueues: chunks of plain jobs, two of them under way at a time, and what became of each after a failure."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import RFC_4122, UUID

import orjson
import pytest

from forq import AsyncClient, Client
from forq.broker.chunks import CHUNK_BYTES, CHUNK_JOBS, NewJob, PartlyStored
from forq.broker.connection import Connection
from forq.broker.enqueue import Repeatable, Update, new_job
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.broker.link import Link
from forq.broker.record import pack_data, pack_each
from forq.broker.scripts import NO_QUEUE, OK, script
from forq.client import Queue
from forq.errors import (
    BackPressure,
    Exists,
    InvalidData,
    OutcomeUnknown,
    QueueFull,
    TooLate,
    UnknownDependency,
    UnknownQueue,
)
from forq.job import new_ids
from tests.support.drive.one_queue import OneQueue, State, one_queue
from tests.support.drive.server import Server
from tests.support.faults.proxy import Proxy

N = CHUNK_JOBS
Call = tuple[str, int]


@pytest.fixture
def client(queue: OneQueue) -> Iterator[Client]:
    client = Client(queue.url)
    yield client
    client.close()


@pytest.fixture
def q(client: Client) -> Queue:
    """A queue of a client that has stored a job there, so that it sends two chunks at a time."""
    q = client.queue("q")
    q.enqueue_many(["first", "second"])
    return q


def stored_data(queue: OneQueue) -> list[Any]:
    """The data of all waiting jobs, in their order."""
    records = queue.redis.hgetall(queue.key("jobs"))
    found = queue.redis.lrange(queue.key("pending"), 0, -1)
    return [orjson.loads(records[job_id].partition(b"\n")[2])[2] for job_id in found]


def numbers_with(*actions: tuple[int, Callable[[], object]], count: int) -> Iterator[int]:
    """0 to `count`; runs each action before it yields its number."""
    wanted = dict(actions)
    for number in range(count):
        if number in wanted:
            wanted[number]()
        yield number


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What connections do: 's' for a request, 'r' for a reply."""
    found: list[str] = []
    send, receive = Connection.send, Connection.receive

    def noted_send(self: Connection, command: tuple[Any, ...]) -> None:
        found.append("s")
        send(self, command)

    def noted_receive(self: Connection) -> Any:
        found.append("r")
        return receive(self)

    monkeypatch.setattr(Connection, "send", noted_send)
    monkeypatch.setattr(Connection, "receive", noted_receive)
    return found


def test_the_next_chunk_is_packed_and_sent_while_the_server_stores_one(
    queue: OneQueue, q: Queue, calls: list[str]
) -> None:
    seen = []
    calls.clear()

    def jobs() -> Iterator[int]:
        for number in range(3 * N + 1):
            if number % N == 0:
                seen.append("".join(calls))
            yield number

    ids = q.enqueue_many(jobs())
    # The fourth chunk begins after the reply to the first.
    assert seen == ["", "", "s", "ssr"]
    assert "".join(calls) == "ssrsrsrr"
    assert stored_data(queue) == ["first", "second", *range(3 * N + 1)]
    assert queue.pending()[2:] == ids


def test_the_first_chunk_of_a_producer_is_answered_first(queue: OneQueue, client: Client, calls: list[str]) -> None:
    client.link().call("PING")
    calls.clear()
    client.queue("q").enqueue_many(range(3 * N))
    assert "".join(calls) == "srssrr"


def test_a_call_for_a_missing_queue_sends_one_chunk(queue: OneQueue, client: Client, calls: list[str]) -> None:
    client.link().call("PING")
    calls.clear()
    with pytest.raises(UnknownQueue):
        client.queue("none").enqueue_many(range(3 * N))
    assert "".join(calls) == "sr"


def test_jobs_that_wait_for_others_are_sent_one_chunk_at_a_time(queue: OneQueue, q: Queue, calls: list[str]) -> None:
    jobs = [new_job(n, id=f"n{n}", after=[f"n{n - N}"] if n >= N else ()) for n in range(3 * N)]
    calls.clear()
    q.enqueue_jobs([*jobs, new_job(0)])
    assert "".join(calls) == "srsrsrsr"


def test_jobs_that_wait_for_a_refused_chunk_are_not_sent(queue: OneQueue, q: Queue) -> None:
    queue.enqueue("n0")
    first = [new_job(n, id=f"n{n}") for n in range(N)]
    later = [new_job(n, after=["n0"]) for n in range(N)]
    with pytest.raises(Exists):
        q.enqueue_jobs([*first, *later], if_exists="refuse")
    assert queue.inspector.counts().waiting == 3


def test_an_id_in_two_chunks_is_updated_by_the_later_one(queue: OneQueue, q: Queue) -> None:
    q.enqueue_jobs(new_job(n, id=f"n{n % (N + 7)}") for n in range(3 * N))
    assert {queue.inspector.job(f"n{n}")["data"] for n in range(N + 7)} == set(range(2 * N - 7, 3 * N))


def test_a_chunk_may_be_stored_although_the_one_before_was_refused(queue: OneQueue, q: Queue) -> None:
    queue.set_options(max_items=N + 10)
    jobs = [new_job(n, id=f"n{n}") for n in range(2 * N + 5)]
    with pytest.raises(PartlyStored, match=r"max_items.* \(505 jobs were stored, 500 refused\)$") as caught:
        q.enqueue_jobs(jobs)
    error = caught.value
    assert isinstance(error.__cause__, QueueFull)
    assert error.stored == [f"n{n}" for n in (*range(N), *range(2 * N, 2 * N + 5))]
    assert error.refused == [f"n{n}" for n in range(N, 2 * N)]
    assert error.refused_at == list(range(N, 2 * N))
    assert (error.unknown, error.unknown_at, error.sent) == ([], [], 2 * N + 5)
    assert queue.pending()[2:] == error.stored


def test_no_further_chunk_is_sent_after_an_error(queue: OneQueue, q: Queue) -> None:
    queue.enqueue("taken")
    made: list[int] = []

    def jobs() -> Iterator[NewJob]:
        for n in range(10 * N):
            made.append(n)
            yield new_job(n, id="taken" if n == 0 else f"n{n}")

    with pytest.raises(PartlyStored) as caught:
        q.enqueue_jobs(jobs(), if_exists="refuse")
    assert caught.value.refused_at == list(range(N))
    assert caught.value.stored == [f"n{n}" for n in range(N, 2 * N)]
    # One more was made, to see that the second chunk is full.
    assert (caught.value.sent, len(made)) == (2 * N, 2 * N + 1)


def test_if_nothing_is_stored_the_error_is_that_of_the_first_chunk(queue: OneQueue, q: Queue) -> None:
    queue.set_options(max_items=2)
    with pytest.raises(QueueFull):
        q.enqueue_many(range(5 * N))
    with pytest.raises(UnknownDependency):
        q.enqueue_jobs(new_job(1, after=["nobody"]) for _ in range(3 * N))
    assert stored_data(queue) == ["first", "second"]


def test_wrong_data_in_a_later_chunk_leaves_those_before_stored(queue: OneQueue, q: Queue) -> None:
    for given in ([*range(2 * N + 3), {1: 2}], iter([*range(2 * N + 3), {1: 2}])):
        before = queue.inspector.counts().waiting
        with pytest.raises(PartlyStored, match="data has the key 1") as caught:
            q.enqueue_many(given)
        assert isinstance(caught.value.__cause__, InvalidData)
        assert len(caught.value.stored) == caught.value.sent == 2 * N
        assert queue.inspector.counts().waiting == before + 2 * N


def test_an_earlier_refusal_counts_more_than_wrong_data(queue: OneQueue, q: Queue) -> None:
    queue.set_options(max_items=10)
    with pytest.raises(QueueFull):
        q.enqueue_many([*range(N), object()])


def test_an_exception_of_the_iterator_is_raised_as_it_is(queue: OneQueue, q: Queue) -> None:
    def fail() -> None:
        raise ValueError("of the iterator")

    with pytest.raises(ValueError, match="of the iterator"):
        q.enqueue_many(numbers_with((2 * N + 1, fail), count=3 * N))
    assert q.status()["waiting"] == 2 * N + 2
    # The same after a chunk that was refused.
    queue.set_options(max_items=10)
    with pytest.raises(ValueError, match="of the iterator"):
        q.enqueue_many(numbers_with((N + 1, fail), count=3 * N))
    assert q.status()["waiting"] == 2 * N + 2


def test_the_iterator_may_use_the_same_client(queue: OneQueue, q: Queue, client: Client) -> None:
    found: list[Any] = []
    jobs = numbers_with(
        (N + 5, lambda: found.append(q.enqueue("nested"))),
        (2 * N + 5, lambda: found.append(q.status()["waiting"])),
        (2 * N + 6, lambda: found.append(q.enqueue_many(range(3 * N)))),
        (3 * N + 5, lambda: found.append(client.queues())),
        count=4 * N,
    )
    ids = q.enqueue_many(jobs)
    assert found[1] == 2 + 2 * N + 1
    assert found[3] == {"q": "work"}
    assert queue.pending()[2:] == [*ids[:N], found[0], *ids[N : 2 * N], *found[2], *ids[2 * N :]]


def test_the_iterator_may_close_the_client(queue: OneQueue, q: Queue, client: Client) -> None:
    with pytest.raises(PartlyStored, match="closed before the reply") as caught:
        q.enqueue_many(numbers_with((2 * N + 1, client.close), count=4 * N))
    assert (len(caught.value.stored), len(caught.value.unknown), caught.value.sent) == (N, N, 2 * N)
    assert q.status()["waiting"] == 2 + 2 * N


def test_threads_with_one_client_do_not_mix_their_replies(queue: OneQueue, q: Queue) -> None:
    found: dict[int, list[str]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: q.enqueue_many([n] * (4 * N + n))})) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = queue.redis.hgetall(queue.key("jobs"))
    for n, ids in found.items():
        assert len(ids) == 4 * N + n
        assert {orjson.loads(records[job_id.encode()].partition(b"\n")[2])[2] for job_id in ids} == {n}


def test_an_interruption_in_the_iterator_closes_the_connection(queue: OneQueue, q: Queue, client: Client) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    client.link().fetch_client_id(at="q")
    with pytest.raises(KeyboardInterrupt):
        q.enqueue_many(numbers_with((N + 1, interrupt), count=3 * N))
    assert client.link().client_id is None
    assert q.status()["mode"] == "work"


def test_an_interruption_while_it_waits_closes_the_connection(
    server: Server, queue: OneQueue, q: Queue, client: Client
) -> None:
    """A signal while the server is paused: the handler raises inside of `receive`."""
    client.link().fetch_client_id(at="q")

    def pause() -> None:
        queue.redis.execute_command("CLIENT", "PAUSE", 20_000, "WRITE")
        signal.setitimer(signal.ITIMER_REAL, 0.3)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            q.enqueue_many(numbers_with((N + 1, pause), count=10 * N))
    finally:
        signal.signal(signal.SIGALRM, before)
        queue.redis.execute_command("CLIENT", "UNPAUSE")
    assert client.link().client_id is None
    assert q.enqueue("next") in queue.pending()


def drop_next_reply(client: Client, proxy: Proxy) -> None:
    """After the reply to the last chunk has arrived."""
    connection = client.link()._connection
    assert connection is not None
    assert select.select([connection.socket], [], [], 20)[0]
    proxy.drop_reply(text=b"*2\r\n:")


@pytest.mark.fault("connection dropped")
def test_the_jobs_of_both_chunks_are_unknown_if_the_connection_breaks(
    server: Server, queue: OneQueue, tmp_path: Path
) -> None:
    with Proxy(server.socket, listen=tmp_path / "proxy.sock") as proxy:
        client = Client(proxy.url)
        q = client.queue("q")
        # The fourth chunk is sent before the reply to the third is read.
        jobs = numbers_with((2 * N + 1, lambda: drop_next_reply(client, proxy)), count=9 * N)
        with pytest.raises(PartlyStored, match=r"broke: .* \(1000 jobs were stored, 1000 may be stored\)") as caught:
            q.enqueue_jobs(new_job(n, id=f"n{n}") for n in jobs)
        error = caught.value
        assert isinstance(error.__cause__, OutcomeUnknown)
        assert error.stored == [f"n{n}" for n in range(2 * N)]
        assert error.unknown == [f"n{n}" for n in range(2 * N, 4 * N)]
        assert error.unknown_at == list(range(2 * N, 4 * N))
        assert (error.refused, error.sent) == ([], 4 * N)
        assert q.enqueue("next")
        client.close()


@pytest.mark.fault("connection dropped")
def test_if_all_jobs_are_unknown_the_error_says_so(server: Server, queue: OneQueue, tmp_path: Path) -> None:
    with Proxy(server.socket, listen=tmp_path / "proxy.sock") as proxy:
        client = Client(proxy.url)
        q = client.queue("q")
        q.enqueue_many([1, 2])
        proxy.drop_reply(text=b"*2\r\n:1\r\n")
        with pytest.raises(OutcomeUnknown):
            q.enqueue_many(range(5 * N))
        client.close()


def test_a_refused_chunk_before_one_of_unknown_outcome(server: Server, queue: OneQueue, tmp_path: Path) -> None:
    queue.set_options(max_items=5)
    with Proxy(server.socket, listen=tmp_path / "proxy.sock") as proxy:
        client = Client(proxy.url)
        q = client.queue("q")
        q.enqueue_many([1, 2])
        jobs = numbers_with((N + 1, lambda: drop_next_reply(client, proxy)), count=5 * N)
        with pytest.raises(PartlyStored, match=r"\(0 jobs were stored, 500 refused, 500 may be stored\)") as caught:
            q.enqueue_many(jobs)
        assert isinstance(caught.value.__cause__, QueueFull)
        assert caught.value.refused_at == list(range(N))
        assert caught.value.unknown_at == list(range(N, 2 * N))
        client.close()


def test_after_a_long_pause_of_the_iterator_a_closed_connection_is_noticed(
    queue: OneQueue, q: Queue, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to the chunk before the pause is read first, and the next goes through a new connection."""
    link = client.link()
    link.fetch_client_id(at="q")

    def pause() -> None:
        # The reply has arrived before the server closes the connection.
        queue.redis.ping()
        link._used_at -= 60
        queue.redis.client_kill_filter(_id=str(link.client_id))

    ids = q.enqueue_many(numbers_with((N + 1, pause), count=3 * N))
    assert queue.pending()[2:] == ids


@pytest.mark.one_server
def test_a_missing_library_is_loaded_and_both_chunks_are_repeated_in_their_order(queue: OneQueue, q: Queue) -> None:
    ids = q.enqueue_many(numbers_with((2 * N + 1, queue.redis.function_flush), count=6 * N))
    assert queue.pending()[2:] == ids
    assert stored_data(queue)[2:] == list(range(6 * N))


@pytest.mark.one_server
def test_a_chunk_is_not_repeated_after_the_next_was_carried_out(queue: OneQueue, q: Queue) -> None:
    """Another client loads the library between the two. Repeating the first would change their order."""
    jobs = numbers_with(
        (2 * N + 1, queue.redis.function_flush),
        (3 * N + 1, lambda: queue.link.load_library(script("enqueue"))),
        count=6 * N,
    )
    with pytest.raises(PartlyStored, match=r"lacks a function: .* \(1500 jobs were stored, 500 refused\)") as caught:
        q.enqueue_many(jobs)
    assert caught.value.refused_at == list(range(2 * N, 3 * N))
    assert stored_data(queue)[2:] == [*range(2 * N), *range(3 * N, 4 * N)]


def test_without_functions_both_chunks_go_through_eval(tmp_path: Path) -> None:
    conf = tmp_path / "redis.conf"
    conf.write_text("user default on nopass ~* &* +@all -function -fcall\n")
    with Server(include=conf) as server, one_queue(server.url) as queue:
        client = Client(server.url)
        ids = client.queue("q").enqueue_many(range(4 * N))
        # As after a second: functions are tried again.
        ids += client.queue("q").enqueue_many(
            numbers_with((N + 1, lambda: setattr(client.link(), "_eval_until", 0.0)), count=4 * N)
        )
        assert queue.pending() == ids
        client.close()


@pytest.mark.one_server
def test_a_server_that_runs_out_of_memory_refuses_the_chunks(queue: OneQueue, q: Queue) -> None:
    def fill() -> None:
        queue.redis.config_set("maxmemory", 1)

    try:
        with pytest.raises(PartlyStored, match="out of memory") as caught:
            q.enqueue_many(numbers_with((N + 1, fill), count=6 * N))
    finally:
        queue.redis.config_set("maxmemory", 0)
    error = caught.value
    assert isinstance(error.__cause__, BackPressure)
    assert (len(error.stored), error.refused_at) == (N, list(range(N, 3 * N)))
    assert stored_data(queue)[2:] == list(range(N))


@pytest.mark.one_server
def test_two_refusals_that_close_the_connection_are_both_known(queue: OneQueue, q: Queue) -> None:
    """READONLY, as after a failover: the reply to the second chunk is read before the connection is closed."""
    try:
        with pytest.raises(PartlyStored, match=r"cannot serve requests now: .*READONLY") as caught:
            q.enqueue_many(numbers_with((N + 1, lambda: queue.redis.replicaof("127.0.0.1", 1)), count=6 * N))
    finally:
        queue.redis.execute_command("REPLICAOF", "NO", "ONE")
    assert (len(caught.value.stored), caught.value.refused_at) == (N, list(range(N, 3 * N)))
    assert caught.value.unknown == []


def test_a_fork_during_a_bulk_enqueue_leaves_the_reply_to_the_parent(queue: OneQueue, q: Queue) -> None:
    read, write = os.pipe()
    children: list[int] = []

    def fork() -> None:
        children.append(os.fork())

    def jobs() -> Iterator[int]:
        for number in range(4 * N):
            if number == 2 * N + 1:
                fork()
            if not (children and children[0] == 0):
                yield number

    try:
        ids = q.enqueue_many(jobs())
    except PartlyStored as exc:
        assert children == [0]
        os.write(write, f"{len(exc.stored)} {len(exc.unknown)} {len(exc.refused)}".encode())
    finally:
        if children == [0]:
            os._exit(0)
    os.waitpid(children[0], 0)
    # The child has one job more, but sends nothing after a chunk of unknown outcome.
    assert os.read(read, 64) == f"{N} {N} 0".encode()
    assert queue.pending()[2:] == ids
    os.close(read)
    os.close(write)


def test_long_replies_and_long_requests_do_not_wait_for_one_another(queue: OneQueue, client: Client) -> None:
    q = client.queue("q")
    tokens = [f"{number:0128}" for number in range(20 * N)]
    ids = q.enqueue_many(range(20 * N), tokens=tokens)
    assert q.enqueue_many(range(20 * N), tokens=tokens) == ids
    more = q.enqueue_many(["x" * (CHUNK_BYTES - 100)] * 40)
    assert queue.pending() == [*ids, *more]


def test_the_async_client_has_the_same_result(queue: OneQueue) -> None:
    import asyncio

    async def main() -> None:
        async with AsyncClient(queue.url) as client:
            q = client.queue("q")
            ids = await q.enqueue_many(range(6 * N))
            assert queue.pending() == ids
            queue.set_options(max_items=7 * N + 10)
            jobs = [new_job(n, id=f"n{n}") for n in range(2 * N + 5)]
            with pytest.raises(PartlyStored) as caught:
                await q.enqueue_jobs(jobs)
            assert caught.value.refused_at == list(range(N, 2 * N))
            assert len(caught.value.stored) == N + 5
            assert (await q.status())["waiting"] == 7 * N + 5

    asyncio.run(main())


# Packing.


class Sub(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "data",
    [
        [],
        [None, 1.5, "ü\n", [1, None], {"a": {"b": []}}],
        ["|forq|", '|forq|,"|forq|"', ["a", "|forq|", "b"], {"a": "|forq|"}],
        [Sub(a=1), (1, 2)],
        [[[]] * 3] * 100,
    ],
)
def test_many_data_are_packed_as_each_alone(data: list[Any]) -> None:
    if data:
        assert pack_each(data) == [pack_data(each) for each in data]


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (UUID(int=1), "data is of type UUID;"),
        ({"a": [1, float("nan")]}, r"data\['a'\]\[1\] is NaN or Infinity"),
        ({"a": {7: 1}}, r"data\['a'\] has the key 7, but keys must be str"),
        ([2**70], "job data is not JSON: .*64-bit"),
        ("\ud800", "job data is not JSON"),
    ],
)
def test_wrong_data_among_many_are_named_and_nothing_is_stored(
    queue: OneQueue, q: Queue, bad: Any, where: str, as_list: bool
) -> None:
    data = [*range(70), None, bad, *range(70)]
    with pytest.raises(InvalidData, match=where):
        q.enqueue_many(data if as_list else iter(data))
    assert q.status()["waiting"] == 2


def test_an_iterator_may_yield_one_object_again_and_again(queue: OneQueue, q: Queue) -> None:
    def jobs() -> Iterator[dict[str, int]]:
        data = {"n": 0}
        for data["n"] in range(N + 50):
            yield data

    q.enqueue_many(jobs())
    assert stored_data(queue)[2:] == [{"n": n} for n in range(N + 50)]


def test_chunks_of_a_list_are_limited_by_count_and_by_bytes(queue: OneQueue, q: Queue) -> None:
    lengths = [1] * 40 + [CHUNK_BYTES // 3] * 7 + [CHUNK_BYTES + 1] + [1] * (N + 20)
    for given in ([n * "x" for n in lengths], (n * "x" for n in lengths)):
        queue.redis.config_resetstat()
        ids = q.enqueue_many(given)
        calls = queue.redis.info("commandstats")["cmdstat_fcall"]["calls"]
        assert calls == 7
        assert queue.pending()[-len(ids) :] == ids
    assert [len(data) for data in stored_data(queue)[2:]] == lengths * 2


def test_ids_made_together_are_different_and_of_this_time() -> None:
    ids = [job_id for count in (1, 2, 63, 500) for job_id in new_ids(count)]
    assert len({*ids}) == 566
    assert {UUID(job_id).version for job_id in ids} == {7}
    assert {UUID(job_id).variant for job_id in ids} == {RFC_4122}
    assert {len(job_id) for job_id in ids} == {32}
    assert [job_id[:13] for job_id in ids] == sorted(job_id[:13] for job_id in ids)


# The server's side.


def ids_of(count: int) -> list[str]:
    return [f"{number:032}" for number in range(count)]


def test_plain_jobs_with_ids_of_their_own_update_those_that_exist(queue: OneQueue) -> None:
    ids = ids_of(5)
    queue.producer.enqueue_many([new_job("old", id=ids[3]), new_job("old", id="another")])
    queue.producer.enqueue_many([new_job(n, id=job_id) for n, job_id in enumerate(ids)])
    assert queue.pending() == [ids[3], "another", ids[0], ids[1], ids[2], ids[4]]
    assert stored_data(queue) == [3, "old", 0, 1, 2, 4]


def test_plain_jobs_with_a_known_id_are_refused_together(queue: OneQueue) -> None:
    ids = ids_of(5)
    queue.enqueue(ids[3])
    with pytest.raises(Exists):
        queue.producer.enqueue_many([new_job(n, id=job_id) for n, job_id in enumerate(ids)], Update("refuse"))
    assert queue.state() == State({ids[3]}, waiting={5: [ids[3]]})
    queue.producer.enqueue_many([new_job(n, id=job_id) for n, job_id in enumerate(ids)], Update("skip"))
    assert stored_data(queue) == [{"n": ids[3]}, 0, 1, 2, 4]


def test_plain_jobs_behind_a_running_or_held_one(queue: OneQueue) -> None:
    ids = ids_of(3)
    queue.enqueue(ids[0])
    assert queue.worker().turn(want=1) == [ids[0]]
    queue.producer.enqueue([new_job(1, id=ids[1], after=[ids[0]])])
    queue.producer.enqueue_many([new_job(n, id=job_id) for n, job_id in enumerate(ids)])
    assert queue.inspector.job(ids[0])["blocked_behind"]
    assert queue.inspector.job(ids[1])["state"] == "held"
    assert queue.pending() == [ids[2]]


@pytest.mark.parametrize("priority", [0, 9])
def test_plain_jobs_of_another_priority(queue: OneQueue, priority: int) -> None:
    ids = ids_of(3)
    queue.producer.enqueue_many([new_job(n, id=job_id, priority=priority) for n, job_id in enumerate(ids)])
    assert queue.state().waiting == {priority: ids}
    assert queue.redis.lrange(queue.key("pending"), 0, -1) == [b""]
    assert queue.worker().turn(want=3) == ids


def test_a_call_that_is_too_late_stores_no_plain_jobs(queue: OneQueue) -> None:
    late = Update("update", repeatable=Repeatable(queue.hash("options")["epoch"], 1, 1))
    with pytest.raises(TooLate):
        queue.producer.enqueue_many([new_job(n, id=job_id) for n, job_id in enumerate(ids_of(3))], late)


def test_jobs_of_two_priorities_are_not_stored_as_plain(queue: OneQueue) -> None:
    ids = ids_of(4)
    queue.producer.enqueue_many([new_job(n, id=job_id, priority=n % 2) for n, job_id in enumerate(ids)])
    assert queue.state().waiting == {0: ids[::2], 1: ids[1::2]}


def test_an_id_twice_in_a_chunk_is_not_stored_as_plain(queue: OneQueue) -> None:
    [one] = ids_of(1)
    queue.producer.enqueue_many([new_job("a", id=one), new_job("b", id=one)])
    assert stored_data(queue) == ["b"]


def test_plain_data_larger_than_max_data_store_nothing(redis_url: str) -> None:
    # [null,null,"…"] has 14 characters more than the text.
    with one_queue(redis_url, max_data=100) as queue:
        client = Client(redis_url)
        for texts in (["x" * 87, "x" * 86], ("x" * size for size in (86, 87))):
            with pytest.raises(InvalidData, match="max_data = 100"):
                client.queue("q").enqueue_many(texts)
        assert queue.state() == State(set())
        client.queue("q").enqueue_many(["x" * 86, "x" * 86])
        assert stored_data(queue) == ["x" * 86] * 2
        client.close()


def test_plain_jobs_count_towards_max_items(redis_url: str) -> None:
    with one_queue(redis_url, max_items=3) as queue:
        client = Client(redis_url)
        with pytest.raises(QueueFull):
            client.queue("q").enqueue_many(range(4))
        client.queue("q").enqueue_many(range(3))
        assert stored_data(queue) == [0, 1, 2]
        with pytest.raises(QueueFull):
            client.queue("q").enqueue_many(range(2))
        client.close()


def test_plain_jobs_of_another_mode_are_stored_and_expire(redis_url: str) -> None:
    with one_queue(redis_url, mode="on_request", item_timeout_ms=60_000) as queue:
        client = Client(redis_url)
        ids = client.queue("q").enqueue_many([0, 1, 2])
        assert {job_id.decode() for job_id in queue.redis.zrange(queue.key("expiries"), 0, -1)} == {*ids}
        assert stored_data(queue) == [0, 1, 2]
        client.close()


def test_plain_jobs_are_journaled_with_their_ids(queue: OneQueue, q: Queue) -> None:
    ids = q.enqueue_many(range(3))
    [*_, (_, entry)] = queue.redis.xrange(queue.key("events"))
    assert entry[b"v4"].decode().partition("\n")[2] == f"enqueued 0 {' '.join(ids)}"


def test_large_plain_data_are_noted_in_the_options(queue: OneQueue, q: Queue) -> None:
    q.enqueue_many(["x", "x" * 20_000])
    assert queue.hash("options")["largest_record"] == "32768"


def test_many_small_jobs_make_the_hash_a_table_at_once(queue: OneQueue, q: Queue) -> None:
    """A list is searched for each field: 500 jobs would take ten times as long."""
    q.enqueue_many(range(3))
    assert queue.redis.object("encoding", queue.key("jobs")) != b"hashtable"
    q.enqueue_many(range(100))
    assert queue.redis.object("encoding", queue.key("jobs")) == b"hashtable"
    assert queue.redis.hlen(queue.key("jobs")) == 105
    assert queue.inspector.counts().waiting == 105


def test_the_identities_of_plain_jobs_find_them(queue: OneQueue) -> None:
    ids = ids_of(3)
    found = queue.producer.enqueue_many_identified([new_job(n, id=job_id) for n, job_id in enumerate(ids)])
    assert [job_id for job_id, _ in found] == ids
    for job_id, identity in found:
        assert identity is not None
        assert queue.producer.cancel(job_id, identity)


def test_replies_that_are_read_late_belong_to_their_calls(redis_url: str, queue: OneQueue) -> None:
    link = Link(redis_url)
    of_queue = link.send(script("counts"), queue.base)
    of_none = link.send(script("counts"), queue_base(DEFAULT_PREFIX, "none"))
    assert link.call("ECHO", "x") == b"x"
    assert link.finish(of_none)[0] == NO_QUEUE
    assert link.finish(of_queue)[0] == OK
    link.close()
