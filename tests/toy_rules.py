"""Rules as users would write them, each in one place: the seam is tested with them. Importing registers them."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_fsdp.rules import MatrixBatch, MatrixValues, Muon, Option, PerMatrix, PerParameter, Rule, register


@register
class RowNormed(Muon):
    """The example of docs/rules.md: per-row state and an option of its own."""

    name = "row_normed"
    options = (
        *Muon.options,
        Option("row_beta", 0.9, "decay of the second moment of rows", check=lambda value: 0 <= value < 1),
    )
    state = (*Muon.state, PerMatrix("row_moment", "rows"))

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)  # writes batch.update, (B, rows, cols), float16 on GPUs
        moment = batch.state["row_moment"]  # (B, rows)
        update = batch.update.to(moment.dtype)
        norm = update.norm(dim=(-2, -1), keepdim=True)
        moment.lerp_(update.square().mean(-1), 1 - batch.options["row_beta"])
        update = update / (moment.sqrt() + 1e-8).unsqueeze(-1)
        batch.update.copy_(update * norm / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30))


@register
class EarlyCounter(Muon):
    """Counts the steps of every matrix, and reports the count: state and diagnostics without statistics."""

    name = "early_counter"
    state = (*Muon.state, PerMatrix("steps", "scalar"))
    diagnostics = ("count",)

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        batch.state["steps"].add_(1)
        batch.update = batch.update / batch.state["steps"].view(-1, 1, 1).to(batch.update.dtype)
        batch.diagnostics["count"] = batch.state["steps"].clone()

    def metrics(self, last, total):
        return {"largest": float(last["count"].max()) if len(last["count"]) else 0.0}


@register
class ToySphere(Muon):
    """Keeps matrices at the Frobenius norm that they begin with, and counts their steps by row norms: all at once."""

    name = "toy_sphere"
    options = (
        *Muon.options,
        Option("row_beta", 0.5, "decay of the row moment", check=lambda value: 0 <= value < 1),
    )
    state = (
        *Muon.state,
        PerMatrix("radius", "scalar", initial="frobenius_norm"),
        PerMatrix("row_moment", "rows"),
        PerMatrix("column_moment", "columns"),
    )
    statistics = ("frobenius_norm", "row_norms")
    diagnostics = ("norm",)

    def factors(self, values: MatrixValues) -> tuple[Tensor, Tensor]:
        norm = values.statistics["frobenius_norm"]
        decay = 1 - values.options["lr"] * values.options["weight_decay"]
        values.diagnostics["norm"] = norm
        factor = torch.where(norm > 0, values.state["radius"] / norm.clamp_min(1e-30), 1.0)
        return factor * decay, torch.full_like(norm, 0.5)

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        beta = batch.options["row_beta"]
        moment, columns = batch.state["row_moment"], batch.state["column_moment"]
        moment = beta * moment + (1 - beta) * batch.statistics["row_norms"]
        columns.lerp_(batch.update.to(columns.dtype).square().sum(-2), 0.25)
        scale = 1 / (1 + moment / moment.mean(-1, keepdim=True).clamp_min(1e-30))
        batch.update = batch.update * scale.unsqueeze(-1).to(batch.update.dtype)
        batch.state["row_moment"] = moment

    def metrics(self, last, total):
        return {"largest_norm": float(last["norm"].max()) if len(last["norm"]) else 0.0}


@register
class ToyMagnitudes(Muon):
    """Multiplies the rows of W by factors, and the columns of updates."""

    name = "toy_magnitudes"
    state = (*Muon.state, PerMatrix("magnitude", "rows", initial="row_norms"))
    statistics = ("row_norms", "column_norms", "top_singular")

    def factors(self, values: MatrixValues) -> tuple[Tensor, Tensor]:
        norms, columns = values.statistics["row_norms"], values.statistics["column_norms"]
        of_rows = (0.5 + 0.5 * values.state["magnitude"] / norms.clamp_min(1e-30)).unsqueeze(-1)
        of_columns = 1 / (1 + columns / values.statistics["top_singular"].norm.clamp_min(1e-30)[:, None])
        return of_rows, of_columns.unsqueeze(-2)


@register
class ToyScaled(Muon):
    """Multiplies updates by the norms of weights; its direction reads no statistic."""

    name = "toy_scaled"
    statistics = ("frobenius_norm",)

    def factors(self, values: MatrixValues) -> tuple[float, Tensor]:
        return 1.0, values.statistics["frobenius_norm"]


@register
class ToySigns(Rule):
    """A rule without momentum or kernels: the sign of a matrix, times the mean size of its elements."""

    name = "toy_signs"

    def direction(self, batch: MatrixBatch) -> None:
        batch.update = batch.matrices.sign() * batch.matrices.abs().mean(dim=(-2, -1), keepdim=True)


@register
class ToyNoise(Muon):
    """Multiplies the rows and the columns of updates by random numbers, from two calls."""

    name = "toy_noise"
    options = (
        *Muon.options,
        Option("seed", 0, "seed of the noise"),
        Option("row_beta", 0.5, "size of the noise", check=lambda value: 0 <= value < 1),
    )

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        rows, cols = batch.update.shape[-2:]
        noise = batch.random(rows, 1) + batch.random(1, cols)
        batch.update = batch.update * (1 + batch.options["row_beta"] * noise).to(batch.update.dtype)


@register
class ToyThatWaits(Muon):
    """Looks at a number on the host, which a graph can't capture."""

    name = "toy_that_waits"

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        if float(batch.update.abs().max()) > 1e30:
            batch.update.zero_()


