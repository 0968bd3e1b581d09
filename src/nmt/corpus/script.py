"""Which script a text is written in, and Traditional and Simplified Chinese."""

import functools
import re
from collections.abc import Iterable
from typing import Any, Literal

from nmt.languages import parse

HAN = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
"""The inside of a character class: Han characters, the repetition mark and the round zero among them."""
KANA = "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fd-\u30ff\u31f0-\u31ff\uff66-\uff6f\uff71-\uff9d"
"""Hiragana and katakana; not ・ and ー, which Chinese text has as a dot in names and as a dash."""
HANGUL = "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7a3\ud7b0-\ud7fb\uffa0-\uffdc"

_UNSPACED = f"{HAN}{KANA}"  # Japanese is measured as Chinese is: it has no spaces either.
_HAN = re.compile(f"[{_UNSPACED}]")
_LETTER = re.compile(r"[^\W\d_]")
_UNIT = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def has_han(text: str) -> bool:
    """Whether `text` has a Han character or kana."""
    return _HAN.search(text) is not None


def has_letter(text: str) -> bool:
    return _LETTER.search(text) is not None


def han_share(text: str) -> float:
    """Han characters and kana as a share of the letters of `text`; 0 if it has no letter."""
    return len(_HAN.findall(text)) / max(1, len(_LETTER.findall(text)))


def units(text: str) -> int:
    """Han characters and kana plus runs of other letters and digits: what text without spaces has in place of words."""
    return len(_UNIT.findall(text))


def is_han_side(lines: Iterable[str]) -> bool:
    """Whether at least half of the lines that are not blank have a Han character or kana."""
    seen = [has_han(line) for line in lines if line.strip()]
    return 2 * sum(seen) >= len(seen) > 0


# ── another language ──────────────────────────────────────────────────────────────────────────────────────────────────

_KANA_OR_HANGUL = re.compile(f"[{KANA}{HANGUL}]")
_QUOTED = re.compile(r"“[^“”]*”|‘[^‘’]*’|「[^「」]*」|『[^『』]*』|《[^《》]*》|（[^（）]*）|\([^()]*\)|\"[^\"]*\"")

LEAST_FOREIGN = 0.1
"""Share of kana or hangul among the letters above which a line isn't Chinese; Japanese has three times as much."""


def is_japanese_or_korean(text: str) -> bool:
    """Whether more than one letter, and a tenth of all, is kana or hangul; quotations count if there is nothing else.

    A Chinese line may quote a Japanese word (写作“みの”), and の alone stands in brand names.
    """
    if text.isascii() or not _KANA_OR_HANGUL.search(text):
        return False
    own = _QUOTED.sub("", text)
    text = own if has_letter(own) else text
    found = len(_KANA_OR_HANGUL.findall(text))
    return found > 1 and found > LEAST_FOREIGN * len(_LETTER.findall(text))


# ── Traditional and Simplified ────────────────────────────────────────────────────────────────────────────────────────

Policy = Literal["simplified", "traditional", "keep"]


@functools.cache
def is_chinese(lang: str) -> bool:
    return parse(lang).is_chinese


@functools.cache
def default_policy(lang: str) -> Policy:
    """The script that a language code stands for; `keep` for all that isn't Chinese in Han characters.

    Where a code names neither script nor region, CLDR's likely subtags say it: yue is Traditional, others Simplified.
    """
    language = parse(lang)
    script = language.script or ("Hant" if language.primary == "yue" else "Hans")
    if not language.is_chinese or script not in ("Hans", "Hant"):
        return "keep"
    return "traditional" if script == "Hant" else "simplified"


@functools.cache
def _converter(name: str) -> Any:
    import opencc  # Here, so that a machine that only trains or translates from English can do without it.

    return opencc.OpenCC(name)


