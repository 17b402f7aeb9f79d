"""Programs that use the optimizer: what they keep in it, and what they change."""

from __future__ import annotations

import copy
import gc
import io
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.elementwise import TritonMuon
from tests.comparisons import assert_near, assert_same
from tests.fault_cases import LIMIT, error_of
from tests.optimizer_cases import mlp
from tests.pool import RankPool
from tests.promises import promise


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def user_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    """Return the texts of warnings, without those about torch's own deprecated functions."""
    return [str(each.message) for each in caught if each.category is UserWarning]


# ------------------------------------------------------------------------------------------------------ keys of groups

OF_OTHERS = {
    "lr_scale": 0.5,  # timm
    "rho": 0.05,  # SAM
    "layer_id": 3,
    "weight_decay_scale": 2.0,
    "stage": [1, 2],  # two letters from "scale"
    "step": torch.tensor([1.0, 2.0]),
    7: "seven",
}


@promise(
    "Other programs keep keys of their own in groups (timm's `lr_scale`, SAM's `rho`)",
    "They are kept as they are: when a group is divided or added, and in checkpoints. `routing_report()` lists them",
)
@pytest.mark.parametrize("make", [torch.optim.AdamW, MuonOptimizer, TritonMuon])
def test_keys_of_others_are_kept(make):
    model, late = linear(), linear()
    optimizer = make([{"params": list(model.parameters()), **OF_OTHERS}])
    optimizer.add_param_group({"params": list(late.parameters()), "depth": 1})
    is_ours = make is MuonOptimizer  # which divides groups
    first, second = optimizer.param_groups[: 1 + is_ours], optimizer.param_groups[1 + is_ours :]
    assert [len(first), len(second)] == ([2, 2] if is_ours else [1, 1])
    for group in first:
        assert all(group[key] is value for key, value in OF_OTHERS.items())
    assert [group["depth"] for group in second] == [1] * len(second)
    for group in first:
        group["lr_scale"] = 0.25
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = make([{"params": list(model.parameters())}, {"params": list(late.parameters())}])
    resumed.load_state_dict(torch.load(file))
    for group in resumed.param_groups[: len(first)]:
        assert_same(group["step"], OF_OTHERS["step"])
        assert {key: group[key] for key in OF_OTHERS if key != "step"} == {
            key: value for key, value in {**OF_OTHERS, "lr_scale": 0.25}.items() if key != "step"
        }


def test_the_report_lists_keys_of_others():
    optimizer = MuonOptimizer([{"params": list(linear().parameters()), "lr_scale": 0.5, "rho": 0.05, "name": "body"}])
    report = optimizer.routing_report()
    for group in report.groups:
        assert dict(group.not_ours) == {"lr_scale": 0.5, "rho": 0.05}
    assert str(report).replace("\n    ", " ").count("; not ours: lr_scale=0.5, rho=0.05") == 2
    assert "not ours" not in str(MuonOptimizer(linear()).routing_report())


@promise(
    "A key of a group is one or two letters away from an option of ours, or the name of one in another library",
    "An error suggests the option, as in the constructor and in overrides",
)
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("momentm", "momentum"),
        ("weigth_decay", "weight_decay"),
        ("nestrov", "nesterov"),
        ("sclae", "scale"),
        ("LR", "lr"),
        ("lrs", "lr"),
        ("adam_lr", "adamw_lr"),
        ("rules", "rule"),
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("beta1", "momentum"),
        ("adjust_lr_fn", "scale"),
        ("use_muon", "rule"),  # of Keller Jordan's optimizer, which decides with it about Muon or Adam
    ],
)
def test_a_key_that_resembles_an_option_is_an_error(key, meant):
    text = f"Unknown option '{key}' in a parameter group; did you mean '{meant}'"
    with pytest.raises(ValueError, match=text):
        MuonOptimizer([{"params": list(linear().parameters()), key: 0.5}])
    optimizer = MuonOptimizer(linear())
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": list(linear().parameters()), key: 0.5})


