"""The bridge's loop with a set clock and fake requests."""

import select
from typing import cast
from unittest.mock import MagicMock

from forq.bridge.loop import Bridge
from forq.bridge.messages import MessageEncoder
from forq.bridge.requests import Requests
from forq.errors import ForqError
from forq.procs.loop import Loop

TICK_SECONDS = 5.0


class RefusedPromotions:
    """The queue has a job that is due in 10 ms, and Redis refuses to promote it."""

    def __init__(self) -> None:
        self.promotions = 0

    def tick(self) -> dict[str, int | None]:
        return {"q": 10}

    def promote(self, queue: str) -> int | None:
        self.promotions += 1
        raise ForqError("refused")


def test_a_refused_promotion_is_repeated_at_the_next_tick_only() -> None:
    now = 100.0
    requests = RefusedPromotions()
    loop = Loop(lambda: now, poller=select.poll())
    subscription = MagicMock(connected=True)
    bridge = Bridge(loop, cast(Requests, requests), subscription, MessageEncoder("b"), tick_seconds=TICK_SECONDS)
    bridge._after_pass()
    assert requests.promotions == 0
    now += 0.011
    assert bridge._after_pass() > 1.0, "it waits for the tick"
    now += 0.5
    bridge._after_pass()
    assert requests.promotions == 1
    now += TICK_SECONDS
    bridge._after_pass()
    now += 0.011
    bridge._after_pass()
    assert requests.promotions == 2
