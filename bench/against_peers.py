#!/usr/bin/env python3
"""Measures train_gpt against other data-parallel trainers: same model, initial weights, data and
optimizer, on this machine, in interleaved runs. Exit status: 0 measured and the losses agree;
1 a run failed or the losses differ; 2 the command line is wrong; 128 + n stopped by signal n."""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import peer_venv
from peers import flags
from report import print_report
from runs import (
    WARM_UP_STEPS,
    add_measuring_flags,
    check_files,
    check_measuring_flags,
    data_in,
    in_turns,
    measure,
    median_step,
    spread,
)

PEERS_FOLDER = Path(__file__).resolve().parent / "peers"
BASE_REQUIREMENTS = (f"torch=={peer_venv.TORCH_VERSION}", "numpy")
# Relative. In bf16 the sides round elsewhere: FSDP2 and DDP keep fp32 weights that ours never had, and autocast
# leaves norms in fp32.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}


@dataclass(frozen=True)
class Peer:
    """What it takes to start a peer; its options are in flags.PEER_OPTIONS."""

    script: str  # in bench/peers, or "" for bare_loop; takes the run flags, --data, --json and --peer-option
    requirements: tuple = ()  # for pip, beside BASE_REQUIREMENTS
    install_environment: dict = field(default_factory=dict)  # for pip: name -> value
    # Along which its ranks compute each sample together, and so do ours: "tensor", "context" or "pipeline".
    axis: str = ""
    one_rank: bool = False  # a loop without communication


PEERS = {
    "bare": Peer("", one_rank=True),
    "eager": Peer("eager.py", one_rank=True),
    "compiled": Peer("compiled.py", one_rank=True),
    "ddp": Peer("ddp.py"),
    "fsdp2": Peer("fsdp2.py"),
    # Not deepspeed.py, which would hide the package. 0: compile nothing at installation.
    "deepspeed": Peer("zero_deepspeed.py", ("deepspeed==0.19.8",), {"DS_BUILD_OPS": "0"}),
    "tensor_parallel": Peer("tensor_parallel.py", axis="tensor"),
    "context_parallel": Peer("context_parallel.py", axis="context"),
    "experts": Peer("experts.py"),
    "pipeline": Peer("pipeline.py", axis="pipeline"),
}


@dataclass(frozen=True)
class Run:
    """One set of processes, from its JSON file."""

    step_seconds: float  # median over the steps after the warm-up
    rss_bytes: int  # peak minus base, the largest of all ranks
    rss_base_bytes: int  # the largest of all ranks
    device_bytes: int  # at the peak on an accelerator, the largest of all ranks; 0 on the host
    loss: list  # per step, mean over ranks
    weights_sha256: str  # of the final weights; "" where the side does not say
    update_seconds: float  # median as above, of the optimizer's step alone; 0 where the side does not say


