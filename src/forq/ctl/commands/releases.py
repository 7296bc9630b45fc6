"""The commands await, dequeue and ack, for queues of the release modes.

Without --lease an item is acknowledged before it is printed: a printed item has left the queue. If forqctl dies
earlier, the item goes back in line when its lease lapses.
"""

from __future__ import annotations

import time

from forq.ctl.client import ControlClient, connect
from forq.ctl.command import ID, NAME, WAIT, Argument, Command, duration
from forq.ctl.output import as_json, print_result, printable
from forq.errors import LeaseLapsed, RedisUnavailable, TimedOut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

ACK_RETRY_SECONDS = 0.1
ITEM = Argument("id", nargs="?", metavar="ID", help="the item (default: the next one)")


@Command(
    "await",
    "wait until a queue of mode auto_release releases an item, and print it",
    NAME,
    ITEM,
    WAIT,
    examples=["await crawl --wait 30s"],
    json="`id`, `identifier` and `data` of the item",
    exits={
        1: "refused, for example a queue of another mode",
        4: "no such queue",
        6: "no item was released within --wait, or no answer in time",
    },
)
def await_release(args: Namespace) -> int:
    """Waits for --wait, else an explicit --timeout, else without limit."""
    wait_seconds = args.timeout_seconds if args.wait_seconds is None else args.wait_seconds
    item = _take_item(connect(args), "await", {"name": args.name, "id": args.id}, wait_seconds)
    if item is None:
        raise TimedOut(f"queue {args.name} released {'no item' if args.id is None else f'no item {args.id}'} in time")
    return _print_item(args, item, ("id", "identifier", "data"))


@Command(
    "dequeue",
    "take an item from a queue of mode on_request, and print it",
    NAME,
    ITEM,
    duration("--wait", "wait this long for an item (default: do not wait)", default=0.0),
    duration("--lease", "the item goes back in line unless it is acknowledged (ack) within this time"),
    examples=[
        "dequeue orders  # take an item",
        "dequeue orders --lease 10s  # take an item, to be acknowledged within ten seconds",
    ],
    json="`id`, `identifier` and `data` of the item; with --lease also `fence`, `awaiter` and `lease_seconds`",
    exits={
        1: "refused, for example a queue of another mode",
        4: "no such queue",
        6: "no item within --wait, or no answer in time",
    },
)
def dequeue(args: Namespace) -> int:
    params: dict[str, Any] = {"name": args.name, "id": args.id}
    fields: tuple[str, ...] = ("id", "identifier", "data")
    if args.lease_seconds is not None:
        params["lease"] = args.lease_seconds
        fields = (*fields, "fence", "awaiter", "lease_seconds")
    item = _take_item(connect(args), "dequeue", params, args.wait_seconds)
    if item is None:
        raise TimedOut(f"queue {args.name} has no item{'' if args.id is None else f' {args.id}'} to release")
    return _print_item(args, item, fields)


@Command(
    "ack",
    "acknowledge an item that was dequeued with a lease",
    NAME,
    ID,
    Argument("fence", type=int, metavar="FENCE", help="printed by dequeue"),
    Argument("awaiter", metavar="AWAITER", help="printed by dequeue"),
    examples=["ack orders o1 1794849575579031 01a1e55f129976bd"],
    json="ack",
    exits={1: "too late: the item went back in line", 4: "no such queue or item"},
)
def ack(args: Namespace) -> int:
    params = {"name": args.name, "id": args.id, "fence": args.fence, "awaiter": args.awaiter}
    return print_result(args, connect(args).call("ack", params), f"acknowledged {printable(args.id)}")


def _take_item(
    client: ControlClient, method: str, params: dict[str, Any], wait_seconds: float | None
) -> dict[str, Any] | None:
    """The item, acknowledged unless a lease was requested; None after the timeout."""
    until = None if wait_seconds is None else time.monotonic() + wait_seconds
    while True:
        left_seconds = None if until is None else max(0.0, until - time.monotonic())
        # The supervisor answers after this time; its answer gets the usual timeout on top.
        item: dict[str, Any] | None = client.call(method, {**params, "wait": left_seconds}, wait_seconds=left_seconds)
        if item is None or "lease" in params:
            return item
        try:
            _acknowledge(client, params["name"], item)
        except LeaseLapsed:
            continue
        return item


def _acknowledge(client: ControlClient, name: str, item: dict[str, Any]) -> None:
    """Retries while Redis is unavailable; otherwise it would be unknown whether the item has left the queue."""
    params = {"name": name, "id": item["id"], "fence": item["fence"], "awaiter": item["awaiter"]}
    deadline = time.monotonic() + client.timeout_seconds
    while True:
        try:
            client.call("ack", params)
            return
        except RedisUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(ACK_RETRY_SECONDS)


def _print_item(args: Namespace, item: dict[str, Any], fields: tuple[str, ...]) -> int:
    words = [item["id"], str(item["fence"]), item["awaiter"]] if "fence" in fields else [item["id"]]
    text = f"{printable(' '.join(words))} {as_json(item['data'])}"
    return print_result(args, {field: item[field] for field in fields}, text)
