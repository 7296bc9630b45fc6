"""Options of one job: checked as a user gives them, packed into one word, and read back."""

import re
from datetime import timedelta

import pytest

from forq.errors import InvalidData, InvalidOption, UsageError
from forq.job_options import (
    PACKED,
    AttemptOptions,
    StoredOptions,
    check_attempt_options,
    check_expires_in,
    pack_options,
    unpack_options,
)


def test_options_are_packed_into_one_word() -> None:
    options = check_attempt_options(
        timeout="30s", max_retries=5, backoff=[1, "5s", timedelta(minutes=1)], keep_done="1h"
    )
    assert pack_options(options, check_expires_in(90)) == "t=30000,r=5,b=1000:5000:60000,k=3600000,x=90000"


def test_without_options_there_is_nothing_to_pack() -> None:
    assert pack_options(check_attempt_options()) == ""
    assert pack_options(AttemptOptions(), 5) == "x=5"


def test_zero_is_an_option() -> None:
    assert check_attempt_options(timeout=0, max_retries=0, keep_done=0).pack() == "t=0,r=0,k=0"


def test_stored_options_are_read_back() -> None:
    assert unpack_options("t=30000,r=5,b=1000:5000,k=7,x=8,T=9") == StoredOptions(
        timeout_ms=30000,
        max_retries=5,
        backoff_ms=(1000, 5000),
        keep_done_ms=7,
        expires_ms=8,
        tick_ms=9,
    )
    assert unpack_options("-") == StoredOptions()


@pytest.mark.parametrize("packed", ["t", "t=x", "z=1", "t=1,,r=2"])
def test_broken_options_are_refused(packed: str) -> None:
    with pytest.raises(InvalidData, match="broken options of a job"):
        unpack_options(packed)


def test_stronger_options_are_completed_by_weaker_ones() -> None:
    stronger, weaker = AttemptOptions(timeout_ms=0), AttemptOptions(timeout_ms=5, max_retries=3, backoff_ms=(1,))
    assert stronger.over(weaker) == AttemptOptions(timeout_ms=0, max_retries=3, backoff_ms=(1,))


def test_options_are_shown_as_a_user_gives_them() -> None:
    shown = {"timeout": "30s", "max_retries": 5, "backoff": ["1s", "5s"], "keep_done": "1h"}
    assert check_attempt_options(**shown).show() == shown  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": -1}, "timeout = -1 is not allowed: a duration from 0s"),
        ({"timeout": True}, "timeout = True is not allowed"),
        ({"max_retries": 1.5}, "max_retries = 1.5 is not allowed: a whole number"),
        ({"backoff": []}, r"backoff = \[\] is not allowed: a delay, or a list of 1 to 20 delays"),
        ({"backoff": [1, None]}, r"backoff = \[1, None\] is not allowed: a delay, or a list of 1 to 20 delays"),
        ({"backoff": [1, "x"]}, "backoff = 'x' is not allowed: a duration"),
        ({"keep_done": "400d"}, "keep_done = '400d' is not allowed: a duration from 0s to 365d"),
    ],
)
def test_wrong_options_are_refused_with_their_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_attempt_options(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, -1, "x", True, timedelta(0), "366d"])
def test_a_job_expires_after_a_positive_duration(given: object) -> None:
    with pytest.raises(UsageError, match=r"expires_in = .* is not allowed: a duration from 1ms"):
        check_expires_in(given)  # type: ignore[arg-type]


def test_an_error_names_its_place() -> None:
    with pytest.raises(InvalidOption, match=r"^task 'send': timeout"):
        check_attempt_options(timeout="x", where="task 'send'")


@pytest.mark.parametrize(
    "packed",
    [
        "x=5",
        "r=0,T=1700000000000",
        pack_options(check_attempt_options(timeout="30s", max_retries=10**6, backoff=["1s"] * 20, keep_done="365d"), 1),
    ],
)
def test_the_pattern_of_packed_options_matches_what_is_packed(packed: str) -> None:
    assert re.search(PACKED, packed)
    unpack_options(packed)


@pytest.mark.parametrize("packed", ["", "-", "r", "r=", "r=-1", "r=1,", ",r=1", "r=1,r=2", "z=1", "b=1::2", "r=1 t=2"])
def test_the_pattern_of_packed_options_refuses_everything_else(packed: str) -> None:
    assert not re.search(PACKED, packed)
