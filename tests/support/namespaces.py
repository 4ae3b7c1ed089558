"""Nodes on one machine: network namespaces on one bridge, each with its own name and hosts file."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from runs import environment

_NETNS = Path("/etc/netns")


def can_make_nodes() -> bool:
    """Return True if this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"zf{secrets.token_hex(3)}"
    done = subprocess.run(("ip", "netns", "add", name), capture_output=True)
    subprocess.run(("ip", "netns", "delete", name), capture_output=True)
    return done.returncode == 0


@dataclass
class NamespaceNodes:
    """Some nodes that see each other; their names lead to 127.0.1.1 on themselves, as Debian has it."""

    num_nodes: int
    prefix: str = field(default_factory=lambda: f"zf{secrets.token_hex(2)}")
    subnet: str = field(default_factory=lambda: f"10.{77 + secrets.randbelow(100)}.{secrets.randbelow(250)}")

    def __enter__(self) -> NamespaceNodes:
        switch = f"{self.prefix}sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for node in range(self.num_nodes):
            name = self.name(node)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            peer = ("type", "veth", "peer", "name", f"p{node}", "netns", switch)
            _ip("link", "add", "veth0", "netns", name, *peer)
            _ip("-n", switch, "link", "set", f"p{node}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "veth0", "up")
            hosts = ["127.0.0.1 localhost", f"127.0.1.1 {name}"]
            hosts += [f"{self.address(one)} {self.name(one)}" for one in range(self.num_nodes) if one != node]
            (_NETNS / name).mkdir(parents=True)
            (_NETNS / name / "hosts").write_text("\n".join(hosts) + "\n")
        return self

    def __exit__(self, *_: object) -> None:
        for node in range(self.num_nodes):
            self.kill(node)
            _ip("netns", "delete", self.name(node))
            shutil.rmtree(_NETNS / self.name(node))
        _ip("netns", "delete", f"{self.prefix}sw")

    def name(self, node: int) -> str:
        """Return a node's host name."""
        return f"{self.prefix}n{node}"

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"{self.subnet}.{10 + node}"

    def call(self, name: str, node: int) -> None:
        """Give a node another name, which leads to its address on all nodes."""
        for one in range(self.num_nodes):
            with (_NETNS / self.name(one) / "hosts").open("a") as file:
                file.write(f"{self.address(node)} {name}\n")

    def start(
        self,
        node: int,
        command: list[str],
        folder: Path,
        output: Path,
        *,
        mounts: dict[str, Path] | None = None,
        **more: str,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node.

        Args:
            mounts: folders that the command alone sees at other places, which must be there.
        """
        binds = [
            f"mount --bind {shlex.quote(str(source))} {place}" for place, source in (mounts or {}).items()
        ]
        script = " && ".join(('hostname "$0"', *binds, 'exec "$@"'))
        inside = ("unshare", "-um", "sh", "-c", script, self.name(node))
        with output.open("ab") as file:
            return subprocess.Popen(
                ("ip", "netns", "exec", self.name(node), *inside, *command),
                cwd=folder,
                env=environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", **more),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def pids(self, node: int) -> list[int]:
        """Return all processes of a node."""
        found = subprocess.run(("ip", "netns", "pids", self.name(node)), capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, node: int) -> None:
        """Kill all processes of a node at once, as a power failure does; its network goes first."""
        for pid in self.pids(node):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue

    def cut(self, node: int) -> None:
        """Take a node's link down: its packets are lost, and nobody is told."""
        _ip("-n", f"{self.prefix}sw", "link", "set", f"p{node}", "down")

    def part(self, *pair: int) -> None:
        """Lose what two nodes send to each other, as a firewall does; both reach all others."""
        for node, other in (pair, pair[::-1]):
            nobody = ("lladdr", "02:00:00:00:00:99", "dev", "veth0", "nud", "permanent")
            _ip("-n", self.name(node), "neigh", "replace", self.address(other), *nobody)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
