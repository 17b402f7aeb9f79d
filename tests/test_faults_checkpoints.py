"""Checkpoints and state."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, migrate
from muon_optimizer import TritonMuon
from tests.checkpoint_cases import (
    FLATTENED,
    OPTIMIZERS,
    Make,
    assert_same_state,
    backward,
    folder,
    net,
    others,
    state_of,
    train,
)
from tests.comparisons import assert_changed
from tests.fault_cases import error_of
from tests.pool import RankPool
from tests.promises import promise

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is (unavailable|disabled)")


# ------------------------------------------------------------------------------------- torch.distributed.checkpoint


def the_page_in_order() -> None:
    from tests.test_docs import ROOT, snippets

    page = "docs/guides/checkpoints.md"
    names: dict[str, Any] = {"__name__": page}
    for line, code in snippets(page, "distributed"):
        before = state_of(names["model"], names["optimizer"]) if "dcp.load" in code else None
        exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)
        if before is not None:
            assert_same_state(state_of(names["model"], names["optimizer"]), before)
            return
    raise AssertionError("the page has no snippet that resumes")


@promise(
    "A run is resumed as the guide to checkpoints shows, in a process that has gradients",
    "All state is as it was saved",
)
def test_the_snippet_of_the_guide_restores_state(ranks: RankPool):
    ranks.run(2, the_page_in_order)


def resumed(make: Make, flatten: bool, whole: bool) -> None:
    """Save, load into a new optimizer whose model has gradients, and check that its state is what was saved."""
    model, options = net(), FLATTENED[flatten]
    optimizer = make(model)
    train(model, optimizer)
    fresh_model = net(seed=1)
    fresh = make(fresh_model)
    backward(fresh_model)
    with folder() as path:
        if whole:
            names = ("model", "optimizer")
            saved = get_state_dict(model, optimizer, options=options)
            dcp.save(dict(zip(names, saved, strict=True)), checkpoint_id=path)
            state: Any = dict(zip(names, get_state_dict(fresh_model, fresh, options=options), strict=True))
            dcp.load(state, checkpoint_id=path)
            set_state_dict(
                fresh_model,
                fresh,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
        else:
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=path)
            state = {"optimizer": get_optimizer_state_dict(fresh_model, fresh, options=options)}
            dcp.load(state, checkpoint_id=path)
            set_optimizer_state_dict(fresh_model, fresh, state["optimizer"], options=options)
    assert_same_state(state_of(fresh_model, fresh), state_of(model, optimizer))


def all_resumed() -> None:
    for flatten in (False, True):
        for make in OPTIMIZERS:
            resumed(make, flatten, whole=False)
        resumed(MuonOptimizer, flatten, whole=True)


@promise(
    "A checkpoint is loaded while the model has gradients, and torch.distributed.checkpoint creates no state",
    "All state is loaded: `state_dict()` creates it",
)
def test_state_is_loaded_while_there_are_gradients(ranks: RankPool):
    all_resumed()
    resumed(lambda model: TritonMuon(model.parameters()), flatten=False, whole=False)
    resumed(lambda model: TritonMuon(model.parameters()), flatten=True, whole=False)
    ranks.run(2, all_resumed)


@pytest.mark.parametrize("make", [*OPTIMIZERS, lambda model: TritonMuon(model.parameters())])
def test_a_new_state_dict_has_state_only_if_there_are_gradients(make):
    """Accelerate loads the state dict of a new optimizer before it exchanges parameters: there must be no state yet."""
    model = net()
    optimizer = make(model)
    assert not optimizer.state_dict()["state"]
    assert not optimizer.state
    optimizer.load_state_dict(optimizer.state_dict())
    backward(model)
    state = optimizer.state_dict()["state"]
    assert len(state) == len(list(model.parameters()))
    assert [(i, key) for i, each in state.items() for key, value in each.items() if torch.as_tensor(value).any()] == []
    other = net()
    expected = make(other)
    backward(other)
    optimizer.step()
    expected.step()
    assert_same_state(state_of(model, optimizer), state_of(other, expected))


def test_state_of_a_model_on_the_meta_device_is_created_when_it_is_materialised():
    with torch.device("meta"):
        model = net()
    optimizer = MuonOptimizer(model)
    model(torch.arange(8, device="meta")).sum().backward()
    state = optimizer.state_dict()["state"]
    assert {value.device.type for each in state.values() for value in each.values()} == {"meta"}
    for parameter in model.parameters():
        parameter.grad = None
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(parameter.shape)))
    backward(model)
    optimizer.step()
    assert not any(value.is_meta for state in optimizer.state.values() for value in state.values())


@promise(
    "A flattened state dict is set, without `get_optimizer_state_dict` first, on a model that has gradients",
    "An error that says to call `optimizer.state_dict()` first; afterwards it loads",
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_state_that_would_not_be_loaded_is_an_error(make):
    model, fresh_model = net(), net()
    optimizer, fresh = make(model), make(fresh_model)
    train(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer, options=FLATTENED[True])
    backward(fresh_model)
    with pytest.raises(RuntimeError, match=r"the state of 7 parameters is empty.*optimizer\.state_dict\(\) first"):
        set_optimizer_state_dict(fresh_model, fresh, saved, options=FLATTENED[True])
    fresh.state_dict()
    set_optimizer_state_dict(fresh_model, fresh, saved, options=FLATTENED[True])
    assert_same_state(state_of(fresh_model, fresh), state_of(model, optimizer))


@promise(
    "A state dict lacks the state of trainable parameters",
    "It is loaded, and a warning names them",
)
def test_parameters_without_saved_state_are_named():
    model = net()
    optimizer = MuonOptimizer(model)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]
    fresh = MuonOptimizer(model)
    model[1].weight.requires_grad_(False)
    fresh.load_state_dict(saved)  # frozen: nothing is missing
    model[1].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="no state of 1 parameters, which start anew: '1.weight'$"):
        fresh.load_state_dict(saved)
    with pytest.warns(UserWarning, match="no state of 7 parameters, which start anew: '1.weight', .*, ..."):
        fresh.load_state_dict({**saved, "state": {}})


# ------------------------------------------------------------------------------------------------- other optimizers


def partly_loaded(make: Callable[[nn.Module], list[torch.optim.Optimizer]], flatten: bool) -> str:
    """Load another optimizer's checkpoint as far as names fit, and check that nothing of it is left.

    Returns:
        The error, or "" if there was none.
    """
    model, options = net(), FLATTENED[flatten]
    old = make(model)
    fresh = MuonOptimizer(model, overrides={"0.weight": "muon"})
    with folder() as path:
        dcp.save({"optimizer": get_optimizer_state_dict(model, old, options=options)}, checkpoint_id=path)
        state = {"optimizer": get_optimizer_state_dict(model, fresh, options=options)}
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=path, planner=planner)
    try:
        set_optimizer_state_dict(model, fresh, state["optimizer"], options=options)
    except RuntimeError as error:
        kept = [name for name, value in state_of(model, fresh).items() if value.any()]
        assert not kept, f"state of the other optimizer is left: {kept}"
        assert fresh.param_groups[0]["nesterov"] is False, fresh.param_groups[0]
        return str(error)
    return ""


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return [optimizer]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    return [optimizer]


def all_partly_loaded() -> list[str]:
    return [partly_loaded(make, flatten) for make in (others, adamw, sgd) for flatten in (False, True)]


@promise(
    "A checkpoint of `torch.optim.Muon`, AdamW or SGD is loaded with `allow_partial_load=True`",
    "An error, and nothing of it is kept: momentum would be on another scale, or step counts would have no moments",
)
def test_a_part_of_another_optimizers_checkpoint_is_refused(ranks: RankPool):
    for texts in [all_partly_loaded(), *ranks.run(2, all_partly_loaded)]:
        for text in texts:
            assert "another optimizer" in text
            assert "docs/migration.md" in text


@promise(
    "Nothing in a checkpoint has the names of the model, and `allow_partial_load=True` lets that pass",
    "A warning says that no state was found",
)
def test_a_load_that_found_nothing_is_told():
    model = net()
    old, fresh = MuonOptimizer(model), MuonOptimizer(model)
    train(model, old)
    with folder() as path:
        dcp.save({"another": get_optimizer_state_dict(model, old)}, checkpoint_id=path)
        state = {"optimizer": get_optimizer_state_dict(model, fresh)}
        dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    with pytest.warns(UserWarning, match="as before the first step.*none of its state was loaded"):
        set_optimizer_state_dict(model, fresh, state["optimizer"])


@promise(
    "`load_state_dict` is given the state dict of a torch optimizer",
    "One line names that optimizer and the page on migration",
)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.AdamW, "torch.optim.AdamW"),
        (torch.optim.Adam, "torch.optim.Adam"),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "torch.optim.SGD"),
        (lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]), "torch.optim.Muon"),
        (torch.optim.RMSprop, "another optimizer"),
        (TritonMuon, "another optimizer"),
    ],
)
@pytest.mark.parametrize("ours", OPTIMIZERS)
def test_the_state_dict_of_another_optimizer_is_called_so(make, name, ours):
    model = net()
    optimizer, old = ours(model), make(model.parameters())
    train(model, old)
    with pytest.raises(RuntimeError) as raised:
        optimizer.load_state_dict(old.state_dict())
    lines = str(raised.value).splitlines()
    assert len(lines) == 2
    assert f"saved by {name}, not by {ours.__name__}." in lines[1]
    assert "docs/migration.md" in lines[1]
    assert not optimizer.state


# ------------------------------------------------------------------------------------------- ZeroRedundancyOptimizer


def wrapped() -> list[str]:
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

        for make in OPTIMIZERS:
            with pytest.raises(Exception) as raised:  # noqa: PT011 (the text is looked at)
                ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, lr=0.02)
            texts.append(str(raised.value))
        matrices = [model[0].weight, model[2].weight]  # one rule: its groups stay as they are
        optimizer = ZeroRedundancyOptimizer(matrices, optimizer_class=MuonOptimizer, lr=0.02)
        before = [p.detach().clone() for p in matrices]
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    assert_changed(matrices, before)
    return texts


@promise(
    "`ZeroRedundancyOptimizer` is built around one of ours",
    "An error that names FSDP2, or DDP with `FSDPMuonOptimizer`, as the replacement",
)
def test_zero_redundancy_optimizer_is_refused(ranks: RankPool):
    for texts in ranks.run(2, wrapped):
        assert len(texts) == len(OPTIMIZERS)
        for text, make in zip(texts, OPTIMIZERS, strict=True):
            assert f"ZeroRedundancyOptimizer can't wrap {make.__name__}" in text
            assert "fully_shard" in text
            assert "FSDPMuonOptimizer(ddp_model)" in text


# ------------------------------------------------------------------------------------------------ files of other ranks


def layer(layout: str) -> tuple[nn.Module, FSDPMuonOptimizer]:
    """Build a model whose first dimension, 10, is not a multiple of the number of ranks, and take a step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 10)
    if layout == "DDP with shard_state":
        model = DistributedDataParallel(model)
    else:
        axes = {"replicas": 2, "shards": 2} if layout == "HSDP" else {"shards": 4}
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        fully_shard(model, mesh=mesh)
    optimizer = FSDPMuonOptimizer(model, shard_state=layout == "DDP with shard_state")
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def from_rank(rank: int, state_dict: dict[str, Any], *, weights_only: bool = False) -> dict[str, Any]:
    """Return what torch.load reads from the file that one rank has saved."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    content = [file.getvalue()]
    dist.broadcast_object_list(content, src=rank)
    loaded: dict[str, Any] = torch.load(io.BytesIO(content[0]), weights_only=weights_only)
    return loaded


def loaded_from(layout: str, rank: int, with_boxes: bool) -> str:
    """Load the file of one rank on all, and return this rank's error; check that it has its state then as before."""
    model, optimizer = layer(layout)
    saved = from_rank(rank, optimizer.state_dict())
    before = state_of(model, optimizer)
    if not with_boxes:
        del saved["boxes"]
    text = error_of(lambda: optimizer.load_state_dict(saved))
    if with_boxes:
        assert error_of(lambda: migrate.load_state_dict(optimizer, saved)) == text
        assert_same_state(state_of(model, optimizer), before)
    return text


