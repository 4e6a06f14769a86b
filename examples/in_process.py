"""The engine in your own process, without HTTP: many questions, one batch.

    python -m examples.in_process MODEL_FOLDER

Requests that run at the same time share the engine's steps, so ten take little longer than one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cb_backend.config import EngineConfig
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.factory import create_engine
from cb_backend.serving.engine_client import LocalClient, wait_until_ready
from cb_backend.serving.language_model import LanguageModel
from cb_backend.serving.text_codec import TextCodec

QUESTIONS = [
    "What is the capital of France? Answer briefly.",
    "What is the capital of Japan? Answer briefly.",
    "Name one primary colour.",
]


async def main(folder: Path) -> None:
    engine = create_engine(EngineConfig(model=str(folder)))
    try:
        client = LocalClient(engine)
        await wait_until_ready(client)
        model = LanguageModel(client, TextCodec.from_folder(folder))
        answers = await asyncio.gather(*(ask(model, question) for question in QUESTIONS))
    finally:
        await asyncio.to_thread(engine.close)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n    {answer}")


async def ask(model: LanguageModel, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    return "".join([piece async for piece in model.stream_chat(messages, params)])


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
