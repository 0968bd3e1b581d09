"""Language codes (BCP 47): the one table of those that nmt knows, and what a code says.

A code is the ending of files (`train.zh-TW`) and decides how text is cleaned, tokenised for BLEU and joined. So a code
that only looks like one (`cn`, `jp`, `Chinese`) is refused with the one that was meant. Use `parse` for every question
about a language; compare `Language.primary`, never the text of a code: `zho`, `zh_CN` and `zh-Hans` are all Chinese.
"""

import difflib
import re
from typing import NamedTuple

from nmt.errors import ConfigError

CHINESE = frozenset({
    "zh", "cmn", "yue", "wuu", "lzh", "hak", "nan", "gan", "hsn", "cdo", "cjy", "cnp", "cpx", "csp", "czo", "mnp",
})  # fmt: skip
"""Primary subtags of Chinese: the macrolanguage, its members and Literary Chinese."""


UNSPACED = frozenset({"ja", "ryu", "th", "nod", "tts", "lo", "km", "my", "shn", "ksw", "mnw", "bo", "dz"})
"""Primary subtags of other languages that are written without spaces between words."""

LONGEST = 35
"""Characters of a code; RFC 5646 (section 4.4.1) asks for no more."""


class Language(NamedTuple):
    """What a language code says."""

    primary: str
    """ISO 639, the shortest form, in lower case: `zh` for `zho`; of `zh-yue` it is `yue`."""
    script: str
    """ISO 15924, such as `Hant`; where it isn't given that of a Chinese region (TW, HK, MO, CN, SG), else empty."""
    region: str
    """ISO 3166 in upper case or UN M.49, else empty."""

    @property
    def is_chinese(self) -> bool:
        return self.primary in CHINESE

    @property
    def is_unspaced(self) -> bool:
        """Whether it is written without spaces between words, as Chinese is."""
        return self.is_chinese or self.primary in UNSPACED


def parse(code: str) -> Language:
    """The parts of a language code, with `-` or `_` between them and in any case.

    Raises ConfigError for what is no code of a language in the table below; it names the code that was meant.
    """
    subtags = code.replace("_", "-").lower().split("-")
    if not code.isascii() or len(code) > LONGEST or not re.fullmatch(_SHAPE, "-".join(subtags)):
        raise ConfigError(_refusal(code))
    primary, subtags = subtags[0], subtags[1:]
    if primary not in _NAMES and not "qaa" <= primary <= "qtz":
        raise ConfigError(_refusal(code))
    if subtags and len(subtags[0]) == 3 and subtags[0].isalpha():  # An extended language: zh-yue.
        primary, subtags = subtags[0], subtags[1:]
        if primary not in _NAMES:
            raise ConfigError(_refusal(code))
    script = region = ""
    if subtags and len(subtags[0]) == 4 and subtags[0].isalpha():
        script = subtags.pop(0).title()
        if script not in _SCRIPTS.split():
            raise ConfigError(_refusal(code))
    if subtags and re.fullmatch("[a-z]{2}|[0-9]{3}", subtags[0]):
        region = subtags[0].upper()
    primary = _SHORTEST.get(primary, primary)
    if primary in CHINESE and not script:
        script = _SCRIPT_OF.get(region, "")
    return Language(primary, script, region)


def knows_words(code: str) -> bool:
    """Whether sacreBLEU's TER finds the words, or at least the characters, of a language: not of Thai, for example."""
    language = parse(code)
    return not language.is_unspaced or language.is_chinese or language.primary == "ja"


def name_of(code: str) -> str:
    """The English name of a code's language, or the code itself for a private one (qaa to qtz)."""
    primary = parse(code).primary
    return _NAMES.get(primary, primary)


# Language, extended language, script, region, variants, then what extensions and private use add.
_SHAPE = (
    r"[a-z]{2,3}(?:-[a-z]{3})?(?:-[a-z]{4})?(?:-(?:[a-z]{2}|[0-9]{3}))?(?:-(?:[a-z0-9]{5,8}|[0-9][a-z0-9]{3}))*"
    r"(?:-[a-z0-9](?:-[a-z0-9]{1,8})+)*"
)


def _refusal(code: str) -> str:
    meant = _meant(code)
    if meant:
        return f"{code!r} is not a language code; did you mean {meant}?"
    return (
        f"{code!r} is not a language code that nmt knows; give a language code, e.g. en, zh or pt-BR; qaa to qtz are "
        "for languages that have none."
    )


