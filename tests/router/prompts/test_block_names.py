"""Names of KV blocks: SGLang's, a function of the prefix, apart in different namespaces.

``tests/engine/test_engine_prompts.py`` compares them with those SGLang publishes.
"""

from __future__ import annotations

import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.router.prompts.block_names import MAX_NAMES, BlockFormat, BlockNamer
from sglang_sbs.router.requests.body_fields import Namespace

ids = st.lists(st.integers(0, 2**32 - 1), max_size=300)
pages = st.sampled_from([1, 3, 16, 64])
NAMESPACES = (
    Namespace(),
    Namespace(cache_salt="a"),
    Namespace(cache_salt="b"),
    Namespace(extra_key="a"),
    Namespace(lora="a"),
    Namespace(extra_key="a", lora="b"),
    Namespace(cache_salt="a", lora="b"),
)


def test_names_that_sglang_0_5_23_published() -> None:
    namer = BlockNamer()
    assert namer.names(range(10), BlockFormat(4)).tolist() == [  # type: ignore[arg-type]
        -4977211910723114241,
        90435953025800507,
    ]


@given(ids=ids, more=ids, page=pages, bigram=st.booleans())
def test_a_longer_prompt_has_the_names_of_its_beginning_first(
    ids: list[int], more: list[int], page: int, bigram: bool
) -> None:
    namer, fresh = BlockNamer(), BlockNamer()
    format_ = BlockFormat(page, bigram)
    names = namer.names(ids, format_).tolist()
    assert len(names) == max(0, len(ids) - bigram) // page
    longer = namer.names(ids + more, format_).tolist()
    assert longer[: len(names)] == names
    assert longer == fresh.names(array("I", ids + more), format_).tolist()
    assert len(set(longer)) == len(longer)


@given(ids=st.lists(st.integers(0, 9), min_size=4, max_size=60), at=st.integers(0, 59))
def test_another_token_changes_its_block_and_all_after_it_only(ids: list[int], at: int) -> None:
    at %= len(ids)
    other = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    namer = BlockNamer()
    first, second = (namer.names(prompt, BlockFormat(4)).tolist() for prompt in (ids, other))
    same = at // 4
    assert first[:same] == second[:same]
    assert not set(first[same:]) & set(second[same:])


@pytest.mark.parametrize("page", [1, 16, 64])
def test_long_prompts_come_out_of_memory_as_they_went_in(page: int) -> None:
    namer = BlockNamer()
    prompt = [(i * 31) % 1000 for i in range(9_000)]
    first = namer.names(prompt, BlockFormat(page)).tolist()
    assert first == BlockNamer().names(prompt[:], BlockFormat(page)).tolist()
    assert namer.names(prompt, BlockFormat(page)).tolist() == first
    changed = [*prompt[:5_000], 7, *prompt[5_001:]]
    again = namer.names(changed, BlockFormat(page)).tolist()
    assert again == BlockNamer().names(changed, BlockFormat(page)).tolist()
    assert again[: 5_000 // page] == first[: 5_000 // page]
    assert again[5_000 // page] != first[5_000 // page]


def test_namespaces_share_no_names() -> None:
    namer = BlockNamer(as_published=False)
    prompt = list(range(64))
    of = [namer.names(prompt, BlockFormat(16), space).tolist() for space in NAMESPACES]
    texts = [namer.text_names(b"x" * 256, 16, space).tolist() for space in NAMESPACES]
    everything = [name for names in of + texts for name in names]
    assert len(everything) == len(set(everything)) == 2 * len(NAMESPACES) * 4


def test_published_names_ignore_the_extra_key_as_sglang_does() -> None:
    namer = BlockNamer(as_published=True)
    prompt = list(range(64))
    plain = namer.names(prompt, BlockFormat(16))
    assert namer.names(prompt, BlockFormat(16), Namespace(extra_key="a")) == plain
    assert namer.names(prompt, BlockFormat(16), Namespace(lora="a")) != plain


def test_text_is_named_by_its_bytes() -> None:
    namer = BlockNamer()
    text = "ü".encode() * 100
    assert len(namer.text_names(text, 16)) == 200 // 64
    longer = namer.text_names(text + b"more of it" * 10, 16)
    assert longer[:3] == namer.text_names(text, 16)


@pytest.mark.parametrize("page", [1, 3, 16, 64, 2000])
def test_a_text_has_the_names_of_its_bytes_wherever_letters_end(page: int) -> None:
    namer = BlockNamer()
    text = "aü漢\U0001f600\udc80, " * 3000
    encoded = text.encode("utf-8", "surrogatepass")
    assert namer.text_names(text, page) == namer.text_names(encoded, page)
    assert len(namer.text_names(text, page)) == min(MAX_NAMES, len(encoded) // (4 * page))
    assert not namer.text_names("", page)


def test_naming_a_text_takes_and_keeps_a_part_of_its_size() -> None:
    text = "".join(map(str, range(200_000)))  # nothing of it was seen before
    tracemalloc.start()
    try:
        names = BlockNamer().text_names(text, 32)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(names) == len(text) // 128
    assert kept < len(text) / 2  # other threads of the test run allocate as well
    assert peak < len(text)


def test_prompts_without_end_have_a_bounded_number_of_names() -> None:
    assert len(BlockNamer().names([1] * (MAX_NAMES + 5), BlockFormat(1))) == MAX_NAMES


@pytest.mark.parametrize("nonsense", [[-1], [1.5], ["a"], [[1]], [2**32], [None]])
def test_what_is_no_token_id_is_a_value_error(nonsense: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        BlockNamer().names(nonsense, BlockFormat(1))
