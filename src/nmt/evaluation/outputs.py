"""What can be seen of a translation without a reference: whether it is empty, repeats itself, or lacks its end."""

import re
from collections.abc import Sequence

_AGAIN = re.compile(r"(.{1,40}?)\1{3,}", re.DOTALL)
_END = re.compile(r"[.!?。！？…][\"'”’»」』）)\]]*\s*$")


def repeats(text: str) -> bool:
    """Whether some stretch with a letter comes four times or more without a break, over at least eight characters."""
    turns = _AGAIN.finditer(f"{text} ")  # With the space that is between the words of the other turns.
    return any(len(found[0]) >= 8 and any(map(str.isalnum, found[1])) for found in turns)


def is_repeated(hyp: str, src: str) -> bool:
    """Whether a translation repeats itself and its source doesn't."""
    return repeats(hyp) and not repeats(src)


def suspicious(hyps: Sequence[str], srcs: Sequence[str]) -> dict[str, int]:
    """How many outputs are empty, repeat themselves, or stop without an end mark, where their source does not."""
    pairs = list(zip(hyps, srcs, strict=True))
    return {
        "empty": sum(not hyp.strip() and bool(src.strip()) for hyp, src in pairs),
        "repeated": sum(is_repeated(hyp, src) for hyp, src in pairs),
        "cut": sum(bool(hyp.strip() and _END.search(src) and not _END.search(hyp)) for hyp, src in pairs),
    }
