"""Declarations of backends and of their options, from which the command line and `generation.load` are made."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from granite4_neuron.errors import UserError, check_choice

if TYPE_CHECKING:
    from typing import Concatenate

    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.runtime.interface import Runtime


@dataclass(frozen=True)
class Option:
    """An option of a backend: a keyword of `generation.load`, and an option of the commands that run a model.

    name: the keyword; on the command line its underscores are dashes.
    help: for the command line; None for an option that commands have in another form.
    refusal: the sentence for backends without this option, in which {value} and {backend} are replaced; None for a
        sentence that only says whose option it is.
    choices: its values, beside the default; None for any.
    least: if it is a whole number, the least one.
    between: if it is any number, such as a fraction: the least one and the largest one.
    is_list: whether it is a list of such numbers.
    is_dtype: whether it is a dtype: `generation.load` takes it by name or as torch's.
    is_flag: whether it is True or False, or None for the backend's choice: --name and --no-name on the command line.
    everywhere: a value that backends without this option have too, so that they need not refuse it.
    changes_numbers: whether states of other values are to be kept apart. False if results have the same bits whatever
        the value, or if the fingerprint tells its effect in another way, as it does that of the weights.
    """

    name: str
    help: str | None = None
    refusal: str | None = None
    default: Any = None
    choices: Sequence[str] | None = None
    metavar: str | None = None
    least: int | None = None
    between: tuple[float, float] | None = None
    is_list: bool = False
    is_dtype: bool = False
    is_flag: bool = False
    everywhere: str | None = None
    changes_numbers: bool = True

    def check(self, value: Any) -> None:
        """Check that this is one of its values; raise UserError if not."""
        if value == self.default and type(value) is type(self.default):
            return
        if self.choices is not None:
            check_choice(self.name, self.spelled(value), self.choices)
        elif (rule := self._rule(value)) is not None:
            raise UserError(f"{self.name} is {reprlib.repr(value)}, and must be {rule}.")

    def _rule(self, value: Any) -> str | None:
        """Return what the value must be, if it is not that."""
        if self.is_flag:
            return None if value is None or isinstance(value, bool) else "True, False or None"
        if self.is_list:
            is_list = isinstance(value, (list, tuple)) and bool(value) and all(map(self._is_whole, value))
            return None if is_list else f"a list of whole numbers of at least {self.least}"
        if self.least is not None:
            return None if self._is_whole(value) else f"a whole number of at least {self.least}"
        if self.between is not None:
            least, most = self.between
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            return None if is_number and least <= value <= most else f"a number from {least:g} to {most:g}"
        if isinstance(self.default, str) and not isinstance(value, str):
            return "a string"
        return None

    def _is_whole(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= (self.least or 0)

    def spelled(self, value: Any) -> Any:
        """Return a value as the command line has it: dtypes by name."""
        if not self.is_dtype or isinstance(value, str):
            return value
        return str(value).removeprefix("torch.")


def numbers_of(options: Sequence[Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of those options that change numbers, by name: facts for a runtime's fingerprint.

    Args:
        values: by name, of these options and of anything else: a runtime's `locals()`, so that no option is forgotten.
    """
    return {option.name: option.spelled(values[option.name]) for option in options if option.changes_numbers}


@dataclass(frozen=True)
class Backend:
    """A backend as the command line and `generation.load` know it.

    options: that it has. It refuses all others, unless they have their default.
    load: loads a checkpoint into the backend's runtime. It is called with the backend's options, each by its name, and
        `progress` and `remark`, as `checkpoint.loading.load_model` takes them. It imports the runtime and its
        framework, which the declaration must not.
    needs: the sentences that refuse it without an option, by the option's name.
    refuses: the sentences that it has in place of `Option.refusal`, by the option's name.
    require: raises UserError if this machine lacks what these values need, so that no model is downloaded for nothing.
    """

    name: str
    options: Sequence[Option]
    load: Callable[Concatenate[Checkpoint, GenerationConfig, ...], Runtime]
    needs: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    require: Callable[[Mapping[str, Any]], None] = lambda given: None
