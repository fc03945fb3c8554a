"""JSON schemas of every kind that constrained texts support."""

from __future__ import annotations

from hypothesis import strategies as st

_SMALL = st.integers(0, 3)
_NUMBERS = st.integers(-1000, 1000) | st.floats(-1000, 1000).map(lambda value: round(value, 3))
_NAMES = st.text('abz "\\/é☃😀\n', min_size=1, max_size=6)
_SCALARS = st.none() | st.booleans() | _NUMBERS | _NAMES


def _kind(type_: str, **properties: st.SearchStrategy) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({"type": st.just(type_)}, optional=properties)


_PLAIN = st.one_of(
    _kind("null"),
    _kind("boolean"),
    _kind("integer", minimum=st.integers(-99, 9), maximum=st.sampled_from([10, 11, 1000])),
    _kind("integer", multipleOf=st.sampled_from([2, 5, 7])),
    _kind("number", minimum=_NUMBERS),
    _kind("number", exclusiveMaximum=_NUMBERS),
    _kind("string", minLength=_SMALL, maxLength=st.integers(3, 9)),
    _kind("string", pattern=st.sampled_from(["^a+b?$", "[0-9]{2}", "^(x|yz)*$", "q$"])),
    _kind("string", format=st.sampled_from(["date", "time", "date-time", "ipv4", "uuid", "email"])),
    st.fixed_dictionaries({"const": _SCALARS}),
    st.fixed_dictionaries({"enum": st.lists(_SCALARS, min_size=1, max_size=4)}),
)


def _containers(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _kind("array", items=inner, minItems=_SMALL, maxItems=st.integers(3, 5)),
        several.map(lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}),
        several.map(lambda kinds: {"anyOf": kinds}),
        st.builds(
            _object, st.dictionaries(_NAMES, inner, max_size=3), st.none() | st.just(False) | inner, st.booleans()
        ),
        st.lists(_OPEN_OBJECTS, min_size=1, max_size=3).map(lambda parts: {"allOf": parts}),
    )


def _object(properties: dict, others: dict | bool | None, are_required: bool) -> dict:
    required = sorted(properties) if are_required else sorted(properties)[::2]
    said = {} if others is None else {"additionalProperties": others}
    return {"type": "object", "properties": properties, "required": required, **said}


_OPEN_OBJECTS = st.builds(_object, st.dictionaries(_NAMES, _PLAIN, max_size=2), st.none(), st.booleans())


_NESTED = st.recursive(_PLAIN | st.just({"$ref": "#/$defs/shared"}), _containers, max_leaves=6)
SCHEMAS = st.builds(lambda schema, shared: {**schema, "$defs": {"shared": shared}}, _NESTED, _PLAIN)