@promise(
    "The plain state dict that rank 0 has saved is loaded on all ranks (FSDP2, HSDP, DDP with `shard_state=True`)",
    "An error on every rank that holds another part of the parameters names `torch.distributed.checkpoint`. Replicas "
    "may load each other's files",
)
@pytest.mark.parametrize(
    ("layout", "raising"), [("FSDP2", [1, 2, 3]), ("HSDP", [1, 3]), ("DDP with shard_state", [1, 2, 3])]
)
def test_the_file_of_another_rank_is_refused(ranks: RankPool, layout, raising):
    texts = ranks.run(4, loaded_from, layout, 0, True)
    assert [rank for rank, text in enumerate(texts) if text] == raising
    shape, offset = ("5x8", "(5, 0)") if layout == "HSDP" else ("3x8", "(3, 0)")
    assert (
        "the state of 2 parameters is the shard of another rank ('weight', 'bias'): of 'weight' it is "
        f"{shape} at (0, 0) instead of {shape} at {offset}. Load it on the rank that saved it, or use "
        "torch.distributed.checkpoint"
    ) in texts[1]


def test_without_boxes_only_a_shard_of_another_shape_is_refused(ranks: RankPool):
    texts = ranks.run(4, loaded_from, "FSDP2", 0, False)
    assert texts[:3] == ["", "", ""]
    assert "of 'weight' it is 3x8 at (9, 0) instead of 1x8 at (9, 0)" in texts[3]


