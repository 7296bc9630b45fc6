"""forq: its verbs, and its handler. `work` becomes a supervisor with the one queue, in the directory BENCH_STATE."""

import os
import sys
from pathlib import Path

import job_run

HERE = Path(__file__).resolve().parent


def handle(data, job):
    job_run.run(data)


def handle_typed(data, job):
    job_run.typed(data["user"], data["subject"])


def work(handler):
    import verbs

    state = Path(os.environ["BENCH_STATE"])
    options = f"concurrency = {verbs.CONCURRENCY}\n" if verbs.CONCURRENCY else ""
    config = state / "forq.toml"
    config.write_text(f'[queues.bench]\nhandler = "{handler}"\npath = ["{HERE}"]\n{options}')
    program = Path(sys.executable).parent / "forq"
    command = [str(program), "run", "--config", str(config), "--state-dir", str(state / "state")]
    os.execv(program, [*command, "--redis", f"unix://{verbs.SOCKET}"])


def bench_queue():
    import verbs

    from forq import Client
    from forq.errors import Exists

    client = Client(f"unix://{verbs.SOCKET}")
    try:
        return client.create_queue("bench")
    except Exists:
        return client.queue("bench")


def _main():
    import verbs

    if sys.argv[1] == "work":
        work("forq_peer:handle_typed" if verbs.TYPED else "forq_peer:handle")
    queue = bench_queue()
    if verbs.TYPED:
        verbs.main(
            lambda user, subject: queue.enqueue({"user": user, "subject": subject}),
            lambda chunk: queue.enqueue_many({"user": each["n"], "subject": verbs.SUBJECT} for each in chunk),
            None,
        )
    else:
        verbs.main(queue.enqueue, queue.enqueue_many, None)


if __name__ == "__main__":
    _main()
