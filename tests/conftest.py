"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Before torch is imported, here and in programs that tests start: matrices are tiny, several threads would spend their
# time waiting for each other, and other tests run at the same time.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before Transformers is imported, here and on ranks: nothing is downloaded

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, which must be known before they are made
    os.environ["TRITON_INTERPRET"] = "1"

from tests.pool import RankPool

# The same examples in every run; `--hypothesis-profile default` looks for others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Choose the number of processes of `-n auto`.

    A GPU is for one process, and with more than four each imports torch for few tests.
    """
    return 0 if torch.cuda.is_available() else min(4, os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    """Leave what was imported out of searches for garbage, each of which would take 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Begin every test alike: with pytest-xdist each worker runs other tests before it.

    A test of `muon-fsdp bench` leaves two threads, with which small matrices take several times as long.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Give real gloo ranks: `ranks.run(world_size, function, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()
