"""How sure a score is: the bootstrap of one system, and the paired test of two (Riezler and Maxwell 2005).

Both work on the statistics that a metric sums over the sentences of a test set (matches, lengths, edits): a matrix
with a row for each sentence. `score` makes a score of such a sum, and is defined for every sum, all zeros included.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Stats = npt.NDArray[np.float64]
ScoreOf = Callable[[Stats], float]

FEWEST = 40
"""Resamplings that a 95 % interval needs: one of them lies beyond each of its ends."""


def bootstrap(stats: Stats, score: ScoreOf, resamplings: int, seed: int) -> npt.NDArray[np.float64]:
    """The score of each resampling: as many sentences, drawn with replacement, as the test set has.

    The draws are those of sacreBLEU with the same seed, so that intervals agree with its own.
    """
    rng, sentences = np.random.default_rng(seed), len(stats)
    return np.array([score(stats[rng.choice(sentences, sentences)].sum(0)) for _ in range(resamplings)])


def interval(scores: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The mean, and half the width of the middle 95 %."""
    outside, ordered = len(scores) // 40, np.sort(scores)
    return float(scores.mean()), float(ordered[-1 - outside] - ordered[outside]) / 2


def p_value(one: Stats, other: Stats, score: ScoreOf, trials: int, seed: int) -> float:
    """How probable a difference at least as large as that of these two systems is if they are equally good.

    Approximate randomisation, two-sided: if they are, the outputs for each sentence might as well be exchanged. 1 for
    systems that don't differ, never 0.
    """
    flips = np.random.default_rng(seed).integers(2, size=(trials, len(one)), dtype=bool)
    total, others, difference = one.sum(0), other.sum(0), other - one
    observed = abs(score(total) - score(others))
    # Equal but for the order of the sum is as large.
    least = observed - 1e-9 * max(1.0, observed)
    moved = (flip @ difference for flip in flips)
    found = sum(abs(score(total + change) - score(others - change)) >= least for change in moved)
    return (found + 1) / (trials + 1)
