"""Resource use of processes: CPU time and memory of a tree, and whether other processes disturbed a measurement."""

import os
import time
from pathlib import Path

import psutil

from tests.support.drive.server import Server

# A measurement does not count if other processes used more than this share of a core.
DISTURBED_CORES = 0.2
_HZ = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[psutil.Process]:
    """The process and everything below it; empty if it is gone."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(*pids: int) -> float:
    """CPU time of these processes and of their reaped children; 0 for a process that is gone.

    In nanoseconds for live threads; ended threads and children are known only in ticks of 10 ms.
    """
    return sum(_cpu_seconds(pid) for pid in pids)


def _cpu_seconds(pid: int) -> float:
    folder = Path(f"/proc/{pid}")
    try:
        user, system, waited_user, waited_system = (
            int(field) / _HZ for field in (folder / "stat").read_text().rpartition(")")[2].split()[11:15]
        )
        running_ns = sum(int((task / "schedstat").read_text().split()[0]) for task in (folder / "task").iterdir())
    except OSError:
        return 0.0
    # The first includes ended threads, the second is exact: take the larger.
    own = max(running_ns / 1e9, user + system - 1 / _HZ)
    return own + waited_user + waited_system


def tree_cpu_seconds(pid: int) -> float:
    """CPU time of a whole tree. Finding it takes milliseconds: too long between samples of a fast worker."""
    return cpu_seconds(*(process.pid for process in tree(pid)))


def tree_pss_mb(pid: int) -> float:
    """Memory, with shared pages counted in proportion."""
    return sum(pss_kb(process.pid) for process in tree(pid)) / 1024


def pss_kb(pid: int) -> int:
    return _rollup_kb(pid, "Pss:")


def private_kb(pid: int) -> int:
    """Private memory of this process: what it would free if it ended."""
    return _rollup_kb(pid, "Private_Clean:", "Private_Dirty:")


def _rollup_kb(pid: int, *names: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))


class Requests:
    """Counts, from its creation, how often the server reads from other clients.

    Unlike the server's count of commands, this excludes calls made by scripts.
    """

    def __init__(self, server: Server) -> None:
        self._client = server.connect()
        self._before = self._reads()

    def count(self) -> int:
        """May be called once: closes its connection."""
        others = self._reads() - self._before - 1
        self._client.close()
        return others

    def _reads(self) -> int:
        return int(self._client.info("stats")["total_reads_processed"])


def used_memory(server: Server) -> int:
    with server.connect() as client:
        return int(client.info("memory")["used_memory"])


def busy_seconds(stat_line: str) -> float:
    """Busy time of all cores, from the first line of /proc/stat.

    Steal time is included: it delays a measurement like any other process.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in stat_line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _HZ


class Quiet:
    """Measures, from its creation to `foreign_share`, how much of a core other processes used."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = self._sample()

    def foreign_share(self) -> float:
        seconds = max(time.monotonic() - self._began, 1e-9)
        busy, own = (after - before for after, before in zip(self._sample(), self._before, strict=True))
        return foreign_share(busy, own, seconds)

    def _sample(self) -> tuple[float, float]:
        with open("/proc/stat") as file:
            return busy_seconds(file.readline()), tree_cpu_seconds(os.getpid())


def foreign_share(busy_seconds: float, own_seconds: float, seconds: float) -> float:
    """In cores. Ticks are counted in two ways, so a small negative difference counts as 0."""
    return max(0.0, (busy_seconds - own_seconds) / seconds)


def machine() -> dict[str, object]:
    """A description of the machine for readers."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kb = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "cpu": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "memory_gb": round(memory_kb / 1e6, 1),
        "kernel": os.uname().release,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
