from __future__ import annotations

from pathlib import Path

import bentoml
import pytest
from bentoml.exceptions import BentoMLException, NotFound

from cb_backend.errors import ConfigError
from cb_backend.serving import model_source as module
from cb_backend.serving.model_source import ModelSource, SourceKind, StoreModel, model_source


@pytest.fixture
def empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(tag: str) -> None:
        raise NotFound(f"no {tag}")

    monkeypatch.setattr(bentoml.models, "get", get)


def test_an_existing_folder_wins_over_every_other_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "owner" / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    source = model_source("owner/model")
    assert source.kind is SourceKind.FOLDER
    assert source.folder() == tmp_path / "owner" / "model"
    assert source.served_name == "model"


@pytest.mark.parametrize(
    ("name", "kind", "served"),
    [
        ("smollm2:latest", SourceKind.STORE, "smollm2"),
        ("smollm2", SourceKind.STORE, "smollm2"),
        ("smollm2:gguf-0.1.2-1", SourceKind.STORE, "smollm2"),
        ("Qwen/Qwen3-0.6B", SourceKind.HUB, "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_name_says_where_it_is(name: str, kind: SourceKind, served: str) -> None:
    source = model_source(name)
    assert (source.kind, source.served_name) == (kind, served)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none", "a b", "a/b/c", "x:y:z"])
def test_a_name_that_can_mean_nothing_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="CB_MODEL"):
        model_source(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_source(str(tmp_path)).folder()


@pytest.mark.usefixtures("empty_store")
def test_a_missing_tag_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="make model"):
        model_source("smollm2-135m-instruct:latest").folder()
    with pytest.raises(ConfigError, match="bentoml models list"):
        model_source("other:latest").folder()
    with pytest.raises(BentoMLException, match="make model"):
        StoreModel("smollm2-135m-instruct:latest").resolve()


def test_a_hub_id_without_a_hub_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(*args: object, local_files_only: bool = False, **kwargs: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match="no route to host"):
        ModelSource(SourceKind.HUB, "owner/name").folder()


@pytest.mark.parametrize(
    ("name", "pinned"),
    [
        ("one", "one:v1"),
        ("one:latest", "one:v1"),
        ("one:v0", "one:v0"),
        ("two:latest", "two:v2"),
        ("three:latest", "three:latest"),
    ],
)
def test_a_bento_decides_what_latest_is(name: str, pinned: str) -> None:
    tags = [bentoml.Tag("one", "v1"), bentoml.Tag("two", "v2")]
    assert model_source(name).pinned_to(tags).name == pinned
    assert model_source("owner/one").pinned_to(tags).name == "owner/one"


def test_nothing_that_runs_code_is_downloaded() -> None:
    assert not any(name.endswith((".py", ".bin", ".pt", ".pkl")) for name in module._HUB_FILES)
