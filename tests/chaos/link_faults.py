"""Faults of the connections to the server, injected by the proxies."""

import random

from forq.broker.scripts import FENCED, STALE
from tests.chaos.hit import Hit
from tests.chaos.stage import Stage
from tests.support.faults.proxy import Proxy

# By the number of their proxy.
LINKS = ("producers", "supervisor 1", "supervisor 2")
# Found only in a worker's turn; and the server's answers to a late turn: the worker has taken another turn since, or
# has been removed.
TURN = b"forq_turn_"
REFUSALS = tuple(f"*1\r\n:{code}\r\n".encode() for code in (STALE, FENCED))


def drop_reply(stage: Stage, chance: random.Random) -> Hit | None:
    """Counted when it has happened: `fired` reads the proxies."""
    number = chance.randrange(3)
    stage.proxies[number].drop_reply(chance.choice((1, 2, 3, 5, 8, 13)))
    return Hit(LINKS[number])


def late_request(stage: Stage, chance: random.Random) -> Hit | None:
    """A turn arrives after its worker has reconnected. Counted when the server has refused it: see `fired`."""
    number = chance.choice((1, 2))
    stage.proxies[number].hold_request(TURN, chance.choice((0.5, 1.5, 3.0)))
    return Hit(f"a worker of {LINKS[number]}")


def refused_late(proxy: Proxy) -> int:
    return sum(any(refusal in answer for refusal in REFUSALS) for answer in proxy.late_answers())


def cut(stage: Stage, chance: random.Random) -> Hit | None:
    number = chance.randrange(3)
    connections = stage.proxies[number].connections()
    stage.proxies[number].cut()
    return Hit(f"connections of {LINKS[number]}") if connections else None


def delay(stage: Stage, chance: random.Random) -> Hit | None:
    number = chance.randrange(3)
    stage.proxies[number].delay(chance.choice((0.002, 0.01, 0.05)))

    def undo() -> bool:
        stage.proxies[number].delay(0.0)
        return True

    return Hit(LINKS[number], undo, chance.choice((0.5, 1.5)))


def freeze_link(stage: Stage, chance: random.Random) -> Hit | None:
    """Shorter than an expiry; `partition` is longer."""
    number = chance.randrange(3)
    holder = "producers" if number == 0 else stage.supervisors[number - 1].name
    if not stage.take(holder):
        return None
    stage.proxies[number].freeze()

    def undo() -> bool:
        stage.proxies[number].thaw()
        return stage.release(holder)

    return Hit(LINKS[number], undo, chance.choice((0.1, 0.5, 1.0)))


def half_open(stage: Stage, chance: random.Random) -> Hit | None:
    number = chance.randrange(3)
    if not stage.proxies[number].connections():
        return None
    stage.proxies[number].half_open(pick=chance.random())
    return Hit(f"a connection of {LINKS[number]}")
