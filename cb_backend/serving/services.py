"""The BentoML services: EngineRunner holds the engine, LLMService is the OpenAI gateway.

BentoML imports this module in the supervisor and in every worker, so it stays light: torch is
imported by the engine's thread, transformers where a tokenizer is loaded.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
from typing import Any

import bentoml
from bentoml.exceptions import BentoMLException

from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError
from cb_backend.factory import create_engine
from cb_backend.serving.engine_client import EngineClient, LocalClient
from cb_backend.serving.gateway import Gateway
from cb_backend.serving.language_model import LanguageModel
from cb_backend.serving.metrics import EngineMetrics
from cb_backend.serving.model_files import check_model_files
from cb_backend.serving.model_source import (
    ModelSource,
    SourceKind,
    StoreModel,
    model_source,
)
from cb_backend.serving.remote_client import RemoteClient
from cb_backend.serving.runner_app import RunnerRoutes
from cb_backend.serving.settings import config_from_env
from cb_backend.serving.shutdown import on_termination
from cb_backend.serving.text_codec import TextCodec

# Seconds until a first byte; BentoML keeps a timer of this length for every request it served.
_TRAFFIC = {"timeout": 300}
# A span for each piece of a stream takes 6% of the tokens a second, exported or not. Whoever wants
# them sets another `excluded_urls` for these services in BENTOML_CONFIG, which comes first.
_TRACING = {"excluded_urls": ["/v1/", "/internal/"]}


def _settings() -> tuple[EngineConfig, ModelSource]:
    try:
        config = config_from_env()
        return config, model_source(config.model)
    except ConfigError as error:
        raise BentoMLException(error.message) from error  # which its command prints as one line


_CONFIG, _SOURCE = _settings()
# BentoML takes applications when a class is made, before there is an instance to serve.
_RUNNER_ROUTES = RunnerRoutes()
_GATEWAY = Gateway(admin_key=_CONFIG.admin_key)
_METRICS = EngineMetrics()


# Its requests are the gateways' own, a health question each second among them.
@bentoml.service(
    workers=1, traffic=_TRAFFIC, tracing=_TRACING, logging={"access": {"enabled": False}}
)
@bentoml.asgi_app(_RUNNER_ROUTES.application())
class EngineRunner:
    """One engine on one device. Other services reach it through `engine_client_for`."""

    if _SOURCE.kind is SourceKind.STORE:
        # Named here, the model is part of a Bento that is built from this service.
        stored_model = StoreModel(_SOURCE.name)

    @bentoml.on_deployment  # type: ignore[untyped-decorator]
    @staticmethod
    def find_model() -> None:
        """In the supervisor, before any worker: a wrong name ends `bentoml serve` at once."""
        _model_folder()

    def __init__(self) -> None:
        self.engine = create_engine(
            dataclasses.replace(
                _CONFIG,
                model=_model_folder(),
                served_model_name=_CONFIG.served_model_name or _SOURCE.served_name,
            )
        )
        self.metrics = _METRICS
        # The loop keeps tasks alive only weakly.
        self._following = asyncio.get_running_loop().create_task(_METRICS.follow(self.engine))
        _RUNNER_ROUTES.engine = self.engine
        _RUNNER_ROUTES.metrics = _METRICS
        on_termination(self._start_drain)
        atexit.register(self.engine.close)

    def __is_ready__(self) -> bool:
        return self.engine.is_ready

    def __is_alive__(self) -> bool:
        return self.engine.is_alive

    def _start_drain(self) -> None:
        self.engine.start_drain()
        _RUNNER_ROUTES.start_drain()

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    async def close(self) -> None:
        self._following.cancel()
        await asyncio.to_thread(self.engine.close)


@bentoml.service(traffic=_TRAFFIC, tracing=_TRACING)
@bentoml.asgi_app(_GATEWAY.application())
class LLMService:
    """OpenAI's routes in front of the runner's engine."""

    runner = bentoml.depends(EngineRunner)

    @bentoml.on_deployment  # type: ignore[untyped-decorator]
    @staticmethod
    def find_model() -> None:
        """Again, since with --development BentoML asks only the service that it serves."""
        _model_folder()

    def __init__(self) -> None:
        self.engine = engine_client_for(self.runner)
        _GATEWAY.serve(LanguageModel(self.engine, _codec()))

    async def __is_ready__(self) -> bool:
        return (await self.engine.health()).ready

    async def __is_alive__(self) -> bool:
        """BentoML asks a dependency only whether it is ready, so this asks the engine itself."""
        return (await self.engine.health()).alive

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    async def close(self) -> None:
        await self.engine.close()


def engine_client_for(runner: Any) -> EngineClient:
    """A client of the engine behind `runner`, which is `bentoml.depends(EngineRunner)`.

    To be called in the `__init__` of the service that depends on it. BentoML's own proxy is not
    used to stream: it merges, cuts and loses what it carries, and never cancels.
    """
    service: Any = EngineRunner  # the decorator has made it a bentoml Service
    if isinstance(runner, service.inner):
        return LocalClient(runner.engine, runner.metrics)
    return RemoteClient(service.url or runner.client_url, runner_name=service.name)


def language_model_for(runner: Any) -> LanguageModel:
    """Text in, text out, over the engine behind `runner`; see `engine_client_for`."""
    return LanguageModel(engine_client_for(runner), _codec())


def _codec() -> TextCodec:
    return TextCodec.from_folder(_source().folder())


def _model_folder() -> str:
    try:
        folder = _source().folder()
        check_model_files(folder)
        return str(folder)
    except ConfigError as error:
        raise BentoMLException(error.message) from error


def _source() -> ModelSource:
    """Inside a Bento, `latest` is the version that it was built with."""
    service: Any = EngineRunner
    tags = [model.tag for model in service.bento.info.all_models] if service.bento else []
    return _SOURCE.pinned_to(tags)
