"""Two network namespaces with a connection between them that can be cut: real TCP, with retransmissions."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NEAR, NEAR_GATE = "10.213.77.1", "10.213.77.2"
FAR, FAR_GATE = "10.213.78.1", "10.213.78.2"


def why_not() -> str:
    """The reason why this machine has none; empty if it can have them."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip (on Debian: apt install iproute2)"
    name = f"forq-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    ip("netns", "delete", name)
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)


class Wire:
    """`near` has the address NEAR, `far` has FAR; a router between them forwards or drops. (If a link itself went
    down, the kernels at its ends would notice.)"""

    def __init__(self) -> None:
        self.near, self.router, self.far = (f"forq-{os.getpid()}-{name}" for name in ("near", "router", "far"))

    def inside(self, namespace: str) -> list[str]:
        """The prefix of a command that runs there."""
        return ["ip", "netns", "exec", namespace]

    def cut(self) -> None:
        """Drops all packets, silently."""
        self._forward("0")

    def mend(self) -> None:
        self._forward("1")

    def _forward(self, value: str) -> None:
        ip("netns", "exec", self.router, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/ip_forward")

    def lay(self) -> None:
        for namespace in (self.near, self.router, self.far):
            ip("netns", "add", namespace)
        for namespace, address, gate in ((self.near, NEAR, NEAR_GATE), (self.far, FAR, FAR_GATE)):
            end = "near" if namespace == self.near else "far"
            ip("-n", self.router, "link", "add", end, "type", "veth", "peer", "name", "wire", "netns", namespace)
            ip("-n", self.router, "address", "add", f"{gate}/30", "dev", end)
            ip("-n", self.router, "link", "set", end, "up")
            ip("-n", namespace, "address", "add", f"{address}/30", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", namespace, "link", "set", device, "up")
            ip("-n", namespace, "route", "add", "default", "via", gate)
        self.mend()

    def remove(self) -> None:
        for namespace in (self.near, self.router, self.far):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


@contextmanager
def wire() -> Iterator[Wire]:
    laid = Wire()
    try:
        laid.lay()
        yield laid
    finally:
        laid.remove()
