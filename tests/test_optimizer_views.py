"""MuonOptimizer and views: which matrices a parameter is read as, and which of them are computed together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.parameters import routing
from muon_fsdp.parameters.facts import Layers
from muon_fsdp.rules import RULES
from tests.optimizer_cases import updates_of
from tests.reference import ReferenceMuon


def expected_update(grad: torch.Tensor, **options) -> torch.Tensor:
    """Return what Muon with lr = 1 subtracts from a separate weight with this gradient."""
    reference = ReferenceMuon(np.zeros(grad.shape), lr=1.0, **options)
    return -torch.tensor(reference.step(grad.double().numpy())).to(grad.dtype)


@pytest.fixture
def exact():
    return {"lr": 1.0, "orthogonalization": "exact"}


def test_stacked_experts_are_separate_matrices(exact):
    p = nn.Parameter(torch.randn(3, 8, 5, dtype=torch.float64))
    p.grad = torch.randn_like(p)
    (update,) = updates_of(MuonOptimizer([p], **exact), p)
    torch.testing.assert_close(update, torch.stack([expected_update(grad) for grad in p.grad]))


@pytest.mark.parametrize("convolution", [nn.Conv1d(4, 8, 3), nn.Conv2d(4, 8, 3), nn.Conv3d(2, 5, 2)])
def test_convolutions_are_flattened(convolution, exact):
    convolution.double()
    weight = convolution.weight
    weight.grad = torch.randn_like(weight)
    (update,) = updates_of(MuonOptimizer(convolution, **exact), weight)
    torch.testing.assert_close(update.flatten(1), expected_update(weight.grad.flatten(1)))


def test_channels_last_convolution(exact):
    layer = nn.Conv2d(4, 8, 3).double().to(memory_format=torch.channels_last)
    layer.weight.grad = torch.randn(8, 4, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    (update,) = updates_of(MuonOptimizer(layer, **exact), layer.weight)
    torch.testing.assert_close(update.flatten(1), expected_update(layer.weight.grad.flatten(1)))


def test_heads_and_splits(exact):
    heads, qkv = (nn.Parameter(torch.randn(12, 5, dtype=torch.float64)) for _ in range(2))
    heads.grad, qkv.grad = torch.randn_like(heads), torch.randn_like(qkv)
    groups = [{"params": [heads], "num_heads": 3}, {"params": [qkv], "split_sizes": [6, 4, 2]}]
    by_head, by_split = updates_of(MuonOptimizer(groups, **exact), heads, qkv)
    torch.testing.assert_close(by_head, expected_update(heads.grad, blocks=[4, 4, 4]))
    torch.testing.assert_close(by_split, expected_update(qkv.grad, blocks=[6, 4, 2]))


def test_attn_by_label_group_and_override(exact):
    grad = torch.randn(6, 8, dtype=torch.float64)
    expected = torch.stack([expected_update(block) for block in grad.view(4, 6, 2)]).view(6, 8)

    def attn_parameter():
        p = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
        p.grad = grad.clone()
        return p

    labelled = attn_parameter()
    labelled.label = "attn"
    by_group, by_name = attn_parameter(), attn_parameter()
    optimizers = [
        (labelled, MuonOptimizer([labelled], **exact)),
        (by_group, MuonOptimizer([{"params": [by_group], "view": "attn"}], **exact)),
        (by_name, MuonOptimizer([("block.qkvo", by_name)], overrides={"*.qkvo": {"view": "attn"}}, **exact)),
    ]
    for p, optimizer in optimizers:
        torch.testing.assert_close(updates_of(optimizer, p)[0], expected)


def test_a_foreign_label_means_nothing(exact):
    p = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
    p.label = "mlp"
    p.grad = torch.randn_like(p)
    torch.testing.assert_close(updates_of(MuonOptimizer([p], **exact), p)[0], expected_update(p.grad))


def test_transposed_storage_swaps_d_out_and_d_in(exact):
    class Conv1D(nn.Module):  # as in Hugging Face Transformers: (in, out)
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 15, dtype=torch.float64))

    layer = Conv1D()
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer = MuonOptimizer(layer, overrides={"weight": {"split_sizes": (5, 5, 5)}}, **exact)
    (update,) = updates_of(optimizer, layer.weight)
    torch.testing.assert_close(update, expected_update(layer.weight.grad.T, blocks=[5, 5, 5]).T)
    whole = MuonOptimizer(layer, scale="v3", **exact)
    torch.testing.assert_close(updates_of(whole, layer.weight)[0], expected_update(layer.weight.grad.T, scale="v3").T)


class Attention(nn.Module):
    """Queries of six heads, keys and values of two heads each, in two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(5, 12, bias=False, dtype=torch.float64)
        self.key_value = nn.Linear(5, 8, bias=False, dtype=torch.float64)
        for weight in self.parameters():
            weight.grad = torch.randn_like(weight)


def read_heads(layers: Layers, attention: str) -> None:
    """Stand for a reader of models: note the heads of every weight on its facts."""
    for layer in layers.all:
        if layer.name == "query":
            layer.facts.num_heads = 6
        elif layer.name == "key_value":
            layer.facts.split_sizes = (2, 2, 4)


@pytest.fixture
def heads_are_read(monkeypatch):
    monkeypatch.setattr(routing, "find_fused", read_heads)


def cuts(optimizer: MuonOptimizer) -> list[str]:
    return [str(record.view) for record in optimizer._records()]


@pytest.mark.usefixtures("heads_are_read")
def test_views_that_a_model_tells_do_not_divide_groups(exact):
    model = Attention()
    optimizer = MuonOptimizer(model, **exact)
    assert len(optimizer.param_groups) == 1
    assert cuts(optimizer) == ["matrix, num_heads=6", "matrix, split_sizes=(2, 2, 4)"]
    query, key_value = updates_of(optimizer, *model.parameters())
    torch.testing.assert_close(query, expected_update(model.query.weight.grad, blocks=[2] * 6))
    torch.testing.assert_close(key_value, expected_update(model.key_value.weight.grad, blocks=[2, 2, 4]))


@pytest.mark.usefixtures("heads_are_read")
def test_options_of_a_group_win_over_what_a_model_tells():
    """They hold for all parameters of the group, also if they are set later, and until they are None again."""
    model = Attention()
    told = ["matrix, num_heads=6", "matrix, split_sizes=(2, 2, 4)"]
    for options, expected in (
        ({"num_heads": 4}, 2 * ["matrix, num_heads=4"]),
        ({"view": "matrix"}, 2 * ["matrix"]),
        ({"transposed": True}, 2 * ["matrix, transposed"]),  # its rows are others than those that the model cuts
    ):
        assert cuts(MuonOptimizer([{"params": model.named_parameters(), **options}])) == expected
        optimizer = MuonOptimizer(model)
        optimizer.param_groups[0].update(options)
        assert cuts(optimizer) == expected
        optimizer.param_groups[0].update({"view": "auto", "num_heads": None, "transposed": None})
        assert cuts(optimizer) == told
    overridden = MuonOptimizer(model, overrides={"key_value.weight": {"num_heads": 2}})
    assert sorted(cuts(overridden)) == ["matrix, num_heads=2", "matrix, num_heads=6"]


def test_views_that_a_model_tells_are_no_part_of_checkpoints(monkeypatch):
    """A checkpoint without them loads where the model has them, and the other way round, with any options of groups."""
    model = Attention()
    plain, by_group = MuonOptimizer(model), MuonOptimizer(model, num_heads=2)
    monkeypatch.setattr(routing, "find_fused", read_heads)
    told = MuonOptimizer(model)
    for optimizer in (plain, by_group, told):
        optimizer.step()
    saved = [optimizer.state_dict() for optimizer in (plain, by_group, told)]
    without_state, *others = ([{**group} for group in each["param_groups"]] for each in saved)
    assert without_state == others[1]  # the same groups, keys and values
    assert [group["num_heads"] for group in others[0]] == [2]
    for each, expected in zip(saved, (cuts(told), 2 * ["matrix, num_heads=2"], cuts(told)), strict=True):
        loaded = MuonOptimizer(model)
        loaded.load_state_dict(each)
        assert cuts(loaded) == expected


def test_equal_matrices_are_computed_together(monkeypatch):
    calls = []
    directions = RULES["muon"].directions
    monkeypatch.setattr(
        type(RULES["muon"]),
        "directions",
        lambda _, batches: calls.extend(tuple(batch.matrices.shape) for batch in batches) or directions(batches),
    )
    groups = [{"params": [nn.Parameter(torch.randn(6, 8)) for _ in range(4)], "lr": lr} for lr in (0.1, 0.2)]
    groups.append({"params": [nn.Parameter(torch.randn(3, 6, 8)), nn.Parameter(torch.randn(8, 6))]})
    optimizer = MuonOptimizer(groups)
    for p in optimizer._parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert sorted(calls) == [(1, 8, 6), (11, 6, 8)]


@pytest.mark.parametrize("max_stage_bytes", [1, 500, 2000, 2**28])
def test_stages_do_not_change_the_result(max_stage_bytes):
    def run(max_stage_bytes):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in [(6, 8), (6, 8), (5, 6, 8), (12, 4), (9,)]]
        optimizer = MuonOptimizer(parameters, max_stage_bytes=max_stage_bytes)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [p.detach() for p in parameters]

    for bounded, unbounded in zip(run(max_stage_bytes), run(2**40), strict=True):
        torch.testing.assert_close(bounded, unbounded, atol=1e-4, rtol=0)
