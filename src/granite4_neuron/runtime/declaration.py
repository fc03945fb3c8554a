"""Declarations of backends and of their options, from which the command line and `generation.load` are made."""

from __future__ import annotations

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
    is_list: whether it is a list of such numbers.
    is_dtype: whether it is a dtype: `generation.load` takes it by name or as torch's.
    is_flag: whether it is True or False, or None for the backend's choice: --name and --no-name on the command line.
    everywhere: a value that backends without this option have too, so that they need not refuse it.
    """

    name: str
    help: str | None = None
    refusal: str | None = None
    default: Any = None
    choices: Sequence[str] | None = None
    metavar: str | None = None
    least: int | None = None
    is_list: bool = False
    is_dtype: bool = False
    is_flag: bool = False
    everywhere: str | None = None

    def check(self, value: Any) -> None:
        """Check that this is one of its values.

        Raises:
            UserError: it is not.
        """
        if self.choices is not None and value != self.default:
            check_choice(self.name, self.spelled(value), self.choices)
        if isinstance(self.default, str) and not isinstance(value, str):
            raise UserError(f"{self.name} is {reprlib.repr(value)}, and must be a text.")
        if self.is_flag and value is not None and not isinstance(value, bool):
            raise UserError(f"{self.name} is {reprlib.repr(value)}, and must be True, False or None.")
        if self.is_list and value != self.default and not self._is_list_of_numbers(value):
            raise UserError(
                f"{self.name} is {reprlib.repr(value)}, and must be a list of whole numbers of at least {self.least}."
            )

    def _is_list_of_numbers(self, value: Any) -> bool:
        if not isinstance(value, (list, tuple)) or not value:
            return False
        least = self.least or 0
        return all(isinstance(each, int) and not isinstance(each, bool) and each >= least for each in value)

    def spelled(self, value: Any) -> Any:
        """Return a value as the command line has it: dtypes by name."""
        if not self.is_dtype or isinstance(value, str):
            return value
        return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Backend:
    """A backend as the command line and `generation.load` know it.

    options: that it has. It refuses all others, unless they have their default.
    load: loads a checkpoint into the backend's runtime. It is called with the backend's options, each by its name, and
        `progress` and `remark`, as `checkpoint.loading.load_model` takes them. It imports the runtime and its
        framework, which the declaration must not.
    needs: the sentences that refuse it without an option, by the option's name.
    refuses: the sentences that it has in place of `Option.refusal`, by the option's name.
    """

    name: str
    options: Sequence[Option]
    load: Callable[Concatenate[Checkpoint, GenerationConfig, ...], Runtime]
    needs: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
