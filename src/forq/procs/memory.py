"""How much memory a process has."""


def pss_bytes(pid: int | str = "self") -> int:
    """The memory of a process, each shared page counted in parts; 0 if it cannot be told."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
