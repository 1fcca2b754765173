"""The flags of one training run, the same for every side, and the options of each peer."""

import argparse
import math


def _at_least(smallest):
    def integer(text):
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"expected at least {smallest}, got {value}")
        return value

    return integer


def _learning_rate(text):
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text}")
    return value


def _one_of(*choices):
    def choice(text):
        if text not in choices:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, got {text}")
        return text

    return choice


RUN_FLAGS = {
    "ranks": (_at_least(1), 2, "processes, all on this machine"),
    "d-model": (_at_least(1), 512, "width of the residual stream"),
    "layers": (_at_least(1), 8, "transformer blocks"),
    "heads": (_at_least(1), 8, "attention heads; divides --d-model"),
    "sequence": (_at_least(1), 256, "tokens in a sample"),
    "batch": (_at_least(1), 2, "samples in a step, per rank"),
    "steps": (_at_least(1), 8, "optimizer steps"),
    "threads": (_at_least(1), 1, "threads per rank"),
    "seed": (_at_least(0), 0, "of the initial weights and of the order of the data"),
    "lr": (_learning_rate, 3e-4, "learning rate of AdamW"),
    "device": (_one_of("cpu", "cuda"), "cpu", "cpu or cuda: where ranks train"),
    "compute-dtype": (
        _one_of("fp32", "bf16"), "fp32", "fp32 or bf16: of forward and backward; AdamW is in fp32"
    ),
}

# peer -> option -> values, the default first
_EVERY_PEER = {"adamw": ("default", "fused"), "malloc": ("default", "mmap")}
PEER_OPTIONS = {
    "bare": {},
    "eager": _EVERY_PEER,
    "compiled": {"mode": ("default", "reduce-overhead", "max-autotune-no-cudagraphs"), **_EVERY_PEER},
    "ddp": {"gradient_as_bucket_view": ("on", "off"), **_EVERY_PEER},
    "fsdp2": {
        "reshard_after_forward": ("on", "off"),
        "reduce": ("bf16", "fp32"),
        **_EVERY_PEER,
    },
    "deepspeed": {
        "stage": ("3", "2", "1", "0"),
        "buckets": ("block", "default"),
        **_EVERY_PEER,
    },
    "tensor_parallel": {"vocabulary": ("sharded", "replicated"), **_EVERY_PEER},
    # Of ours; the peer gathers keys and values.
    "context_parallel": {"our_form": ("ring", "ulysses"), **_EVERY_PEER},
    # our_experts: whole on each rank, or over all ranks, to which tokens travel.
    "experts": {
        "experts": ("8", "4", "16"),
        "active": ("2", "1", "4"),
        "our_experts": ("whole", "over_ranks"),
        **_EVERY_PEER,
    },
    "pipeline": {
        "schedule": ("1f1b", "gpipe"),
        "micro_batches": ("8", "4", "16", "32"),
        **_EVERY_PEER,
    },
}


def add_run_flags(parser, leave_out=(), **defaults):
    """`defaults`: of this program, by the flag's attribute, instead of those of RUN_FLAGS. leave_out: flags that it chooses itself."""
    for name, (kind, default, meaning) in RUN_FLAGS.items():
        if name in leave_out:
            continue
        default = defaults.get(name.replace("-", "_"), default)
        parser.add_argument(
            f"--{name}", type=kind, default=default, help=f"{meaning} (default {default})"
        )


def check_run_flags(parser, arguments):
    """Ends with exit status 2 where the flags do not fit together."""
    if arguments.d_model % arguments.heads != 0:
        parser.error(f"--heads {arguments.heads} does not divide --d-model {arguments.d_model}")
    if arguments.seed >= 2**63:
        parser.error(f"--seed must be below 2^63, got {arguments.seed}")


def command_line(arguments, optimizer="adamw"):
    """The run flags of `arguments` as strings for another program."""
    words = []
    for name in RUN_FLAGS:
        words += [f"--{name}", str(getattr(arguments, name.replace("-", "_")))]
    return words + ["--optimizer", optimizer]


def peer_arguments(description, peer):
    """Parses the command line of the program of `peer`; what is chosen of its PEER_OPTIONS comes
    back as the dict `options` of the result."""
    parser = argparse.ArgumentParser(description=description)
    add_run_flags(parser)
    parser.add_argument("--optimizer", choices=["adamw"], default="adamw")
    parser.add_argument("--data", required=True, help="file whose bytes are the tokens")
    parser.add_argument("--json", required=True, help="file for the measurements")
    parser.add_argument("--peer-option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    check_run_flags(parser, arguments)
    options = PEER_OPTIONS[peer]
    for text in arguments.peer_option:
        name, _, value = text.partition("=")
        if value not in options.get(name, ()):
            parser.error(f"unknown --peer-option {text}; known: {describe_options(options)}")
    arguments.options = chosen_options(peer, arguments.peer_option)
    return arguments


def chosen_options(peer, texts):
    """option -> value: what the NAME=VALUE texts say of the options that the peer has, and else the defaults."""
    options = {name: values[0] for name, values in PEER_OPTIONS[peer].items()}
    for text in texts:
        name, _, value = text.partition("=")
        if name in options:
            options[name] = value
    return options


def describe_options(options):
    texts = [f"{name}={{{','.join(values)}}}" for name, values in options.items()]
    return " ".join(texts) or "none"