def simplify(text: str) -> str:
    """Traditional characters as Simplified ones, by OpenCC's t2s and the rule for 著; Simplified text stays."""
    if text.isascii():
        return text
    found = str(_converter("t2s").convert(text))
    if "著" not in found:
        return found
    if found != text:
        return _ZHE.sub("着", found)
    return text if _only_simplified().search(text) else _ZHE_FOR_SURE.sub("着", text)


# OpenCC leaves 著 alone, since it has two meanings. In Traditional text it is mostly the suffix of a verb, which is 着
# in Simplified text; "to write" and "to show" (著名, 顯著, 曹雪芹著) are 著 in both, and all that Simplified text has.
# Where no other character tells the script, only 著 after one of these verbs, or in one of these words, is the suffix.
_VERBS = (
    "看望盯瞪瞧瞅见听闻跟随沿顺朝向对冲照依按靠凭为趁当拿握抓抱提拎捧扛背挑抬举端托捏攥牵拉拖推拽扯搂挽扶撑拄搬载装盛"
    "夹含咬叼嚼吃喝吸吮穿戴披裹系扎绑捆挂吊悬贴粘附沾染涂站坐躺卧趴蹲跪倚睡醒活住留待呆守候忙闲走跑跳游爬滚转绕围追逃躲"
    "藏闪晃摇摆抖颤飘浮漂流淌滴笑哭喊叫嚷唱说讲谈聊骂念读写画记想思惦盼期爱恋恨怕惧忍耐受痛病饿渴累困开关亮燃烧冒响映射刮"
    "吹带领率引陪伴护保持存有味征表盖满溢漫面临试学帮演练管教养变改本接借藉仗算数点指空热红歪低仰弯皱眯闭睁板绷憋屏隔"
    "不得碰找遇逮惹冻烫摔耀应玩用打挨顶急拥包牢紧争吵缠斥动烁跃息散发放续承担负怀慕憬笼罩遮掩蒙露透渗泛荡震踩踏敲拍挥舞招"
    "摸抚捂揉搓切刻绣织缝洗刷擦扫晒烤煮泡浸沉衣论"
)
_WORK = (
    "(?<![原名巨专编译遗显卓昭土拙所])(?<!(?<![争讨谈议辩])论)(?<!(?<![混结配融闭])合)(?<!(?<!重)新)"
    "著(?![名作者称述录]|书立说)"
)
_END = "[。，；！？：、）」』”…,;.!?:) ]|$"
_ZHE = re.compile(f"{_WORK}(?!有|《|{_END})|(?<=[{_VERBS}等]){_WORK}")
_ZHE_FOR_SURE = re.compile(f"(?<=[{_VERBS}]){_WORK}|{_WORK}(?=[急想迷火凉慌])|(?<=等){_WORK}(?!{_END})")


def traditionalise(text: str) -> str:
    """Text with characters that only Simplified Chinese has, converted by OpenCC's s2tw; other text stays."""
    if text.isascii() or not _only_simplified().search(text):
        return text  # The conversion could also change what is right in Traditional text, such as 皇后 and 里程.
    return str(_converter("s2tw").convert(text))


@functools.cache
def _only_simplified() -> re.Pattern[str]:
    """A character that s2t changes, t2s doesn't, and Big5, the old encoding of Traditional Chinese, doesn't have."""
    every = [chr(code) for code in range(0x4E00, 0xA000)]
    forms = (_converter(name).convert("\n".join(every)).split("\n") for name in ("s2t", "t2s"))
    only = "".join(a for a, s2t, t2s in zip(every, *forms, strict=True) if a == t2s != s2t and not _in_big5(a))
    return re.compile(f"[{only}]")


def _in_big5(character: str) -> bool:
    return bool(character.encode("big5", "ignore"))


Script = Literal["simplified", "traditional", "mixed", "neutral"]


def script_of(text: str) -> Script:
    """Simplified or Traditional by the characters that only one of them has; neutral without such a character."""
    traditional = simplify(text) != text
    simplified = not text.isascii() and _only_simplified().search(text) is not None
    if traditional:
        return "mixed" if simplified else "traditional"
    return "simplified" if simplified else "neutral"
