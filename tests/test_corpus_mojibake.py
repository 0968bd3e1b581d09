"""mojibake: text read in a wrong encoding comes back, what someone meant stays, and what is lost is known as lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import CleanConfig
from nmt.corpus import Normaliser
from nmt.corpus.cleaning import clean_chunk
from nmt.corpus.mojibake import is_damaged, repair
from nmt.corpus.reading import Chunk


def misread(text: str, encoding: str) -> str:
    """UTF-8 read as another encoding; the five bytes that Windows-1252 lacks are read as controls, as browsers do."""
    raw = text.encode()
    if encoding == "latin-1":
        return raw.decode("latin-1")
    return "".join(bytes([code]).decode("cp1252", "ignore") or chr(code) for code in raw)


MEANT = (
    """
It’s|“Yes,” he said.|‘No’|Yes — no|1990–1995|Wait…|• point|™|€5|£5|25 °C|© 2020|½ cup|x²|3 × 4|− 5|→ go|✓ done
café|über|ñandú|El Niño|à la carte|voilà|Ça va|naïve|São Paulo|Île|École|CAFÉ|Åland|Österreich|Ñuñoa|Ich weiß|l’été
¿Qué?|¡Hola!|«oui»|Paweł|Łódź|Dvořák|Zürich’s|naïve café’s “menu”|😀 ok|Привет, мир|Ελλάδα|日本語です|한국어로
“你好”|你好，世界。|我们去吧！|他说“你好”。|——你是谁？|《红楼梦》（上）
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
@pytest.mark.parametrize("text", MEANT)
def test_text_misread_once_or_more_often_comes_back(text, encoding, times):
    wrong = text
    for _ in range(times):
        wrong = misread(wrong, encoding)
    assert wrong != text
    assert repair(wrong) == text
    assert repair(f"Good text: {wrong} (and 好).") == f"Good text: {text} (and 好)."
    assert not is_damaged(text)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("Itâ€™s", "It’s"),
        ("ItÂ’s", "It’s"),
        ("It\x92s", "It’s"),
        ("\x93Yes,\x94 he said", "“Yes,” he said"),
        ("a\x97b", "a—b"),
        ("Â“HelloÂ”", "“Hello”"),
        ("ItÃ¢â‚¬â„¢s", "It’s"),
        ("cafÃƒÂ©", "café"),
        ("ï»¿Hello", "\ufeffHello"),
        ("5Â\xa0kg", "5\xa0kg"),
        ("ACMEÂ®", "ACME®"),
        ("他说：â€œå¥½çš„â€\x9d。", "他说：“好的”。"),
    ],
)
def test_known_forms_of_damage_are_undone(wrong, right):
    assert repair(wrong) == right


@pytest.mark.parametrize(
    "text",
    """
    Ângela|Âge d’or|château — bâtiment|pâté™|Vâlcea|ROMÂNIA|NÃO|SÃO PAULO|MANHÃ|AMANHÃ…|“AMANHÔ|IRMÃ»|MANHÃ –|A letra Ã.
    ‘Ã’|“Ô|(Ã)|“CAFÉ”|CAFÉ”|le café…”|«là»…|voilà…”|É tarde|‘È’ 和 ‘Í’|像“ê”这样的|“PÅ”|Ä…|Öl™|Þór|Ðað|Åse|Ärger|5 Å
    él—“sí”|½×½×½|2×½|25°|Ø·|português não…”|Haï»|«FRÊ»|Ñ“|Ü–Ä|à la carte|5 °C|café
    """.replace("\n", "|")
    .replace("    ", "")
    .strip("|")
    .split("|"),
)
def test_text_that_may_be_meant_stays(text):
    assert repair(text) == text
    assert not is_damaged(text)


@pytest.mark.parametrize(
    "text",
    ["打开程\x8b序", "\ufffd", "ï¿½", "锟斤拷", "â€œHelloâ€", "cafÃ", "voilÃ  qui", "It â€ s", "ã\x80茶", "\x81"],
)
def test_what_cannot_be_undone_is_damage(text):
    assert is_damaged(repair(text))


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("Itâ€™s mine.\t那是我的。", "It's mine.\t那是我的。"),
        ("The cafÃ© is open.\t咖啡馆开着。", "The café is open.\t咖啡馆开着。"),
        ("He said yes.\t他说â€œå¥½çš„â€\x9d。", "He said yes.\t他说“好的”。"),
        ("&acirc;&euro;&trade;Tis mine.\t那是我的。", "'Tis mine.\t那是我的。"),
        ("Ângela is here.\tÂngela在这里。", "Ângela is here.\tÂngela在这里。"),
        ("Itâ€ s mine.\t那是我的。", ""),
        ("That is lost.\t那是锟斤拷的。", ""),
    ],
)
def test_clean_keeps_what_it_can_undo_and_drops_what_is_lost(line, kept):
    normaliser = Normaliser("simplified", {"en": False, "zh": True})
    found = clean_chunk(Chunk(0, 2, [(line.encode(),)]), CleanConfig(), normaliser, ("x",))
    if kept:
        assert found.kept.decode().split("\t", 2)[2].rstrip() == kept
    else:
        assert found.counts["dropped damaged"] == 1


pieces = st.sampled_from([*"ÃÂâÄÅÐ×ðïãé€™œ‚Æ’“”…\xa0\x80\x9d\x92 aA好", "Ã©", "â€™", "Ã¢â‚¬â„¢"])


@given(st.one_of(st.text(max_size=30), st.lists(pieces, max_size=14).map("".join)))
def test_repairing_twice_is_repairing_once(text):
    assert repair(repair(text)) == repair(text)


@given(st.text(st.characters(min_codepoint=0x3400, max_codepoint=0x9FFF), min_size=2, max_size=20))
def test_any_chinese_text_misread_comes_back(text):
    for encoding in ("cp1252", "latin-1"):
        assert repair(misread(text, encoding)) == text


def test_no_long_line_takes_more_than_linear_time():
    for piece in ("Ã", "Ãƒ", "â€", "é…", "\x92", "ï»", "Ð", "aÃ"):
        repair(piece * 100_000)
