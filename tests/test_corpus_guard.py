"""The leak guard: no sentence of a held-out set is trained on, in whatever form the two are found."""

from pathlib import Path

import pytest

from nmt.config import CleanConfig
from nmt.corpus import Normaliser, clean_corpus
from nmt.corpus.guard import held_out_keys, leaks
from nmt.corpus.keys import hash_key, leak_key
from nmt.corpus.parallel import Workers
from nmt.io import read_lines, write_lines

GOOD = [(f"Number {n} is here.", f"第{n}号在这里。") for n in range(100)]
FAR = ("Far from it.", "远着呢。")
BOTH = {"en": False, "zh": True}
LENIENT = {"drop_markup": False, "min_ratio": 0.0, "max_ratio": 99.0, "max_byte_ratio": 99.0}
"""Rules that would drop rows which the guard has to see."""

# A raw row, and the held-out row that shares a sentence with it.
LEAKS = {
    "stage directions on both": (
        ("Thanks a lot, friends. (Applause)", "多谢各位朋友。（掌声）"),
        ("Thanks a lot, friends. (Applause)", "多谢各位朋友。（掌声）"),
    ),
    "one in the held-out set": (("Thanks a lot, friends.", "很好。"), ("Thanks a lot, friends. (Applause)", "多谢。")),
    "one in the raw text": (("And so it fell. (Laughter)", "好。"), ("And so it fell.", "然后它掉了。")),
    "another one": (("It was good.", "当时很好。（笑声）"), ("It is done.", "當時很好。（鼓掌）")),
    "a note on both": (
        ("Old Dogs is on tonight.", "今晚放《老狗》。（注：电影）"),
        ("Old Dogs is on tonight.", "今晚放《老狗》。（注：电影）"),
    ),
    "another note": (
        ("Look tonight.", "今晚放《老狗》。（注：电影）"),
        ("It is on.", "今晚放《老狗》。（譯注：片名）"),
    ),
    "a note that the other side keeps": (
        ("He said so.", "他这样说。（注：昨天）"),
        ("He said it (note: now).", "他这样说。（注：昨天）"),
    ),
    "paired tags": (("A <b>red</b> hat", "一顶<b>红</b>帽子"), ("A <b>red</b> hat", "一顶<b>红</b>帽子")),
    "tags in the held-out set": (("A red hat", "红帽"), ("A <b>red</b> hat", "一顶<b>红</b>帽子")),
    "tags on one side": (("A red hat", "红帽"), ("A <b>red</b> hat", "一顶红帽子")),
    "accelerators": (("?verb:_View", "查看(_V)"), ("?verb:_View", "查看(_V)")),
    "accelerators in brackets on both": (("File (_V)", "文件(_V)"), ("File (_V)", "存档(_V)")),
    "an accelerator on one side": (("Look at all", "全部查看(_A)"), ("See everything", "全部查看")),
    "another accelerator": (("_Look at all", "全部查看(_L)"), ("See everything", "全部查看(_E)")),
    "an entity": (("A & b", "甲"), ("A &amp; b", "甲和乙")),
    "an entity in a tag": (("A red hat", "红帽"), ("A &lt;b&gt;red&lt;/b&gt; hat", "一顶<b>红</b>帽子")),
    "mojibake": (("They ate.", "安喜欢茶。"), ("Ann likes tea.", "安喜欢茶。".encode().decode("latin-1"))),
    "numbers without their marks": (("It weighs 1.5 kg.", "重。"), ("It weighs 15 kg.", "它重15公斤。")),
    "a question": (("You go home.", "你要回家。"), ("Will you?", "你要回家？")),
}


def cleaned(folder: Path, raw: list[tuple[str, str]], test: list[tuple[str, str]], **settings):
    for name, rows in (("raw", raw), ("dev", [FAR]), ("test", [*test, ("Well, then.", "那就这样。")])):
        write_lines(folder / f"{name}.tsv", ("\t".join(row) for row in rows))
    out = folder / "out"
    out.mkdir()
    given = CleanConfig(dev=(str(folder / "dev.tsv"),), test=(str(folder / "test.tsv"),), **LENIENT, **settings)
    return clean_corpus({"x": (folder / "raw.tsv",)}, given, out, workers=1), out


