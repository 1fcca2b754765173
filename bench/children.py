"""Child processes that never outlive this one's interest in them."""

import os
import signal
import subprocess
import time

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
GRACE_SECONDS = 5.0


def run_child(command, output, timeout_seconds, cwd=None):
    """Runs `command` in a session of its own, stdout and stderr to `output`, and returns its exit
    status (negative: the signal), or None when it was stopped after `timeout_seconds`. When this
    returns or raises, every process of that session is gone. A stop signal (Ctrl-C, SIGTERM,
    SIGHUP) raises SystemExit(128 + signal) after the clean-up."""
    watched = STOP_SIGNALS | {signal.SIGCHLD}
    # Blocked, the signals are received below and nowhere else: none can fall between the start
    # of the child and the code that ends it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        )
        stop = _wait(process.pid, time.monotonic() + timeout_seconds, watched)
        ended = _has_ended(process.pid)
        if not ended:
            os.killpg(process.pid, signal.SIGTERM)
            _wait(process.pid, time.monotonic() + GRACE_SECONDS, {signal.SIGCHLD})
        # The leader is not reaped yet, so its process group cannot be anyone else's.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if stop is not None:
        raise SystemExit(128 + stop)
    return process.returncode if ended else None


def _wait(pid, deadline, signals):
    """Until the child has ended or the deadline has passed: None; or the stop signal received."""
    while not _has_ended(pid):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        received = signal.sigtimedwait(signals, left)
        if received is not None and received.si_signo in STOP_SIGNALS:
            return received.si_signo
    return None


def _has_ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
