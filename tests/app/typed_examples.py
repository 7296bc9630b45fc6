"""Right and wrong uses of tasks. Each line that ends with `# wrong` must be an error for mypy and pyright, no other."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, assert_type

import forq
from forq.api_types import JobInfo, KillInfo, LogRecord, QueueStatus, RefState, StackInfo, SupervisorInfo
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


@app.task(timeout="30s", max_retries=5, backoff=[1, "5s", timedelta(minutes=1)], keep_done=0)
def options(to: str) -> None: ...


@app.task(cron="30 2 * * *", zone="Europe/Berlin", backoff=5, timeout=1.5)
async def nightly(user: int = 0) -> int:
    return user


def notify(data: Any, job: forq.Job) -> None: ...


async def notify_async(data: list[Any], job: forq.Job) -> None: ...


def notify_wrong(data: Any) -> None: ...


def declarations() -> None:
    app.queue("mails", concurrency=8, rate="100/1m", on_dead=notify, keep_done=timedelta(hours=1), max_data="1mb")
    app.queue("slow", on_dead=notify_async)
    app.schedule("report", send.prepare("a"), cron="0 2 * * *", zone="UTC", overlap="queue", catch_up="none")
    app.schedule("nightly", nightly.using(priority=1).prepare(), every=timedelta(hours=1), jitter="5m")
    assert_type(options.enqueue("a"), JobRef[None])
    assert_type(nightly.enqueue(), JobRef[int])
    app.queue("mails", concurency=8)  # wrong
    app.queue("mails", concurrency="8")  # wrong
    app.queue("mails", on_dead=notify_wrong)  # wrong
    app.queue("mails", on_dead=send)  # wrong
    app.schedule("report", send, every=60)  # wrong
    app.schedule("report", send.prepare("a"), evry=60)  # wrong
    app.schedule("report", send.prepare("a"), every=60, overlap="run")  # wrong
    app.task(timeout=None)  # wrong
    app.task(max_retries="5")  # wrong
    app.task(backoff=["1s", None])  # wrong
    app.task(cron=5)  # wrong


def right_uses() -> None:
    assert_type(plain("a"), int)
    assert_type(send("a", subject="b"), Receipt)
    assert_type(send.enqueue("a", copies=2), JobRef[Receipt])
    assert_type(send.enqueue("a").result(timeout=5), Receipt)
    assert_type(send.using(run_in=60, id="42", priority=0).enqueue("a"), JobRef[Receipt])
    assert_type(send.using(timeout="5m", backoff=[1, 5], expires_in=60, keep_done="1h").enqueue("a"), JobRef[Receipt])
    assert_type(send.using(after=[plain.ref("1"), bare.ref("2"), "3"], when="ended").enqueue("a"), JobRef[Receipt])
    assert_type(send.using(after=plain.enqueue("a"), with_results=True).enqueue("a"), JobRef[Receipt])
    assert_type(forq.current_job().results(), list[Any])
    assert_type(send.prepare("a"), Prepared[Receipt])
    assert_type(send.ref("42").result(), Receipt)
    assert_type(app.enqueue_many(send.prepare(to) for to in ["a", "b"]), list[JobRef[Receipt]])
    assert_type(digest.enqueue(7), JobRef[list[str]])
    assert_type(bare.enqueue(7).result(), None)
    either: list[Prepared[object]] = [send.prepare("a"), plain.prepare("b")]
    app.enqueue_many(either)
    for ref in forq.as_completed(app.enqueue_many([send.prepare("a")]), timeout=60):
        assert_type(ref.result(), Receipt)
    task: SyncTask[[str], int] = plain
    other: AsyncTask[[int], None] = bare
    print(task, other)


@app.task
def total(counts: list[int], factor: int = 1) -> float:
    return float(sum(counts) * factor)


def uses_of_flows() -> None:
    with app.flow() as flow:
        receipt = flow.add(send.prepare("a"))
        assert_type(receipt, forq.Node[Receipt])
        words = flow.map(plain, ["a", "b"])
        assert_type(words, list[forq.Node[int]])
        names = flow.then(digest, words[0])
        assert_type(names, forq.Node[list[str]])
        assert_type(flow.then(plain.using(priority=1), flow.add(texts.prepare())), forq.Node[int])
        both = flow.join(total, [*words, flow.then(nightly, words[1])], factor=2)
        assert_type(both, forq.Node[float])
        assert_type(both.ref, JobRef[float])
        assert_type(flow.add(bare.prepare(7), after=[both, receipt], when="ended"), forq.Node[None])
        assert_type(flow.add(bare.prepare(7), after=both).ref.result(), None)
        assert_type(flow.chain(plain.prepare("a"), nightly, digest).id, str)
        flow.then(plain, receipt)  # wrong
        flow.then(digest, names)  # wrong
        flow.then(send, flow.add(texts.prepare()), 7)  # wrong
        flow.then(send, flow.add(texts.prepare()), copies="2")  # wrong
        flow.then(digest, send.enqueue("a"))  # wrong
        flow.then(digest.function, words[0])  # wrong
        flow.join(total, [receipt])  # wrong
        flow.join(total, words, factor="2")  # wrong
        flow.join(total, words[0])  # wrong
        flow.join(digest, words)  # wrong
        flow.map(plain, [1, 2])  # wrong
        flow.add(plain)  # wrong
        flow.add(plain.prepare("a"), after=["42"])  # wrong
        flow.add(plain.prepare("a"), when="failed")  # wrong
        flow.chain(plain, nightly)  # wrong
    number: int = both.ref.result()  # wrong
    print(number)


@app.task
def texts() -> str:
    return ""


def uses_of_batches(client: forq.Client) -> None:
    with app.batch(on_done=bare.prepare(7), on_dead=send.prepare("a"), results=True) as batch:
        assert_type(batch, forq.Batch)
        assert_type(batch.add(plain.prepare("a")), JobRef[int])
        assert_type(batch.enqueue("mails", {"to": "a"}), str)
        batch.add(plain)  # wrong
        batch.add("a")  # wrong
    assert_type(batch.info()["open"], int)
    assert_type(batch.results(), list[Any])
    assert_type(client.find_batch("mails", "42").cancel(), int)
    assert_type(app.batch_of(forq.current_job()), forq.Batch)
    plain.using(after=batch)
    plain.using(after=[batch, "42"])
    app.batch(on_done=send)  # wrong
    app.batch(on_done="send")  # wrong
    app.batch(on_sucess=send.prepare("a"))  # wrong
    client.batch("mails", on_done=send.prepare("a"))  # wrong
    batch.info()["closed"]  # wrong


async def uses_of_async_batches(client: forq.AsyncClient) -> None:
    async with app.abatch(on_end=bare.prepare(7)) as batch:
        assert_type(batch, forq.AsyncBatch)
        assert_type(await batch.add(plain.prepare("a")), JobRef[int])
        await batch.add(plain)  # wrong
    assert_type((await batch.info())["state"] == "done", bool)
    assert_type(await client.find_batch("mails", "42").results(), list[Any])
    async with app.flow() as flow:
        assert_type(flow.then(digest, flow.add(plain.prepare("a"))), forq.Node[list[str]])


async def right_async_uses() -> None:
    assert_type(await digest(7), list[str])
    assert_type(await bare(7), None)
    assert_type(await send.aenqueue("a"), JobRef[Receipt])
    assert_type(await (await send.using(id="42").aenqueue("a")).aresult(timeout=5), Receipt)
    async for ref in forq.as_completed([await digest.aenqueue(7)]):
        assert_type(await ref.aresult(), list[str])
    await send.aenqueue(7)  # wrong


def right_uses_of_clients(client: forq.Client) -> None:
    queue = client.create_queue("mails", mode="work", max_retries=5, keep_done="1h", journal=True)
    assert_type(queue.enqueue({"to": "a"}, if_exists="skip", update_run_at="if_later", durable="replica"), str)
    assert_type(queue.job("42"), JobInfo)
    assert_type(queue.job("42")["retry_count"], int)
    assert_type(queue.job("42").get("fence"), int | None)
    assert_type(queue.status(), QueueStatus)
    assert_type(queue.status()["oldest_waiting_seconds"], float | None)
    assert_type(queue.dead().jobs[0]["died_at"], float)
    assert_type(queue.retry_dead("42"), str)
    assert_type(queue.retry_dead(all=True).done, int)
    assert_type(plain.ref("42").state(), RefState)
    assert_type(client.supervisors(), list[SupervisorInfo])
    assert_type(client.supervisors()[0]["remote_control"], Literal["off", "read", "full"])
    assert_type(queue.kill("42", retry=True), KillInfo)
    assert_type(queue.stack(on="web-1")[0]["seconds"], float | None)
    assert_type(queue.logs(lines=5, job="42"), list[LogRecord])
    queue.restart(on="web-1", wait=timedelta(minutes=1), timeout=5)
    queue.enqueue(1, timeout="5m", max_retries=1, backoff=[1, "5s"], expires_in=60, keep_done="1h")
    queue.enqueue_many([1, 2], timeout=30)
    queue.jobs("blocked")
    queue.schedule("daily", cron="0 9 * * *", overlap="queue", catch_up="all")


async def uses_of_async_clients(client: forq.AsyncClient) -> None:
    queue = await client.create_queue("mails", mode="on_request", lease=10)
    assert_type(await queue.enqueue(1), str)
    assert_type((await queue.job("42"))["state"] == "done", bool)
    assert_type(await client.supervisors(), list[SupervisorInfo])
    assert_type((await queue.kill("42"))["others"], list[str])
    assert_type(await queue.stack(), list[StackInfo])
    await queue.restart(on=1)  # wrong
    await client.create_queue("mails", mod="work")  # wrong
    await queue.enqueue(1, if_exists="replace")  # wrong
    await queue.enqueue_many([1], durable="disk")  # wrong
    await queue.jobs("running")  # wrong
    (await queue.job("42"))["stat"]  # wrong
    (await queue.status())["waitin"]  # wrong
    await queue.schedule("daily", every=60, overlap="wait")  # wrong


def wrong_uses_of_clients(client: forq.Client) -> None:
    queue = client.queue("mails")
    client.create_queue("mails", mode="werk")  # wrong
    client.create_queue("mails", max_retrys=5)  # wrong
    client.create_queue("mails", max_retries="5")  # wrong
    queue.enqueue(1, if_exists="replace")  # wrong
    queue.enqueue(1, update_run_at="later")  # wrong
    queue.enqueue(1, durable="disk")  # wrong
    queue.enqueue(1, max_retries="1")  # wrong
    queue.enqueue(1, timout=5)  # wrong
    queue.enqueue_many([1], backoff={"first": 1})  # wrong
    queue.enqueue_jobs([{"to": "a"}])  # wrong
    queue.jobs("running")  # wrong
    queue.job("42")["stat"]  # wrong
    queue.status()["waitin"]  # wrong
    queue.retry_dead()  # wrong
    queue.retry_dead(all=False)  # wrong
    queue.kill("42", True)  # wrong
    queue.kill("42")["process"]  # wrong
    client.supervisors()[0]["hostname"]  # wrong
    queue.schedule("daily", every=60, catch_up="some")  # wrong
    send.using(if_exists="replace")  # wrong
    send.using(durable=True)  # wrong
    send.using(max_retries="1")  # wrong
    send.using(expires_in=[60])  # wrong


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
    send.using(after=42)  # wrong
    send.using(after=[plain])  # wrong
    send.using(after="42", when="failed")  # wrong
    send.using(after="42", with_results="yes")  # wrong
    send.using(prority=1)  # wrong
    send.using(id=42).enqueue("a")  # wrong
    send.using(id="42").enqueue(7)  # wrong
    digest.enqueue("7")  # wrong
    number: int = send.enqueue("a").result()  # wrong
    text: str = digest.enqueue(7).result()  # wrong
    send.ref(42)  # wrong
    send.delay("a")  # wrong
    send.using(id="42").apply_async(("a",))  # wrong
    app.enqueue_many(["a"])  # wrong
    app.task(que="mails")  # wrong
    forq.as_completed(["42"])  # wrong
    forq.as_completed([plain.ref("42")], timeout="60")  # wrong
    for ref in forq.as_completed([plain.ref("42")]):
        word: str = ref.result()  # wrong
        print(word)
    print(number, text)
