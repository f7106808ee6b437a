"""Names of blocks, and the longest hit."""

from __future__ import annotations

import itertools

from attrs import evolve, fields
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig, kv_class, prompt_of

from kimicore.prefix import KEY_BYTES, BlockKeys, KeyContext, PrefixIndex, longest_hit
from kimicore.sampling_params import SamplingParams

NAMES = [one.name for one in fields(KeyContext)]


def test_no_two_contexts_run_together():
    """Every field of the context changes a block's name, and bytes cannot move from one field into the next."""
    keys = BlockKeys(4, b"s")
    empty = keys.chain(KeyContext()).extend([1, 2, 3, 4], 1)[0]
    names = {empty}
    for name in NAMES:
        for value in (b"a", b"ab", b"\0" * 8):
            names.add(keys.chain(KeyContext(**{name: value})).extend([1, 2, 3, 4], 1)[0])
    for left, right in itertools.pairwise(NAMES):
        names.add(keys.chain(KeyContext(**{left: b"x", right: b"y"})).extend([1, 2, 3, 4], 1)[0])
        names.add(keys.chain(KeyContext(**{left: b"xy"})).extend([1, 2, 3, 4], 1)[0])
    assert len(names) == 1 + 3 * len(NAMES) + 2 * (len(NAMES) - 1)


def test_names_are_keyed_and_wide():
    """A name has 128 bits or more and depends on a secret, so nobody can prepare a second text with it (vllm#12621)."""
    tokens = list(range(64))
    first = BlockKeys(16, b"one").chain(KeyContext()).extend(tokens, 4)
    second = BlockKeys(16, b"two").chain(KeyContext()).extend(tokens, 4)
    drawn = BlockKeys(16).chain(KeyContext()).extend(tokens, 4)
    assert len({*first, *second, *drawn}) == 12
    assert all(len(key) == KEY_BYTES >= 16 for key in first)
    assert BlockKeys(16, b"one").chain(KeyContext()).extend(tokens, 4) == first


