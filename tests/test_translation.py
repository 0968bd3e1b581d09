"""Text in, text out, with small random models: order, neighbours, long lines, files; and decoding with and without a
cache."""

import io
import itertools
import json
import logging
import math
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nmt
from nmt.config import Config, DataConfig, EncodeConfig, ModelConfig, TranslateConfig, to_dict
from nmt.corpus import Normaliser
from nmt.data.batching import batches
from nmt.data.tokenizer import Tokenizer
from nmt.decoding.files import score_files, translate_file
from nmt.decoding.options import Counts, Options, PairScore, Translation
from nmt.decoding.search import beam_search, greedy_search
from nmt.decoding.translator import Translator
from nmt.errors import CheckpointError, ConfigError, DataError
from nmt.evaluation.outputs import suspicious
from nmt.io import read_lines
from nmt.model.cached_decoder import CachedDecoder, round_up
from nmt.model.transformer import Transformer
from nmt.runs import checkpoint
from nmt.special_tokens import BOS, EOS, PAD

ENGLISH = [
    "The cat sat on the mat.",
    "I do not know what you mean.",
    "Where is my red book?",
    "Run!",
    "He left at 5 p.m.",
]
CHINESE = ["猫坐在垫子上。", "我不知道你是什么意思。", "我的红书在哪里？", "快跑！", "他下午五点走了。"]


@pytest.fixture(scope="session")
def tokenizer():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([*ENGLISH, *CHINESE] * 3), model_writer=model, vocab_size=400, model_type="bpe",
        pad_id=0, unk_id=1, bos_id=2, eos_id=3, character_coverage=1.0, byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
    )  # fmt: skip
    return Tokenizer(model.getvalue(), "joint.model")


NORMALISER = Normaliser("simplified", {"en": False, "zh": True})


def make(tokenizer, *, dtype=torch.float64, direction=("en", "zh"), model=None, tied=False, **translate):
    """A translator of random weights; some of its translations end, some are cut."""
    shape = {"layers": 2, "decoder_layers": 1, "d_model": 32, "d_ff": 48, "heads": 4, "dropout": 0.0}
    wanted = {"max_length_offset": 4, "batch_tokens": 512} | translate
    config = Config(
        data=DataConfig(src=direction[0], tgt=direction[1]),
        encode=EncodeConfig(max_tokens=20),
        model=ModelConfig(**shape | (model or {})),
        translate=TranslateConfig(**wanted),
    )
    torch.manual_seed(3)
    transformer = Transformer(config.model, len(tokenizer)).to(dtype).eval()
    if not tied:
        # With one matrix to embed and to predict, random weights say their last word again and again.
        weight_VD, bias_V = torch.randn(len(tokenizer), 32, dtype=dtype) / 2, torch.zeros(len(tokenizer), dtype=dtype)
        bias_V[EOS] = 7
        transformer.logits = lambda hidden: torch.nn.functional.linear(hidden, weight_VD, bias_V)
    return Translator(transformer, tokenizer, tokenizer, NORMALISER, config)


EDGE_CASES = [
    *("", "   ", "\u3000", "\u200b", "\t", "a\u2028b", "a\x85b", "\x0b\x0c\x1c", "a\rb", "\ufeffx", "\x00\x01"),
    *(
        "ｆｕｌｌ　ｗｉｄｔｈ！",
        "臺灣的圖書館",
        "😀👍🏽 e\u0301",
        "&amp;amp; &#20320;",
        "<b>bold</b>",
        "??!!??",
        "\ufffd\ufffd",
    ),
    *("a" * 90, "好" * 70, "one. Two! Three? " * 8, "一。二！三？" * 12, "“没有。” she said 3.5 times", "\u202eabc"),
]
LINES = st.lists(st.one_of(st.sampled_from([*EDGE_CASES, *ENGLISH]), st.text(max_size=12)), max_size=8)


def words(count, seed=0):
    """Lines of 1 to 9 words that a seed chooses."""
    pool = sorted({word for line in ENGLISH for word in line.split()})
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 10, (count,), generator=generator).tolist()
    return [" ".join(pool[i] for i in torch.randint(len(pool), (n,), generator=generator).tolist()) for n in sizes]


