"""The words of the mini corpus as tables, and the forms that they take."""

Row = tuple[str, ...]
"""English first and Chinese last; other forms, or the measure word, between."""


def table(text: str) -> list[Row]:
    """The rows of a literal table: rows are parted by commas, their columns by slashes."""
    return [tuple(column.strip() for column in row.split("/")) for row in text.split(",")]


def listed(text: str) -> list[str]:
    """The rows of a table with one column."""
    return [row[0] for row in table(text)]


DIGITS = "零一二三四五六七八九"
ONES = listed("""zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,
    thirteen, fourteen, fifteen, sixteen, seventeen, eighteen, nineteen""")
TENS = listed("zero, ten, twenty, thirty, forty, fifty, sixty, seventy, eighty, ninety")
ORDINALS = listed("""first, second, third, fourth, fifth, sixth, seventh, eighth, ninth, tenth,
    eleventh, twelfth, thirteenth, fourteenth, fifteenth, sixteenth, seventeenth, eighteenth, nineteenth, twentieth""")
MONTHS = listed("""January, February, March, April, May, June, July, August, September, October,
    November, December""")

PRONOUNS = table("I/me/my/我, you/you/your/你, he/him/his/他, she/her/her/她, we/us/our/我们, they/them/their/他们")
NAMES = table("""Tom/汤姆, Mary/玛丽, John/约翰, Alice/爱丽丝, Peter/彼得, Anna/安娜, Jack/杰克, Lucy/露西,
    David/大卫, Linda/琳达, Mr. Wang/王先生, Mrs. Li/李太太, Miss Zhang/张小姐, Dr. Chen/陈医生""")
KIN = table("""father/爸爸, mother/妈妈, older brother/哥哥, younger brother/弟弟, older sister/姐姐,
    younger sister/妹妹, grandfather/爷爷, grandmother/奶奶, uncle/叔叔""")
OTHERS = table("friend/朋友, teacher/老师, neighbor/邻居, boss/老板, classmate/同学, doctor/医生, student/学生")
PEOPLE = table("man/男人, woman/女人, boy/男孩, girl/女孩, old man/老人")
ROLES = table("student/学生, worker/工人, doctor/医生, teacher/老师, driver/司机, farmer/农民, singer/歌手, cook/厨师")
THINGS = table("""book/本/书, dictionary/本/词典, magazine/本/杂志, notebook/本/笔记本, map/张/地图, photo/张/照片,
    ticket/张/票, pen/支/钢笔, pencil/支/铅笔, umbrella/把/雨伞, key/把/钥匙, knife/把/刀, watch/块/手表,
    hat/顶/帽子, shirt/件/衬衫, coat/件/外套, sweater/件/毛衣, skirt/条/裙子, towel/条/毛巾, camera/台/照相机,
    computer/台/电脑, radio/台/收音机, cup/个/杯子, plate/个/盘子, bag/个/包, apple/个/苹果, cake/个/蛋糕,
    letter/封/信, flower/朵/花""")
LARGE_THINGS = table(
    "bicycle/辆/自行车, car/辆/汽车, truck/辆/卡车, table/张/桌子, bed/张/床, chair/把/椅子, sofa/张/沙发"
)
ALL_THINGS = THINGS + LARGE_THINGS
ANIMALS = table("cat/只/猫, dog/条/狗, bird/只/鸟, mouse/只/老鼠, rabbit/只/兔子")
CLOTHES = table("shirt/衬衫, coat/外套, sweater/毛衣, uniform/制服")
COLORS = table("red/红色, black/黑色, white/白色, blue/蓝色, green/绿色, yellow/黄色, brown/棕色, gray/灰色")
PLAIN = COLORS + table("new/新, old/旧, small/小, big/大")
FULL = table("""beautiful/漂亮的, cheap/便宜的, expensive/昂贵的, useful/有用的, strange/奇怪的, ordinary/普通的,
    precious/珍贵的, special/特别的""")