@pytest.mark.parametrize("key", ["lr_scale", "rho", "layer_id"])
def test_constructors_and_overrides_take_no_keys_of_others(key):
    with pytest.raises(TypeError, match=f"Unknown option '{key}' in MuonOptimizer"):
        MuonOptimizer(linear(), **{key: 0.5})
    with pytest.raises(TypeError, match=rf"Unknown option '{key}' in overrides\['weight'\]"):
        MuonOptimizer(linear(), overrides={"weight": {key: 0.5}})


@pytest.mark.parametrize("key", ["strategy", "gradient_accumulation_steps"])
def test_a_setting_in_a_group_is_an_error(key):
    with pytest.raises(ValueError, match=f"'{key}' is a setting of the whole optimizer"):
        MuonOptimizer([{"params": list(linear().parameters()), key: 1}])


@promise(
    "A key that resembles an option, or an option of a rule that is not in use, is written into a group between two "
    "steps",
    "A warning, once, says that it has no effect",
)
def test_a_key_without_effect_that_is_written_later_is_told():
    model = linear()
    optimizer = MuonOptimizer(model)

    def step() -> list[str]:
        model(torch.ones(2, 6)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        return user_warnings(caught)

    for group in optimizer.param_groups:
        group["momentum"] = 0.9  # as in a warm-up of momentum
    assert step() == []
    optimizer.param_groups[0].update(momentm=0.5, lr_scale=0.5)
    assert step() == ["param_groups[0]: 'momentm' has no effect; did you mean 'momentum'?"]
    optimizer.param_groups[0]["beta2"] = 0.9
    assert step() == ["param_groups[0]: 'beta2' has no effect: rule 'muon' does not have it"]
    assert step() == []
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["rho"] = 0.5
    assert step() == []
    optimizer.param_groups[0]["rule"] = "normuon"  # has options of its own
    assert step() == []


@promise(
    "A named group holds matrices and vectors, and a logger tells groups apart by `name`",
    'The group of the matrices keeps the name; the others add their rule ("body.adamw")',
)
def test_parts_of_a_named_group_have_names_of_their_own():
    def group(name: str) -> dict[str, Any]:
        return {"params": list(mlp().named_parameters()), "name": name}

    optimizer = MuonOptimizer([group("body")], overrides={"0.bias": {"weight_decay": 0.5}})
    assert [each["name"] for each in optimizer.param_groups] == ["body", "body.adamw", "body.adamw.2"]
    optimizer.add_param_group(group("other"))
    optimizer.add_param_group(group("body"))  # a name that the user gives twice stays
    assert [each["name"] for each in optimizer.param_groups][3::3] == ["other", "body"]
    assert [each["name"] for each in optimizer.param_groups][7:] == ["body.adamw.3", "body.adamw.4"]
    copied = MuonOptimizer(optimizer.param_groups)
    assert [each["name"] for each in copied.param_groups] == [each["name"] for each in optimizer.param_groups]


# ------------------------------------------------------------------------------------------------------ state of others


@promise(
    "A wrapper keeps state of its own beside ours (schedule-free's `z`, Lookahead's slow weights)",
    "`load_state_dict` restores it, in its precision, and shares no memory with the state dict",
)
def test_state_of_others_is_loaded():
    model = linear().to(torch.bfloat16)
    optimizer = MuonOptimizer(model)
    slow = torch.full((4, 6), 7.0)

    def keep(parameter: Tensor) -> None:
        optimizer.state[parameter].update(slow=slow, phase="warm", parts=[torch.ones(2), {"k": 3}])

    keep(model.weight)  # before the first step: it is not ours, and need not be zero
    with pytest.warns(UserWarning, match="The state that was loaded is zero"):
        MuonOptimizer(model).load_state_dict(optimizer.state_dict())
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    keep(model.weight)
    optimizer.state["of the wrapper"] = {"steps": 3, "mean": torch.ones(2)}
    saved = copy.deepcopy(optimizer.state_dict())
    other = MuonOptimizer(model)
    other.load_state_dict(saved)
    saved["state"][0]["slow"].zero_()
    saved["state"]["of the wrapper"]["mean"].zero_()
    assert set(other.state[model.weight]) == {"momentum_buffer", "slow", "phase", "parts"}
    assert_same(other.state[model.weight]["slow"], slow)
    assert other.state[model.weight]["phase"] == "warm"
    assert_same(other.state[model.weight]["parts"][0], torch.ones(2))
    assert other.state[model.weight]["parts"][1] == {"k": 3}
    assert_same(other.state["of the wrapper"]["mean"], torch.ones(2))
    other.step()
    again = MuonOptimizer(model)
    again.load_state_dict(other.state_dict())
    assert_same(again.state[model.weight]["slow"], slow)


# ------------------------------------------------------------------------------------------- groups that are assigned


@promise(
    "A program assigns `optimizer.param_groups`, or rearranges it (Lightning's `BaseFinetuning` does when it resumes)",
    "Each parameter keeps its rule and its name; new ones in groups that an optimizer of ours has made are routed. "
    "Groups that were written by hand, and missing parameters, are an error",
)
@pytest.mark.parametrize("named", [False, True])
def test_groups_that_are_assigned_are_followed(named):
    def build(count: int) -> tuple[list[nn.Linear], MuonOptimizer]:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(2)]
        given = [list(layer.named_parameters() if named else layer.parameters()) for layer in layers[:count]]
        return layers, MuonOptimizer([{"params": params, "lr": 0.1 + i} for i, params in enumerate(given)])

    def step(layers: list[nn.Linear], optimizer: MuonOptimizer) -> None:
        for number, layer in enumerate(layers):
            layer(torch.linspace(0, 1, 12).reshape(3, 4) + number).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    layers, first = build(2)
    step(layers, first)
    saved = copy.deepcopy(first.state_dict())
    others, resumed = build(1)  # the second layer is still frozen
    for other, layer in zip(others, layers, strict=True):
        other.load_state_dict(layer.state_dict())
    parameters = [others[0].weight, others[0].bias, others[1].weight, others[1].bias]
    resumed.param_groups = [
        {**group, "params": [parameter]} for group, parameter in zip(first.param_groups, parameters, strict=True)
    ]
    resumed.load_state_dict(saved)
    step(layers, first)
    step(others, resumed)
    assert_same(*([p for layer in model for p in layer.parameters()] for model in (others, layers)))
    names = [row.name for row in first.routing_report().rows]
    assert [row.name for row in resumed.routing_report().rows] == names

    resumed.param_groups.reverse()  # groups of equal sizes
    rows = resumed.routing_report().rows
    assert [row.rule for row in rows] == ["adamw", "muon", "adamw", "muon"]
    assert [row.reason for row in rows] == ["vector", "group with rule 'muon'", "vector", "matrix"]
    step(layers, first)
    step(others, resumed)
    assert_same(*([p for layer in model for p in layer.parameters()] for model in (others, layers)))

    resumed.param_groups.append({"params": [nn.Parameter(torch.ones(2, 2))], "lr": 0.1})
    for use in (resumed.step, resumed.routing_report, resumed.state_dict):
        with pytest.raises(RuntimeError, match="param_groups were changed by hand: use add_param_group"):
            use()


