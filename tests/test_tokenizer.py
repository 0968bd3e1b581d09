"""bpe: a vocabulary that gives every text back, the same one each time, and samples that are pure functions."""

import hashlib
import io
import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from bars import watched_bars
from forked import forked
from nmt.config import BpeConfig
from nmt.data import train_tokenizer
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.data.train_tokenizer import _attempt, train_bpe, verification_lines
from nmt.errors import ConfigError, DataError
from nmt.io import read_lines, write_lines
from nmt.special_tokens import BOS, EOS, PAD, UNK

LANGUAGES = ("en", "zh")
SMALL = BpeConfig(vocab_size=420, character_coverage=0.995)
any_line = st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=40)


def sentences(seed: int, size: int) -> dict[str, list[str]]:
    """Pairs out of a few words, enough of them for some hundred pieces."""
    choose = random.Random(seed).choice
    people = [("The teacher", "老师"), ("My sister", "我妹妹"), ("The old farmer", "老农民"), ("Nobody", "没有人")]
    deeds = [
        ("is reading", "在读"),
        ("has forgotten", "忘了"),
        ("would rather sell", "宁愿卖"),
        ("is painting", "在画"),
    ]
    things = [("a newspaper.", "报纸。"), ("the blue umbrella!", "蓝色的雨伞！"), ("those letters?", "那些信吗？")]
    rows = [(choose(people), choose(deeds), choose(things)) for _ in range(size)]
    return {
        "en": [f"{who[0]} {does[0]} {what[0]}" for who, does, what in rows],
        "zh": ["".join(word[1] for word in row) for row in rows],
    }


