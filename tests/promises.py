"""Mark a test as a promise about a mistake or a fault; `docs/generate_faults.py` writes a page from these."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def promise(when: str, then: str) -> Callable[[Test], Test]:
    """Say what a user would do or see, and what happens then; both become cells of a table, as they are written."""

    def mark(test: Test) -> Test:
        return test

    return mark
