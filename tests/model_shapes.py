"""Shapes of the matrices of public models, from their configurations; embeddings and heads left out."""

from __future__ import annotations

Shape = tuple[int, ...]


def gpt2_124m() -> list[Shape]:
    return [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12


def llama(layers: int, hidden: int, intermediate: int, key_value: int) -> list[Shape]:
    attention = [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
    return [*attention, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)] * layers


def deepseek_v3(stacked: bool = False) -> list[Shape]:
    attention = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
    dense = [(18432, 7168), (18432, 7168), (7168, 18432)]
    expert = [(2048, 7168), (2048, 7168), (7168, 2048)]
    routed: list[Shape] = [(256, *shape) for shape in expert] if stacked else expert * 256
    return (attention + dense) * 3 + [*attention, (256, 7168), *expert, *routed] * 58


MODELS = {
    "gpt2-124m": gpt2_124m(),
    "llama-3-8b": llama(32, 4096, 14336, 1024),
    "llama-3-70b": llama(80, 8192, 28672, 1024),
    "llama-3-405b": llama(126, 16384, 53248, 1024),
    "deepseek-v3": deepseek_v3(),
    "deepseek-v3-stacked": deepseek_v3(stacked=True),
}
