"""The one exception that means: the user's input is at fault, and this sentence says how to mend it."""


class UserError(Exception):
    """Bad configuration, data or files. Commands print its text alone and exit with code 2."""