def _meant(code: str) -> str:
    """The code that was probably meant, or nothing."""
    words = re.sub("[-_ ()]+", "-", code.lower()).strip("-")
    if words in _MISTAKEN:
        return _MISTAKEN[words]
    first, _, rest = words.partition("-")
    if rest and first not in _NAMES and first in _MISTAKEN:  # jp-JP, cn-Hans, in that region or script.
        return (
            f"{_MISTAKEN[first]}{code[len(first) :]}" if re.fullmatch("[a-z]{2}|[a-z]{4}", rest) else _MISTAKEN[first]
        )
    by_name = {name.lower(): known for known, name in _NAMES.items() if known not in _SHORTEST}
    near = difflib.get_close_matches(first, by_name, 1, 0.85) if len(first) > 3 else []
    return by_name[near[0]] if near else ""


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# ISO 639-1 with its ISO 639-3 form, and the languages of evaluation sets for machine translation that have only the
# latter. Names are the shortest that are usual.
_TWO_LETTERS = """
aa aar Afar; ab abk Abkhaz; ae ave Avestan; af afr Afrikaans; ak aka Akan; am amh Amharic; an arg Aragonese;
ar ara Arabic; as asm Assamese; av ava Avar; ay aym Aymara; az aze Azerbaijani; ba bak Bashkir; be bel Belarusian;
bg bul Bulgarian; bi bis Bislama; bm bam Bambara; bn ben Bengali; bo bod Tibetan; br bre Breton; bs bos Bosnian;
ca cat Catalan; ce che Chechen; ch cha Chamorro; co cos Corsican; cr cre Cree; cs ces Czech; cu chu Church Slavonic;
cv chv Chuvash; cy cym Welsh; da dan Danish; de deu German; dv div Dhivehi; dz dzo Dzongkha; ee ewe Ewe; el ell Greek;
en eng English; eo epo Esperanto; es spa Spanish; et est Estonian; eu eus Basque; fa fas Persian; ff ful Fula;
fi fin Finnish; fj fij Fijian; fo fao Faroese; fr fra French; fy fry Frisian; ga gle Irish; gd gla Gaelic;
gl glg Galician; gn grn Guarani; gu guj Gujarati; gv glv Manx; ha hau Hausa; he heb Hebrew; hi hin Hindi;
ho hmo Hiri Motu; hr hrv Croatian; ht hat Haitian; hu hun Hungarian; hy hye Armenian; hz her Herero;
ia ina Interlingua; id ind Indonesian; ie ile Interlingue; ig ibo Igbo; ii iii Nuosu; ik ipk Inupiaq; io ido Ido;
is isl Icelandic; it ita Italian; iu iku Inuktitut; ja jpn Japanese; jv jav Javanese; ka kat Georgian; kg kon Kongo;
ki kik Kikuyu; kj kua Kwanyama; kk kaz Kazakh; kl kal Greenlandic; km khm Khmer; kn kan Kannada; ko kor Korean;
kr kau Kanuri; ks kas Kashmiri; ku kur Kurdish; kv kom Komi; kw cor Cornish; ky kir Kyrgyz; la lat Latin;
lb ltz Luxembourgish; lg lug Ganda; li lim Limburgish; ln lin Lingala; lo lao Lao; lt lit Lithuanian;
lu lub Luba-Katanga; lv lav Latvian; mg mlg Malagasy; mh mah Marshallese; mi mri Maori; mk mkd Macedonian;
ml mal Malayalam; mn mon Mongolian; mr mar Marathi; ms msa Malay; mt mlt Maltese; my mya Burmese; na nau Nauruan;
nb nob Bokmal; nd nde Northern Ndebele; ne nep Nepali; ng ndo Ndonga; nl nld Dutch; nn nno Nynorsk; no nor Norwegian;
nr nbl Southern Ndebele; nv nav Navajo; ny nya Chichewa; oc oci Occitan; oj oji Ojibwe; om orm Oromo; or ori Odia;
os oss Ossetian; pa pan Punjabi; pi pli Pali; pl pol Polish; ps pus Pashto; pt por Portuguese; qu que Quechua;
rm roh Romansh; rn run Rundi; ro ron Romanian; ru rus Russian; rw kin Kinyarwanda; sa san Sanskrit; sc srd Sardinian;
sd snd Sindhi; se sme Northern Sami; sg sag Sango; sh hbs Serbo-Croatian; si sin Sinhala; sk slk Slovak;
sl slv Slovene; sm smo Samoan; sn sna Shona; so som Somali; sq sqi Albanian; sr srp Serbian; ss ssw Swazi;
st sot Southern Sotho; su sun Sundanese; sv swe Swedish; sw swa Swahili; ta tam Tamil; te tel Telugu; tg tgk Tajik;
th tha Thai; ti tir Tigrinya; tk tuk Turkmen; tl tgl Tagalog; tn tsn Tswana; to ton Tongan; tr tur Turkish;
ts tso Tsonga; tt tat Tatar; tw twi Twi; ty tah Tahitian; ug uig Uyghur; uk ukr Ukrainian; ur urd Urdu; uz uzb Uzbek;
ve ven Venda; vi vie Vietnamese; vo vol Volapuk; wa wln Walloon; wo wol Wolof; xh xho Xhosa; yi yid Yiddish;
yo yor Yoruba; za zha Zhuang; zh zho Chinese; zu zul Zulu
"""
_THREE_LETTERS = """
ace Acehnese; acm Mesopotamian Arabic; acq Ta'izzi-Adeni Arabic; aeb Tunisian Arabic; ain Ainu; ajp South Levantine
Arabic; akk Akkadian; als Tosk Albanian; ami Amis; ang Old English; apc Levantine Arabic; arb Standard Arabic;
arn Mapudungun; ars Najdi Arabic; ary Moroccan Arabic; arz Egyptian Arabic; ast Asturian; awa Awadhi; ayr Central
Aymara; azb South Azerbaijani; azj North Azerbaijani; ban Balinese; bar Bavarian; bbc Batak Toba; bcl Central Bikol;
bem Bemba; bew Betawi; bho Bhojpuri; bjn Banjar; brx Bodo; bua Buriat; bug Buginese; bzd Bribri; cdo Min Dong Chinese;
ceb Cebuano; chr Cherokee; cjk Chokwe; cjy Jin Chinese; ckb Central Kurdish; cmn Mandarin; cni Ashaninka;
cnp Northern Ping Chinese; cop Coptic; cpx Pu-Xian Chinese; crh Crimean Tatar; csb Kashubian; csp Southern Ping
Chinese; czo Min Zhong Chinese; dgo Dogri; dik Dinka; doi Dogri; dsb Lower Sorbian; dyu Dyula; ekk Standard Estonian;
fil Filipino; fon Fon; frp Arpitan; frr North Frisian; fur Friulian; fuv Nigerian Fulfulde; gan Gan Chinese;
gaz West Oromo; gez Geez; gmh Middle High German; gom Konkani; got Gothic; grc Ancient Greek; gsw Swiss German;
hak Hakka; haw Hawaiian; hbo Ancient Hebrew; hch Huichol; hil Hiligaynon; hmn Hmong; hne Chhattisgarhi;
hsb Upper Sorbian; hsn Xiang Chinese; ilo Ilocano; jbo Lojban; kaa Karakalpak; kab Kabyle; kac Kachin; kam Kamba;
kbd Kabardian; kbp Kabiye; kea Kabuverdianu; kha Khasi; khk Halh Mongolian; kmb Kimbundu; kmr Northern Kurdish;
knc Central Kanuri; kok Konkani; krc Karachay-Balkar; krl Karelian; ksh Colognian; ksw Karen; lij Ligurian; lld Ladin;
lmo Lombard; ltg Latgalian; lua Luba-Kasai; luo Luo; lus Mizo; lvs Standard Latvian; lzh Literary Chinese;
mad Madurese; mag Magahi; mai Maithili; mhr Meadow Mari; min Minangkabau; mni Manipuri; mnp Min Bei
Chinese; mnw Mon; mos Mossi; mrj Hill Mari; mus Muscogee; mwl Mirandese; myv Erzya; nah Nahuatl; nan Min Nan Chinese;
nap Neapolitan; nds Low German; new Newari; nhe Eastern Huasteca Nahuatl; nia Nias; nod Northern Thai; non Old Norse;
npi Nepali; nqo N'Ko; nso Northern Sotho; nus Nuer; nyn Nyankole; ory Odia; oto Otomi; pag Pangasinan; pam Pampanga;
pap Papiamento; pbt Southern Pashto; pcm Nigerian Pidgin; pdt Plautdietsch; pes Western Persian; plt Plateau Malagasy;
pms Piedmontese; pnb Western Punjabi; prg Old Prussian; prs Dari; quc K'iche'; quy Ayacucho Quechua; quz Cusco
Quechua; raj Rajasthani; rap Rapanui; rom Romani; rue Rusyn; rup Aromanian; ryu Okinawan; sah Yakut; sat Santali;
scn Sicilian; sco Scots; sgs Samogitian; shi Tachelhit; shn Shan; shp Shipibo-Conibo; sma Southern Sami;
smj Lule Sami; smn Inari Sami; sms Skolt Sami; srn Sranan; stq Saterland Frisian; swh Swahili; syc Classical Syriac;
syr Syriac; szl Silesian; szy Sakizaya; taq Tamasheq; tar Tarahumara; tet Tetum; tlh Klingon; tok Toki Pona;
tpi Tok Pisin; trv Seediq; tts Isan; tum Tumbuka; tyv Tuvan; tzm Central Atlas Tamazight; udm Udmurt; umb Umbundu;
uzn Northern Uzbek; vec Venetian; vls West Flemish; vmw Makhuwa; vro Voro; war Waray; wuu Wu Chinese; xal Kalmyk;
xmf Mingrelian; ybe Western Yugur; ydd Eastern Yiddish; yua Yucatec Maya; yue Cantonese; zea Zeelandic; zgh Moroccan
Tamazight; zsm Standard Malay
"""
_SCRIPTS = """
Adlm Arab Aran Armn Bali Beng Bopo Bugi Cakm Cans Cher Copt Cyrl Deva Ethi Geor Goth Grek Gujr Guru Hang Hani Hans Hant
Hebr Hira Hrkt Java Jpan Kana Khmr Knda Kore Lana Laoo Latn Limb Lisu Mlym Mong Mtei Mymr Nkoo Olck Orya Rohg Sinh Sund
Syrc Talu Taml Telu Tfng Thaa Thai Tibt Vaii Xsux Yiii Zzzz
"""

