"""Checks the names and passwords of requests against the file of users.

1. Users: the file, read again when it was replaced or changed. If it is wrong, nobody can log in: an earlier version
   may admit somebody who was removed.
2. Verified: credentials that were right, so that a page costs no scrypt. It keeps no password.
3. Attempts: how many logins may fail, by client and by name.
4. Passwords: all of it. The hash is computed in threads of its own, at most HASH_THREADS at a time, and at most
   MAX_WAITING requests wait for one.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forq.errors import ConfigError
from forq.web import users
from forq.web.refusals import Refused, password_needed, too_many
from forq.web.users import StoredUser, UserLevel

ATTEMPTS = 10
ATTEMPTS_SECONDS = 60.0
MAX_COUNTED = 4096
MAX_VERIFIED = 256
HASH_THREADS = 2
MAX_WAITING = 16
BUSY_SECONDS = 2.0

log = logging.getLogger("forq.web")


class Users:
    """The content of the file. `version` grows with each change."""

    def __init__(self, path: Path, environ: Mapping[str, str] = os.environ) -> None:
        """Raises ConfigError: a server should not start with a file that it cannot use."""
        self._path = path
        self._environ = environ
        self._seen: tuple[int, ...] | None = None
        self._users: dict[str, StoredUser] = {}
        self._error: ConfigError | None = None
        self.version = 0
        self.read()
        if self._error is not None:
            raise self._error

    def read(self) -> Mapping[str, StoredUser] | None:
        """The users; None if the file cannot be used now. The log has the reason, once per change."""
        try:
            status = os.stat(self._path)
            seen: tuple[int, ...] = (
                status.st_dev,
                status.st_ino,
                status.st_mtime_ns,
                status.st_ctime_ns,
                status.st_size,
            )
        except OSError:
            seen = ()
        if seen != self._seen:
            self._seen = seen
            self.version += 1
            self._load()
        return self._users if self._error is None else None

    def _load(self) -> None:
        try:
            # The real path: volumes of containers replace such files by a link.
            path = Path(os.path.realpath(self._path))
            self._users, self._error = users.read_users(path, self._environ), None
        except ConfigError as exc:
            self._users, self._error = {}, exc
            if self.version > 1:
                log.error("nobody can log in to the dashboard: %s", exc)
            return
        if self._seen and os.stat(path).st_mode & stat.S_IROTH:
            log.warning("every user of this machine can read the password hashes in %s: chmod o-r %s", path, path)
        log.info("users of the dashboard were read file=%s users=%s", path, len(self._users))


class Verified:
    """Levels of credentials that were right. The key is a MAC under a key of this process: memory that leaks later,
    such as a core dump, lets nobody test passwords faster than the file would. Bounded; the least used goes first."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._version = 0
        self._levels: OrderedDict[bytes, UserLevel] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def get(self, version: int, name: str, password: str) -> UserLevel | None:
        if version != self._version:
            self._levels.clear()
            self._version = version
        mac = self._mac(name, password)
        level = self._levels.get(mac)
        if level is not None:
            self._levels.move_to_end(mac)
        return level

    def add(self, version: int, name: str, password: str, level: UserLevel) -> None:
        """`version`: of the file that the password was checked against."""
        if version != self._version:
            return
        self._levels[self._mac(name, password)] = level
        while len(self._levels) > MAX_VERIFIED:
            self._levels.popitem(last=False)

    def _mac(self, name: str, password: str) -> bytes:
        # A name has no colon.
        return hmac.digest(self._key, f"{name}:{password}".encode("utf-8", "surrogatepass"), hashlib.sha256)


class Attempts:
    """A bucket of ATTEMPTS tokens per key, refilled within ATTEMPTS_SECONDS. A login takes a token before its password
    is checked, and gets it back if it was right: otherwise many could be tried at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Key to tokens and the time of that count; the least recently used first.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, *keys: str) -> float:
        """Takes a token of each key and returns 0; or takes none and returns the seconds until there is one."""
        now = self._clock()
        left = {key: self._tokens(key, now) for key in keys}
        lowest = min(left.values())
        if lowest < 1:
            return (1 - lowest) * ATTEMPTS_SECONDS / ATTEMPTS
        for key, tokens in left.items():
            self._put(key, tokens - 1, now)
        return 0.0

    def give_back(self, *keys: str) -> None:
        now = self._clock()
        for key in keys:
            self._put(key, min(ATTEMPTS, self._tokens(key, now) + 1), now)

    def _tokens(self, key: str, now: float) -> float:
        tokens, at = self._buckets.get(key, (float(ATTEMPTS), now))
        return min(float(ATTEMPTS), tokens + (now - at) * ATTEMPTS / ATTEMPTS_SECONDS)

    def _put(self, key: str, tokens: float, now: float) -> None:
        self._buckets[key] = (tokens, now)
        self._buckets.move_to_end(key)
        while len(self._buckets) > MAX_COUNTED:
            self._buckets.popitem(last=False)


class Passwords:
    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.monotonic, environ: Mapping[str, str] = os.environ
    ) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._users = Users(path, environ)
        self._verified = Verified()
        self._attempts = Attempts(clock)
        self._threads = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="forq-scrypt")
        self._waiting = 0
        # For names that are not in the file: their check must take as long.
        self._no_user = StoredUser("read", users.hash_password(secrets.token_hex(16)))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, name: str, password: str, client: str) -> UserLevel:
        """The level of the user. `client`: the address or the local user that the request comes from. Raises Refused:
        401, 429 after too many failures, 503 if the file cannot be used."""
        known = self._users.read()
        version = self._users.version
        if known is None:
            raise Refused(503, "The file of users cannot be used.", "The log of forq says why.")
        level = self._verified.get(version, name, password)
        if level is not None:
            return level
        if not users.NAME.fullmatch(name) or not 0 < len(password) <= users.MAX_PASSWORD:
            # Such a name is in no file, such a password in no hash.
            name, user, password = "-", None, "-"
        else:
            user = known.get(name)
        keys = f"client {client}", f"user {name}"
        if wait := self._attempts.take(*keys):
            raise too_many("Too many logins have failed.", wait)
        if not await self._matches(password, user, keys):
            log.warning("login failed user=%s from=%s", name, client)
            raise password_needed("The name or the password is wrong.")
        assert user is not None
        self._attempts.give_back(*keys)
        # The file may have changed while the hash was computed.
        current = self._users.read()
        if current is None or current.get(name) != user:
            raise password_needed("The file of users has changed.", "Log in again.")
        self._verified.get(self._users.version, name, password)
        self._verified.add(self._users.version, name, password, user.level)
        log.info("login user=%s level=%s from=%s", name, user.level, client)
        return user.level

    async def _matches(self, password: str, user: StoredUser | None, keys: tuple[str, ...]) -> bool:
        if self._waiting >= MAX_WAITING:
            self._attempts.give_back(*keys)
            raise too_many("Too many logins are being checked.", BUSY_SECONDS)
        self._waiting += 1
        try:
            stored = (user or self._no_user).hash
            right = await asyncio.get_running_loop().run_in_executor(self._threads, users.matches, password, stored)
        finally:
            self._waiting -= 1
        return right and user is not None
