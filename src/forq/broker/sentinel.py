"""Finds the present master of a server that sentinels watch over.

1. The sentinels are asked one after the other, each with little patience. One that has not heard of a failover yet
   names the old master: so whoever is named is asked whether it is one, and if not, the next sentinel is asked.
2. Nothing is remembered: each new connection asks again. One to an old master ends with the call that it refuses.
"""

from collections.abc import Callable

import hiredis

from forq.broker.connection import Connection
from forq.redis_address import Address

ASK_SECONDS = 1.0


def connect_to_master(address: Address, name: str, connect: Callable[[str], Connection]) -> Connection:
    """A connection to the master, made by `connect` from its URL. OSError says what each sentinel said."""
    found: list[str] = []
    for sentinel in address.hosts:
        said = ""
        try:
            host, port = _ask(address, *sentinel, name)
            said = f"it names {host}:{port}, "
            return _connect(address.server_url(host, port), connect)
        except (OSError, hiredis.HiredisError) as exc:
            found.append(f"{sentinel[0]}:{sentinel[1]}: {said}{exc or type(exc).__name__}")
    raise ConnectionError(f"no sentinel leads to a master {address.master!r} ({'; '.join(found)})")


def _ask(address: Address, host: str, port: int, name: str) -> tuple[str, int]:
    url = address.sentinel_url(host, port)
    connection = Connection(url, name=name, connect_timeout_seconds=ASK_SECONDS, timeout_seconds=ASK_SECONDS)
    try:
        connection.send(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.master))
        answer = connection.receive()
    finally:
        connection.close()
    if isinstance(answer, hiredis.ReplyError):
        raise ConnectionError(str(answer))
    if answer is None:
        raise ConnectionError("it knows no master of that name")
    return answer[0].decode(), int(answer[1])


def _connect(url: str, connect: Callable[[str], Connection]) -> Connection:
    connection = connect(url)
    try:
        connection.send(("INFO", "replication"))
        answer = connection.receive()
        if isinstance(answer, hiredis.ReplyError):
            raise ConnectionError(str(answer))
        if b"role:master" not in answer:
            raise ConnectionError("which is no master (any more)")
    except BaseException:
        connection.close()
        raise
    return connection
