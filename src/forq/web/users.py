"""The file of users of the dashboard, NAME:LEVEL:HASH per line, and the command `forq web-user` that writes it.

1. read_users reads and checks the whole file: a line that is wrong makes it unusable, since it may be the one that was
   meant to take a right away.
2. hash_password and matches: scrypt, with its parameters in the hash.
3. `forq web-user` replaces the file atomically, under a lock of its directory.
"""

import argparse
import base64
import binascii
import fcntl
import getpass
import hashlib
import hmac
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from forq.errors import ConfigError, ForqError, UsageError
from forq.procs.ownership import refuse_changeable, strict_modes

UserLevel = Literal["read", "act"]

MIN_PASSWORD = 12
MAX_PASSWORD = 128
MAX_FILE_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
ALLOWED_NAMES = "1 to 64 of A-Z a-z 0-9 . _ @ + -, the first a letter or a digit"
HARM = "log in to the dashboard and act there"

# 16 MiB and 0.2 s: the parameters that OWASP recommends for this amount of memory.
LOG_N, R, P = 14, 8, 5
SALT_BYTES, HASH_BYTES = 16, 32
# A file must not be able to stop the server with parameters that need minutes or gigabytes.
MAX_SCRYPT_BYTES = 128 << 20
_HASH = re.compile(r"scrypt\$(\d{1,2})\$(\d{1,2})\$(\d{1,2})\$([A-Za-z0-9+/]{22}==)\$([A-Za-z0-9+/]{43}=)")


@dataclass(frozen=True)
class StoredUser:
    level: UserLevel
    hash: str


@dataclass(frozen=True)
class _Parsed:
    log_n: int
    r: int
    p: int
    salt: bytes
    key: bytes

    def derive(self, password: bytes) -> bytes:
        return hashlib.scrypt(
            password, salt=self.salt, n=1 << self.log_n, r=self.r, p=self.p, dklen=HASH_BYTES,
            maxmem=2 * MAX_SCRYPT_BYTES,
        )  # fmt: skip


def hash_password(password: str, salt: bytes | None = None) -> str:
    parsed = _Parsed(LOG_N, R, P, salt or secrets.token_bytes(SALT_BYTES), b"")
    packed = [base64.b64encode(part).decode() for part in (parsed.salt, parsed.derive(password.encode()))]
    return "$".join(["scrypt", str(LOG_N), str(R), str(P), *packed])


def matches(password: str, stored: str) -> bool:
    """Takes a fifth of a second of one CPU. The time depends on the parameters only."""
    parsed = _parse_hash(stored)
    return hmac.compare_digest(parsed.derive(password.encode("utf-8", "surrogatepass")), parsed.key)


def _parse_hash(text: str) -> _Parsed:
    found = _HASH.fullmatch(text)
    if found is None:
        raise UsageError("the hash is not one of `forq web-user`")
    log_n, r, p = (int(number) for number in found.groups()[:3])
    if not (LOG_N <= log_n <= 20 and 1 <= r <= 32 and 1 <= p <= 16 and 128 * r << log_n <= MAX_SCRYPT_BYTES):
        raise UsageError(f"the parameters of the hash are not allowed: N from 2^{LOG_N}, at most 128 MiB")
    try:
        return _Parsed(
            log_n, r, p, base64.b64decode(found[4], validate=True), base64.b64decode(found[5], validate=True)
        )
    except binascii.Error as exc:
        raise UsageError("the hash is not one of `forq web-user`") from exc


def parse_users(content: bytes, path: str) -> dict[str, StoredUser]:
    """Raises ConfigError that names the first line that is wrong."""
    users: dict[str, StoredUser] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip() or line.startswith(b"#"):
            continue
        try:
            name, user = _parse_line(line.decode("ascii").rstrip("\r"))
            if name in users:
                raise UsageError(f"user {name} has an earlier line")
        except (UsageError, UnicodeDecodeError) as exc:
            reason = "it is not ASCII" if isinstance(exc, UnicodeDecodeError) else exc
            raise ConfigError(
                f"{path}:{number}: {reason}; a line is NAME:LEVEL:HASH, written by: forq web-user {path} NAME"
            ) from exc
        users[name] = user
    return users


def _parse_line(line: str) -> tuple[str, StoredUser]:
    name, _, rest = line.partition(":")
    level, _, stored = rest.partition(":")
    check_name(name)
    if level not in ("read", "act"):
        raise UsageError("the level is neither act nor read")
    _parse_hash(stored)
    return name, StoredUser(cast("UserLevel", level), stored)


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise UsageError(f"the name {name[:80]!a} is not allowed: {ALLOWED_NAMES}")
    return name


def read_users(path: Path, environ: Mapping[str, str] = os.environ) -> dict[str, StoredUser]:
    """Raises ConfigError if the file cannot be read, is wrong, or could be changed by another user."""
    return parse_users(_read(path, environ), str(path))