# ── order, counts, neighbours ───────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=15, deadline=None)
@given(lines=LINES)
def test_lines_out_are_lines_in_whatever_they_are(tokenizer, lines):
    translator = make(tokenizer, max_source_tokens=30, max_length_offset=2, beam=2)
    found = translator.translate(lines)
    assert len(found) == len(lines)
    for line, text in zip(lines, found, strict=True):
        assert not re.search("[\n\r\t\x00-\x1f\x85\u2028]", text)
        if not line.strip() or not NORMALISER(line, "en"):
            assert text == ""
    assert found == [translator.translate([line])[0] for line in lines], "not in order, or not by itself"


def test_the_text_is_the_same_in_batches_of_1_7_and_64_and_in_any_order(tokenizer):
    lines = [*words(60), *EDGE_CASES, *ENGLISH]
    longest = max(map(len, tokenizer.encode(lines))) + 1
    texts = [
        make(tokenizer, beam=3, max_length_offset=3, batch_tokens=sentences * longest * 3).translate(lines)
        for sentences in (1, 7, 64)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert make(tokenizer, beam=3, max_length_offset=3).translate(lines[::-1])[::-1] == texts[0]


def test_in_float32_at_most_one_line_in_a_thousand_depends_on_its_batch(tokenizer):
    lines = words(1000, seed=1)
    one, other = (
        make(tokenizer, dtype=torch.float32, beam=2, max_length_offset=0, batch_tokens=size).translate(lines)
        for size in (160, 3000)
    )
    assert len(set(one)) > 50
    assert sum(a != b for a, b in zip(one, other, strict=True)) <= 1


@pytest.mark.slow
def test_ten_thousand_nasty_lines_stay_in_order_and_are_the_same_in_other_batches(tokenizer):
    draw = random.Random(7)
    plain = words(2000, seed=2)
    lines = [draw.choice(draw.choice([EDGE_CASES, ENGLISH, CHINESE, plain])) for _ in range(10_000)]
    lines = [line + draw.choice(["", " ", "!", "\r", "。", line[:9]]) for line in lines]
    longest = 30 + 1
    texts = [
        make(
            tokenizer, beam=2, max_length_offset=0, max_source_tokens=30, batch_tokens=sentences * longest * 2
        ).translate(some)
        for sentences, some in ((64, lines), (7, lines[:500]), (1, lines[:500]))
    ]
    assert [len(text) for text in texts] == [10_000, 500, 500]
    assert texts[0][:500] == texts[1] == texts[2]
    by_line: dict[str, str] = {}
    assert all(by_line.setdefault(line, text) == text for line, text in zip(lines, texts[0], strict=True))


@pytest.mark.slow
def test_a_line_of_a_megabyte_changes_nothing_for_its_neighbours(tokenizer):
    translator = make(tokenizer, beam=2, batch_tokens=8192)
    found = list(translator.stream([*ENGLISH, "word " * 200_000, *ENGLISH], Options(max_length=4)))
    alone = translator.translate_nbest(ENGLISH, Options(max_length=4))
    for one, other in zip([*found[:5], *found[6:]], [*alone, *alone], strict=True):
        assert one[0].text == other[0].text
    assert found[5][0].text


def test_blank_lines_stay_empty_and_the_model_is_not_asked(tokenizer):
    translator = make(tokenizer)
    translator.model = None
    counts = Counts()
    found = list(translator.stream(["", "  ", "\u3000", "\u200b", "\x00"], Options(n_best=2), counts=counts))
    assert found == [[Translation("", 0.0, 0.0, True)]] * 5
    assert (counts.lines, counts.blank, counts.empty) == (5, 5, 0)


@given(
    lengths=st.lists(st.integers(0, 50), max_size=150),
    rows=st.integers(1, 5),
    most=st.integers(1, 2000),
    together=st.sampled_from([1, 4]),
)
def test_every_line_is_in_one_batch_and_no_batch_is_larger_than_allowed(lengths, rows, most, together):
    found = batches(lengths, rows, most, together)
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    assert all(lengths[a] >= lengths[b] for a, b in itertools.pairwise(itertools.chain(*found)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) * rows <= most
    fewest = batches(lengths, rows, most)
    assert len(fewest) <= len(found) <= max(len(fewest), min(len(fewest) + together - 1, len(lengths) // 16))


@pytest.mark.parametrize(("sentences", "count"), [(1, 1), (31, 1), (32, 2), (70, 4), (300, 8), (1000, 16)])
def test_batches_of_a_test_set_are_shared_equally_by_two_and_by_four(sentences, count):
    lengths = [2 + place * 17 % 20 for place in range(sentences)]
    found = batches(lengths, 4, 4096, 4)
    assert len(found) == count
    sizes = [len(batch) * (lengths[batch[0]] + 4) for batch in found]
    assert max(sizes) < 1.7 * min(sizes)


def test_a_stream_answers_a_line_before_the_next_one_comes(tokenizer):
    read = []

    def slowly():
        for line in ENGLISH:
            read.append(line)
            yield line

    translator = make(tokenizer)
    whole = translator.translate(ENGLISH)
    for number, results in enumerate(translator.stream(slowly(), window=1), 1):
        assert len(read) == number
        assert results[0].text == whole[number - 1]
    read.clear()
    next(translator.stream(slowly(), window=3))
    assert len(read) == 3


# ── long lines ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("direction", "lines", "joint"), [(("en", "zh"), ENGLISH, ""), (("zh", "en"), CHINESE, " ")])
def test_a_line_that_is_too_long_is_its_sentences_joined(tokenizer, caplog, direction, lines, joint):
    whole = " ".join(lines) if direction[0] == "en" else "".join(lines)
    translator = make(tokenizer, direction=direction, max_source_tokens=len(tokenizer.encode([whole])[0]) - 1)
    counts = Counts()
    with caplog.at_level(logging.WARNING):
        found = [best.text for best, *_ in translator.stream([lines[0], whole], counts=counts)]
    alone = translator.translate(lines)
    assert found == [alone[0], joint.join(text for text in alone if text)]
    assert counts.split == 1
    assert "line 2 has" in caplog.text
    assert "line 1 " not in caplog.text


def test_no_part_is_longer_than_the_model_takes(tokenizer):
    translator = make(tokenizer, model={"position": "learned", "max_positions": 24}, max_length_offset=50, beam=2)
    texts = translator.translate(["好" * 500, "x, " * 200, "word " * 300])  # a longer one would have no position
    assert len(texts) == 3


# ── what is asked for ───────────────────────────────────────────────────────────────────────────────────────────────


def test_n_best_lists_are_sorted_and_begin_with_the_translation(tokenizer):
    translator = make(tokenizer, beam=4, max_length_offset=8)
    for line, results in zip(ENGLISH, translator.translate_nbest(ENGLISH, Options(n_best=3)), strict=True):
        assert 1 <= len(results) <= 3
        assert [one.score for one in results] == sorted((one.score for one in results), reverse=True)
        assert results[0].text == translator.translate([line])[0]
    with pytest.raises(ConfigError, match=r"--n-best is 5, more than translate\.beam \(4\)"):
        translator.translate_nbest(ENGLISH, Options(n_best=5))


def test_samples_depend_on_seed_and_line_number_alone(tokenizer):
    lines = words(20)
    one, other = (make(tokenizer, batch_tokens=size) for size in (30, 3000))
    drawn = one.translate_nbest(lines, Options(sample=True, n_best=6, seed=5, top_k=20, top_p=0.95))
    again = list(other.stream(lines, Options(sample=True, n_best=6, seed=5, top_k=20, top_p=0.95), window=7))
    assert [[one.text for one in row] for row in drawn] == [[one.text for one in row] for row in again]
    assert one.translate_nbest(lines, Options(sample=True, seed=6)) != [row[:1] for row in drawn]
    assert all(len(row) == 6 for row in drawn)
    same = one.translate_nbest([lines[0]] * 2, Options(sample=True, seed=5))
    assert same[0] != same[1]


def test_a_beam_of_one_is_greedy_search(tokenizer):
    translator = make(tokenizer, beam=1)
    src = torch.tensor([[*tokenizer.encode([ENGLISH[0]])[0], EOS]])
    (greedy,) = greedy_search(CachedDecoder.of(translator.model, src, 1), [src.shape[1] - 1 + 4])
    assert translator.translate_nbest(ENGLISH[:1], Options())[0][0].logp == pytest.approx(greedy.logp)


def test_translations_begin_with_their_prefix(tokenizer):
    translator = make(tokenizer, beam=2)
    prefixes = ["我", "", "猫坐在", "快", "他"]
    found = [best.text for best, *_ in translator.stream(ENGLISH, prefixes=prefixes, window=2)]
    assert all(text.startswith(prefix) for text, prefix in zip(found, prefixes, strict=True))
    assert found[1] == translator.translate(ENGLISH[1:2])[0]
    for wrong in (prefixes[:3], [*prefixes, "多"]):
        with pytest.raises(DataError, match="prefixes"):
            list(translator.stream(ENGLISH, prefixes=wrong))


def test_no_translation_is_longer_than_asked_for(tokenizer):
    translator = make(tokenizer)
    translator.tgt_tokenizer = Spy(tokenizer)
    translator.translate_nbest(ENGLISH, Options(max_length=3, n_best=2))
    assert max(len(row) for row in translator.tgt_tokenizer.decoded) <= 3


def test_impossible_options_are_told_all_at_once():
    with pytest.raises(ConfigError) as caught:
        Options(n_best=0, temperature=0, top_k=-1, top_p=1.5, seed=-1, max_length=-1)
    assert len(caught.value.problems) == 6


# ── what goes wrong with translations ───────────────────────────────────────────────────────────────────────────────


class Spy:
    """A tokenizer that notes what it decodes, and may say something else."""

    def __init__(self, tokenizer, answer=None):
        self.tokenizer, self.answer, self.decoded = tokenizer, answer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, rows):
        self.decoded += rows
        return [self.answer or text for text in self.tokenizer.decode(rows)]


def test_a_line_end_that_the_model_spells_makes_no_new_line(tokenizer):
    translator = make(tokenizer)
    translator.tgt_tokenizer = Spy(tokenizer, "\n一\r\n二\t三\u2028四 ")
    assert translator.translate(["Run!"]) == ["一  二 三 四"]


def test_empty_repeated_and_cut_translations_are_counted_and_told(tokenizer):
    translator = make(tokenizer, max_length_offset=40, tied=True)
    at = tokenizer.encode(["猫"])[0][0]
    with torch.no_grad():
        translator.model.embedding.weight[at] *= 50  # says this piece without end
    counts = Counts()
    list(translator.stream(["Run!", "", "Run! Run! Run!"], counts=counts))
    assert counts == Counts(lines=3, blank=1, repeated=2, cut=2)
    assert counts.report() == (
        "3 lines: 1 blank in the input, 2 with a translation that repeats itself, 2 cut at the length limit"
    )
    translator.tgt_tokenizer = Spy(tokenizer, " ")
    counts = Counts()
    list(translator.stream(["Run!"], counts=counts))
    assert counts.empty == 1


def test_translate_counts_the_repeated_outputs_that_eval_counts(tokenizer):
    said = {"Run!": "我们我们我们我们我们。", "Stop!": "哈哈哈哈", "No, no, no, no, no!": "不，不，不，不，不！",
            "Wait...": "等一下…………………………", "He is here.": "the cat the cat the cat the cat", "Go.": "1, 1, 1, 1, 1, 1",
            "ha ha ha ha ha ha ha": "哈哈哈哈哈哈哈哈哈"}  # fmt: skip
    translator = make(tokenizer)
    translator.tgt_tokenizer = Spy(tokenizer, "x")
    translator.tgt_tokenizer.decode = lambda rows: list(said.values())[: len(rows)]
    counts = Counts()
    hyps = [best.text for best, *_ in translator.stream(list(said), counts=counts)]
    assert hyps == list(said.values())
    assert counts.repeated == suspicious(hyps, list(said))["repeated"] == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda translator: translator.translate("Where is the station?"),
        lambda translator: translator.translate(b"Run!"),
        lambda translator: translator.translate(""),
        lambda translator: translator.translate_nbest("Run!", Options()),
        lambda translator: next(translator.stream("Run!")),
        lambda translator: next(translator.stream(["Run!", "Stop!"], prefixes="跑停")),
        lambda translator: translator.score_pairs("ab", ["啊", "波"]),
        lambda translator: translator.score_pairs(["a", "b"], "啊波"),
    ],
)
def test_a_text_in_place_of_a_list_of_lines_is_not_taken_for_its_characters(tokenizer, call):
    with pytest.raises(TypeError, match=r"is one text; give a list of lines, e.g. \["):
        call(make(tokenizer))
    assert len(make(tokenizer).translate(("Run!", "Stop!"))) == 2


# ── decoding with a real model ──────────────────────────────────────────────────────────────────────────────────────


class WithoutCache:
    """The slow way: every step runs the whole model over every prefix, with the source repeated for each row."""

    def __init__(self, model, src_BS, beam):
        self.model, self.src_RS = model, src_BS.repeat_interleave(beam, 0)
        self.tgt_RT = self.src_RS.new_empty(len(self.src_RS), 0)

    def step(self, last_R):
        self.tgt_RT = torch.cat([self.tgt_RT, last_R[:, None]], dim=1)
        return self.model.logits(self.model(self.src_RS, self.tgt_RT))[:, -1]

    def select(self, rows_R):
        self.src_RS, self.tgt_RT = self.src_RS[rows_R], self.tgt_RT[rows_R]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"norm_order": "pre", "norm_type": "rms", "activation": "swiglu", "position": "rope", "kv_heads": 2},
        {"position": "learned", "max_positions": 64, "decoder_layers": 3},
    ],
    ids=["paper", "modern", "learned"],
)
@torch.no_grad()
def test_beam_search_with_a_cache_finds_what_it_finds_without(tokenizer, model):
    translator = make(tokenizer, model=model)
    rows = [[*ids, EOS] for ids in tokenizer.encode([*ENGLISH, *words(5)])]
    width = max(map(len, rows))
    src_BS = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
    limits = [len(row) + 6 for row in rows]
    prefixes = [[], [7, 8], *[[]] * 8]
    wish = {"beam": 3, "alpha": 0.6, "n_best": 3, "prefixes": prefixes}
    fast = beam_search(CachedDecoder.of(translator.model, src_BS, 3), limits, **wish)
    slow = beam_search(WithoutCache(translator.model, src_BS, 3), limits, **wish)
    for one, other in zip(itertools.chain(*fast), itertools.chain(*slow), strict=True):
        assert (one.tokens, one.finished) == (other.tokens, other.finished)
        assert one.score == pytest.approx(other.score, abs=1e-9)
    assert any(hyp.finished and len(hyp.tokens) > 2 for hyp in itertools.chain(*fast))


