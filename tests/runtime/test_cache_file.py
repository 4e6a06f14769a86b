from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.runtime.cache_file import digests_in, fingerprint, load_blocks, save_blocks
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import ModelGeometry
from tests.models import TinyModel
from tests.runtime.driving import load_runner

GEOMETRY = ModelGeometry(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=9, max_context=99
)
DIGESTS = [bytes([n]) * 32 for n in (7, 3, 9)]


def cache_of(
    num_blocks: int = 6, block_size: int = 4, dtype: torch.dtype = torch.bfloat16
) -> KVCache:
    cache = KVCache(GEOMETRY, num_blocks, block_size, dtype=dtype, device=torch.device("cpu"))
    cache.pool.copy_(torch.randn(cache.pool.shape))
    return cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return tmp_path


def block(cache: KVCache, block_id: int) -> torch.Tensor:
    return torch.stack([torch.stack([k[block_id], v[block_id]]) for k, v in cache.layers])


def test_blocks_come_back_bit_for_bit_where_they_are_wanted(tmp_path: Path) -> None:
    path, first, second = tmp_path / "deep" / "kept", cache_of(), cache_of(num_blocks=9)
    save_blocks(path, "key", dict(zip(DIGESTS, (4, 0, 5), strict=True)), first)
    assert digests_in(path, "key") == DIGESTS
    untouched = block(second, 3).clone()
    load_blocks(path, [(0, 8), (2, 1)], second)
    assert torch.equal(block(second, 8), block(first, 4))
    assert torch.equal(block(second, 1), block(first, 5))
    assert torch.equal(block(second, 3), untouched)


def test_nothing_to_save_is_an_empty_file(tmp_path: Path) -> None:
    save_blocks(tmp_path / "kept", "key", {}, cache_of())
    assert digests_in(tmp_path / "kept", "key") == []


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all", b"\x00" * 64])
def test_an_absent_or_broken_file_holds_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "kept"
    if content is not None:
        path.write_bytes(content)
    assert digests_in(path, "key") == []


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    save_blocks(tmp_path / "kept", "key", {DIGESTS[0]: 1}, cache_of())
    assert digests_in(tmp_path / "kept", "other") == []


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    save_blocks(path, "key", {DIGESTS[0]: 1}, cache_of())

    def fail(tensors: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("cb_backend.runtime.cache_file.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_blocks(path, "key", {DIGESTS[1]: 1}, cache_of())
    assert digests_in(path, "key") == DIGESTS[:1]
    assert list(tmp_path.iterdir()) == [path]


def test_the_fingerprint_knows_model_weights_rounding_and_layout(folder: Path) -> None:
    same = fingerprint(folder, cache_of(), "none")
    assert fingerprint(folder, cache_of(num_blocks=3), "none") == same, (
        "the pool's size does not matter"
    )
    others = {
        fingerprint(folder, cache_of(block_size=8), "none"),
        fingerprint(folder, cache_of(dtype=torch.float16), "none"),
        fingerprint(folder, cache_of(), "int8"),
    }
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    others.add(fingerprint(folder, cache_of(), "none"))
    (folder / "config.json").write_text('{"rope_theta": 1}')
    others.add(fingerprint(folder, cache_of(), "none"))
    assert len(others - {same}) == 5


def test_blocks_of_another_way_to_compute_them_are_not_taken(tmp_path: Path) -> None:
    """A deterministic engine promises the bits of its own, and float32 has no others to tell."""
    folder = TinyModel("llama", "llama").save(tmp_path)
    ways: list[dict[str, object]] = [
        {},
        {"deterministic": True},
        {"implementation": "transformers"},
        {"quantization": "int8"},
    ]
    keys = {load_runner(folder, **way)._fingerprint() for way in ways}
    assert len(keys) == len(ways)