def test_an_unknown_rule_that_was_written_into_a_group_is_named():
    optimizer = MuonOptimizer(linear())
    optimizer.param_groups[0]["rule"] = "moun"
    with pytest.raises(ValueError, match="Unknown rule 'moun'"):
        optimizer.step()


# ------------------------------------------------------------------------------------------------- classes of tensors


class Quantized(Tensor):
    """A weight in 8 bits, like torchao's for training: it has the operations of torch's loops, and no `_foreach_`."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_in_8_bits, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(args[0].data_in_8_bits), func(args[0].scale))
        if func is aten.zeros_like.default:
            return torch.zeros(args[0].shape, dtype=(kwargs or {}).get("dtype") or args[0].dtype)
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Named(nn.Parameter):
    """A parameter of a class of its own, which is updated like any other."""


@promise(
    "A parameter is of a tensor class that can't be updated (torchao's `Int8QuantizedTrainingLinearWeight`)",
    "An error when the optimizer is built, which names the parameter and its class",
)
def test_tensor_classes_that_can_not_be_updated_are_refused():
    model = linear()
    model.weight = nn.Parameter(Quantized(torch.ones(4, 6, dtype=torch.int8), torch.ones(4)))
    for make in (lambda: MuonOptimizer(model), lambda: FSDPMuonOptimizer(model)):
        with pytest.raises(TypeError, match=r"parameter 'weight' is a Quantized, .*NotImplementedError: .*_foreach_"):
            make()
    model = linear()
    model.weight = Named(model.weight.detach().clone())
    before = model.weight.detach().clone()
    optimizer = MuonOptimizer(model)
    assert_same(model.weight, before)  # it was tried on a copy
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


# ----------------------------------------------------------------------------------------------- ranks that are threads


def on_threads(num_ranks: int, function: Callable[[], Any]) -> list[Any]:
    """Run a function on ranks that are threads of this process, as torch's own tests of FSDP2 do."""
    store, results = dist.HashStore(), {}

    def work(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
        try:
            results[rank] = function()
        except BaseException as error:
            results[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes the others
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(num_ranks)]


def trained_on_shards(start: dict[str, Tensor], sharded: bool) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    model.load_state_dict(start)
    if sharded:
        for module in (*model, model):
            fully_shard(module)
    optimizer = FSDPMuonOptimizer(model, orthogonalization="exact")
    for _ in range(2):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() if sharded else p.detach() for p in model.parameters()]


