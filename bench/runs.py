"""Runs of a training program that writes its figures to a --json file."""

import importlib.util
import json
import os
import statistics
from pathlib import Path

import peer_venv
from children import run_child
from peers import flags

WARM_UP_STEPS = 2
TAIL_LINES = 20


def add_measuring_flags(parser, what, rounds):
    """--rounds, runs of each `what`; --data, --json, --timeout."""
    parser.add_argument("--rounds", type=int, default=rounds,
                        help=f"runs of each {what} (default {rounds})")
    parser.add_argument("--data", type=Path, help="file whose bytes are the tokens (default: "
                        "LibTorch's headers in include/ATen/core)")
    parser.add_argument("--json", type=Path, help="file for the figures of all rounds")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run may take "
                        "(default 900)")


def check_measuring_flags(parser, arguments):
    """Ends with exit status 2 where they, or --steps, make no sense."""
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(
            f"--steps must be above {WARM_UP_STEPS}, the warm-up that is not measured, "
            f"got {arguments.steps}"
        )
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    if not arguments.timeout > 0:
        parser.error(f"--timeout must be above 0, got {arguments.timeout}")


def add_train_gpt_flag(parser):
    parser.add_argument("--train-gpt", type=Path, help="the program (default: that of build/release, with --device cuda that of build/cuda)")


def train_gpt_of(arguments):
    """The path that --train-gpt names, or that of the build for --device."""
    preset = "cuda" if getattr(arguments, "device", "cpu") == "cuda" else "release"
    return arguments.train_gpt or peer_venv.ROOT / "build" / preset / "examples/train_gpt"


def check_files(programs, data):
    """Ends the program where one of them is missing; data: None for the default."""
    for program in programs:
        if not os.access(program, os.X_OK):
            raise SystemExit(f"error: no program at {program}; run `cmake --preset release && cmake --build "
                             "--preset release`, for cuda `cmake --preset cuda && cmake --build --preset cuda`")
    if data is not None and not data.is_file():
        raise SystemExit(f"error: no file at --data {data}")


def measure(name, command, folder, timeout_seconds, read):
    """Runs `command` with a --json file in `folder` and returns `read` of what is in it; ends the
    program where the run failed. name: begins that error."""
    result_path = folder / "result.json"
    result_path.unlink(missing_ok=True)
    log_path = folder / "log.txt"
    with open(log_path, "wb") as log:
        status = run_child([*command, "--json", result_path], log, timeout_seconds)
    problem = None
    if status is None:
        problem = f"was stopped after {timeout_seconds:g} s"
    elif status != 0:
        problem = f"failed with exit status {status}"
    elif not result_path.exists():
        problem = "wrote no --json file"
    if problem is None:
        try:
            return read(json.loads(result_path.read_text()))
        except (KeyError, TypeError, ValueError) as error:
            problem = f"wrote a --json file that does not serve: {error!r}"
    lines = log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    words = " ".join(map(str, command))
    raise SystemExit("\n".join([f"error: {name} {problem}: {words}", *lines]))


def in_turns(names, rounds):
    """(number of the round, from 1; name): every name once a round, in turns which goes first."""
    for number in range(1, rounds + 1):
        for name in names if number % 2 else reversed(names):
            yield number, name


def median_step(result, steps):
    """Seconds, over the steps after the warm-up. Raises ValueError if there are not `steps`."""
    seconds = result["step_seconds"]
    if len(seconds) != steps:
        raise ValueError(f"step_seconds: expected {steps} entries, got {len(seconds)}")
    return statistics.median(seconds[WARM_UP_STEPS:])


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def data_in(folder, given):
    """What --data gives; by default, in `folder`, text that every machine has that can build
    train_gpt."""
    if given is not None:
        return given.resolve()
    found = sorted(peer_venv.ROOT.glob(".venv*/lib/python3*/site-packages/torch/include/ATen/core"))
    spec = importlib.util.find_spec("torch")
    if not found and spec is not None:
        found = [Path(spec.submodule_search_locations[0]) / "include/ATen/core"]
    if not found:
        raise SystemExit("error: no LibTorch headers under .venv* nor in python3; give --data FILE")
    # One installation only: the bytes must not depend on how many there are.
    headers = sorted(found[0].rglob("*.h"))
    path = folder / "headers.txt"
    path.write_bytes(b"".join(header.read_bytes() for header in headers))
    return path


def write_figures(path, arguments, own_flags, what, figures, runs):
    """The --json file: the flags, own_flags of them beside those of a run; under `what` the figures of
    each setting, and under "runs" its runs, which are dataclasses."""
    names = [*own_flags, *(name.replace("-", "_") for name in flags.RUN_FLAGS)]
    result = {
        "flags": {name: getattr(arguments, name) for name in names},
        "data": str(arguments.data or "LibTorch's include/ATen/core/**/*.h"),
        "cpu_count": os.cpu_count(),
        "warm_up_steps": WARM_UP_STEPS,
        what: figures,
        "runs": {setting: [vars(run) for run in of_setting] for setting, of_setting in runs.items()},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
