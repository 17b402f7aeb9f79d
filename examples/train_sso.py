"""Train a small GPT with the Spectral Sphere Optimizer, which keeps the spectral norm of every matrix constant.

python examples/train_sso.py --steps 100
python examples/train_sso.py --lambda-mode projection      # tangent steps that cost as much as Muon's
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from muon_fsdp import SpectralSphereOptimizer
from muon_fsdp.linalg.sphere import RADIUS_MODES
from muon_fsdp.linalg.tangent import LAMBDA_MODES
from muon_fsdp.spectral import compute_spectral_norm, target_radius
from muon_fsdp.training.data import open_corpus, training_batches
from muon_fsdp.training.model import GPT, preset


def farthest_from_its_sphere(model: GPT, radius_mode: str) -> float:
    """Return the largest |s/R - 1| of all hidden matrices: spectral norm s, radius R."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    radii = [target_radius(*p.shape, radius_mode) for p in matrices]
    return max(abs(float(compute_spectral_norm(p)) / radius - 1) for p, radius in zip(matrices, radii, strict=True))


def main(argv: Sequence[str] | None = None) -> float:
    """Train the model and return its last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.04)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lambda-mode", choices=LAMBDA_MODES, default="bracketed")
    parser.add_argument("--radius-mode", choices=[mode for mode in RADIUS_MODES if mode != "initialize"])
    parser.add_argument(
        "--data", type=Path, help="text file or folder of text files (default: Python's standard library)"
    )
    args = parser.parse_args(argv)
    radius_mode = args.radius_mode or "spectral_mup"
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    config = preset("demo")
    model = GPT(config).to(device)
    optimizer = SpectralSphereOptimizer(
        model, lr=args.lr, nesterov=True, radius_mode=radius_mode, lambda_mode=args.lambda_mode, adamw_lr=0.01
    )
    print(optimizer.routing_report())
    tokens = open_corpus(args.data, config.sequence_length, byte_budget=8_000_000).train
    batches = training_batches(tokens, args.batch_size, config.sequence_length, torch.Generator().manual_seed(0))
    loss = torch.tensor(torch.inf)
    for step in range(1, args.steps + 1):
        inputs, targets = next(batches)
        _, loss = model(inputs.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps:
            metrics = optimizer.metrics()
            print(
                f"step {step:4d}  loss {loss.item():.4f}  |s/R - 1| at most "
                f"{farthest_from_its_sphere(model, radius_mode):.4f}  msign calls {metrics['msign_calls_median']:g} "
                f"(worst {metrics['msign_calls_max']:g})  fallbacks {metrics['lambda_fallbacks']:g}",
                flush=True,
            )
    return loss.item()


if __name__ == "__main__":
    main()
