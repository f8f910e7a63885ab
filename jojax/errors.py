"""The one exception that means: the user's input is at fault, and this sentence says how to mend it. It may quote what
others say."""


class UserError(Exception):
    """Bad configuration, data or files. Commands print its text alone and exit with code 2."""


def first_line(error: BaseException) -> str:
    """Of what a library says, no more than a sentence may quote."""
    return str(error).strip().split("\n")[0][:200]
