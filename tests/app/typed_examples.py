"""Right and wrong uses of tasks. Each line that ends with `# wrong` must be an error for mypy and pyright, no other."""

from dataclasses import dataclass
from typing import assert_type

import forq
from forq.app.tasks import AsyncTask, JobRef, Prepared, SyncTask

app = forq.App("shop")


@dataclass
class Receipt:
    number: int


@app.task
def plain(to: str) -> int:
    return len(to)


@app.task(queue="mails", dead_on=(ValueError,))
def send(to: str, subject: str = "hi", *, copies: int = 1) -> Receipt:
    return Receipt(copies)


@app.task(name="digest", aliases=["old_digest"])
async def digest(user: int) -> list[str]:
    return [str(user)]


@app.task
async def bare(user: int) -> None: ...


def right_uses() -> None:
    assert_type(plain("a"), int)
    assert_type(send("a", subject="b"), Receipt)
    assert_type(send.enqueue("a", copies=2), JobRef[Receipt])
    assert_type(send.enqueue("a").result(timeout=5), Receipt)
    assert_type(send.using(run_in=60, id="42", priority=0).enqueue("a"), JobRef[Receipt])
    assert_type(send.prepare("a"), Prepared[Receipt])
    assert_type(send.ref("42").result(), Receipt)
    assert_type(app.enqueue_many(send.prepare(to) for to in ["a", "b"]), list[JobRef[Receipt]])
    assert_type(digest.enqueue(7), JobRef[list[str]])
    assert_type(bare.enqueue(7).result(), None)
    either: list[Prepared[object]] = [send.prepare("a"), plain.prepare("b")]
    app.enqueue_many(either)
    task: SyncTask[[str], int] = plain
    other: AsyncTask[[int], None] = bare
    print(task, other)


async def right_async_uses() -> None:
    assert_type(await digest(7), list[str])
    assert_type(await bare(7), None)
    assert_type(await send.aenqueue("a"), JobRef[Receipt])
    assert_type(await (await send.using(id="42").aenqueue("a")).aresult(timeout=5), Receipt)
    await send.aenqueue(7)  # wrong


def wrong_uses() -> None:
    plain(7)  # wrong
    plain.enqueue()  # wrong
    plain.enqueue(7)  # wrong
    plain.enqueue("a", "b")  # wrong
    send.enqueue(subject="b")  # wrong
    send.enqueue("a", topic="b")  # wrong
    send.enqueue("a", copies="2")  # wrong
    send.enqueue("a", "b", 3)  # wrong
    send.prepare(7)  # wrong
    send.using(run_in="60")  # wrong
    send.using(prority=1)  # wrong
    send.using(id=42).enqueue("a")  # wrong
    send.using(id="42").enqueue(7)  # wrong
    digest.enqueue("7")  # wrong
    number: int = send.enqueue("a").result()  # wrong
    text: str = digest.enqueue(7).result()  # wrong
    send.ref(42)  # wrong
    app.enqueue_many(["a"])  # wrong
    app.task(que="mails")  # wrong
    print(number, text)
