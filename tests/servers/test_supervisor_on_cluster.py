"""A whole supervisor whose queues are on the three nodes of a Redis Cluster."""

import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from forq import Client
from forq.broker.keys import DEFAULT_PREFIX
from forq.services.snapshot import Sampler
from tests.support.drive.redis_cluster import RedisCluster, redis_cluster
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq(cluster: RedisCluster) -> Iterator[Forq]:
    cluster.flush()
    with running(redis=cluster.url) as forq:
        yield forq


def spread(cluster: RedisCluster, stem: str) -> list[str]:
    """The names of queues, one for each node; found by trying."""
    found: dict[int, str] = {}
    for name in (f"{stem}{number}" for number in range(30)):
        found.setdefault(cluster.node_of(f"{{{name}}}").port, name)
    assert len(found) == len(cluster.masters)
    return list(found.values())


def test_jobs_run_on_every_node_and_status_tells_of_all(cluster: RedisCluster, forq: Forq) -> None:
    names = spread(cluster, "work")
    client = Client(cluster.url)
    for name in names:
        forq.create(name, "record")
        client.queue(name).enqueue_many(range(50))
    wait_until(lambda: all(forq.queue_status(name)["done"] == 50 for name in names), what="all have run")
    assert {queue["name"] for queue in forq.status()["queues"]} >= set(names)
    assert "a cluster of 3 masters" in json.dumps(forq.status()["supervisor"]["redis"])
    assert forq.status()["supervisor"]["redis"]["ok"]


def test_questions_about_a_job_are_answered_on_every_node(cluster: RedisCluster, forq: Forq) -> None:
    client = Client(cluster.url)
    for name in spread(cluster, "asked"):
        # Nobody serves it yet.
        job_id = client.create_queue(name).enqueue(1)
        assert "no supervisor serves its queue" in forq.ctl("why", name, job_id)
        assert name in forq.ctl("status")
        seen = forq.run_ctl("watch", name, job_id, "--wait", "100ms")
        assert "waiting" in seen.stdout, seen.stderr


def test_metrics_of_a_cluster_have_a_round_trip(cluster: RedisCluster) -> None:
    unused: Any = None
    sampler = Sampler(url=cluster.url, prefix=DEFAULT_PREFIX, control_socket="", board=unused, stats=unused)
    assert 0 < sampler._ping() < 1


def test_a_delayed_job_is_on_time_whichever_node_it_is_on(cluster: RedisCluster, forq: Forq) -> None:
    names = spread(cluster, "later")
    for name in names:
        forq.create(name, "record")
        forq.wait_for_child(name)
    at, began = time.time() + 0.7, time.monotonic() + 0.7
    client = Client(cluster.url)
    ids = {name: client.queue(name).enqueue(1, run_at=at) for name in names}
    wait_until(lambda: set(ids.values()) <= {trace.job for trace in forq.traces("end")}, what="they have run")
    late = {trace.job: trace.time - began for trace in forq.traces("end") if trace.job in ids.values()}
    # Far less than until the next heartbeat, which would have found them too.
    assert all(-0.01 <= seconds < 2 for seconds in late.values()), late


def test_a_worker_that_was_killed_is_replaced_and_its_job_runs_again(cluster: RedisCluster, forq: Forq) -> None:
    name = spread(cluster, "killed")[1]
    forq.create(name, "sleep")
    job_id = forq.ctl("push", name, "[60]")
    busy = forq.wait_for_child(name, "busy")
    os.kill(busy["pid"], signal.SIGKILL)
    wait_until(partial(has_run, forq, job_id), what="it has run again")


def test_dead_jobs_failed_log_delete_and_recover(cluster: RedisCluster, forq: Forq) -> None:
    name = spread(cluster, "failing")[2]
    forq.create(name, "fail", max_retries=0)
    job_id = forq.ctl("push", name, '{"n": 1}')
    log = forq.state_dir / "logs" / name / "failed.jsonl"
    wait_until(lambda: log.exists() and job_id in log.read_text(), what="the line is written")
    assert [job["id"] for job in json.loads(forq.ctl("dead", "list", name, "--json"))["jobs"]] == [job_id]
    assert forq.run_ctl("delete", name).returncode == 1
    forq.ctl("delete", name, "--force")
    assert name not in Client(cluster.url).queues()
    forq.create(name, "record")
    forq.ctl("recover", str(log))
    wait_until(lambda: forq.queue_status(name)["done"] == 1, what="it has run")


