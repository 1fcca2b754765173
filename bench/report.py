"""The table that against_peers.py prints."""

MIB = 2**20
RATIO = ("ours/it", "min", "max")


def print_report(arguments, figures, loss_tolerance):
    model = ("d_model", "layers", "heads", "sequence")
    words = [f"ranks {arguments.ranks}", f"threads a rank {arguments.threads}"]
    words += [f"{name} {getattr(arguments, name)}" for name in model]
    of_batch = {"": "a rank", "tensor": "of all ranks", "context": "of all ranks", "pipeline": "a micro-batch"}[arguments.axis]
    words += [f"batch {of_batch} {arguments.batch}", f"steps {arguments.steps}"]
    print(f"\n{', '.join(words)}, rounds {arguments.rounds}")
    options = " ".join(arguments.peer_option) or "the defaults"
    print(f"on {arguments.device} in {arguments.compute_dtype}, ours at stage {arguments.stage}; "
          f"peer options: {options}\n")
    first = next(iter(figures.values()))
    on_cuda = arguments.device == "cuda"
    memory = "device_bytes" if on_cuda else "rss_bytes"
    heading = "device, MiB" if on_cuda else "RSS, MiB"
    rows = [("", "step, s", *RATIO, heading, *RATIO, "base, MiB", "losses differ by")]
    rows += [_row("ours", first, "ours", memory)]
    rows += [_row(peer, of_peer, "peer", memory) for peer, of_peer in figures.items()]
    print_table(rows)
    print("\nmedians over rounds; the largest of all ranks; RSS: peak over base; device: peak of "
          "what was asked for")
    print("ours/it: the ratio within a round: median, min, max")
    for peer, of_peer in figures.items():
        if "same_weights" in of_peer:
            bits = "the same bits" if of_peer["same_weights"] else "not the same bits"
            print(f"final weights of {peer}: {bits} as ours, in all rounds")
    print(f"losses {_verdict(figures)} (tolerance {loss_tolerance:g}, relative, at every step)")


def _row(name, figures, side, memory):
    """A line of the table: `side` of the figures of one peer; ratios and losses for a peer only."""
    step, rss, base = (figures[key] for key in ("step_seconds", memory, "rss_base_bytes"))
    worst = figures["worst_loss_difference"]
    is_peer = side == "peer"
    return (
        name,
        f"{step[side]:.4f}",
        *_ratios(step, is_peer),
        f"{rss[side] / MIB:.1f}",
        *_ratios(rss, is_peer),
        f"{base[side] / MIB:.0f}",
        f"{worst['relative']:.1e} at step {worst['step']}" if is_peer else "",
    )


def _ratios(figures, shown):
    return [f"{figures['ratio'][k]:.3f}" if shown else "" for k in ("median", "min", "max")]


def _verdict(figures):
    others = [peer for peer, f in figures.items() if not f["worst_loss_difference"]["agrees"]]
    return f"of {', '.join(others)} DIFFER, not the same training" if others else "agree"


def print_table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())
