"""The event loop: descriptors, timers, signals, dead children, and behaviour after a fork."""

import logging
import os
import select
import signal
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from forq.procs.loop import Loop, service_loop


@pytest.fixture(params=["epoll", "poll"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    loop = Loop(poller=select.epoll() if request.param == "epoll" else select.poll())
    yield loop
    loop.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    yield left, right
    left.close()
    right.close()


def tick_until(loop: Loop, condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        loop.tick(0.05)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_reader_and_writer_of_one_descriptor_coexist(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    calls: list[str] = []
    loop.add_reader(left.fileno(), lambda: calls.append(left.recv(10).decode()))
    loop.add_writer(left.fileno(), lambda: calls.append("writable"))
    right.send(b"hello")
    loop.tick(1.0)
    assert calls == ["hello", "writable"]
    loop.remove_writer(left.fileno())
    right.send(b"again")
    loop.tick(1.0)
    assert calls == ["hello", "writable", "again"]
    loop.remove_reader(left.fileno())
    right.send(b"unread")
    loop.tick(0)
    assert calls[3:] == []


def test_a_callback_that_raises_is_logged_and_the_others_are_called(
    loop: Loop, pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def fail() -> None:
        raise ValueError("broken callback")

    loop.add_writer(pair[0].fileno(), fail)
    loop.add_writer(pair[1].fileno(), lambda: calls.append("other"))
    loop.call_later(0, fail)
    loop.call_later(0, lambda: calls.append("timer"))
    with caplog.at_level(logging.ERROR, logger="forq"):
        loop.tick(1.0)
    assert calls == ["other", "timer"]
    assert caplog.text.count("ValueError: broken callback") == 2


def test_a_descriptor_removed_during_the_pass_is_not_called(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    called: list[int] = []

    def remove_the_other(own: int, other: int) -> None:
        called.append(own)
        loop.remove_writer(other)

    first, second = pair[0].fileno(), pair[1].fileno()
    loop.add_writer(first, lambda: remove_the_other(first, second))
    loop.add_writer(second, lambda: remove_the_other(second, first))
    loop.tick(1.0)
    assert len(called) == 1


def test_a_reused_descriptor_does_not_get_the_event_of_its_predecessor(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = os.pipe(), os.pipe()
    os.write(first[1], b"x")
    os.write(second[1], b"x")
    called: list[str] = []
    fresh: list[int] = []

    def replace(other: int) -> None:
        """Both pipes are readable. The first callback closes the other pipe and replaces it with an empty one."""
        called.append("old")
        loop.remove_reader(other)
        read_fd, write_fd = os.pipe()
        os.dup2(read_fd, other)
        fresh.extend((read_fd, write_fd))
        loop.add_reader(other, lambda: called.append("new"))

    loop.add_reader(first[0], lambda: replace(second[0]))
    loop.add_reader(second[0], lambda: replace(first[0]))
    loop.tick(1.0)
    assert called == ["old"]
    assert not caplog.records
    for fd in (*first, *second, *fresh):
        loop.remove_reader(fd)
        os.close(fd)


def test_a_callback_can_remove_its_own_descriptor_and_writer(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    called: list[str] = []
    fd = pair[0].fileno()

    def close() -> None:
        called.append("reader")
        loop.remove_reader(fd)
        loop.remove_writer(fd)

    loop.add_reader(fd, close)
    loop.add_writer(fd, lambda: called.append("writer"))
    pair[1].send(b"x")
    loop.tick(1.0)
    loop.tick(0)
    assert called == ["reader"]


def test_timers_fire_in_order_when_due_and_not_when_cancelled() -> None:
    clock = Clock()
    loop = Loop(now=clock)
    fired: list[str] = []
    loop.call_later(2.0, lambda: fired.append("two"))
    loop.call_later(1.0, lambda: fired.append("one"))
    loop.call_later(1.0, lambda: fired.append("one again"))
    cancelled = loop.call_later(1.5, lambda: fired.append("never"))
    cancelled.cancel()
    cancelled.cancel()
    loop.tick(0)
    assert fired == []
    clock.now += 1.0
    loop.tick(0)
    assert fired == ["one", "one again"]
    clock.now += 10
    loop.tick(0)
    assert fired == ["one", "one again", "two"]
    loop.close()


def test_a_timer_can_be_cancelled_by_one_that_is_due_at_the_same_time() -> None:
    clock = Clock()
    loop = Loop(now=clock)
    fired: list[str] = []

    def first() -> None:
        fired.append("first")
        victim.cancel()

    loop.call_later(1.0, first)
    victim = loop.call_later(1.0, lambda: fired.append("victim"))
    clock.now += 1.0
    loop.tick(0)
    assert fired == ["first"]
    loop.close()


def test_a_timer_that_restarts_itself_does_not_keep_the_tick_from_ending() -> None:
    loop = Loop(now=Clock())
    fired: list[int] = []

    def again() -> None:
        fired.append(1)
        loop.call_later(0, again)

    again()
    loop.tick(None)
    loop.tick(None)
    assert len(fired) == 3
    loop.close()


def test_a_timer_that_is_reset_many_times_leaves_nothing_behind(loop: Loop) -> None:
    fired: list[str] = []
    loop.call_later(0.0, lambda: fired.append("kept"))
    tracemalloc.start()
    try:
        for _ in range(100_000):
            loop.call_later(3600.0, lambda: fired.append("never")).cancel()
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()
    loop.tick(0.0)
    assert fired == ["kept"]


def test_tick_waits_for_the_next_timer_and_no_longer(loop: Loop) -> None:
    fired: list[float] = []
    start = time.monotonic()
    loop.call_later(0.03, lambda: fired.append(time.monotonic() - start))
    tick_until(loop, lambda: fired)
    assert 0.03 <= fired[0] < 2.0


def test_run_ends_after_the_pass_in_which_stop_was_called(loop: Loop) -> None:
    fired: list[str] = []
    loop.call_later(0, loop.stop)
    loop.call_later(0, lambda: fired.append("same round"))
    loop.run()
    assert fired == ["same round"]


def test_a_signal_is_called_back_from_the_loop(loop: Loop) -> None:
    received: list[str] = []
    loop.on_signal(signal.SIGUSR1, lambda: received.append("usr1"))
    loop.on_signal(signal.SIGUSR2, lambda: received.append("usr2"))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert received == []
    tick_until(loop, lambda: received)
    os.kill(os.getpid(), signal.SIGUSR2)
    tick_until(loop, lambda: len(received) > 1)
    assert received == ["usr1", "usr2"]


def test_many_signals_of_one_kind_do_not_hide_another(loop: Loop) -> None:
    received: set[str] = set()
    loop.on_signal(signal.SIGUSR1, lambda: received.add("usr1"))
    loop.on_signal(signal.SIGTERM, lambda: received.add("term"))
    for _ in range(5000):
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    tick_until(loop, lambda: len(received) == 2)


def test_the_callback_for_a_dead_child_runs_once(loop: Loop) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    pidfd = os.pidfd_open(pid)
    codes: list[int] = []
    calls: list[str] = []

    def reap() -> None:
        calls.append("ended")
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    loop.watch_child(pidfd, reap)
    tick_until(loop, lambda: codes)
    loop.tick(0)
    assert (calls, codes) == (["ended"], [3])
    os.close(pidfd)


def test_closing_the_loop_in_a_child_leaves_the_parent_working(
    loop: Loop, pair: tuple[socket.socket, socket.socket]
) -> None:
    received: list[str] = []
    loop.on_signal(signal.SIGUSR1, lambda: received.append("usr1"))
    loop.add_reader(pair[0].fileno(), lambda: received.append(pair[0].recv(10).decode()))
    loop.call_later(60, lambda: received.append("timer"))
    pid = os.fork()
    if pid == 0:
        loop.close_in_child()
        if signal.set_wakeup_fd(-1) != -1:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGUSR1
    loop.tick(0)
    assert received == []
    pair[1].send(b"data")
    tick_until(loop, lambda: received)
    os.kill(os.getpid(), signal.SIGUSR1)
    tick_until(loop, lambda: len(received) > 1)
    assert received == ["data", "usr1"]


def test_each_pass_marks_the_process_as_alive_before_it_waits(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("forq.procs.loop.mark_pass", lambda: order.append("passed"))
    loop.call_later(0.0, lambda: order.append("called"))
    loop.tick(0)
    loop.tick(0)
    assert order == ["passed", "called", "passed"]


def test_a_service_loop_raises_what_its_callback_raises() -> None:
    loop = service_loop()
    loop.call_later(0.0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run()


def test_one_pass_takes_a_limited_number_of_events_and_the_next_takes_the_rest() -> None:
    loop = Loop(max_events=2)
    pairs = [socket.socketpair() for _ in range(5)]
    received: list[int] = []
    for number, (left, right) in enumerate(pairs):
        loop.add_reader(left.fileno(), lambda number=number: received.append(number))  # type: ignore[misc]
        right.send(b"x")
    for count in (2, 4, 5):
        loop.tick(0)
        assert len(set(received)) == count
    loop.close()
    for left, right in pairs:
        left.close()
        right.close()


def test_a_hangup_is_reported_while_reading_is_off(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    hangups: list[str] = []

    def hung_up() -> None:
        hangups.append("hung up")
        loop.on_hangup(left.fileno(), None)

    loop.on_hangup(left.fileno(), hung_up)
    right.send(b"unread")
    right.shutdown(socket.SHUT_WR)
    loop.tick(0.02)
    assert hangups == [], "the other end may still read"
    right.close()
    loop.tick(5)
    loop.tick(0.02)
    assert hangups == ["hung up"]
