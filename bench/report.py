"""The table that against_peers.py prints."""

COLUMNS = ("ours", "peer", "ours/peer", "min", "max")


def print_report(arguments, figures, loss_tolerance):
    print(
        f"\nranks {arguments.ranks}, threads a rank {arguments.threads}, d_model {arguments.d_model}, "
        f"layers {arguments.layers}, heads {arguments.heads}, sequence {arguments.sequence}, "
        f"batch a rank {arguments.batch}, steps {arguments.steps}, rounds {arguments.rounds}; "
        f"ours at stage {arguments.stage}"
    )
    for peer, of_peer in figures.items():
        step, rss = of_peer["step_seconds"], of_peer["rss_bytes"]
        print()
        print_table(
            [
                (f"against {peer}", *COLUMNS),
                _row("median step, s", step, lambda seconds: f"{seconds:.4f}"),
                _row("peak RSS over base, MiB", rss, lambda count: f"{count / 2**20:.1f}"),
            ]
        )
        worst = of_peer["worst_loss_difference"]
        verdict = "agree" if worst["agrees"] else "DIFFER, not the same training"
        print(
            f"losses {verdict}: worst relative difference {worst['relative']:.2e} at step "
            f"{worst['step']} (tolerance {loss_tolerance:g})"
        )


def _row(name, figures, text):
    ratio = figures["ratio"]
    ratios = (f"{ratio[key]:.3f}" for key in ("median", "min", "max"))
    return (name, text(figures["ours"]), text(figures["peer"]), *ratios)


def print_table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]))
