from __future__ import annotations

from cb_backend.planning.token_ids import TokenIds


def test_equal_blocks_have_equal_ids_and_others_have_none_in_common() -> None:
    token_ids = TokenIds(block_size=3)
    first = token_ids.sequence(["a", "b"], 6)
    second = token_ids.sequence(["a", "c"], 6)
    assert first[:3] == second[:3]
    assert not set(first[3:]) & set(second[3:])


def test_a_tail_is_like_no_other() -> None:
    token_ids = TokenIds(block_size=4)
    tails = [token_ids.sequence(["a"], 6)[4:] for _ in range(3)]
    assert len({token for tail in tails for token in tail}) == 6


def test_no_id_comes_twice_in_a_sequence() -> None:
    sequence = TokenIds(block_size=2).sequence(["a", "b", "c"], 9)
    assert len(set(sequence)) == 9


def test_a_sequence_may_be_shorter_than_its_blocks() -> None:
    token_ids = TokenIds(block_size=4)
    assert token_ids.sequence(["a", "b"], 5) == token_ids.sequence(["a", "b"], 8)[:5]
