"""LineBuffer splits a stream and skips lines that are too long; a LineConnection never blocks its loop."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forq import errors
from forq.procs.lines import LineBuffer, LineConnection
from forq.procs.loop import Loop

TOO_LONG = object()


def all_lines(lines: LineBuffer) -> list[bytes]:
    found = []
    while (line := lines.pop()) is not None:
        found.append(line)
    return found


@given(st.lists(st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"")), max_size=8), st.integers(1, 7))
def test_lines_do_not_depend_on_how_the_bytes_arrive(wanted: list[bytes], step: int) -> None:
    stream = b"".join(line + b"\n" for line in wanted) + b"rest"
    lines = LineBuffer()
    found = []
    for start in range(0, len(stream), step):
        lines.push(stream[start : start + step])
        found += all_lines(lines)
    assert found == wanted
    assert len(lines) == len(b"rest")


def test_a_line_at_the_limit_is_accepted_and_one_byte_more_is_refused() -> None:
    lines = LineBuffer(limit=10)
    lines.push(b"x" * 10 + b"\n")
    assert lines.pop() == b"x" * 10
    lines.push(b"x" * 11)
    with pytest.raises(errors.InvalidData, match="too long"):
        lines.pop()


def test_lines_before_one_that_is_too_long_are_returned() -> None:
    lines = LineBuffer(limit=5)
    lines.push(b"good\n" + b"x" * 6 + b"\n")
    assert lines.pop() == b"good"
    with pytest.raises(errors.InvalidData):
        lines.pop()


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 7))
def test_a_skipped_line_is_reported_once_and_counts_in_the_numbering(lengths: list[int], step: int) -> None:
    stream = b"".join(b"x" * length + b"\n" for length in lengths)
    lines = LineBuffer(limit=6, skip_too_long=True)
    found: list[tuple[int, bool]] = []
    for start in range(0, len(stream), step):
        lines.push(stream[start : start + step])
        while lines.has_line():
            try:
                if (line := lines.pop()) is not None:
                    found.append((lines.number, len(line) == lengths[lines.number - 1]))
            except errors.InvalidData:
                found.append((lines.number, lengths[lines.number - 1] > 6))
    assert found == [(number, True) for number in range(1, len(lengths) + 1)]


def test_a_skipped_line_uses_no_more_memory_than_the_limit() -> None:
    lines = LineBuffer(limit=100, skip_too_long=True)
    refused = 0
    for _ in range(1000):
        lines.push(b"x" * 60)
        try:
            assert lines.pop() is None
        except errors.InvalidData:
            refused += 1
        assert len(lines) <= 160
    lines.push(b"\nnext\n")
    assert (refused, lines.pop(), lines.number) == (1, b"next", 2)


def test_the_rest_at_end_of_file_is_a_line() -> None:
    lines = LineBuffer()
    lines.push(b"one\ntwo")
    lines.end()
    lines.end()
    assert (lines.count(), all_lines(lines)) == (2, [b"one", b"two"])


def cut(*pieces: bytes, limit: int = 5) -> list[object]:
    """Returns (number, line) pairs; TOO_LONG stands for a refused line."""
    lines = LineBuffer(limit, skip_too_long=True)
    found: list[object] = []
    for piece in (*pieces, None):
        lines.end() if piece is None else lines.push(piece)
        while lines.has_line():
            try:
                line = lines.pop()
            except errors.InvalidData:
                found.append((lines.number, TOO_LONG))
            else:
                found += [] if line is None else [(lines.number, line)]
    return found


def test_numbered_lines_do_not_depend_on_how_the_bytes_arrive() -> None:
    whole = [(1, b"ab"), (2, b""), (3, b"cde")]
    assert cut(b"ab\n\ncde\n") == whole
    assert cut(*(bytes([byte]) for byte in b"ab\n\ncde\n")) == whole
    assert cut(b"ab\n\ncde") == whole, "the last line needs no newline"


def test_a_line_that_is_too_long_is_reported_once_and_skipped() -> None:
    for pieces in ((b"123456\nab\n",), (b"123", b"456", b"7890123", b"4\nab\n"), (b"12345", b"6", b"\na", b"b\n")):
        assert cut(*pieces) == [(1, TOO_LONG), (2, b"ab")]
    assert cut(b"12345\n") == [(1, b"12345")]
    assert cut(b"123456") == [(1, TOO_LONG)]


class Ends:
    """A connection on a loop and the socket at the other end."""

    def __init__(self) -> None:
        self.loop = Loop()
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(5)
        self.received: list[bytes] = []
        self.emptied = 0
        self.connection = LineConnection(
            self.loop, ours, self._input, lines=LineBuffer(), on_output=self._output, read_bytes=100
        )

    def _input(self) -> None:
        self.received += all_lines(self.connection.lines)

    def _output(self) -> None:
        self.emptied += 1


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.connection.close()
    ends.theirs.close()
    ends.loop.close()


def test_lines_are_received_and_sent(ends: Ends) -> None:
    ends.theirs.sendall(b"one\ntwo\nth")
    ends.loop.tick(5)
    assert ends.received == [b"one", b"two"]
    ends.connection.send(b"answer\n")
    assert ends.theirs.recv(100) == b"answer\n"
    assert ends.emptied == 0, "all was sent at once"


def test_nothing_is_read_while_reading_is_off(ends: Ends) -> None:
    ends.connection.set_reading(False)
    ends.theirs.sendall(b"later\n")
    ends.loop.tick(0.05)
    assert ends.received == []
    ends.connection.set_reading(True)
    ends.loop.tick(5)
    assert ends.received == [b"later"]


def test_a_slow_reader_blocks_nothing_and_gets_everything(ends: Ends) -> None:
    data = b"x" * 3_000_000 + b"\n"
    ends.connection.send(data)
    ends.connection.send(b"end\n")
    assert ends.connection.unsent_bytes > 2_000_000
    received = 0
    while received < len(data) + 4:
        ends.loop.tick(0)
        received += len(ends.theirs.recv(1 << 20))
    assert (ends.connection.unsent_bytes, ends.emptied) == (0, 1)


def test_end_of_file_is_reported_once_and_earlier_lines_are_kept(ends: Ends) -> None:
    ends.theirs.sendall(b"last\n")
    ends.theirs.close()
    while not ends.connection.ended:
        ends.loop.tick(5)
    assert ends.received == [b"last"]
    assert not ends.connection.reading
    ends.connection.set_reading(True)
    assert not ends.connection.reading, "nothing is left to read"


def test_a_closed_connection_accepts_no_more_data(ends: Ends) -> None:
    ends.connection.send(b"x" * 3_000_000)
    ends.theirs.close()
    while not ends.connection.gone:
        ends.loop.tick(5)
    assert (ends.connection.unsent_bytes, ends.emptied) == (0, 1)
    ends.connection.send(b"more")
    assert ends.connection.unsent_bytes == 0