def write_clean(folder: Path, train: dict[str, list[str]], dev: dict[str, list[str]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, split in (("train", train), ("dev", dev)):
        for language, lines in split.items():
            write_lines(folder / f"{name}.{language}", lines)
    return folder


@pytest.mark.parametrize("joint", [True, False])
def test_the_progress_bar_counts_every_line_as_it_is_learnt_from_and_as_it_is_checked(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joint: bool
) -> None:
    monkeypatch.setattr(train_tokenizer, "BLOCK_LINES", 30)
    bars = watched_bars(monkeypatch, train_tokenizer)
    size = 420 if joint else 330
    train_bpe(
        clean, BpeConfig(vocab_size=size, character_coverage=0.995, shared_vocab=joint), LANGUAGES, tmp_path / "new"
    )
    models = [str(path) for path in (tmp_path / "new").glob("*.model")]
    given = BpeConfig(vocab_size=size, shared_vocab=joint, model=tuple(sorted(models)))
    train_bpe(clean, given, LANGUAGES, tmp_path / "given")
    assert [(bar.total, bar.n) for bar in bars] == [(1600, 1600), (800, 800)]
    assert all(bar.moves > 20 for bar in bars)


def test_a_change_is_named_by_its_line_whatever_block_it_is_in(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_tokenizer, "BLOCK_LINES", 3)
    model = Tokenizer(_attempt(iter(sentences(1, 400)["en"]), SMALL, 300), "x.model")
    lines = ["The teacher"] * 8
    for place in range(8):
        odd = [*lines[:place], "a\u2581b", *lines[place + 1 :]]
        found = train_tokenizer.verify_tokenizer({"en": model}, {"en": odd}, {"en": lines})["sides"]["en"]
        assert (found["lines"], found["changed_lines"], found["first_change"]) == (8, 1, place + 1)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clean(tmp_path_factory.mktemp("clean"), sentences(1, 400), sentences(2, 20))


@pytest.fixture(scope="module")
def joint(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("joint")
    train_bpe(clean, SMALL, LANGUAGES, out)
    return out


@pytest.fixture(scope="module")
def tokenizer(joint: Path) -> Tokenizer:
    return Tokenizer.load(joint / "joint.model")


def other_model(lines: list[str], **options: object) -> bytes:
    """A model made with SentencePiece directly: ours but for `options`."""
    model = io.BytesIO()
    ours: dict[str, object] = {
        "model_type": "bpe", "vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "add_dummy_prefix": False, "minloglevel": 3,
        "pad_id": PAD, "unk_id": UNK, "bos_id": BOS, "eos_id": EOS,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=iter(lines), model_writer=model, **{**ours, **options})
    return model.getvalue()


# ── text -> ids -> text ─────────────────────────────────────────────────────────────────────────────────────────────


@given(line=any_line)
def test_every_line_comes_back_as_it_was(tokenizer, line):
    (ids,) = tokenizer.encode([line])
    assert tokenizer.decode([ids]) == [line]
    assert not {PAD, UNK, BOS, EOS} & set(ids)


@pytest.mark.parametrize(
    "line", ["", " ", "   ", " a", "a ", "  a  b  ", "\t", "\x00", "a\r", "a\u2028b", "，！？（）ｆｕｌｌ①", "e\u0301ﬁ",
             "😀", "<s>", "<unk>", "<0x41>", "<mask/>", " x<mask/> "],
)  # fmt: skip
def test_spaces_and_marks_that_others_fold_come_back_too(tokenizer, line):
    assert tokenizer.decode(tokenizer.encode([line])) == [line]


def test_special_ids_are_first_and_text_cannot_write_them(tokenizer):
    assert tokenizer.pieces(range(5)) == ["<pad>", "<unk>", "<s>", "</s>", "<mask/>"]
    assert not {PAD, UNK, BOS, EOS} & set(itertools.chain(*tokenizer.encode(["<pad>", "<unk><s>", "</s>"])))
    assert tokenizer.encode(["a<mask/>b"])[0].count(tokenizer.id_of("<mask/>")) == 1


def test_decoding_passes_over_pad_bos_and_eos_and_bytes_that_are_no_character(tokenizer):
    (ids,) = tokenizer.encode(["老师 is 在读"])
    assert tokenizer.decode([[BOS, *ids, EOS, PAD, PAD], [], [PAD]]) == ["老师 is 在读", "", ""]
    assert tokenizer.decode([[tokenizer.id_of("<0xE8>")]]) == ["\ufffd"]


def test_a_piece_that_is_not_there_is_an_error(tokenizer):
    with pytest.raises(DataError, match="no piece '<sep/>'"):
        tokenizer.id_of("<sep/>")


# ── the model ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_run_makes_the_same_bytes(clean, joint, tmp_path):
    train_bpe(clean, SMALL, LANGUAGES, tmp_path)
    for name in ("joint.model", "joint.vocab", "verification.json"):
        assert (tmp_path / name).read_bytes() == (joint / name).read_bytes()
    assert str(clean).encode() not in (joint / "joint.model").read_bytes()


def test_the_vocab_file_has_a_row_for_each_piece(joint, tokenizer):
    rows = [line.split("\t") for line in read_lines(joint / "joint.vocab")]
    assert [piece for piece, _ in rows] == tokenizer.pieces(range(len(tokenizer)))
    assert len(rows) == SMALL.vocab_size


def test_a_line_over_the_usual_limit_is_learnt_from(tmp_path):
    long = "龘" * 5000  # 15,000 bytes; SentencePiece leaves lines over 4,192 out unless told otherwise
    train = {"en": [*sentences(1, 400)["en"], long], "zh": [*sentences(1, 400)["zh"], long]}
    train_bpe(
        write_clean(tmp_path, train, sentences(2, 5)),
        BpeConfig(vocab_size=420, character_coverage=1),
        LANGUAGES,
        tmp_path,
    )
    assert Tokenizer.load(tmp_path / "joint.model").id_of("龘") > EOS


@pytest.mark.parametrize(
    ("vocab_size", "bounds"), [(8000, r"from ([\d,]+) to ([\d,]+)\."), (270, r"at least ([\d,]+)")]
)
def test_an_impossible_vocabulary_is_refused_with_sizes_that_work(clean, tmp_path, vocab_size, bounds):
    def make(size: int) -> None:
        train_bpe(clean, BpeConfig(vocab_size=size), LANGUAGES, tmp_path)

    with pytest.raises(ConfigError, match=bounds) as refusal:
        make(vocab_size)
    assert not list(tmp_path.glob("*.model"))
    fewest, *most = [int(n.replace(",", "")) for n in re.search(bounds, str(refusal.value)).groups()]
    for size, step in [(fewest, -1), *((n, 1) for n in most)]:
        make(size)
        assert len(Tokenizer.load(tmp_path / "joint.model")) == size
        with pytest.raises(ConfigError):
            make(size + step)


def test_a_corpus_without_text_is_refused(tmp_path):
    write_clean(tmp_path, {"en": ["", ""], "zh": ["", ""]}, {"en": [], "zh": []})
    with pytest.raises(DataError, match="no text"):
        train_bpe(tmp_path, SMALL, LANGUAGES, tmp_path)


@pytest.mark.parametrize("symbols", [("a b",), ("",), ("<s>",), ("<0x41>",), ("▁",), ("x", "x")])
def test_a_user_symbol_that_cannot_be_a_piece_is_refused(symbols):
    with pytest.raises(ConfigError, match="user_symbols"):
        BpeConfig(user_symbols=symbols)


def test_without_joint_each_language_has_a_model_of_its_own(clean, joint, tmp_path):
    verification = train_bpe(
        clean, BpeConfig(vocab_size=320, character_coverage=0.995, shared_vocab=False), LANGUAGES, tmp_path
    )
    en, zh = load_tokenizers(tmp_path, "en", "zh")
    assert sorted(path.name for path in tmp_path.glob("*.model")) == ["en.model", "zh.model"]
    assert en.sha256 != zh.sha256 == verification["models"]["zh"]["sha256"]
    assert " " not in "".join(read_lines(clean / "train.zh"))
    assert zh.decode(zh.encode(["a 老师"])) == en.decode(en.encode(["a 老师"])) == ["a 老师"]
    src, tgt = load_tokenizers(joint, "zh", "en")
    assert src is tgt
    with pytest.raises(DataError, match="nmt bpe makes it"):
        load_tokenizers(tmp_path, "en", "de")


# ── a model from elsewhere ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_fits_is_taken_as_it_is(clean, joint, tmp_path):
    given = BpeConfig(model=(str(joint / "joint.model"),))
    verification = train_bpe(clean, given, LANGUAGES, tmp_path)
    assert (tmp_path / "joint.model").read_bytes() == (joint / "joint.model").read_bytes()
    assert verification == json.loads((joint / "verification.json").read_text())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pad_id": 3, "eos_id": 0}, "its ids are"),
        ({"normalization_rule_name": "nmt_nfkc"}, "rewrites text"),
        ({"remove_extra_whitespaces": True}, "rewrites text"),
        ({"add_dummy_prefix": True}, "dummy prefix"),
        ({"byte_fallback": False, "vocab_size": 120}, "unknown characters"),
        ({"model_type": "unigram", "vocab_size": 330}, "not a BPE model"),
    ],
)
def test_a_model_that_breaks_what_the_rest_relies_on_is_refused(clean, tmp_path, options, reason):
    lines = [*read_lines(clean / "train.en"), *read_lines(clean / "train.zh")]
    (tmp_path / "other.model").write_bytes(other_model(lines, **options))
    with pytest.raises(ConfigError, match=reason):
        train_bpe(clean, BpeConfig(model=(str(tmp_path / "other.model"),)), LANGUAGES, tmp_path / "out")


def test_a_file_that_is_no_model_is_refused(clean, tmp_path):
    with pytest.raises(DataError, match="not a SentencePiece model"):
        train_bpe(clean, BpeConfig(model=(__file__,)), LANGUAGES, tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        train_bpe(clean, BpeConfig(model=("nowhere.model",)), LANGUAGES, tmp_path)


# ── the certificate ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_certificate_counts_what_is_in_train(clean, joint, tokenizer):
    verification = json.loads((joint / "verification.json").read_text())
    seen: Counter[int] = Counter()
    for side in LANGUAGES:
        ids = [tokenizer.encode([line])[0] for line in read_lines(clean / f"train.{side}")]
        seen.update(itertools.chain(*ids))
        assert verification["sides"][side]["tokens_per_sentence"] == pytest.approx(sum(map(len, ids)) / len(ids))
        assert verification["sides"][side]["unknown"] == verification["sides"][side]["changed_lines"] == 0
    learnt = [i for i, piece in enumerate(tokenizer.pieces(range(420))) if i > EOS and not piece.startswith("<0x")]
    assert verification["models"]["joint"]["rare_pieces"] == sum(seen[i] < 10 for i in learnt)
    assert verification["round_trip_bleu"] == 100.0
    assert "BLEU of the round trip on dev: 100.0" in verification_lines(verification)


def test_text_that_does_not_come_back_fails_the_stage_and_names_the_line(tmp_path):
    train, dev = sentences(1, 400), sentences(2, 20)
    train["zh"][6] += "\u2581"
    with pytest.raises(DataError, match=r"train\.zh: 1 line would come back .* line 7\)"):
        train_bpe(write_clean(tmp_path, train, dev), SMALL, LANGUAGES, tmp_path)
    train["zh"][6], dev["zh"][3] = "老师在读报纸。", "\u2581"
    with pytest.raises(DataError, match=r"dev"):
        train_bpe(write_clean(tmp_path, train, dev), SMALL, LANGUAGES, tmp_path)
    assert json.loads((tmp_path / "verification.json").read_text())["round_trip_bleu"] is None


# ── BPE-dropout ─────────────────────────────────────────────────────────────────────────────────────────────────────


def own_merges(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    """The sampler's own merges, none of them skipped."""
    return tokenizer._merges.sample(lines, 0.0, seed=0)


@given(lines=st.lists(any_line, max_size=4))
def test_when_no_merge_is_skipped_a_sample_is_what_sentencepiece_gives(tokenizer, lines):
    assert own_merges(tokenizer, lines) == tokenizer.encode(lines)
    assert tokenizer.encode_sampled(lines, 0.0, seed=3) == tokenizer.encode(lines)


def test_so_it_is_on_natural_text_and_on_units_too_long_to_be_remembered(clean, tokenizer):
    for side in LANGUAGES:
        lines = read_lines(clean / f"train.{side}")
        assert own_merges(tokenizer, lines) == tokenizer.encode(lines)
    endless = ["老师在读报纸" * 200, "theteacherisreading" * 50 + " x", "aaaaaaaaaaa" * 30]
    assert own_merges(tokenizer, endless) == tokenizer.encode(endless)
    assert tokenizer.decode(tokenizer.encode_sampled(endless, 0.4, seed=1)) == endless


@given(lines=st.lists(any_line, max_size=4), dropout=st.floats(0.01, 0.99), seed=st.integers(0, 2**40))
def test_each_sample_decodes_to_its_line(tokenizer, lines, dropout, seed):
    sampled = tokenizer.encode_sampled(lines, dropout, seed)
    assert tokenizer.decode(sampled) == lines
    assert tokenizer.encode_sampled(lines, dropout, seed) == sampled


def test_samples_are_the_same_in_every_process_and_others_for_another_seed(clean, joint, tokenizer):
    lines = read_lines(clean / "train.en")

    def digest(seed: int) -> str:
        return hashlib.sha256(json.dumps(tokenizer.encode_sampled(lines, 0.1, seed)).encode()).hexdigest()

    program = (
        "import hashlib, json; from nmt.io import read_lines; from nmt.data.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.load({str(joint / 'joint.model')!r}); tokenizer.encode_sampled(['warm up'], 0.5, 9)\n"
        f"ids = tokenizer.encode_sampled(read_lines({str(clean / 'train.en')!r}), 0.1, 7)\n"
        "print(hashlib.sha256(json.dumps(ids).encode()).hexdigest())"
    )
    elsewhere = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert digest(7) == elsewhere.strip() == digest(7) != digest(8)


def test_samples_are_distributed_as_those_of_sentencepiece(joint, tokenizer):
    times, word = 20_000, "rather sell"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(joint / "joint.model"))
    theirs = Counter(map(tuple, processor.Encode([word] * times, enable_sampling=True, nbest_size=-1, alpha=0.1)))
    ours = Counter(map(tuple, tokenizer.encode_sampled([word] * times, 0.1, seed=1)))
    common = [ids for ids, n in theirs.most_common(20) if n > 100]
    assert len(common) > 3
    for ids in common:
        # Five standard deviations of the difference of two counts.
        assert abs(ours[ids] - theirs[ids]) < 5 * (2 * theirs[ids]) ** 0.5


def test_a_dropout_near_one_leaves_single_characters(tokenizer):
    (ids,) = tokenizer.encode_sampled(["the teacher"], 0.999999, seed=1)
    assert tokenizer.pieces(ids) == list("the▁teacher")


@pytest.mark.slow
def test_a_real_corpus_comes_back_whole_and_samples_as_sentencepiece_does(foreign_data, tmp_path):
    split = foreign_data / "cmn" / "split"
    texts = {name: {"en": read_lines(split / f"{name}.en"), "zh": read_lines(split / f"{name}.zhs")}
             for name in ("train", "dev")}  # fmt: skip
    verification = train_bpe(
        write_clean(tmp_path, texts["train"], texts["dev"]),
        BpeConfig(vocab_size=4000, character_coverage=0.995),
        LANGUAGES,
        tmp_path,
    )
    assert verification["models"]["joint"]["rare_share"] < 0.1
    tokenizer = Tokenizer.load(tmp_path / "joint.model")
    for lines in texts["train"].values():
        assert own_merges(tokenizer, lines) == tokenizer.encode(lines)
        assert tokenizer.decode(tokenizer.encode_sampled(lines, 0.1, seed=1)) == lines


def test_three_hundred_mutated_models_are_refused_or_read_without_a_crash():
    text = [
        f"the {colour} {thing} number {n}" for colour in ("red", "绿") for thing in ("book", "杯") for n in range(9)
    ]
    model = _attempt(text, BpeConfig(vocab_size=300, character_coverage=1.0), 300)

    def read_them_all() -> None:
        refused = 0
        for seed in range(300):
            rng, changed = random.Random(seed), bytearray(model)
            if seed % 2:
                for _ in range(rng.choice((1, 3, 20))):
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            else:
                first, last = sorted(rng.randrange(len(changed)) for _ in range(2))
                del changed[first:last]
            try:
                read = Tokenizer(bytes(changed), "joint.model")
            except DataError:
                refused += 1
                continue
            read.decode(read.encode(text))
        assert 0 < refused < 300

    # In a child, because a crash would be one of native code.
    ended = forked(read_them_all)
    assert ended.code == 0, ended.told