@register
class ToyMomentum(Rule):
    """An element-wise rule: plain momentum."""

    name = "toy_momentum"
    options = (*Rule.options, Option("beta", 0.5, "decay of the momentum", check=lambda v: 0 <= v < 1, per_step=True))
    state = (PerParameter("momentum_buffer"),)

    def prepare(self, group, grads, states):
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_mul_(buffers, group["beta"])
        torch._foreach_add_(buffers, grads)
        return buffers


@register
class ToySecondMoment(Muon):
    """Declares an option that a built-in rule has too, with a default of its own."""

    name = "toy_second_moment"
    options = (*Muon.options, Option("beta2", 0.75, "decay of a second moment"))


@register
class ToyAdaMuon(Muon):
    """The example of docs/rules.md: a second moment of the orthogonalized update, kept on shards by `apply`."""

    name = "toy_adamuon"
    options = (*Muon.options, Option("moment_beta", 0.9, "decay of the second moment", per_step=True))
    state = (*Muon.state, PerParameter("second_moment"))
    state_in_apply = True

    def apply(self, group, params, updates, factors=None, states=None):
        beta = group["moment_beta"]
        for update, state in zip(updates, states, strict=True):
            state["second_moment"].lerp_(update.square(), 1 - beta)
        moments = [state["second_moment"].sqrt() + 1e-8 for state in states]
        super().apply(group, params, [update / moment for update, moment in zip(updates, moments, strict=True)])


@register
class ToyShampoo(Rule):
    """The example of docs/rules.md: state of the size of a matrix on either side, and one of the matrix's own size."""

    name = "toy_shampoo"
    options = (*Rule.options, Option("decay", 0.9, "decay of the preconditioners", check=lambda value: 0 <= value < 1))
    state = (PerMatrix("left", "left"), PerMatrix("right", "right"), PerMatrix("mean_update", "elements"))

    def direction(self, batch: MatrixBatch) -> None:
        gradient, decay = batch.matrices, batch.options["decay"]
        left, right, mean = (batch.state[name] for name in ("left", "right", "mean_update"))
        left.mul_(decay).add_(gradient @ gradient.mT)
        right.mul_(decay).add_(gradient.mT @ gradient)
        mean.lerp_(inverse_root(left) @ gradient.to(left.dtype) @ inverse_root(right), 0.5)
        batch.update = mean


def inverse_root(matrices: Tensor) -> Tensor:
    """Return the inverse fourth roots of symmetric matrices, (B, n, n)."""
    values, vectors = torch.linalg.eigh(matrices)
    return vectors @ ((values.clamp_min(0) + 1e-4) ** -0.25)[:, :, None].mul(vectors.mT)


@register
class ToyTurn(Muon):
    """Moves every matrix by the part of its update that is orthogonal to it in size, and counts in both methods."""

    name = "toy_turn"
    state = (*Muon.state, PerMatrix("calls", "scalar"), PerMatrix("turned", "scalar"))
    statistics = ("frobenius_norm",)
    update_statistics = True
    diagnostics = ("cosine", "count")

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        batch.state["calls"].add_(1)
        batch.diagnostics["count"] = batch.state["calls"].clone()

    def factors(self, values: MatrixValues) -> tuple[Tensor, Tensor]:
        inner, squared = values.update_statistics
        norm = values.statistics["frobenius_norm"].double()
        cosine = inner / (norm * squared.sqrt())
        values.state["turned"] += cosine.abs().to(values.state["turned"].dtype)
        values.diagnostics["cosine"] = cosine
        return 1 - values.options["lr"] * cosine.square(), 1 - cosine.square()

    def metrics(self, last, total):
        return {"largest_cosine": float(last["cosine"].abs().max()), "calls": float(last["count"].max())}


@register
class ToyGiven(Muon):
    """The example of docs/rules.md, with numbers for rows too: updates are multiplied by what a user passes."""

    name = "toy_given"
    state = (*Muon.state, PerMatrix("log_rate", "scalar"), PerMatrix("gains", "rows"))

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        factors = batch.state["log_rate"].exp()[:, None] * (1 + batch.state["gains"])
        batch.update = batch.update * factors[:, :, None].to(batch.update.dtype)
