"""The table of docs/measurements/types.md says what happens to each type of pydantic."""

from pathlib import Path

import pydantic
import pytest

from benchmarks.structured_outputs.types import pydantic_schemas, table

pytest.importorskip("email_validator", reason="email-validator is not installed")

PAGE = Path(__file__).parents[3] / "docs/measurements/types.md"


def test_the_page_has_the_table_of_pydantic():
    page = PAGE.read_text(encoding="utf-8")
    if f"pydantic {pydantic.VERSION} " not in page:
        pytest.skip("the page is about another version of pydantic")
    assert table("pydantic", pydantic_schemas()) in page
