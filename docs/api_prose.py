"""Holds the parts of docs/api.md that are written by hand: introductions, examples, and tables of words."""

from __future__ import annotations

from muon_fsdp.declarations.state import NUM_VECTORS
from muon_fsdp.kernels.select import CACHE_VARIABLE, KERNELS_VARIABLE

TITLE = """# API reference

<!-- Written by docs/generate_api.py from signatures and docstrings: edit those, then run it. -->

Names that are not on this page may change without notice. [Options and defaults](options.md) lists the options of all
constructors. Wrong values raise `ValueError`, wrong types `TypeError`, and problems at a step or on load
`RuntimeError`: [Errors and what to do](errors.md).
"""

OPTIMIZERS_INTRODUCTION = """\
The three classes share one `step()` and one set of options; [their defaults differ](options.md). They are
`torch.optim.Optimizer`s: closures, hooks, schedulers, `GradScaler` and checkpoints work as usual.

```python
import torch
from torch import nn
from muon_fsdp import MuonOptimizer

model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
optimizer = MuonOptimizer(model, lr=0.02)
model(torch.randint(0, 50, (8,))).square().mean().backward()
optimizer.step()
```"""

RECIPES_INTRODUCTION = """\
[Published recipes](guides/recipes.md) by name, each a `Recipe`: {names}. Another name raises `KeyError`."""

UTILS_EXAMPLE = """```python
from muon_fsdp.utils import zeropower_via_newtonschulz5

orthogonal = zeropower_via_newtonschulz5(torch.randn(50, 100))
assert torch.norm(orthogonal @ orthogonal.T - torch.eye(50)) < 0.1
```"""

SPECTRAL_EXAMPLE = """```python
from muon_fsdp.spectral import compute_spectral_norm, power_iteration, retract, solve_lambda, target_radius

weight, momentum = torch.randn(64, 32), torch.randn(64, 32)
radius = target_radius(64, 32)  # sqrt(64 / 32)
weight = retract(weight, radius)
assert abs(compute_spectral_norm(weight) - radius) < 0.02 * radius

norm, left, right = power_iteration(weight, steps=100)
tangent = solve_lambda(momentum[None], left[None], right[None])
weight = weight - 0.02 * radius * tangent.direction[0]  # a step along the sphere
```"""

DISTRIBUTED_EXAMPLE = """The optimizers assemble and scatter by themselves; these are for looking at sharded parameters.

<!-- distributed: run by tests/test_docs.py on two ranks -->
```python
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from muon_fsdp.distributed import gather_full, local, scatter_full

model = fully_shard(nn.Linear(8, 6))
whole = gather_full(model.weight)  # on all ranks, a new plain tensor
assert whole.shape == (6, 8) and local(model.weight).shape[0] == 3
with torch.no_grad():
    scatter_full(model.weight, whole / 2)
```"""

KERNELS_INTRODUCTION = """\
Which kernel computes a product, and the two products themselves.

```python
from muon_fsdp.kernels import Product, select

choice = select(Product("symmetric", 12, 768, 768, 3072, torch.float16), torch.device("cpu"))
assert choice.path == "torch" and "cpu" in choice.reason
```

Two variables of the environment:"""

ENVIRONMENT = (
    (
        f"`{KERNELS_VARIABLE}`",
        "`torch` switches all kernels off: PyTorch's library computes everything; `auto` (default) uses them where "
        "they run",
    ),
    (
        f"`{CACHE_VARIABLE}`",
        "folder of the tiles that were timed on GPUs that the committed table does not know; default "
        "`~/.cache/muon_fsdp`",
    ),
)

RULES_INTRODUCTION = """\
For writing an update rule of your own: [rules.md](rules.md) grows one from five lines."""

ELEMENTWISE_INTRODUCTION = """\
*Not* the orthogonalizing Muon: fused element-wise optimizers. The module `muon_optimizer` has the same names. State of
a parameter: `step` (an int), `momentum` and `velocity` (float32, float64 for float64). Per group: all options.

```python
from muon_fsdp.elementwise import TritonMuonW

weight = nn.Parameter(torch.randn(8, 8))
optimizer = TritonMuonW(weight, lr=1e-3)
weight.grad = torch.randn(8, 8)
optimizer.step()
assert set(optimizer.state[weight]) == {"step", "momentum", "velocity"}
```"""

STATE_INTRODUCTION = f"""\
`optimizer.state[parameter]` after the first step, for every parameter, one without a gradient included. What has the
shape of the parameter is distributed as it is; all else is whole on every rank. Precision is float32 for half and
single precision and float64 for double; `step` is always float32.

A logical matrix is what is orthogonalized: `num_heads=8` makes eight of one parameter. k is
min({NUM_VECTORS}, d_out, d_in)."""

GROUPS_INTRODUCTION = """\
Every group has `params` (with `param_names` where parameters have names) and these keys, which can be read and set
between steps, and which a checkpoint holds. In a group that you pass with matrices, options of the other parameters
have the name of their rule as a prefix (`adamw_lr`). {foreign} may be there for schedulers and users; any other key is
an error."""

# What a subclass of Rule may set, in words.
RULE_ATTRIBUTES = (
    ("name", "what the option `rule` says"),
    ("title", "what tables and plots call the rule; its name by default"),
    ("aliases", "further names on the command line"),
    ("options", "its `Option`s; begin with those of the class that it extends"),
    ("state", "its state: `PerParameter` and `PerMatrix`"),
    ("statistics", "the names of the statistics of W that it needs"),
    ("update_statistics", "whether `factors` reads `values.update_statistics`; it then runs once the update is known"),
    ("state_in_apply", "whether `apply` gets the state of its parameters as `states`, and may change it"),
    ("diagnostics", "the names of numbers per matrix for `metrics`"),
    ("update_dtype", "`torch.float32` if float16 can't hold its updates on GPUs"),
    ("kernels", "its `FusedKernels`; they count unless a subclass overrides `prepare` or `apply`"),
    ("hints", "by the name of an option that users expect and the rule does not have: why"),
    ("paper", "where it was published, for `available`"),
    ("recipe", "`lr` and `weight_decay` that the training program starts from"),
)