@pytest.mark.parametrize("case", LEAKS)
def test_a_row_that_shares_a_sentence_with_a_given_set_is_left_out_in_whatever_form(tmp_path, case):
    raw, held_out = LEAKS[case]
    # Swapped as well: it must not matter which of the two is the one with something to be taken off.
    for n, (one, other) in enumerate(((raw, held_out), (held_out, raw))):
        folder = tmp_path / str(n)
        folder.mkdir()
        report, out = cleaned(folder, [*GOOD, one], [other])
        assert report["dropped"]["held_out"]["rows"] == 1
        assert report["sets"]["train"] == len(GOOD)
        assert report["leak"] == {"dev": 0, "test": 0, "between": 0}
        assert (read_lines(out / "test.en")[0], read_lines(out / "test.zh")[0]) == other


def test_what_only_looks_alike_stays_in_train(tmp_path):
    kept = [("It fell (applause was heard).", "掉了。"), ("See (a) here.", "看这里（注意）。"), ("A < b", "甲<乙")]
    held_out = [("It fell.", "它掉了。"), ("See here.", "看这里。"), ("A b", "甲和乙。")]
    report, _ = cleaned(tmp_path, [*GOOD, *kept], held_out)
    assert report["sets"]["train"] == len(GOOD) + 2  # `A < b` has the letters of `A b`.
    assert report["dropped"]["held_out"]["rows"] == 1


@pytest.mark.parametrize("case", LEAKS)
def test_the_check_of_the_written_files_counts_what_the_guard_has_to_find(tmp_path, case):
    trained, held_out = LEAKS[case]
    for name, row in (("train", trained), ("dev", FAR), ("test", held_out)):
        for lang, side in zip(BOTH, row, strict=True):
            write_lines(tmp_path / f"{name}.{lang}", [side])
    with Workers(1) as pool:
        assert leaks(tmp_path, Normaliser("simplified", BOTH), pool) == {"dev": 0, "test": 1, "between": 0}


def test_given_sets_that_share_a_sentence_in_different_forms_are_counted(tmp_path):
    dev, test = ("It is so. (Laughter)", "是这样。（笑声）"), ("That's it.", "是這樣。")
    for name, row in (("train", FAR), ("dev", dev), ("test", test)):
        for lang, side in zip(BOTH, row, strict=True):
            write_lines(tmp_path / f"{name}.{lang}", [side])
    with Workers(1) as pool:
        assert leaks(tmp_path, Normaliser("simplified", BOTH), pool) == {"dev": 0, "test": 0, "between": 1}


def test_held_out_keys_are_those_of_each_form_of_each_side():
    left, right = held_out_keys([("A &amp; b", "甲（笑声）"), FAR], Normaliser("simplified", BOTH))
    assert left.shape == right.shape == (2, 3)
    assert left[0].tolist() == [hash_key(0, key) for key in ("aampb", "ab", "ab")]
    assert right[0].tolist() == 3 * [hash_key(1, "甲")]
    assert right[1].tolist() == 3 * [hash_key(1, leak_key(FAR[1]))]


@pytest.mark.parametrize("script", ["simplified", "traditional", "keep", "filter"])
def test_the_guard_holds_for_every_script_policy(tmp_path, script):
    raw = [("One", "這是誰的書？（笑聲）"), ("Two", "这是谁的书？")]
    report, _ = cleaned(tmp_path, [*GOOD, *raw], [("Whose is it?", "这是谁的书？")], zh_script=script)
    assert report["sets"]["train"] == len(GOOD)
    assert report["leak"]["test"] == 0


def test_a_split_made_here_keeps_mendable_forms_of_a_sentence_in_one_group(tmp_path):
    forms = [(f"See {n} now", f"现在看{n}{end}") for n in range(60) for end in ("", "(_S)", "【_X】")]
    write_lines(tmp_path / "x.tsv", ("\t".join(row) for row in forms))
    out = tmp_path / "out"
    out.mkdir()
    report = clean_corpus({"x": (tmp_path / "x.tsv",)}, CleanConfig(dev_size=6, test_size=6), out, workers=1)
    assert report["split"]["groups"] == 60
    assert not any(report["leak"].values())
