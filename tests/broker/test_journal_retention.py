"""Journal retention: how long entries are kept, when they are trimmed, and entries that cannot be written."""

import pytest

from forq.broker.journal import entry_hash, unpack_entry
from forq.broker.keys import events_key, watermarks_key
from forq.broker.link import Link
from forq.broker.recovery import Heartbeat
from forq.errors import BackPressure
from tests.support.drive.one_queue import EXPIRY_MS, OneQueue, one_queue
from tests.support.drive.server import Server
from tests.support.models.journal_replay import Replay

WEEK_MS = 7 * 24 * 3600 * 1000


def entry_ids(queue: OneQueue) -> list[str]:
    return [entry_id.decode() for entry_id, _ in queue.redis.xrange(queue.key("events"))]


def sequences(queue: OneQueue) -> list[int]:
    return [unpack_entry(fields).sequence for fields in queue.entries()]


def replayed(queue: OneQueue) -> Replay:
    return Replay().read_all(queue.entries())


def beat(queue: OneQueue) -> Heartbeat:
    return queue.recovery().heartbeat(queue.name, EXPIRY_MS, [])


def consumed(queue: OneQueue, **watermarks: str) -> None:
    queue.redis.hset(watermarks_key(queue.base), mapping=watermarks)


def lost(queue: OneQueue) -> int:
    return queue.inspector.counts().journal["lost"]


def test_the_key_names_match_the_scripts(queue: OneQueue) -> None:
    assert events_key(queue.base) == queue.key("events")
    assert watermarks_key(queue.base) == queue.key("journal:watermarks")


def test_the_journal_of_a_deleted_queue_is_kept_for_a_week_and_ends_with_the_deletion(queue: OneQueue) -> None:
    consumed(queue, history="0-1")
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    queue.enqueue("a", if_exists="update")
    worker.turn(failed="a", want=1)
    queue.registry.delete(queue.name, force=True)
    last = queue.events()[-1]
    assert (last.verb, last.cause) == ("deleted", "3"), "one active, one waiting, one dead"
    assert replayed(queue).deleted
    for name in ("events", "journal:watermarks", "counts"):
        assert WEEK_MS - 60_000 < queue.redis.pttl(queue.key(name)) <= WEEK_MS


def test_the_next_queue_of_that_name_continues_the_stream_with_its_own_sequence(queue: OneQueue) -> None:
    queue.enqueue("a")
    first = queue.inspector.counts()
    consumed(queue, history="0-1")
    queue.registry.delete(queue.name, force=True)
    while queue.registry.purge(queue.name, lambda jobs: None):
        pass
    queue.create()
    queue.enqueue("a")
    assert sequences(queue) == [1, 2, 3, 1, 2]
    replay, second = replayed(queue), queue.inspector.counts()
    assert replay.ready == {"a": None}
    assert replay.epoch == second.epoch > first.epoch
    assert (replay.sequence, replay.hash) == (second.journal_sequence, second.journal_hash)
    assert second.journal["entries"] == 5
    assert second.journal["bytes"] > 2 * first.journal["bytes"], "the size covers the whole stream"
    for name in ("events", "journal:watermarks"):
        assert queue.redis.ttl(queue.key(name)) == -1
    assert not queue.redis.exists(queue.key("counts"))
    assert queue.hash("journal:watermarks") == {"history": "0-1"}


