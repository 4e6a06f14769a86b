from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cb_backend.errors import ModelError, PromptTooLongError
from cb_backend.serving.text_codec import TextCodec

pytestmark = pytest.mark.anyio


async def test_short_and_long_texts_get_the_tokenizers_own_ids(
    codec: TextCodec, tokenizer: PreTrainedTokenizerFast
) -> None:
    for text in ("", "the fox", "the fox 客 " * 1000):
        for special in (True, False):
            ids = await codec.encode(text, max_tokens=10**6, add_special_tokens=special)
            assert ids == tokenizer.encode(text, add_special_tokens=special)


async def test_a_long_text_leaves_the_loop_to_others(codec: TextCodec) -> None:
    encoding = asyncio.ensure_future(codec.encode("the fox " * 100_000, max_tokens=10**9))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100


async def test_a_text_that_cannot_fit_is_refused_by_its_length(codec: TextCodec) -> None:
    with pytest.raises(PromptTooLongError, match=r"at least \d+ tokens.*holds 10 tokens"):
        await codec.encode("x" * 10_000, max_tokens=10)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        TextCodec.from_folder(tmp_path)


def test_a_tokenizer_that_names_its_own_class_goes_through_auto_tokenizer(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = AutoTokenizer.from_pretrained(tmp_path).encode("the fox", add_special_tokens=False)
    assert TextCodec.from_folder(tmp_path)._encode("the fox", False) == expected


def test_the_gateway_does_without_torch(tokenizer_folder: Path) -> None:
    """It would cost each gateway worker 200 MB and two seconds."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import cb_backend.serving.openai_api, cb_backend.serving.remote_client\n"
        "from cb_backend.serving.text_codec import TextCodec\n"
        "TextCodec.from_folder(Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tokenizer_folder)], check=True, timeout=50)
