"""The scoreboard: packed words, slots, and what other processes see."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forq.errors import ForqError
from forq.procs.scoreboard import (
    DONE,
    POSITION,
    SLOT_BYTES,
    TICK_MS,
    PositionParts,
    Role,
    Scoreboard,
    State,
    WorkerPosition,
    age_ms,
    pack_position,
    unpack_position,
)


@given(st.integers(0, 2**62), st.integers(0, 2**20 - 1), st.integers(0, 2**15 - 1), st.booleans())
def test_a_word_unpacks_to_what_was_packed(started_ns: int, turn: int, index: int, running: bool) -> None:
    word = pack_position(started_ns, turn, index, running)
    assert 0 <= word < 2**64
    assert unpack_position(word) == PositionParts((started_ns >> 20) % 2**28, turn, index, running)


@given(st.integers(0, 2**62), st.integers(0, 70 * 3600 * 10**9))
def test_age_is_accurate_to_one_tick_across_the_wrap(started_ns: int, age_ns: int) -> None:
    word = pack_position(started_ns, 2**20 - 1, 2**15 - 1, True)
    assert abs(age_ms(word, started_ns + age_ns) - age_ns / 1e6) <= TICK_MS


def test_a_job_started_after_the_readers_timestamp_has_age_zero() -> None:
    assert age_ms(pack_position(10**12 + 5_000_000, 1, 0, True), 10**12) == 0.0


def test_turn_and_index_wrap_instead_of_overflowing_into_other_fields() -> None:
    assert unpack_position(pack_position(0, 2**20 + 3, 2**15 + 7, False)) == PositionParts(0, 3, 7, False)


@given(st.integers(0, 2**53 - 1), st.integers(0, 2**20 - 1))
def test_a_position_has_the_full_turn_number_even_between_the_two_stores(number: int, later: int) -> None:
    board = Scoreboard.create(slots=1)
    slot = board.slot(board.take())
    slot.turn = number
    slot.position = word = pack_position(10**12, number, 7, True)
    assert slot.read_position() == WorkerPosition(number, 7, True)
    # The worker took another turn and died before it published its position.
    slot.turn = number + later
    assert slot.read_position() == slot.read_position(word) == WorkerPosition(number, 7, True)


def test_take_returns_the_lowest_free_slot_zeroed() -> None:
    board = Scoreboard.create(slots=4)
    assert [board.take() for _ in range(3)] == [0, 1, 2]
    slot = board.slot(1)
    slot.done, slot.job, slot.queue = 7, b"x" * 128, "emails"
    board.give_back(2)
    board.give_back(1)
    assert board.slot(1).state == State.EMPTY
    assert board.take() == 1
    assert bytes(board.slot(1).bytes) == bytes(SLOT_BYTES)
    assert board.highest == 3


def test_take_raises_when_no_slot_is_left() -> None:
    board = Scoreboard.create(slots=1)
    board.take()
    with pytest.raises(ForqError, match="all 1 slots"):
        board.take()


def test_a_free_slot_cannot_be_released() -> None:
    board = Scoreboard.create(slots=2)
    number = board.take()
    board.give_back(number)
    with pytest.raises(ForqError, match="not taken"):
        board.give_back(number)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_slot_number_outside_the_board_is_refused(number: int) -> None:
    with pytest.raises(ForqError, match="no slot"):
        Scoreboard.create(slots=2).slot(number)


def test_the_parent_sees_what_a_child_stored_without_its_descriptor() -> None:
    board = Scoreboard.create(slots=8)
    number = board.take()
    pid = os.fork()
    if pid == 0:
        os.close(board.fd)
        slot = board.slot(number)
        slot.pid, slot.state, slot.role, slot.epoch = os.getpid(), State.BUSY, Role.RETRY, 2**63
        slot.queue, slot.worker, slot.job = "q" * 64, "w" * 48, b"j" * 128
        slot.held, slot.beat_ns, slot.started_ns = 5, 11, 12
        slot.words[POSITION] = pack_position(3 << 20, 4, 5, True)
        slot.words[DONE] += 9
        board.watching = 1
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    view = board.slot(number)
    assert (view.number, view.pid, view.state, view.role) == (number, pid, State.BUSY, Role.RETRY)
    assert (view.queue, view.worker, view.job) == ("q" * 64, "w" * 48, b"j" * 128)
    assert (view.epoch, view.held, view.done, view.beat_ns, view.started_ns) == (2**63, 5, 9, 11, 12)
    assert unpack_position(view.position) == PositionParts(3, 4, 5, True)
    assert board.watching == 1


def test_a_full_slot_does_not_touch_its_neighbours() -> None:
    board = Scoreboard.create(slots=3)
    for _ in range(3):
        board.take()
    board.slot(1).bytes[:] = b"\xff" * SLOT_BYTES
    assert bytes(board.slot(0).bytes) == bytes(board.slot(2).bytes) == bytes(SLOT_BYTES)
    assert board.highest == 3


def test_texts_are_truncated_and_shorter_ones_replace_longer_ones() -> None:
    slot = Scoreboard.create(slots=1).slot(0)
    slot.queue = "q" * 100
    slot.worker = "w" * 100
    assert (slot.queue, slot.worker) == ("q" * 64, "w" * 48)
    slot.job = b"long-identifier"
    slot.job = b"id"
    slot.queue = ""
    assert (slot.job, slot.queue, slot.worker) == (b"id", "", "w" * 48)
    slot.has_results = True
    slot.job = b"j" * 300
    assert (slot.job, slot.has_results, slot.queue) == (b"j" * 128, True, "")


def test_progress_belongs_to_one_position_and_its_text_is_cut_between_characters() -> None:
    board = Scoreboard.create(slots=2)
    slot, neighbour = board.slot(0), board.slot(1)
    first, second = pack_position(3 << 20, 4, 5, True), pack_position(4 << 20, 4, 6, True)
    slot.words[POSITION] = first
    assert slot.progress() is None
    assert slot.show_progress(first, 0.29, "ü" * 100)
    assert slot.progress() == (0.29, "ü" * 51)
    assert bytes(neighbour.bytes) == bytes(SLOT_BYTES)
    slot.words[POSITION] = second
    assert slot.progress() is None
    assert not slot.show_progress(first, 0.5, "late")
    assert slot.show_progress(second, 0.0, "")
    assert slot.progress() == (0.0, "")
    slot.words[POSITION] = second & ~1
    assert slot.progress() is None, "no job is running"


def test_an_untouched_board_uses_no_memory() -> None:
    board = Scoreboard.create()
    board.take()
    assert board.slots == 32768
    assert os.fstat(board.fd).st_blocks * 512 <= 16384
