"""Asks the kernel which user opened a connection, when it is accepted.

1. A Unix socket: the user and the groups of the process that connected (SO_PEERCRED, SO_PEERGROUPS).
2. TCP from this host: the user who opened the other socket, and the groups of that user by name.
3. TCP from elsewhere, and whatever the kernel cannot tell: an address at most, and no user.
"""

import errno
import grp
import logging
import os
import pwd
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from forq.procs.ownership import is_unmapped
from forq.procs.sock_diag import CLOSE_WAIT, ESTABLISHED, owner_of, plain_address
from forq.procs.unix_socket import peer_groups, peer_of

# Key of the scope of a request.
SCOPE_KEY = "forq.peer"

Address = tuple[str, int]
# The kernel, or the sandbox of this process, has no such query.
_NO_SUCH_QUERY = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP)

log = logging.getLogger("forq.web")


@dataclass(frozen=True)
class WebPeer:
    """`local`: on this host, or it may be. `uid` None: not known. `groups` None: to be looked up by the name of the
    user. `address`: None on a Unix socket; IPv4 addresses in IPv6 form are shown as IPv4."""

    kind: Literal["unix", "tcp"]
    local: bool = True
    uid: int | None = None
    groups: frozenset[int] | None = None
    address: str | None = None

    @property
    def origin(self) -> str:
        """For logs, and to count attempts: several local users share the loopback address."""
        if self.uid is not None:
            return f"uid {self.uid}" if self.address is None else f"{self.address} uid {self.uid}"
        return self.address or self.kind


class Connected(Protocol):
    """A socket, or the part of it that asyncio shows to a protocol."""

    @property
    def family(self) -> int: ...

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...

    def getpeername(self) -> Any: ...

    def getsockname(self) -> Any: ...


def find_peer(sock: Connected) -> WebPeer:
    """Never raises: a peer that is not known is admitted nowhere but by its password or its proxy."""
    if sock.family == socket.AF_UNIX:
        return _of_unix_socket(sock)
    try:
        client, server = sock.getpeername()[:2], sock.getsockname()[:2]
        address = plain_address(client[0])
    except (OSError, ValueError, IndexError) as exc:
        log.debug("a client left before it was known", extra={"reason": str(exc)})
        return WebPeer("tcp")
    local, uid = _owner(sock, client, server, address.is_loopback)
    return WebPeer("tcp", local, _known(uid), address=str(address))


def _owner(sock: Connected, client: Address, server: Address, loopback: bool) -> tuple[bool, int | None]:
    """Whether the client may be on this host, and its user."""
    try:
        owner = owner_of(client, server)
        # Asked afterwards: while our end is connected, no other client can have got the same addresses.
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError as exc:
        log.error("cannot ask the kernel which user has connected: %s", exc)
        return loopback or exc.errno not in _NO_SUCH_QUERY, None
    if isinstance(owner, int):
        return True, owner if state in (ESTABLISHED, CLOSE_WAIT) else None
    # A local socket exists as long as our end is established.
    return loopback or owner == "gone" or state != ESTABLISHED, None


def _of_unix_socket(sock: Connected) -> WebPeer:
    try:
        peer = peer_of(sock)
    except OSError as exc:
        log.debug("a client left before it was known", extra={"reason": str(exc)})
        return WebPeer("unix")
    try:
        groups = peer_groups(sock)
    except OSError as exc:
        log.error("cannot read the groups of a client: %s", exc)
        groups = ()
    return WebPeer("unix", True, _known(peer.uid), frozenset({peer.gid, *groups}))


def _known(uid: int | None) -> int | None:
    """All users from outside a user namespace have the same number in it, which may be ours."""
    return None if uid is not None and uid == os.geteuid() and uid != 0 and is_unmapped(uid) else uid


def groups_of_user(uid: int) -> frozenset[int]:
    """By the databases of users and groups. May block, where these are on another host."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


def user_name(uid: int) -> str:
    """May block like groups_of_user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_id(name: str | None, lookup: Callable[[str], grp.struct_group] = grp.getgrnam) -> int | None:
    return None if name is None else lookup(name).gr_gid
