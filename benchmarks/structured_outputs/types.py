"""Converts the types of pydantic and zod to JSON schemas, and prints what happens to each: the tables of types.md.

pip install email-validator
npm install zod
python -m benchmarks.structured_outputs.types --npm FOLDER
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import subprocess
import typing
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Annotated, Any, Literal

import pydantic
import pydantic.networks
import pydantic.types
from pydantic import BaseModel, Field, TypeAdapter
from transformers import PreTrainedTokenizerFast
from typing_extensions import Required, TypedDict

from granite4_neuron import UserError
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.generation.equal_schemas import equal_schema
from granite4_neuron.generation.structured_outputs import Grammars

FOLLOWED = "followed"
NO_SCHEMA = "the library writes no schema"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Open(BaseModel, extra="allow"):
    a: int


class Closed(BaseModel, extra="forbid"):
    a: int


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Renamed(BaseModel):
    a: int = Field(alias="b", description="a number")


class Pair(typing.NamedTuple):
    a: int
    b: str


class Keys(TypedDict, total=False):
    a: Required[int]
    b: str


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0


Item = typing.TypeVar("Item")


class Box(BaseModel, typing.Generic[Item]):
    item: Item


def _of_pydantic() -> dict[str, Any]:
    """Return the types that pydantic itself defines, and no functions and annotations."""
    named = {name: getattr(pydantic, name) for name in (*pydantic.types.__all__, *pydantic.networks.__all__)}
    others = {"Secret", "EncoderProtocol", "Base64Encoder"}  # to make types with
    return {
        name: kind
        for name, kind in named.items()
        if name[0].isupper() and name not in others and not dataclasses.is_dataclass(kind)
    }


PYDANTIC: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (str, int, float, bool, bytes, complex, object)},
    "None": None,
    "Any": Any,
    "str with min_length, max_length": Annotated[str, Field(min_length=1, max_length=9)],
    "str with pattern": Annotated[str, Field(pattern="^[a-z]+$")],
    "str with strip_whitespace": Annotated[str, pydantic.StringConstraints(strip_whitespace=True)],
    "int with ge, le": Annotated[int, Field(ge=1, le=9)],
    "float with gt, lt": Annotated[float, Field(gt=1, lt=9)],
    "int with multiple_of": Annotated[int, Field(multiple_of=5)],
    **_of_pydantic(),
    "UUID": uuid.UUID,
    "Path": pathlib.Path,
    "Pattern": re.Pattern,
    "Decimal": decimal.Decimal,
    **{kind.__name__: kind for kind in (datetime.date, datetime.time, datetime.datetime, datetime.timedelta)},
    **{kind.__name__: kind for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address)},
    **{kind.__name__: kind for kind in (ipaddress.IPv4Network, ipaddress.IPv6Interface)},
    "Enum": Color,
    "IntEnum": Level,
    "Literal": Literal["a", 1, None],
    "list": list[int],
    "list with min_length, max_length": Annotated[list[int], Field(min_length=1, max_length=3)],
    "tuple[int, str]": tuple[int, str],
    "tuple[int, ...]": tuple[int, ...],
    "deque": collections.deque[int],
    "Sequence": typing.Sequence[int],
    "set": set[int],
    "set with max_length=1": Annotated[set[int], Field(max_length=1)],
    "frozenset": frozenset[str],
    "dict[str, int]": dict[str, int],
    "dict[int, str]": dict[int, str],
    "dict[Enum, int]": dict[Color, int],
    "dict with min_length": Annotated[dict[str, int], Field(min_length=1)],
    "defaultdict": collections.defaultdict[str, int],
    "Counter": typing.Counter[str],
    "Mapping": typing.Mapping[str, int],
    "TypedDict": Keys,
    "NamedTuple": Pair,
    "dataclass": Point,
    "Optional": int | None,
    "Union": int | str,
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "BaseModel": Cat,
    "BaseModel with extra=allow": Open,
    "BaseModel with extra=forbid": Closed,
    "BaseModel, recursive": Tree,
    "BaseModel, generic": Box[int],
    "BaseModel with alias": Renamed,
    "RootModel": pydantic.RootModel[list[int]],
    "Secret[date]": pydantic.Secret[datetime.date],
    "OnErrorOmit": list[pydantic.OnErrorOmit[int]],
    "Callable": typing.Callable[[int], int],
}


def pydantic_schemas() -> dict[str, Any]:
    """Return the schema of each type of pydantic by its name; None if it writes none."""
    return {name: _pydantic_schema(kind) for name, kind in PYDANTIC.items()}


def _pydantic_schema(kind: Any) -> Any:
    try:
        return TypeAdapter(kind).json_schema()
    except (pydantic.errors.PydanticUserError, ImportError, TypeError):
        return None


def zod_schemas(npm: pathlib.Path) -> dict[str, Any]:
    """Return the schema of each type of zod as `pydantic_schemas` does; zod is in the folder's node_modules."""
    program = pathlib.Path(__file__).with_suffix(".mjs")
    return json.loads(subprocess.run(["node", program], cwd=npm, check=True, capture_output=True).stdout)


def outcome(schema: Any, grammars: Grammars) -> str:
    """Return what happens to a type with this schema: whether texts follow it, or why they cannot."""
    if schema is None:
        return NO_SCHEMA
    try:
        grammars.constraint("json", schema)
    except UserError:
        fault = grammars.why_not(schema)
        assert fault is not None, schema
        return re.sub(r"^\S+: ", "", fault)
    kept = set(_formats(equal_schema(schema)))
    lost = {each for each in _formats(schema) if each not in kept and not (each.startswith("uuid") and "uuid" in kept)}
    return f"{FOLLOWED}, but not the format" if lost else FOLLOWED


def _formats(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("format"), str) and "pattern" not in schema:
            yield schema["format"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _formats(each)


def outcomes(schemas: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of types by what happens to them."""
    tokenizer, found = PreTrainedTokenizerFast.from_pretrained(bundled_checkpoint()), collections.defaultdict(list)
    with closing(Grammars(tokenizer, len(tokenizer))) as grammars:
        for name, schema in schemas.items():
            found[outcome(schema, grammars)].append(name)
    return dict(found)


def table(library: str, schemas: Mapping[str, Any]) -> str:
    """Return a table in Markdown."""
    found = outcomes(schemas)
    order = sorted(found, key=lambda each: (each == NO_SCHEMA, not each.startswith(FOLLOWED), each))
    rows = [f"| {each} | {', '.join(f'`{name}`' for name in found[each])} |" for each in order]
    return "\n".join([f"| what happens | types of {library} |", "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npm", type=pathlib.Path, help="the folder with node_modules, for the table of zod")
    options = parser.parse_args()
    print(table("pydantic", pydantic_schemas()))
    if options.npm is not None:
        print(f"\n{table('zod', zod_schemas(options.npm))}")


if __name__ == "__main__":
    main()
