"""Train a small model with one optimizer: Muon for its matrices, AdamW for its embedding, head and vectors.

python examples/mixed_adamw.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from muon_fsdp import create_hybrid_optimizer

__all__ = ["create_hybrid_optimizer"]


class NextToken(nn.Module):
    """A model that predicts the next token from one token."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B,) -> (B, vocabulary)
        x = self.embedding(tokens)
        return self.head(x + self.out(functional.gelu(self.hidden(x))))


def main(steps: int = 200) -> float:
    """Train the model and return its last loss."""
    torch.manual_seed(0)
    model = NextToken()
    optimizer = create_hybrid_optimizer(model, muon_lr=0.02, adamw_lr=3e-3)
    print(optimizer.routing_report())
    successor = torch.randperm(64)  # the model has to learn which token follows which
    loss = torch.tensor(torch.inf)
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 64, (128,))
        loss = functional.cross_entropy(model(tokens), successor[tokens])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
