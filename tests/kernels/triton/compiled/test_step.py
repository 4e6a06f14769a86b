"""A whole step compiles for a chip that is not there, and waits for it once.

The device's tensors have no memory here, so whatever would have to wait for their numbers (`item`,
`tolist`, `nonzero`, a mask for an index, a copy to the host) fails by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from cb_kernels.triton.chips import CHIPS
from cb_kernels.triton.launch import Compilation, compile_only
from torch import Tensor
from transformers import AutoConfig

from cb_backend.config import EngineConfig
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import BlockCopy, CopyKind, ModelInfo, StepPlan
from cb_backend.core.swap_costs import COPYING_IS_FREE
from cb_backend.runtime import model_runner
from cb_backend.runtime.model_runner import ModelRunner
from cb_backend.runtime.models import transformers_fallback
from cb_backend.runtime.models.checkpoint import Checkpoint
from cb_backend.runtime.models.interface import CausalModel
from cb_backend.runtime.models.native_loader import NativeLoader
from cb_backend.runtime.models.spec import decoder_spec
from cb_backend.runtime.models.transformers_fallback import load_fallback
from cb_backend.runtime.streams import HostStreams, Reading
from tests.models import FALLBACK, TinyModel
from tests.runtime.driving import Driver, prompt_of
from tests.runtime.fake_graphs import FakeMaker

META = torch.device("meta")
SIZES = {"num_hidden_layers": 2, "head_dim": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = (
    TinyModel("llama", "llama", SIZES),
    TinyModel("qwen3", "qwen3", SIZES),
    TinyModel("gemma2", "gemma2", SIZES | {"query_pre_attn_scalar": 20, "sliding_window": 9}),
    TinyModel("mixtral", "mixtral", SIZES | EXPERTS | {"num_local_experts": 5}),
    TinyModel(
        "qwen3-moe", "qwen3_moe", SIZES | EXPERTS | {"num_experts": 5, "mlp_only_layers": [1]}
    ),
)


class MetaStreams(HostStreams):
    """Counts what goes up and what is read."""

    def __init__(self) -> None:
        self.num_uploads = self.num_reads = 0
        super().__init__()

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=META)

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        self.num_uploads += 1
        return {name: array.to(META) for name, array in super().upload(arrays).items()}

    def read(self, tensor: Tensor) -> Reading:
        self.num_reads += 1
        assert tensor.device == META
        return super().read(torch.full(tensor.shape, 5))


@pytest.fixture(autouse=True)
def compilation() -> Iterator[Compilation]:
    with compile_only(CHIPS["sm_90"]) as compilation:
        yield compilation


def meta_runner(
    tiny: TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool
) -> tuple[ModelRunner, MetaStreams]:
    tiny.save(folder)
    model_config = AutoConfig.from_pretrained(folder)
    with Checkpoint(folder) as checkpoint:
        model = NativeLoader(
            *(checkpoint, model_config, decoder_spec(model_config)),
            dtype=torch.bfloat16,
            device=META,
            deterministic=deterministic,
        ).load()
    return _runner_of(model, folder, monkeypatch, deterministic=deterministic)


def _runner_of(
    model: CausalModel, folder: Path, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool
) -> tuple[ModelRunner, MetaStreams]:
    streams = MetaStreams()
    monkeypatch.setattr(model_runner, "streams_of", lambda device: streams)
    config = EngineConfig(
        model=str(folder), max_num_seqs=8, num_host_kv_blocks=4, deterministic=deterministic
    )
    return ModelRunner(model, _info(model), config, META), streams


def _info(model: CausalModel) -> ModelInfo:
    return ModelInfo(
        model_name="m",
        vocab_size=model.geometry.vocab_size,
        max_model_len=256,
        eos_token_ids=(),
        num_blocks=64,
        block_size=16,
        swap_costs=COPYING_IS_FREE,
        bytes_per_block=1,
        window=model.geometry.window,
        device="meta",
        dtype="bfloat16",
        attention="",
        implementation="native",
        runs_ahead=True,
    )


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_a_step_waits_once(
    tiny: TinyModel, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, streams = meta_runner(tiny, tmp_path, monkeypatch, deterministic=deterministic)
    driver = Driver(runner)
    for i in range(3):
        driver.add(f"{i}", prompt_of(9 + i))
    for step, budget in enumerate((20, 100, 100), start=1):  # chunks, both, decoding
        driver.step(budget)
        assert (streams.num_reads, streams.num_uploads) == (step, step)


@pytest.fixture(scope="module")
def fallbacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[CausalModel, Path]]:
    """Of transformers' own code: proved on a CPU, which takes numbers, and then moved."""
    found: dict[str, tuple[CausalModel, Path]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_fallback, "pack_linears", lambda *_: None)
        for tiny in FALLBACK:
            folder = tmp_path_factory.mktemp(tiny.name)
            tiny.save(folder)
            config = AutoConfig.from_pretrained(folder)
            model = load_fallback(folder, config, torch.float32, torch.device("cpu"))
            model._model.to(META, torch.bfloat16)
            model._dtype = torch.bfloat16
            found[tiny.name] = model, folder
    return found


