"""Updates and micro-batches: pure functions, so properties over any lengths."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nmt import batching
from nmt.batching import (
    BESIDES,
    FEWEST,
    Batch,
    area,
    batches,
    by_length,
    collate,
    cut,
    padding_share,
    plan_updates,
    share,
)
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


def test_another_epoch_or_seed_has_other_updates():
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(1, 30, (2, 500))
    plans = [[tuple(u) for u in plan_updates(src, tgt, 200, seed, epoch)] for seed, epoch in ((1, 2), (1, 0), (2, 1))]
    assert len(set(map(tuple, plans))) == 3
    assert len({frozenset(map(frozenset, plan)) for plan in plans}) == 3


@given(pairs)
def test_the_order_is_by_source_length_and_the_target_length_rises_and_falls_in_turn(pairs):
    src, tgt = columns(pairs)
    expected = []
    for length in sorted(set(src)):
        same = [i for i in range(len(src)) if src[i] == length]  # sorted is stable: equal pairs keep their order
        expected += sorted(same, key=lambda i: tgt[i] if length % 2 else -tgt[i])
    assert by_length(src, tgt).tolist() == expected


@given(st.sets(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=150), st.integers(1, 300))
def test_an_update_takes_pairs_in_order_of_the_source_length_until_one_more_would_be_too_many(pairs, batch_tokens):
    src, tgt = columns(sorted(pairs))
    expected, update = [], []
    for i in by_length(src, tgt):
        if update and max(src[[*update, i]].sum(), tgt[[*update, i]].sum()) > batch_tokens:
            expected.append(tuple(update))
            update = []
        update.append(i)
    assert sorted(map(tuple, plan_updates(src, tgt, batch_tokens, 1, 0))) == sorted([*expected, tuple(update)])


def test_targets_of_an_update_have_many_lengths_and_updates_come_in_no_order_of_length():
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(1, 40, (2, 8000))  # worst case: the sides know nothing of each other
    updates = plan_updates(src, tgt, 1000, 1, 0)
    assert np.mean([np.ptp(src[update]) for update in updates]) < 2
    assert np.mean([np.ptp(tgt[update]) for update in updates]) > 5
    lengths = [src[update].mean() for update in updates]
    assert abs(np.corrcoef(lengths, np.arange(len(lengths)))[0, 1]) < 0.3


@pytest.mark.parametrize("count", [63, 64, 65, 300])
def test_a_corpus_of_several_pools_has_each_pair_once_and_every_length_in_each_pool(monkeypatch, count):
    monkeypatch.setattr(batching, "POOL", 64)
    src = np.arange(count) + 1
    updates = plan_updates(src, src, 10**9, 1, 0)  # one update for each pool
    assert sorted(map(len, updates), reverse=True) == [64] * (count // 64) + [count % 64] * (count % 64 > 0)
    assert sorted(np.concatenate(updates)) == list(range(count))
    if count == 300:
        assert all(src[update].min() < 60 and src[update].max() > 240 for update in updates)


@given(pairs, st.integers(20, 400), st.integers(1, 8))
def test_cutting_an_update_keeps_its_pairs_and_the_area(pairs, limit, processes):
    src, tgt = columns(pairs)
    parts = cut(np.arange(len(pairs)), src, tgt, limit, processes)
    assert sorted(np.concatenate(parts)) == list(range(len(pairs)))
    assert all(len(part) == 1 or area(src[part], tgt[part]) <= limit for part in parts)


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 20), st.integers(1, 8))
def test_an_update_of_equal_pairs_is_cut_as_little_as_the_limit_and_the_processes_allow(pairs, length, fit, processes):
    lengths = np.full(pairs, length)
    parts = cut(np.arange(pairs), lengths, lengths, fit * length, processes)
    rounds = math.ceil(math.ceil(pairs / fit) / processes)
    assert len(parts) == min(rounds * processes, pairs)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(100, 200), st.integers(0, 10**6), st.integers(1, 8))
def test_the_parts_of_an_update_have_equally_many_tokens_and_as_many_go_to_each_process(pairs, seed, processes):
    src, tgt = np.random.default_rng(seed).integers(1, 10, (2, pairs))
    update = np.arange(pairs)[::-1]
    parts = cut(update, src, tgt, 150, processes)
    assert len(parts) % processes == 0
    tokens = [int((src[part] + tgt[part]).sum()) for part in parts]
    assert max(tokens) - min(tokens) <= 2 * 18, "each end is at most one pair of 18 tokens beyond its mark"
    assert np.array_equal(np.concatenate(parts), update[by_length(src[update], tgt[update])])


def test_a_batch_has_the_area_of_its_longest_sentence_on_the_larger_side():
    assert area(np.array([3, 7]), np.array([2, 9])) == 18
    assert area(np.array([3, 8]), np.array([2, 1])) == 16


def test_padding_is_what_the_longer_sentences_leave_empty_on_both_sides():
    src, tgt = np.array([3, 1, 5]), np.array([2, 2, 4])
    assert padding_share([np.array([0, 1]), np.array([2])], src, tgt) == pytest.approx(2 / 19)
    assert padding_share([np.array([0, 1, 2])], src, tgt) == pytest.approx(1 - 17 / 27)
    assert padding_share([], src, tgt) == 0


@given(st.integers(0, 200), st.integers(1, 8))
def test_every_process_takes_equally_many_micro_batches_and_none_is_lost(count, size):
    parts = [np.array([i]) for i in range(count or 1)]
    shares = [share(parts, rank, size) for rank in range(size)]
    assert len({len(one) for one in shares}) == 1
    assert {number for one in shares for number, _ in one if number < 0} <= {-1}
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


def test_a_pair_longer_than_the_limit_leaves_the_others_together():
    src = np.array([3] * 100 + [900])
    assert sorted(map(len, cut(np.arange(101), src, src, 500, 1))) == [1, 100]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_the_same_pairs_make_an_update_on_any_number_of_processes(processes):
    rng = np.random.default_rng(3)
    src, tgt = rng.integers(1, 30, (2, 300))
    for update in plan_updates(src, tgt, 300, 1, 0):
        parts = cut(update, src, tgt, 300 // processes + 30, processes)
        assert sorted(np.concatenate(parts)) == sorted(update)


def test_a_batch_goes_to_a_device_from_pinned_memory_without_waiting():
    class Ids:
        def __init__(self, name, pinned=False):
            self.name, self.pinned = name, pinned

        def pin_memory(self):
            return Ids(self.name, pinned=True)

        def to(self, device, non_blocking=False):
            return self.name, self.pinned, device, non_blocking

    batch, gpu = Batch(*map(Ids, ("src", "tgt_in", "tgt_out", "real")), 7, 9), torch.device("cuda", 1)
    moved = batch.to(gpu)
    for name in ("src", "tgt_in", "tgt_out", "real"):
        assert getattr(moved, name) == (name, True, gpu, True)
    assert (moved.tokens, moved.slots) == (7, 9)
    assert batch.to(torch.device("cpu")) is batch


# ── batches of translation ──────────────────────────────────────────────────────────────────────────────────────────


def plain_batches(lengths: list[int], rows: int, most: int, limit: float) -> list[list[int]]:
    """One place after another, the longest first, into the last batch while it has neither `most` nor `limit`."""
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if found:
            count, longest = len(found[-1]) + 1, max(1, lengths[found[-1][0]])
            if count * longest * rows <= most and count * (longest + BESIDES) <= limit:
                found[-1].append(place)
                continue
        found.append([place])
    return found


@given(
    lengths=st.lists(st.integers(0, 40), max_size=120),
    rows=st.integers(1, 6),
    most=st.integers(1, 3000),
    together=st.integers(1, 4),
)
def test_translation_has_as_few_batches_as_fit_and_as_equal_as_they_can_be(lengths, rows, most, together):
    found = batches(lengths, rows, most, together)
    needed = len(plain_batches(lengths, rows, most, math.inf))
    wanted = max(needed, min(math.ceil(needed / together) * together, len(lengths) // FEWEST))
    # The slow way to equal batches: the first bound on the work of one that leaves no more than these.
    limits = range(sum(lengths) + BESIDES * len(lengths) + most + 1)
    expected = next(them for limit in limits if len(them := plain_batches(lengths, rows, most, limit)) <= wanted)
    assert found == expected
    assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) * rows <= most


def test_the_batches_of_translation_are_a_multiple_of_the_processes_where_they_stay_large():
    assert len(batches([5] * 200, 1, 10**6)) == 1
    assert [len(batch) for batch in batches([5] * 200, 1, 10**6, 4)] == [50] * 4
    assert len(batches([5] * 3 * FEWEST, 1, 10**6, 4)) == 3, "no batch becomes smaller than that for it"
    assert len(batches([5] * 10, 1, 5, 4)) == 10
    assert batches([], 4, 100) == []
    assert len(batches([1] * 10, 1, 10)) == 1
    assert batches([0, 0], 1, 1) == [[0], [1]], "an empty line takes a place, too"