def parse_arguments(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", required=True, help=f"comma-separated; of: {', '.join(PEERS)}")
    flags.add_run_flags(parser)
    parser.add_argument("--stage", type=int, choices=range(4), default=0,
                        help="ZeRO stage of ours (default 0)")
    parser.add_argument("--build", type=Path, help="folder with examples/train_gpt and "
                        "bench/bare_loop (default: build/release; on cuda build/cuda)")
    parser.add_argument("--train-gpt", type=Path, help="ours, where it is not that of --build")
    parser.add_argument("--python", choices=["venv", "current"], help="interpreter of the peers: .venv-peers, "
                        "made where missing, or the python3 that runs this (default: venv; on "
                        "cuda current)")
    add_measuring_flags(parser, "side", rounds=5)
    known = "; ".join(
        f"{name}: {flags.describe_options(flags.PEER_OPTIONS[name])}" for name in PEERS
    )
    parser.add_argument("--peer-option", action="append", default=[], metavar="NAME=VALUE",
                        help=f"for every chosen peer that has it; {known}")
    arguments = parser.parse_args(words)
    flags.check_run_flags(parser, arguments)
    fill_defaults(arguments)
    check_arguments(parser, arguments)
    return arguments


def fill_defaults(arguments):
    on_cuda = arguments.device == "cuda"
    arguments.build = arguments.build or peer_venv.ROOT / "build" / ("cuda" if on_cuda else "release")
    arguments.train_gpt = arguments.train_gpt or arguments.build / "examples/train_gpt"
    arguments.bare_loop = arguments.build / "bench/bare_loop"
    arguments.python = arguments.python or ("current" if on_cuda else "venv")


def check_arguments(parser, arguments):
    arguments.peers = list(dict.fromkeys(arguments.peers.split(",")))
    for name in arguments.peers:
        if name not in PEERS:
            parser.error(f'unknown peer "{name}" in --peers; known: {", ".join(PEERS)}')
    alone = [name for name in arguments.peers if PEERS[name].one_rank]
    if alone and arguments.ranks != 1:
        parser.error(
            f"the peer {alone[0]} is a loop without communication: it has one rank, got --ranks "
            f"{arguments.ranks}; use --ranks 1 or another peer"
        )
    for name in {"deepspeed", "tensor_parallel", "context_parallel", "experts", "pipeline"}.intersection(arguments.peers):
        if (arguments.device, arguments.compute_dtype) != ("cpu", "fp32"):
            parser.error(f"the peer {name} is set up for --device cpu and --compute-dtype fp32 only")
    sharing = [name for name in arguments.peers if PEERS[name].axis]
    arguments.axis = PEERS[sharing[0]].axis if sharing else ""
    if sharing and len(arguments.peers) > 1:
        parser.error(f"the ranks of the peer {sharing[0]} share their samples, those of others do not; "
                     "compare with it alone")
    if "experts" in arguments.peers and len(arguments.peers) > 1:
        parser.error("the peer experts has another model; compare with it alone")
    if arguments.axis == "tensor" and arguments.heads % arguments.ranks != 0:
        parser.error(f"--heads {arguments.heads}: {arguments.ranks} ranks do not divide them")
    if arguments.axis == "context" and arguments.sequence % (2 * arguments.ranks) != 0:
        parser.error(f"--sequence {arguments.sequence}: expected two chunks for each of {arguments.ranks} ranks")
    if arguments.axis == "pipeline" and not 2 <= arguments.ranks <= arguments.layers:
        parser.error(f"--ranks {arguments.ranks}: a pipeline needs 2 or more, and a block for each of them")
    for option in arguments.peer_option:
        name, _, value = option.partition("=")
        if not any(value in flags.PEER_OPTIONS[p].get(name, ()) for p in arguments.peers):
            parser.error(f"no chosen peer has --peer-option {option}; see --help")
    check_measuring_flags(parser, arguments)


def side_commands(arguments, python, data, folder):
    """What to start for each side, ours first; --json is added per run."""
    shared = ["--data", data, *flags.command_line(arguments)]
    # Peers have one learning rate in all steps.
    sides = {"ours": [arguments.train_gpt.resolve(), *shared, "--warmup-steps", "0", "--stage",
                      str(arguments.stage)]}
    if arguments.axis:
        sides["ours"] += [f"--{arguments.axis}", str(arguments.ranks)]
    if arguments.axis == "context":
        chosen = flags.chosen_options("context_parallel", arguments.peer_option)
        sides["ours"] += ["--context-form", chosen["our_form"]]
    if "experts" in arguments.peers:
        chosen = flags.chosen_options("experts", arguments.peer_option)
        # The peer trains without a loss of balance.
        sides["ours"] += ["--experts", chosen["experts"], "--active", chosen["active"], "--balance-loss", "0"]
        if chosen["our_experts"] == "over_ranks":
            sides["ours"] += ["--expert-parallel", str(arguments.ranks)]
    if arguments.axis == "pipeline":
        chosen = flags.chosen_options("pipeline", arguments.peer_option)
        sides["ours"] += ["--schedule", chosen["schedule"], "--accumulate", chosen["micro_batches"]]
    for name in arguments.peers:
        # What its libraries leave in TMPDIR goes with the folder.
        program = ["env", f"TMPDIR={folder}", python, PEERS_FOLDER / PEERS[name].script]
        if name == "bare":
            program = [arguments.bare_loop.resolve()]
        sides[name] = [*program, *shared]
        for option in arguments.peer_option:
            if option.split("=")[0] in flags.PEER_OPTIONS[name]:
                sides[name] += ["--peer-option", option]
    return sides


def read_run(result, arguments):
    for key, expected in (("loss", arguments.steps), ("memory", arguments.ranks)):
        if len(result[key]) != expected:
            raise ValueError(f"{key}: expected {expected} entries, got {len(result[key])}")
    return Run(
        step_seconds=median_step(result, arguments.steps),
        rss_bytes=max(m["rss_peak_bytes"] - m["rss_base_bytes"] for m in result["memory"]),
        rss_base_bytes=max(m["rss_base_bytes"] for m in result["memory"]),
        device_bytes=max(
            m["peak_bytes"] if arguments.device == "cuda" else 0 for m in result["memory"]
        ),
        loss=result["loss"],
        weights_sha256=result.get("weights_sha256", ""),
        update_seconds=statistics.median(result.get("update_seconds", [])[WARM_UP_STEPS:] or [0]),
    )


def run_rounds(sides, folder, arguments, after_round):
    """side -> its runs, interleaved: every side once a round, in turns who goes first. after_round is
    called with what there is when every side has run as often as the others."""
    runs = {side: [] for side in sides}
    for number, side in in_turns(list(sides), arguments.rounds):
        run = measure(side, sides[side], folder, arguments.timeout,
                      lambda result: read_run(result, arguments))
        runs[side].append(run)
        print(
            f"round {number}/{arguments.rounds} {side}: {run.step_seconds:.4f} s a step, "
            f"{(run.device_bytes or run.rss_bytes) / 2**20:.1f} MiB, last loss {run.loss[-1]:.4f}",
            file=sys.stderr,
            flush=True,
        )
        if len({len(of_side) for of_side in runs.values()}) == 1:
            after_round(runs)
    return runs


def compare(ours, peer, tolerance):
    """Figures of one peer, from pairs of runs of the same round."""
    figures = {}
    for quantity in ("step_seconds", "rss_bytes", "rss_base_bytes", "device_bytes"):
        mine = [getattr(run, quantity) for run in ours]
        theirs = [getattr(run, quantity) for run in peer]
        figures[quantity] = {
            "ours": statistics.median(mine),
            "peer": statistics.median(theirs),
            # A tiny model may add nothing to the peak.
            "ratio": spread([a / b if b else float("nan") for a, b in zip(mine, theirs)]),
        }
    differences = [
        (loss_difference(a, b), step)
        for mine, theirs in zip(ours, peer)
        for step, (a, b) in enumerate(zip(mine.loss, theirs.loss))
    ]
    if all(run.weights_sha256 for run in peer):
        figures["same_weights"] = len({run.weights_sha256 for run in [*ours, *peer]}) == 1
    worst, step = max(differences)
    figures["worst_loss_difference"] = {
        "relative": worst,
        "step": step,
        "agrees": worst <= tolerance,
    }
    return figures


def loss_difference(ours, peer):
    difference = abs(ours - peer) / abs(peer) if peer else abs(ours - peer)
    return difference if difference == difference else float("inf")


def requirements_of(peers):
    of_peers = (requirement for peer in peers for requirement in PEERS[peer].requirements)
    return list(dict.fromkeys([*BASE_REQUIREMENTS, *of_peers]))


def python_of_peers(arguments):
    """The interpreter that runs the peers' scripts; None where none of them has one."""
    with_script = [peer for peer in arguments.peers if PEERS[peer].script]
    if not with_script:
        return None
    if arguments.python == "current":
        return peer_venv.current(arguments.device == "cuda")
    environment = {}
    for peer in with_script:
        environment |= PEERS[peer].install_environment
    return peer_venv.ensure(requirements_of(with_script), environment)


def write_json(path, arguments, runs, figures):
    of_run = (name.replace("-", "_") for name in flags.RUN_FLAGS)
    names = ["peers", "rounds", "peer_option", "stage", *of_run]
    result = {
        "flags": {name: getattr(arguments, name) for name in names},
        "data": str(arguments.data or "LibTorch's include/ATen/core/**/*.h"),
        "requirements": requirements_of([p for p in arguments.peers if PEERS[p].script]),
        "python": arguments.python,
        "cpu_count": os.cpu_count(),
        "warm_up_steps": WARM_UP_STEPS,
        "loss_tolerance": LOSS_TOLERANCE[arguments.compute_dtype],
        "against": figures,
        "runs": {side: [vars(run) for run in of_side] for side, of_side in runs.items()},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main(words=None):
    arguments = parse_arguments(words)
    programs = [arguments.train_gpt] + [arguments.bare_loop] * ("bare" in arguments.peers)
    check_files(programs, arguments.data)
    python = python_of_peers(arguments)
    with tempfile.TemporaryDirectory(prefix="against-peers-") as name:
        folder = Path(name)
        data = data_in(folder, arguments.data)
        sides = side_commands(arguments, python, data, folder)
        tolerance = LOSS_TOLERANCE[arguments.compute_dtype]
        figures = {}

        def after_round(runs):
            # Each time: what was measured is there even if a later round is stopped.
            figures.update({peer: compare(runs["ours"], runs[peer], tolerance) for peer in arguments.peers})
            if arguments.json is not None:
                write_json(arguments.json, arguments, runs, figures)

        run_rounds(sides, folder, arguments, after_round)
    print_report(arguments, figures, tolerance)
    return 0 if all(f["worst_loss_difference"]["agrees"] for f in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
