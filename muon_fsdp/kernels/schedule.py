"""Schedule the Hopper kernel: which tiles of a batch of symmetric matrices each program computes, in which order.

A task is one tile of the lower triangle, or a pair of tiles in one row or column, which share an operand.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

NO_TILE = 1023  # the largest index that fits into a packed task
GROUP = 8  # pairs of rows of tiles that are walked together, so that their operands stay in the L2 cache
CUT_STEP = 4  # by how many tasks two attempts of `schedule` differ


class Task(NamedTuple):
    """One or two tiles (row, column) of a matrix: (first, shared) and (second, shared).

    If the tiles share their row, they are (shared, first) and (shared, second).
    """

    matrix: int
    first: int
    second: int  # NO_TILE if the task is a single tile
    shared: int
    shares_row: bool = False

    @property
    def is_pair(self) -> bool:
        return self.second != NO_TILE

    def tiles(self) -> list[tuple[int, int, int]]:
        """Return (matrix, row, column) of each tile."""
        others = (self.first, self.second) if self.is_pair else (self.first,)
        return [(self.matrix, *((self.shared, i) if self.shares_row else (i, self.shared))) for i in others]

    def singles(self) -> list[Task]:
        """Return the same tiles as tasks of one tile each."""
        if not self.is_pair:
            return [self]
        return [self._replace(second=NO_TILE), self._replace(first=self.second, second=NO_TILE)]

    def packed(self) -> tuple[int, int]:
        """Return the task as the two 32-bit words that the kernel reads."""
        return self.matrix, self.first | self.second << 10 | self.shared << 20 | self.shares_row << 30


def schedule(num_matrices: int, rows_of_tiles: int, programs: int, same: bool) -> list[list[Task]]:
    """Assign every task to the program that is free first.

    A pair costs less than two single tiles. At the end of the schedule, however, other programs would wait for one that
    has just begun a pair, so the last pairs are divided into single tiles. Several numbers of divided pairs are tried.

    Args:
        num_matrices: size of the batch.
        rows_of_tiles: tiles along one side of a matrix.
        programs: number of programs, one per multiprocessor.
        same: whether both operands of the product are the same tensor.

    Returns:
        The tasks of every program, in their order.
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
    """Return the schedule as the table that the kernel reads, one line per program.

    A line holds the number of tasks, the tasks, and at least one empty task: the kernel loads a task ahead.
    """
    length = max(map(len, lists))
    return [
        [(len(tasks), 0), *(task.packed() for task in tasks), *[(0, 0)] * (length - len(tasks) + 1)] for tasks in lists
    ]


def _triangle(rows_of_tiles: int) -> list[Task]:
    """Return the tasks of one matrix. Each group of GROUP pairs of rows is walked column by column.

    The pair of rows `top` and `top` + 1 has an odd number of tiles. In columns 1 to `top`, its two tiles are one task.
    The diagonal tile of the lower row and the tile in its column 0 are another task, which shares a row. The tile in
    column 0 of row `top` is left over and forms a task with the left-over tile of the next pair of rows.
    """
    first_top = -(rows_of_tiles % 2)  # if the number of rows is odd, row 0 has no partner
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
    """Return the program of every task, and update the heap `free_at` of (time, program)."""
    owners = []
    for task in tasks:
        time, program = free_at[0]
        owners.append(program)
        heapq.heapreplace(free_at, (time + _cost(task, same), program))
    return owners


def _cost(task: Task, same: bool) -> float:
    """Return the measured cost of a task, relative to a tile of a pair.

    A single tile is limited by its loads. A diagonal tile of a Gram matrix loads only one operand.
    """
    if task.is_pair:
        return 2.0
    return 1.1 if same and task.first == task.shared else 1.3
