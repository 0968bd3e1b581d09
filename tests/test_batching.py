"""Updates and micro-batches: pure functions, so properties over any lengths."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nmt.data import batching
from nmt.data.batching import (
    MIN_BATCH,
    OVERHEAD,
    PAIR_OVERHEAD,
    Batch,
    batches,
    collate,
    count_updates,
    fill,
    length_order,
    padded_size,
    padding_share,
    plan_epoch,
    shard,
    slots,
    split_micro_batches,
)
from nmt.io import read_lines
from nmt.special_tokens import BOS, EOS, PAD

pairs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=200)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array(pairs, dtype=np.int64).T)


def planned(pairs_or_columns, batch_tokens, buckets=1, seed=1, epoch=0, first=0):
    return list(itertools.chain(*plan_epoch(*pairs_or_columns, batch_tokens, buckets, seed, epoch, first)))


@given(pairs, st.integers(1, 400), st.integers(1, 10), st.integers(0, 9), st.integers(0, 3))
def test_every_pair_is_in_exactly_one_update_within_its_tokens(pairs, batch_tokens, buckets, seed, epoch):
    src, tgt = columns(pairs)
    updates = planned((src, tgt), batch_tokens, buckets, seed, epoch)
    assert sorted(np.concatenate(updates)) == list(range(len(pairs)))
    for update in updates:
        assert len(update) == 1 or max(src[update].sum(), tgt[update].sum()) <= batch_tokens


@given(pairs, st.integers(1, 400), st.integers(1, 5))
def test_the_plan_is_a_function_of_seed_and_epoch_alone(pairs, batch_tokens, buckets):
    first, again = (planned(columns(pairs), batch_tokens, buckets, 1, 2) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("buckets", [1, 4])
def test_another_epoch_or_seed_has_other_updates(buckets):
    lengths = np.random.default_rng(0).integers(1, 30, (2, 500))
    chances = ((1, 2), (1, 0), (2, 1))
    plans = [[tuple(u) for u in planned(lengths, 200, buckets, seed, epoch)] for seed, epoch in chances]
    assert len(set(map(tuple, plans))) == 3
    assert len({frozenset(map(frozenset, plan)) for plan in plans}) == 3


@given(pairs)
def test_the_order_is_by_source_length_and_the_target_length_rises_and_falls_in_turn(pairs):
    src, tgt = columns(pairs)
    expected = []
    for length in sorted(set(src)):
        same = [i for i in range(len(src)) if src[i] == length]  # sorted is stable: equal pairs keep their order
        expected += sorted(same, key=lambda i: tgt[i] if length % 2 else -tgt[i])
    assert length_order(src, tgt).tolist() == expected


def plain_chunks(src, tgt, tokens):
    """Pairs in order of the source length, until one more would be too many."""
    chunks = []
    for i in length_order(src, tgt):
        if not chunks or max(src[[*chunks[-1], i]].sum(), tgt[[*chunks[-1], i]].sum()) > tokens:
            chunks.append([])
        chunks[-1].append(i)
    return list(map(tuple, chunks))


@given(st.sets(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=150), st.integers(1, 300))
def test_with_one_bucket_an_update_is_as_many_neighbours_as_fit(pairs, batch_tokens):
    src, tgt = columns(sorted(pairs))
    assert sorted(map(tuple, planned((src, tgt), batch_tokens))) == sorted(plain_chunks(src, tgt, batch_tokens))


@given(
    st.sets(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=150),
    st.integers(2, 8),
    st.integers(40, 90),
)
def test_an_update_takes_one_chunk_of_each_bucket(pairs, buckets, tokens):
    src, tgt = columns(sorted(pairs))
    chunks = plain_chunks(src, tgt, tokens)  # None is larger than its share, so none is alone in an update for that.
    count = math.ceil(len(chunks) / buckets)
    bucket_of = {chunk: number // count for number, chunk in enumerate(chunks)}
    chunk_of = {pair: chunk for chunk in chunks for pair in chunk}
    found = []
    for update in planned((src, tgt), tokens * buckets, buckets):
        taken = list(dict.fromkeys(chunk_of[pair] for pair in update))
        assert tuple(itertools.chain(*taken)) == tuple(update), "whole chunks, the shorter before the longer"
        numbers = [bucket_of[chunk] for chunk in taken]
        assert numbers in (list(range(max(bucket_of.values()) + 1)), list(range(max(bucket_of.values()))))
        found += taken
    assert sorted(found) == sorted(chunks)


def test_targets_of_an_update_have_many_lengths_and_updates_come_in_no_order_of_length():
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(1, 40, (2, 8000))  # worst case: the sides know nothing of each other
    updates = planned((src, tgt), 1000)
    assert np.mean([np.ptp(src[update]) for update in updates]) < 2
    assert np.mean([np.ptp(tgt[update]) for update in updates]) > 5
    lengths = [src[update].mean() for update in updates]
    assert abs(np.corrcoef(lengths, np.arange(len(lengths)))[0, 1]) < 0.3


def test_with_buckets_updates_are_alike_and_no_two_of_them_come_together_always():
    src, tgt = np.random.default_rng(0).integers(1, 40, (2, 8000))
    spread = {buckets: np.std([src[u].mean() for u in planned((src, tgt), 2000, buckets)]) for buckets in (1, 4, 8)}
    assert spread[4] < spread[1] / 4
    assert spread[8] < spread[4]
    updates = planned((src, tgt), 2000, 8)
    place = {pair: number for number, update in enumerate(updates) for pair in update}
    for bucket in np.array_split(length_order(src, tgt), 8):
        numbers = [place[pair] for pair in bucket]
        assert abs(np.corrcoef(numbers, np.arange(len(numbers)))[0, 1]) < 0.3, "within a bucket, chunks come by chance"


@pytest.mark.parametrize(("batch_tokens", "buckets"), [(100, 1), (511, 1), (512, 2), (1024, 4), (25_000, 8)])
def test_how_many_buckets_there_are_by_default_depends_on_the_size_of_an_update(batch_tokens, buckets):
    lengths = np.random.default_rng(0).integers(1, 40, (2, 3000))
    default, chosen = planned(lengths, batch_tokens, 0), planned(lengths, batch_tokens, buckets)
    assert list(map(list, default)) == list(map(list, chosen))


def test_long_pairs_do_not_make_an_update_larger_than_it_may_be():
    src = np.array([300] * 40 + [3] * 400)
    updates = planned((src, src), 1000, 4)  # A chunk may have 250 tokens.
    assert max(src[update].sum() for update in updates) <= 1000
    assert sorted(np.concatenate(updates)) == list(range(440))


@pytest.mark.parametrize("count", [63, 64, 65, 300])
def test_a_corpus_of_several_windows_has_each_pair_once_and_every_length_in_each_window(monkeypatch, count):
    monkeypatch.setattr(batching, "WINDOW", 64)
    src = np.arange(count) + 1
    plans = list(plan_epoch(src, src, 10**9, 1, 1, 0))  # one update for each window
    assert [list(map(len, plan)) for plan in plans] == [[64]] * (count // 64) + [[count % 64]] * (count % 64 > 0)
    updates = list(itertools.chain(*plans))
    assert sorted(np.concatenate(updates)) == list(range(count))
    if count == 300:
        assert all(src[update].min() < 60 and src[update].max() > 240 for update in updates)


def test_a_window_is_planned_alike_from_wherever_the_plan_begins_and_only_when_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(batching, "WINDOW", 64)
    lengths = np.random.default_rng(0).integers(1, 40, (2, 300))
    windows, plan = [], batching.plan_updates
    monkeypatch.setattr(batching, "plan_updates", lambda *a: windows.append(a[0]) or plan(*a))
    plans = list(plan_epoch(*lengths, 200, 4, 1, 0))
    assert len(windows) == 5
    later = next(plan_epoch(*lengths, 200, 4, 1, 0, first=3))
    assert [u.tolist() for u in later] == [u.tolist() for u in plans[3]]
    assert len(windows) == 6
    assert np.array_equal(windows[3], windows[5])
    orders = {tuple(tuple(np.argsort(np.argsort(u))) for u in plan) for plan in plans[:4]}
    assert len(orders) == 4, "each window has chances of its own"


def test_the_updates_of_an_epoch_are_counted_in_its_first_window(monkeypatch):
    src, tgt = np.random.default_rng(0).integers(1, 40, (2, 1000))
    assert count_updates(src, tgt, 300, 4, 1) == len(planned((src, tgt), 300, 4))
    assert count_updates(src[:1], tgt[:1], 300, 4, 1) == 1
    assert count_updates(src[:2], tgt[:2], 1, 1, 1) == 2
    monkeypatch.setattr(batching, "WINDOW", 200)
    assert count_updates(src, tgt, 300, 4, 1) == pytest.approx(len(planned((src, tgt), 300, 4)), rel=0.05)


@given(pairs, st.integers(20, 400), st.integers(1, 8), st.integers(0, 500))
def test_cutting_an_update_keeps_its_pairs_in_order_and_the_area(pairs, limit, processes, overhead):
    src, tgt = columns(pairs)
    update = np.arange(len(pairs))[::-1]
    parts = split_micro_batches(update, src, tgt, limit, processes, overhead)
    assert np.array_equal(np.concatenate(parts), update[length_order(src[update], tgt[update])])
    assert all(len(part) == 1 or padded_size(src[part], tgt[part]) <= limit for part in parts)


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 20), st.integers(1, 8))
def test_an_update_of_equal_pairs_is_cut_as_little_as_the_limit_and_the_processes_allow(pairs, length, fit, processes):
    lengths = np.full(pairs, length)
    parts = split_micro_batches(np.arange(pairs), lengths, lengths, fit * length, processes, 10**6)
    rounds = math.ceil(math.ceil(pairs / fit) / processes)
    assert len(parts) <= min(rounds * processes, pairs)
    assert max(map(len, parts)) == math.ceil(pairs / (rounds * processes)), "no process has more than it must"


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=9),
    st.integers(1, 3),
    st.sampled_from([0, 5, 30, 200]),
)
def test_no_other_cut_into_so_many_parts_has_a_much_smaller_largest_part(pairs, processes, overhead):
    src, tgt = columns(pairs)
    order = length_order(src, tgt)
    parts = split_micro_batches(np.arange(len(pairs)), src, tgt, 10**6, processes, overhead)
    largest = max(slots(src[part], tgt[part]) for part in parts)
    for ends in itertools.combinations(range(1, len(order)), len(parts) - 1):
        other = np.split(order, ends)
        assert largest <= max(slots(src[part], tgt[part]) for part in other) * 1.025


def test_an_update_of_two_lengths_is_cut_between_them_if_padding_costs_more_than_another_micro_batch():
    src = np.array([5] * 20 + [50] * 20)
    for overhead, expected in ((0, 2), (500, 2), (5000, 1)):
        parts = split_micro_batches(np.arange(40), src, src, 10**6, 1, overhead)
        assert len(parts) <= max(2, expected), overhead
        assert (len(parts) == 1) == (expected == 1), overhead


@given(pairs, st.integers(20, 400))
def test_batches_are_filled_with_neighbours_as_far_as_the_limit_allows(pairs, limit):
    src, tgt = columns(pairs)
    order, expected = length_order(src, tgt), []
    for i in order:
        if not expected or padded_size(src[[*expected[-1], i]], tgt[[*expected[-1], i]]) > limit:
            expected.append([])
        expected[-1].append(i)
    assert [part.tolist() for part in fill(order, src, tgt, limit)] == expected


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_processes_that_share_an_update_are_done_at_about_the_same_time(processes):
    spread = []
    for seed in range(20):
        src, tgt = np.random.default_rng(seed).integers(1, 30, (2, 150))
        parts = split_micro_batches(np.arange(150), src, tgt, 1000, processes, 64)
        loads = [sum(slots(src[p], tgt[p]) + 64 for p in parts[rank::processes]) for rank in range(processes)]
        spread.append(max(loads) / np.mean(loads))
    assert np.mean(spread) < 1.12


def test_a_batch_has_the_area_of_its_longest_sentence_on_the_larger_side():
    assert padded_size(np.array([3, 7]), np.array([2, 9])) == 18
    assert padded_size(np.array([3, 8]), np.array([2, 1])) == 16


def test_padding_is_what_the_longer_sentences_leave_empty_on_both_sides():
    src, tgt = np.array([3, 1, 5]), np.array([2, 2, 4])
    assert padding_share([np.array([0, 1]), np.array([2])], src, tgt) == pytest.approx(2 / 19)
    assert padding_share([np.array([0, 1, 2])], src, tgt) == pytest.approx(1 - 17 / 27)
    assert padding_share([], src, tgt) == 0


@given(st.integers(0, 200), st.integers(1, 8))
def test_every_process_takes_equally_many_micro_batches_and_none_is_lost(count, size):
    parts = [np.array([i]) for i in range(count or 1)]
    shares = [shard(parts, rank, size) for rank in range(size)]
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
    for update in planned((src, tgt), 1536, 4):
        parts = split_micro_batches(update, src, tgt, 768, 2, 64)
        loads = [sum(slots(src[p], tgt[p]) for number, p in shard(parts, rank, 2) if number >= 0) for rank in range(2)]
        worst.append(max(loads) / (sum(loads) / 2))
    assert np.mean(worst) < 1.05


def test_padding_is_small_on_the_real_corpus(foreign_data):
    lengths = []
    for language in ("en", "zhs"):
        lines = read_lines(foreign_data / "cmn" / "split" / f"train.{language}")
        lengths.append(np.array([len(line.split()) + 2 if language == "en" else len(line) + 1 for line in lines]))
    src, tgt = lengths
    for buckets, processes, most in ((1, 1, 0.02), (4, 1, 0.1), (4, 2, 0.05), (4, 4, 0.03)):
        updates = planned((src, tgt), 1024, buckets)
        parts = [
            part
            for update in updates
            for part in split_micro_batches(update, src, tgt, 1024, processes, OVERHEAD["cpu"])
        ]
        assert padding_share(parts, src, tgt) < most, (buckets, processes)


def test_a_batch_shifts_the_target_and_pads_with_pad():
    rows = [[7, 8, 9, EOS], [5, EOS, PAD, PAD]]
    batch = collate(np.array(rows), np.array([[4, 5, EOS], [6, EOS, PAD]]))
    assert batch.src.tolist() == [[7, 8, 9, EOS], [5, EOS, PAD, PAD]]
    assert batch.tgt_in.tolist() == [[BOS, 4, 5], [BOS, 6, PAD]]
    assert batch.tgt_out.tolist() == [[4, 5, EOS], [6, EOS, PAD]]
    assert batch.tgt_out.flatten()[batch.real].tolist() == [4, 5, EOS, 6, EOS]
    assert (batch.tokens, batch.slots) == (11, 14)
    assert torch.equal(batch.tgt_in == PAD, batch.tgt_out == PAD)


def test_a_pair_longer_than_the_limit_is_alone():
    src, tgt = np.array([3, 900, 3, 3]), np.array([3, 3, 3, 3])
    assert [1] in [part.tolist() for part in split_micro_batches(np.arange(4), src, tgt, 100, 1, 0)]
    assert [1] in [update.tolist() for update in planned((src, tgt), 100, 2)]


def test_a_pair_longer_than_the_limit_leaves_the_others_together():
    src = np.array([3] * 100 + [900])
    assert sorted(map(len, split_micro_batches(np.arange(101), src, src, 500, 1, 10**4))) == [1, 100]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_the_same_pairs_make_an_update_on_any_number_of_processes(processes):
    rng = np.random.default_rng(3)
    src, tgt = rng.integers(1, 30, (2, 300))
    for update in planned((src, tgt), 300, 2):
        parts = split_micro_batches(update, src, tgt, 300 // processes + 30, processes, 20)
        assert sorted(np.concatenate(parts)) == sorted(update)


def test_a_batch_goes_to_a_device_from_memory_pinned_for_it_without_waiting(monkeypatch):
    current = [0]  # Which is that of each new thread.

    @contextlib.contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)

    class Ids:
        def __init__(self, name, pinned=None):
            self.name, self.pinned = name, pinned

        def pin_memory(self):
            return Ids(self.name, pinned=current[-1])

        def to(self, device, non_blocking=False):
            return self.name, self.pinned == 1, device, non_blocking

    batch, gpu = Batch(*map(Ids, ("src", "tgt_in", "tgt_out", "real")), 7, 9), torch.device("cuda", 1)
    moved = batch.pinned(gpu).to(gpu)
    assert current == [0]
    for name in ("src", "tgt_in", "tgt_out", "real"):
        assert getattr(moved, name) == (name, True, gpu, True)
    assert (moved.tokens, moved.slots) == (7, 9)
    cpu = torch.device("cpu")
    assert batch.pinned(cpu).to(cpu) is batch


# ── batches of translation ──────────────────────────────────────────────────────────────────────────────────────────


def plain_batches(lengths: list[int], rows: int, most: int, limit: float) -> list[list[int]]:
    """One place after another, the longest first, into the last batch while it has neither `most` nor `limit`."""
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if found:
            count, longest = len(found[-1]) + 1, max(1, lengths[found[-1][0]])
            if count * longest * rows <= most and count * (longest + PAIR_OVERHEAD) <= limit:
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
    wanted = max(needed, min(math.ceil(needed / together) * together, len(lengths) // MIN_BATCH))
    # The slow way to equal batches: the first bound on the work of one that leaves no more than these.
    limits = range(sum(lengths) + PAIR_OVERHEAD * len(lengths) + most + 1)
    expected = next(them for limit in limits if len(them := plain_batches(lengths, rows, most, limit)) <= wanted)
    assert found == expected
    assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) * rows <= most


def test_the_batches_of_translation_are_a_multiple_of_the_processes_where_they_stay_large():
    assert len(batches([5] * 200, 1, 10**6)) == 1
    assert [len(batch) for batch in batches([5] * 200, 1, 10**6, 4)] == [50] * 4
    assert len(batches([5] * 3 * MIN_BATCH, 1, 10**6, 4)) == 3, "no batch becomes smaller than that for it"
    assert len(batches([5] * 10, 1, 5, 4)) == 10
    assert batches([], 4, 100) == []
    assert len(batches([1] * 10, 1, 10)) == 1
    assert batches([0, 0], 1, 1) == [[0], [1]], "an empty line takes a place, too"