@given(st.lists(st.integers(0, 3), min_size=8, max_size=24), st.lists(st.integers(0, 3), min_size=8, max_size=24))
def test_equal_names_mean_equal_beginnings(one: list[int], other: list[int]):
    """Block i has the same name in two sequences exactly when their first i + 1 blocks are equal."""
    keys = BlockKeys(4, b"s")
    a = keys.chain(KeyContext()).extend(one, len(one) // 4)
    b = keys.chain(KeyContext()).extend(other, len(other) // 4)
    for at in range(min(len(a), len(b))):
        assert (a[at] == b[at]) == (one[: 4 * at + 4] == other[: 4 * at + 4])


def test_a_chain_grows_as_it_would_at_once():
    """Adding names block by block gives the same as naming all blocks at once."""
    tokens = [7 * at % 101 for at in range(80)]
    grown = BlockKeys(16, b"s").chain(KeyContext())
    for blocks in range(1, 6):
        grown.extend(tokens, blocks)
    assert grown.keys == BlockKeys(16, b"s").chain(KeyContext()).extend(tokens, 5)


@settings(max_examples=300)
@given(
    st.integers(0, 10),
    st.lists(st.sampled_from([None, 1, 3, 4, 5, 8, 13]), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_the_longest_hit_is_the_longest(blocks: int, windows: list[int | None], random):
    """The hit is the longest after which every class has all that the next query sees; nothing longer would do."""
    size = 4
    chains = [BlockKeys(size, bytes([at])).chain(KeyContext()) for at in range(len(windows))]
    indexes = []
    for window, chain in zip(windows, chains, strict=True):
        chain.extend(list(range(blocks * size)), blocks)
        index = PrefixIndex()
        held = range(random.randint(0, blocks)) if window is None else random.sample(range(blocks), blocks * 2 // 3)
        index.slots.update({chain.keys[at]: at + 1 for at in held})
        indexes.append(index)

    def works(count: int) -> bool:
        for index, window, chain in zip(indexes, windows, chains, strict=True):
            first = 0 if window is None else max(0, count * size - window + 1) // size
            if any(key not in index.slots for key in chain.keys[first:count]):
                return False
        return True

    best = max(count for count in range(blocks + 1) if works(count))
    assert longest_hit(indexes, windows, chains, size, blocks) == best


def test_prompts_of_every_length_sent_twice():
    """Around a block's edge a second sending hits full blocks only, never the whole prompt (vllm#9972)."""
    for length, cached in ((15, 0), (16, 0), (17, 16), (32, 16), (33, 32)):
        rig = Rig()
        prompt = prompt_of(length)
        first, second = rig.run(prompt, 5), rig.run(prompt, 5)
        assert first.tokens == second.tokens
        assert first.finished.cached_tokens == 0
        assert second.finished.cached_tokens == cached < length


def test_a_part_of_a_block_is_never_a_hit():
    """Two prompts that share 37 tokens share two blocks of 16, and so does one of 37 sent twice (Mooncake#4164)."""
    rig = Rig()
    prompt = prompt_of(60)
    rig.run(prompt, 4)
    other = [*prompt[:37], (prompt[37] + 1) % 50, *prompt[38:]]
    number = rig.submit(other, 4)
    rig.finish()
    rig.assert_right(number)
    assert rig.out[number].finished.cached_tokens == 32
    rig = Rig()
    rig.run(prompt[:37], 1)
    assert rig.run(prompt[:37], 1).finished.cached_tokens == 32


def test_other_weights_never_hit():
    """Blocks made by other weights under the same secret and tokens are never found (vllm#42125)."""
    old = KeyContext(weights=b"old")
    keys = BlockKeys(16, b"s")
    tokens = prompt_of(64)
    assert not set(keys.chain(old).extend(tokens, 4)) & set(keys.chain(evolve(old, weights=b"new")).extend(tokens, 4))


def test_tenants_do_not_share():
    """A prompt cached for one tenant is a miss for another and a hit for the first (vllm#16016)."""
    rig = Rig(slabs=200, max_batch_tokens=512)
    secret = prompt_of(512)
    rig.run(secret, 2, tenant="a")
    assert rig.run(secret, 2, tenant="b").finished.cached_tokens == 0
    assert rig.run(secret, 2, tenant="a").finished.cached_tokens == 496


def test_pushed_out_means_gone():
    """A prompt that others pushed out of the cache misses and is computed anew, with the same tokens (vllm#4761)."""
    rig = Rig(slabs=8)
    prompt = prompt_of(50, 1)
    first = rig.run(prompt, 8)
    for at in range(2, 8):
        rig.run(prompt_of(90, at), 8)
    again = rig.run(prompt, 8)
    assert again.finished.cached_tokens == 0
    assert again.tokens == first.tokens
    assert rig.ledger.evicted_blocks > 0


def test_no_state_between_requests():
    """P, Q, P, R, P one after the other give the same P each time, with the cache and without (mistral.rs#1026)."""
    for use_cache in (True, False):
        rig = Rig()
        texts = {}
        for name, at in (("P", 1), ("Q", 2), ("P", 1), ("R", 3), ("P", 1)):
            out = rig.run(prompt_of(40, at), 12, use_cache=use_cache)
            assert texts.setdefault(name, out.tokens) == out.tokens
            assert bool(out.finished.cached_tokens) == (use_cache and name == "P" and len(texts) > 1)


def test_scored_prompts_do_not_read_the_cache():
    """A request for prompt log-probabilities computes and scores every position, and may be hit itself."""
    rig = Rig()
    prompt = prompt_of(50)
    rig.run(prompt, 4)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    out = rig.run(prompt, 4, params=params)
    assert out.finished.cached_tokens == 0
    assert len(out.prompt_scores) == 49
    assert rig.run(prompt, 4).finished.cached_tokens == 48


def test_hits_agree_over_classes():
    """With a window class beside a full one, a hit goes as far as both have what the next query sees."""
    classes = (kv_class("window", 3, window=20), kv_class("full", 1))
    rig = Rig(slabs=60, classes=classes)
    prompt = prompt_of(100)
    first = rig.run(prompt, 30)
    second = rig.run(prompt, 30)
    assert first.tokens == second.tokens
    assert second.finished.cached_tokens == 96
    shorter = rig.run(prompt[:50], 3)
    assert shorter.finished.cached_tokens == 48


def test_a_dynamic_rope_keeps_its_factor():
    """With a dynamic rope, prompts beyond the trained length share blocks only at the same length."""
    rig = Rig(rope_original_tokens=48)
    prompt = prompt_of(80)
    rig.run(prompt, 4)
    assert rig.steps[0].rows[0].rope_tokens == 80
    assert rig.run(prompt[:64], 4).finished.cached_tokens == 0
    assert rig.run(prompt, 4).finished.cached_tokens == 64
    rig.run(prompt[:33], 1)
    assert rig.run(prompt[:40], 1).finished.cached_tokens == 32
