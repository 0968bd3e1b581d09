"""What a user can mend: the command line prints these as they are and ends with `exit_code`."""


class NmtError(Exception):
    """Something failed; the message says what, where and what next."""

    exit_code = 1


class ConfigError(NmtError):
    """A setting or an option is wrong; nothing was read or written. `problems` has a line for each fault."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(NmtError):
    """A corpus, a text file or an encoded data set is not what it should be."""


class CheckpointError(NmtError):
    """A checkpoint or a run folder cannot be used."""
