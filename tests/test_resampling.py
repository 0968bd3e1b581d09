"""resampling: the bootstrap has the spread that theory gives it, and the paired test is wrong as often as it says."""

import math
from itertools import product

import numpy as np
import pytest

from nmt.evaluation.resampling import bootstrap, interval, p_value


def mean(total):
    """The mean of 100 sentences, whose statistics are their scores."""
    return float(total[0]) / 100


def test_the_bootstrap_of_a_mean_has_its_standard_error():
    values = np.random.default_rng(1).normal(30, 10, (100, 1))
    scores = bootstrap(values, mean, 4000, seed=2)
    error = float(values.std()) / math.sqrt(100)
    assert scores.mean() == pytest.approx(values.mean(), abs=5 * error / math.sqrt(4000))
    assert scores.std() == pytest.approx(error, rel=0.05)
    assert interval(scores)[1] == pytest.approx(1.96 * error, rel=0.06)


def test_the_draws_are_those_of_one_matrix_of_them():
    # sacreBLEU draws all resamplings at once.
    values = np.arange(7.0)[:, None] ** 2
    at_once = np.random.default_rng(5).choice(7, size=(50, 7))
    assert np.array_equal(bootstrap(values, lambda total: float(total[0]), 50, seed=5), values[at_once].sum((1, 2)))


def test_an_interval_leaves_out_a_fortieth_at_either_end():
    assert interval(np.arange(1000.0)[::-1]) == (499.5, (974 - 25) / 2)
    assert interval(np.full(40, 7.0)) == (7.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_p_is_the_share_of_all_exchanges_with_so_large_a_difference(seed):
    one, other = np.random.default_rng(seed).integers(0, 9, (2, 8, 3)).astype(float)

    def ratio(total):
        return float(total[0] * total[1]) / float(1 + total[2])  # Not additive, as BLEU is not.

    observed, as_large = abs(ratio(one.sum(0)) - ratio(other.sum(0))), 0
    for exchanged in product([False, True], repeat=8):
        mask = np.array(exchanged)[:, None]
        a, b = np.where(mask, other, one).sum(0), np.where(mask, one, other).sum(0)
        as_large += abs(ratio(a) - ratio(b)) >= observed - 1e-9
    exact = as_large / 2**8
    found = p_value(one, other, ratio, 4000, seed=1)
    assert found == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 4000) + 1 / 4000)
    assert p_value(other, one, ratio, 4000, seed=1) == found


def test_equally_good_systems_are_told_apart_as_often_as_p_says():
    rng, found = np.random.default_rng(0), []
    for trial in range(400):
        sentence = rng.normal(50, 20, (100, 1))  # Hard for both or easy for both.
        one, other = (sentence + rng.normal(0, 10, (100, 1)) for _ in range(2))
        found.append(p_value(one, other, mean, 100, seed=trial))
    for level in (0.05, 0.1, 0.5):
        share = sum(p <= level for p in found) / len(found)
        assert share == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / len(found)))
    assert max(found) > 0.95


def test_a_clear_difference_has_the_least_p_and_none_has_the_largest():
    rng = np.random.default_rng(3)
    one = rng.normal(50, 20, (100, 1))
    assert p_value(one, one + 5 + rng.normal(0, 5, (100, 1)), mean, 999, seed=1) == 1 / 1000
    assert p_value(one, one, mean, 999, seed=1) == 1
