from __future__ import annotations

import pytest

from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError
from cb_backend.serving.settings import DEFAULT_MODEL, config_from_env


def test_an_empty_environment_gives_the_defaults() -> None:
    assert config_from_env({}) == EngineConfig(model=DEFAULT_MODEL)
    assert config_from_env({"PATH": "/bin", "CB_MODEL": ""}) == EngineConfig(model=DEFAULT_MODEL)


def test_every_kind_of_field_is_read() -> None:
    config = config_from_env(
        {
            "CB_MODEL": "org/name",
            "CB_DTYPE": "float32",
            "CB_MAX_NUM_SEQS": "8",
            "CB_MAX_MODEL_LEN": "512",
            "CB_KV_CACHE_GIB": "1.5",
            "CB_ENABLE_PREFIX_CACHING": "off",
            "CB_CHECK_INVARIANTS": "TRUE",
        }
    )
    assert config == EngineConfig(
        model="org/name",
        dtype="float32",
        max_num_seqs=8,
        max_model_len=512,
        kv_cache_gib=1.5,
        enable_prefix_caching=False,
        check_invariants=True,
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CB_MAX_NUM_SEQS", "many"),
        ("CB_MAX_NUM_SEQS", "0"),
        ("CB_MAX_NUM_SEQS", "1.5"),
        ("CB_MAX_MODEL_LEN", "-1"),
        ("CB_KV_CACHE_GIB", "big"),
        ("CB_KV_CACHE_GIB", "nan"),
        ("CB_ENABLE_PREFIX_CACHING", "maybe"),
        ("CB_DTYPE", "int3"),
        ("CB_MEMORY_FRACTION", "1.1"),
        ("CB_MAX_NUM_BATCHED_TOKENS", "4"),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable) as refused:
        config_from_env({variable: value})
    assert value in refused.value.message


def test_an_unknown_variable_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"CB_MODLE.*CB_MODEL"):
        config_from_env({"CB_MODLE": "x"})