GRADES = table("""cheap/cheaper/便宜, expensive/more expensive/贵, heavy/heavier/重, light/lighter/轻,
    big/bigger/大, small/smaller/小, beautiful/more beautiful/漂亮, useful/more useful/有用, new/newer/新,
    old/older/旧, good/better/好""")
TRAITS = table("""tall/taller/高, young/younger/年轻, busy/busier/忙, strong/stronger/强壮, thin/thinner/瘦,
    clever/cleverer/聪明, careful/more careful/细心, happy/happier/快乐, rich/richer/有钱,
    patient/more patient/有耐心""")
QUALITIES = table("color/颜色, price/价格, size/大小, shape/形状, weight/重量")
GROUPS = table("class/班, factory/工厂, company/公司, village/村子, team/球队")

BUILDINGS = table("""library/图书馆, bank/银行, hospital/医院, post office/邮局, hotel/饭店, museum/博物馆,
    supermarket/超市, school/学校, station/车站, airport/机场, bookstore/书店, cinema/电影院, factory/工厂,
    church/教堂, park/公园, market/市场""")
ROOMS = table("""kitchen/厨房, bedroom/卧室, living room/客厅, office/办公室, classroom/教室, garden/花园,
    garage/车库, dining room/餐厅""")
FURNITURE = table("table/桌子, desk/书桌, bed/床, chair/椅子, bookshelf/书架, sofa/沙发, cupboard/柜子, box/箱子")
SIDES = table("in front of/前面, behind/后面, next to/旁边, opposite/对面")
SPOTS = table("on/上, under/下面, next to/旁边, behind/后面, in front of/前面")
VEHICLES = table("""by bus/坐公共汽车, by train/坐火车, by bicycle/骑自行车, by taxi/坐出租车, by plane/坐飞机,
    by ship/坐船, by subway/坐地铁, on foot/走路""")

DEEDS = table("""buy/bought/买, sell/sold/卖, lose/lost/丢, find/found/找到, see/saw/看见, borrow/borrowed/借,
    take away/took away/拿走, order/ordered/订, receive/received/收到""")
GIFTS = table("give/gave/送给, lend/lent/借给, sell/sold/卖给, send/sent/寄给")
HARMS = table("taken away/拿走, broken/弄坏, hidden/藏起来, found/找到, borrowed/借走, stolen/偷走")
ACTIVITIES = table("""drink/drinking/tea/喝茶, drink/drinking/coffee/喝咖啡, drink/drinking/beer/喝啤酒,
    read/reading/the newspaper/看报纸, read/reading/novels/看小说, watch/watching/television/看电视,
    watch/watching/films/看电影, write/writing/letters/写信, cook/cooking/dinner/做晚饭, eat/eating/lunch/吃午饭,
    eat/eating/noodles/吃面条, study/studying/Chinese/学习中文, study/studying/history/学习历史,
    speak/speaking/English/说英语, listen/listening/to music/听音乐, play/playing/basketball/打篮球,
    play/playing/tennis/打网球, play/playing/chess/下棋, play/playing/the piano/弹钢琴, sing/singing/songs/唱歌,
    take/taking/photos/拍照, wash/washing/clothes/洗衣服, swim/swimming//游泳, run/running//跑步,
    dance/dancing//跳舞, sleep/sleeping//睡觉, draw/drawing/pictures/画画, rest/resting//休息""")
OPINIONS = table("like/喜欢, know/知道, ask about/打听, remember/记得, care about/关心")
HABITS = table("often/经常, usually/通常, always/总是, sometimes/有时候, never/从来不, seldom/很少")
HABIT_TIMES = table("""in the morning/早上, in the afternoon/下午, in the evening/晚上, on weekends/周末,
    in summer/夏天, in winter/冬天, on Mondays/每星期一, on Fridays/每星期五, every day/每天""")
MODALS = table("""must/必须, can/可以, cannot/不能, should/应该, should not/不应该, want to/想,
    do not want to/不想, need to/需要, dare not/不敢""")
