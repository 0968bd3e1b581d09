"""Updates and micro-batches: pure functions, so properties over any lengths."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nmt.batching import area, collate, cut, padding_share, plan_updates, share
from nmt.symbols import BOS, EOS, PAD
from nmt.text import read_lines

pairs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=200)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array(pairs, dtype=np.int64).T)


@given(pairs, st.integers(1, 400), st.integers(0, 9), st.integers(0, 3))
def test_every_pair_is_in_exactly_one_update_within_its_tokens(pairs, batch_tokens, seed, epoch):
    src, tgt = columns(pairs)
    updates = plan_updates(src, tgt, batch_tokens, seed, epoch)
    assert sorted(np.concatenate(updates)) == list(range(len(pairs)))
    for update in updates:
        assert len(update) == 1 or max(src[update].sum(), tgt[update].sum()) <= batch_tokens


@given(pairs, st.integers(1, 400))
def test_the_plan_is_a_function_of_seed_and_epoch_alone(pairs, batch_tokens):
    src, tgt = columns(pairs)
    first = plan_updates(src, tgt, batch_tokens, 1, 2)
    assert all(np.array_equal(a, b) for a, b in zip(first, plan_updates(src, tgt, batch_tokens, 1, 2), strict=True))


def test_another_epoch_has_other_updates():
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(1, 30, (2, 500))
    plans = [[tuple(u) for u in plan_updates(src, tgt, 200, 1, epoch)] for epoch in (0, 1)]
    assert plans[0] != plans[1]
    assert {frozenset(u) for u in plans[0]} != {frozenset(u) for u in plans[1]}


@given(pairs, st.integers(20, 400), st.integers(1, 8))
def test_cutting_an_update_keeps_its_pairs_and_the_area(pairs, limit, processes):
    src, tgt = columns(pairs)
    parts = cut(np.arange(len(pairs)), src, tgt, limit, processes)
    assert sorted(np.concatenate(parts)) == list(range(len(pairs)))
    assert all(len(part) == 1 or area(src[part], tgt[part]) <= limit for part in parts)


@given(st.integers(0, 200), st.integers(1, 8))
def test_every_process_takes_equally_many_micro_batches_and_none_is_lost(count, size):
    parts = [np.array([i]) for i in range(count or 1)]
    shares = [share(parts, rank, size) for rank in range(size)]
    assert len({len(one) for one in shares}) == 1
    taken = [number for one in shares for number, _ in one if number >= 0]
    assert sorted(taken) == list(range(len(parts)))
    assert all(np.array_equal(part, parts[max(number, 0)]) for one in shares for number, part in one)


def test_work_is_shared_evenly_between_processes():
    rng = np.random.default_rng(0)
    tgt = rng.integers(2, 30, 5000)
    src = np.maximum(2, tgt + rng.integers(-3, 6, 5000))
    worst = []
    for update in plan_updates(src, tgt, 1536, 1, 0)[:-1]:
        loads = [
            sum(
                int((src[p] + tgt[p]).sum())
                for number, p in share(cut(update, src, tgt, 768, 2), rank, 2)
                if number >= 0
            )
            for rank in range(2)
        ]
        worst.append(max(loads) / (sum(loads) / 2))
    assert np.mean(worst) < 1.05


def test_padding_is_small_on_the_real_corpus(foreign_data):
    lengths = []
    for language in ("en", "zhs"):
        lines = read_lines(foreign_data / "cmn" / "split" / f"train.{language}")
        lengths.append(np.array([len(line.split()) + 2 if language == "en" else len(line) + 1 for line in lines]))
    src, tgt = lengths
    updates = plan_updates(src, tgt, 4096, 1, 0)
    parts = [part for update in updates for part in cut(update, src, tgt, 1024, 1)]
    assert padding_share(parts, src, tgt) < 0.05


def test_a_batch_shifts_the_target_and_pads_with_pad():
    rows = [np.array([7, 8, 9, EOS]), np.array([5, EOS])]
    batch = collate(rows, [np.array([4, 5, EOS]), np.array([6, EOS])])
    assert batch.src.tolist() == [[7, 8, 9, EOS], [5, EOS, PAD, PAD]]
    assert batch.tgt_in.tolist() == [[BOS, 4, 5], [BOS, 6, PAD]]
    assert batch.tgt_out.tolist() == [[4, 5, EOS], [6, EOS, PAD]]
    assert batch.tgt_out.flatten()[batch.real].tolist() == [4, 5, EOS, 6, EOS]
    assert (batch.tokens, batch.slots) == (11, 14)
    assert torch.equal(batch.tgt_in == PAD, batch.tgt_out == PAD)


def test_a_pair_longer_than_the_limit_is_alone():
    src, tgt = np.array([3, 900, 3, 3]), np.array([3, 3, 3, 3])
    assert [1] in [part.tolist() for part in cut(np.arange(4), src, tgt, 100, 1)]
    assert [1] in [update.tolist() for update in plan_updates(src, tgt, 100, 1, 0)]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_the_same_pairs_make_an_update_on_any_number_of_processes(processes):
    rng = np.random.default_rng(3)
    src, tgt = rng.integers(1, 30, (2, 300))
    for update in plan_updates(src, tgt, 300, 1, 0):
        parts = cut(update, src, tgt, 300 // processes + 30, processes)
        assert sorted(np.concatenate(parts)) == sorted(update)