@torch.no_grad()
def test_pairs_are_scored_as_the_model_gives_each_token(tokenizer):
    translator = make(tokenizer, batch_tokens=60)
    found = translator.score_pairs(ENGLISH, CHINESE)
    for src, tgt, score in zip(tokenizer.encode(ENGLISH), tokenizer.encode(CHINESE), found, strict=True):
        src_BS, logp = torch.tensor([[*src, EOS]]), 0.0
        for place, token in enumerate([*tgt, EOS]):
            logits = translator.model.logits(translator.model(src_BS, torch.tensor([[BOS, *tgt[:place]]])))
            logp += float(logits[0, -1].log_softmax(0)[token])
        assert score == PairScore(pytest.approx(logp, abs=1e-9), len(tgt) + 1)
    assert translator.score_pairs([], []) == []


# ── files and runs ──────────────────────────────────────────────────────────────────────────────────────────────────


class Pipe(io.TextIOWrapper):
    """A stdin or stdout of bytes that is no terminal."""

    def __init__(self, data=b""):
        super().__init__(io.BytesIO(data))


def test_a_file_is_translated_line_by_line_whatever_its_bytes(tokenizer, tmp_path, caplog):
    translator = make(tokenizer)
    source, out = tmp_path / "in put.en", tmp_path / "输出.zh"
    source.write_bytes(b"\xef\xbb\xbfRun!\r\n\nbad \xff\xfe byte\nWhere is\xe2\x80\xa8my book?\nRun!")
    counts = translate_file(translator, source, out)
    assert read_lines(out) == translator.translate(
        ["Run!", "", "bad \ufffd\ufffd byte", "Where is\u2028my book?", "Run!"]
    )
    assert (counts.lines, counts.blank, counts.invalid) == (5, 1, 1)
    assert "line 3 is not UTF-8" in caplog.text
    assert [path.name for path in sorted(tmp_path.iterdir())] == [source.name, out.name]


