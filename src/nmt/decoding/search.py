"""Beam search, greedy search and sampling over anything that gives the logits of a next token; knows no model.

Shapes: B sentences, W beam width, R = B·W beam rows, C = 2·W candidates, X any number of hypotheses, T tokens so far,
V vocabulary. All is worked out sentence by sentence, so that none depends on its neighbours in the batch, and one value
a step comes back from the device: which sentences go on.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from nmt.errors import NmtError
from nmt.special_tokens import BOS, EOS, PAD, UNK

BLOCK = 64
"""Values of a row that are looked at together in the search for its largest ones."""

LengthPenalty = Literal["gnmt", "power"]
Prefixes = Sequence[Sequence[int]] | None
"""For each sentence the tokens that its translation must begin with."""


class Decoder(Protocol):
    """The hypotheses of a batch of sentences. Of `beam` rows each, sentence b owns those from b·beam on."""

    def step(self, last_R: Tensor) -> Tensor:
        """Take up the newest token of each row (bos at first); the logits_RV of the next one come back."""

    def select(self, rows_R: Tensor) -> None:
        """Go on with these of the present rows. A sentence's rows stay together, and it leaves as a whole.

        The others stay where they are, but for some from the end, which take the places that became free.
        """


class Hypothesis(NamedTuple):
    """One translation, without bos and eos."""

    tokens: tuple[int, ...]
    score: float
    """What the hypotheses of one sentence are ordered by: `logp`, over the length penalty in a beam search."""
    logp: float
    """Log-probability, in nats, of all tokens (of eos too, if it is finished)."""
    finished: bool
    """False where the length limit cut it off."""


def penalty(length: float, alpha: float, kind: LengthPenalty) -> float:
    """What the log-probability of `length` tokens is divided by; never falls as the length grows.

    The length counts eos, as in tensor2tensor, the code of Vaswani et al. 2017: eos is a factor of the probability
    too, and so no length is 0.
    """
    # gnmt: Wu et al. 2016, equation 14. power: fairseq and CTranslate2.
    return float(((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha)


def beam_search(
    decoder: Decoder,
    limit_B: Sequence[int],
    *,
    beam: int,
    alpha: float,
    length_penalty: LengthPenalty = "gnmt",
    patience: float = 0.0,
    n_best: int = 1,
    prefixes: Prefixes = None,
    device: torch.device | str = "cpu",
) -> list[list[Hypothesis]]:
    """Up to `n_best` different translations of each sentence, the best first, each of at most limit_B tokens and eos.

    The candidates of a sentence are its 2·beam likeliest continuations. At most one for each of its `beam` rows ends,
    so `beam` of them go on, however many end. One that ends is finished if it is among the `beam` likeliest, as in
    fairseq and CTranslate2; so a beam of 1 with alpha 0 is greedy search. Of equal candidates the one from the earlier
    row, then the one with the smaller token, comes first.

    A sentence leaves when no live hypothesis can become better than its `n_best`-th finished one. The bound is exact:
    with L <= 0 the log-probability of a live hypothesis, p the penalty, n its length in the end and N the longest
    length, more tokens can only lower L, and p(n) <= p(N), so that its score is at most L / p(n) <= L / p(N).
    With `patience` a sentence leaves as well when beam·patience hypotheses have finished (Kasai et al. 2022, "Beam
    Decoding with Controlled Patience"); 1 is the usual rule, which is faster, and bears a larger alpha: a model gives
    some endless output a high score, and this search has stopped before it finds it.
    Where nothing finished within the limit, the best live hypotheses come back as not finished.
    """
    limits, forced_BP = _prepare(limit_B, prefixes, device)
    limit_at_B = torch.tensor(limits, device=device)
    # A millionth more, so that no rounding makes the bound lower than it is.
    largest_B = torch.tensor([penalty(n + 1, alpha, length_penalty) * (1 + 1e-6) for n in limits], device=device)
    results: list[list[Hypothesis]] = [[] for _ in limits]
    ended_B = torch.zeros(len(limits), dtype=torch.long, device=device)
    places = list(range(len(limits)))  # in `limit_B`, of the sentences that are still searched
    live, done = _BeamState.empty(len(limits), beam, device), _BeamState.empty(len(limits), n_best, device)
    # The rows of a sentence begin equal: only its first may count, or the beam would hold one hypothesis many times.
    live.logp_BX[:, 0] = 0
    last_R = torch.full((len(limits) * beam,), BOS, device=device)
    step = 0
    while places:
        B = len(places)
        logp_RV = _next_logp(decoder.step(last_R), step, forced_BP.repeat_interleave(beam, 0))
        V = logp_RV.shape[1]
        logp_BC, index_BC = _largest(logp_RV.add_(live.logp_BX.view(-1, 1)).view(B, beam * V), 2 * beam)
        row_BC, token_BC = index_BC // V, index_BC % V
        tokens_BCT = torch.cat([_pick(live.tokens_BXT, row_BC), token_BC.unsqueeze(2)], dim=2)
        ends_BC = token_BC == EOS

        ended = _BeamState(tokens_BCT, logp_BC, _only(ends_BC, logp_BC / penalty(step + 1, alpha, length_penalty)))
        ended = ended.first(beam)
        done, _ = done.joined(ended).best(n_best)
        ended_B = ended_B + (ended.score_BX > -math.inf).sum(1)
        goes_on_BC = _only(~ends_BC, logp_BC)
        longer, on_BW = _BeamState(tokens_BCT, goes_on_BC, goes_on_BC).best(beam)
        beaten_B = done.score_BX[:, -1] >= longer.score_BX[:, 0] / largest_B
        if patience:
            beaten_B |= ended_B >= beam * patience
        stays = (~beaten_B & (limit_at_B > step)).tolist()

        rows_BW = row_BC.gather(1, on_BW) + beam * torch.arange(B, device=device).unsqueeze(1)
        if not all(stays):
            leaving = [b for b, stay in enumerate(stays) if not stay]
            going = _compact(stays)
            leaving_B, going_B = (torch.tensor(them, dtype=torch.long, device=device) for them in (leaving, going))
            found = done.of(leaving_B).listed(finished=True)
            if not all(found):
                # `longer` is too long, if nothing has finished by now: what is left are those of the step before.
                cut = live.of(leaving_B).listed(finished=False, divisor=penalty(max(step, 1), alpha, length_penalty))
                found = [hyps or cut_hyps[:n_best] for hyps, cut_hyps in zip(found, cut, strict=True)]
            for b, hyps in zip(leaving, found, strict=True):
                results[places[b]] = _check_finite(hyps)
            places = [places[b] for b in going]
            longer, done, rows_BW, ended_B = longer.of(going_B), done.of(going_B), rows_BW[going_B], ended_B[going_B]
            limit_at_B, largest_B, forced_BP = limit_at_B[going_B], largest_B[going_B], forced_BP[going_B]
        live = longer
        if places:
            decoder.select(rows_BW.flatten())
        last_R = live.tokens_BXT[:, :, -1].flatten()
        step += 1
    return results


def _compact(stays: Sequence[bool]) -> list[int]:
    """The places of those that stay, in a new order: one from the end for each that leaves, so that few must move."""
    order, size = list(range(len(stays))), sum(stays)
    last = (place for place in reversed(order) if stays[place])
    return [place if stays[place] else next(last) for place in order[:size]]


def greedy_search(
    decoder: Decoder, limit_B: Sequence[int], prefixes: Prefixes = None, device: torch.device | str = "cpu"
) -> list[Hypothesis]:
    """The translation of each sentence that takes the likeliest token every time (of equal ones the first)."""
    return _decode_single(decoder, limit_B, prefixes, device, lambda logp_BV, step, place_B: logp_BV.argmax(1))


def sample(
    decoder: Decoder,
    limit_B: Sequence[int],
    *,
    generators: Sequence[torch.Generator],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    prefixes: Prefixes = None,
    device: torch.device | str = "cpu",
) -> list[Hypothesis]:
    """A translation of each sentence by chance, from the distributions that `sample_token` describes.

    A sentence's chance comes from its own CPU generator alone, whatever it is batched with. `logp` is the model's: it
    knows nothing of temperature and cuts.
    """
    limits, _ = _prepare(limit_B, prefixes, device)
    # All of a sentence's numbers at once, so that the loop asks no generator.
    chances = [torch.rand(limit + 1, generator=own) for limit, own in zip(limits, generators, strict=True)]
    chance_BT = pad_sequence(chances, batch_first=True).to(device) if chances else torch.empty(0, 0)

    def choose(logp_BV: Tensor, step: int, place_B: Tensor) -> Tensor:
        return sample_token(logp_BV, chance_BT[place_B, step], temperature, top_k, top_p)

    return _decode_single(decoder, limit_B, prefixes, device, choose)


def sample_token(logp_BV: Tensor, chance_B: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The token whose share of the cumulative distribution, likeliest first, holds `chance_B` (0 <= chance < 1).

    The distribution is p^(1/temperature); of that the `top_k` likeliest tokens (0: all); of those the fewest that
    together have a share of `top_p`.
    """
    value_BV, token_BV = (logp_BV / temperature).sort(dim=1, descending=True, stable=True)
    share_BV = value_BV[:, : top_k or None].softmax(1)
    share_BV = _only(share_BV.cumsum(1) - share_BV < top_p, share_BV, 0.0)
    sum_BV = share_BV.cumsum(1)
    # right=True: a token without a share is never drawn. Rounding may reach beyond the last one that has a share.
    place_B1 = torch.searchsorted(sum_BV, (chance_B.to(sum_BV) * sum_BV[:, -1]).unsqueeze(1), right=True)
    return token_BV.gather(1, place_B1.minimum((share_BV > 0).sum(1, keepdim=True) - 1)).squeeze(1)


def _decode_single(
    decoder: Decoder,
    limit_B: Sequence[int],
    prefixes: Prefixes,
    device: torch.device | str,
    choose: Callable[[Tensor, int, Tensor], Tensor],
) -> list[Hypothesis]:
    """One hypothesis for each sentence; `choose(logp_BV, step, place_B)` gives the next tokens of those at place_B."""
    limits, forced_BP = _prepare(limit_B, prefixes, device)
    limit_at_B = torch.tensor(limits, device=device)
    place_B = torch.arange(len(limits), device=device)
    last_B = torch.full_like(place_B, BOS)
    tokens_BT = torch.full((len(limits), max(limits, default=0) + 1), PAD, device=device)
    logp_B = torch.zeros(len(limits), device=device)
    step = 0
    while len(place_B):
        logp_BV = _next_logp(decoder.step(last_B), step, forced_BP[place_B])
        last_B, logp_B = choose(logp_BV, step, place_B), logp_B.to(logp_BV.dtype)
        fits_B = (last_B == EOS) | (limit_at_B[place_B] > step)
        tokens_BT[place_B, step] = last_B.where(fits_B, PAD)
        logp_B[place_B] += logp_BV.gather(1, last_B.unsqueeze(1)).squeeze(1).where(fits_B, 0.0)
        stays = ((last_B != EOS) & fits_B).tolist()
        if not all(stays):
            going_B = torch.tensor(_compact(stays), dtype=torch.long, device=device)
            if any(stays):
                decoder.select(going_B)
            place_B, last_B = place_B[going_B], last_B[going_B]
        step += 1
    rows = zip(tokens_BT.tolist(), logp_B.tolist(), strict=True)
    found = [_hypothesis(tokens, logp, logp, finished=EOS in tokens) for tokens, logp in rows]
    return _check_finite(found) if found else []


class _BeamState(NamedTuple):
    """Hypotheses of each sentence; a place without one has the score -inf."""

    tokens_BXT: Tensor
    logp_BX: Tensor
    score_BX: Tensor

    @staticmethod
    def empty(sentences: int, places: int, device: torch.device | str) -> "_BeamState":
        """No hypotheses yet; scores and log-probabilities are one tensor, as they are while hypotheses live."""
        nothing_BX = torch.full((sentences, places), -math.inf, device=device)
        tokens_BXT = torch.empty(sentences, places, 0, dtype=torch.long, device=device)
        return _BeamState(tokens_BXT, nothing_BX, nothing_BX)

    def joined(self, longer: "_BeamState") -> "_BeamState":
        """These, and after them those of `longer`, which have one token more."""
        tokens_BXT = torch.cat([pad(self.tokens_BXT, (0, 1), value=PAD), longer.tokens_BXT], dim=1)
        rest = (torch.cat(pair, dim=1) for pair in zip(self[1:], longer[1:], strict=True))
        return _BeamState(tokens_BXT, *rest)

    def best(self, count: int) -> "tuple[_BeamState, Tensor]":
        """The `count` of highest score for each sentence, the best first, and their places here."""
        score_BX, place_BX = _largest(self.score_BX, count)
        return _BeamState(_pick(self.tokens_BXT, place_BX), self.logp_BX.gather(1, place_BX), score_BX), place_BX

    def first(self, count: int) -> "_BeamState":
        return _BeamState(*(part[:, :count] for part in self))

    def of(self, sentence_B: Tensor) -> "_BeamState":
        return _BeamState(*(part[sentence_B] for part in self))

    def listed(self, *, finished: bool, divisor: float = 1.0) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence, their scores over `divisor`."""
        sentences = zip(*(part.tolist() for part in self), strict=True)
        return [
            [
                _hypothesis(tokens, score / divisor, logp, finished=finished)
                for tokens, logp, score in zip(*sentence, strict=True)
                if score != -math.inf
            ]
            for sentence in sentences
        ]


def _hypothesis(tokens: Sequence[int], score: float, logp: float, *, finished: bool) -> Hypothesis:
    return Hypothesis(tuple(token for token in tokens if token not in (PAD, EOS)), score, logp, finished)


def _check_finite(found: list[Hypothesis]) -> list[Hypothesis]:
    """These, if the model gave probabilities: with NaN nothing is found, or nothing of a token, or of no score."""
    if not found or any(not hyp.tokens or math.isnan(hyp.logp) for hyp in found):
        raise NmtError(
            "the model gives no probabilities but NaN: its weights are broken, or too large for float16; use another "
            "checkpoint, or float32 as translate.precision."
        )
    return found


def _prepare(limit_B: Sequence[int], prefixes: Prefixes, device: torch.device | str) -> tuple[list[int], Tensor]:
    """Limits that leave room for a token and for the prefix; the prefixes as a table, -1 where the search is free."""
    given = [()] * len(limit_B) if prefixes is None else prefixes
    limits = [max(1, limit, len(prefix)) for limit, prefix in zip(limit_B, given, strict=True)]
    width = max(map(len, given), default=0)
    table = [[*prefix, *[-1] * (width - len(prefix))] for prefix in given]
    return limits, torch.tensor(table, dtype=torch.long, device=device).view(len(limits), width)


def _next_logp(logits_RV: Tensor, step: int, forced_RP: Tensor) -> Tensor:
    """Log-probability of each next token by the model; -inf for what may not follow."""
    model_RV = torch.log_softmax(logits_RV, dim=1, dtype=torch.promote_types(logits_RV.dtype, torch.float32))
    logp_RV = model_RV.clone() if step < forced_RP.shape[1] else model_RV
    for token in (PAD, UNK, BOS, EOS) if step == 0 else (PAD, UNK, BOS):  # an input that is not empty gives a token
        logp_RV[:, token] = -math.inf
    if step < forced_RP.shape[1]:
        forced_R1 = forced_RP[:, step : step + 1]
        is_forced_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == forced_R1
        logp_RV = _only(is_forced_RV, model_RV).where(forced_R1 >= 0, logp_RV)
    return logp_RV


def _only(keep: Tensor, value: Tensor, otherwise: float = -math.inf) -> Tensor:
    return value.masked_fill(~keep, otherwise)


def _largest(value_BX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row in falling order, and their places; of equal values the first ones.

    The largest are in the `count` blocks of largest maxima, and this costs half of a plain topk over a vocabulary.
    """
    rows, X = value_BX.shape
    if X <= BLOCK:
        value_BX, place_BX = value_BX.sort(dim=1, descending=True, stable=True)
        return value_BX[:, :count], place_BX[:, :count]
    if X <= 8 * BLOCK:
        place_BX = _places_of_largest(value_BX, count)
    else:
        whole_BX = pad(value_BX, (0, -X % BLOCK), value=-math.inf) if X % BLOCK else value_BX
        blocks = whole_BX.view(rows, -1, BLOCK)
        at = _places_of_largest(blocks.amax(2), min(count, blocks.shape[1])).unsqueeze(2)
        inside = blocks.gather(1, at.expand(-1, -1, BLOCK)).flatten(1)
        place_BX = _places_of_largest(inside, count)
        place_BX = at.squeeze(2).gather(1, place_BX // BLOCK) * BLOCK + place_BX % BLOCK
    value_BX, order_BX = value_BX.gather(1, place_BX).sort(dim=1, descending=True, stable=True)
    return value_BX, place_BX.gather(1, order_BX)


def _places_of_largest(value_BX: Tensor, count: int) -> Tensor:
    """The places of the `count` largest values of each row, rising; of equal values the first ones.

    topk leaves open which of equal values it takes (bfloat16 has many), so it only gives the least value that stays.
    """
    X = value_BX.shape[1]
    value_BX = value_BX.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)  # NaN equals not even itself
    least_B1 = value_BX.topk(count, dim=1).values[:, -1:]
    above_BX, equal_BX = value_BX > least_B1, value_BX == least_B1
    room_B1 = count - above_BX.sum(1, keepdim=True)
    stays_BX = above_BX | (equal_BX & (equal_BX.cumsum(1) <= room_B1))
    from_the_end_X = torch.arange(X, 0, -1, dtype=torch.int32, device=value_BX.device)
    return _only(stays_BX, from_the_end_X.expand_as(value_BX), 0).topk(count, dim=1).indices


def _pick(tokens_BXT: Tensor, place_BX: Tensor) -> Tensor:
    """The token rows at these places of each sentence."""
    return tokens_BXT.gather(1, place_BX.unsqueeze(2).expand(-1, -1, tokens_BXT.shape[2]))
