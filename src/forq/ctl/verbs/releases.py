"""await, dequeue, ack.

Without --lease the item is acknowledged before it is printed: what was printed has left the queue. If forqctl dies in
between, the item goes back in line when its lease lapses.
"""

from __future__ import annotations

import time

from forq.ctl.client import Client, connect
from forq.ctl.tables import printable, show_json
from forq.errors import ForqError, LeaseLapsed, RedisUnavailable, TimedOut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

ACK_AGAIN_SECONDS = 0.1


def await_release(args: Namespace) -> int:
    """Waits as long as --wait says, else as an explicit --timeout says, else for ever."""
    wait_seconds = args.timeout_seconds if args.wait is None else _seconds(args.wait)
    item = _get(connect(args), "await", {"name": args.name, "id": args.id}, wait_seconds)
    if item is None:
        raise TimedOut(f"queue {args.name} has released {'nothing' if args.id is None else f'no {args.id}'} in time")
    return _show(args, item, ("id", "identifier", "data"))


def dequeue(args: Namespace) -> int:
    params: dict[str, Any] = {"name": args.name, "id": args.id}
    fields: tuple[str, ...] = ("id", "identifier", "data")
    if args.lease is not None:
        params["lease"] = _seconds(args.lease)
        fields = (*fields, "fence", "awaiter", "lease_seconds")
    item = _get(connect(args), "dequeue", params, 0.0 if args.wait is None else _seconds(args.wait))
    if item is None:
        raise TimedOut(f"queue {args.name} has {'nothing' if args.id is None else f'no {args.id}'} to hand out")
    return _show(args, item, fields)


def ack(args: Namespace) -> int:
    params = {"name": args.name, "id": args.id, "fence": args.fence, "awaiter": args.awaiter}
    result = connect(args).call("ack", params)
    if args.json:
        show_json(result)
    else:
        print(f"acknowledged {printable(args.id)}")
    return 0


def _get(client: Client, method: str, params: dict[str, Any], wait_seconds: float | None) -> dict[str, Any] | None:
    """The item, acknowledged unless a lease was asked for; None when time is up."""
    until = None if wait_seconds is None else time.monotonic() + wait_seconds
    while True:
        left_seconds = None if until is None else max(0.0, until - time.monotonic())
        item = _ask(client, method, {**params, "wait": left_seconds})
        if item is None or "lease" in params:
            return item
        try:
            _acknowledge(client, params["name"], item)
        except LeaseLapsed:
            continue
        return item


def _ask(client: Client, method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """The supervisor answers when time is up; it gets as long as for any other answer to say so."""
    number = client.send(method, params)
    wait_seconds = params["wait"]
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds + client.timeout_seconds
    while True:
        answered, value = client.receive(deadline)
        if answered == number:
            if isinstance(value, ForqError):
                raise value
            item: dict[str, Any] | None = value
            return item


def _acknowledge(client: Client, name: str, item: dict[str, Any]) -> None:
    """Repeated while Redis is away: nobody knows otherwise whose the item is."""
    params = {"name": name, "id": item["id"], "fence": item["fence"], "awaiter": item["awaiter"]}
    deadline = time.monotonic() + client.timeout_seconds
    while True:
        try:
            client.call("ack", params)
            return
        except RedisUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(ACK_AGAIN_SECONDS)


def _show(args: Namespace, item: dict[str, Any], fields: tuple[str, ...]) -> int:
    if args.json:
        show_json({field: item[field] for field in fields})
        return 0
    from forq.procs.wire import encode

    who = [item["id"], str(item["fence"]), item["awaiter"]] if "fence" in fields else [item["id"]]
    print(printable(" ".join([*who, encode(item["data"]).decode()])))
    return 0


def _seconds(text: str) -> float:
    from forq.values import parse_duration

    return parse_duration(text)
