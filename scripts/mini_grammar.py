"""A small grammar that writes an English sentence and its Chinese translation at once.

The Chinese is a function of the English, so a model that has learned the grammar translates unseen sentences exactly;
and a sentence has so many slots that copying the translation of the most similar known sentence does not get far.
Words are tables (mini_words.py), phrases are small functions, and a kind of sentence is one pair of PATTERNS.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import mini_words as words
from mini_words import Row, article, chinese_number, clock, english_number, plural, table, third_person

T = TypeVar("T")

# ── phrases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Phrase:
    """A phrase in both languages. In a pattern `{name}` is the phrase and `{name.form}` another English form of it."""

    object: str
    owner: str
    do: str

    def __init__(self, en: str, zh: str, **forms: str) -> None:
        self.en, self.zh = en, zh
        self.__dict__ |= forms

    def __format__(self, spec: str) -> str:
        return self.en


def person(subject: str, other: str, owner: str, zh: str) -> Phrase:
    """Somebody as a subject; `.object` and `.owner` as well, and the verbs that go with the subject."""
    third = subject not in ("I", "you", "we", "they")
    be = "is" if third else "am" if subject == "I" else "are"
    was = "was" if third or subject == "I" else "were"
    return Phrase(subject, zh, object=other, owner=owner, be=be, was=was, do="does" if third else "do")


def counted(number: int, adjective: Row, thing: Row) -> Phrase:
    """三本新书: "three new books"; one of it has the article."""
    noun, measure, zh = thing
    what = f"{adjective[0]} {noun if number == 1 else plural(noun)}".strip()
    en = article(what) if number == 1 else f"{english_number(number)} {what}"
    return Phrase(en, chinese_number(number) + measure + adjective[1] + zh, be="is" if number == 1 else "are")


def pointed(this: Row, number: int, adjective: Row, thing: Row) -> Phrase:
    """这三本新书: "these three new books"; 这本新书: "this new book". `this` has this, these and 这."""
    noun, measure, zh = thing
    if number == 1:
        return Phrase(f"{this[0]} {adjective[0]} {noun}", this[2] + measure + adjective[1] + zh, be="is")
    en = f"{this[1]} {english_number(number)} {adjective[0]} {plural(noun)}"
    return Phrase(en, this[2] + chinese_number(number) + measure + adjective[1] + zh, be="are")


# ── drawing phrases ─────────────────────────────────────────────────────────────────────────────────────────────────


class Draw(dict[str, Phrase]):
    """The phrases of one sentence, each drawn when its name is first asked for: `who`, `who2`, `maybe_where`.

    `name2` is another draw of `name`; `maybe_name` is often nothing. Only `Random.random` is used, whose numbers are
    the same in every version of Python.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        super().__init__()
        self.chance = chance

    def __missing__(self, name: str) -> Phrase:
        kind = name.removeprefix("maybe_").rstrip("2")
        if name.startswith("maybe_") and self.chance() < 0.55:
            self[name] = Phrase("", "")
        else:
            self[name] = Phrase(*self.pick(words.WORDS[kind])) if kind in words.WORDS else getattr(self, kind)()
        return self[name]

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.chance() * len(items))]

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return low + int(self.chance() * (high - low + 1))

    def number(self) -> int:
        """From 2 to 999, mostly small."""
        return self.integer(*self.pick(((2, 10), (2, 10), (2, 10), (11, 99), (11, 99), (100, 999))))

    def adjective(self, choice: Sequence[Row] = (*words.PLAIN, *words.FULL)) -> Row:
        return self.pick(choice) if self.chance() < 0.5 else ("", "")

    def requested(self, verb: str) -> str:
        """The verb in the present, as the subject `who` (or the question "Who") wants it."""
        return third_person(verb) if "who" not in self or self["who"].do == "does" else verb

    def who(self) -> Phrase:
        """Somebody. A second person is never a pronoun and has nothing to do with the first."""
        known = [self[name] for name in ("who", "who2", "fellow") if name in self]
        while True:
            chance = self.chance()
            if chance < 0.35 and not known:
                return person(*self.pick(words.PRONOUNS))
            if chance < 0.7:
                name, zh = self.pick(words.NAMES)
                found = person(name, name, f"{name}'s", zh)
            else:
                found = self.kin() if chance < 0.88 else self.fellow()
            if not any(found.zh in other.zh or other.zh in found.zh for other in known):
                return found

    def kin(self) -> Phrase:
        """我哥哥, but 汤姆的哥哥."""
        return self.related(words.KIN, bond="")

    def fellow(self) -> Phrase:
        """我的朋友, 汤姆的朋友."""
        return self.related(words.OTHERS, bond="的")

    def related(self, relations: Sequence[Row], bond: str) -> Phrase:
        """Somebody's relation; `bond` stands between a Chinese pronoun and the relation."""
        *_, owner, owner_zh = self.pick(words.PRONOUNS)
        if self.chance() < 0.4:
            name, owner_zh = self.pick(words.NAMES)
            owner, bond = f"{name}'s", "的"
        noun, zh = self.pick(relations)
        en = f"{owner} {noun}"
        return person(en, en, f"{en}'s", owner_zh + bond + zh)

    def things(self) -> Phrase:
        return counted(1 if self.chance() < 0.25 else self.number(), self.adjective(), self.pick(words.THINGS))

    def animals(self) -> Phrase:
        return counted(1 if self.chance() < 0.25 else self.number(), ("", ""), self.pick(words.ANIMALS))

    def these(self) -> Phrase:
        this = self.pick(table("this/these/这, that/those/那"))
        return pointed(this, self.pick((1, 1, 1, 2, 3, 4, 5, 6)), self.adjective(), self.pick(words.THINGS))

    def that(self) -> Phrase:
        this = self.pick(table("this//这, that//那"))
        return pointed(this, 1, self.adjective(), self.pick(words.ALL_THINGS))

    def those(self) -> Phrase:
        """Known things: 那三本书 is "the three books" before a relative clause."""
        the, number = ("the", "the", "那"), self.pick((1, 1, 2, 3, 4, 5, 6))
        return pointed(the, number, self.adjective(), self.pick(words.THINGS))

    def kind(self) -> Phrase:
        """Things that are not counted: "red cups", 红色杯子."""
        (noun, _, zh), (adjective, zh_adjective) = self.pick(words.THINGS), self.adjective()
        return Phrase(f"{adjective} {plural(noun)}", zh_adjective + zh)

    def how_many(self) -> Phrase:
        (noun, measure, zh), (adjective, zh_adjective) = self.pick(words.THINGS), self.adjective()
        return Phrase(f"how many {adjective} {plural(noun)}", f"多少{measure}{zh_adjective}{zh}")

    def belonging(self) -> Phrase:
        """汤姆的新外套: somebody's thing."""
        owner = self["who2"]
        (noun, _, zh), (adjective, zh_adjective) = self.pick(words.ALL_THINGS), self.adjective(words.PLAIN)
        return Phrase(f"{owner.owner} {adjective} {noun}", f"{owner.zh}的{zh_adjective}{zh}")

    def room(self) -> Phrase:
        en, zh = self.pick(words.ROOMS)
        return Phrase(f"in the {en}", f"在{zh}里")

    def where(self) -> Phrase:
        """The Chinese begins with 在, and has the side behind the building."""
        if self.chance() < 0.4:
            return self.room()
        (en, zh), (side, zh_side) = self.pick(words.BUILDINGS), self.pick(words.SIDES)
        at = self.chance() < 0.5
        return Phrase(f"at the {en}", f"在{zh}") if at else Phrase(f"{side} the {en}", f"在{zh}{zh_side}")

    def spot(self) -> Phrase:
        """厨房里的桌子下面: all of "under the table in the kitchen" turns around."""
        (side, zh_side), (adjective, zh_adjective) = self.pick(words.SPOTS), self.adjective(words.PLAIN)
        (en, zh), (room, zh_room) = self.pick(words.FURNITURE), self.pick(words.ROOMS)
        return Phrase(f"{side} the {adjective} {en} in the {room}", f"{zh_room}里的{zh_adjective}{zh}{zh_side}")

    def time(self, near: Row, week: Row, far: Row) -> Phrase:
        """A number of days or years from now, or a day with its part and perhaps the time of day."""
        if self.chance() < 0.2:
            (span, zh_span), number = self.pick(words.SPANS), self.integer(2, 10)
            en = far[0].format(f"{english_number(number)} {plural(span)}")
            return Phrase(en, f"{chinese_number(number)}{zh_span}{far[1]}")
        (day, zh_day), (part, zh_part) = self.pick(words.WEEKDAYS), self.pick(words.PARTS)
        en, zh = near if self.chance() < 0.4 else (f"{week[0]} {day}", week[1] + zh_day)
        at, zh_at = "", ""
        if self.chance() < 0.35:
            at, zh_at = clock(self.integer(*words.HOURS[part]), self.pick(words.MINUTES))
        return Phrase(f"{at} {en} {part}", zh + zh_part + zh_at)

    def past(self) -> Phrase:
        return self.time(("yesterday", "昨天"), ("last", "上"), ("{} ago", "前"))

    def future(self) -> Phrase:
        return self.time(("tomorrow", "明天"), ("next", "下"), ("in {}", "后"))

    def date(self) -> Phrase:
        month, day = self.integer(1, 12), self.integer(1, 20)
        zh = f"{chinese_number(month, counts=False)}月{chinese_number(day, counts=False)}号"
        return Phrase(f"on {words.MONTHS[month - 1]} the {words.ORDINALS[day - 1]}", zh)

    def figure(self) -> Phrase:
        """A number from 3 on, before 元, 岁 or 分钟."""
        number = self.integer(3, 99) if self.chance() < 0.7 else self.integer(100, 999)
        return Phrase(english_number(number), chinese_number(number))

    def years(self) -> Phrase:
        number = self.integer(2, 99)
        return Phrase(english_number(number), chinese_number(number))

    def company(self) -> Phrase:
        other = self["who2"]
        return Phrase(f"with {other.object}", f"跟{other.zh}一起")

    def act(self) -> Phrase:
        verb, ing, rest, zh = self.pick(words.ACTIVITIES)
        return Phrase(f"{verb} {rest}", zh, ing=f"{ing} {rest}", requested=f"{self.requested(verb)} {rest}")

    def can(self) -> Phrase:
        en, zh = self.pick(words.MODALS)
        return Phrase(self.requested(en) if en.startswith(("want", "need", "do ")) else en, zh)

    def opinion(self) -> Phrase:
        en, zh = self.pick(words.OPINIONS)
        return Phrase(en, zh, requested=self.requested(en))

    def deed(self) -> Phrase:
        en, past, zh = self.pick(words.DEEDS)
        return Phrase(en, zh, past=past)

    def gift(self) -> Phrase:
        en, past, zh = self.pick(words.GIFTS)
        return Phrase(en, zh, past=past)

    def grade(self) -> Phrase:
        en, more, zh = self.pick(words.GRADES)
        return Phrase(en, zh, more=more)

    def trait(self) -> Phrase:
        en, more, zh = self.pick(words.TRAITS)
        most = f"most {en}" if more.startswith("more") else more.removesuffix("r") + "st"
        return Phrase(en, zh, more=more, most=most)


