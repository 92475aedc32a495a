import os

import pytest

from bert_jax.errors import UserError
from data_prep.parallel import ordered_map


def double(task):
    return 2 * task


def fail_at_five(task):
    if task == 5:
        raise ZeroDivisionError("five")
    return task


def die_at_five(task):
    if task == 5:
        os._exit(1)
    return task


def nothing():
    pass


@pytest.mark.parametrize("workers", [1, 2])
def test_order_and_laziness(workers):
    taken = []

    def tasks():
        for task in range(100):
            taken.append(task)
            yield task

    results = ordered_map(double, tasks(), workers, str, nothing)
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    assert len(taken) <= 3 + 3 * workers
    assert list(results) == [2 * task for task in range(3, 100)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_comes_back(workers):
    with pytest.raises(ZeroDivisionError, match="five"):
        list(ordered_map(fail_at_five, range(20), workers, str, nothing))


def test_a_dead_worker_is_reported():
    with pytest.raises(UserError, match=r"a worker process died at or after task \d"):
        list(ordered_map(die_at_five, range(20), 2, lambda task: f"task {task}", nothing))
