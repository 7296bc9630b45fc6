"""Asks the kernel which local user owns the other end of a TCP connection (NETLINK_SOCK_DIAG, sock_diag(7)).

One query for one connection: its cost does not depend on how many sockets there are.
"""

import ipaddress
import socket
import struct
from typing import Literal

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NO_COOKIE = 0xFFFFFFFF
_ALL_STATES = 0xFFFFFFFF
_ANSWER_BYTES = 4096
# nlmsghdr: length, type, flags, sequence, port.
_HEADER = struct.Struct("=IHHII")
# inet_diag_req_v2 before its inet_diag_sockid: family, protocol, extensions, padding, states.
_QUERY = struct.Struct("=BBBBI")
# inet_diag_sockid: ports and addresses in network order, interface, cookie.
_PORTS = struct.Struct("!HH")
_INTERFACE_AND_COOKIE = struct.Struct("=III")
# inet_diag_msg: family, state, timer, retransmissions, inet_diag_sockid, expiry, two queues, uid, inode.
_ANSWER = struct.Struct("=BBBBHH16s16s12sIIIII")

# States of TCP: ESTABLISHED, FIN_WAIT1, FIN_WAIT2. In the last two the client has only ended its sending.
_CONNECTED = (1, 4, 5)
# The first byte of TCP_INFO.
ESTABLISHED, CLOSE_WAIT = 1, 8
# Also finds sockets that are bound to the loopback device, where all connections between local sockets are.
_LOOPBACK_DEVICE = 1

Address = tuple[str, int]
_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def owner_of(client: Address, server: Address) -> int | Literal["gone"] | None:
    """The uid of the process that opened the client's socket; None if this network namespace has no such socket.

    Raises OSError if the kernel cannot be asked. A socket that was closed is reported without an inode, and by older
    kernels as root's: it is "gone".
    """
    source, target = plain_address(client[0]), plain_address(server[0])
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    packed = [address.packed.ljust(16, b"\0") for address in (source, target)]
    query = (
        _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
        + _PORTS.pack(client[1], server[1])
        + b"".join(packed)
        + _INTERFACE_AND_COOKIE.pack(_LOOPBACK_DEVICE, _NO_COOKIE, _NO_COOKIE)
    )
    header = _HEADER.pack(_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(header + query)
        # The kernel answers within the call of send.
        answer = kernel.recv(_ANSWER_BYTES, socket.MSG_DONTWAIT)
    return _read(answer, (source, client[1]), (target, server[1]))


def plain_address(text: str) -> _IPAddress:
    """Without a zone; IPv4 if it is an IPv4 address in IPv6 form."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _read(
    answer: bytes, client: tuple[_IPAddress, int], server: tuple[_IPAddress, int]
) -> int | Literal["gone"] | None:
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        # An error: there is no such socket.
        return None
    family, state, _, _, _, _, source, target, _, _, _, _, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # In network order.
    ports = _PORTS.unpack_from(answer, _HEADER.size + 4)
    if (_unpacked(family, source), ports[0]) != client or (_unpacked(family, target), ports[1]) != server:
        # One that only listens at the client's port.
        return None
    return int(uid) if state in _CONNECTED and inode else "gone"


def _unpacked(family: int, packed: bytes) -> _IPAddress:
    length = 4 if family == socket.AF_INET else 16
    return plain_address(str(ipaddress.ip_address(packed[:length])))
