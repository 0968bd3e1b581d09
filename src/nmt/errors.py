"""What a user can mend: the command line prints these as they are and ends with `exit_code`."""

MOST_TOLD = 100
"""Problems of one refusal that are told in words; further ones are counted."""
LONGEST_TOLD = 600
"""Characters of a problem that are shown; of a longer one the start and the end, where the advice stands."""


class NmtError(Exception):
    """Something failed; the message says what, where and what next."""

    exit_code = 1


class ConfigError(NmtError):
    """A setting or an option is wrong; nothing was read or written. `problems` has a line for each fault."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        told = [
            text if len(text) <= LONGEST_TOLD else f"{text[: LONGEST_TOLD // 2]} ... {text[-LONGEST_TOLD // 3 :]}"
            for text in problems[:MOST_TOLD]
        ]
        more = [f"and {len(problems) - MOST_TOLD:,} more."] if len(problems) > MOST_TOLD else []
        super().__init__("\n".join([*told, *more]))
        self.problems = problems


class DataError(NmtError):
    """A corpus, a text file or an encoded data set is not what it should be."""


class CheckpointError(NmtError):
    """A checkpoint or a run folder cannot be used."""


class Preempted(NmtError):
    """A training was asked to end by a signal, and has saved; the exit code is the usual one of that signal."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


class LostContact(NmtError):
    """Another process of this training is gone or has failed, and says why; this one is well."""