def everything_else_loads() -> None:
    """Check that a rank's own file, files of torch.distributed.checkpoint and copies load, and what these contain."""
    model, optimizer = layer("FSDP2")
    expected, saved = state_of(model, optimizer), optimizer.state_dict()
    first = 3 * dist.get_rank()
    height = min(3, 10 - first)
    assert saved["boxes"] == (((first, 0), (height, 8)), ((first,), (height,)))
    own = [from_rank(rank, saved, weights_only=True) for rank in range(4)][dist.get_rank()]
    whole = copy.deepcopy(saved)
    for state in whole["state"].values():
        state.update({name: value.full_tensor() for name, value in state.items() if hasattr(value, "full_tensor")})
    whole["boxes"] = (((0, 0), (3, 8)), ((0,), (3,)))  # as if rank 0 had gathered the state and saved its own boxes
    for state_dict in (saved, own, copy.deepcopy(saved), whole):
        resumed = FSDPMuonOptimizer(model)
        resumed.load_state_dict(state_dict)
        assert_same_state(state_of(model, resumed), expected)
    assert get_optimizer_state_dict(model, optimizer).keys() == {"state", "param_groups"}
    with folder() as path:  # without get_optimizer_state_dict, boxes are those of one rank
        dcp.save({"optimizer": saved}, checkpoint_id=path)
        resumed = FSDPMuonOptimizer(model)
        state = {"optimizer": resumed.state_dict()}
        dcp.load(state, checkpoint_id=path)
        resumed.load_state_dict(state["optimizer"])
        assert_same_state(state_of(model, resumed), expected)


def test_own_files_and_other_ways_to_load_shards(ranks: RankPool):
    ranks.run(4, everything_else_loads)
