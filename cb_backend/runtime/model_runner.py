"""Runs plans: applies a step to the batch, makes one ragged forward pass, samples.

Built, used and closed on the engine thread; owns the model, the KV cache and the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import cb_kernels
import torch
from cb_kernels import attention_path, uses_triton
from torch import Tensor

from cb_backend.config import EngineConfig
from cb_backend.core.step_io import (
    BlockCopy,
    FinishedStep,
    ModelInfo,
    PendingStep,
    PoolResize,
    StepPlan,
    StepResult,
)
from cb_backend.core.swap_costs import COPYING_IS_FREE, SwapCosts
from cb_backend.errors import ConfigError
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.cache_file import digests_in, fingerprint, load_blocks, save_blocks
from cb_backend.runtime.cuda_graphs import CudaGraphMaker, GraphMaker
from cb_backend.runtime.device import choose_cache_dtype, choose_device, choose_num_threads
from cb_backend.runtime.forward_pass import ForwardPass
from cb_backend.runtime.host_logit_editor import HostLogitEditor
from cb_backend.runtime.host_steps import HostSteps
from cb_backend.runtime.kv_cache import KVCache, KVCacheSpec, size_kv_cache
from cb_backend.runtime.logit_editor import DeviceLogitEditor, LogitEditor
from cb_backend.runtime.memory import available_bytes, give_back_free_memory
from cb_backend.runtime.models.interface import CausalModel
from cb_backend.runtime.models.loader import eos_token_ids, load_model
from cb_backend.runtime.models.model_config import read_config
from cb_backend.runtime.rehearsal import rehearse, warm_up
from cb_backend.runtime.sampled_ids import UNSOUND, HostSampledIds, SampledIds, SampledStep
from cb_backend.runtime.sampler import sample
from cb_backend.runtime.staging import StagedStep
from cb_backend.runtime.streams import HostStreams, streams_of
from cb_backend.runtime.swap_timing import measure_swap_costs
from cb_backend.runtime.token_batch import TokenBatch

logger = logging.getLogger(__name__)


def load_model_runner(config: EngineConfig) -> ModelRunner:
    """Load the model, allocate its cache and run it once. Minutes for a large model.

    Raises ConfigError and ModelError.
    """
    torch.set_num_threads(choose_num_threads(config.num_threads))
    device = choose_device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # of this thread: graphs are captured where it stands
    with torch.inference_mode():
        model, implementation = load_model(config, device)
        give_back_free_memory()
        cache_dtype = choose_cache_dtype(config.kv_cache_dtype, model.dtype, device)
        cache_spec = size_kv_cache(config, model.geometry, dtype=cache_dtype, device=device)
        info = _model_info(config, model, cache_spec, device, implementation)
        runner = ModelRunner(model, info, config, device)
    warm_up(runner)
    if device.type == "cuda":
        _rehearse(runner, config)
    if config.cuda_graphs and device.type == "cuda":
        runner.capture_graphs(CudaGraphMaker(), config.max_num_seqs)
    if config.num_host_kv_blocks:
        runner.learn(measure_swap_costs(runner, info, config.num_host_kv_blocks))
    logger.info("serving %s", info)
    return runner


def _rehearse(runner: ModelRunner, config: EngineConfig) -> None:
    try:
        rehearse(
            runner,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_host_blocks=config.num_host_kv_blocks,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of max_num_batched_tokens {config.max_num_batched_tokens} does not fit beside"
            " the weights and the KV cache; lower it, memory_fraction or kv_cache_gib",
            field="max_num_batched_tokens",
        ) from error


class ModelRunner:
    """Implements `core.step_io.Executor`."""

    def __init__(
        self, model: CausalModel, info: ModelInfo, config: EngineConfig, device: torch.device
    ) -> None:
        self._model = model
        self._folder = Path(config.model)
        self._way = f"{info.implementation} {config.quantization} {config.deterministic}"
        self._info = info
        self._device = device
        self._cache = KVCache(
            *(model.geometry, info.num_blocks, info.block_size),
            dtype=choose_cache_dtype(config.kv_cache_dtype, model.dtype, device),
            device=device,
        )
        self._streams = streams_of(device)
        self._copier = BlockCopier(self._cache, self._streams, config.num_host_kv_blocks)
        self._forward_pass = ForwardPass(
            model, self._cache, self._streams, deterministic=config.deterministic
        )
        self._deterministic = config.deterministic
        self._min_free_bytes = int((config.min_free_gib or 0.0) * 2**30)
        self._sampled: SampledIds | HostSampledIds
        self._host_steps: HostSteps | None = None
        if device.type == "cpu" and isinstance(self._streams, HostStreams):
            self._sampled = HostSampledIds(config.max_num_seqs)
            if self._forward_pass.can_prepare:
                self._host_steps = HostSteps(
                    self._forward_pass, self._copier, self._sampled, self._tokens_of
                )
                # One thread would compute no sooner, and what has ended meanwhile in vain.
                self._info = replace(info, runs_ahead=torch.get_num_threads() > 1)
        else:
            self._sampled = SampledIds(config.max_num_seqs, device)
        self._editor: LogitEditor = (
            DeviceLogitEditor(info.vocab_size, config.max_num_seqs, device)
            if uses_triton(self._cache.pool)
            else HostLogitEditor(info.vocab_size)
        )
        self._batch = TokenBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
        )

    @property
    def model_info(self) -> ModelInfo:
        return self._info

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `Executor.launch`. A row whose logits are not finite fails alone."""
        inputs = self._batch.apply(plan)
        if not plan.rows:
            return FinishedStep(StepResult(token_ids={}, failed={}))
        with torch.inference_mode():
            if self._host_steps is not None:
                return self._host_steps.launch(inputs, plan.copies)
            self._copier.run(plan.copies)
            step = self._forward_pass.stage(inputs)
            self._sampled.fill(step)
            sampled = self._tokens_of(step, self._forward_pass.logits(step))
            self._sampled.keep(step, sampled)
            return SampledStep(inputs.request_ids, self._streams.read(sampled))

    def _tokens_of(self, step: StagedStep, logits: Tensor) -> Tensor:
        """Token ids [R] sampled from logits [R, V]; -1 for a row that is not sound."""
        if not step.inputs.request_ids:
            return step.batch_rows
        logits = self._editor.edit(logits, step)
        if step.sampling is None:
            tokens, sound = sample(logits, step.inputs.sampling, alone=self._deterministic)
        else:
            tokens, sound = cb_kernels.sample(logits, step.sampling)
        self._editor.count(step, tokens, sound)
        return tokens.where(sound, UNSOUND)

    def resize(self, change: PoolResize) -> None:
        """See `Executor.resize`."""
        with torch.inference_mode():
            self._copier.run(change.copies)
            self._forward_pass.forget_graphs()
            if self._host_steps is not None:
                self._host_steps.forget()
            self._cache.resize(change.num_blocks)
        self._batch.rename_blocks(change.moved)

    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        return available_bytes(self._device, memory_fraction=1.0)

    def use_idle_time(self) -> bool:
        """See `Executor.use_idle_time`. Before a request needs it, the pool never takes more than
        half of the memory that is free and not to stay so."""
        missing = self._cache.num_untouched_bytes
        try:
            if not missing or self.free_bytes() - self._min_free_bytes < 2 * missing:
                return False
        except ConfigError:  # a system that does not tell
            return False
        with torch.inference_mode():
            self._cache.touch_more()
        return True

    def save_blocks(self, path: str, blocks: Mapping[bytes, int]) -> None:
        """See `Executor.save_blocks`."""
        with torch.inference_mode():
            save_blocks(Path(path), self._fingerprint(), blocks, self._cache)

    def saved_digests(self, path: str) -> list[bytes]:
        """See `Executor.saved_digests`."""
        return digests_in(Path(path), self._fingerprint())

    def load_blocks(self, path: str, places: Sequence[tuple[int, int]]) -> None:
        """See `Executor.load_blocks`."""
        if places:
            with torch.inference_mode():
                load_blocks(Path(path), places, self._cache)

    def capture_graphs(self, maker: GraphMaker, max_num_seqs: int) -> None:
        """From now on decoding steps are replayed, where the model allows it."""
        with torch.inference_mode():
            self._forward_pass.use_graphs(
                maker, max_num_seqs=max_num_seqs, max_model_len=self._info.max_model_len
            )

    def learn(self, costs: SwapCosts) -> None:
        """Known only once the runner runs."""
        self._info = replace(self._info, swap_costs=costs)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """In their order, done when this returns."""
        with torch.inference_mode():
            self._copier.run(copies)
        self._streams.synchronize()

    def close(self) -> None:
        """Let go of the model and the cache; the runner cannot be used afterwards."""
        if self._host_steps is not None:
            self._host_steps.close()
        self._forward_pass.close()
        del self._model, self._cache, self._copier, self._forward_pass, self._batch
        del self._sampled, self._editor, self._host_steps
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _fingerprint(self) -> str:
        return fingerprint(self._folder, self._cache, self._way)


def _model_info(
    config: EngineConfig,
    model: CausalModel,
    cache_spec: KVCacheSpec,
    device: torch.device,
    implementation: str,
) -> ModelInfo:
    folder = Path(config.model)
    return ModelInfo(
        model_name=config.served_model_name or folder.resolve().name,
        vocab_size=model.geometry.vocab_size,
        max_model_len=cache_spec.max_model_len,
        eos_token_ids=eos_token_ids(folder, read_config(folder)),
        num_blocks=cache_spec.num_blocks,
        block_size=cache_spec.block_size,
        swap_costs=COPYING_IS_FREE,  # until they are measured
        bytes_per_block=cache_spec.bytes_per_block,
        window=model.geometry.window,
        device=str(device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=attention_path(device.type),
        implementation=implementation,
        runs_ahead=device.type == "cuda",
    )
