"""The commands that take text: translate, eval and score."""

from nmt.cli.options import Changes, ConfigFile


def translate(config: ConfigFile = None, changes: Changes = None) -> None:
    """Translate a file, or stdin line by line."""


def evaluate(config: ConfigFile = None, changes: Changes = None) -> None:
    """Score a translation."""


def score(config: ConfigFile = None, changes: Changes = None) -> None:
    """Print the log-probability of given pairs."""
