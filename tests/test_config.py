from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("admin_key", ""),
        ("dtype", "int3"),
        ("implementation", "magic"),
        ("quantization", "int4"),
        ("kv_cache_dtype", "fp4"),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 63),
        ("max_num_waiting", -1),
        ("max_model_len", 0),
        ("block_size", 1.5),
        ("num_kv_blocks", True),
        ("max_prefill_chunk", 0),
        ("num_threads", 0),
        ("kv_cache_gib", 0.0),
        ("kv_cache_gib", float("nan")),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.01),
        ("step_timeout_s", float("inf")),
        ("drain_timeout_s", -1.0),
        ("target_itl_s", 0.0),
        ("min_free_gib", -1.0),
        ("max_waiting_tokens", 0),
        ("num_host_kv_blocks", -1),
        ("policy", "lifo"),
        ("priority_ageing_s", 0.0),
        ("tenant_weights", {"a": 0.0}),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        EngineConfig(**{"model": "m", field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_config_cannot_be_changed() -> None:
    config = EngineConfig(model="m")
    with pytest.raises(FrozenInstanceError):
        config.max_num_seqs = 3  # type: ignore[misc]


def test_the_admin_key_is_never_shown() -> None:
    assert "s3cret" not in repr(EngineConfig(model="m", admin_key="s3cret"))