def test_items_are_released_to_who_awaits_them(cluster: RedisCluster, forq: Forq) -> None:
    names = spread(cluster, "release")
    client = Client(cluster.url)
    for name in names:
        client.create_queue(name, mode="auto_release", release_interval="50ms")
        waiting = forq.begin_ctl("await", name, "--wait", "20s", "--json")
        wait_until(partial(is_awaited, client, name), what="it is awaited")
        item = client.queue(name).enqueue("x")
        assert json.loads(waiting.communicate(timeout=20)[0])["id"] == item


def test_a_result_is_waited_for(cluster: RedisCluster, forq: Forq) -> None:
    for name in spread(cluster, "result"):
        forq.create(name, "record", keep_done="1m")
        queue = Client(cluster.url).queue(name)
        queue.wait(queue.enqueue(1), timeout=20)


def test_a_worker_that_waits_for_jobs_stops_at_once(cluster: RedisCluster, forq: Forq) -> None:
    name = spread(cluster, "idle")[0]
    forq.create(name, "record")
    before = forq.wait_for_child(name)
    # It is told through the node that its BLMOVE waits on: else it would take the 10 s that this lasts.
    began = time.monotonic()
    forq.ctl("restart", name)
    forq.wait_for_child(name, not_pid=before["pid"])
    assert time.monotonic() - began < 8


@pytest.mark.slow
def test_while_a_node_is_away_the_queues_of_the_others_are_served_and_nobody_is_evicted() -> None:
    settings = 'heartbeat = "200ms"\nexpiry = "2s"\n'
    with redis_cluster() as cluster, running(redis=cluster.url, settings=settings) as forq:
        away, *others = spread(cluster, "work")
        for name in (away, *others):
            forq.create(name, "record")
            forq.wait_for_child(name)
        pids = {name: forq.child(name)["pid"] for name in others}
        cluster.node_of(f"{{{away}}}").kill()
        wait_until(lambda: forq.status()["supervisor"]["redis"]["ok"] is False, what="it is noticed")
        for name in others:
            # For longer than the expiry, and nobody else has come in its place.
            wait_until(partial(is_renewed, cluster, name, processors(cluster, name)), what="heartbeats go on")
            job_id = Client(cluster.url).queue(name).enqueue(1)
            wait_until(partial(has_run, forq, job_id), what="it has run")
            assert forq.child(name)["pid"] == pids[name]


def has_run(forq: Forq, job_id: str) -> bool:
    return any(trace.job == job_id for trace in forq.traces("end"))


def is_awaited(client: Client, name: str) -> bool:
    return bool(client.queue(name).status()["awaiters"] == 1)


def processors(cluster: RedisCluster, name: str) -> dict[bytes, float]:
    """Who serves the queue, and until when that is believed (ms)."""
    with cluster.node_of(f"{{{name}}}").connect() as client:
        return dict(client.zrange(f"forq:queue:{{{name}}}:processors", 0, -1, withscores=True))


def is_renewed(cluster: RedisCluster, name: str, before: dict[bytes, float]) -> bool:
    now = processors(cluster, name)
    assert before.keys() == now.keys()
    return all(now[processor] > until_ms + 2000 for processor, until_ms in before.items())


def test_jobs_of_another_supervisor_are_controlled_on_every_node(cluster: RedisCluster, forq: Forq) -> None:
    client = Client(cluster.url)
    with running(redis=cluster.url, settings='remote_control = "full"\n') as far:
        for name in spread(cluster, "far"):
            far.create(name, "act")
            client.queue(name).enqueue({"do": "hang"}, id="a")
            wait_until(partial(_runs, far, name, "a"), what="it runs")
            wait_until(partial(_is_announced, client, name), what="its queue is announced")
            assert [stack["job"] for stack in client.queue(name).stack()] == ["a"]
            assert forq.ctl("kill", name, "a").startswith("killing a (process ")


def _runs(forq: Forq, queue: str, job: str) -> bool:
    return bool(forq.child(queue)["job"] == job)


def _is_announced(client: Client, queue: str) -> bool:
    return any(queue in each["queues"] for each in client.supervisors())
