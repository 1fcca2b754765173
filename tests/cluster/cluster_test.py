#!/usr/bin/env python3
"""train_resnet under real launchers: torchrun, Open MPI and Slurm, on one machine and over emulated hosts.

    tests/cluster/cluster_test.py                          all tests; -v names them
    tests/cluster/cluster_test.py WaysTest SlurmJobTest     some

What this machine cannot do is skipped, with the reason. The exit code is 77 where all tests were skipped. ZEROPAGE_BUILD names the
build folder, build/release by default.
"""

import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import hosts
import programs
import slurm
import ways

SKIPPED = 77


SETTING = ["--width", 4, "--batch", 12, "--threads", 1, "--report-every", 1]
EPOCHS = 2  # of four steps


class ClusterTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="zeropage-cluster-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        programs.write_images(self.folder / "images")

    def flags(self, epochs=EPOCHS):
        """Of a run of a few seconds on up to four ranks."""
        return [*SETTING, "--data", self.folder / "images", "--epochs", epochs]

    def need(self, *reasons):
        for reason in reasons:
            if reason:
                self.skipTest(reason)

    def enter(self, context):
        """As a with block that ends with the test, also where it fails."""
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def local_weights(self, ranks=4, epochs=EPOCHS):
        return programs.weights_in(programs.run(programs.train_resnet("--ranks", ranks, *self.flags(epochs))))


class WaysTest(ClusterTest):
    def test_every_way_to_start_two_ranks_has_the_same_weights_and_losses(self):
        self.need(slurm.why_not(), programs.why_no_mpirun())
        running = self.enter(slurm.Slurm(nodes=2))
        torchrun, why_no_torchrun = programs.find_torchrun()
        runs, table = ways.run_all([(2, 3)], [*self.flags(), "--steps", 3], running, torchrun, self.folder / "runs.jsonl")
        self.assertEqual(ways.unlike(runs), [], table)
        names = {run["way"] for run in runs}
        self.assertLessEqual({"2 threads", "2 processes", "2 by Open MPI", "2 by Slurm"}, names)
        self.need(why_no_torchrun)
        self.assertIn("2 by torchrun", names)

    def test_a_batch_script_that_starts_the_program_without_srun_is_told(self):
        self.need(slurm.why_not())
        running = self.enter(slurm.Slurm(nodes=2))
        script = self.folder / "script"
        command = " ".join(programs.train_resnet("--ranks", 1, *self.flags()))
        script.write_text(f"#!/bin/sh\n{command}\n")
        log = self.folder / "log"
        job = running.submit([script], ["-N2", "--ntasks-per-node=2", f"--output={log}"])
        self.assertEqual(running.wait(job, 60), "FAILED")
        self.assertIn("SLURM_NTASKS=4 without SLURM_STEP_ID means that Slurm's batch script started this process", log.read_text())


