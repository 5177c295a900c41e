"""A proof as text."""

from fmoe_ext.gpu.proof import PORTABLE, STATES, USED, Proof, Race, TorchWin


def report(proof: Proof) -> str:
    lines = [
        f"{proof.key.gpu}, compute capability {proof.key.capability / 10}, {proof.taken_with}",
        "",
        *_table(
            [("kernel", "state", "reason"), *((n, v.state, v.reason) for n, v in proof.verdicts.items())]
        ),
        "",
    ]
    if proof.races:
        lines += _table(
            [("operation", "computed by", "ms", "without", "torch's product"), *map(_row, proof.races)]
        )
        lines.append("")
    lines += [_torch_win(win) for win in proof.torch_wins] + [""] * bool(proof.torch_wins)
    counts = [(state, len(proof.named(state))) for state in STATES]
    lines.append(", ".join(f"{count} {state}" for state, count in counts if count))
    return "\n".join(lines)


def summary(proof: Proof) -> list[str]:
    """A line of what is used, one of what is not for each reason."""
    used = [name for name in proof.named("proved") if name != PORTABLE]
    lines = [
        f"proved {proof.date} with {proof.taken_with}: {', '.join(used) or 'the portable kernels alone'}"
    ]
    if proof.is_of_another:
        lines.append(f"on another GPU of its compute capability, {proof.key.gpu}: not raced here yet")
    lines += [_torch_win(win) for win in proof.torch_wins]
    for state in STATES[1:]:
        word = state if state in USED else f"off, {state}"
        lines += [f"{word}: {name} ({reason})" for name, reason in proof.named(state).items()]
    return lines


def _torch_win(win: TorchWin) -> str:
    rows = f"{win.rows} of rows" if win.rows != "few" else "few rows"
    where = f"{win.product}, {win.numbers}, {rows} an expert"
    return f"torch's product for {where}: {win.torch_ms:.3f} ms, ours {win.ms:.3f}"


def _row(race: Race) -> tuple[str, ...]:
    times = (race.ms, race.without_ms, race.torch_ms)
    return (
        f"{race.operation} ({race.shape})",
        race.kernel,
        *("" if t is None else f"{t:.3f}" for t in times),
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
