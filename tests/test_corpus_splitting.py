"""Groups and the split, against slow and obvious ways to the same answers."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.corpus.keys import LEFT, RIGHT, hash_key
from nmt.corpus.splitting import connected_groups, first_of_equal, random_leak, split_groups
from nmt.errors import DataError

edges = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40)


def keys(pairs):
    left = np.array([hash_key(LEFT, str(a)) for a, _ in pairs], dtype=np.uint64)
    right = np.array([hash_key(RIGHT, str(b)) for _, b in pairs], dtype=np.uint64)
    return left, right


def walked_groups(pairs):
    """Groups by walking from row to row."""
    group, found = {}, 0
    for start in range(len(pairs)):
        if start in group:
            continue
        waiting = [start]
        while waiting:
            row = waiting.pop()
            if row not in group:
                group[row] = found
                waiting += [o for o, (a, b) in enumerate(pairs) if a == pairs[row][0] or b == pairs[row][1]]
        found += 1
    return [group[row] for row in range(len(pairs))]


@given(edges)
def test_groups_are_those_that_a_walk_from_row_to_row_finds(pairs):
    found, walked = connected_groups(*keys(pairs)).tolist(), walked_groups(pairs)
    assert len(set(zip(found, walked, strict=True))) == len(set(found)) == len(set(walked))
    assert set(found) == set(range(len(set(found))))


def test_a_long_chain_is_one_group():
    pairs = [(n // 2, (n + 1) // 2) for n in range(20_000)]
    np.random.default_rng(0).shuffle(pairs)
    assert set(connected_groups(*keys(pairs)).tolist()) == {0}


@given(st.lists(st.integers(0, 12), max_size=40))
def test_the_first_of_equal_keys_is_the_first_in_the_file(keys):
    assert first_of_equal(np.array(keys, dtype=np.uint64)).tolist() == [
        key not in keys[:n] for n, key in enumerate(keys)
    ]


def corpus(n=400):
    """Pairs of which a third share a sentence with others."""
    return list(dict.fromkeys((k % 300, k // 2 if k % 3 == 0 else k) for k in range(n)))


def test_a_held_out_group_is_held_out_as_a_whole_and_gives_one_row():
    left, right = keys(corpus())
    split = split_groups(left, right, test_size=20, dev_size=10, seed=1)
    assert (len(split.test), len(split.dev)) == (20, 10)
    rows = [*split.test, *split.dev]
    assert max(Counter(split.groups[rows].tolist()).values()) == 1
    assert set(split.groups[split.held]) == set(split.groups[rows])
    assert not np.isin(left[split.held], left[~split.held]).any()
    assert not np.isin(right[split.held], right[~split.held]).any()


def test_the_split_depends_on_the_text_and_the_seed_and_not_on_the_order_of_lines():
    pairs = corpus()
    shuffled = [pairs[k] for k in np.random.default_rng(3).permutation(len(pairs))]

    def test_rows(rows, seed):
        split = split_groups(*keys(rows), test_size=15, dev_size=15, seed=seed)
        return [rows[k] for k in split.test], [rows[k] for k in split.dev]

    assert test_rows(pairs, 1) == test_rows(shuffled, 1)
    assert test_rows(pairs, 1) != test_rows(pairs, 2)


def test_a_set_of_over_a_tenth_of_the_groups_is_refused_with_a_size_that_works():
    left, right = keys([(n, n) for n in range(55)])
    with pytest.raises(DataError, match=r"test_size is 6, .* 55 groups .*; 5 would work"):
        split_groups(left, right, test_size=6, dev_size=1, seed=1)
    split_groups(left, right, test_size=5, dev_size=5, seed=1)
    with pytest.raises(DataError, match="too small"):
        split_groups(left[:5], right[:5], test_size=1, dev_size=1, seed=1)


def test_the_leak_of_a_random_split_is_known_where_all_rows_are_alike():
    left, right = keys([(n, 0) for n in range(50)])
    assert random_leak(left, right, 10) == (0.0, 1.0, 1.0)
    left, right = keys([(n, n) for n in range(50)])
    assert random_leak(left, right, 10) == (0.0, 0.0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=7), st.integers(0, 6))
def test_the_leak_of_a_random_split_is_the_mean_over_all_draws(pairs, size):
    size = min(size, len(pairs) - 1)
    shares = []
    for drawn in itertools.combinations(range(len(pairs)), size):
        left, right = ({pairs[row][side] for row in range(len(pairs)) if row not in drawn} for side in (0, 1))
        found = [(pairs[row][0] in left, pairs[row][1] in right) for row in drawn]
        shares += [(a, b, a or b) for a, b in found]
    expected = np.mean(shares, axis=0) if shares else (0.0, 0.0, 0.0)
    assert random_leak(*keys(pairs), size) == pytest.approx(tuple(expected))


def test_of_rows_with_equal_keys_the_first_in_the_file_is_drawn():
    left, right = keys([(n // 2, n // 2) for n in range(200)])
    split = split_groups(left, right, test_size=10, dev_size=10, seed=1)
    assert all(row % 2 == 0 for row in [*split.test, *split.dev])
    assert split.held.sum() == 40
