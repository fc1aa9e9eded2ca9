"""Frames arrive whole, in order and unchanged, however the bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_megatron.reward.wire import FrameReader, WireError, encode_frame

any_text = st.text(st.characters(codec=None, categories=["L", "N", "P", "Z", "C", "S"]))


def test_a_frame_is_eight_bytes_of_length_and_json():
    assert encode_frame([1, "a"]) == b"\0\0\0\0\0\0\0\x08" + b'[1, "a"]'


@given(
    st.lists(st.lists(any_text | st.booleans() | st.integers() | st.none()), max_size=5),
    st.integers(1, 40),
)
def test_messages_survive_any_cut_of_the_stream(messages, size):
    stream = b"".join(map(encode_frame, messages))
    reader, received = FrameReader(), []
    for start in range(0, len(stream), size):
        received += reader.feed(stream[start : start + size])
    assert received == messages


@pytest.mark.parametrize("text", ["\x00", "\ud800", "\udc00\ud800", "\ud83d\ude00", "\U0001f600"])
def test_surrogates_are_neither_lost_nor_joined(text):
    assert FrameReader().feed(encode_frame(text)) == [text]


def test_what_is_not_a_frame_is_refused():
    with pytest.raises(WireError, match="not JSON"):
        FrameReader().feed(b"\0\0\0\0\0\0\0\x03{a}")
    with pytest.raises(WireError, match="not JSON"):
        FrameReader().feed(b"\0\0\0\0\0\0\0\x01\xff")
    with pytest.raises(WireError, match="at most 10 expected"):
        FrameReader(10).feed(b"\0\0\0\0\0\0\0\x0b")