@promise("Ranks are threads of one process (torch's threaded process group, for tests)", "Steps work as on processes")
def test_ranks_may_be_threads():
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)).state_dict()
    expected = trained_on_shards(start, sharded=False)
    for weights in on_threads(2, lambda: trained_on_shards(start, sharded=True)):
        assert_near(weights, expected, atol=1e-5)


# --------------------------------------------------------------------------------------------- gradients that disappear


@promise(
    "`gradient_accumulation_steps` of the optimizer, and something clears gradients between two calls of `step()` "
    "(Trainer's `model.zero_grad()`)",
    "A warning, once, names the cause. `trainer_optimizer` refuses the option",
)
def test_gradients_that_disappear_while_they_accumulate():
    def run(clear: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
        model = linear()
        optimizer = FSDPMuonOptimizer(model, gradient_accumulation_steps=3)
        for _ in range(6):
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            clear(model, optimizer)

    with pytest.warns(UserWarning, match="the gradients that the last call of step.. found are gone") as caught:
        run(lambda model, _: model.zero_grad())
    assert len(caught) == 1
    run(lambda _, optimizer: optimizer.zero_grad())
    run(lambda model, _: None)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_are_added_out_of_place_have_not_disappeared():
    model = linear()
    optimizer = FSDPMuonOptimizer(model, gradient_accumulation_steps=2)
    for _ in range(2):
        model(torch.ones(2, 6)).square().sum().backward(create_graph=True)
        optimizer.step()
    model.zero_grad()


def accumulated_on_ranks(kind: str, clears: bool) -> list[str]:
    """Accumulate gradients over calls of `step()`; return what warnings say."""
    model: nn.Module = linear()
    if kind == "fsdp":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=kind == "views")
    optimizer = FSDPMuonOptimizer(model, gradient_accumulation_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            (model if clears else optimizer).zero_grad()
    return user_warnings(caught)


@pytest.mark.parametrize("kind", ["fsdp", "ddp", "views"])
def test_gradients_that_disappear_on_ranks(ranks: RankPool, kind):
    assert ranks.run(2, accumulated_on_ranks, kind, False) == [[], []]
    if kind != "views":  # there DDP itself replaces the gradients
        for texts in ranks.run(2, accumulated_on_ranks, kind, True):
            assert [text.partition(" of step")[0] for text in texts] == [
                "gradient_accumulation_steps=3: the gradients that the last call"
            ]


# ------------------------------------------------------------------------------------ process groups that are destroyed


def destroyed_agreement_group() -> list[str]:
    """Destroy the group after the optimizer was built, and before; return both errors."""
    texts = []
    for is_built in (True, False):
        group, model = dist.new_group([0, 1]), linear()
        optimizer = MuonOptimizer(model, agreement_group=group) if is_built else None
        dist.destroy_process_group(group)
        model(torch.ones(1, 6)).sum().backward()
        texts.append(
            error_of(optimizer.step if optimizer else lambda g=group: MuonOptimizer(linear(), agreement_group=g))
        )
        texts.append(error_of(lambda g=group: MuonOptimizer(linear(), replicate_group=g)))
    return texts


@promise("`agreement_group` or `replicate_group` was destroyed", "An error names the option")
def test_a_destroyed_group_is_named(ranks: RankPool):
    for texts in ranks.run(2, destroyed_agreement_group, timeout=LIMIT):
        assert [text.partition(": make a new")[0] for text in texts] == [
            "agreement_group was destroyed",
            "replicate_group was destroyed",
        ] * 2


def step_of_shards_after_new_groups(folder: str) -> str:
    """Initialize torch.distributed anew between two steps of a model that FSDP2 has sharded."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = fully_shard(linear())
    optimizer = FSDPMuonOptimizer(model)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    return error_of(optimizer.step)


@promise(
    "torch.distributed is initialized anew, and an optimizer of FSDP2 shards takes a step",
    "An error says to shard the model anew",
)
def test_shards_whose_mesh_was_destroyed_are_told(ranks: RankPool, tmp_path):
    for text in ranks.run(2, step_of_shards_after_new_groups, str(tmp_path), timeout=LIMIT):
        assert "The process group of the parameters' mesh was destroyed" in text
        assert "call fully_shard again" in text
        assert "DistributedDataParallel" not in text


def joined(overlap: str) -> str:
    """Train ranks on different numbers of batches inside DDP's `join()`."""
    model = DistributedDataParallel(linear())
    optimizer = FSDPMuonOptimizer(model, overlap=overlap)
    for _ in range(2):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train_unevenly() -> None:
        with model.join():
            for _ in range(1 + dist.get_rank()):
                model(torch.ones(2, 6)).square().sum().backward()

    return error_of(train_unevenly)


@promise(
    'DDP\'s `join()` is entered with `overlap="backward"`, which has registered a hook with DDP',
    "All ranks raise at the first backward, and say why",
)
def test_joining_with_overlap_in_backward_is_refused(ranks: RankPool):
    for text in ranks.run(2, joined, "backward", timeout=LIMIT):
        assert "DistributedDataParallel.join() can't be combined with overlap='backward'" in text
    assert ranks.run(2, joined, "step", timeout=LIMIT) == ["", ""]


# ------------------------------------------------------------------------------------------------- steps without effect


@promise(
    "No parameter has a gradient, in two successive steps (`zero_grad()` before `step()`)",
    "A warning, once, names likely causes",
)
def test_steps_without_any_gradient_are_told():
    model = linear()
    optimizer = MuonOptimizer(model)
    optimizer.step()  # as programs do that build a scheduler next
    for _ in range(2):  # as if another optimizer took every other step
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    with pytest.warns(UserWarning, match=r"step\(\) found no gradient of any parameter.*Call zero_grad") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    optimizer.step()
    model.requires_grad_(False)
    frozen = MuonOptimizer(list(model.parameters()))
    for _ in range(3):
        frozen.step()  # nothing can have a gradient


def steps_without_gradients() -> list[list[str]]:
    """Let one rank have no gradient, and then none; leave the reduction of gradients switched off."""
    texts = []
    model = fully_shard(linear())
    optimizer = FSDPMuonOptimizer(model)
    for way in ("on one rank", "nowhere", "nowhere"):
        model.set_requires_gradient_sync(way == "on one rank")
        model(torch.ones(2, 6)).square().sum().backward()
        if dist.get_rank() == 1:
            optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        texts.append(user_warnings(caught))
    return texts


@promise(
    "FSDP2's `set_requires_gradient_sync(False)` is left on, so that no rank has a gradient",
    "The same warning on all ranks; none if some rank has a gradient",
)
def test_a_step_without_any_gradient_on_ranks(ranks: RankPool):
    for with_some, first, second in ranks.run(2, steps_without_gradients, timeout=LIMIT):
        assert (with_some, first) == ([], [])
        assert len(second) == 1
        assert "set_requires_gradient_sync(True)" in second[0]


# ------------------------------------------------------------------------------------------------------- two optimizers


class Wrapper(torch.optim.Optimizer):
    """Calls the step of another optimizer inside its own and shares its groups, as SAM and Lookahead do.

    Args:
        inner: the other optimizer.
        every: after how many steps; more than one to accumulate gradients.
    """

    def __init__(self, inner: torch.optim.Optimizer, every: int = 1) -> None:
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.inner, self.param_groups = inner, inner.param_groups
        self.every, self.num_steps = every, 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            self.inner.step()


@promise(
    "One parameter is in two optimizers (`MuonOptimizer(model)` beside `AdamW(model.parameters())`)",
    "A warning, once, at the second step, names the other optimizer. A wrapper such as SAM is none",
)
@pytest.mark.parametrize("rival", ["AdamW", "MuonOptimizer", "disjoint", "idle", "wrapper", "accumulating wrapper"])
def test_a_parameter_in_two_optimizers_is_told(rival):
    model, other = linear(), linear()
    ours = MuonOptimizer(model)
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "AdamW": lambda: torch.optim.AdamW([model.bias, *other.parameters()]),
        "MuonOptimizer": lambda: MuonOptimizer([model.bias]),
        "disjoint": lambda: torch.optim.AdamW(other.parameters()),
        "idle": lambda: torch.optim.AdamW(model.parameters()),  # of an earlier phase, and still there
        "wrapper": lambda: Wrapper(ours),
        "accumulating wrapper": lambda: Wrapper(ours, every=2),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a lone bias is no matrix
        second = makers[rival]()
    steps = [ours] if rival == "idle" else [second] if isinstance(second, Wrapper) else [ours, second]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            for layer in (model, other):
                layer(torch.ones(2, 6)).square().sum().backward()
            for optimizer in steps:
                optimizer.step()
    texts = [text for text in user_warnings(caught) if "so they move twice" in text]
    if rival == "AdamW":
        assert len(texts) == 1
        assert texts[0].startswith("AdamW updates 1 parameters of this optimizer too ('bias')")
    else:
        assert len(texts) == (2 if rival == "MuonOptimizer" else 0)  # each of ours says so


def test_the_watch_for_other_optimizers_ends_with_the_optimizer():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    before = len(hooks)
    model = linear()
    optimizer = MuonOptimizer(model)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    assert len(hooks) == before + 1
    copy.deepcopy(optimizer).step()
    optimizer.step()
    assert len(hooks) == before
    optimizer = MuonOptimizer(model)
    optimizer.step()
    del optimizer
    gc.collect()
    assert len(hooks) == before


# --------------------------------------------------------------------------------------- checkpoints loaded on one rank


def loaded_by(way: str) -> list[str]:
    """Load weights and state, and return what warnings say at the next two steps."""

    def step(model: nn.Module, optimizer: MuonOptimizer) -> None:
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def build() -> tuple[nn.Module, MuonOptimizer]:
        if way == "stages":  # of a pipeline, which share no parameter
            stage = linear()
            return stage, FSDPMuonOptimizer(stage, agreement_group=dist.group.WORLD)
        sharded = fully_shard(linear())
        return sharded, FSDPMuonOptimizer(sharded, gradient_accumulation_steps=num_calls)

    num_calls = 3 if way == "accumulating" else 1
    model, optimizer = build()
    for _ in range(num_calls):
        step(model, optimizer)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = get_model_state_dict(model, options=whole), get_optimizer_state_dict(model, optimizer, options=whole)
    weights, state = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    resumed, optimizer = build()
    if way == "broadcast":
        set_model_state_dict(resumed, full[0], options=whole)
        set_optimizer_state_dict(resumed, optimizer, full[1], options=whole)
    elif way == "on all" or (way in ("on rank 0", "accumulating", "stages") and dist.get_rank() == 0):
        resumed.load_state_dict(weights)
        optimizer.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * num_calls):
            step(resumed, optimizer)
    return user_warnings(caught)


@promise(
    "Rank 0 alone loads its shards of weights or of the optimizer's state",
    "A warning on all ranks names a rank that has loaded and one that has not",
)
def test_a_checkpoint_that_one_rank_loads_is_told(ranks: RankPool):
    for way in ("on rank 0", "accumulating"):
        for texts in ranks.run(2, loaded_by, way, timeout=LIMIT):
            assert [text.partition(". A checkpoint")[0] for text in texts] == [
                "Rank 0 has loaded optimizer state since the last step, and rank 1 has not",
                "Rank 0 has loaded or changed weights since the optimizer was built, and rank 1 has not",
            ]
    for way in ("on all", "not at all", "broadcast", "stages"):
        assert ranks.run(2, loaded_by, way, timeout=LIMIT) == [[], []]
