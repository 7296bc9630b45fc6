"""Flows of tasks: a builder whose calls keep the types of the functions. Nothing is stored before the flow is complete.

with app.flow() as flow:
    page = flow.add(fetch.prepare(url))
    rows = flow.then(parse, page)                                  # parse(rows of the page)
    parts = [flow.then(process, rows, number) for number in range(20)]
    total = flow.join(merge, parts)                                # merge([result of each part])
total.ref.result(timeout=60)
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from forq.api_types import When
from forq.app.tasks import JobRef, Prepared, Sender, check_member
from forq.broker.batches import check_batch_id
from forq.broker.dependencies import AS_ARGUMENT, AS_LIST, NOT_USED, check_when
from forq.broker.flows import FlowJob, store_flow
from forq.errors import UnknownQueue, UsageError
from forq.job import new_id
from forq.values import shown

if TYPE_CHECKING:
    from forq.app.app import App
    from forq.client import Client

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T", covariant=True)
U = TypeVar("U")


class Node(Generic[T]):
    """A job of a flow. `ref` refers to it once the flow is stored."""

    def __init__(self, flow: "Flow", number: int, sender: "Sender[..., T]", job_id: str) -> None:
        self.flow = flow
        self.number = number
        self.id = job_id
        self.queue = sender.queue
        self._sender = sender
        self._ref: JobRef[T] | None = None

    @property
    def ref(self) -> JobRef[T]:
        if self._ref is None:
            raise UsageError(f"the jobs of flow {self.flow.id} are not stored yet: leave the `with` block first")
        return self._ref

    def __repr__(self) -> str:
        return f"Node({self._sender._task.name!r}, id={self.id!r})"


class Flow:
    """Jobs that wait for one another, in any queues of an app. The end of the `with` block stores all of them or none;
    an exception in it stores nothing."""

    def __init__(self, app: "App", id: str | None = None) -> None:
        self.id = new_id() if id is None else check_batch_id(id, "flow")
        self._app = app
        self._is_stored = False
        self._nodes: list[Node[Any]] = []
        self._jobs: list[FlowJob] = []

    def add(
        self, prepared: Prepared[U], *, after: "Node[Any] | Iterable[Node[Any]]" = (), when: When = "done"
    ) -> Node[U]:
        """A job with its own arguments: `flow.add(send.prepare("a@b.c"), after=[total])`.

        It waits for the jobs `after`: until all are done, all have "ended", or one is "dead"."""
        check_member(prepared, "a flow", "flow.add(TASK.prepare(…))")
        return self._add(prepared.sender, prepared, [after] if isinstance(after, Node) else after, when, NOT_USED)

    def then(self, task: "Sender[Concatenate[S, P], R]", node: Node[S], *args: P.args, **kwargs: P.kwargs) -> Node[R]:
        """A job whose first argument is the result of another: `flow.then(parse, page)`. The other arguments follow."""
        return self._add_rest(task, [node], AS_ARGUMENT, args, kwargs)

    def join(
        self, task: "Sender[Concatenate[list[S], P], R]", nodes: Iterable[Node[S]], *args: P.args, **kwargs: P.kwargs
    ) -> Node[R]:
        """A job whose first argument is the list of the results of others, in this order: `flow.join(merge, parts)`.
        A job that is given twice counts once."""
        return self._add_rest(task, nodes, AS_LIST, args, kwargs)

    def chain(self, first: Prepared[Any], *tasks: "Sender[..., Any]") -> Node[Any]:
        """A job, and then one per task, each with the result of the one before as its only argument. Returns the last.
        The types of the results are not checked: `then` does that."""
        node: Node[Any] = self.add(first)
        for task in tasks:
            node = self._add_rest(task, [node], AS_ARGUMENT, (), {})
        return node

    def map(self, task: "Sender[[S], R]", values: Iterable[S]) -> list[Node[R]]:
        """One job per value."""
        prepare: Callable[[S], Prepared[R]] = task.prepare
        return [self.add(prepare(value)) for value in values]

    def store(self) -> None:
        """Stores the flow, as the end of the `with` block does. Exists if a job has the id of a live one."""
        self._store(self._app.client)

    async def astore(self) -> None:
        """The same for asyncio. A cancelled call has stored the flow or not."""
        await self._app.async_client._run(self._store)

    def _store(self, client: "Client") -> None:
        self._check_not_stored()
        if not self._jobs:
            return
        for queue in sorted({each.queue for each in self._jobs}):
            _create_if_absent(self._app, client, queue)
        stored = store_flow(client.link(), client.prefix, self.id, self._jobs)
        for node, (id, identity) in zip(self._nodes, stored, strict=True):
            node._ref = node._sender._ref(id, identity)
        self._is_stored = True

    def _check_not_stored(self) -> None:
        if self._is_stored:
            raise UsageError(f"flow {self.id} is stored and cannot change: begin another one with app.flow()")

    def _add(
        self, sender: "Sender[..., U]", prepared: Prepared[U], after: Iterable[Node[Any]], when: str, use: int
    ) -> Node[U]:
        self._check_not_stored()
        check_when(when)
        needs = list(after)
        for node in needs:
            if not isinstance(node, Node) or node.flow is not self:
                raise UsageError(
                    f"{shown(node)} is not a job of this flow: pass what add, then and join have returned; "
                    "jobs that exist are given to using(after=…)"
                )
        if prepared.job.after:
            raise UsageError("jobs of a flow wait for jobs of the same flow: give them as flow.add(…, after=…)")
        node = Node(self, len(self._nodes), sender, prepared.job.id)
        numbers = tuple(dict.fromkeys(each.number for each in needs))
        self._nodes.append(node)
        self._jobs.append(FlowJob(sender.queue, prepared.job, numbers, when, use, prepared.task.name))
        return node

    def _add_rest(
        self, sender: "Sender[..., R]", nodes: Iterable[Node[Any]], use: int, args: tuple[Any, ...], kwargs: Any
    ) -> Node[R]:
        if not isinstance(sender, Sender):
            raise UsageError(f"{shown(sender)} is not a task: pass one that @app.task has made, or TASK.using(…)")
        if isinstance(nodes, Node):
            raise UsageError("join takes the list of the jobs whose results are wanted; for a single one: flow.then")
        needs = list(nodes)
        if not needs:
            raise UsageError(f"task {sender._task.name!r} needs the results of at least one job: none was given")
        prepared = Prepared(sender, sender._new_job(args, kwargs, without_first=True))
        check_member(prepared, "a flow", "flow.then(TASK, …)")
        return self._add(sender, prepared, needs, "done", use)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.store()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            await self.astore()

    def __repr__(self) -> str:
        return f"Flow(id={self.id!r}, {len(self._nodes)} jobs)"


def _create_if_absent(app: "App", client: "Client", queue: str) -> None:
    """As an enqueue of a task does: before anything of the flow is stored."""
    if queue in client.queues():
        return
    try:
        app._create_absent(client, queue)
    except UnknownQueue as exc:
        raise UnknownQueue(f"{exc}; nothing of the flow was stored") from exc
