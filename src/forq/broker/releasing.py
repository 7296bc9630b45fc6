"""The call by which a worker of an auto_release queue tries to release the item at the head of the line."""

from dataclasses import dataclass

from forq.broker.codes import OK, PAUSED, error_for
from forq.broker.consuming import Consumer
from forq.broker.scripts import script


@dataclass(frozen=True, slots=True)
class Try:
    """What came of it, and in how many seconds the next one can be made (0: nothing is in line)."""

    paused: bool
    handed_over: bool
    wait_seconds: float


class Releaser:
    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._script = script("release")

    def release(self) -> Try:
        reply = self._consumer.run(self._script, self._consumer.processor, self._consumer.worker, self._consumer.lane)
        if reply[0] == PAUSED:
            return Try(paused=True, handed_over=False, wait_seconds=0.0)
        if reply[0] != OK:
            raise error_for(self._consumer.queue, reply)
        return Try(paused=False, handed_over=reply[1] == 1, wait_seconds=reply[2] / 1_000_000)