def test_an_empty_file_gives_an_empty_file_and_a_missing_one_an_error(tokenizer, tmp_path):
    (tmp_path / "nothing").touch()
    assert translate_file(make(tokenizer), tmp_path / "nothing", tmp_path / "out").lines == 0
    assert (tmp_path / "out").read_bytes() == b""
    with pytest.raises(DataError, match="cannot read"):
        translate_file(make(tokenizer), tmp_path / "absent", tmp_path / "out")


def test_a_count_of_one_is_told_in_the_singular(tokenizer):
    assert Counts(lines=1, blank=1).report().startswith("1 line: 1 blank")
    with pytest.raises(DataError, match="1 prefix for more lines"):
        list(make(tokenizer).stream(["Run!", "Run!"], prefixes=["快"], window=2))
    with pytest.raises(DataError, match="2 prefixes for only 1 line;"):
        list(make(tokenizer).stream(["Run!"], prefixes=["快", "快"], window=1))


def test_a_translation_that_fails_leaves_the_old_output_alone(tokenizer, tmp_path):
    (tmp_path / "in").write_text("Run!\nRun!\n", encoding="utf-8")
    (tmp_path / "begin").write_text("快\n", encoding="utf-8")
    (tmp_path / "out").write_text("old\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"1 prefix and .* 2 lines"):
        translate_file(make(tokenizer), tmp_path / "in", tmp_path / "out", prefix_file=tmp_path / "begin", window=1)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "old\n"


def test_stdin_is_translated_to_stdout(tokenizer, monkeypatch):
    translator = make(tokenizer)
    monkeypatch.setattr(sys, "stdin", Pipe(b"Run!\n\nWhere is my red book?"))
    monkeypatch.setattr(sys, "stdout", out := Pipe())
    translate_file(translator, "-", "-", window=1)
    expected = translator.translate(["Run!", "", "Where is my red book?"])
    assert out.buffer.getvalue().decode() == "".join(f"{line}\n" for line in expected)


def test_n_best_output_has_line_rank_score_and_text(tokenizer, tmp_path):
    translator = make(tokenizer)
    (tmp_path / "in").write_text("Run!\n\nI know.\n", encoding="utf-8")
    translate_file(translator, tmp_path / "in", tmp_path / "out", Options(n_best=2))
    rows = [line.split("\t") for line in read_lines(tmp_path / "out")]
    expected = translator.translate_nbest(["Run!", "", "I know."], Options(n_best=2))
    assert rows == [
        [str(line), str(rank), f"{one.score:.6f}", one.text]
        for line, results in enumerate(expected, 1)
        for rank, one in enumerate(results, 1)
    ]
    translate_file(translator, tmp_path / "in", tmp_path / "out", table=True)
    assert [line.split("\t")[:2] for line in read_lines(tmp_path / "out")] == [["1", "1"], ["2", "1"], ["3", "1"]]


def test_scores_of_files_are_those_of_their_pairs(tokenizer, tmp_path):
    (tmp_path / "en").write_text("\n".join(ENGLISH), encoding="utf-8")
    (tmp_path / "zh").write_text("\n".join(CHINESE), encoding="utf-8")
    translator = make(tokenizer)
    scores = score_files(translator, tmp_path / "en", tmp_path / "zh", tmp_path / "out")
    assert scores == translator.score_pairs(ENGLISH, CHINESE)
    assert read_lines(tmp_path / "out") == [f"{score.logp:.6f}\t{score.tokens}" for score in scores]


@pytest.fixture
def run(tokenizer, tmp_path):
    """A run folder as a training leaves it."""
    translator = make(tokenizer, dtype=torch.float32, tied=True)
    config = Config(
        model=translator.model.config,
        translate=TranslateConfig(max_length_offset=4),
        data=DataConfig(src="en", tgt="zh"),
    )
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "joint.model").write_bytes(tokenizer._processor.serialized_model_proto())
    NORMALISER.save(tmp_path / "normalisation.json")
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    checkpoint.save(tmp_path / "final", translator.model.state_dict(), {"step": 1})
    return tmp_path


