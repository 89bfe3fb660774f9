"""The command line: every flag reaches its field, and whatever is wrong gives one line that names it."""

from __future__ import annotations

import msgspec
import pytest

from scheduler.config import EngineConfig
from server import arguments, default_model, flags
from server.config import ServerConfig, StartupError


def test_defaults_are_those_of_the_config_structs() -> None:
    config = arguments.parse([])
    assert config == ServerConfig(
        engine=EngineConfig(model_path=default_model.NAME), served_model_name="SmolLM2-135M-Instruct"
    )
    assert (config.host, config.port) == ("127.0.0.1", 30000)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--model-path /models/a", "engine.model_path", "/models/a"),
        ("--load-format dummy", "engine.load_format", "dummy"),
        ("--dtype float32", "engine.dtype", "float32"),
        ("--device cpu", "engine.device", "cpu"),
        ("--context-length 4096", "engine.context_length", 4096),
        ("--page-size 32", "engine.page_size", 32),
        ("--mem-fraction-static 1", "engine.mem_fraction_static", 1.0),
        ("--max-total-tokens 16", "engine.max_total_tokens", 16),
        ("--max-running-requests 7", "engine.max_running_requests", 7),
        ("--max-queued-requests 1", "engine.max_queued_requests", 1),
        ("--chunked-prefill-size -1", "engine.chunked_prefill_size", -1),
        ("--chunked-prefill-size=100", "engine.chunked_prefill_size", 100),
        ("--max-prefill-tokens 50", "engine.max_prefill_tokens", 50),
        ("--schedule-policy lpm", "engine.schedule_policy", "lpm"),
        ("--schedule-conservativeness 0", "engine.schedule_conservativeness", 0.0),
        ("--disable-radix-cache", "engine.disable_radix_cache", True),
        ("", "engine.disable_overlap_schedule", None),
        ("--disable-overlap-schedule", "engine.disable_overlap_schedule", True),
        ("--enable-overlap-schedule", "engine.disable_overlap_schedule", False),
        ("--attention-backend torch", "engine.attention_backend", "torch"),
        ("--disable-cuda-graph", "engine.disable_cuda_graph", True),
        ("--cuda-graph-max-bs 8", "engine.cuda_graph_max_bs", 8),
        ("--num-threads 2", "engine.num_threads", 2),
        ("--base-gpu-id 1", "engine.base_gpu_id", 1),
        ("--watchdog-timeout 1.5", "engine.watchdog_timeout", 1.5),
        ("--decode-log-interval 2", "engine.decode_log_interval", 2.0),
        ("--log-level debug", "engine.log_level", "debug"),
        ("--log-level debug", "log_level", "debug"),
        ("--log-requests", "engine.log_requests", True),
        ("--log-requests", "log_requests", True),
        ("--host ::1", "host", "::1"),
        ("--port 0", "port", 0),
        ("--api-key secret", "api_key", "secret"),
        ("--served-model-name m", "served_model_name", "m"),
        ("--model-path /models/a", "served_model_name", "/models/a"),
        ("--stream-interval 4", "stream_interval", 4),
        ("--max-request-bytes 1000", "max_request_bytes", 1000),
        ("--request-read-timeout 2.5", "request_read_timeout", 2.5),
        ("--client-timeout 5", "client_timeout", 5.0),
        ("--health-timeout 2.5", "health_timeout", 2.5),
        ("--shutdown-timeout 0", "shutdown_timeout", 0.0),
        ("--tensor-parallel-size 2", "engine.tp_size", 2),
        ("--tp=2", "engine.tp_size", 2),
        ("--data-parallel-size 3", "engine.dp_size", 3),
        ("--model tiny-llama", "engine.model_path", "tiny-llama"),
    ],
)
def test_flag_sets_its_field(words: str, field: str, value: object) -> None:
    found: object = arguments.parse(words.split())
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--prot 1", "unknown flag --prot: did you mean --port?"),
        ("--page_size 4", "unknown flag --page_size: did you mean --page-size?"),
        ("--qqqq=2", "unknown flag --qqqq: see --help for those there are"),
        ("--por 3", "unknown flag --por: did you mean --port?"),
        ("--tpsize 2", "unknown flag --tpsize: did you mean --tp-size?"),
        ("serve", "unexpected word 'serve': every setting is a --flag, see --help"),
        ("--port", "--port: expected one argument"),
        ("--port x", "--port: must be a whole number from 0 to 65535, not 'x'"),
        ("--port 65536", "--port: must be a whole number from 0 to 65535, not '65536'"),
        ("--page-size 0", "--page-size: must be a whole number of at least 1, not '0'"),
        ("--page-size 1.5", "--page-size: must be a whole number of at least 1, not '1.5'"),
        ("--mem-fraction-static 0", "--mem-fraction-static: must be a number above 0 and at most 1, not '0'"),
        ("--mem-fraction-static 1.1", "--mem-fraction-static: must be a number above 0 and at most 1, not '1.1'"),
        ("--mem-fraction-static nan", "--mem-fraction-static: must be a number above 0 and at most 1, not 'nan'"),
        ("--watchdog-timeout inf", "--watchdog-timeout: must be a number above 0 and at most 1000000, not 'inf'"),
        ("--health-timeout 1e300", "--health-timeout: must be a number above 0 and at most 1000000, not '1e300'"),
        ("--max-total-tokens 2147483648", "--max-total-tokens: must be a whole number from 2 to 2147483647, not "),
        ("--context-length 1", "--context-length: must be a whole number of at least 2, not '1'"),
        ("--num-threads 100000", "--num-threads: must be a whole number from 1 to 1024, not '100000'"),
        ("--model-path \udcff", "--model-path: must be UTF-8 text, not '\\udcff'"),
        ("--chunked-prefill-size 0", "must be a whole number of at least 1, not '0'; -1 is for no limit"),
        ("--tp-size 100000", "--tp-size 100000 and --dp-size 1 make 100000 ranks on a host, over 64: lower them"),
        ("--tp x", "--tp-size: must be a whole number of at least 1, not 'x'"),
        ("--dp-size 65", "--tp-size 1 and --dp-size 65 make 65 ranks on a host, over 64: lower them"),
        ("--disaggregation-mode local --num-prefill 40 --num-decode 25", "make 65 servers with 65 ranks on this host"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--host=", "--host: must not be empty"),
        ("--max-total-tokens 8", "--max-total-tokens 8 is less than one page of --page-size 16 tokens"),
        ("--device cpu --attention-backend triton", "--attention-backend triton needs a GPU"),
        ("--disable-overlap-schedule --enable-overlap-schedule", "--enable-overlap-schedule: not allowed with"),
        ("--chat-template /none", "--chat-template /none: there is no such file"),
        ("--tokenizer-path /none", "--tokenizer-path /none: there is no such folder"),
        ("--moe-a2a-backend pplx", "--moe-a2a-backend"),
        ("--tp-size 6 --dp-size 4 --enable-dp-attention", "--tp-size 6 is not a multiple of --dp-size 4"),
        ("--tp-size 4 --ep-size 3", "--tp-size 4 is not a multiple of --ep-size 3"),
        ("--nnodes 2 --tp-size 2", "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        ("--node-rank 1", "--node-rank 1 is not below --nnodes 1"),
        ("--nnodes 2 --tp-size 3 --dist-init-addr a:1", "--tp-size 3 is not a multiple of --nnodes 2"),
        ("--nnodes 2 --tp-size 2 --node-rank 2 --dist-init-addr a:1", "--node-rank 2 is not below --nnodes 2"),
        ("--nnodes 2 --dp-size 3 --dist-init-addr a:1", "--dp-size 3 replicas of --tp-size 1 ranks do not fit on"),
        ("--nnodes 4 --dp-size 2 --tp-size 3 --dist-init-addr a:1", "every replica is split over as many nodes"),
        ("--nnodes 2 --disaggregation-mode local --dist-init-addr a:1", "--nnodes 2 is for one server: start routers"),
        ("--moe-a2a-backend deepep --tp-size 4 --ep-size 2", "--moe-a2a-backend deepep sends rows to whole experts"),
        ("--ep-dispatch-algorithm static", "--ep-dispatch-algorithm static does not go with --moe-a2a-backend none"),
    ],
)
def test_wrong_words_give_one_line(words: str, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        arguments.parse(words.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cap_of_the_fused_experts_by_flag_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def cap(words: str) -> int | None:
        config = arguments.parse(words.split())
        assert isinstance(config, ServerConfig)
        return config.engine.mega_moe_max_tokens_per_rank

    assert cap("") is None
    monkeypatch.setenv(flags.MEGA_MOE_VARIABLE, "4096")
    assert cap("") == 4096
    assert cap("--mega-moe-max-tokens-per-rank 512") == 512
    monkeypatch.setenv(flags.MEGA_MOE_VARIABLE, "many")
    with pytest.raises(StartupError, match="--mega-moe-max-tokens-per-rank: must be a whole number of at least 1"):
        cap("")


@pytest.mark.parametrize(("words", "meaningful"), [("dynamic", True), ("fake", False)])
def test_experts_chosen_without_the_router_are_no_outputs(words: str, meaningful: bool) -> None:
    config = arguments.parse(["--model-path", "tiny-qwen3-moe", "--ep-dispatch-algorithm", words])
    assert isinstance(config, ServerConfig)
    assert config.outputs_are_meaningful is meaningful


def test_help_is_grouped_and_names_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        arguments.parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for heading in ("model:", "HTTP server:", "device and memory:", "scheduling:", "logging and supervision:"):
        assert f"\n{heading}\n" in text
    for field in (*msgspec.structs.fields(ServerConfig), *msgspec.structs.fields(EngineConfig)):
        flag = "--" + field.name.replace("_", "-")
        if field.name not in ("engine", "parent_link"):
            assert flag in text, f"{field.name} has no flag"
    for words in text.split("\n  --")[1:]:
        switch = words.startswith(
            ("disable", "enable-", "log-requests", "disaggregation-checksum", "disaggregation-decode-enable")
        )
        assert switch or "(default:" in " ".join(words.split()), words
