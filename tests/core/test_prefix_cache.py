from __future__ import annotations

from cb_backend.core.block_pool import BlockPool
from cb_backend.core.prefix_cache import PrefixCache, extend_block_hashes, root_digest


def hashes(token_ids: list[int], salt: str = "", block_size: int = 4) -> list[bytes]:
    found: list[bytes] = []
    extend_block_hashes(found, token_ids, block_size=block_size, salt=salt)
    return found


def test_only_full_blocks_have_a_digest() -> None:
    assert [len(hashes(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_digests_grown_step_by_step_equal_those_made_at_once() -> None:
    token_ids, grown = list(range(100, 123)), []
    for end in range(len(token_ids) + 1):
        extend_block_hashes(grown, token_ids[:end], block_size=4, salt="s")
    assert grown == hashes(token_ids, salt="s")


def test_a_digest_stands_for_the_whole_prefix_not_for_the_block_alone() -> None:
    assert hashes([1, 2, 3, 4, 9, 9, 9, 9])[1] != hashes([5, 6, 7, 8, 9, 9, 9, 9])[1]


def test_salts_adapters_and_their_borders_never_collide() -> None:
    roots = {
        root_digest(*pair) for pair in [("", ""), ("a", ""), ("", "a"), ("ab", ""), ("a", "b")]
    }
    assert len(roots) == 5


def test_match_stops_at_the_first_unknown_block() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, on_evict=lambda block_id, digest: None)
    blocks, digests = pool.allocate(3), hashes(list(range(12)))
    cache.insert(digests[0], blocks[0])
    cache.insert(digests[2], blocks[2])
    assert cache.match(digests) == blocks[:1]


def test_the_first_block_of_equal_contents_stays() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool, on_evict=lambda block_id, digest: None)
    first, second = pool.allocate(2)
    digest = hashes(list(range(4)))[0]
    cache.insert(digest, first)
    cache.insert(digest, second)
    assert cache.match([digest]) == [first]
    assert pool.cached_blocks == {first}


def test_an_evicted_block_is_no_longer_found() -> None:
    pool = BlockPool(1)
    cache = PrefixCache(pool, on_evict=lambda block_id, digest: None)
    blocks, digests = pool.allocate(1), hashes(list(range(4)))
    cache.insert(digests[0], blocks[0])
    pool.release(blocks)
    assert cache.match(digests) == blocks
    pool.allocate(1)
    assert cache.match(digests) == []
    assert len(cache) == 0