def _read(path: Path, environ: Mapping[str, str]) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"users {path}: not a file")
            if strict_modes(environ):
                refuse_changeable(path, "users", status, harm=HARM)
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        fix = f"; create it: forq web-user {path} NAME" if isinstance(exc, FileNotFoundError) else ""
        raise ConfigError(f"users {path}: {exc.strerror}{fix}") from exc
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"users {path}: larger than {MAX_FILE_BYTES} bytes")
    return content


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file that `users` of [web] names; created if there is none")
    parser.add_argument("name", metavar="NAME", help=ALLOWED_NAMES)
    parser.add_argument(
        "--level",
        choices=("read", "act"),
        help="read: look, without data and messages; act: everything (default: read; of an existing user: unchanged)",
    )
    parser.add_argument("--remove", action="store_true", help="remove the user")
    parser.add_argument("--stdin", action="store_true", help="read the password from stdin, one line, without a prompt")


def run(arguments: argparse.Namespace) -> int:
    try:
        path, name = Path(os.path.realpath(arguments.file)), check_name(arguments.name)
        if arguments.remove:
            print(remove_user(path, name))
        else:
            password = read_password(name, from_stdin=arguments.stdin)
            print(set_user(path, name, password, arguments.level))
    except ForqError as exc:
        print(f"forq: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        print("\nforq: nothing changed", file=sys.stderr)
        return 130
    return 0


def read_password(name: str, *, from_stdin: bool) -> str:
    if from_stdin:
        line = sys.stdin.readline(MAX_PASSWORD * 4 + 2)
        return check_password(line.removesuffix("\n").removesuffix("\r"), name)
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask for a password: pass it with --stdin")
    try:
        password = check_password(getpass.getpass(f"Password of {name}: "), name)
        if getpass.getpass("The same again: ") != password:
            raise UsageError("the passwords differ; nothing changed")
    except EOFError:
        raise UsageError("no password was given; nothing changed") from None
    return password


def check_password(password: str, name: str) -> str:
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise UsageError(f"the password has {len(password)} characters; {MIN_PASSWORD} to {MAX_PASSWORD} are allowed")
    if not password.isprintable():
        # Also lone surrogates: bytes of a terminal that are not UTF-8.
        raise UsageError("the password has characters that browsers cannot send: control characters, or not UTF-8")
    if name.lower() in password.lower() and len(password) < MIN_PASSWORD + len(name):
        raise UsageError("the password contains the name of the user: choose another, or a longer one")
    return password


def set_user(path: Path, name: str, password: str, level: UserLevel | None) -> str:
    """Adds the user, or replaces password and, if given, level. Returns a line that says what was done."""
    with _changing(path) as lines:
        users = parse_users(b"\n".join(lines), str(path))
        before = users.get(name)
        chosen: UserLevel = level or (before.level if before else "read")
        line = f"{name}:{chosen}:{hash_password(password)}".encode()
        _replace_line(lines, name, line)
    return f"{'added' if before is None else 'changed'} {name} ({chosen}) in {path}{_owner_note(path)}"


def remove_user(path: Path, name: str) -> str:
    """A user who is not in the file is no error. Lines that are wrong do not prevent it."""
    if not path.exists():
        return f"{name} is not in {path}: the file does not exist"
    with _changing(path) as lines:
        found = _replace_line(lines, name, None)
    return f"removed {name} from {path}" if found else f"{name} is not in {path}; nothing changed"


def _replace_line(lines: list[bytes], name: str, line: bytes | None) -> bool:
    """Comments and the other lines stay as they are. Returns whether there was a line of this name."""
    places = [at for at, each in enumerate(lines) if each.partition(b":")[0] == name.encode()]
    for at in reversed(places):
        del lines[at]
    if line is not None:
        lines.insert(places[0] if places else len(lines), line)
    return bool(places)


@contextmanager
def _changing(path: Path) -> Iterator[list[bytes]]:
    """The lines of the file; they are written back at the end, if they were changed."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(f"users {path}: {path.parent}: {exc.strerror}") from exc
    try:
        # Of the directory: the file itself is replaced. Released by close.
        fcntl.flock(directory, fcntl.LOCK_EX)
        existing = path.exists() or path.is_symlink()
        content = _read(path, os.environ) if existing else b""
        lines = content.removesuffix(b"\n").split(b"\n") if content else []
        before = list(lines)
        yield lines
        if lines != before or not existing:
            _replace(path, b"".join(line + b"\n" for line in lines))
            os.fsync(directory)
    except OSError as exc:
        raise ForqError(f"users {path}: cannot be written: {exc.strerror}") from exc
    finally:
        os.close(directory)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            if path.exists():
                # forq has to be able to read a file that root changes. Others never get access.
                status = os.stat(path)
                if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), 0o600 | status.st_mode & stat.S_IRGRP)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _owner_note(path: Path) -> str:
    """Root creates files that the user forq cannot read."""
    if os.geteuid() != 0 or os.stat(path).st_uid != 0:
        return ""
    return f"; only root can read it: if forq runs as another user, chown USER {path}"
