"""Models, wrappers and optimizers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.linalg.power_iteration import power_iteration
from muon_fsdp.spectral import compute_spectral_norm
from tests.comparisons import assert_changed, assert_same
from tests.fault_cases import error_of, net
from tests.pool import RankPool
from tests.promises import promise

OPTIMIZERS = [MuonOptimizer, FSDPMuonOptimizer]


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 8)).square().mean().backward()


# ------------------------------------------------------------------------------------------------------- wrappers


def built_too_early() -> list[str]:
    """Build optimizers before `fully_shard` and after it, and check that the latter update the shards.

    Returns:
        The errors of the former.
    """
    texts = []
    for make in OPTIMIZERS:
        model = net()
        early = make(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        backward(model)
        texts.append(error_of(early.step))
        late = make(model)
        backward(model)
        late.step()
        shards = {name: p for g in late.param_groups for name, p in zip(g["param_names"], g["params"], strict=True)}
        before = {name: p.to_local().clone() for name, p in shards.items()}
        late.zero_grad()
        model.set_reshard_after_backward(False)  # the parameters of the model are whole at the step
        backward(model)
        late.step()
        assert_changed(shards, before, make.__name__)
    return texts


@promise(
    "The optimizer is built from a model before `fully_shard`",
    "The first step raises, and says to call `fully_shard` first",
)
def test_an_optimizer_built_before_fully_shard_says_so(ranks: RankPool):
    for texts in ranks.run(2, built_too_early):
        for text in texts:
            assert "built before fully_shard: 4 of its 4 parameters" in text
            assert "Call fully_shard first, then build the optimizer" in text


REPLACED = ("assign", "module", "parallelize", "late metrics")


def replaced(kind: str) -> str:
    """Replace parameters of a model after its optimizer was built; return the error of a step."""
    model = net()
    optimizer = MuonOptimizer(model)
    if kind == "assign":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    elif kind == "module":
        model[0] = nn.Linear(8, 12)
    elif kind == "parallelize":
        parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    else:  # a plan that metrics() made is no reason not to look
        optimizer.metrics()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    backward(model)
    return error_of(optimizer.step)


@promise(
    "Parameters of a model are replaced after the optimizer was built: by `parallelize_module`, "
    "`load_state_dict(assign=True)` or a new module",
    "The next step raises, and names them",
)
@pytest.mark.parametrize("kind", REPLACED)
def test_parameters_that_were_replaced_are_told(ranks: RankPool, kind):
    (text,) = ranks.run(1, replaced, kind)
    assert text.startswith("The optimizer was built before ")
    assert "parameters are no longer the model's ('0.weight'" in text


def test_parameters_that_a_model_never_had_are_updated_too():
    model, extra = net(), nn.Parameter(torch.ones(4, 4))
    optimizer = FSDPMuonOptimizer(model, [*model.parameters(), extra])
    backward(model)
    extra.grad = torch.ones(4, 4)
    optimizer.step()
    assert_changed(extra, torch.ones(4, 4), "extra")
    before = extra.detach().clone()
    del model[2]  # a layer that is removed on purpose stops nothing
    optimizer.step()
    assert_changed(extra, before, "extra")


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_model_can_be_scripted_beside_its_optimizer():
    model = net()
    optimizer = FSDPMuonOptimizer(model)
    assert torch.jit.script(model)(torch.ones(1, 8)).shape == (1, 8)
    assert optimizer.param_groups


def with_fsdp1() -> str:
    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    return error_of(lambda: MuonOptimizer(model.parameters()))


def blocks() -> nn.Module:
    """Make a model of which FSDP2 leaves two modules unsharded after a forward: the root, and the first layer."""
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def trained_after_forward(make: Callable[[nn.Module], MuonOptimizer], *, first: bool, gradients: bool) -> list[Tensor]:
    """Take two steps; before the first, build the optimizer before or after a forward, with or without its backward."""
    model = blocks()
    optimizer = make(model) if first else None
    with torch.set_grad_enabled(gradients):
        loss = model(torch.ones(4, 8)).square().mean()
    optimizer = make(model) if optimizer is None else optimizer
    if gradients:
        loss.backward()
    else:
        backward(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    return [parameter.full_tensor() for parameter in model.parameters()]


def built_after_forward() -> list[str]:
    """Check that optimizers of a model take its shards after a forward, and return the errors of those of lists."""
    for make in (FSDPMuonOptimizer, MuonOptimizer):
        for gradients in (False, True):
            found, expected = (trained_after_forward(make, first=first, gradients=gradients) for first in (False, True))
            assert_same(found, expected)
    uses: list[Callable[[nn.Module, FSDPMuonOptimizer], object]] = [
        lambda model, optimizer: MuonOptimizer(list(model.named_parameters())),
        lambda model, optimizer: FSDPMuonOptimizer(model, params=list(model.parameters())),
        lambda model, optimizer: optimizer.add_param_group({"params": [model[2].weight]}),
    ]
    texts = []
    for use in uses:
        model = blocks()
        optimizer = FSDPMuonOptimizer(model, params=[model[0].weight])
        with torch.no_grad():
            model(torch.ones(4, 8))
        texts.append(error_of(partial(use, model, optimizer)))
    return texts


@promise(
    "The optimizer is built after a forward without backward, such as a validation before training",
    "From a model, it takes the shards. Listed parameters are an error that says to call `reshard()`",
)
def test_an_optimizer_built_after_a_forward_takes_shards(ranks: RankPool):
    for texts in ranks.run(2, built_after_forward):
        for text, count in zip(texts, ("4 of 4", "4 of 4", "1 of 1"), strict=True):
            assert text.startswith(f"{count} parameters are whole copies that FSDP2 made for a forward pass")
            assert "call reshard() on every FSDPModule" in text


@promise(
    "Parameters come from FSDP1, with `use_orig_params=True` too",
    "An error that names `fully_shard` as the replacement",
)
@pytest.mark.filterwarnings("ignore")
def test_fsdp1_with_original_parameters_is_refused(ranks: RankPool):
    for text in ranks.run(2, with_fsdp1):
        assert "FSDP1 is not supported" in text
        assert "Use fully_shard (FSDP2)" in text


# ------------------------------------------------------------------------------------------------------- autocast


@promise(
    "`step()` is called inside `torch.autocast`",
    "The same step as outside of it, under every rule",
)
@pytest.mark.parametrize("rule", ["muon", "normuon", "spectral_sphere"])
def test_a_step_inside_autocast_is_the_same(rule):
    found = []
    for enabled in (False, True):
        model = net()
        optimizer = MuonOptimizer(model, rule=rule)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                optimizer.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert_same(found[1], found[0])


def test_a_rule_of_a_user_is_outside_autocast_too():
    import tests.toy_rules  # noqa: F401 (registers them)

    found = []
    for enabled in (False, True):
        model = net()
        optimizer = MuonOptimizer(model, rule="toy_magnitudes")
        backward(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            optimizer.step()
        found.append(model[0].weight.detach().clone())
    assert_same(found[1], found[0])


@promise(
    "A spectral norm is asked for inside `torch.autocast`",
    "The same number as outside of it",
)
def test_spectral_norms_inside_autocast_are_the_same():
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    expected, triple = compute_spectral_norm(weight), power_iteration(weight, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(compute_spectral_norm(weight), expected)
        assert_same(power_iteration(weight, 20).norm, triple.norm)


# ------------------------------------------------------------------------------------------------- state and hooks


@promise(
    "A checkpoint of mid-accumulation is resumed with fewer accumulation steps",
    "Accumulation begins anew, and `zero_grad()` clears",
)
def test_gradients_are_cleared_after_resuming_with_less_accumulation():
    model = net()
    optimizer = FSDPMuonOptimizer(model, gradient_accumulation_steps=4)
    for _ in range(3):  # in the middle
        backward(model)
        optimizer.step()
    saved = optimizer.state_dict()
    for steps in (1, 2):
        resumed = FSDPMuonOptimizer(model, gradient_accumulation_steps=steps)
        resumed.load_state_dict(saved)
        resumed.zero_grad()
        assert [name for name, p in model.named_parameters() if p.grad is not None] == []
        backward(model)
    again = FSDPMuonOptimizer(model, gradient_accumulation_steps=4)
    again.load_state_dict(saved)
    again.zero_grad()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@promise(
    "Many optimizers are built from one model",
    "None leaves a hook on it",
)
def test_optimizers_leave_no_hooks_behind():
    model = net()
    for _ in range(5):
        optimizer = FSDPMuonOptimizer(model)
        backward(model)
        optimizer.step()
    del optimizer
    gc.collect()
    assert not model._forward_hooks
    SpectralSphereOptimizer(model)
    assert not model._forward_hooks


@promise(
    "All parameters of a model are frozen",
    "An error that says so",
)
def test_a_model_without_trainable_parameters_says_so():
    with pytest.raises(ValueError, match="empty parameter list: all 4 parameters of the model are frozen"):
        MuonOptimizer(net().requires_grad_(False))


@promise(
    "Parameters are unfrozen or added after the optimizer was built",
    "One warning at the next plan names them",
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_what_is_unfrozen_after_the_optimizer_was_built_is_told(make):
    model = net()
    model[2].requires_grad_(False)
    optimizer = make(model)
    model[2].requires_grad_(True)
    backward(model)
    with pytest.warns(UserWarning, match="2 trainable parameters of the model are not in the optimizer.*'2.weight'"):
        optimizer.step()
    optimizer.param_groups[0]["ns_steps"] = 4  # plans anew, and does not say it again
    optimizer.step()
    frozen = net()
    frozen[2].requires_grad_(False)
    optimizer = make(frozen)
    backward(frozen)
    optimizer.step()
    chosen = FSDPMuonOptimizer(model, [model[0].weight])  # by the user's own choice
    chosen.step()


@promise("`optimizer.step` is compiled by torch.compile", "It is left as it is: the same step, and nothing is traced")
@pytest.mark.parametrize("rule", ["muon", "spectral_sphere"])
def test_a_step_is_not_compiled(rule):
    traced = 0

    def count(module: object, inputs: object) -> object:
        nonlocal traced
        traced += 1
        return module

    found = []
    for compiled in (False, True):
        model = net()
        optimizer = MuonOptimizer(model, rule=rule)
        step = torch.compile(optimizer.step, backend=count) if compiled else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            step()
        found.append(model[0].weight.detach().clone())
    assert_same(found[1], found[0])
    assert traced == 0
