"""The one exception type whose message is meant for users."""

from collections.abc import Collection, Iterable

_MOST_CHARACTERS = 1600
_LAST_CHARACTERS = 400  # kept from the end of a long text, which says what would be right


class UserError(ValueError):
    """Bad input. The message is one sentence that says what is wrong and what would be right.

    Names in it may come from a file or from a request: the message is `printable`.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Check an option that takes one of a few values; raise UserError if the value is none of them."""
    if value not in choices:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}.")


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return the first names as part of a sentence, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def described(error: Exception) -> str:
    """Return an exception's message as part of a sentence, with its type if the message is not meant for users."""
    try:
        said = str(error).strip().rstrip(".")
    except Exception:  # even str() of a foreign exception may fail
        said = ""
    if isinstance(error, UserError):
        return said
    return printable(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def sentence_of(error: Exception) -> str:
    """Return the sentence that reports an exception to users."""
    return str(error) if isinstance(error, UserError) else f"a step failed ({described(error)})."


def printable(text: str) -> str:
    """Return a text as one line that a terminal shows as it is: other characters are escaped, and a long text is cut.

    Printable text stays as it is.
    """
    text = _cut(text)
    if text.isprintable():
        return text
    return _cut("".join(one if one.isprintable() else repr(one)[1:-1] for one in text))


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    mark = " [...] "
    return text[: _MOST_CHARACTERS - _LAST_CHARACTERS - len(mark)] + mark + text[-_LAST_CHARACTERS:]
