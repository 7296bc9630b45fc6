"""A port of three examples of Celery 5.6.2: next-steps/proj, periodic-tasks/myapp.py, and the two tasks with retries of
django/demoapp/tasks.py. Tasks, results, a schedule, retries."""

import forq

app = forq.App("arithmetic")


@app.task
def plus(left: int, right: int) -> int:
    return left + right


@app.task
def times(left: int, right: int) -> int:
    return left * right


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(every="10s")
def greet(word: str = "hello") -> None:
    print(word)


@app.task(max_retries=2, backoff="10m")
def fail_slowly() -> None:
    raise RuntimeError("on purpose")


@app.task(max_retries=3, backoff=["5s", "10s", "20s"])
def fail_faster() -> None:
    raise RuntimeError("on purpose")
