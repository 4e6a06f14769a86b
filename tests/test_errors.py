from __future__ import annotations

import pytest

from cb_backend import errors
from cb_backend.errors import CBError, ErrorInfo, error_from_info

ALL_ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, CBError) and value is not CBError
]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_survives_a_process_border(kind: type[CBError]) -> None:
    rebuilt = error_from_info(kind("why", field="prompt").info())
    assert type(rebuilt) is kind
    assert (rebuilt.message, rebuilt.field) == ("why", "prompt")


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in ALL_ERRORS]
    assert len(set(codes)) == len(codes)


def test_an_unknown_code_is_still_an_error() -> None:
    assert type(error_from_info(ErrorInfo("from_the_future", "why"))) is CBError
