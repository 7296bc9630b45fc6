"""Jobs that are sent later than they were enqueued: `run_in` and `expires_in` count from the call of `enqueue`."""

import re
import time

from forq.broker.chunks import NewJob

_EXPIRY = re.compile(r"(?<![^,])x=(\d+)")


def job_at_send(job: NewJob, elapsed_seconds: float) -> NewJob:
    """The job as it is sent this long after the call, so that it runs and expires as if it had been sent at once."""
    elapsed_ms = max(0, round(elapsed_seconds * 1000))
    if not elapsed_ms or not (job.run_at or job.options):
        return job
    run_at, late_ms = job.run_at, elapsed_ms
    if run_at.startswith("+"):
        run_in_ms = int(run_at[1:])
        run_at, late_ms = f"+{max(0, run_in_ms - elapsed_ms)}", max(0, elapsed_ms - run_in_ms)
    elif run_at:
        late_ms = min(elapsed_ms, max(0, round(time.time() * 1000) - int(run_at)))
    # At least 1 ms: the job becomes dead as expired, and does not disappear.
    options = _EXPIRY.sub(lambda found: f"x={max(1, int(found[1]) - late_ms)}", job.options)
    return job._replace(run_at=run_at, options=options)
