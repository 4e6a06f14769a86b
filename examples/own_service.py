"""Your own BentoML service on top of the runner, streaming through an `@bentoml.api` method.

    bentoml serve examples.own_service:Storyteller
    curl -N localhost:3000/tell -H 'content-type: application/json' -d '{"topic": "a lighthouse"}'

The runner is a process of its own, shared by every service that depends on it: their requests run
in the same batches.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import bentoml

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.serving.services import EngineRunner, language_model_for


@bentoml.service(traffic={"timeout": 300})
class Storyteller:
    runner = bentoml.depends(EngineRunner)

    def __init__(self) -> None:
        self.model = language_model_for(self.runner)

    @bentoml.api
    async def tell(self, topic: str, max_tokens: int = 64) -> AsyncGenerator[str, None]:
        """A story, word by word. A client that leaves frees its place in the batch."""
        messages = [{"role": "user", "content": f"Tell a very short story about {topic}."}]
        params = SamplingParams(temperature=0.7, max_tokens=max_tokens)
        async for piece in self.model.stream_chat(messages, params):
            yield piece

    @bentoml.on_shutdown
    async def close(self) -> None:
        await self.model.close()
