"""UTF-8 that was once read as Latin-1 or Windows-1252: undone where that is certain, and a sign of loss elsewhere.

`é` becomes `Ã©`, `’` becomes `â€™`, `中` becomes `ä¸­`. Every sequence is undone by itself, so that one bad word among
good text is enough. What may also be text that someone meant stays: `NÃO`, `‘Ã’`, `“CAFÉ”`, `Ângela`.
"""

import re


def _bytes() -> dict[str, int]:
    """The byte of each character of Windows-1252, and of the Latin-1 controls that share its bytes 80 to 9F."""
    by_character = {chr(code): code for code in range(0x80, 0x100)}
    for code in range(0x80, 0xA0):
        try:
            by_character[bytes([code]).decode("cp1252")] = code
        except UnicodeDecodeError:  # Five bytes have no character; they are read as controls.
            continue
    return by_character


_BYTE = _bytes()
_CP1252 = {code: character for character, code in _BYTE.items() if ord(character) != code}

# What the continuation bytes 80 to BF look like, marks that may follow a capital in text apart from the others.
_MARKS = "\xa0«»°·‘’“”–—…›™‚„"
_NEXT = "".join(character for character, code in _BYTE.items() if code < 0xC0)
_SIGNS = "".join(sorted(set(_NEXT) - set(_MARKS)))
_SECOND = "€‚„…†‡ˆ‰Š‹ŒŽ–—˜™š›œž\x80-\x9f"  # After â: no quotation mark.
_LOWER = "a-zß-öø-ÿ"
_UPPER = "A-ZÀ-ÖØ-Þ"
_MOJIBAKE = re.compile(
    "|".join(
        [
            # Sequences that follow each other are no accident; × is left out, for ½×½×½.
            f"(?:[Â-ÖØ-ß][{_NEXT}]|[à-ï][{_NEXT}]{{2}}|[ð-ô][{_NEXT}]{{3}}){{2,}}",
            # Punctuation, signs, arrows; emoji; the byte order mark, a lost character, full-width forms.
            f"â[{_SECOND}][{_NEXT}]",
            f"ð[Ÿ\x9f][{_NEXT}]{{2}}",
            f"ï(?:»¿|¿½|[¼½¸][{_NEXT}])",
            # Letters with accents: Ã is a letter of its own, and a mark may follow it at the end of a word in capitals.
            f"Ã[{_SIGNS}]|(?<=[{_LOWER}])Ã[{_MARKS}]|(?<![{_UPPER}])Ã[{_MARKS}](?=[a-z])",
            f"(?<![{_UPPER}‘“«\"'(])Ã(?:\xa0|[–—](?![{_UPPER}]))",
            f"(?<=[{_LOWER}])[ÄÅ][{_NEXT}]|[ÄÅ][{_SIGNS}](?=[a-z])",
            # Signs: a no-break space, £, ©, °, «; and a quotation mark that was a control before.
            f"Â[{_SIGNS}]|(?<![{_UPPER}‘“«\"'(])Â[\xa0«»°·]|(?<=[{_LOWER}0-9.,!?])Â[’”…–—™]|Â[‘“](?=[A-Za-z])",
        ]
    )
)
_SUSPECT = re.compile("[\x80-\x9f\xc2-\xf4]")  # All mojibake has one, and most Chinese lines have none.
_C1 = re.compile("[\x80-\x84\x86-\x9f]")  # U+0085 is a line separator, which is a space here.
_QUOTE = re.compile("(?<![^\x00-\x7f])[\x91-\x94\x96\x97](?![^\x00-\x7f])")  # Among ASCII a Windows-1252 mark for sure.
_LOST = re.compile(f"\ufffd|{_C1.pattern}|â€|锟斤拷|(?<=[{_LOWER}])Ã(?![{_UPPER}{_LOWER}])")


def repair(text: str) -> str:
    """`text` with its mojibake undone, of several layers too; the same when it is repaired again."""
    if text.isascii() or not _SUSPECT.search(text):
        return text
    while _C1.search(text):  # The whole line, where it can be: the sequences alone leave single characters.
        try:
            text = text.encode("latin-1").decode("utf-8")
        except UnicodeError:
            break
    while (found := _MOJIBAKE.sub(_undo, text)) != text:  # Each layer undone halves what is left of it.
        text = found
    return _QUOTE.sub(lambda mark: _CP1252[ord(mark[0])], text)


def _undo(found: re.Match[str]) -> str:
    try:
        text = bytes(_BYTE[character] for character in found[0]).decode("utf-8")
    except UnicodeDecodeError:
        return found[0]
    return text.translate(_CP1252)


def is_damaged(text: str) -> bool:
    """Whether a character was lost to a wrong encoding: a replacement character, a C1 control, half of a mojibake."""
    return not text.isascii() and _LOST.search(text) is not None