class EmulatedHostsTest(ClusterTest):
    """Two hosts with two ranks each have the weights of four local ranks."""

    def setUp(self):
        super().setUp()
        self.need(hosts.why_not())
        self.hosts = self.enter(hosts.Hosts(2))

    def test_srun(self):
        self.need(slurm.why_not())
        running = self.enter(slurm.Slurm(2, self.hosts))
        done = running.run(["srun", "-N2", "--ntasks-per-node=2", *programs.train_resnet(*self.flags())], timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(programs.weights_in(done.stdout), self.local_weights())

    def test_mpirun(self):
        self.need(programs.why_no_mpirun())
        flags = f"--mca plm_rsh_agent {self.hosts.agent()} --mca oob_tcp_if_include eth0"
        command = [str(programs.SCRIPTS / "mpirun.sh"), "h1:2,h2:2", *programs.train_resnet(*self.flags())]
        output = programs.run(self.hosts.on("h1", command), programs.environment(MPIRUN_FLAGS=flags))
        self.assertEqual(programs.weights_in(output), self.local_weights())

    def test_torchrun(self):
        torchrun, why_not = programs.find_torchrun()
        self.need(why_not)
        starter = self.folder / "torchrun"
        starter.write_text(f'#!/bin/sh\nexec {" ".join(torchrun)} "$@"\n')
        starter.chmod(0o755)
        command = [str(programs.SCRIPTS / "torchrun.sh"), "2", "2", "h1", *programs.train_resnet(*self.flags())]
        env = programs.environment(TORCHRUN=str(starter))
        started = [subprocess.Popen(self.hosts.on(host, command), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                   for host in ("h1", "h2")]
        outputs = [process.communicate(timeout=180)[0] for process in started]
        self.assertEqual([process.returncode for process in started], [0, 0], outputs)
        self.assertEqual(programs.weights_in("".join(outputs)), self.local_weights())


class SlurmJobTest(ClusterTest):
    """examples/cluster/train.sbatch over emulated hosts: whatever happens to a job, it ends with the weights of a run without a break."""

    def setUp(self):
        super().setUp()
        self.need(hosts.why_not(), slurm.why_not())
        self.hosts = self.enter(hosts.Hosts(5))
        self.slurm = self.enter(slurm.Slurm(5, self.hosts))

    def start(self, name, nodes, pause_ms, epochs=EPOCHS):
        """A job. Its states are in folder/name, its logs in folder/name.log and, by rank, folder/name.log.0: a rank writes its own, as
        what it prints passes through srun, which does not outlive the job."""
        print_to = ["sh", "-c", 'exec "$@" >> "$0.$SLURM_PROCID" 2>&1', self.folder / f"{name}.log"]
        program = programs.train_resnet(*self.flags(epochs), "--save", self.folder / name, "--save-every", 1, "--auto-resume", "--pause",
                                        pause_ms)
        return self.slurm.submit(
            [programs.SCRIPTS / "train.sbatch", *print_to, *program],
            [f"--nodes={nodes}", "--ntasks-per-node=2", "--exclusive", f"--output={self.folder}/{name}.log"])

    def until(self, is_true, name, seconds=60):
        give_up_at = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > give_up_at:
                self.fail(f"waited {seconds} s\n{self.log(name)}\n" + self.slurm.run(["scontrol", "show", "job"]).stdout)
            time.sleep(0.1)

    def until_saved(self, name):
        self.until(lambda: (self.folder / name / "latest").exists(), name)

    def log(self, name):
        paths = sorted(self.folder.glob(f"{name}.log*"))
        return "".join(path.read_text() for path in paths)

    def check_goes_on(self, job, name, weights):
        self.assertEqual(self.slurm.wait(job, 120), "COMPLETED", self.log(name))
        self.assertEqual(self.slurm.state(job)[1], 1, self.log(name))
        self.assertIn("goes on after step ", self.log(name))
        self.assertEqual(programs.weights_in(self.log(name)), weights, self.log(name))

    def test_a_job_that_is_told_to_end_or_is_requeued_goes_on_and_a_cancelled_one_does_not(self):
        # Pauses that are long enough for all of them to be in mid-run when their turn comes.
        jobs = {"told": self.start("told", 2, 1000), "requeued": self.start("requeued", 2, 1500),
                "cancelled": self.start("cancelled", 1, 10000)}
        self.until_saved("told")
        self.slurm.run(["scancel", "--signal=TERM", jobs["told"]])
        self.until_saved("requeued")
        self.assertEqual(self.slurm.run(["scontrol", "requeue", jobs["requeued"]]).returncode, 0)
        self.until_saved("cancelled")
        self.slurm.run(["scancel", jobs["cancelled"]])
        weights = self.local_weights()
        self.check_goes_on(jobs["told"], "told", weights)
        self.assertIn("SIGTERM: ended after the save of step ", self.log("told"))
        self.assertIn("it goes back into the queue", self.log("told"))
        self.check_goes_on(jobs["requeued"], "requeued", weights)
        self.assertEqual(self.slurm.wait(jobs["cancelled"], 60), "CANCELLED")
        self.assertNotIn("goes back into the queue", self.log("cancelled"))

    def test_a_job_that_loses_a_node_or_its_daemon_goes_on_and_ranks_that_outlive_it_lose_the_folder(self):
        lost = self.start("lost", 2, 1000)
        fenced = self.start("fenced", 1, 2000, epochs=5)
        self.until_saved("lost")
        self.slurm.kill_host(self.slurm.nodes_of(lost)[1])
        self.until_saved("fenced")
        node = self.slurm.nodes_of(fenced)[0]
        self.slurm.kill_daemon(node)
        self.until(lambda: "has lost this folder to run 2 (host h" in self.log("fenced"), "fenced", 120)
        self.assertIn(f"{self.folder}/fenced: run 1 (host {node}, process ", self.log("fenced"))
        self.check_goes_on(lost, "lost", self.local_weights())
        self.check_goes_on(fenced, "fenced", self.local_weights(2, epochs=5))


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    for _, reason in result.skipped:
        print(f"skipped: {reason}")
    if not result.wasSuccessful():
        sys.exit(1)
    sys.exit(SKIPPED if len(result.skipped) == result.testsRun else 0)
