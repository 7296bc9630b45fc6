"""Which jobs of a bulk enqueue a queue knows already, for those who want to say how many were new."""

from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.producing import NewJob, chunks


def count_known(link: Link, prefix: str, name: str, jobs: list[NewJob]) -> int:
    """How many of `jobs` an enqueue with if_exists="skip" would leave out: by their id, or by their token.

    A look before the enqueue, and so only for counting: what happens between the two is not seen.
    """
    base = queue_base(prefix, name)
    epoch = (link.call("HGET", f"{base}:options", "epoch") or b"").decode()
    seen: set[str] = set()
    known = 0
    for chunk in chunks(jobs):
        live, *stored = link.pipeline(
            [
                ("HMGET", f"{base}:jobs", *(job.id for job in chunk)),
                *(("EXISTS", f"{base}:token:{epoch}:{job.token}") for job in chunk),
            ]
        )
        for job, record, has_token in zip(chunk, live, stored, strict=True):
            if record is not None or has_token or job.id in seen:
                known += 1
            else:
                seen.add(job.id)
    return known
