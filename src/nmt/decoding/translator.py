"""translate: text in, text out. As many lines come out as went in, in order; an empty line stays empty."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmt.config import Config, TranslateConfig
from nmt.corpus import Normaliser
from nmt.data.batching import batches
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.decoding.options import Counts, Options, PairScore, Translation
from nmt.decoding.search import Hypothesis, beam_search, greedy_search, sample
from nmt.decoding.sentence_splitter import cut_to_fit
from nmt.decoding.worker_pool import most_processes, share_out
from nmt.distributed import gpu_defaults
from nmt.distributed.host import warn_of_slow
from nmt.distributed.world import choose_device, gpu_of, limit_onednn_cache
from nmt.errors import CheckpointError, ConfigError, DataError, counted
from nmt.model.cached_decoder import CachedDecoder
from nmt.model.transformer import Transformer
from nmt.runs.checkpoint import load_model
from nmt.runs.identity import check_as_trained
from nmt.runs.run_dir import RunDir, read_config
from nmt.special_tokens import BOS, EOS, PAD

log = logging.getLogger(__name__)

WINDOW = 10_000
"""Lines that are read, sorted by length and translated together; memory does not grow with the file beyond that."""

PORTION = 10_000
"""Texts that are encoded at once when only their lengths are wanted."""

CONTROLS = str.maketrans(dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029], " "))
"""A model can spell these with byte pieces; in its output a line end would make two lines of one."""


class _Part(NamedTuple):
    """What is translated at once: a line, or a part of one that is too long."""

    line: int
    """From 0."""
    number: int
    """Of this part in its line."""
    src: list[int]
    """Ends in eos."""
    prefix: list[int]


_Found = tuple[_Part, list[Hypothesis]]

Share = Callable[[int, Callable[[int], Any]], Iterator[tuple[int, Any]]]
"""Has so many tasks done by several processes; gives each one's number and its result, in any order, as JSON has it."""

BATCH_MULTIPLE = 4
"""Batches come in such multiples on a CPU, where processes share them. So one, two or four have equal work."""


