"""Programs of the outbox proof, each a process of its own: python -m tests.support.drive.outbox_programs MODE ….

    produce PROCESSES THREADS ORDERS SECONDS   commits orders with their jobs; some transactions are rolled back
    deliver PROCESSES FILE                     forks processes that deliver the outbox, each until it is killed

Both lose replies of Redis at random. A process that delivers kills itself at a random step, or its parent kills it at a
random time; FILE gets a line for each death.
"""

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import django

STEPS = ("read_terms", "mark", "send_marked", "send_rows", "send", "delete", "clear")
# Of each step, and of each reply. More often between the answer of Redis and the DELETE.
DEATHS, DEATHS_AFTER_SEND, LOST_REPLIES = 0.03, 0.3, 0.05
# The longest life of a process that delivers.
LIFE_SECONDS = 1.0
ROLLBACKS = 0.1
PR_SET_PDEATHSIG = 1
SEED = int(os.environ.get("FORQ_TEST_SEED", "0"))


class RolledBack(Exception):
    pass


def lose_replies(chance: random.Random) -> None:
    from forq.broker.enqueue import Producer
    from forq.errors import OutcomeUnknown

    call = Producer.enqueue_identified

    def losing(self: Producer, *args: Any) -> Any:
        stored = call(self, *args)
        if chance.random() < LOST_REPLIES:
            raise OutcomeUnknown("the reply was lost")
        return stored

    setattr(Producer, "enqueue_identified", losing)  # noqa: B010  # a method cannot be assigned


def note_death(file: str, where: str) -> None:
    with open(file, "a") as lines:
        lines.write(f"{where}\n")


def die_at_random_steps(chance: random.Random, file: str) -> None:
    from forq.contrib.django.outbox_delivery import Delivery

    def wrap(step: str) -> None:
        method = getattr(Delivery, step)

        def dying(*args: Any, **how: Any) -> Any:
            die(f"before {step}")
            answer = method(*args, **how)
            die(f"after {step}")
            return answer

        setattr(Delivery, step, dying)

    def die(where: str) -> None:
        if chance.random() < (DEATHS_AFTER_SEND if where == "after send" else DEATHS):
            note_death(file, where)
            os.kill(os.getpid(), signal.SIGKILL)

    for step in STEPS:
        wrap(step)


def produce(name: str, threads: int, orders: int, seconds: float) -> None:
    from forq.contrib.django import outbox

    # So that processes send their own jobs again soon after an outage.
    outbox.PAUSE_SECONDS = 0.2
    lose_replies(random.Random(f"{SEED} {name}"))

    def run(thread: int) -> None:
        chance = random.Random(f"{SEED} {name} {thread}")
        for number in range(thread, orders, threads):
            place_order(f"{name}-{number}", chance)
            time.sleep(chance.uniform(0, 2 * seconds * threads / orders))

    running = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()


def place_order(number: str, chance: random.Random) -> None:
    """Repeats a transaction that the database did not take (SQLite: locked)."""
    from django.db import IntegrityError, OperationalError, transaction

    from tests.support.django_project.orders.models import Order
    from tests.support.django_project.orders.tasks import send_receipt

    while True:
        try:
            with transaction.atomic():
                Order.objects.create(number=number)
                send_receipt.using(outbox="default").enqueue(number)
                if chance.random() < ROLLBACKS:
                    raise RolledBack
            return
        except RolledBack:
            continue
        except IntegrityError:
            return
        except OperationalError as exc:
            print(f"{number}: {exc}", file=sys.stderr, flush=True)


def deliver_until_killed(file: str) -> None:
    from django.db import OperationalError

    from forq.contrib.django.outbox import deliver
    from forq.errors import RedisUnavailable

    chance = random.Random()
    lose_replies(chance)
    die_at_random_steps(chance, file)
    while True:
        with suppress(RedisUnavailable, OperationalError):
            deliver(batch=chance.choice((3, 20, 500)))
        time.sleep(0.02)


def deliver_for_ever(file: str) -> None:
    chance = random.Random()
    while True:
        child = fork(lambda: deliver_until_killed(file))
        ends = time.monotonic() + chance.uniform(0, LIFE_SECONDS)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > ends:
                note_death(file, "at a random time")
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.01)


def fork(run: Callable[[], None]) -> int:
    """The pid of a process that runs this, and dies with its parent. The parent has opened no connection."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have been killed before that.
        if os.getppid() == parent:
            run()
        os._exit(0)
    return child


def main(mode: str, processes: str, *arguments: str) -> None:
    django.setup()
    children = []
    for number in range(int(processes)):
        if mode == "produce":
            threads, orders, seconds = arguments
            name, share = f"p{number}", int(orders) // int(processes)
            children.append(fork(partial(produce, name, int(threads), share, float(seconds))))
        else:
            children.append(fork(partial(deliver_for_ever, *arguments)))
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main(*sys.argv[1:])
