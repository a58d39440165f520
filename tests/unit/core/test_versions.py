"""reach.core.versions: exact versions, ranges, and what is neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reach.core.versions import version_matches


@pytest.mark.parametrize(
    ("wanted", "version", "matches"),
    [
        ("", "anything", True),
        ("", "", True),
        ("2.1.0", "2.1.0", True),
        ("2.1", "2.1.0", True),
        ("v2.1", "2.1.0", True),
        ("2.1.0", "2.1.1", False),
        ("2.1", "2.10", False),
        (">=2.1,<3", "2.10.4", True),
        (">=2.1,<3", "3.0", False),
        ("~=2.1", "2.9", True),
        ("==2.*", "2.4", True),
        (">=2.1", "2.2rc1", False),
        (">=2.2rc1", "2.2rc2", True),
        ("2.2rc1", "2.2rc1", True),
        ("nightly-7", "nightly-7", True),
        ("nightly-7", "nightly-8", False),
        (">=1", "nightly-7", False),
        (">=1", "", False),
        (">=abc", "1.0", False),
        (">=abc", ">=abc", True),
    ],
)
def test_a_version_satisfies_what_is_asked_for_as_pep_440_says(wanted: str, version: str, matches: bool):
    assert version_matches(wanted, version) is matches


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_text_makes_it_raise_and_equal_text_always_matches(wanted: str, version: str):
    version_matches(wanted, version)
    assert version_matches(wanted, wanted)
