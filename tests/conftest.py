"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks: `ranks.run(world_size, function, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()
