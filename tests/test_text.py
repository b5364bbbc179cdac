"""Text from outside, made fit to be stored and sent."""

from hypothesis import given
from hypothesis import strategies as st

from ludic.plumbing.text import REPLACEMENT, clean_json, clean_text, error_text

any_text = st.text(st.characters(exclude_categories=()))


@given(any_text)
def test_cleaned_text_can_be_encoded_and_stays_as_it_is(text: str) -> None:
    cleaned = clean_text(text)
    cleaned.encode()
    assert clean_text(cleaned) == cleaned


@given(st.text())
def test_text_that_can_be_encoded_is_left_alone(text: str) -> None:
    assert clean_text(text) is text


def test_halves_that_make_a_pair_become_their_character() -> None:
    assert clean_text("\ud83d\ude00") == "😀"
    assert clean_text("x\ude00\ud83d") == f"x{REPLACEMENT}{REPLACEMENT}"


def test_json_is_copied_to_the_last_list_and_cleaned_keys_and_all() -> None:
    inner = ["\ud800", 1]
    given_value = {"a\udfff": {"b": inner}, "c": None}
    copy = clean_json(given_value)
    inner.append("later")
    assert copy == {f"a{REPLACEMENT}": {"b": [REPLACEMENT, 1]}, "c": None}


def test_an_error_that_cannot_be_printed_has_a_text() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert error_text(Silent()) == "Silent: (it cannot say why)"
    assert error_text(KeyError("\ud800")) == r"KeyError: '\ud800'"
    assert error_text(ValueError("\ud800")) == f"ValueError: {REPLACEMENT}"