# ── sentences ───────────────────────────────────────────────────────────────────────────────────────────────────────

PATTERNS = (
    # Deeds, with measure words; denied and asked about.
    ("{who} {deed.past} {things} {maybe_where} {past}.", "{who}{past}{maybe_where}{deed}了{things}。"),
    ("{who} bought {things} for {figure} yuan {past}.", "{who}{past}花{figure}元买了{things}。"),
    ("{who} did not {deed} {these} {maybe_where} {past}.", "{who}{past}{maybe_where}没有{deed}{these}。"),
    ("Did {who} {deed} {these} {maybe_where} {past}?", "{who}{past}{maybe_where}{deed}了{these}吗？"),
    ("When did {who} {deed} {these} {maybe_where}?", "{who}是什么时候{maybe_where}{deed}的{these}？"),
    ("Where did {who} {deed} {these} {past}?", "{who}{past}是在哪里{deed}的{these}？"),
    ("Why did {who} not {deed} {these} {maybe_past}?", "{who}{maybe_past}为什么没有{deed}{these}？"),
    ("Who {deed.past} {these} {maybe_where} {past}?", "谁{past}{maybe_where}{deed}了{these}？"),
    ("{how_many} did {who} {deed} {past}?", "{who}{past}{deed}了{how_many}？"),
    ("{who} {gift.past} {who2.object} {things} {past}.", "{who}{past}{gift}了{who2}{things}。"),
    ("Did {who} {gift} {who2.object} {these} {maybe_past}?", "{who}{maybe_past}{gift}了{who2}{these}吗？"),
    ("{who} waited for {who2.object} {where} for {figure} minutes {past}.",
     "{who}{past}{where}等了{who2}{figure}分钟。"),
    # Things that something is done to: 把 and 被.
    ("Please put {these} {spot}.", "请把{these}放在{spot}。"),
    ("{who} put {belonging} {spot} {maybe_past}.", "{who}{maybe_past}把{belonging}放在了{spot}。"),
    ("{belonging} was {harm} by {who.object} {past}.", "{belonging}{past}被{who}{harm}了。"),
    ("Was {that} {harm} by {who.object} {past}?", "{that}{past}被{who}{harm}了吗？"),
    # Journeys.
    ("{who} went to the {goal} {vehicle} {maybe_company} {past}.", "{who}{past}{maybe_company}{vehicle}去了{goal}。"),
    ("{who} did not go to the {goal} {vehicle} {past}.", "{who}{past}没有{vehicle}去{goal}。"),
    ("{who} will go to the {goal} {vehicle} {maybe_company} {future}.",
     "{who}{future}会{maybe_company}{vehicle}去{goal}。"),
    ("{who} will not go to the {goal} {maybe_company} {future}.", "{who}{future}不会{maybe_company}去{goal}。"),
    ("Will {who} go to the {goal} {vehicle} {future}?", "{who}{future}会{vehicle}去{goal}吗？"),
    ("When did {who} go to the {goal} {vehicle} {maybe_company}?",
     "{who}是什么时候{maybe_company}{vehicle}去的{goal}？"),
    ("How will {who} go to the {goal} {maybe_company} {future}?", "{who}{future}会怎么{maybe_company}去{goal}？"),
    # What goes on, what is usual, what is wanted.
    ("{who} {who.be} {act.ing} {where} {maybe_company}.", "{who}正{where}{maybe_company}{act}。"),
    ("{who.be} {who} {act.ing} {where} {maybe_company}?", "{who}正{where}{maybe_company}{act}吗？"),
    ("{who} {often} {act.agreed} {where} {maybe_company} {habit_time}.",
     "{who}{habit_time}{often}{maybe_company}{where}{act}。"),
    ("{who} {who.do} not {act} {where} {habit_time}.", "{who}{habit_time}不{where}{act}。"),
    ("{who.do} {who} often {act} {where} {habit_time}?", "{who}{habit_time}经常{where}{act}吗？"),
    ("Where {who.do} {who} {act} {maybe_company} {habit_time}?", "{who}{habit_time}{maybe_company}在哪里{act}？"),
    ("Who {often} {act.agreed} {where} {habit_time}?", "谁{habit_time}{often}{where}{act}？"),
    ("{who} {can} {act} {where} {maybe_company} {future}.", "{who}{future}{can}{maybe_company}{where}{act}。"),
    ("{who} {can} {act} {where} {future}.", "{who}{future}{can}{where}{act}。"),
    # Comparisons.
    ("{that} is {grade.more} than {belonging}.", "{that}比{belonging}{grade}。"),
    ("{belonging} is much {grade.more} than {that}.", "{belonging}比{that}{grade}得多。"),
    ("{that} is not as {grade} as {that2}.", "{that}没有{that2}那么{grade}。"),
    ("{who} {who.be} {years} years older than {who2.object}.", "{who}比{who2}大{years}岁。"),
    ("{who} {who.be} {years} years younger than {who2.object}.", "{who}比{who2}小{years}岁。"),
    ("{who} {who.be} a little {trait.more} than {who2.object}.", "{who}比{who2}{trait}一点儿。"),
    ("{who} {who.be} as {trait} as {who2.object}.", "{who}跟{who2}一样{trait}。"),
    ("{who} {who.be} not as {trait} as {who2.object}.", "{who}没有{who2}那么{trait}。"),
    ("{fellow} is the {trait.most} {role} in {who2.owner} {group}.", "{fellow}是{who2}的{group}里最{trait}的{role}。"),
    # Clauses and phrases that stand before their noun in Chinese.
    ("{those} that {who} {deed.past} {past} {those.be} {degree} {grade}.",
     "{who}{past}{deed}的{those}{degree}{grade}。"),
    ("{those} that {who} {deed.past} {where} {those.be} {degree} {grade}.",
     "{who}{where}{deed}的{those}{degree}{grade}。"),
    ("The {man} who is {act.ing} {where} is {fellow}.", "正{where}{act}的那个{man}是{fellow}。"),
    ("The {man} in the {color} {clothes} {where} is {fellow}.", "{where}穿{color}{clothes}的那个{man}是{fellow}。"),
    ("{who.do} {who} know the {man} who is {act.ing} {where}?", "{who}认识正{where}{act}的那个{man}吗？"),
    ("{who} {who.do} not know the {man} in the {color} {clothes}.", "{who}不认识穿{color}{clothes}的那个{man}。"),
    ("{who} {opinion.agreed} the {quality} of {belonging}.", "{who}{opinion}{belonging}的{quality}。"),
    ("{who} {who.do} not {opinion} the {quality} of {belonging}.", "{who}不{opinion}{belonging}的{quality}。"),
    # What is where.
    ("There {things.be} {things} {spot}.", "{spot}有{things}。"),
    ("There {animals.be} {animals} {spot}.", "{spot}有{animals}。"),
    ("There are no {kind} {spot}.", "{spot}没有{kind}。"),
    ("{how_many} are there {spot}?", "{spot}有{how_many}？"),
    # Ages and dates.
    ("{who} {who.be} {years} years old and {who2} {who2.be} {years2}.", "{who}{years}岁，{who2}{years2}岁。"),
    ("{who.owner} birthday is {date}.", "{who}的生日是{date}。"),
    ("{who} will {act} {where} {date}.", "{who}{date}会{where}{act}。"),
    # Two clauses.
    ("When {who} got to the {goal} {past}, {who2} {who2.was} {act.ing} {where}.",
     "{who}{past}到{goal}的时候，{who2}正{where}{act}。"),
    ("If {weather} next {weekday}, {who} will {act} {where}.", "如果下{weekday}{weather}，{who}就{where}{act}。"),
    ("If {weather} next {weekday}, {who} will not {act} {where}.", "如果下{weekday}{weather}，{who}就不{where}{act}。"),
    ("{who} did not {act} {past} because {who2} {who2.was} {state}.", "因为{who2}{state}，所以{who}{past}没有{act}。"),
    ("{who} did not go to the {goal} {past} although {who2} {who2.was} {state}.",
     "虽然{who2}{state}，但是{who}{past}没有去{goal}。"),
)  # fmt: skip
"""English and Chinese of each kind of sentence; a name in braces is a slot of Draw and the same phrase in both."""


def fill(pattern: tuple[str, str], draw: Draw) -> tuple[str, str]:
    """A sentence in both languages."""
    en = " ".join(pattern[0].format_map(draw).split())
    en = en.replace(" .", ".").replace(" ,", ",").replace(" ?", "?")
    return en[0].upper() + en[1:], pattern[1].format_map({name: phrase.zh for name, phrase in draw.items()})


def key(text: str) -> str:
    """Letters and digits in one case; `nmt clean` takes two sentences with the same key for the same sentence."""
    return "".join(letter for letter in text.lower() if letter.isalnum())


def sentences(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """So many pairs, each pattern in turn; neither an English nor a Chinese sentence comes twice."""
    chance = random.Random(seed).random
    seen: set[str] = set()
    made = 0
    while made < count:
        en, zh = fill(PATTERNS[made % len(PATTERNS)], Draw(chance))
        if seen.isdisjoint((key(en), key(zh))):
            seen |= {key(en), key(zh)}
            made += 1
            yield en, zh
