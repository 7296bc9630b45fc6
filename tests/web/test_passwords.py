"""The check of passwords: cache, limits, and a file that changes."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forq.errors import ConfigError
from forq.web import passwords, users
from forq.web.passwords import ATTEMPTS, ATTEMPTS_SECONDS, MAX_COUNTED, MAX_VERIFIED, Attempts, Passwords, Verified
from forq.web.refusals import Refused
from tests.web.conftest import hashed
from tests.web.serving import PASSWORD, Served, basic

Serve = Callable[..., Served]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hashes that passwords were checked against. The check itself is a comparison here."""
    seen: list[str] = []

    def matches(password: str, stored: str) -> bool:
        seen.append(stored)
        return password == PASSWORD and stored == hashed(PASSWORD)

    monkeypatch.setattr(users, "matches", matches)
    return seen


@pytest.fixture
def check(users_file: Path, clock: Clock) -> Passwords:
    return Passwords(users_file, clock=clock)


def outcome(check: Passwords, name: str, password: str = PASSWORD, client: str = "10.0.0.1") -> Any:
    """The level, or the status of the refusal."""
    try:
        return asyncio.run(check.check(name, password, client))
    except Refused as refused:
        return refused.status


def rewrite(file: Path, content: str) -> None:
    """As `forq web-user` does it."""
    temporary = file.with_name("new")
    temporary.write_text(content)
    temporary.chmod(0o600)
    os.rename(temporary, file)


def test_the_real_hash_admits_the_right_password_only(check: Passwords) -> None:
    assert outcome(check, "alice") == "act"
    assert outcome(check, "bob") == "read"
    assert outcome(check, "bob", PASSWORD + "x") == 401


def test_a_password_that_was_right_costs_no_second_hash(check: Passwords, computed: list[str]) -> None:
    assert [outcome(check, "alice") for _ in range(50)] == ["act"] * 50
    assert len(computed) == 1
    assert outcome(check, "alice", "wrong password") == 401
    assert len(computed) == 2


def test_an_unknown_name_costs_a_hash_with_the_same_parameters(check: Passwords, computed: list[str]) -> None:
    assert outcome(check, "mallory") == 401
    assert outcome(check, "alice", "wrong password") == 401
    dummy, real = (stored.split("$")[:4] for stored in computed)
    assert dummy == real
    # Neither do names and passwords that no file can have end sooner.
    for name, password in (("a:b", "x"), ("../x", PASSWORD), ("alice", "x" * 5000), ("alice", "")):
        assert outcome(check, name, password, "10.0.0.2") == 401
    assert len(computed) == 6


def test_failures_are_limited_by_client_and_name(check: Passwords, computed: list[str], clock: Clock) -> None:
    assert [outcome(check, "bob", f"wrong password {n}") for n in range(ATTEMPTS)] == [401] * ATTEMPTS
    # Without a hash, for this client and for this name.
    assert outcome(check, "bob", client="10.9.9.9") == 429
    assert outcome(check, "alice", client="10.0.0.1") == 429
    assert len(computed) == ATTEMPTS
    assert outcome(check, "alice", client="10.9.9.9") == "act"
    clock.now += ATTEMPTS_SECONDS / ATTEMPTS
    assert outcome(check, "bob") == "read"


def test_who_is_logged_in_is_not_locked_out_by_others(check: Passwords, computed: list[str]) -> None:
    assert outcome(check, "alice", client="10.0.0.2") == "act"
    for n in range(ATTEMPTS + 5):
        outcome(check, "alice", f"wrong password {n}")
    assert outcome(check, "alice", client="10.0.0.2") == "act"


def test_right_passwords_do_not_count(check: Passwords, computed: list[str], users_file: Path) -> None:
    for _ in range(3 * ATTEMPTS):
        os.utime(users_file, ns=(0, len(computed) + 1))
        assert outcome(check, "alice") == "act"
    assert len(computed) == 3 * ATTEMPTS


def test_many_attempts_at_once_are_limited_too(check: Passwords, computed: list[str]) -> None:
    async def all_at_once() -> list[object]:
        tries = (check.check("bob", f"wrong password {n}", "10.0.0.1") for n in range(100))
        return [getattr(answer, "status", answer) for answer in await asyncio.gather(*tries, return_exceptions=True)]

    statuses = asyncio.run(all_at_once())
    assert statuses.count(401) == ATTEMPTS
    assert statuses.count(429) == 100 - ATTEMPTS
    assert len(computed) == ATTEMPTS


