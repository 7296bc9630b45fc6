"""Refuses files that another user could change, and with it the code that forq runs or the users that it admits. The
rules are sshd's.

1. A file or directory must belong to root or to the user that forq runs as.
2. Neither its group nor others may write to it. A group whose only member is that user (a user private group) may.
3. The same holds for each parent directory, or the file could be replaced. A sticky directory such as /tmp may be
   writable for all: there, only the owner can rename a file.
"""

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path

from forq.errors import ConfigError

VARIABLE = "FORQ_STRICT_MODES"
# What the other user could do, for the error.
CHOOSE_CODE = "choose code that runs as user {user}"
_VALUES = {"yes": True, "no": False}


def strict_modes(environ: Mapping[str, str]) -> bool:
    """Whether ownership is checked. Not a setting of the config file, which is itself checked."""
    value = environ.get(VARIABLE) or "yes"
    if value not in _VALUES:
        raise ConfigError(f"{VARIABLE} = {value!r} is not allowed: yes or no")
    return _VALUES[value]


def refuse_changeable(path: Path, what: str, status: os.stat_result | None = None, *, harm: str = CHOOSE_CODE) -> None:
    """Raises ConfigError if another user could change or replace the file or directory. `status`: fstat of the file,
    if it is open. `harm`: what that user could do then."""
    real = Path(os.path.realpath(path))
    harm = harm.format(user=_user_name(os.geteuid()))
    _refuse(real, f"{what} {path}", status or os.stat(real), harm, sticky_is_safe=False)
    # The directories of the target, and those of the link if the path is a link.
    for directory in dict.fromkeys([*real.parents, *Path(os.path.realpath(path.parent)).parents]):
        _refuse(directory, f"{what} {path}: its directory {directory}", os.stat(directory), harm, sticky_is_safe=True)


def changeable_by(path: str) -> str | None:
    """The user or group besides root and ourselves that could change it, for a warning; None if none could."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _foreign_writer(path, status, sticky_is_safe=False)


def _refuse(path: Path, named: str, status: os.stat_result, harm: str, *, sticky_is_safe: bool) -> None:
    writer = _foreign_writer(str(path), status, sticky_is_safe=sticky_is_safe)
    if writer is None:
        return
    if writer.startswith("user"):
        fix = f"chown {_user_name(os.geteuid())} {path}"
    else:
        fix = f"chmod {'g' if writer.startswith('group') else 'o'}-w {path}"
    raise ConfigError(
        f"{named} can be changed by {writer}, who could {harm}: {fix} "
        f"(or {VARIABLE}=no, where nobody else has an account)"
    )


def _foreign_writer(path: str, status: os.stat_result, *, sticky_is_safe: bool) -> str | None:
    if status.st_uid not in (0, os.geteuid()) and not is_unmapped(status.st_uid):
        return f"user {_user_name(status.st_uid)}"
    if not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or _is_read_only(path):
        return None
    if sticky_is_safe and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    return None if _is_private(status.st_gid) else f"group {_group_name(status.st_gid)}"


def _is_private(gid: int) -> bool:
    """Whether the group has no members except root and the user of this process."""
    trusted = {0, os.geteuid()}
    try:
        members = grp.getgrgid(gid).gr_mem
    except KeyError:
        members = []
    if any(_uid(name) not in trusted for name in members):
        return False
    primary = {entry.pw_uid for entry in pwd.getpwall() if entry.pw_gid == gid}
    # A group without members here may have members on the machine that the disk comes from.
    return primary <= trusted and (bool(primary & trusted) or bool(members) or gid == os.getegid())


def _is_read_only(path: str) -> bool:
    """Volumes of containers are often writable for all by mode but mounted read-only."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def is_unmapped(uid: int) -> bool:
    """Whether it stands for an owner outside this user namespace, which no user inside can become."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    except (OSError, ValueError):
        return False
    return uid == overflow and not whole


def _uid(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
