"""Searches against exhaustive enumeration and plain loops over tables of next-token probabilities."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.decoding.search import BLOCK, _compact, _largest, beam_search, greedy_search, penalty, sample, sample_token
from nmt.errors import NmtError
from nmt.special_tokens import BOS, EOS, UNK

V = 7
"""pad, unk, bos, eos and three words: 4, 5, 6."""
WORDS = (4, 5, 6)


class TableDecoder:
    """Logits as a fixed function of sentence and prefix; remembers the prefix of each row as the search moves it."""

    def __init__(self, sentences, beam, *, eos_bias=0.0, dtype=torch.float64, ties=False):
        self.sentence = [b for b in sentences for _ in range(beam)]
        self.prefix = [()] * len(self.sentence)
        self.beam, self.eos_bias, self.dtype, self.ties = beam, eos_bias, dtype, ties
        self.steps = 0

    def logits(self, sentence, prefix):
        seed = hash((sentence, *prefix)) % 2**31  # of a tuple of ints: the same in every process
        logits = 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        logits = logits.round() if self.ties else logits
        logits[EOS] += self.eos_bias
        return logits

    def logp(self, sentence, tokens):
        """The log-probability of these tokens after bos, the slow way."""
        return sum(
            float(self.logits(sentence, (BOS, *tokens[:place])).log_softmax(0)[token])
            for place, token in enumerate(tokens)
        )

    def step(self, last_R):
        self.steps += 1
        self.prefix = [(*prefix, token) for prefix, token in zip(self.prefix, last_R.tolist(), strict=True)]
        rows = [self.logits(b, prefix) for b, prefix in zip(self.sentence, self.prefix, strict=True)]
        return torch.stack(rows).to(self.dtype)

    def select(self, rows_R):
        rows = rows_R.tolist()
        assert len(rows) % self.beam == 0
        for start in range(0, len(rows), self.beam):
            block = [row // self.beam for row in rows[start : start + self.beam]]
            assert len(set(block)) == 1, "a row left the block of its sentence"
        self.sentence = [self.sentence[row] for row in rows]
        self.prefix = [self.prefix[row] for row in rows]


def search(sentences, limits, *, beam, alpha=0.6, bias=0.0, dtype=torch.float64, ties=False, **more):
    decoder = TableDecoder(sentences, beam, eos_bias=bias, dtype=dtype, ties=ties)
    return beam_search(decoder, limits, beam=beam, alpha=alpha, **more)


def every_ending(sentence, limit, alpha, kind, prefix=()):
    """(score, tokens) of all translations of 1 to `limit` tokens that begin with `prefix`, the best first."""
    table = TableDecoder([sentence], 1)
    found = []
    for n in range(max(1, len(prefix)), limit + 1):
        for rest in itertools.product(WORDS, repeat=n - len(prefix)):
            tokens = (*prefix, *rest)
            length = n + 1
            divisor = ((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha
            found.append((table.logp(sentence, (*tokens, EOS)) / divisor, tokens))
    return sorted(found, reverse=True)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([0.0, 0.6, 1.0]), kind=st.sampled_from(["gnmt", "power"]))
def test_a_beam_that_holds_every_prefix_finds_what_exhaustive_search_finds(seed, alpha, kind):
    limit = 3
    beam = 3**limit * 4  # every prefix with every token after it is among the candidates
    (found,) = search([seed], [limit], beam=beam, alpha=alpha, length_penalty=kind, n_best=5)
    truth = every_ending(seed, limit, alpha, kind)
    assert [hyp.tokens for hyp in found] == [tokens for _, tokens in truth[:5]]
    assert [hyp.score for hyp in found] == pytest.approx([score for score, _ in truth[:5]], abs=1e-9)
    assert all(hyp.finished for hyp in found)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), beam=st.integers(1, 5), alpha=st.sampled_from([0.0, 0.6, 1.0]), bias=st.floats(-3, 3)
)
def test_scores_are_the_log_probability_of_the_tokens_over_the_penalty(seed, beam, alpha, bias):
    hyps = search([seed], [6], beam=beam, alpha=alpha, n_best=beam, bias=bias)[0]
    table = TableDecoder([seed], 1, eos_bias=bias)
    for hyp in hyps:
        tokens = (*hyp.tokens, EOS) if hyp.finished else hyp.tokens
        assert hyp.logp == pytest.approx(table.logp(seed, tokens), abs=1e-9)
        assert hyp.score == pytest.approx(hyp.logp / ((5 + len(tokens)) / 6) ** alpha, abs=1e-9)


def plain_beam_search(sentence, limit, beam, alpha, bias=0.0, prefix=(), patience=math.inf):
    """The same search in Python lists, run to the limit unless patience ends it: no bound, no tensors."""
    table = TableDecoder([sentence], 1, eos_bias=bias)
    live, done = [(0.0, ())], []
    for step in range(limit + 1):
        candidates = []
        for logp, tokens in live:
            logits = table.logits(sentence, (BOS, *tokens)).log_softmax(0)
            for token in (EOS, *WORDS):
                if (step < len(prefix) and token != prefix[step]) or (step == 0 and token == EOS):
                    continue
                candidates.append((logp + float(logits[token]), (*tokens, token)))
        candidates = sorted(candidates, reverse=True)[: 2 * beam]
        done += [
            (logp / ((5 + len(tokens)) / 6) ** alpha, tokens[:-1])
            for logp, tokens in candidates[:beam]
            if tokens[-1] == EOS
        ]
        if step == limit or len(done) >= beam * patience:
            break
        live = [(logp, tokens) for logp, tokens in candidates if tokens[-1] != EOS][:beam]
    return sorted(done, reverse=True), live


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    beam=st.integers(1, 4),
    n_best=st.integers(1, 4),
    limit=st.integers(1, 8),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    bias=st.floats(-4, 3),
    prefix=st.lists(st.sampled_from(WORDS), max_size=3),
)
def test_stopping_early_never_loses_against_running_to_the_limit(seed, beam, n_best, limit, alpha, bias, prefix):
    limit = max(limit, len(prefix))
    n_best = min(n_best, beam)
    (found,) = search([seed], [limit], beam=beam, alpha=alpha, bias=bias, n_best=n_best, prefixes=[prefix])
    done, live = plain_beam_search(seed, limit, beam, alpha, bias, tuple(prefix))
    best = done or [(logp / ((5 + len(tokens)) / 6) ** alpha, tokens) for logp, tokens in live]
    assert [hyp.tokens for hyp in found] == [tokens for _, tokens in best[:n_best]]
    assert [hyp.score for hyp in found] == pytest.approx([score for score, _ in best[:n_best]], abs=1e-9)
    assert all(hyp.finished is bool(done) for hyp in found)


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    beam=st.integers(1, 4),
    patience=st.sampled_from([0.5, 1.0, 2.0]),
    alpha=st.sampled_from([0.0, 1.0, 3.0]),
    bias=st.floats(-2, 4),
)
def test_with_patience_a_sentence_is_done_when_so_many_translations_have_finished(seeds, beam, patience, alpha, bias):
    limits = [2 + seed % 7 for seed in seeds]
    found = search(seeds, limits, beam=beam, alpha=alpha, bias=bias, patience=patience)
    for seed, limit, (hyp,) in zip(seeds, limits, found, strict=True):
        done, live = plain_beam_search(seed, limit, beam, alpha, bias, patience=patience)
        best = done or [(logp / ((5 + len(tokens)) / 6) ** alpha, tokens) for logp, tokens in live]
        assert hyp.tokens == best[0][1]
        assert hyp.score == pytest.approx(best[0][0], abs=1e-9)


class Written:
    """The probabilities of the next token after each prefix as they are written down; words that are not get none."""

    def __init__(self, table, beam):
        self.table, self.prefix = table, [()] * beam

    def step(self, last_R):
        self.prefix = [(*prefix, token) for prefix, token in zip(self.prefix, last_R.tolist(), strict=True)]
        rows = [self.table.get(prefix[1:], {EOS: 1.0}) for prefix in self.prefix]
        return torch.tensor([[row.get(v, 1e-30) for v in range(V)] for row in rows], dtype=torch.float64).log()

    def select(self, rows_R):
        self.prefix = [self.prefix[row] for row in rows_R.tolist()]


def test_a_translation_of_the_full_length_may_still_win_at_the_last_step():
    # (4) has the score -1 / (7/6) = -0.857 when it ends; (4 5) is less likely, but ends with -1.05 / (8/6) = -0.787.
    table = {(): {4: 1.0}, (4,): {EOS: math.exp(-1), 5: math.exp(-1.05), 6: 1 - math.exp(-1) - math.exp(-1.05)}}
    (hyp,) = beam_search(Written(table, 2), [2], beam=2, alpha=1.0)[0]
    assert hyp.tokens == (4, 5)
    assert hyp.score == pytest.approx(-1.05 / (8 / 6))
    (hyp,) = beam_search(Written(table, 2), [1], beam=2, alpha=1.0)[0]
    assert hyp.tokens == (4,)


def test_the_search_stops_long_before_a_limit_that_is_far_away():
    decoder = TableDecoder([1, 2, 3], 4, eos_bias=2.0)
    beam_search(decoder, [400] * 3, beam=4, alpha=0.6)
    assert decoder.steps < 40


@settings(max_examples=30, deadline=None)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=5), bias=st.floats(-2, 2))
def test_greedy_search_equals_an_argmax_loop_and_a_beam_of_one(seeds, bias):
    limits = [3 + seed % 6 for seed in seeds]
    found = greedy_search(TableDecoder(seeds, 1, eos_bias=bias), limits)
    table = TableDecoder([0], 1, eos_bias=bias)
    for seed, limit, hyp in zip(seeds, limits, found, strict=True):
        tokens = []
        while len(tokens) <= limit:
            logits = table.logits(seed, (BOS, *tokens))
            allowed = (*WORDS, EOS) if tokens else WORDS
            tokens.append(max(allowed, key=lambda token: float(logits[token])))
            if tokens[-1] == EOS:
                break
        finished = tokens[-1] == EOS
        expected = tuple(tokens[:-1])  # without eos, or without the one that is over the limit
        assert (hyp.tokens, hyp.finished) == (expected, finished)
        assert hyp.logp == pytest.approx(table.logp(seed, tokens if finished else expected), abs=1e-9)
    beams = search(seeds, limits, beam=1, alpha=0, bias=bias)
    assert [beam[0].tokens for beam in beams] == [hyp.tokens for hyp in found]
    assert [beam[0].logp for beam in beams] == pytest.approx([hyp.logp for hyp in found], abs=1e-9)


@pytest.mark.parametrize("beam", [1, 3])
def test_a_beam_that_never_finishes_returns_its_best_live_hypothesis(beam):
    hyps = search([5], [4], beam=beam, bias=-1e9, n_best=beam)[0]
    assert not any(hyp.finished for hyp in hyps)
    assert all(len(hyp.tokens) == 4 for hyp in hyps)
    _, live = plain_beam_search(5, 4, beam, 0.6, -1e9)
    assert [hyp.tokens for hyp in hyps] == [tokens for _, tokens in live]


@settings(max_examples=25, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=2, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    ties=st.booleans(),
    data=st.data(),
)
def test_a_result_does_not_depend_on_the_neighbours(seeds, dtype, ties, data):
    limits = [1 + seed % 9 for seed in seeds]
    prefixes = [data.sample_token(st.lists(st.sampled_from(WORDS), max_size=2)) for _ in seeds]

    def each(rows, beam, how):
        decoder = TableDecoder([seeds[i] for i in rows], beam, dtype=dtype, ties=ties)
        return how(decoder, [limits[i] for i in rows], [prefixes[i] for i in rows], rows)

    def by_beam(decoder, limit_B, prefix_B, rows):
        return beam_search(decoder, limit_B, beam=3, alpha=0.6, n_best=2, prefixes=prefix_B)

    def by_greed(decoder, limit_B, prefix_B, rows):
        return greedy_search(decoder, limit_B, prefix_B)

    def by_chance(decoder, limit_B, prefix_B, rows):
        own = [torch.Generator().manual_seed(seeds[i]) for i in rows]
        return sample(decoder, limit_B, temperature=1.3, top_k=3, top_p=0.9, generators=own, prefixes=prefix_B)

    everyone = list(range(len(seeds)))
    for beam, how in ((3, by_beam), (1, by_greed), (1, by_chance)):
        together = each(everyone, beam, how)
        assert together == [each([i], beam, how)[0] for i in everyone]
        assert together[::-1] == each(everyone[::-1], beam, how)


def test_equal_candidates_go_by_row_and_then_by_token():
    class Flat:
        def step(self, last_R):
            return torch.zeros(len(last_R), V)

        def select(self, rows_R):
            pass

    hyps = beam_search(Flat(), [2], beam=3, alpha=0, n_best=3)[0]
    # By hand: (4), (5), (6) live on; the six candidates are (4 eos), (4 4), (4 5), (4 6), (5 eos), (5 4), of which the
    # first of the three likeliest ends and the words of row 4 live on; then (4 4 eos) is the first.
    assert [hyp.tokens for hyp in hyps] == [(4,), (4, 4)]
    assert greedy_search(Flat(), [2])[0].tokens == (4,)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.sampled_from([5, BLOCK, BLOCK + 1, 8 * BLOCK, 8 * BLOCK + 1, 1000, 12 * BLOCK]),
    count=st.integers(1, 5),
    kinds=st.sampled_from([1, 3, 50, 10**6]),
)
def test_the_largest_values_are_those_of_a_stable_sort(seed, width, count, kinds):
    value = torch.randint(kinds, (3, width), generator=torch.Generator().manual_seed(seed)).float()
    value[0, 1:] = -math.inf
    expected = value.sort(dim=1, descending=True, stable=True)
    found = _largest(value, count)
    assert torch.equal(found[0], expected.values[:, :count])
    assert torch.equal(found[1], expected.indices[:, :count])


@pytest.mark.parametrize("width", [4 * BLOCK, 10 * BLOCK])
def test_a_hypothesis_after_which_the_model_gives_no_numbers_is_not_gone_on_with(width):
    logp = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(width)) - 9  # of three hypotheses each
    logp[0, 1], logp[1, 2] = math.nan, math.nan
    expected = logp.view(2, -1).nan_to_num(nan=-math.inf).sort(dim=1, descending=True, stable=True)
    found = _largest(logp.view(2, -1), 6)
    assert torch.equal(found[0], expected.values[:, :6])
    assert torch.equal(found[1], expected.indices[:, :6])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), beam=st.integers(1, 5), bias=st.floats(-2, 2))
def test_n_best_lists_are_in_order_and_without_doubles(seed, beam, bias):
    hyps = search([seed], [8], beam=beam, bias=bias, n_best=beam)[0]
    assert 1 <= len(hyps) <= beam
    assert len({hyp.tokens for hyp in hyps}) == len(hyps)
    assert [hyp.score for hyp in hyps] == sorted((hyp.score for hyp in hyps), reverse=True)
    assert hyps[0] == search([seed], [8], beam=beam, bias=bias)[0][0]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), prefix=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4))
def test_a_prefix_is_kept_and_the_rest_is_the_best_after_it(seed, prefix):
    limit = 4
    (found,) = search([seed], [limit], beam=400, prefixes=[prefix], n_best=3)
    truth = every_ending(seed, limit, 0.6, "gnmt", tuple(prefix))
    assert [hyp.tokens for hyp in found] == [tokens for _, tokens in truth[:3]]
    for hyp in (
        greedy_search(TableDecoder([seed], 1), [2], [prefix])[0],
        sample(TableDecoder([seed], 1), [2], generators=[torch.Generator()], prefixes=[prefix])[0],
    ):
        assert hyp.tokens[: len(prefix)] == tuple(prefix), "even where it is longer than the limit"


def test_a_prefix_may_hold_a_token_that_no_search_would_choose():
    table = TableDecoder([7], 1)
    for hyp in (
        search([7], [3], beam=3, alpha=0.0, prefixes=[(5, UNK)])[0][0],
        greedy_search(TableDecoder([7], 1), [3], [(5, UNK)])[0],
    ):
        assert hyp.tokens[:2] == (5, UNK)
        tokens = (*hyp.tokens, EOS) if hyp.finished else hyp.tokens
        assert hyp.logp == pytest.approx(table.logp(7, tokens), abs=1e-6)


@given(beam=st.integers(1, 4), seeds=st.lists(st.integers(0, 10**6), max_size=4), limit=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_every_sentence_gets_at_least_one_token_and_at_most_its_limit(beam, seeds, limit):
    for hyps in search(seeds, [limit] * len(seeds), beam=beam, bias=9.0, n_best=beam):
        assert hyps
        assert all(1 <= len(hyp.tokens) <= max(1, limit) for hyp in hyps)
        assert not {token for hyp in hyps for token in hyp.tokens} - set(WORDS)


@pytest.mark.parametrize(("kind", "values"), [("gnmt", [1.0, 7 / 6, 3.0]), ("power", [1, 2, 13])])
def test_the_penalty_is_the_formula_and_never_falls(kind, values):
    assert [penalty(n, 1.0, kind) for n in (1, 2, 13)] == pytest.approx(values)
    assert penalty(13, 0.0, kind) == 1
    row = [penalty(n, 0.6, kind) for n in range(1, 200)]
    assert row == sorted(row)


def test_a_model_of_nan_is_told_and_not_translated_with():
    class Broken:
        def step(self, last_R):
            return torch.full((len(last_R), 1001), math.nan)  # a width that ends within a block

        def select(self, rows_R):
            pass

    with pytest.raises(NmtError, match="NaN"):
        beam_search(Broken(), [3, 3], beam=2, alpha=0.6)
    with pytest.raises(NmtError, match="NaN"):
        greedy_search(Broken(), [3, 3])


def test_samples_follow_the_distribution_of_temperature_and_cuts():
    probability = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    chance = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000  # every chance equally often: no noise

    def shares(temperature=1.0, top_k=0, top_p=1.0):
        drawn = sample_token(probability.log().repeat(4000, 1), chance, temperature, top_k, top_p)
        return (torch.bincount(drawn, minlength=4) / 4000).tolist()

    assert shares() == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=1e-3)
    assert shares(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-3)
    assert shares(top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-3)
    assert shares(top_p=0.76) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], abs=1e-3)
    squares = [p * p / 0.345 for p in (0.5, 0.25, 0.15, 0.1)]
    assert shares(temperature=0.5) == pytest.approx(squares, abs=1e-3)
    assert shares(top_k=1) == [1, 0, 0, 0]


def test_top_p_takes_the_fewest_tokens_that_reach_it():
    chance = torch.arange(0, 1, 0.01, dtype=torch.float64)
    for top_p, taken in ((0.25, {0}), (0.26, {0, 1}), (0.5, {0, 1}), (0.51, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        drawn = sample_token(torch.zeros(len(chance), 4, dtype=torch.float64), chance, 1.0, 0, top_p)  # four quarters
        assert set(drawn.tolist()) == taken


def test_a_forbidden_token_is_never_drawn_even_at_the_edges_of_chance():
    logp = torch.tensor([[-math.inf, math.log(0.5), -math.inf, math.log(0.5)]]).repeat(3, 1)
    drawn = sample_token(logp, torch.tensor([0.0, 0.5, 1 - 1e-16], dtype=torch.float64), 1.0, 0, 1.0)
    assert set(drawn.tolist()) <= {1, 3}


def test_sampling_with_top_k_of_one_is_greedy_search():
    seeds = [3, 1, 4, 1, 5]
    own = [torch.Generator().manual_seed(0) for _ in seeds]
    assert sample(TableDecoder(seeds, 1), [9] * 5, top_k=1, generators=own) == greedy_search(
        TableDecoder(seeds, 1), [9] * 5
    )


def test_an_empty_batch_gives_nothing():
    assert search([], [], beam=2) == []
    assert greedy_search(TableDecoder([], 1), []) == []
    assert sample(TableDecoder([], 1), [], generators=[]) == []


@given(stays=st.lists(st.booleans(), max_size=20))
def test_those_that_stay_close_up_and_only_as_many_move_as_leave(stays):
    order = _compact(stays)
    assert sorted(order) == [place for place, stay in enumerate(stays) if stay]
    moved = [place for to, place in enumerate(order) if place != to]
    assert len(moved) == stays[: len(order)].count(False)
    assert all(place >= len(order) for place in moved)


def test_greedy_search_moves_no_more_sentences_than_leave():
    moves = []

    class Counting(TableDecoder):
        def select(self, rows_R):
            moves.append((len(self.sentence) - len(rows_R), int((rows_R != torch.arange(len(rows_R))).sum())))
            super().select(rows_R)

    sentences, limits = list(range(12)), [1, 2, 3, 4, 5, 6] * 2
    found = greedy_search(Counting(sentences, 1, eos_bias=-9), limits)
    assert [len(hyp.tokens) for hyp in found] == limits
    assert len(moves) == 5
    assert all(moved <= left for left, moved in moves)
    for sentence, limit, hyp in zip(sentences, limits, found, strict=True):
        assert greedy_search(TableDecoder([sentence], 1, eos_bias=-9), [limit]) == [hyp]
