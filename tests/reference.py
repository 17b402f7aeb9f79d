"""Rules in float64, straight from the formulas, with an SVD; shares no code with the package."""

from __future__ import annotations

import math

import numpy as np


def polar(matrix: np.ndarray) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    kept = s > s[0] * max(matrix.shape) * np.finfo(np.float64).eps
    return (u[:, kept] @ vt[kept]) if s[0] > 0 else np.zeros_like(matrix)


def scale_of(version: str | float, d_out: int, d_in: int) -> float:
    if not isinstance(version, str):
        return version
    return {
        "v1": max(d_out, d_in) ** 0.5,
        "v2": max(1, d_out / d_in) ** 0.5,
        "v3": (d_out / d_in) ** 0.5,
        "v4": 0.2 * max(d_out, d_in) ** 0.5,
    }[version]


def damping(matrix: np.ndarray, momentum_eps: float) -> float:
    """Return the factor of the update of a matrix that is orthogonalized: below 1 if its norm is below momentum_eps."""
    norm = np.linalg.norm(matrix / np.abs(matrix).max()) * np.abs(matrix).max() if matrix.any() else 0.0
    return norm / momentum_eps if norm < momentum_eps else 1.0


def decayed(w: np.ndarray, update: np.ndarray, lr: float, weight_decay: float, cautious: bool) -> np.ndarray:
    """Return W after weight decay; with `cautious`, only where the update and W have no opposite signs."""
    mask = np.sign(update) * np.sign(w) >= 0 if cautious else 1.0
    return w - lr * weight_decay * mask * w


class ReferenceMuon:
    """One 2D weight."""

    def __init__(
        self,
        w,
        *,
        lr=0.02,
        momentum=0.95,
        weight_decay=0.0,
        nesterov=False,
        scale="v2",
        ns_stepsize=1.0,
        blocks=None,
        momentum_eps=1e-7,
        cautious=False,
    ):
        self.w = np.array(w, dtype=np.float64)
        self.buf = np.zeros_like(self.w)
        self.lr, self.momentum, self.weight_decay, self.nesterov = lr, momentum, weight_decay, nesterov
        self.scale, self.ns_stepsize, self.momentum_eps = scale, ns_stepsize, momentum_eps
        self.cautious = cautious
        self.blocks = blocks or [self.w.shape[0]]  # heights of the logical matrices
        self.condition = 1.0  # the worst so far: what rounding of an input is multiplied by in its polar factor

    def step(self, grad) -> np.ndarray:
        grad = np.asarray(grad, dtype=np.float64)
        self.buf = self.momentum * self.buf + grad
        u = grad + self.momentum * self.buf if self.nesterov else self.buf
        parts = np.split(u, np.cumsum(self.blocks)[:-1], axis=0)
        self.condition = max(self.condition, *(np.linalg.cond(part) for part in parts))
        update = np.concatenate(
            [scale_of(self.scale, *part.shape) * damping(part, self.momentum_eps) * polar(part) for part in parts]
        )
        return self.moved(self.ns_stepsize * update)

    def moved(self, update) -> np.ndarray:
        self.w = decayed(self.w, update, self.lr, self.weight_decay, self.cautious) - self.lr * update
        return self.w


class ReferenceNorMuon(ReferenceMuon):
    """Rows divided by the root of their second moment, and the Frobenius norm of each logical matrix restored."""

    def __init__(self, w, *, beta2=0.95, eps=1e-8, **options):
        super().__init__(w, **options)
        self.beta2, self.eps = beta2, eps
        self.v = np.zeros((self.w.shape[0], 1))

    def step(self, grad) -> np.ndarray:
        grad = np.asarray(grad, dtype=np.float64)
        self.buf = self.momentum * self.buf + grad
        u = grad + self.momentum * self.buf if self.nesterov else self.buf
        updates = []
        cuts = np.cumsum(self.blocks)[:-1]
        for part, v in zip(np.split(u, cuts, axis=0), np.split(self.v, cuts, axis=0), strict=True):
            o = polar(part)
            v[:] = self.beta2 * v + (1 - self.beta2) * np.mean(o**2, axis=1, keepdims=True)
            normalized = o / (np.sqrt(v) + self.eps)
            if normalized.any():
                normalized *= np.linalg.norm(o) / np.linalg.norm(normalized)
            updates.append(scale_of(self.scale, *part.shape) * damping(part, self.momentum_eps) * normalized)
        return self.moved(self.ns_stepsize * np.concatenate(updates))


