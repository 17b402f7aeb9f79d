"""Which tiles of a batch of symmetric matrices each program of the Hopper kernel computes, and in which order.

A task is two tiles of the lower triangle that share a row or a column, so that they share an operand, or one tile.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

NO_TILE = 1023  # the largest index that fits into a packed task
GROUP = 8  # pairs of rows of tiles that are walked side by side, so that operands are found in the cache
CUT_STEP = 4  # how many tasks more are left whole at each attempt


class Task(NamedTuple):
    """Tiles (`first`, `shared`) and (`second`, `shared`) of a matrix, or (`shared`, ...) if they share their row."""

    matrix: int
    first: int
    second: int  # NO_TILE: only one
    shared: int
    shares_row: bool = False

    @property
    def is_pair(self) -> bool:
        return self.second != NO_TILE

    def tiles(self) -> list[tuple[int, int, int]]:
        """(matrix, row, column) of each."""
        others = (self.first, self.second) if self.is_pair else (self.first,)
        return [(self.matrix, *((self.shared, i) if self.shares_row else (i, self.shared))) for i in others]

    def singles(self) -> list[Task]:
        if not self.is_pair:
            return [self]
        return [self._replace(second=NO_TILE), self._replace(first=self.second, second=NO_TILE)]

    def packed(self) -> tuple[int, int]:
        """Two words of 32 bits, as the kernel reads them."""
        return self.matrix, self.first | self.second << 10 | self.shared << 20 | self.shares_row << 30


def schedule(num_matrices: int, rows_of_tiles: int, programs: int, same: bool) -> list[list[Task]]:
    """The tasks of every program: the next one goes to whichever is free first.

    A pair costs less than two tiles, but at the end, where programs would wait for one that has begun a pair, tiles
    are handed out one by one. How many pairs are divided so is tried. `same`: both operands of the product are one.
    """
    triangle = _triangle(rows_of_tiles)
    tasks = [task._replace(matrix=matrix) for matrix in range(num_matrices) for task in triangle]
    free_at = [(0.0, program) for program in range(programs)]  # a heap
    owners: list[int] = []
    best_end, best_tasks, best_owners = float("inf"), tasks, owners
    for whole in (*range(max(0, len(tasks) - programs), len(tasks), CUT_STEP), len(tasks)):
        owners += _assign(tasks[len(owners) : whole], free_at, same)
        singles = [single for task in tasks[whole:] for single in task.singles()]
        attempt = free_at.copy()
        last_owners = _assign(singles, attempt, same)
        end = max(attempt)[0]
        if end <= best_end:
            best_end, best_tasks, best_owners = end, tasks[:whole] + singles, owners + last_owners
    lists: list[list[Task]] = [[] for _ in range(programs)]
    for task, program in zip(best_tasks, best_owners, strict=True):
        lists[program].append(task)
    return lists


def packed(lists: Sequence[Sequence[Task]]) -> list[list[tuple[int, int]]]:
    """A table with one line per program: the number of its tasks, the tasks, and at least one more, which is empty."""
    length = max(map(len, lists))
    return [
        [(len(tasks), 0), *(task.packed() for task in tasks), *[(0, 0)] * (length - len(tasks) + 1)] for tasks in lists
    ]


def _triangle(rows_of_tiles: int) -> list[Task]:
    """Tasks of one matrix: GROUP pairs of rows are walked column by column.

    Rows `top` and `top` + 1 have an odd number of tiles: columns 1 to `top` in pairs, the diagonal of the lower row
    with its column 0 (they share a row), and column 0 of `top`, which is paired with that of the next such rows.
    """
    first_top = -(rows_of_tiles % 2)  # row 0 is alone if their number is odd
    tasks, left_over = [], []
    for start in range(first_top, rows_of_tiles, 2 * GROUP):
        tops = range(start, min(start + 2 * GROUP, rows_of_tiles), 2)
        left_over += [max(top, 0) for top in tops]
        while len(left_over) > 1:
            tasks.append(Task(0, left_over.pop(0), left_over.pop(0), 0))
        for column in range(1, tops[-1] + 1):
            tasks += [Task(0, top + 1, top, column) for top in tops if column <= top]
        tasks += [Task(0, top + 1, 0, top + 1, shares_row=True) for top in tops if top >= 0]
    return tasks + [Task(0, row, NO_TILE, 0) for row in left_over]


def _assign(tasks: Sequence[Task], free_at: list[tuple[float, int]], same: bool) -> list[int]:
    """The program of every task; `free_at` is kept up to date."""
    owners = []
    for task in tasks:
        time, program = free_at[0]
        owners.append(program)
        heapq.heapreplace(free_at, (time + _cost(task, same), program))
    return owners


def _cost(task: Task, same: bool) -> float:
    """Alone a tile is limited by loads, and on the diagonal of a Gram matrix it has only one operand."""
    if task.is_pair:
        return 2.0
    return 1.1 if same and task.first == task.shared else 1.3
