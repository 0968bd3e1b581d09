"""Write data/mini/raw/mini.txt: a small English-Chinese corpus made for this project, in the layout of cmn.

    python scripts/make_mini_corpus.py [OUTPUT]

A line is English TAB Chinese TAB attribution. The attribution names one of three parts: sentences of a small grammar
(mini_grammar.py), natural sentences (natural_pairs.tsv), and dirty lines, each with a fault that `nmt clean` mends or
drops. The same seed gives the same bytes on every machine.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from mini_grammar import sentences

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "data" / "mini" / "raw" / "mini.txt"
SEED = 1
GRAMMAR_PAIRS = 6000

TRADITIONAL_EVERY = 40
"""One grammar sentence in so many is written in Traditional characters, as in a corpus that many people wrote."""
TRADITIONAL = str.maketrans(
    "个周们爷丢爱丽丝买旧铅笔没台机办里订这电脑吗么时车蓝衬陈医板为谁图书馆见条玛钢给约顶张红师钟请块表库学妈发达来铁饭卫飞两后会点园厅画觉厨边说语"
    "经弹汤应该报纸杂志辆岁儿样邻轻场认识对写听价关状黄只猫号气银习迟虽伞词苹绿坏杰骑厂篮网视卧贵聪细队别柜鸟钥邮热饿盘从乐须记钱强壮欢历卖刮风总兴颜农",
    "個週們爺丟愛麗絲買舊鉛筆沒臺機辦裡訂這電腦嗎麼時車藍襯陳醫闆為誰圖書館見條瑪鋼給約頂張紅師鐘請塊錶庫學媽發達來鐵飯衛飛兩後會點園廳畫覺廚邊說語"
    "經彈湯應該報紙雜誌輛歲兒樣鄰輕場認識對寫聽價關狀黃隻貓號氣銀習遲雖傘詞蘋綠壞傑騎廠籃網視臥貴聰細隊別櫃鳥鑰郵熱餓盤從樂須記錢強壯歡歷賣颳風總興顏農",
)
"""The characters of the grammar that differ, each with the only Traditional form that its words have."""

DIRTY = (
    # The row itself.
    ("no tab", "This line has lost its translation."),
    ("no tab", "The tab became spaces.    制表符变成了空格。"),
    ("blank line", ""),
    ("empty side", "\t这一行没有英文。"),
    ("empty side", "There is no Chinese here.\t"),
    ("only spaces", "The other side is blank.\t \u3000 "),
    ("swapped columns", "两边放反了。\tThe two sides are the wrong way round."),
    ("carriage return", "Some editors end their lines differently.\t有些编辑器的换行方式不一样。\r"),
    ("line separator inside", "One line,\u2028not two.\t一行，\u2028不是两行。"),
    ("lone carriage return", "It was typed\ron an old machine.\t这是在一台旧机器上\r打的。"),
    ("repeated", "This pair comes three times.\t这一对出现三次。"),
    ("repeated", "This pair comes three times.\t这一对出现三次。"),
    ("repeated but for case and marks", "this pair comes three times\t这一对出现三次"),
    ("two translations", "He missed the last bus.\t他没赶上末班车。"),
    ("two translations", "He missed the last bus.\t他错过了最后一班公共汽车。"),
    # Characters.
    ("not UTF-8", "The menu lists a caf\udce9 au lait.\t菜单上有牛奶咖啡。"),
    ("not UTF-8", "These bytes were cut.\t这些字节被切断了\udce6\udcb1"),
    ("replacement character", "Part of it is lost.\t一部分\ufffd\ufffd丢了。"),
    ("mojibake", "The sky is clear tonight.\tä»Šæ™šå¤©ç©ºå¾ˆæ™´æœ—ã€‚"),
    ("mojibake", "Itâ€™s a pity.\t真可惜。"),
    ("entity", "Salt &amp; pepper are on the table.\t盐和胡椒在桌子上。"),
    ("entity", "She said &quot;yes&quot; at once.\t她马上说&ldquo;好&rdquo;。"),
    ("entity", "It&#39;s five degrees outside.\t外面五度&#12290;"),
    ("entity twice", "Bread &amp;amp; butter, please.\t请来面包和黄油。"),
    ("zero-width space", "The\u200b clouds are moving fast.\t云\u200b走得\u200b很快。"),
    ("byte order mark inside", "\ufeffThe file was glued together.\t\ufeff这个文件是拼起来的。"),
    ("soft hyphen", "An inter\u00adnational call is dear.\t国际电话很贵。"),
    ("direction mark", "The sign\u200e points left.\t牌子指向左边\u200f。"),
    ("control character", "The bell\x07 rang twice.\t铃\x08响了两次。"),
    ("no-break space", "The\u00a0lake\u00a0is\u00a0frozen.\t湖\u00a0结冰了。"),
    ("ideographic space", "Open\u3000the\u3000gate.\t\u3000\u3000把大门打开。"),
    ("many spaces", "  Too   many    spaces.  \t 空 格 太 多 。 "),
    ("full-width letters", "Ｐｌｅａｓｅ ｗａｉｔ ｈｅｒｅ．\t请在这里等。"),
    ("full-width digits", "Gate ２５ is closed.\t２５号登机口关了。"),
    ("decomposed letters", "The cafe\u0301 is closed.\t咖啡馆关门了。"),
    ("compatibility character", "The file is ﬁnally ready.\t文件终于准备好了。"),
    ("private use", "The font had its own signs.\t这个字体有自己的符号\ue001。"),
    # Punctuation.
    ("half-width marks", "First, wash the rice.\t首先,把米洗干净."),
    ("half-width marks", "Really? I had no idea!\t真的?我一点都不知道!"),
    ("full-width marks in English", "Stop！ Who goes there？\t站住！是谁？"),
    ("curly quotes", '‘Don’t wait up,’ he said.\t他说:"别等我。"'),
    ("brackets", "The hall (on the left) is full.\t大厅(左边)满了。"),
    ("dots", "Well... maybe.\t嗯...也许吧。"),
    # What no rule lets pass.
    ("copy", "https://example.org/index.html\thttps://example.org/index.html"),
    ("copy", "Hello World\tHello World"),
    ("English on both sides", "Nobody translated this one.\tNobody has found the time yet."),
    ("Chinese on both sides", "这一行没有翻译。\t这一行没有人翻译。"),
    ("no letters", "-----\t——————"),
    ("numbers only", "12345\t12345"),
    ("few Han characters", "Press OK to install the update now.\t按 Press OK to install the update now。"),
    ("Han characters in English", "Please 打开 the 窗户 now.\t请现在打开窗户。"),
    ("too long for the other side", "Yes.\t是的，我昨天已经把所有的文件都寄给你们办公室了，你们应该明天就能收到。"),
    ("too long for the other side", "The whole story of how we crossed the mountains in the snow is long.\t很长。"),
    ("too long", " ".join(["Round and round it goes."] * 60) + "\t" + "转啊转啊转。" * 60),
    ("markup", "Click <b>Save</b> to go on.\t点击保存继续。"),
    ("placeholder", "%d files were copied.\t复制了文件。"),
    ("pinyin", "Hello, could you tell me where the library is?\t你好，请问图书馆在什么地方？ Nǐ hǎo!"),
    ("note", "The tea house is old.\t茶馆很老了。（译注：建于清代）"),
)
"""What is wrong, and the first two columns; a lone surrogate stands for a byte that is not UTF-8."""


def natural_pairs() -> list[list[str]]:
    text = (HERE / "natural_pairs.tsv").read_bytes().decode()
    return [line.split("\t") for line in text.split("\n") if line]


def rows() -> Iterator[str]:
    """The lines of the corpus."""
    for en, zh in natural_pairs():
        yield f"{en}\t{zh}\tnmt mini corpus: natural"
    for number, (en, zh) in enumerate(sentences(GRAMMAR_PAIRS, SEED), 1):
        chinese = zh if number % TRADITIONAL_EVERY else zh.translate(TRADITIONAL)
        yield f"{en}\t{chinese}\tnmt mini corpus: grammar"
    for _, columns in DIRTY:
        # No third column can follow where the second is missing.
        text = columns.removesuffix("\r")
        yield (f"{text}\tnmt mini corpus: dirty" if "\t" in text else text) + columns[len(text) :]


def corpus() -> bytes:
    return "".join(f"{row}\n" for row in rows()).encode("utf-8", "surrogateescape")


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(corpus())
