"""A program that awaits items of a queue, one after the other, and logs each item that it got."""

import os
import sys

from forq import Client, ForqError


def main(url: str, name: str, log: str) -> None:
    """Runs until it is killed. Each line is one write, so kill -9 never leaves half of one."""
    queue = Client(url).queue(name)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while True:
        try:
            release = queue.next_release(timeout=2.0)
        except ForqError:
            continue
        if release is not None:
            os.write(fd, f"{release.id} {release.fence}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
