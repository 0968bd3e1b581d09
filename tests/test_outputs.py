"""outputs: what is wrong with a translation by its look, the same for translate and for eval."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.evaluation import outputs


@pytest.mark.parametrize(
    ("text", "repeated"),
    [("我们我们我们我们我们", True), ("the cat the cat the cat the cat", True), ("the cat the cat the cat", False),
     ("哈哈哈哈", False), ("哈" * 9, True),
     ("等一下…………………………", False), ("我们走吧，我们走吧。", False), ("", False), ("100000000", True),
     ("- - - - - - - -", False)],
)  # fmt: skip
def test_an_output_that_goes_round_in_circles_is_seen(text, repeated):
    assert outputs.repeats(text) is repeated


def test_empty_repeated_and_cut_outputs_are_counted_unless_their_source_is_so():
    srcs = ["Stop.", "", "No no no no no no.", "He said: “Go!”", "A title", "Go on.", "Well?"]
    hyps = ["  ", "", "不不不不不不不不不。", "他说：“走！”", "标题", "走走走走走走走走走。", "那么我们"]
    assert outputs.suspicious(hyps, srcs) == {"empty": 1, "repeated": 1, "cut": 1}


def slowly(text: str) -> bool:
    """The slow way: every stretch of up to forty characters, everywhere, as often as it comes again."""
    text += " "
    for start in range(len(text)):
        for size in range(1, min(40, len(text) - start) + 1):
            unit, times = text[start : start + size], 1
            while text[start + times * size : start + (times + 1) * size] == unit:
                times += 1
            if times >= 4 and times * size >= 8 and any(map(str.isalnum, unit)):
                return True
    return False


@given(st.text("ab-", max_size=30))
def test_repeats_are_what_trying_every_stretch_finds(text):
    assert outputs.repeats(text) == slowly(text)
