"""What docs/migration.md says to be equal to other optimizers is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from muon_fsdp import MuonOptimizer, migrate

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
SHAPES = [(64, 64), (64, 128), (128, 32)]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def changes(shape: tuple[int, int], steps: int, *makers: Make) -> list[Tensor]:
    """Return what optimizers add to equal weights for equal Gaussian gradients, without weight decay."""
    found = []
    for make in makers:
        generator = torch.Generator().manual_seed(1)
        start = 0.02 * torch.randn(shape, generator=generator)
        weight = nn.Parameter(start.clone())
        optimizer = make([weight])
        for _ in range(steps):
            weight.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        found.append((weight.detach() - start * (1 - LR * DECAY) ** steps).flatten())
    return found


def compare(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the cosine of two changes, and the norm of the second over that of the first."""
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=0)
    return float(cosine), float(second.norm() / first.norm())


def ours(**options: object) -> Make:
    return lambda params: MuonOptimizer(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, **options)  # type: ignore[arg-type]


def torchs(**options: object) -> Make:
    return lambda params: torch.optim.Muon(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("orthogonalization", "least_cosine", "smallest", "largest"),
    [("keller", 0.9997, 0.996, 1.004), ("quintic", 0.98, 1.1, 1.3), ("default", 0.98, 1.1, 1.3)],
)
def test_torch_muon(shape, nesterov, steps, orthogonalization, least_cosine, smallest, largest):
    """Nothing but bfloat16 between "keller" and theirs; the other sets give larger updates, as the page says."""
    theirs, mine = changes(
        shape, steps, torchs(nesterov=nesterov), ours(nesterov=nesterov, orthogonalization=orthogonalization)
    )
    cosine, norm = compare(theirs, mine)
    assert cosine > least_cosine
    assert smallest < norm < largest


@pytest.mark.parametrize(
    ("adjust", "scale"), [(None, "v2"), ("original", "v2"), ("match_rms_adamw", "v4")], ids=lambda value: str(value)
)
@pytest.mark.parametrize("shape", SHAPES)
def test_adjust_lr_fn(adjust, scale, shape):
    theirs, mine = changes(
        shape, 3, torchs(adjust_lr_fn=adjust), ours(nesterov=True, orthogonalization="keller", scale=scale)
    )
    cosine, norm = compare(theirs, mine)
    assert cosine > 0.9997
    assert abs(norm - 1) < 4e-3


def test_the_default_of_nesterov_differs():
    theirs, same, default = changes(
        (64, 64), 10, torchs(), ours(nesterov=True, orthogonalization="keller"), ours(orthogonalization="keller")
    )
    assert compare(theirs, same)[0] > 0.9997
    assert compare(theirs, default)[0] < 0.999


def test_state_of_torch_muon_is_refused_and_can_be_converted():
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(32, 16, generator=generator))
    theirs = torch.optim.Muon([weight], lr=LR, weight_decay=DECAY)
    for _ in range(5):
        weight.grad = torch.randn(32, 16, generator=generator)
        theirs.step()
    start, grad = weight.detach().clone(), torch.randn(32, 16, generator=generator)

    def next_change(convert: bool) -> Tensor:
        copy = nn.Parameter(start.clone())
        optimizer = MuonOptimizer([copy], lr=LR, weight_decay=DECAY, nesterov=True, orthogonalization="keller")
        with pytest.raises(RuntimeError, match=r"saved by torch\.optim\.Muon, not by MuonOptimizer"):
            optimizer.load_state_dict(theirs.state_dict())
        if convert:
            migrate.load_state_dict(optimizer, theirs.state_dict(), [copy])
        else:
            optimizer.state[copy] = {"momentum_buffer": theirs.state[weight]["momentum_buffer"].clone()}
        copy.grad = grad.clone()
        optimizer.step()
        return (copy.detach() - start * (1 - LR * DECAY)).flatten()

    unconverted, converted = next_change(convert=False), next_change(convert=True)
    weight.grad = grad.clone()
    theirs.step()
    expected = (weight.detach() - start * (1 - LR * DECAY)).flatten()
    assert compare(expected, converted)[0] > 0.9995
    assert compare(expected, unconverted)[0] < 0.9


def test_torch_muon_overwrites_its_momentum_in_bfloat16():
    """Torch 2.15 does not; the warning on the page can go when older versions are no longer supported."""
    weight = nn.Parameter(torch.randn(32, 16, dtype=torch.bfloat16))
    optimizer = torch.optim.Muon([weight], lr=LR, nesterov=False)
    weight.grad = 100 * torch.randn(32, 16, dtype=torch.bfloat16)
    optimizer.step()
    is_overwritten = abs(float(optimizer.state[weight]["momentum_buffer"].norm()) - 1) < 0.05
    assert is_overwritten is (tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15))


def test_adamw():
    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)

    def same(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return MuonOptimizer(params, rule="adamw", adamw_lr=LR, adamw_betas=(0.9, 0.95), adamw_weight_decay=DECAY)

    theirs, mine = changes((64, 48), 10, adamw, same)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_state_of_adamw_is_refused():
    model = nn.Linear(6, 4)
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    adamw.step()
    optimizer = MuonOptimizer(model.parameters())
    with pytest.raises(RuntimeError, match=r"saved by torch\.optim\.AdamW, not by MuonOptimizer"):
        optimizer.load_state_dict(adamw.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize("shape", SHAPES)
def test_scale_v4_has_the_size_of_an_adamw_update(shape):
    (change,) = changes(shape, 1, ours(scale="v4"))
    assert float(change.square().mean().sqrt()) == pytest.approx(0.2 * LR, rel=0.02)


@pytest.mark.parametrize("nesterov", [False, True])
def test_dion(nesterov):
    dion = pytest.importorskip("dion")
    scales = {"spectral_norm": "v3", "rms_norm": "v4", None: 1.0}
    sets = {True: ("polar_express", 0.997, 0.03), False: ("quintic", 0.9997, 0.004)}  # by use_polar_express
    for (adjust, scale), (polar_express, (name, least_cosine, tolerance)) in product(scales.items(), sets.items()):

        def make(params: list[nn.Parameter], adjust=adjust, polar_express=polar_express) -> torch.optim.Optimizer:
            options = {"nesterov": nesterov, "adjust_lr": adjust, "use_polar_express": polar_express}
            return dion.Muon(params, lr=LR, mu=MOMENTUM, weight_decay=DECAY, **options)

        with torch.compiler.set_stance("force_eager"):
            theirs, mine = changes((96, 48), 10, make, ours(nesterov=nesterov, scale=scale, orthogonalization=name))
        cosine, norm = compare(theirs, mine)
        assert cosine > least_cosine, (adjust, name)
        assert norm == pytest.approx(1, abs=tolerance), (adjust, name)
