"""What is asked of a translator, and what it gives back."""

import logging
from dataclasses import dataclass
from typing import NamedTuple

from nmt.errors import ConfigError, counted
from nmt.evaluation.outputs import is_repeated

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one call may want beyond the settings of `translate`."""

    n_best: int = 1
    """Translations of each line, best first; fewer if the search finds fewer."""
    sample: bool = False
    """Draw translations by chance instead of searching for the likeliest."""
    temperature: float = 1.0
    """Below 1 likely tokens are drawn even more often."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that have this share of the probability."""
    seed: int = 1
    """Chance depends on this, the number of the line and nothing else."""
    max_length: int = 0
    """Tokens of the longest translation; 0 leaves it to translate.max_length_offset."""

    def __post_init__(self) -> None:
        problems = {
            f"--n-best is {self.n_best}; give at least 1.": self.n_best < 1,
            f"--temperature is {self.temperature}; give a number from 0.001 to 1000.": not (
                0.001 <= self.temperature <= 1000
            ),
            f"--top-k is {self.top_k}; give 0 (all) or more.": self.top_k < 0,
            f"--top-p is {self.top_p}; give a share from 0.000001 to 1.": not 0.000001 <= self.top_p <= 1,
            f"--seed is {self.seed}; give 0 or more.": self.seed < 0,
            f"--max-length is {self.max_length}; give 0 (no limit of its own) or more.": self.max_length < 0,
        }
        if any(problems.values()):
            raise ConfigError(*(text for text, found in problems.items() if found))


class Translation(NamedTuple):
    """One translation of a line. If the line was translated in parts, the numbers are the sums of theirs."""

    text: str
    score: float
    """Log-probability over the length penalty."""
    logp: float
    """Natural log-probability of the tokens and eos."""
    finished: bool
    """False where the length limit cut it off."""


class PairScore(NamedTuple):
    """What a model says of a given translation."""

    logp: float
    """Natural log-probability of the target's tokens and eos, given the source."""
    tokens: int
    """How many those are, eos among them."""


@dataclass
class Counts:
    """What happened to the lines of a translation."""

    lines: int = 0
    blank: int = 0
    """Empty lines in the input; the model is not asked."""
    invalid: int = 0
    """Lines with bytes that are not UTF-8."""
    split: int = 0
    """Lines that were too long to be translated whole."""
    empty: int = 0
    """Lines with words whose translation has none."""
    repeated: int = 0
    """Translations that repeat themselves, as eval counts them."""
    cut: int = 0
    """Translations that had not ended at the length limit."""

    def add(self, src: str, parts: int, best: Translation) -> None:
        """Count a line by its text, the number of its parts and its best translation."""
        self.lines += 1
        self.blank += not parts
        self.split += parts > 1
        self.empty += parts > 0 and not best.text
        self.repeated += is_repeated(best.text, src)
        self.cut += not best.finished

    def report(self) -> str:
        """One line for a person: all that is not as it should be."""
        names = {
            "blank": "blank in the input",
            "invalid": "not UTF-8",
            "split": "translated in parts",
            "empty": "with an empty translation",
            "repeated": "with a translation that repeats itself",
            "cut": "cut at the length limit",
        }
        told = [f"{getattr(self, name):,} {text}" for name, text in names.items() if getattr(self, name)]
        return counted(self.lines, "line") + (f": {', '.join(told)}" if told else "")