class ReferenceSinkhorn:
    """One (vocabulary, hidden) weight, as DeepSeek-V4.1 describes it: momentum is an average of gradients."""

    def __init__(self, w, *, lr=2.6e-4, momentum=0.95, weight_decay=0.0, steps=11, tau=1e-3, eps=1e-20, gamma=0.18):
        self.w = np.array(w, dtype=np.float64)
        self.m = np.zeros_like(self.w)
        self.lr, self.beta, self.weight_decay = lr, momentum, weight_decay
        self.steps, self.tau, self.eps, self.gamma = steps, tau, eps, gamma

    def step(self, grad) -> np.ndarray:
        self.m = self.beta * self.m + (1 - self.beta) * np.asarray(grad, dtype=np.float64)
        u = self.beta * self.m + (1 - self.beta) * grad
        norms = np.linalg.norm(u, axis=1)
        u[norms <= self.tau * norms.mean()] = 0.0
        for number in range(self.steps):
            axis = 1 if number % 2 == 0 else 0
            u = u / (np.linalg.norm(u, axis=axis, keepdims=True) + self.eps)
        self.w *= 1 - self.lr * self.weight_decay
        self.w -= self.gamma * self.lr * self.w.shape[1] ** 0.5 * u
        return self.w


class ReferenceAdamW:
    def __init__(self, w, *, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, cautious=False):
        self.w = np.array(w, dtype=np.float64)
        self.m, self.v, self.t = np.zeros_like(self.w), np.zeros_like(self.w), 0
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.cautious = cautious

    def step(self, grad) -> np.ndarray:
        grad = np.asarray(grad, dtype=np.float64)
        b1, b2 = self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * grad
        self.v = b2 * self.v + (1 - b2) * grad**2
        m_hat, v_hat = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        update = m_hat / (np.sqrt(v_hat) + self.eps)
        self.w = decayed(self.w, update, self.lr, self.weight_decay, self.cautious) - self.lr * update
        return self.w


def matrix_with_condition(rng: np.random.Generator, rows: int, cols: int, condition: float) -> np.ndarray:
    """Make a random matrix whose singular values are log-uniform from 1 down to 1/condition."""
    small = min(rows, cols)
    u = np.linalg.qr(rng.standard_normal((rows, small)))[0]
    v = np.linalg.qr(rng.standard_normal((cols, small)))[0]
    s = np.logspace(0, -math.log10(condition), small) if small > 1 else np.ones(1)
    return (u * s) @ v.T


class ReferenceSphere:
    """The Spectral Sphere Optimizer for one 2D weight: SVDs, and lambda by bisection to the last bit."""

    def __init__(self, w, *, lr=0.02, momentum=0.95, nesterov=False, radius=None, mode="exact", momentum_eps=1e-7):
        self.w = np.array(w, dtype=np.float64)
        self.buf = np.zeros_like(self.w)
        self.lr, self.momentum, self.nesterov, self.mode = lr, momentum, nesterov, mode
        self.momentum_eps = momentum_eps
        self.radius = math.sqrt(self.w.shape[0] / self.w.shape[1]) if radius is None else radius

    def step(self, grad) -> np.ndarray:
        grad = np.asarray(grad, dtype=np.float64)
        self.buf = self.momentum * self.buf + grad
        m = grad + self.momentum * self.buf if self.nesterov else self.buf
        factor = damping(m, self.momentum_eps)
        m = m / np.linalg.norm(m)
        us, s, vt = np.linalg.svd(self.w, full_matrices=False)
        outer = np.outer(us[:, 0], vt[0])
        self.w = self.w * (self.radius / s[0])
        update = polar(m + self.solve(m, outer) * outer)
        if self.mode == "projection":
            update = update - np.sum(outer * update) * outer
        self.w = self.w - self.lr * self.radius * factor * update
        return self.w

    def solve(self, m, outer) -> float:
        if self.mode != "exact":
            return 0.0
        center = -np.sum(outer * m)
        low, high = center - 1, center + 1
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.sum(outer * polar(m + middle * outer)) < 0 else (low, middle)
        return (low + high) / 2
