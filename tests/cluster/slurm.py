"""A real Slurm on one machine, for the time of a block: munged, slurmctld, and a slurmd for each node.

    with Slurm(nodes=2) as slurm:                         # nodes n1 and n2 of this machine
        subprocess.run(["srun", "-N2", "hostname"], env=slurm.environment)
    with Hosts(2) as hosts, Slurm(nodes=2, hosts=hosts) as slurm:      # nodes h1 and h2
        subprocess.run(hosts.on("head", ["srun", "-N2", "hostname"]), env=slurm.environment)

Root starts the daemons, and no service manager is needed. They stay in the foreground, so they are ended by their process ids; so are
their jobs' processes, which know the cluster by SLURM_CONF in their environments.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

# The delay before a requeued job starts is that of the credentials, 120 s by default.
_CONFIGURATION = """
ClusterName=zeropage
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=4
InactiveLimit=0
MessageTimeout=5
TCPTimeout=1
KillWait=20
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
{nodes}
"""
_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")


def why_not():
    """Why this machine cannot run Slurm; "" where it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"Slurm needs {' and '.join(missing)}; scripts/setup.sh --cluster installs them"
    if not os.path.ismount("/sys/fs/cgroup"):
        return "slurmd needs /sys/fs/cgroup mounted"
    return ""


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Slurm:
    def __init__(self, nodes, hosts=None):
        # munged wants folders that everybody may enter.
        self.folder = Path(tempfile.mkdtemp(prefix="zeropage-slurm-"))
        self.folder.chmod(0o755)
        self.hosts = hosts
        self.nodes = [f"{'n' if hosts is None else 'h'}{number}" for number in range(1, nodes + 1)]
        self.environment = dict(os.environ, SLURM_CONF=str(self.folder / "slurm.conf"))
        self._daemons = {}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            _kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command, timeout=60):
        """The completed process of a command of Slurm's, on the head where there are hosts."""
        command = [str(word) for word in command]
        if self.hosts is not None:
            command = self.hosts.on("head", command)
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False)

    def submit(self, script_and_arguments, options=()):
        """The number of the job."""
        done = self.run(["sbatch", "--parsable", *options, *script_and_arguments])
        if done.returncode != 0:
            raise RuntimeError(f"sbatch: {done.stderr}")
        return int(done.stdout.split(";")[0])

    def state(self, job):
        """Such as RUNNING; and how often it was started again."""
        words = self.run(["scontrol", "--oneliner", "show", "job", job]).stdout.split()
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        return fields.get("JobState", "?"), int(fields.get("Restarts", 0))

    def nodes_of(self, job):
        """The nodes that it runs on, the batch script's first."""
        listed = self.run(["squeue", "--noheader", "--jobs", job, "--format=%N"]).stdout.strip()
        return self.run(["scontrol", "show", "hostnames", listed]).stdout.split()

    def wait(self, job, seconds):
        """Until the job has ended; its last state."""
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at:
            state, _ = self.state(job)
            if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"):
                return state
            time.sleep(0.2)
        raise TimeoutError(f"job {job} is {self.state(job)} after {seconds} s")

    def processes(self):
        """The ids of the cluster's processes but the daemons."""
        found = []
        daemons = {daemon.pid for daemon in self._daemons.values()}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"SLURM_CONF={self.folder}/slurm.conf".encode() in variables and int(entry.name) not in daemons:
                found.append(int(entry.name))
        return found

    def kill_daemon(self, node):
        """kill -9 of the node's slurmd alone: its jobs' processes live on."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def kill_host(self, node):
        """The daemon and all that runs on its emulated host, as a power cut does."""
        self.hosts.kill(node)
        self._daemons[node].wait()

    def _start(self):
        for name in ["state", *(f"spool.{node}" for node in self.nodes)]:
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (self.folder / "slurm.conf").write_text(self._configuration())
        files = [f"--{name}={self.folder}/munge.{ending}"
                 for name, ending in (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"),
                                      ("seed-file", "seed"))]
        self._daemon("munged", ["munged", "--foreground", *files])
        self._wait_until("munged listens", lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", self._on("head", ["slurmctld", "-D", "-c"]))
        for node in self.nodes:
            options = ["-N", node] if self.hosts is None else []
            self._daemon(node, self._on(node, ["slurmd", "-D", "-c", *options]))
        idle = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        self._wait_until("all nodes are idle", lambda: self.run(idle).stdout.strip() == str(len(self.nodes)))

    def _on(self, host, command):
        return command if self.hosts is None else self.hosts.on(host, command)

    def _configuration(self):
        count = len(self.nodes)
        if self.hosts is not None:
            controller, nodes = "head", f"NodeName=h[1-{count}] CPUs=4 RealMemory=2000"
        else:
            name = socket.gethostname().split(".")[0]
            control, *ports = _free_ports(count + 1)
            controller = f"{name}(127.0.0.1)\nSlurmctldPort={control}"
            nodes = "\n".join(f"NodeName={node} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=2000"
                              for node, port in zip(self.nodes, ports))
        partition = f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP"
        return _CONFIGURATION.format(controller=controller, folder=self.folder, nodes=f"{nodes}\n{partition}")

    def _daemon(self, name, command):
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                   start_new_session=True)

    def _wait_until(self, what, is_true):
        give_up_at = time.monotonic() + 60
        while not is_true():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > give_up_at:
                logs = "".join((self.folder / f"{name}.log").read_text()[-2000:] for name in ended or self._daemons)
                raise RuntimeError(f"Slurm did not start: waited until {what}; ended: {ended or 'none'}\n{logs}")
            time.sleep(0.1)


def _kill(process):
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass
