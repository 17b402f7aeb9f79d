"""Bad input: every error names the parameter or the option and says what is valid."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer, create_hybrid_optimizer
from tests.comparisons import assert_same


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 6))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -0.1}, "Invalid learning rate: -0.1.*'lr'"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": float("inf")}, "Invalid learning rate: inf"),
        ({"lr": torch.tensor([0.1, 0.2])}, r"Invalid learning rate: a tensor of shape \(2,\).*must be one real number"),
        ({"lr": torch.tensor(-1.0)}, "Invalid learning rate: -1.0"),
        ({"adamw_lr": -1}, "Invalid learning rate: -1 .*'adamw_lr'"),
        ({"momentum": 1.0}, r"Invalid momentum: 1.0.*\[0, 1\)"),
        ({"momentum": -0.5}, "Invalid momentum: -0.5"),
        ({"weight_decay": -1e-3}, "Invalid weight_decay: -0.001"),
        ({"weight_decay": float("nan")}, "Invalid weight_decay: nan"),
        ({"adamw_weight_decay": -1.0}, "Invalid adamw_weight_decay: -1.0"),
        ({"adamw_betas": (0.9, 1.0)}, r"Invalid adamw_betas: \(0.9, 1.0\)"),
        ({"adamw_eps": -1e-8}, "Invalid adamw_eps: -1e-08"),
        ({"ns_steps": 0}, "Invalid ns_steps: 0"),
        ({"ns_stepsize": float("inf")}, "Invalid ns_stepsize: inf"),
        ({"rule": "moun"}, "Unknown rule 'moun'; valid names are muon, normuon, .*; did you mean 'muon'"),
        (
            {"scale": "v5"},
            "Unknown scale 'v5'; valid names are 'original' .also v2: .*'size' .also v1: .*, or a number",
        ),
        ({"scale": -1.0}, "Invalid scale: -1.0"),
        ({"orthogonalization": "svd"}, "Unknown orthogonalization 'svd'; valid names are default, accurate"),
        ({"view": "heads"}, "Unknown view 'heads'; valid names are auto, matrix"),
        ({"num_heads": 0}, "Invalid num_heads: 0"),
        ({"split_sizes": (2, 0)}, r"Invalid split_sizes: \(2, 0\)"),
        ({"split_sizes": (2, 3)}, r"parameter 'param\[0\]'.*add up to 5"),
        ({"num_heads": 3}, r"parameter 'param\[0\]'.*does not divide"),
        ({"nonfinite": "ignore"}, "Unknown nonfinite 'ignore'; valid names are propagate, skip, raise"),
        ({"max_stage_bytes": 0}, "Invalid max_stage_bytes: 0"),
        ({"overrides": {"*": "adam"}}, "Unknown rule 'adam'"),
        (
            {"overrides": {"*": {"momentun": 0.9}}},
            r"Unknown option 'momentun' in overrides\['\*'\]; did you mean 'momentum'",
        ),
        ({"overrides": {"*": "adamw"}}, "overrides need names"),
        ({"foreach": True}, r"Unknown option 'foreach' in MuonOptimizer; leave it out"),
        ({"overrides": {"*": {"params": []}}}, "Unknown option 'params'"),
        ({"rule": "adamw", "lr": 0.1}, "'lr' has no effect; pass 'adamw_lr'"),
    ],
)
def test_invalid_values_are_named(options, text):
    with pytest.raises(ValueError, match=text):
        MuonOptimizer([matrix()], **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": "0.1"}, "Invalid learning rate: '0.1'"),
        ({"lr": None}, "Invalid learning rate: None"),
        ({"momentum": True}, "Invalid momentum: True"),
        ({"nesterov": 1}, "Invalid nesterov: 1"),
        ({"ns_steps": 5.0}, "Invalid ns_steps: 5.0"),
        ({"adamw_betas": 0.9}, "Invalid adamw_betas: 0.9"),
        ({"split_sizes": 4}, "Invalid split_sizes: 4"),
        ({"max_stage_bytes": 1e6}, "Invalid max_stage_bytes"),
        ({"strict": "yes"}, "Invalid strict: 'yes'"),
        ({"overrides": ["*"]}, "overrides must be a dict of name patterns, got list"),
        ({"overrides": {3: "adamw"}}, "must be a string"),
        ({"overrides": {"*": 3}}, r"overrides\['\*'\] must be a rule name or a dict"),
    ],
)
def test_wrong_types_are_named(options, text):
    with pytest.raises(TypeError, match=text):
        MuonOptimizer([matrix()], **options)


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="momentun"):
        MuonOptimizer([matrix()], momentun=0.9)
    with pytest.raises(ValueError, match=r"Unknown option 'momentun' in a parameter group; did you mean 'momentum'"):
        MuonOptimizer([{"params": [matrix()], "momentun": 0.9}])
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        MuonOptimizer([{"params": [matrix()], "lr": -1}])


def test_options_of_frameworks_are_accepted():
    optimizer = MuonOptimizer([{"params": [matrix()], "initial_lr": 0.1, "name": "body"}])
    assert optimizer.param_groups[0]["name"] == "body"


@pytest.mark.parametrize("params", [[], iter(()), nn.Module()])
def test_an_empty_list_of_parameters_is_refused(params):
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        MuonOptimizer(params)


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"params": []}, TypeError, "a list of groups, got dict"),
        (["weight"], TypeError, r"parameter 'param\[0\]' is not a tensor but a str"),
        ([torch.randn(3, 3, requires_grad=True) * 2], ValueError, r"'param\[0\]' is not a leaf"),
        (
            [nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))],
            ValueError,
            r"'param\[0\]' is complex.*view_as_real",
        ),
        ([torch.ones(2, 2, dtype=torch.int64)], ValueError, r"'param\[0\]' has dtype torch.int64"),
        ([{"lr": 0.1}], ValueError, "needs 'params'"),
        (None, TypeError, "got NoneType"),
        ({torch.ones(2, 2)}, TypeError, "got set"),
        ([("a", torch.ones(2, 2), 1)], TypeError, r"\(name, tensor\) pairs"),
        ([(torch.ones(2, 2), "a")], TypeError, r"\(name, tensor\) pairs"),
        ([{"params": [torch.ones(2, 2)], "param_names": ["a", "b"]}], ValueError, "a list of 1 names"),
        ([{"params": {torch.ones(2, 2)}}], TypeError, "a set changes its order"),
        ([("w", torch.ones(2, 2)), torch.ones(2, 2)], ValueError, "all parameters of a group have names or none"),
    ],
)
def test_what_is_no_parameter_is_refused(params, error, text):
    with pytest.raises(error, match=text):
        MuonOptimizer(params)


def test_the_same_parameter_twice_is_refused():
    w = matrix()
    with pytest.raises(ValueError, match=r"'param\[1\]' is given twice \(first as 'param\[0\]'\)"):
        MuonOptimizer([w, w])
    with pytest.raises(ValueError, match=r"'b' is given twice \(first as 'a'\)"):
        MuonOptimizer([{"params": [("a", w)]}, {"params": [("b", w)]}])


def test_an_invalid_value_set_during_training_is_refused_at_the_next_step():
    w = matrix()
    optimizer = MuonOptimizer([w])
    w.grad = torch.randn_like(w)
    optimizer.param_groups[0]["scale"] = "v9"
    with pytest.raises(ValueError, match="Unknown scale 'v9'"):
        optimizer.step()


def test_groups_removed_by_hand_are_refused():
    optimizer = MuonOptimizer([matrix(), nn.Parameter(torch.ones(3))])
    del optimizer.param_groups[1]
    for use in (optimizer.step, optimizer.routing_report):
        with pytest.raises(RuntimeError, match="changed by hand"):
            use()


def test_a_vector_can_not_be_orthogonalized():
    with pytest.raises(ValueError, match=r"parameter 'norm.weight' of shape \(4,\) is not a matrix"):
        MuonOptimizer([("norm.weight", nn.Parameter(torch.ones(4)))], overrides={"norm.weight": "muon"})


def test_sparse_gradients_are_refused_for_matrices_and_made_dense_for_adamw():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer = MuonOptimizer(embedding.parameters())
    before = embedding.weight.detach().clone()
    with pytest.raises(
        RuntimeError,
        match=r"Sparse gradients are not supported by Muon optimizer.*'param\[0\]'.*create_hybrid_optimizer",
    ):
        optimizer.step()
    assert_same(embedding.weight, before)
    create_hybrid_optimizer(nn.Sequential(embedding, nn.Linear(4, 4))).step()
    dense = nn.Embedding(10, 4)
    dense.load_state_dict({"weight": before})
    dense(torch.tensor([1, 2])).sum().backward()
    create_hybrid_optimizer(nn.Sequential(dense, nn.Linear(4, 4))).step()
    torch.testing.assert_close(embedding.weight, dense.weight)


def test_hybrid_needs_a_model_and_two_learning_rates():
    with pytest.raises(TypeError, match="needs the model itself, got list"):
        create_hybrid_optimizer([matrix()])
    with pytest.raises(TypeError, match="muon_lr and adamw_lr"):
        create_hybrid_optimizer(nn.Linear(3, 3), lr=0.1)


def test_add_param_group_needs_a_dict():
    optimizer = MuonOptimizer([matrix()])
    with pytest.raises(TypeError, match="must be a dict, got list"):
        optimizer.add_param_group([matrix()])
