"""The pool is as large as asked for or as memory allows, and says so when that is too little."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cb_backend.config import EngineConfig
from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.errors import ConfigError
from cb_backend.runtime import kv_cache, memory
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.kv_cache import KVCache, KVCacheSpec, size_kv_cache
from cb_backend.runtime.models.interface import ModelGeometry
from cb_backend.runtime.streams import HostStreams
from tests.needs import needs_pairs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GEOMETRY = ModelGeometry(
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=9, max_context=1000
)
TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # K and V, layers, heads, head_dim, float32


def _size(device: torch.device = CPU, **settings: object) -> KVCacheSpec:
    config = EngineConfig(model="m", **settings)  # type: ignore[arg-type]
    return size_kv_cache(config, GEOMETRY, dtype=torch.float32, device=device)


def test_an_explicit_number_of_blocks_wins() -> None:
    spec = _size(num_kv_blocks=7, kv_cache_gib=1.0, block_size=5)
    assert spec == KVCacheSpec(7, 5, 5 * TOKEN_BYTES, 35)


def test_kv_cache_gib_is_filled_with_whole_blocks() -> None:
    spec = _size(kv_cache_gib=0.0003, block_size=16)
    assert spec.num_blocks == int(0.0003 * 2**30) // (16 * TOKEN_BYTES)
    assert spec.max_model_len == 16 * spec.num_blocks


def test_the_cpu_default_leaves_most_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda *_: 1000 * TOKEN_BYTES)
    assert _size(block_size=10).num_blocks == 25


def test_no_more_blocks_than_requests_and_cached_prefixes_can_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda *_: 2**40)
    spec = _size(block_size=16, max_num_seqs=4, max_model_len=100)
    assert spec.num_blocks == 2 * 4 * 7


def test_cuda_takes_a_fraction_of_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))
    assert memory.available_bytes(CUDA, 0.75) == 350  # 400 are taken, 250 stay free
    assert memory.available_bytes(CUDA, 0.25) == 0


def test_a_container_limit_counts(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable:   50 kB\n")
    group.mkdir()
    assert memory.host_available_bytes(meminfo, [group]) == 50 * 1024
    (group / "memory.max").write_text("max")
    (group / "memory.current").write_text("1024")
    assert memory.host_available_bytes(meminfo, [group]) == 50 * 1024
    (group / "memory.max").write_text("10240")
    assert memory.host_available_bytes(meminfo, [group]) == 9216
    outer = tmp_path / "outer"  # of version 1
    outer.mkdir()
    (outer / "memory.limit_in_bytes").write_text("9000")
    (outer / "memory.usage_in_bytes").write_text("8000")
    assert memory.host_available_bytes(meminfo, [group, outer]) == 1000
    with pytest.raises(ConfigError, match="set kv_cache_gib or num_kv_blocks"):
        memory.host_available_bytes(tmp_path / "none", [])


@pytest.mark.parametrize(
    ("limit", "used", "statistic"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.high", "memory.current", "inactive_file"),  # above it all is slow
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_files_that_were_read_leave_a_container_its_memory(
    limit: str, used: str, statistic: str, tmp_path: Path
) -> None:
    """A pod that had just read its weights had no room for a pool as large as it could be."""
    meminfo, stat = tmp_path / "meminfo", tmp_path / "memory.stat"
    meminfo.write_text("MemAvailable: 50 kB\n")
    (tmp_path / limit).write_text("10000")
    (tmp_path / used).write_text("9000")
    for text, expected in (
        (f"anon 1000\n{statistic} 6000\n", 7000),
        (f"{statistic} 60000\n", 10000),  # read a moment later
        ("anon 1000\n", 1000),
        ("not of this kind\n", 1000),
    ):
        stat.write_text(text)
        assert memory.host_available_bytes(meminfo, [tmp_path]) == expected


def test_a_system_that_does_not_tell_its_free_memory_is_a_config_error(tmp_path: Path) -> None:
    """Not another one: an idle engine asks too, and goes on without."""
    meminfo = tmp_path / "meminfo"
    for text in ("MemTotal: 99 kB\nMemFree: 50 kB\n", "MemAvailable: many\n", "MemAvailable:\n"):
        meminfo.write_text(text)
        with pytest.raises(ConfigError, match="free memory"):
            memory.host_available_bytes(meminfo, [])


def test_a_pool_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV block"):
        _size(kv_cache_gib=1e-9)


def test_a_context_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1001 .* 1000"):
        _size(max_model_len=1001)
    with pytest.raises(ConfigError, match=r"1000 needs 250 KV blocks of 4 tokens, but 249 fit"):
        _size(max_model_len=1000, block_size=4, num_kv_blocks=249)


def test_clearing_blocks_zeroes_them_in_every_layer_and_no_other() -> None:
    cache = KVCache(GEOMETRY, 5, 4, dtype=torch.float32, device=CPU)
    for k, v in cache.layers:
        assert k.shape == v.shape == (5, 4, 2, 8)
        k.fill_(float("nan"))
        v.fill_(3.0)
    cache.clear([1, 4])
    for k, v in cache.layers:
        for block in range(5):
            assert bool((v[block] == (0.0 if block in (1, 4) else 3.0)).all())
            assert bool(k[block].isnan().any()) == (block not in (1, 4))


@needs_pairs
def test_a_paired_pool_has_all_of_a_block_together_and_keeps_it() -> None:
    geometry = dataclasses.replace(GEOMETRY, head_dim=32)
    cache = KVCache(geometry, 4, 16, dtype=torch.bfloat16, device=CPU)
    assert cache.is_paired
    assert cache.pool[1].is_contiguous()
    cache.pool.copy_(torch.randn(cache.pool.shape))
    before = [(k.clone(), v.clone()) for k, v in cache.layers]
    assert not torch.equal(before[0][0], before[1][0])
    cache.resize(6)
    copier = BlockCopier(cache, HostStreams(), num_host_blocks=1)
    fork = BlockCopy(CopyKind.FORK, 1, 4)
    copier.run([fork, BlockCopy(CopyKind.OUT, 2, 0), BlockCopy(CopyKind.IN, 0, 5)])
    for (k, v), (k_before, v_before) in zip(cache.layers, before, strict=True):
        for now, then in ((k, k_before), (v, v_before)):
            assert torch.equal(now[:4], then)
            assert torch.equal(now[4:6], then[1:3])
    cache.resize(2)
    assert all(
        torch.equal(k, then[:2]) for (k, _), (then, _) in zip(cache.layers, before, strict=True)
    )
    assert cache.paired is not None
    assert cache.paired.shape[0] == 2


def test_a_pool_is_touched_piece_by_piece_once_and_keeps_what_it_holds() -> None:
    cache = KVCache(GEOMETRY, 5000, 4, dtype=torch.float32, device=CPU)
    cache.pool.copy_(torch.randn(cache.pool.shape))
    before = cache.pool.clone()
    missing = [cache.num_untouched_bytes]
    assert missing[0] == cache.pool.nbytes > 2**21
    while cache.num_untouched_bytes:
        cache.touch_more()
        missing.append(cache.num_untouched_bytes)
    assert missing[-1] == 0
    assert all(0 < more - less <= 2**20 for more, less in pairwise(missing))
    assert torch.equal(cache.pool, before)
    cache.resize(6000)
    assert cache.num_untouched_bytes == cache.pool.nbytes


def test_the_first_steps_do_not_wait_for_the_pools_memory_once_it_is_touched() -> None:
    cache = KVCache(GEOMETRY, 40_000, 4, dtype=torch.float32, device=CPU)
    # In memory that nobody has used: malloc may hand out what somebody has.
    memory = torch.frombuffer(mmap.mmap(-1, cache.pool.nbytes), dtype=torch.float32)
    cache.pool = memory.view(cache.pool.shape)
    assert _share_resident(cache.pool) < 0.1
    while cache.num_untouched_bytes:
        cache.touch_more()
    assert _share_resident(cache.pool) == 1.0


def _share_resident(x: torch.Tensor) -> float:
    """Of its whole pages."""
    start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (x.data_ptr() + x.nbytes - start) // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None)
    assert (
        libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * mmap.PAGESIZE), pages) == 0
    )
    return sum(page & 1 for page in pages) / num_pages
