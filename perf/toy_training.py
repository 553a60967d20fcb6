"""Train the toy of `megamoe.verify.toy` for 50 steps on the compiled kernels (vgpu) and draw its
loss beside the oracle's.

    python perf/toy_training.py --out docs/training_loss.svg

Says nothing about time. Two MoE layers on two PEs, two micro-batches a step, the gradients of the
weights added to fp32 main_grad, once after all micro-batches (``delay``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megamoe.config import MoEConfig
from megamoe.testing import VgpuMoE
from megamoe.testing_engine import VgpuEngine
from megamoe.verify.toy import OracleEngine, Training, Weights, train

CFG = MoEConfig(hidden=64, intermediate=64, num_experts=4, top_k=2, num_pes=2, max_tokens=24)


def on_vgpu(weights: Weights) -> VgpuEngine:
    split = {name: [each[name].detach() for each in weights] for name in weights[0]}
    return VgpuEngine(VgpuMoE(CFG, **split, training=True))


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Losses, and below them how far each is from the first curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    exact = next(iter(curves.values()))
    for (name, losses), style in zip(curves.items(), ("k-", "C0--", "C1:"), strict=True):
        top.plot(losses, style, label=name)
        if losses is not exact:
            off = [100 * abs(a - b) / b for a, b in zip(losses, exact, strict=True)]
            bottom.plot(off, style)
    top.set(ylabel="loss", ylim=(0, None))
    top.legend(frameon=False)
    bottom.set(xlabel="update", ylabel="% from exact")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("training_loss.svg"))
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    how = Training(cfg=CFG, tokens=(20, 12), steps=options.steps, rate=1.0, delay=True)
    curves = {
        "oracle, fp64": train(how, lambda weights: OracleEngine(CFG)),
        "oracle with the kernels' roundings": train(
            how, lambda weights: OracleEngine(CFG, exact=False)
        ),
        "compiled kernels on vgpu": train(how, on_vgpu),
    }
    for name, losses in curves.items():
        print(f"{name}: {losses[0]:.4f} -> {losses[-1]:.4f}")
    exact, rounded, kernels = curves.values()
    for name, losses in (("roundings", rounded), ("vgpu", kernels)):
        off = [abs(a - b) / b for a, b in zip(losses, exact, strict=True)]
        early, late = (100 * max(part) for part in (off[:20], off))
        print(f"{name}: at most {early:.2f} % off in the first 20 updates, {late:.2f} % in all")
    draw(curves, options.out)


if __name__ == "__main__":
    main()
