"""Predicted latency (`planning.latency`) of other models, beside published figures for Trainium2.

    python -m benchmarks.planning.predicted_latency

Predictions come from the models' configs alone. The launch time of a layer is fitted to eight of the figures, `FITTED`.
The others are not used. Times to the first token are for the bucket that a prompt is padded to.
"""

from __future__ import annotations

import sys

import torch
from rich.table import Table

from granite4_neuron.commands.output import print_table
from granite4_neuron.planning.latency import LAUNCH_SECONDS
from granite4_neuron.planning.published_latency import FIGURES

# `LAUNCH_SECONDS` is fitted to these. The time per token of the other port of h-small is not among them, because the
# prediction is compared with it.
FITTED = FIGURES[:8]


def fit() -> tuple[float, float]:
    """Fit seconds per layer and per step, both at least 0, to the logarithms of the `FITTED` figures."""
    steps = [figure.step() for figure in FITTED]
    known = torch.tensor([step.bound + step.losses["collectives"] for step in steps], dtype=torch.float64)
    layers = torch.tensor([float(figure.model.layers) for figure in FITTED], dtype=torch.float64)
    published = torch.tensor([figure.milliseconds / 1e3 for figure in FITTED], dtype=torch.float64)
    layer_seconds = torch.arange(0, 400e-6, 1e-6, dtype=torch.float64)[:, None, None]
    step_seconds = torch.arange(0, 8e-3, 50e-6, dtype=torch.float64)[None, :, None]
    errors = (torch.log((known + layers * layer_seconds + step_seconds) / published) ** 2).sum(-1)
    best = divmod(int(errors.argmin()), errors.shape[1])
    return layer_seconds[best[0]].item(), step_seconds[0, best[1]].item()


def main() -> int:
    table = Table(
        "model", "ranks", "step", "bound", "predicted", "published", "predicted / published", "most of it", "source"
    )
    table.title = "milliseconds; bound and prediction are computed from the model's config, not timed"
    for figure in FIGURES:
        step = figure.step()
        table.add_row(
            figure.name,
            str(figure.tp_degree),
            "token" if figure.tokens == 1 else f"first token, {figure.tokens}",
            f"{step.bound * 1000:.2f}",
            f"{step.predicted * 1000:.1f}",
            f"{figure.milliseconds:,}",
            f"{figure.ratio:.2f}",
            step.limit,
            str(figure.source),
        )
    print_table(table)
    layer_seconds, step_seconds = fit()
    print(
        f"A layer's launch: {layer_seconds * 1e6:.0f} us by the first {len(FITTED)} lines, {LAUNCH_SECONDS * 1e6:.0f} "
        f"in use; a step's beside it: {step_seconds * 1e6:.0f} us."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
