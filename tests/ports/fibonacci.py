"""A port of examples/fib.py and examples/run_example.py of RQ 2.10: enqueue many jobs and print their results. With the
retries of RQ's page "Exceptions & Retries" and the two schedules of its page "Cron Scheduler"."""

import forq

app = forq.App("fibonacci")


@app.task(max_retries=3, backoff=[10, 30, 60])
def fibonacci(n: int) -> tuple[int, int]:
    before, value = 0, 1
    for _ in range(n):
        before, value = value, before + value
    return n, value


@app.task(every="30m")
def clean_up() -> None:
    print("cleaned up")


@app.task
def send_news(kind: str, template: str) -> None:
    print(kind, template)


app.schedule("news", send_news.prepare("weekly", template="news.html"), cron="30 10 * * TUE")


def main() -> None:
    refs = app.enqueue_many(fibonacci.prepare(n) for n in range(20, 34))
    for ref in forq.as_completed(refs):
        n, value = ref.result()
        print(f"fib({n}) = {value}")


if __name__ == "__main__":
    main()
