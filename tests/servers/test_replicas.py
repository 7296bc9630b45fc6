"""durable="replica": with a replica that follows, that is behind, that is gone; and a failover that loses writes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forq import Client
from forq.client import PartlyStored, Queue
from forq.errors import NoReplica, OutcomeUnknown, UsageError
from tests.support.drive.redis_cluster import redis_cluster, run_command
from tests.support.drive.replicas import Pair, replicated
from tests.support.drive.supervisor import running
from tests.support.drive.wait import wait_until

RECIPE = Path(__file__).resolve().parents[2] / "etc" / "redis-acl.conf"


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Pair]:
    with replicated(proxied=True) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """For tests that leave both servers as they are."""
    yield shared_pair
    shared_pair.proxy.thaw()
    shared_pair.master.flush()


@pytest.fixture
def own_pair() -> Iterator[Pair]:
    with replicated(proxied=True) as pair:
        yield pair


@pytest.fixture
def queue(pair: Pair) -> Queue:
    return Client(pair.master.url).create_queue("q")


def ids_on_replica(pair: Pair) -> set[str]:
    return {key.decode() for key in run_command(pair.replica, "HKEYS", "forq:queue:{q}:jobs")}


def test_what_is_reported_stored_is_on_the_replica(pair: Pair, queue: Queue) -> None:
    one = queue.enqueue(1, durable="replica")
    assert one in ids_on_replica(pair)
    many = queue.enqueue_many(range(2500), durable="replica")
    assert set(many) <= ids_on_replica(pair)


def test_nothing_is_left_of_waiting(pair: Pair, queue: Queue) -> None:
    queue.enqueue(1, durable="replica")
    wait_until(lambda: not run_command(pair.master, "EXISTS", "forq:queue:{q}:durable"))


def test_a_replica_that_is_behind_makes_the_outcome_unknown(pair: Pair, queue: Queue) -> None:
    pair.proxy.freeze()
    with pytest.raises(OutcomeUnknown, match=r"stored on the master, but no replica has acknowledged them within 1 s"):
        queue.enqueue(1, id="late", durable="replica")
    assert queue.job("late")["state"] == "waiting"
    assert "late" not in ids_on_replica(pair)
    pair.proxy.thaw()
    wait_until(lambda: "late" in ids_on_replica(pair))


def test_a_repeated_token_is_not_taken_for_stored_before_the_replica_has_it(pair: Pair, queue: Queue) -> None:
    pair.proxy.freeze()
    for _ in range(2):
        # From a connection of its own that has written nothing before.
        other = Client(pair.master.url)
        with pytest.raises(OutcomeUnknown):
            other.queue("q").enqueue(1, token="t", durable="replica")
        other.close()
    pair.proxy.thaw()
    job_id = queue.enqueue(1, token="t", durable="replica")
    assert ids_on_replica(pair) == {job_id}


def test_of_many_it_is_told_which_are_safe(pair: Pair, queue: Queue) -> None:
    def jobs() -> Iterator[int]:
        yield from range(1000)
        pair.proxy.freeze()
        yield from range(1500)

    with pytest.raises(PartlyStored) as caught:
        queue.enqueue_many(jobs(), durable="replica")
    assert isinstance(caught.value.__cause__, OutcomeUnknown)
    assert set(caught.value.stored) <= ids_on_replica(pair)


def test_without_a_replica_nothing_is_stored(own_pair: Pair) -> None:
    queue = Client(own_pair.master.url).create_queue("q")
    own_pair.promote()
    wait_until(lambda: b"connected_slaves:0" in run_command(own_pair.master, "INFO", "replication"))
    with pytest.raises(NoReplica, match="has no replica that is in sync; nothing was stored"):
        queue.enqueue(1, durable="replica")
    assert queue.status()["waiting"] == 0


def test_the_recipe_for_producers_allows_it(pair: Pair, queue: Queue) -> None:
    queue.enqueue(0)
    rules = re.findall(r"^user (forq-producer .*)$", RECIPE.read_text(), re.MULTILINE)[0].split()
    for server in (pair.master, pair.replica):
        run_command(server, "ACL", "SETUSER", *rules)
    url = f"redis://forq-producer:CHANGE-ME-producer@127.0.0.1:{pair.master.port}"
    assert Client(url).queue("q").enqueue(1, durable="replica") in ids_on_replica(pair)


def test_another_word_is_refused(queue: Queue) -> None:
    with pytest.raises(UsageError, match="durable 'disk' is not allowed: 'replica'"):
        queue.enqueue(1, durable="disk")  # type: ignore[arg-type]
    assert queue.status()["waiting"] == 0


def test_a_failover_that_loses_writes_loses_nothing_that_was_reported_safe(own_pair: Pair) -> None:
    pair = own_pair
    queue = Client(pair.master.url).create_queue("q")
    safe = {queue.enqueue(number, durable="replica") for number in range(50)}
    pair.proxy.freeze()
    unknown = set()
    for number in range(3):
        with pytest.raises(OutcomeUnknown):
            queue.enqueue(number, id=f"unknown-{number}", durable="replica")
        unknown.add(f"unknown-{number}")
    pair.master.kill()
    pair.promote()
    pair.proxy.close()
    after = Client(pair.replica.url).queue("q")
    left = {job["id"] for job in after.jobs(limit=1000).jobs}
    assert left == safe
    # What was lost is what nobody was told is safe, and may be sent again.
    assert not left & unknown
    assert after.enqueue(1, id="unknown-0") == "unknown-0"


@pytest.mark.slow
def test_forqctl_reports_it_too(pair: Pair) -> None:
    with running(redis=pair.master.url) as forq:
        forq.create("q")
        forq.ctl("pause", "q")
        job_id = forq.ctl("push", "q", "1", "--durable", "replica")
        assert job_id in ids_on_replica(pair)
        pair.proxy.freeze()
        done = forq.run_ctl("push", "q", "2", "--durable", "replica")
        assert done.returncode == 1
        assert "no replica has acknowledged them" in done.stderr
        assert forq.run_ctl("push", "q", "2", "--durable", "disk").returncode == 2


def test_on_a_cluster_it_is_the_replica_of_the_node_that_has_the_queue() -> None:
    with redis_cluster(with_replicas=True) as cluster:
        client = Client(cluster.url)
        for name in ("a", "b", "c", "d"):
            job_id = client.create_queue(name).enqueue(1, durable="replica")
            replica = cluster.replicas[cluster.masters.index(cluster.node_of(f"{{{name}}}"))]
            with replica.connect() as looking:
                looking.execute_command("READONLY")
                assert looking.hexists(f"forq:queue:{{{name}}}:jobs", job_id)
