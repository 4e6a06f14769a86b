"""The library is compiled once, again when damaged, and done without where it cannot be had."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cb_kernels import DecoderRun
from cb_kernels.cpu import build, library
from cb_kernels.cpu.decoder_self_test import fault_of_decoder
from cb_kernels.cpu.kernels import Kernels
from cb_kernels.cpu.self_test import fault_of
from torch import Tensor

from tests.needs import needs_pairs

PROGRAM = """
import sys
from pathlib import Path
from cb_kernels.cpu import build
print(build.built_library(Path(sys.argv[1])))
"""


@pytest.fixture(autouse=True)
def _forget_the_choice() -> Iterator[None]:
    library.kernels.cache_clear()
    yield
    library.kernels.cache_clear()


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    try:
        build.find_compiler()
    except build.BuildError:
        pytest.skip("no C compiler on this machine")
    return tmp_path


def test_a_library_is_compiled_once_and_again_when_damaged(folder: Path) -> None:
    path = build.built_library(folder)
    made = path.stat().st_mtime_ns
    assert build.built_library(folder) == path
    assert path.stat().st_mtime_ns == made
    path.write_bytes(path.read_bytes()[:5000])
    assert not build.is_whole(path)
    assert build.built_library(folder) == path
    assert build.is_whole(path)


def test_two_processes_compile_at_once(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(build.SOURCES.parents[1])}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    paths = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(paths) == 1
    assert build.is_whole(Path(paths.pop()))
    assert len(list(folder.iterdir())) == 1


def test_another_processor_gets_kernels_that_agree_with_torch(of_processor: Kernels) -> None:
    """Bfloat16 linears and the decoder in one call are there on each that has AVX2."""
    assert fault_of(of_processor) is None
    if of_processor.has_decoder:
        assert of_processor.takes_paired(torch.bfloat16, 32, 64, 3)
        assert fault_of_decoder(of_processor) is None
    for num_rows, depth, width in ((1, 2, 16), (6, 34, 80), (7, 1030, 192), (70, 2050, 48)):
        generator = torch.Generator().manual_seed(num_rows)
        x, weight = (
            torch.randn(n, depth, generator=generator).bfloat16() for n in (num_rows, width)
        )
        packed = of_processor.pack(weight, gated=False)
        actual = of_processor.linear(x, packed, None, width, gated=False).double()
        expected = x.double() @ weight.double().T
        assert (actual - expected).abs().max() <= 0.004 * expected.abs().max()


@pytest.mark.parametrize(
    ("vendor", "name"),
    [("GenuineIntel", "widened"), ("AuthenticAMD", "multiplied in pairs")],
)
def test_pairs_are_widened_on_intel_s_processors_only(
    vendor: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = build.processor()
    if "avx512_bf16" not in processor:
        pytest.skip("no products of pairs in this processor")
    for known in ("GenuineIntel", "AuthenticAMD"):
        processor = processor.replace(known, vendor)
    monkeypatch.setattr(build, "processor", lambda: processor)
    loaded = Kernels(ctypes.CDLL(str(build.built_library(folder))))
    assert loaded.name == f"C, bfloat16 {name}"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
def test_a_processor_that_cannot_multiply_bytes_gets_the_other_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512vnni"))
    loaded = Kernels(ctypes.CDLL(str(build.built_library(folder))))
    assert loaded.int8 is None
    assert fault_of(loaded) is None


def test_without_a_compiler_torch_is_used_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library.kernels() is None
    assert "torch, since there is no C compiler (no-such-compiler)" in caplog.text


@pytest.mark.parametrize("arguments", ["", " ", " -m64 '-DA=b c'"])
def test_a_compiler_is_named_with_its_arguments(
    arguments: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """CC="ccache gcc" left everything to torch: there was no program of that name."""
    monkeypatch.setenv("CC", build.find_compiler()[0] + arguments)
    assert build.is_whole(build.built_library(folder))


def test_a_compiler_that_cannot_be_read_is_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "gcc '-m64")
    assert library.kernels() is None
    assert 'CC is "gcc \'-m64": No closing quotation' in caplog.text


def test_a_compiler_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(build, "UNIT", "no-such-file.c")
    assert library.kernels() is None
    assert "no-such-file.c" in caplog.text


def test_the_switch_leaves_everything_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.kernels() is None
    assert f"{library.SWITCH}=0" in caplog.text


def test_a_library_that_differs_from_torch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(Kernels, "rms_norm", lambda self, x, weight, eps: x)
    assert library.kernels() is None
    assert "fail their test: rms_norm" in caplog.text


@needs_pairs
def test_a_decoder_s_call_that_differs_from_single_operations_is_not_used(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The single operations are, which are right."""
    sources = Path(shutil.copytree(build.SOURCES, folder / "sources"))
    text = (sources / "plain_decoder.c").read_text()
    assert text.count("{l->down_bias, t->x,") == 1
    planted = text.replace("{l->down_bias, t->x,", "{l->down_bias, NULL,")  # onto nothing
    (sources / "plain_decoder.c").write_text(planted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(build, "SOURCES", sources)
    loaded = library.kernels()
    assert loaded is not None
    assert not loaded.has_decoder
    assert "no decoder in one call, since it fails its test: logits are off by" in caplog.text


@needs_pairs
def test_a_greedy_step_that_differs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.kernels()
    assert loaded is not None
    result = DecoderRun.result

    def planted(self: DecoderRun) -> Tensor:
        out = result(self)
        return out if out.is_floating_point() else out + 1

    monkeypatch.setattr(DecoderRun, "result", planted)
    assert "the largest logits" in str(fault_of_decoder(loaded))


@needs_pairs
def test_a_decoder_s_call_that_is_right_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    loaded = library.kernels()
    assert loaded is not None
    assert loaded.has_decoder
    assert caplog.text == ""


@pytest.mark.parametrize("default", ["meta", "float64"])
def test_a_caller_s_defaults_do_not_reach_the_tests_at_load(
    default: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a default device without memory of the CPU's, the library was given addresses of none."""
    dtype = torch.get_default_dtype()
    try:
        if default == "float64":
            torch.set_default_dtype(torch.float64)
        with torch.device("meta" if default == "meta" else "cpu"), caplog.at_level(logging.WARNING):
            library.kernels()
    finally:
        torch.set_default_dtype(dtype)
    assert not any("fail" in message for message in caplog.messages)


def test_a_caller_s_autocast_does_not_reach_the_tests_at_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch's side was rounded to bfloat16, and all was left to torch for as long as it ran."""
    with torch.autocast("cpu"), caplog.at_level(logging.WARNING):
        library.kernels()
    assert not any("fail" in message for message in caplog.messages)


def test_a_cache_folder_that_others_may_write_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "cb_kernels"
    (tmp_path / "cb_kernels").chmod(0o777)
    assert build.cache_folder().parent != tmp_path


def test_a_cache_folder_that_nothing_is_run_from_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a home that is mounted noexec the library did not load, and torch was left with all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status = SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    assert build.cache_folder().parent != tmp_path