def test_a_flood_of_logins_leaves_the_event_loop_free(check: Passwords, monkeypatch: pytest.MonkeyPatch) -> None:
    go, running = threading.Event(), [0, 0]
    lock = threading.Lock()

    def slow(password: str, stored: str) -> bool:
        with lock:
            running[0] += 1
            running[1] = max(running)
        go.wait(20)
        with lock:
            running[0] -= 1
        return False

    monkeypatch.setattr(users, "matches", slow)

    async def flood() -> list[object]:
        tries = [asyncio.ensure_future(check.check(f"user{n}", "wrong password", f"10.0.1.{n}")) for n in range(100)]
        # All that can be refused at once are, while the hashes are being computed.
        done, pending = await asyncio.wait(tries, timeout=0.2)
        assert len(done) == 100 - passwords.MAX_WAITING
        go.set()
        await asyncio.wait(pending)
        return [getattr(each.exception(), "status", None) for each in tries]

    statuses = asyncio.run(flood())
    assert statuses.count(429) == 100 - passwords.MAX_WAITING
    assert running[1] <= passwords.HASH_THREADS


def test_a_changed_file_is_in_effect_at_the_next_request(
    check: Passwords, computed: list[str], users_file: Path
) -> None:
    assert outcome(check, "alice") == "act"
    rewrite(users_file, f"alice:read:{hashed(PASSWORD)}\n")
    assert outcome(check, "alice") == "read"
    assert outcome(check, "bob") == 401
    rewrite(users_file, "")
    assert outcome(check, "alice") == 401


def test_a_user_who_is_removed_during_the_check_is_refused(
    check: Passwords, users_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matches(password: str, stored: str) -> bool:
        rewrite(users_file, "")
        return True

    monkeypatch.setattr(users, "matches", matches)
    assert outcome(check, "alice") == 401


@pytest.mark.parametrize("spoil", ["line", "remove", "open", "link"])
def test_nobody_can_log_in_while_the_file_cannot_be_used(
    check: Passwords, computed: list[str], users_file: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = users_file.read_text()
    assert outcome(check, "alice") == "act"
    if spoil == "line":
        rewrite(users_file, content + "carol:all:x\n")
    elif spoil == "remove":
        users_file.unlink()
    elif spoil == "open":
        users_file.chmod(0o666)
    else:
        users_file.unlink()
        users_file.symlink_to("/nonexistent")
    assert outcome(check, "alice") == 503
    assert outcome(check, "alice") == 503
    reasons = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(reasons) == 1
    expected = {
        "line": "web-users:5: the level",
        "remove": "forq web-user",
        "open": "everybody",
        "link": "No such file",
    }
    assert expected[spoil] in reasons[0]
    users_file.unlink(missing_ok=True)
    rewrite(users_file, content)
    assert outcome(check, "alice") == "act"


def test_a_file_that_cannot_be_used_at_start_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="create it: forq web-user"):
        Passwords(tmp_path / "nothing")
    (tmp_path / "broken").write_text("alice:act:scrypt$1$1$1$x$y\n")
    (tmp_path / "broken").chmod(0o600)
    with pytest.raises(ConfigError, match="broken:1: the hash"):
        Passwords(tmp_path / "broken")


def test_memory_is_bounded(clock: Clock) -> None:
    attempts = Attempts(clock)
    for n in range(3 * MAX_COUNTED):
        attempts.take(f"client {n}")
        if n < ATTEMPTS:
            attempts.take("user alice")
    assert len(attempts) == MAX_COUNTED
    assert attempts.take(f"client {3 * MAX_COUNTED}") == 0
    verified = Verified()
    verified.get(1, "", "")
    for n in range(3 * MAX_VERIFIED):
        verified.add(1, f"user{n}", PASSWORD, "read")
    assert len(verified) == MAX_VERIFIED


def test_a_check_against_an_earlier_file_is_not_remembered() -> None:
    verified = Verified()
    assert verified.get(2, "alice", PASSWORD) is None
    verified.add(1, "alice", PASSWORD, "act")
    assert verified.get(2, "alice", PASSWORD) is None


def test_no_password_is_kept(check: Passwords, computed: list[str]) -> None:
    assert outcome(check, "alice") == "act"
    assert PASSWORD.encode() not in repr(vars(check._verified)).encode()


def test_a_file_that_is_replaced_while_the_server_runs(serve: Serve, users_file: Path) -> None:
    served = serve(users=str(users_file))
    assert served.get(Authorization=basic("alice")).status == 200
    rewrite(users_file, f"carol:act:{hashed(PASSWORD)}\n")
    assert served.get(Authorization=basic("alice")).status == 401
    assert served.get(Authorization=basic("carol")).status == 200
    users_file.chmod(0o606)
    assert served.get(Authorization=basic("carol")).status == 503
