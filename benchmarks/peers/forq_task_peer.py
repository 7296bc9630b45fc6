"""forq with an App: the task of tasks.py, and its verbs."""

import os
import sys

import job_run

import forq

app = forq.App("bench", url=f"unix://{os.environ.get('BENCH_SOCKET', '')}")
noop = app.task(name="noop")(job_run.typed)


def _main():
    import forq_peer
    import verbs

    if sys.argv[1] == "work":
        forq_peer.work("forq_task_peer:app")
    forq_peer.bench_queue()
    verbs.main(
        noop.enqueue,
        lambda chunk: app.enqueue_many(noop.prepare(each["n"], verbs.SUBJECT) for each in chunk),
        None,
    )


if __name__ == "__main__":
    _main()
