"""How far a running job is: its worker's call that says so, and what is stored."""

from typing import Any

from forq.broker.codes import OK, error_for
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.scripts import script


def report_progress(
    link: Link, prefix: str, queue: str, worker: str, job_id: str, fence: int, fraction: float, text: str
) -> bool:
    """False if that worker does not run that job (any more). Safe to repeat."""
    reply = link.run(script("progress"), queue_base(prefix, queue), worker, job_id, fence, fraction, text)
    if reply[0] != OK:
        raise error_for(queue, reply)
    return bool(reply[1])


def read_progress(packed: bytes | None) -> dict[str, Any] | None:
    """What is stored of a job, as it is shown: {"fraction", "text", "at"}."""
    if packed is None:
        return None
    fraction, at_ms, text = packed.decode("utf-8", "replace").split(" ", 2)
    return {"fraction": float(fraction), "text": text, "at": int(at_ms) / 1000}