class Translator:
    """A model with all that stands between it and text."""

    def __init__(
        self,
        model: Transformer,
        src_tokenizer: Tokenizer,
        tgt_tokenizer: Tokenizer,
        normaliser: Normaliser,
        config: Config,
        device: torch.device | str = "cpu",
        share: Share | None = None,
    ) -> None:
        """`model` is on `device` already, and in evaluation mode whenever it is asked to translate.

        All processes that `share` one translation call it with the same lines, and get the same texts.
        """
        self.model, self.normaliser, self.device, self.share = model, normaliser, torch.device(device), share
        self.together = BATCH_MULTIPLE if self.device.type == "cpu" else 1
        self.src_tokenizer, self.tgt_tokenizer = src_tokenizer, tgt_tokenizer
        self.src, self.tgt, self.settings = config.data.src, config.data.tgt, config.translate
        size = next(model.parameters()).element_size()
        self.batch_tokens = gpu_defaults.translate_tokens(config.translate, config.model, size, gpu_of(self.device))
        self.joint = "" if normaliser.han[self.tgt] else " "
        # One position is for bos or eos.
        self.most = config.model.max_positions - 1 if config.model.position == "learned" else sys.maxsize
        self.most_input = min(self.settings.max_source_tokens, self.most)

    @classmethod
    def load(cls, run: str | Path, settings: TranslateConfig | None = None, *, device: str = "auto") -> "Translator":
        """The final model of a finished run; `settings` instead of those that it was trained with.

        Raises CheckpointError or DataError for a folder that is no run, or not a whole one.
        """
        folder, place = RunDir(run), choose_device(device)
        config = read_config(folder)
        config = config if settings is None else replace(config, translate=settings)
        tokenizers = load_tokenizers(folder.tokenizer, config.data.src, config.data.tgt)
        model = load_model(folder, config)
        check_as_trained(folder, config, {tokenizer.name: tokenizer.sha256 for tokenizer in tokenizers})
        embeddings = (model.src_embedding or model.embedding, model.embedding)
        for tokenizer, embedding in zip(tokenizers, embeddings, strict=True):
            if len(tokenizer) != embedding.num_embeddings:
                raise CheckpointError(
                    f"{folder.tokenizer}: {tokenizer.name} has {len(tokenizer):,} pieces, but the model has "
                    f"{embedding.num_embeddings:,}; put back the tokenizer that the run was trained with."
                )
        warn_of_slow("translate.precision", config.translate.precision, place)
        limit_onednn_cache(place, config.translate.precision, 256)
        for weight in model.to(place).parameters():  # Not buffers: in half precision angles beyond 256 are not apart.
            weight.data = weight.data.to(getattr(torch, config.translate.precision))
        return cls(model, *tokenizers, Normaliser.load(folder.normalisation_file), config, place)

    def translate(self, lines: Sequence[str]) -> list[str]:
        """The translation of each line; `lines` is a list, also of one line."""
        return [best.text for best, *_ in self.stream(lines)]

    def translate_nbest(self, lines: Sequence[str], options: Options) -> list[list[Translation]]:
        """For each line up to `options.n_best` translations, the best first."""
        return list(self.stream(lines, options))

    def stream(
        self,
        lines: Iterable[str],
        options: Options | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        window: int = WINDOW,
        counts: Counts | None = None,
        progress: Callable[[int], object] = lambda lines: None,
    ) -> Iterator[list[Translation]]:
        """The translations of each line in order, `window` lines at a time; one of each if `options` want no more.

        A translation begins with its line's text in `prefixes`. `counts` are kept up to date, and `progress` is told
        of lines that have been translated.
        """
        _check_lines(lines=lines, prefixes=prefixes)
        options, counts = options or Options(), counts or Counts()
        if not options.sample and options.n_best > self.settings.beam:
            raise ConfigError(f"--n-best is {options.n_best}, more than translate.beam ({self.settings.beam}).")
        lines, first = iter(lines), 0
        given = None if prefixes is None else self._begins(prefixes)
        while group := list(islice(lines, window)):
            begins = [[]] * len(group) if given is None else given[first : first + len(group)]
            if len(begins) < len(group):
                there = counted(first + len(begins), "prefix", "prefixes")
                raise DataError(f"{there} for more lines than that; give one for each line.")
            parts = self._parts(group, begins, first)
            found: list[list[_Found]] = [[] for _ in group]
            for part, hyps in self._search_all(parts, options, progress):
                found[part.line - first].append((part, hyps))
            for src, line, results in zip(group, found, self._texts(found), strict=True):
                counts.add(src, len(line), results[0])
                yield results
            first += len(group)
        if prefixes is not None and len(prefixes) > first:
            there = counted(len(prefixes), "prefix", "prefixes")
            raise DataError(f"{there} for only {counted(first, 'line')}; give as many of both.")

    def _begins(self, prefixes: Sequence[str]) -> list[list[int]]:
        """The tokens that each translation begins with; all are looked at before the first is used."""
        found = self.tgt_tokenizer.encode([self.normaliser(prefix, self.tgt) for prefix in prefixes])
        self._check_lengths(found, "prefix")
        return found

    def _check_lengths(self, rows: Sequence[Sequence[int]], what: str) -> None:
        """Raise DataError for what can't be cut and is too long to be computed with."""
        for number, row in enumerate(rows, 1):
            if len(row) > self.most_input:
                raise DataError(
                    f"the {what} in line {number} has {len(row):,} tokens, more than {self.most_input:,}; shorten it"
                    + ("." if self.most_input == self.most else ", or set translate.max_source_tokens higher.")
                )

    def _parts(self, lines: Sequence[str], begins: Sequence[list[int]], first: int) -> list[_Part]:
        """What to translate; blank lines have no part, lines that are too long have several."""
        texts = [self.normaliser(line, self.src).strip() for line in lines]
        parts = []
        for number, (text, ids, begin) in enumerate(zip(texts, self.src_tokenizer.encode(texts), begins, strict=True)):
            pieces = [ids] if ids else []
            if len(ids) > self.most_input:
                cuts = cut_to_fit(text, self._sizes, self.most_input)
                pieces = self.src_tokenizer.encode([cut.strip() for cut in cuts if cut.strip()])
                log.warning(
                    f"translate: line {first + number + 1} has {len(ids):,} tokens, more than "
                    f"translate.max_source_tokens ({self.most_input:,}); it is translated in {len(pieces):,} parts"
                )
            for place, piece in enumerate(pieces):
                # A character alone may be more bytes than a model has positions.
                parts.append(_Part(first + number, place, [*piece[: self.most], EOS], begin if place == 0 else []))
        return parts

    def _sizes(self, texts: Sequence[str]) -> list[int]:
        # In portions: of a megabyte without a space every character is a text, and a list of its own once encoded.
        portions = (texts[start : start + PORTION] for start in range(0, len(texts), PORTION))
        return [len(ids) for portion in portions for ids in self.src_tokenizer.encode(portion)]

    def _search_all(self, parts: Sequence[_Part], options: Options, progress: Callable[[int], object]) -> list[_Found]:
        """The parts in order, each with what was found for it."""
        found: list[list[Hypothesis]] = [[] for _ in parts]
        rows = 1 if options.sample else self.settings.beam
        groups = batches([len(part.src) for part in parts], rows, self.batch_tokens, self.together)
        for turn, results in self._search_groups([[parts[i] for i in group] for group in groups], options):
            for i, hyps in zip(groups[turn], results, strict=True):
                found[i] = hyps
            progress(sum(parts[i].number == 0 for i in groups[turn]))
        return list(zip(parts, found, strict=True))

    def _search_groups(
        self, groups: Sequence[Sequence[_Part]], options: Options
    ) -> Iterator[tuple[int, list[list[Hypothesis]]]]:
        """Each batch's place and what was found for its parts, in any order; on a CPU by several processes."""
        processes = min(len(groups), most_processes()) if self.device.type == "cpu" else 1
        share = self.share or (partial(share_out, processes=processes) if processes > 1 else None)
        if share is None:
            yield from ((turn, self._search(group, options)) for turn, group in enumerate(groups))
            return
        for turn, results in share(len(groups), lambda turn: self._search(groups[turn], options)):
            yield turn, [[Hypothesis(tuple(tokens), *rest) for tokens, *rest in hyps] for hyps in results]

    def _search(self, parts: Sequence[_Part], options: Options) -> list[list[Hypothesis]]:
        """What is found for each part, in halves where a GPU has no memory for all of them at once."""
        try:
            return self._search_together(parts, options)
        except torch.OutOfMemoryError:
            if len(parts) == 1:
                raise
        # Not above: the error's frames hold all that was computed until then.
        half = len(parts) // 2
        return [*self._search(parts[:half], options), *self._search(parts[half:], options)]

    @torch.no_grad()
    def _search_together(self, parts: Sequence[_Part], options: Options) -> list[list[Hypothesis]]:
        src_BS = self._padded([part.src for part in parts])
        limits = [min(len(part.src) - 1 + self.settings.max_length_offset, self.most) for part in parts]
        if options.max_length:
            limits = [min(limit, options.max_length) for limit in limits]
        prefixes = [part.prefix for part in parts] if any(part.prefix for part in parts) else None
        if options.sample:
            draws = [self._sample(src_BS, limits, parts, prefixes, options, draw) for draw in range(options.n_best)]
            return [sorted(hyps, key=lambda hyp: -hyp.logp) for hyps in zip(*draws, strict=True)]
        beam = self.settings.beam
        decoder = CachedDecoder.of(self.model, src_BS, beam)
        if beam == 1:
            return [[hyp] for hyp in greedy_search(decoder, limits, prefixes, device=self.device)]
        return beam_search(
            decoder,
            limits,
            beam=beam,
            alpha=self.settings.alpha,
            length_penalty=self.settings.length_penalty,
            patience=self.settings.beam_patience,
            n_best=options.n_best,
            prefixes=prefixes,
            device=self.device,
        )

    def _sample(
        self,
        src_BS: Tensor,
        limits: Sequence[int],
        parts: Sequence[_Part],
        prefixes: Sequence[Sequence[int]] | None,
        options: Options,
        draw: int,
    ) -> list[Hypothesis]:
        numbers = [np.random.SeedSequence((options.seed, part.line, part.number, draw)) for part in parts]
        seeds = [int(number.generate_state(1, np.uint64)[0]) >> 1 for number in numbers]
        return sample(
            CachedDecoder.of(self.model, src_BS, 1),
            limits,
            generators=[torch.Generator().manual_seed(seed) for seed in seeds],
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            prefixes=prefixes,
            device=self.device,
        )

    def _texts(self, found: Sequence[Sequence[_Found]]) -> Iterator[list[Translation]]:
        """The translations of each line, its parts joined: the best of all parts, the second best of all, ..."""
        tokens = [hyp.tokens for line in found for _, hyps in line for hyp in hyps]
        texts = iter(self.tgt_tokenizer.decode(tokens))
        for line in found:
            rows = [[(hyp, next(texts).translate(CONTROLS).strip()) for hyp in hyps] for _, hyps in line]
            if not rows:
                yield [Translation("", 0.0, 0.0, True)]
                continue
            results = []
            for ranked in zip(*rows, strict=False):
                hyps = [hyp for hyp, _ in ranked]
                text = self.joint.join(text for _, text in ranked if text)
                score, logp = sum(hyp.score for hyp in hyps), sum(hyp.logp for hyp in hyps)
                results.append(Translation(text, score, logp, all(hyp.finished for hyp in hyps)))
            yield results

    @torch.no_grad()
    def score_pairs(self, srcs: Sequence[str], tgts: Sequence[str]) -> list[PairScore]:
        """The log-probability of each target given its source; both are normalised as in training."""
        _check_lines(srcs=srcs, tgts=tgts)
        sides = ((self.src_tokenizer, self.src, srcs), (self.tgt_tokenizer, self.tgt, tgts))
        src, tgt = (cutter.encode([self.normaliser(line, lang) for line in lines]) for cutter, lang, lines in sides)
        self._check_lengths(src, "source")
        self._check_lengths(tgt, "translation")
        widths = [len(s) + len(t) + 2 for s, t in zip(src, tgt, strict=True)]
        found = [PairScore(0.0, 0)] * len(widths)
        for batch in batches(widths, 1, self.batch_tokens):
            src_BS = self._padded([[*src[i], EOS] for i in batch])
            in_BT, out_BT = (self._padded(rows) for rows in (
                [[BOS, *tgt[i]] for i in batch], [[*tgt[i], EOS] for i in batch],
            ))  # fmt: skip
            logp_B = self._forced(src_BS, in_BT, out_BT)
            for i, logp in zip(batch, logp_B.tolist(), strict=True):
                found[i] = PairScore(logp, len(tgt[i]) + 1)
        return found

    def _forced(self, src_BS: Tensor, in_BT: Tensor, out_BT: Tensor) -> Tensor:
        """The summed log-probability of each row of out_BT, a few positions at a time: V logits each are large."""
        real_BT = out_BT != PAD
        hidden_ND, token_N = self.model(src_BS, in_BT)[real_BT], out_BT[real_BT]
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        logp_N = torch.cat([
            torch.log_softmax(self.model.logits(hidden), dim=1, dtype=exact).gather(1, token[:, None]).squeeze(1)
            for hidden, token in zip(torch.split(hidden_ND, 256), torch.split(token_N, 256), strict=True)
        ])  # fmt: skip
        return torch.zeros_like(out_BT, dtype=logp_N.dtype).masked_scatter(real_BT, logp_N).sum(1)

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=PAD).to(self.device)


def _check_lines(**texts: Iterable[str] | None) -> None:
    """Raise TypeError for a text in place of a list: to Python it is a sequence of texts, each of one character."""
    for name, lines in texts.items():
        if isinstance(lines, str | bytes):
            raise TypeError(f"{name} is one text; give a list of lines, e.g. [{lines[:40]!r}].")