def test_a_run_folder_is_all_that_a_translator_needs(tokenizer, run):
    loaded = nmt.Translator.load(run, device="cpu")
    assert loaded.translate(ENGLISH) == make(tokenizer, dtype=torch.float32, tied=True).translate(ENGLISH)
    greedy = nmt.Translator.load(run, replace(loaded.settings, beam=1), device="cpu")
    assert greedy.settings.beam == 1
    assert greedy.translate(ENGLISH) == make(tokenizer, dtype=torch.float32, tied=True, beam=1).translate(ENGLISH)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_scores_nearly_as_float32_does(run, precision):
    plain = Translator.load(run, device="cpu")
    half = Translator.load(run, replace(plain.settings, precision=precision), device="cpu")
    assert {p.dtype for p in half.model.parameters()} == {getattr(torch, precision)}
    assert {b.dtype for b in half.model.buffers()} == {torch.float32}
    for one, other in zip(plain.score_pairs(ENGLISH, CHINESE), half.score_pairs(ENGLISH, CHINESE), strict=True):
        assert other == pytest.approx(one, rel=0.02)
    for beam in (4, 1):
        half.settings = replace(half.settings, beam=beam)
        found = list(half.stream([*ENGLISH * 4, ""]))
        assert found[-1][0].text == ""
        assert len(found) == 4 * len(ENGLISH) + 1
        assert all(math.isfinite(best.logp) for best, *_ in found)
        assert found[: len(ENGLISH)] == found[len(ENGLISH) : 2 * len(ENGLISH)]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [{}, {"position": "rope", "kv_heads": 2}, {"position": "learned"}, {"norm_order": "pre"}]
)
def test_a_decoder_in_half_precision_follows_the_one_in_float32(tokenizer, precision, shape):
    exact, half = (make(tokenizer, dtype=torch.float32, model=shape, tied=True).model for _ in range(2))
    for weight in half.parameters():
        weight.data = weight.data.to(precision)
    generator = torch.Generator().manual_seed(4)
    src_BS = torch.randint(4, 400, (9, 6), generator=generator)
    decoders, order = [CachedDecoder.of(model, src_BS, 2) for model in (exact, half)], torch.arange(18)
    for leaving in (0, 0, 4, 2, 2, 0, 1) * 3:
        if len(order) == 2:
            break
        token_R = torch.randint(4, 400, (len(order),), generator=generator)
        one, other = (decoder.step(token_R).float().log_softmax(1) for decoder in decoders)
        assert other.shape == one.shape
        assert (one.exp() - other.exp()).abs().max() < 0.02
        sentences = len(order) // 2 - leaving
        order = torch.arange(2 * sentences)
        order[:2] = torch.tensor([1, 0])
        for decoder in decoders:
            decoder.select(order)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_sentences_that_are_computed_in_vain_change_nothing(tokenizer, beam, count):
    model = make(tokenizer).model
    generator = torch.Generator().manual_seed(count)
    src_BS = torch.randint(4, 400, (count, 6), generator=generator)
    src_BS[::2, 4:] = 0
    limits = torch.randint(1, 9, (count,), generator=generator).tolist()
    assert [round_up(n, 4) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 12]
    filled_BS = torch.cat([src_BS, src_BS[-1:].expand(round_up(count, 4) - count, -1)])
    with torch.no_grad():
        decoders = [
            CachedDecoder(model, *model.encode(src_BS), beam),
            CachedDecoder(model, *model.encode(filled_BS), beam, 4),
        ]
    found = [beam_search(decoder, limits, beam=beam, alpha=1.0) for decoder in decoders]
    for one, other in zip(*found, strict=True):
        assert [hyp.tokens for hyp in one] == [hyp.tokens for hyp in other]
        assert [hyp.logp for hyp in one] == pytest.approx([hyp.logp for hyp in other], abs=1e-9)


def test_a_folder_that_is_no_run_or_has_another_tokenizer_is_refused(run, tmp_path):
    with pytest.raises(CheckpointError, match="no run folder"):
        Translator.load(tmp_path / "absent", device="cpu")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(ENGLISH), model_writer=model, vocab_size=300, model_type="bpe", pad_id=0, unk_id=1,
        bos_id=2, eos_id=3, byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    (run / "tokenizer" / "joint.model").write_bytes(model.getvalue())
    with pytest.raises(CheckpointError, match="has 300 pieces, but the model has 400"):
        Translator.load(run, device="cpu")


def test_nmt_itself_loads_no_torch():
    code = "import sys, nmt; assert 'torch' not in sys.modules; nmt.Translator; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