@pytest.mark.parametrize("tiny", FALLBACK, ids=str)
def test_a_step_of_transformers_code_waits_once(
    tiny: TinyModel,
    fallbacks: dict[str, tuple[CausalModel, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, streams = _runner_of(*fallbacks[tiny.name], monkeypatch, deterministic=False)
    driver = Driver(runner)
    for i in range(3):
        driver.add(f"{i}", prompt_of(9 + i))
    for step, budget in enumerate((20, 100, 100), start=1):
        driver.step(budget)
        assert (streams.num_reads, streams.num_uploads) == (step, step)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("tiny", [MODELS[0], MODELS[-1]], ids=str)
def test_a_captured_step_waits_once(
    tiny: TinyModel, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, streams = meta_runner(tiny, tmp_path, monkeypatch, deterministic=deterministic)
    maker = FakeMaker()
    runner.capture_graphs(maker, max_num_seqs=4)
    assert streams.num_reads == streams.num_uploads == 0
    driver = Driver(runner)
    for i in range(3):
        driver.add(f"{i}", prompt_of(9 + i))
    driver.step()
    driver.step()
    assert maker.num_replays == 1
    assert streams.num_reads == streams.num_uploads == 2


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
@pytest.mark.parametrize("penalty", [0.0, 0.5], ids=["biases", "penalties and biases"])
def test_a_step_that_edits_logits_waits_once(
    penalty: float, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, streams = meta_runner(MODELS[0], tmp_path, monkeypatch, deterministic=False)
    if captured:
        runner.capture_graphs(FakeMaker(), max_num_seqs=4)
    params = SamplingParams(presence_penalty=penalty, logit_bias={1: 2.0}, min_tokens=2)
    driver = Driver(runner)
    requests = [driver.add(f"{i}", prompt_of(9 + i), params) for i in range(2)]
    driver.add("plain", prompt_of(4))
    for step in range(1, 6):
        if step == 4:
            driver.preempt(requests[0])
        driver.step(20)
        assert (streams.num_reads, streams.num_uploads) == (step, step)


def test_copies_of_blocks_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, streams = meta_runner(MODELS[0], tmp_path, monkeypatch, deterministic=False)
    driver = Driver(runner)
    driver.add("a", prompt_of(9))
    driver.step()
    out, fork, back = CopyKind.OUT, CopyKind.FORK, CopyKind.IN
    copies = (BlockCopy(out, 0, 1), BlockCopy(fork, 1, 2), BlockCopy(back, 1, 3))
    runner._copier.run(copies)
    assert streams.num_reads == 1
    assert runner.launch(StepPlan(9, ("a",), ())).result().token_ids == {}


def test_a_planted_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = meta_runner(MODELS[0], tmp_path, monkeypatch, deterministic=False)
    lm_head = runner._model.lm_head  # type: ignore[attr-defined]
    monkeypatch.setattr(lm_head, "forward", lambda x: x[x[:, 0] > 0])
    driver = Driver(runner)
    driver.add("a", prompt_of(9))
    with pytest.raises((RuntimeError, NotImplementedError)):
        driver.step()
