"""Cuts of long texts: the parts join to the text, and they lie where a reader would put them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.decoding.sentence_splitter import cut_to_fit, split_sentences

SPLIT = [
    # Chinese: the quotation stays in its sentence, closing quotes stay with their mark.
    "他问：“你去吗？”然后笑了。|我没回答。|真的吗？|也许……会吧。",
    "“你好！”老师说。|“请坐。”",
    "“我走了。”|门关上了。",
    "她说：“我累了。我想睡觉。”|于是大家都走了。",
    "下雨了！！！|快跑！？|好。",
    "你好!|我是新来的?|对。",
    "圆周率是3.14。|版本2.0已经出了。",
    "（注意：请勿吸烟。）|谢谢。",
    # English: abbreviations, numbers, quotations.
    'Dr. Brown paid $2.75 to U.S. Inc. |It closed. |"Why?" she asked. |See Fig. 4.',
    "I met Mr. J. R. Hill at 5 p.m. |He was late! ",
    "We sell tea, rice, etc. |The shop is open. |Is it? |Yes.",
    '"I saw it." |The man left.',
    "Wait... what? |Never mind.",
    "Look at No. 7. |No. |I won't.",
    "It costs 3.5 dollars. |5 people came.",
    "no capital follows. so this stays whole.",
    # mixed
    "我用 Python 3.11. |它很快。|OK? |好的。",
]


@pytest.mark.parametrize("marked", SPLIT)
def test_sentences_end_where_a_reader_ends_them(marked):
    assert split_sentences(marked.replace("|", "")) == marked.split("|")


TEXTS = (
    st.text(alphabet=st.sampled_from("ab A.!?,; \"'“”（）。！？，、…好的。3\u0301😀\u3000"), max_size=60) | st.text()
)


@given(text=TEXTS)
def test_sentences_join_to_the_text(text):
    parts = split_sentences(text)
    assert "".join(parts) == text
    assert all(parts)


def letters(texts):
    return [len(text) for text in texts]


@given(text=TEXTS, most=st.integers(1, 20))
def test_parts_join_to_the_text_and_fit(text, most):
    parts = cut_to_fit(text, letters, most)
    assert "".join(parts) == text
    for part in parts:
        # Only a character with its marks, which is never cut, may be longer.
        assert (
            len(part) <= most or len(re.findall(r"[^\u0300-\u036f\u200d\ufe00-\ufe0f\U0001f3fb-\U0001f3ff]", part)) <= 1
        )


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("一。二二。三三三。", 4, ["一。", "二二。", "三三三。"]),  # a sentence each, though two would fit
        ("“一一。二二。”三。", 5, ["“一一。", "二二。”", "三。"]),  # inside a quotation, where nothing else does
        ("一一，二二，三三三，四。", 6, ["一一，二二，", "三三三，四。"]),
        ("aa bb, cc dd ee", 8, ["aa bb, ", "cc dd ee"]),
        ("aa bb cc dd", 6, ["aa bb ", "cc dd"]),
        ("字" * 7, 3, ["字字字", "字字字", "字"]),
        ("e\u0301" * 3, 3, ["e\u0301", "e\u0301", "e\u0301"]),
        ("", 3, []),
    ],
)
def test_the_best_marks_that_do_are_cut_at(text, most, expected):
    assert cut_to_fit(text, letters, most) == expected


def test_a_long_line_without_any_mark_is_cut_in_time():
    assert "".join(cut_to_fit("x" * 200_000, letters, 512)) == "x" * 200_000
    assert "".join(cut_to_fit("你好。“" * 30_000, letters, 512)) == "你好。“" * 30_000