STATES = table("""ill/病了, tired/很累, busy/很忙, hungry/很饿, angry/很生气, late/迟到了, afraid/很害怕,
    very happy/很高兴""")
WEATHER = table("it rains/下雨, it snows/下雪, it is hot/天气热, it is cold/天气冷, it is windy/刮风")
DEGREES = table("very/很, not/不, really/真的很, always/一直很")

WEEKDAYS = table("""Monday/星期一, Tuesday/星期二, Wednesday/星期三, Thursday/星期四, Friday/星期五,
    Saturday/星期六, Sunday/星期天""")
PARTS = table("morning/上午, afternoon/下午, evening/晚上")
HOURS = {"morning": (7, 11), "afternoon": (1, 5), "evening": (6, 10)}
MINUTES = (0, 0, 30, 30, 5, 10, 15, 20, 25, 35, 40, 45, 50, 55)
SPANS = table("day/天, week/个星期, month/个月, year/年")

WORDS = {
    "goal": BUILDINGS, "vehicle": VEHICLES, "often": HABITS, "habit_time": HABIT_TIMES, "harm": HARMS, "man": PEOPLE,
    "role": ROLES, "color": COLORS, "clothes": CLOTHES, "quality": QUALITIES, "group": GROUPS, "state": STATES,
    "weather": WEATHER, "weekday": WEEKDAYS, "degree": DEGREES,
}  # fmt: skip
"""The slots of a pattern that are filled from a table as it stands."""

# ── forms of words ────────────────────────────────────────────────────────────────────────────────────────────────────


def english_number(number: int) -> str:
    """0 to 999 in words: two hundred and thirty-one."""
    hundreds, rest = divmod(number, 100)
    small = ONES[rest] if rest < 20 else TENS[rest // 10] + (f"-{ONES[rest % 10]}" if rest % 10 else "")
    if not hundreds:
        return small
    return f"{ONES[hundreds]} hundred" + (f" and {small}" if rest else "")


def chinese_number(number: int, *, counts: bool = True) -> str:
    """0 to 999 in characters; `counts` says that a measure word follows, before which 2 is 两."""
    hundreds, tens, ones = number // 100, number // 10 % 10, number % 10
    if number == 2 and counts:
        return "两"
    text = ("两" if hundreds == 2 else DIGITS[hundreds]) + "百" if hundreds else ""
    if tens:
        text += ("" if number < 20 else DIGITS[tens]) + "十"
    elif hundreds and ones:
        text += "零"
    return text + (DIGITS[ones] if ones or not number else "")


def clock(hour: int, minute: int) -> Row:
    """A time of day: 八点一刻 is "at a quarter past eight", and 差十分九点 "at ten to nine"."""
    if minute == 0:
        return f"at {ONES[hour]} o'clock", f"{chinese_number(hour)}点"
    if minute == 30:
        return f"at half past {ONES[hour]}", f"{chinese_number(hour)}点半"
    distance = min(minute, 60 - minute)
    en, zh = ("a quarter", "一刻") if distance == 15 else (english_number(distance), f"{chinese_number(distance)}分")
    if minute < 30:
        return f"at {en} past {ONES[hour]}", f"{chinese_number(hour)}点{zh}"
    return f"at {en} to {ONES[hour + 1]}", f"差{zh}{chinese_number(hour + 1)}点"


def plural(noun: str) -> str:
    irregular = {"knife": "knives", "mouse": "mice", "dictionary": "dictionaries"}
    return irregular.get(noun) or noun + ("es" if noun.endswith(("s", "x", "ch")) else "s")


def third_person(verb: str) -> str:
    """The verb, or the first verb of a phrase, with its s."""
    first, space, rest = verb.partition(" ")
    if first == "study":
        return f"studies{space}{rest}"
    return first + ("es" if first.endswith(("ch", "sh", "o")) else "s") + space + rest


def article(phrase: str) -> str:
    # "useful" begins with the sound of "you".
    return ("an " if phrase[0] in "aeio" or phrase == "umbrella" else "a ") + phrase