# Of Chinese by its region, as a country's letters or its number.
_SCRIPT_OF = dict.fromkeys(("TW", "158", "HK", "344", "MO", "446"), "Hant")
_SCRIPT_OF |= dict.fromkeys(("CN", "156", "SG", "702"), "Hans")

# What is written for a code: countries, old codes, the library forms of ISO 639-2, and names for kinds of Chinese.
_SLIPS = """
cn:zh chn:zh chi:zh chs:zh-Hans zhs:zh-Hans zh-chs:zh-Hans zh-simp:zh-Hans zhcn:zh-CN zhtw:zh-TW zhhk:zh-HK
zh-simplified:zh-Hans simplified-chinese:zh-Hans chinese-simplified:zh-Hans simplified:zh-Hans hans:zh-Hans
cht:zh-Hant zht:zh-Hant zh-cht:zh-Hant zh-trad:zh-Hant zh-traditional:zh-Hant traditional-chinese:zh-Hant
chinese-traditional:zh-Hant traditional:zh-Hant hant:zh-Hant mandarin:zh putonghua:zh zhongwen:zh cantonese:yue
hk:yue alb:sq arm:hy at:de baq:eu bur:my by:be cz:cs cze:cs dk:da dut:nl farsi:fa flemish:nl fre:fr gb:en geo:ka
ger:de gre:el gr:el ice:is il:he in:id iw:he jap:ja ji:yi jp:ja jw:jv kh:km kz:kk mac:mk mao:mi may:ms mo:ro
per:fa ptbr:pt-BR rum:ro slo:sk sp:es tib:bo ua:uk us:en vn:vi wel:cy myanmar:my
"""


def _entries(table: str) -> list[list[str]]:
    return [" ".join(entry.split()).split(" ", 1) for entry in table.split(";")]


_PAIRS = [(two, *rest.split(" ", 1)) for two, rest in _entries(_TWO_LETTERS)]
_SHORTEST = {three: two for two, three, _ in _PAIRS}
_NAMES = {
    **dict(_entries(_THREE_LETTERS)),
    **{three: name for _, three, name in _PAIRS},
    **{two: name for two, _, name in _PAIRS},
}
_MISTAKEN = dict(slip.split(":") for slip in _SLIPS.split())
