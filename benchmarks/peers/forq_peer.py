"""forq: its verbs, and its handler. `work` becomes a supervisor with the one queue, in the directory BENCH_STATE."""

import os
import sys
from pathlib import Path

import job_run

HERE = Path(__file__).resolve().parent


def handle(data, job):
    job_run.run(data)


def _work():
    import verbs

    state = Path(os.environ["BENCH_STATE"])
    options = f"concurrency = {verbs.CONCURRENCY}\n" if verbs.CONCURRENCY else ""
    config = state / "forq.toml"
    config.write_text(f'[queues.bench]\nhandler = "forq_peer:handle"\npath = ["{HERE}"]\n{options}')
    program = Path(sys.executable).parent / "forq"
    command = [str(program), "run", "--config", str(config), "--state-dir", str(state / "state")]
    os.execv(program, [*command, "--redis", f"unix://{verbs.SOCKET}"])


def _main():
    import verbs

    if sys.argv[1] == "work":
        _work()
    from forq import Client
    from forq.errors import Exists

    client = Client(f"unix://{verbs.SOCKET}")
    try:
        queue = client.create_queue("bench")
    except Exists:
        queue = client.queue("bench")
    verbs.main(queue.enqueue, queue.enqueue_many, None)


if __name__ == "__main__":
    _main()
