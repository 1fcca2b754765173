"""Emulated hosts on one Linux machine: each has its own network stack, host name and /etc/hosts, and one bridge joins them.

    with Hosts(2) as hosts:                    # "head", "h1" and "h2"
        subprocess.run(hosts.on("h1", ["hostname"]))

A host is a network and a UTS namespace. Processes, files and memory are the machine's. Needs root, iproute2 and util-linux, and a kernel
that has veth and bridges; `why_not()` says what is missing. Leaving the block ends every process that runs in one of the hosts.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

# As `ip netns exec`, but that mounts a fresh /sys, which hides /sys/fs/cgroup, and slurmd then does not start.
_ENTER = 'mount --bind "$0" /etc/hosts && exec "$@"'


def _run(*command):
    subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True, timeout=30)


def why_not():
    """Why this machine cannot emulate hosts; "" where it can."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    missing = [tool for tool in ("ip", "nsenter", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"emulated hosts need {' and '.join(missing)}; scripts/setup.sh --cluster installs them"
    try:
        with Hosts(1) as hosts:
            _run(*hosts.on("h1", ["true"]))
    except (subprocess.SubprocessError, OSError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip()
        return f"this machine lets nobody make network namespaces: {words}"
    return ""


class Hosts:
    def __init__(self, count):
        self.names = ["head"] + [f"h{number}" for number in range(1, count + 1)]
        self._folder = None
        self._mounted = []

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="zeropage-hosts-"))
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            self.kill(name)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False, capture_output=True)
        for path in reversed(self._mounted):
            subprocess.run(["umount", path], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def on(self, name, command):
        """The command that runs `command` on that host."""
        namespaces = [f"--uts={self._folder / name}", f"--net=/run/netns/{self._namespace(name)}"]
        return ["nsenter", *namespaces, "unshare", "--mount", "sh", "-c", _ENTER, str(self._folder / "hosts"), *command]

    def agent(self):
        """A program that is called as ssh is: [-OPTION ...] HOST COMMAND ..."""
        path = self._folder / "agent"
        lines = ["#!/bin/sh", 'while case $1 in -*) true;; *) false;; esac; do shift; done', "host=$1", "shift", "case $host in"]
        for name in self.names:
            enter = " ".join(f"'{word}'" for word in self.on(name, ["sh", "-c"]))
            lines.append(f'{name}) exec {enter} "$*";;')
        path.write_text("\n".join([*lines, '*) echo "no host $host" >&2; exit 1;;', "esac", ""]))
        path.chmod(0o755)
        return path

    def processes(self, name):
        """The ids of all that run on that host."""
        found = subprocess.run(["ip", "netns", "pids", self._namespace(name)], check=False, capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, name):
        """Ends whatever runs on that host at once, as a power cut does."""
        give_up_at = time.monotonic() + 10
        while (processes := self.processes(name)) and time.monotonic() < give_up_at:
            for process in processes:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)

    def _namespace(self, name):
        return f"{self._folder.name}-{name}"

    def _make(self):
        # Namespaces can be kept under a name only where mounts do not spread.
        self._mount("mount", "-t", "tmpfs", "zeropage-hosts", self._folder)
        _run("mount", "--make-private", self._folder)
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n")
        for number, name in enumerate(self.names):
            self._make_host(name, f"10.77.0.{number + 1}")
        head = self._namespace("head")
        _run("ip", "-n", head, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", head, "addr", "add", "10.77.0.1/24", "dev", "bridge")
        _run("ip", "-n", head, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names[1:], 1):
            own = self._namespace(name)
            _run("ip", "link", "add", "eth0", "netns", own, "type", "veth", "peer", "name", f"to-{name}", "netns", head)
            _run("ip", "-n", own, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _run("ip", "-n", own, "link", "set", "eth0", "up")
            _run("ip", "-n", head, "link", "set", f"to-{name}", "master", "bridge")
            _run("ip", "-n", head, "link", "set", f"to-{name}", "up")

    def _make_host(self, name, address):
        _run("ip", "netns", "add", self._namespace(name))
        _run("ip", "-n", self._namespace(name), "link", "set", "lo", "up")
        file = self._folder / name
        file.touch()
        self._mount("unshare", f"--uts={file}", "hostname", name)
        with (self._folder / "hosts").open("a") as table:
            table.write(f"{address} {name}\n")

    def _mount(self, *command):
        _run(*command)
        self._mounted.append(self._folder if command[0] == "mount" else self._folder / command[1].rsplit("/", 1)[1])