def test_a_queue_whose_options_were_lost_starts_a_new_journal(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.redis.delete(queue.key("options"))
    queue.create()
    assert sequences(queue) == [1, 2, 1]
    created = queue.events()[-1]
    assert created.hash == entry_hash("", created.epoch, 1, created.time_us, "-", created.entry or "")


def test_a_queue_with_a_disabled_journal_leaves_no_journal(redis_url: str) -> None:
    with one_queue(redis_url, journal=0) as queue:
        queue.registry.delete(queue.name, force=True)
        assert queue.redis.exists(queue.key("events"), queue.key("counts")) == 0


def test_heartbeats_trim_entries_read_by_all_consumers_except_the_last(queue: OneQueue) -> None:
    for number in range(10):
        queue.enqueue(f"n{number}")
    ids, before = entry_ids(queue), queue.inspector.counts().journal
    consumed(queue, history=ids[7], metrics=ids[4])
    beat(queue)
    assert entry_ids(queue) == ids[4:]
    journal = queue.inspector.counts().journal
    assert (journal["entries"], journal["trimmed"], journal["lost"]) == (7, 4, 0)
    assert journal["bytes"] == before["bytes"] * 7 // 11
    beat(queue)
    assert entry_ids(queue) == ids[4:]
    consumed(queue, metrics=ids[10])
    beat(queue)
    assert entry_ids(queue) == ids[7:]


def test_ids_are_compared_as_numbers(queue: OneQueue) -> None:
    stream = queue.key("events")
    queue.redis.delete(stream)
    for entry_id in ("99-1", "100-2", "100-10", "101-0"):
        queue.redis.xadd(stream, {"x": 1}, id=entry_id)
    consumed(queue, a="100-10", b="101-0")
    beat(queue)
    assert entry_ids(queue) == ["100-10", "101-0"]
    queue.redis.xtrim(stream, 0)
    for entry_id in ("999-0", "1000-2", "1000-10"):
        queue.redis.xadd(stream, {"x": 1}, id=entry_id)
    consumed(queue, a="1000-10", b="1000-2")
    beat(queue)
    assert entry_ids(queue) == ["1000-2", "1000-10"]


def test_without_consumers_heartbeats_trim_nothing(queue: OneQueue) -> None:
    queue.enqueue("a")
    beat(queue)
    assert len(entry_ids(queue)) == 2


@pytest.mark.parametrize(
    "watermark", ["", "x", "5", "1-", "99999999999999999999-1", "1-99999999999999999999", "999999999999999-0"]
)
def test_an_impossible_watermark_trims_nothing_and_stops_nothing(queue: OneQueue, watermark: str) -> None:
    queue.enqueue("a")
    consumed(queue, good=entry_ids(queue)[1], bad=watermark)
    if watermark == "999999999999999-0":
        consumed(queue, good=watermark)
    assert beat(queue).evicted == []
    assert len(entry_ids(queue)) == 2


def fill(queue: OneQueue, entries: int) -> str:
    """Writes this many entries, in chunks: on a busy machine one call would exceed the client's timeout."""
    stream, piece = queue.key("events"), 10_000
    queue.redis.delete(stream)
    for first in range(1, entries, piece):
        text = "for n = ARGV[1], ARGV[2] do redis.call('XADD', KEYS[1], n .. '-0', 'x', '1') end"
        queue.redis.eval(text, 1, stream, first, first + piece - 1)
    return stream


def test_a_very_long_journal_is_trimmed_in_steps(queue: OneQueue) -> None:
    stream = fill(queue, 250_000)
    consumed(queue, history="249950-0")
    lengths = []
    for _ in range(3):
        beat(queue)
        lengths.append(queue.redis.xlen(stream))
    assert lengths == [150_000, 50_000, 51]
    assert entry_ids(queue)[0] == "249950-0"


def test_the_size_limit_counts_unread_entries_as_lost(redis_url: str) -> None:
    with one_queue(redis_url, journal_max=100_000) as queue:
        for number in range(20):
            queue.enqueue(f"n{number}")
        ids = entry_ids(queue)
        consumed(queue, history=ids[5], metrics=ids[9])
        queue.create(journal_max=1000)
        queue.enqueue("last")
        assert entry_ids(queue)[:-1] == ids[11:]
        journal = queue.inspector.counts().journal
        assert (journal["trimmed"], journal["lost"]) == (11, 5), "both consumers had read the first 6"


def test_the_size_limit_trims_all_read_entries_of_a_very_long_journal_at_once(queue: OneQueue) -> None:
    stream = fill(queue, 150_000)
    consumed(queue, history="149950-0")
    queue.change_summary(bytes=10**9)
    queue.enqueue("a")
    assert entry_ids(queue)[:2] == ["149950-0", "149951-0"]
    assert (queue.redis.xlen(stream), lost(queue)) == (52, 0)


def test_without_consumers_the_size_limit_counts_nothing_as_lost(redis_url: str) -> None:
    with one_queue(redis_url, journal_max=1000) as queue:
        for number in range(20):
            queue.enqueue(f"n{number}")
        journal = queue.inspector.counts().journal
        assert journal["trimmed"] > 0
        assert journal["lost"] == 0


def test_the_size_limit_trims_only_read_entries_if_that_is_enough(redis_url: str) -> None:
    with one_queue(redis_url, journal_max=100_000) as queue:
        for number in range(20):
            queue.enqueue(f"n{number}")
        ids = entry_ids(queue)
        consumed(queue, history=ids[15])
        queue.create(journal_max=1000)
        queue.enqueue("last")
        assert entry_ids(queue)[:-1] == ids[15:]
        assert lost(queue) == 0


def test_an_entry_larger_than_the_size_limit_is_kept_until_the_next(redis_url: str) -> None:
    with one_queue(redis_url, journal_max=100) as queue:
        assert sequences(queue) == [1]
        queue.enqueue(*[f"number-{number:03}" for number in range(100)])
        assert sequences(queue) == [2]
        queue.enqueue("a")
        assert sequences(queue) == [3]


def test_an_entry_refused_by_the_server_leaves_only_a_gap(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    entries = queue.redis.dump(queue.key("events"))
    queue.redis.delete(queue.key("events"))
    queue.redis.set(queue.key("events"), "no stream")
    assert worker.turn(want=1) == ["a"]
    assert queue.hash("counts")["journal_lost"] == "1"
    queue.redis.restore(queue.key("events"), 0, entries, replace=True)
    assert worker.turn(done="a", want=1) == ["b"]
    assert sequences(queue) == [1, 2, 4]
    assert lost(queue) == 1


def test_a_refused_entry_counts_no_bytes_and_trims_nothing(queue: OneQueue) -> None:
    before = queue.inspector.counts().journal["bytes"]
    queue.create(journal_max=1)
    queue.redis.set(queue.key("events"), "no stream")
    queue.enqueue("a")
    assert queue.summary().bytes == before


@pytest.mark.parametrize("how", ["create", "configure"])
def test_the_time_while_the_journal_was_off_is_a_gap(queue: OneQueue, how: str) -> None:
    def journal(on: int) -> None:
        if how == "create":
            queue.create(journal=on)
        else:
            queue.registry.configure(queue.name, {"journal": on}, {})

    queue.enqueue("a")
    journal(1)
    queue.enqueue("b")
    journal(0)
    queue.enqueue("c")
    journal(1)
    journal(1)
    queue.enqueue("d")
    assert sequences(queue) == [1, 2, 3, 5]


@pytest.mark.one_server
def test_a_server_out_of_memory_accepts_settling_and_refuses_new_work(server: Server, queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    worker = queue.worker()
    worker.turn(want=2)
    link = Link(server.url)
    link.call("CONFIG", "SET", "maxmemory", "1mb")
    try:
        with pytest.raises(BackPressure):
            queue.enqueue("d")
        assert worker.turn(done="a", failed="b", want=1) == ["c"]
        queue.producer.remove("c")
        queue.recover(worker, running=True)
        beat(queue)
        queue.registry.delete(queue.name, force=True)
    finally:
        link.call("CONFIG", "SET", "maxmemory", "0")
        link.close()
    assert sequences(queue) == list(range(1, 8))
    assert replayed(queue).deleted
