"""The one exception type that is meant for a person to read."""


class UserError(ValueError):
    """Bad input. The message is one sentence that says what is wrong and what would be right."""
