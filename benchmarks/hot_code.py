"""Which functions run in a supervisor that starts processes of queues, and in such a process until it has run a job and
waits again: the list that forq.procs.shared_pages goes by.

python benchmarks/hot_code.py     writes src/forq/procs/hot_code.txt anew
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "src" / "forq" / "procs" / "hot_code.txt"
QUEUES = 4


def supervise() -> int:
    """`forq run`, noting what is called in it and in the processes of queues."""
    from forq.cli import main
    from forq.procs.shared_pages import name_of
    from forq.supervisor import entry_points
    from forq.workers.minder import Minder

    supervisor, where = os.getpid(), os.environ["HOT_CODE"]
    named: dict[int, str] = {}
    seen: dict[int, dict[str, None]] = {}
    serves_queue = False

    def tell(names: Iterable[str]) -> None:
        # Opened each time: a child closes what it inherits.
        out = os.open(f"{where}{'' if serves_queue else '.supervisor'}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(out, "".join([f"{name}\n" for name in names]).encode())
        os.close(out)

    def note(frame: FrameType, event: str, arg: Any) -> None:
        # What runs right after a fork, before any code of ours, is already the child's.
        names = seen.setdefault(os.getpid(), {})
        name = named.get(id(frame.f_code))
        if event == "call" and name is not None and name not in names:
            names[name] = None
            if serves_queue or os.getpid() == supervisor:
                tell([name])

    share_pages, run_child, run_minder = entry_points.share_pages, entry_points.run_child, Minder._run

    def share_and_note(*args: Any) -> None:
        share_pages(*args)
        gc.unfreeze()
        # The code of a dataclass's methods does not know whose it is; its functions do.
        functions = [found for found in gc.get_objects() if type(found) is FunctionType]
        named.update((id(function.__code__), name_of(function)) for function in functions)
        gc.freeze()
        sys.setprofile(note)

    def note_child(*args: Any) -> int:
        nonlocal serves_queue
        serves_queue = True
        tell(tuple(seen[os.getpid()]))
        return run_child(*args)

    def note_minder(minder: Minder) -> None:
        sys.setprofile(note)
        run_minder(minder)

    entry_points.share_pages, entry_points.run_child = share_and_note, note_child
    Minder._run = note_minder  # type: ignore[method-assign]
    return main()


def find() -> list[str]:
    """In the order in which they are first called: those of queues' processes, then those of the supervisor alone."""
    sys.path.insert(0, str(ROOT))
    from tests.support.running import Forq, wait_until

    class Noted(Forq):
        def program(self) -> list[str]:
            return [sys.executable, __file__]

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "called"
        forq = Noted(environment={"HOT_CODE": str(file)})
        try:
            forq.start()
            names = [f"hot{number}" for number in range(QUEUES)]
            for name in names:
                forq.create(name)
                forq.wait_for_child(name)
                forq.wait_for_child(name, "parked", "retry")
                forq.client().queue(name).enqueue(1)
            wait_until(lambda: all(forq.queue_status(name)["done"] == 1 for name in names))
            time.sleep(4)  # until the minders sleep
        finally:
            forq.remove()
        names = file.read_text() + file.with_suffix(".supervisor").read_text()
        return list(dict.fromkeys(names.splitlines()))


def main() -> None:
    kept = [name for name in find() if not name.startswith("__main__ ")]
    LIST.write_text("".join(f"{name}\n" for name in kept))
    print(f"{LIST}: {len(kept)} functions")


if __name__ == "__main__":
    sys.exit(supervise() if "HOT_CODE" in os.environ else main())
