"""Hooks around the jobs of an app."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import forq
from forq.errors import InvalidTask
from forq.job import Job

JOB = Job("q", "j1", "j1", "work", 5, 0.0, 1)


def work(fail: bool = False) -> str:
    if fail:
        raise ValueError("failed")
    return forq.current_job().id


async def awork(fail: bool = False) -> str:
    await asyncio.sleep(0)
    return work(fail)


class Seen(list[str]):
    """The hooks write into it."""

    def hook(self, name: str, *, swallow: bool = False) -> Callable[[Job], Iterator[None]]:
        def around(job: Job) -> Iterator[None]:
            self.append(f"{name} enters {job.id}")
            try:
                yield
            except ValueError as exc:
                self.append(f"{name} sees {exc}")
                if not swallow:
                    raise
            finally:
                self.append(f"{name} leaves")

        return around

    def async_hook(self, name: str, *, swallow: bool = False) -> Callable[[Job], AsyncIterator[None]]:
        plain = self.hook(name, swallow=swallow)

        async def around(job: Job) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            steps = plain(job)
            next(steps)
            try:
                yield
            except ValueError as exc:
                try:
                    steps.throw(exc)  # type: ignore[attr-defined]  # it is a generator
                except StopIteration:
                    return
            next(steps, None)

        return around


@pytest.fixture
def seen() -> Seen:
    return Seen()


def make_app(function: Callable[..., Any], *hooks: Callable[[Job], Any]) -> forq.App:
    app = forq.App("q")
    app.task(name="work")(function)
    for hook in hooks:
        app.around(hook)
    return app


def run(app: forq.App, **data: Any) -> Any:
    """As a worker runs a job."""
    ended = app(data, JOB)
    return (asyncio.run(ended) if asyncio.iscoroutine(ended) else ended).value


@pytest.mark.parametrize("function", [work, awork])
def test_hooks_are_entered_in_order_and_left_in_reverse(seen: Seen, function: Callable[..., Any]) -> None:
    assert run(make_app(function, seen.hook("a"), seen.hook("b"))) == "j1"
    assert seen == ["a enters j1", "b enters j1", "b leaves", "a leaves"]


def test_an_async_task_may_have_hooks_of_both_kinds(seen: Seen) -> None:
    assert run(make_app(awork, seen.async_hook("a"), seen.hook("b"))) == "j1"
    assert seen == ["a enters j1", "b enters j1", "b leaves", "a leaves"]


@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize("function", [work, awork])
def test_a_hook_sees_an_exception_but_cannot_make_a_success_of_it(
    seen: Seen, function: Callable[..., Any], swallow: bool
) -> None:
    with pytest.raises(ValueError, match="failed"):
        run(make_app(function, seen.hook("a", swallow=swallow)), fail=True)
    assert seen == ["a enters j1", "a sees failed", "a leaves"]


def test_an_async_hook_cannot_swallow_either(seen: Seen) -> None:
    with pytest.raises(ValueError, match="failed"):
        run(make_app(awork, seen.async_hook("a", swallow=True)), fail=True)
    assert seen == ["a enters j1", "a sees failed", "a leaves"]


def test_an_async_hook_around_a_plain_task_is_refused_in_either_order(seen: Seen) -> None:
    app = make_app(work)
    with pytest.raises(InvalidTask, match="async hook around cannot run around task 'work'"):
        app.around(seen.async_hook("a"))
    assert run(app) == "j1"
    assert seen == []
    app = make_app(awork, seen.async_hook("a"))
    with pytest.raises(InvalidTask, match="task 'other'"):
        app.task(name="other")(work)
    assert list(app.tasks) == ["work"]


def test_a_hook_must_be_a_generator_that_takes_the_job() -> None:
    app = forq.App("q")
    with pytest.raises(InvalidTask, match="hook work is not a generator function"):
        app.around(work)  # type: ignore[type-var]
    with pytest.raises(InvalidTask, match=r"cannot be called with \(job\)"):
        app.around(lambda: (yield))  # type: ignore[type-var]


def test_a_lifespan_is_a_generator_function_without_arguments() -> None:
    app = forq.App("a")

    def plain() -> None:
        """Yields nothing."""

    def with_argument(job: Job) -> Iterator[None]:
        yield

    with pytest.raises(InvalidTask, match=r"the lifespan plain is not a generator function; write def plain\(\)"):
        app.lifespan(plain)
    with pytest.raises(InvalidTask, match="the lifespan with_argument cannot be called without arguments"):
        app.lifespan(with_argument)  # type: ignore[type-var]  # that is what this test is about
    assert app.definitions()["hooks"]["lifespan"] == 0


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_hooks_run_around_plain_handlers(is_async: bool, fail: bool) -> None:
    seen = Seen()
    app = forq.App("a")
    app.around(seen.hook("outer"))

    async def ahandle(data: Any, job: Job) -> str:
        return await awork(fail)

    handler = app.around_handler(ahandle if is_async else lambda data, job: work(fail), "m:handle")

    async def call() -> Any:
        result = handler(None, JOB)
        return await result if is_async else result

    if fail:
        with pytest.raises(ValueError, match="failed"):
            asyncio.run(call())
        assert seen == ["outer enters j1", "outer sees failed", "outer leaves"]
    else:
        assert asyncio.run(call()) == "j1"
        assert seen == ["outer enters j1", "outer leaves"]


def test_an_async_hook_around_a_plain_handler_that_is_not_async_is_refused() -> None:
    app = forq.App("a")
    app.around(Seen().async_hook("outer"))
    with pytest.raises(InvalidTask, match="the async hook around cannot run around handler 'm:handle', which is not"):
        app.around_handler(lambda data, job: None, "m:handle")
