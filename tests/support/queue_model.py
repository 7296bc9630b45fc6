"""What a queue should hold, in plain Python: which jobs exist, in which state, and what the counters say."""

from dataclasses import dataclass, field


@dataclass
class ModelJob:
    priority: int
    owner: str | None = None  # WORKER:FENCE while it is active
    removed: bool = False
    stalls: int = 0


@dataclass
class ModelWorker:
    """What a worker believes: its batch, how many of it ran, and the position that others can see."""

    name: str
    processor: str
    fence: str = ""
    batch: str = ""
    index: int = 0
    running: bool = False
    seen_turn: int = 0
    # Registered with Redis, as opposed to what the worker knows: they differ after a lost reply.
    turn: int = 0
    shift: int = 0
    # What it sends again after a lost reply: (done, failed, fence).
    unsettled: tuple[str, str, str] | None = None
    rescued: bool = False


@dataclass
class ModelQueue:
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    processed: int = 0
    dead: int = 0
    paused: bool = False
    last_fence: int = 0

    def owned(self, worker: ModelWorker) -> list[str]:
        return [job_id for job_id, job in self.jobs.items() if (job.owner or "").partition(":")[0] == worker.name]

    def owns(self, worker: ModelWorker, job_id: str) -> bool:
        return job_id in self.owned(worker)

    def settle(self, worker: ModelWorker, done: str, failed: str, fence: str) -> list[str]:
        """The ids that are refused."""
        refused = []
        for job_id in done + failed:
            job = self.jobs.get(job_id)
            if job is None or job.owner != f"{worker.name}:{fence}":
                refused.append(job_id)
                continue
            del self.jobs[job_id]
            if job_id in done:
                self.processed += 1
            elif not job.removed:
                self.dead += 1
        return refused

    def ran(self, worker: ModelWorker, job_ids: str) -> None:
        """Done without a word of the worker."""
        for job_id in job_ids:
            if self.owns(worker, job_id):
                del self.jobs[job_id]
                self.processed += 1

    def hand_back(self, worker: ModelWorker, job_ids: list[str], stalled: str | None = None) -> None:
        for job_id in job_ids:
            job = self.jobs[job_id]
            if job.removed:
                del self.jobs[job_id]
                continue
            job.owner = None
            job.stalls += job_id == stalled

    def claim(self, worker: ModelWorker, job_ids: list[str], fence: str) -> None:
        assert int(fence) > self.last_fence, "fences grow"
        self.last_fence = int(fence)
        assert len(set(job_ids)) == len(job_ids), "no id twice in a batch"
        priorities = [self.jobs[job_id].priority for job_id in job_ids]
        assert priorities == sorted(priorities)
        for job_id in job_ids:
            assert self.jobs[job_id].owner is None, f"{job_id} is active twice"
            self.jobs[job_id].owner = f"{worker.name}:{fence}"

    def lose_worker(self, worker: ModelWorker, *, count: bool) -> None:
        """The worker is gone; its last visible position tells what it ran."""
        stalled = None
        if worker.seen_turn == worker.turn:
            self.ran(worker, worker.batch[: worker.index])
            if worker.running and count:
                stalled = worker.batch[worker.index]
        self.hand_back(worker, self.owned(worker), stalled)
