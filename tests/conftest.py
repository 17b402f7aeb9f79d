"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before Transformers is imported, here and on ranks: nothing is downloaded

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, which must be known before they are made
    os.environ["TRITON_INTERPRET"] = "1"

from tests.pool import RankPool


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models: on a busy machine several threads spend most of the time waiting for each other."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks: `ranks.run(world_size, function, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()
