"""A new update rule is one class and one row; everything else works with it as it is."""

from __future__ import annotations

import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.rules import RULES, Rule, StateSpec


class SignOfWholeMatrix(Rule):
    """A toy that needs whole matrices: the sign of the momentum, times the mean size of the matrix."""

    name = "toy"
    orthogonalizes = True
    state = (StateSpec("momentum_buffer"),)

    def prepare(self, group, grads, states):
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_add_(buffers, grads)
        return buffers

    def batch_key(self, group, rows, cols):
        return "toy"

    def flops(self, key, rows, cols):
        return rows * cols

    def direction(self, key, matrices, out, inverse_norms=None):
        torch.mul(matrices.sign(), matrices.abs().mean(dim=(-2, -1), keepdim=True), out=out)


def test_a_toy_rule(monkeypatch):
    monkeypatch.setitem(RULES, "toy", SignOfWholeMatrix())
    w, stack, b = nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.zeros(3, 4, 5)), nn.Parameter(torch.zeros(4))
    optimizer = MuonOptimizer([w, stack, b], rule="toy", lr=1.0)
    for p in (w, stack, b):
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.testing.assert_close(w.detach(), -w.grad.sign() * w.grad.abs().mean())
    for i in range(3):
        torch.testing.assert_close(stack.detach()[i], -stack.grad[i].sign() * stack.grad[i].abs().mean())
    assert [row.rule for row in optimizer.routing_report().rows] == ["toy", "toy", "adamw"]
    resumed = MuonOptimizer([w, stack, b], rule="toy")
    resumed.load_state_dict(optimizer.state_dict())
