"""Gaussian noise in whole numbers, exactly (Canonne, Kamath and Steinke 2020, algorithms 1 to 3).

Only whole numbers are drawn and compared, so no rounding of floating-point numbers tells what noise was added to.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Words = Callable[[int], NDArray[np.uint64]]  # so many words of 64 bits by chance
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
LARGEST = 2**24  # a sigma up to which all products here stay below 2^63


def discrete_gaussian(sigma: int, size: int, words: Words) -> Ints:
    """(size,) whole numbers, each y with a chance in proportion to exp(-y^2 / (2 sigma^2)).

    >>> random = np.random.default_rng(0)
    >>> drawn = discrete_gaussian(100, 10_000, lambda count: random.integers(0, 2**64, count, np.uint64))
    >>> 98 < float(drawn.std()) < 102
    True
    """
    if not 1 <= sigma <= LARGEST:
        raise ValueError(f"sigma={sigma} must be a whole number from 1 to {LARGEST}")
    found, todo = np.zeros(size, np.int64), np.arange(size)
    while len(todo):
        drawn = _laplace(sigma, len(todo), words)
        taken = _bernoulli_exp((np.abs(drawn) - sigma) ** 2, 2 * sigma * sigma, words)
        found[todo[taken]] = drawn[taken]
        todo = todo[~taken]
    return found


def _laplace(scale: int, size: int, words: Words) -> Ints:
    """(size,) whole numbers, each y with a chance in proportion to exp(-|y| / scale)."""
    found, todo = np.zeros(size, np.int64), np.arange(size)
    while len(todo):
        low = _uniform(scale, len(todo), words)
        taken = _bernoulli_exp(low, scale, words)
        todo_now, low = todo[taken], low[taken]
        length = low + scale * _geometric(len(low), words)
        minus = _uniform(2, len(length), words) == 1
        once = ~(minus & (length == 0))  # zero has one sign only
        found[todo_now[once]] = np.where(minus, -length, length)[once]
        todo = np.concatenate([todo[~taken], todo_now[~once]])
    return found


def _geometric(size: int, words: Words) -> Ints:
    """(size,) how often in a row chances of exp(-1) come true."""
    found, there = np.zeros(size, np.int64), np.arange(size)
    while len(there):
        there = there[_bernoulli_exp(np.ones(len(there), np.int64), 1, words)]
        found[there] += 1
    return found


def _bernoulli_exp(over: Ints, under: int, words: Words) -> Flags:
    """(n,) true with the chance exp(-over / under): as often exp(-1) as that has wholes, and once the rest."""
    true = _bernoulli_exp_below_one(over % under, under, words)
    wholes = over // under
    there, times = np.flatnonzero(true & (wholes > 0)), 0
    while len(there):
        holds = _bernoulli_exp_below_one(np.ones(len(there), np.int64), 1, words)
        true[there[~holds]] = False
        times += 1
        there = there[holds & (wholes[there] > times)]
    return true


def _bernoulli_exp_below_one(over: Ints, under: int, words: Words) -> Flags:
    """The same for ratios of at most 1: the sum of their powers over factorials, with signs in turn."""
    odd, there, times = np.zeros(len(over), np.bool_), np.arange(len(over)), 1
    while len(there):
        again = _uniform(under * times, len(there), words) < over[there]
        odd[there[~again]] = times % 2 == 1
        there, times = there[again], times + 1
    return odd


def _uniform(below: int, size: int, words: Words) -> Ints:
    """(size,) whole numbers from 0 up to, but without, `below`, each as likely as any other."""
    drawn, last = words(size).copy(), np.uint64(2**64 // below * below - 1)
    while (over := drawn > last).any():  # else the first numbers would be likelier than the last
        drawn[over] = words(int(over.sum()))
    return (drawn % np.uint64(below)).astype(np.int64)
