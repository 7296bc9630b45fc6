"""The file of users, and the command that writes it."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forq.errors import ConfigError, UsageError
from forq.web import users
from forq.web.users import (
    MAX_FILE_BYTES,
    check_name,
    check_password,
    hash_password,
    matches,
    parse_users,
    read_password,
    read_users,
    remove_user,
    set_user,
)
from tests.web.conftest import hashed
from tests.web.serving import NOBODY, PASSWORD


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "hash_password", hashed)


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "forq.cli", "web-user", *arguments]
    return subprocess.run(program, input=stdin, capture_output=True, text=True, timeout=60, start_new_session=True)


def test_a_hash_has_its_parameters_and_a_salt_of_its_own() -> None:
    first, second = hash_password(PASSWORD), hash_password(PASSWORD)
    assert first != second
    assert re.fullmatch(r"scrypt\$14\$8\$5\$[^$:]{24}\$[^$:]{44}", first)
    assert matches(PASSWORD, first)
    assert not matches(PASSWORD + " ", first)
    assert not matches("\udc80", second)


def test_passwords_of_any_language_match() -> None:
    assert matches("größe 中文 пароль", hash_password("größe 中文 пароль"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("alice", "the level"),
        ("alice:act", "the hash"),
        ("alice:act:", "the hash"),
        ("alice:admin:HASH", "the level"),
        ("alice:ACT:HASH", "the level"),
        (" alice:act:HASH", "the name"),
        ("al ice:act:HASH", "the name"),
        ("-x:act:HASH", "the name"),
        (":act:HASH", "the name"),
        ("al\x1b[2Jice:act:HASH", "the name"),
        ("alice:act:HASH:x", "the hash"),
        ("alice:act:HASH ", "the hash"),
        ("alice:act:secret", "the hash"),
        ("alice:act:$2y$05$abc", "the hash"),
        ("alice:act:" + "scrypt$13$8$5$" + "A" * 22 + "==$" + "A" * 43 + "=", "parameters"),
        ("alice:act:" + "scrypt$20$32$5$" + "A" * 22 + "==$" + "A" * 43 + "=", "parameters"),
        ("alice:act:" + "scrypt$14$8$99$" + "A" * 22 + "==$" + "A" * 43 + "=", "parameters"),
        ("bob:read:HASH", "user bob has an earlier line"),
        ("größe:read:HASH", "not ASCII"),
    ],
)
def test_a_line_that_is_wrong_is_reported_with_its_number(line: str, reason: str) -> None:
    stored = hashed(PASSWORD)
    content = f"# people\n\nbob:read:{stored}\n{line.replace('HASH', stored)}\n"
    with pytest.raises(ConfigError, match=f"^/etc/users:4: .*{reason}") as caught:
        parse_users(content.encode(), "/etc/users")
    assert stored not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_comments_and_line_ends_of_other_systems_are_allowed() -> None:
    content = f"# people\r\n\r\nbob:read:{hashed(PASSWORD)}\r\n   \n"
    assert parse_users(content.encode(), "x") == {"bob": users.StoredUser("read", hashed(PASSWORD))}


@pytest.mark.parametrize("spoil", ["mode", "directory", "link", "fifo", "large"])
def test_a_file_that_is_not_safe_is_refused(users_file: Path, spoil: str) -> None:
    file = users_file
    if spoil == "mode":
        file.chmod(0o602)
    elif spoil == "directory":
        file.parent.chmod(0o777)
    elif spoil == "link":
        file = file.with_name("link")
        file.symlink_to(users_file)
    elif spoil == "fifo":
        file = file.with_name("fifo")
        os.mkfifo(file, 0o600)
    else:
        file.write_text("#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match=f"{file}.*(everybody|symbolic|not a file|larger)"):
        read_users(file, {})


def test_the_check_of_owners_can_be_turned_off(users_file: Path) -> None:
    users_file.chmod(0o606)
    assert set(read_users(users_file, {"FORQ_STRICT_MODES": "no"})) == {"alice", "bob"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused_and_says_what_that_user_could_do(users_file: Path) -> None:
    os.chown(users_file, NOBODY, -1)
    with pytest.raises(ConfigError, match="could log in to the dashboard and act there: chown"):
        read_users(users_file, {})


@pytest.mark.usefixtures("quick")
def test_users_are_added_changed_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "users"
    assert set_user(file, "alice", PASSWORD, "act").startswith(f"added alice (act) in {file}")
    assert set_user(file, "bob", PASSWORD, None).startswith("added bob (read)")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("# by hand\n" + file.read_text())
    # The level stays, and so do the order and the comment.
    assert set_user(file, "alice", PASSWORD, None).startswith("changed alice (act)")
    assert set_user(file, "bob", PASSWORD, "act").startswith("changed bob (act)")
    assert [line.partition(":")[0] for line in file.read_text().splitlines()] == ["# by hand", "alice", "bob"]
    assert {name: user.level for name, user in read_users(file, {}).items()} == {"alice": "act", "bob": "act"}
    assert remove_user(file, "alice") == f"removed alice from {file}"
    assert remove_user(file, "alice") == f"alice is not in {file}; nothing changed"
    assert set(read_users(file, {})) == {"bob"}
    assert os.listdir(tmp_path) == ["users"]


@pytest.mark.usefixtures("quick")
def test_the_file_is_replaced_and_never_written_in_place(users_file: Path) -> None:
    before = users_file.stat().st_ino
    with open(users_file, "rb") as old:
        set_user(users_file, "carol", PASSWORD, "read")
        assert users_file.stat().st_ino != before
        assert b"carol" not in old.read()


@pytest.mark.usefixtures("quick")
def test_two_changes_at_once_are_both_kept(tmp_path: Path) -> None:
    file = tmp_path / "users"
    names = [f"user{n}" for n in range(20)]
    threads = [threading.Thread(target=set_user, args=(file, name, PASSWORD, "read")) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_users(file, {})) == set(names)


@pytest.mark.usefixtures("quick")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_and_group_of_the_file_stay_but_others_get_no_access(tmp_path: Path) -> None:
    file = tmp_path / "users"
    set_user(file, "alice", PASSWORD, "act")
    os.chown(file, 0, 1)
    file.chmod(0o644)
    set_user(file, "bob", PASSWORD, "read")
    status = file.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (0, 1, 0o640)


@pytest.mark.usefixtures("quick")
def test_a_broken_file_is_not_written_over_but_a_line_can_be_removed(users_file: Path) -> None:
    broken = users_file.read_text() + "carol:admin:x\n"
    users_file.write_text(broken)
    with pytest.raises(ConfigError, match=":5: the level"):
        set_user(users_file, "alice", PASSWORD, "act")
    assert users_file.read_text() == broken
    remove_user(users_file, "carol")
    assert set(read_users(users_file, {})) == {"alice", "bob"}


def test_names_and_passwords_that_are_allowed() -> None:
    for name in ("alice", "alice@example.com", "a.b-c_d+e", "9"):
        assert check_name(name) == name
    for name in ("", "a:b", "a/b", "../x", ".x", "a b", "a\nb", "x" * 65, "größe"):
        with pytest.raises(UsageError, match="is not allowed"):
            check_name(name)
    for password in ("short", "x" * 11, "x" * 129, "tab\tin a password", "line\nin a password", "\udc80" * 12):
        with pytest.raises(UsageError):
            check_password(password, "alice")
    with pytest.raises(UsageError, match="contains the name"):
        check_password("alice-1234567", "alice")
    assert check_password(PASSWORD, "alice") == PASSWORD


def test_the_password_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([PASSWORD, PASSWORD, PASSWORD, PASSWORD + "x"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(given))
    assert read_password("alice", from_stdin=False) == PASSWORD
    with pytest.raises(UsageError, match="differ"):
        read_password("alice", from_stdin=False)


def test_the_command_writes_a_file_that_the_server_accepts(tmp_path: Path) -> None:
    file = tmp_path / "users"
    done = command(str(file), "alice", "--level", "act", "--stdin", stdin=PASSWORD + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"added alice (act) in {file}")
    assert matches(PASSWORD, read_users(file, {})["alice"].hash)
    done = command(str(file), "alice", "--remove")
    assert (done.returncode, done.stdout) == (0, f"removed alice from {file}\n")


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message"),
    [
        (["FILE", "alice", "--stdin"], "short\n", 2, "5 characters; 12 to 128"),
        (["FILE", "alice", "--stdin"], "", 2, "0 characters"),
        (["FILE", "a:b", "--stdin"], PASSWORD, 2, "the name 'a:b' is not allowed"),
        (["FILE", "alice"], "", 2, "pass it with --stdin"),
        (["FILE/nothing/users", "alice", "--stdin"], PASSWORD, 78, "No such file or directory"),
        (["FILE", "alice", "--level", "admin"], "", 2, "invalid choice"),
    ],
)
def test_mistakes_are_explained_and_change_nothing(
    tmp_path: Path, arguments: list[str], stdin: str, code: int, message: str
) -> None:
    done = command(*(text.replace("FILE", str(tmp_path / "users")) for text in arguments), stdin=stdin)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_the_command_needs_no_web_framework() -> None:
    program = "import sys, forq.web.users; print({'starlette', 'uvicorn', 'jinja2'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
