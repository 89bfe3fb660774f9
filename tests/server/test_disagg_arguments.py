"""Flags of prefill/decode disaggregation: which mode they make, which combinations are refused, and the way back."""

from __future__ import annotations

import msgspec
import pytest

from disagg.registry import KV_MANAGERS
from scheduler.config import EngineConfig
from server import arguments, flags
from server.config import ParentLink, ServerConfig, StartupError
from server.listening import reachable_host
from server.local_config import LocalConfig
from server.local_plan import count_gpus, make_plans, share_cores
from server.router_config import PrefillAddress, RouterConfig


def local(words: str) -> LocalConfig:
    config = arguments.parse(words.split())
    assert isinstance(config, LocalConfig)
    return config


def router(words: str) -> RouterConfig:
    config = arguments.parse(["--disaggregation-mode", "router", *words.split()])
    assert isinstance(config, RouterConfig)
    return config


def test_backends_are_those_there_are() -> None:
    assert set(KV_MANAGERS) <= set(flags.BACKENDS)


@pytest.mark.parametrize("backend", flags.BACKENDS)
def test_naming_a_backend_means_local(backend: str) -> None:
    config = local(f"--disaggregation-transfer-backend {backend}")
    assert config.servers.engine.disaggregation_transfer_backend == backend
    assert (config.num_prefill, config.num_decode) == (1, 1)
    assert local(f"--disaggregation-transfer-backend={backend}") == config


def test_local_mode() -> None:
    config = local("--disaggregation-mode local --num-prefill 2 --num-decode 3 --host ::1 --port 5 --policy random")
    assert config.servers.engine.disaggregation_transfer_backend == "tcp"
    assert (config.num_prefill, config.num_decode) == (2, 3)
    assert (config.router.host, config.router.port, config.router.policy) == ("::1", 5, "random")
    assert (config.router.prefill, config.router.decode) == ((), ())


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_one_role(mode: str) -> None:
    words = f"--disaggregation-mode {mode} --disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 9 "
    words += "--disaggregation-kv-host 10.0.0.1 --disaggregation-checksum --disaggregation-waiting-timeout 2.5"
    config = arguments.parse(words.split())
    assert isinstance(config, ServerConfig)
    engine = config.engine
    assert (engine.disaggregation_mode, engine.disaggregation_transfer_backend) == (mode, "nixl")
    assert (engine.disaggregation_checksum, engine.disaggregation_waiting_timeout) == (True, 2.5)
    assert (config.disaggregation_bootstrap_port, config.disaggregation_kv_host) == (9, "10.0.0.1")


def test_router_addresses_as_other_routers_take_them() -> None:
    config = router("--prefill http://a:1 9001 b:2/ --decode http://c:3 --prefill https://d:4 9002 --decode e:5 f:6")
    assert config.prefill == (
        PrefillAddress("http://a:1", 9001),
        PrefillAddress("http://b:2"),
        PrefillAddress("https://d:4", 9002),
    )
    assert config.decode == ("http://c:3", "http://e:5", "http://f:6")
    assert config.max_queued_requests == RouterConfig(prefill=(), decode=()).max_queued_requests
    assert router("--prefill a:1 --decode b:2 --max-queued-requests 7").max_queued_requests == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-prefill 2", "--num-prefill is for MODE local, and the mode is null"),
        ("MODE null --disaggregation-transfer-backend tcp", "the mode is null"),
        ("--disaggregation-checksum", "--disaggregation-checksum is for MODE prefill, decode or local"),
        ("MODE prefill --num-decode 2", "--num-decode is for MODE local"),
        ("MODE prefill --num-reserved-decode-tokens 1", "is for MODE decode or local"),
        ("MODE decode --policy random", "--policy is for MODE router or local"),
        ("MODE local --disaggregation-bootstrap-port 1", "is for MODE prefill or decode"),
        ("MODE decode --disaggregation-bootstrap-port 0", "name the port that prefill servers listen on"),
        ("--disaggregation-transfer-backend tcp --prefill a:1", "--prefill is for MODE router"),
        ("MODE router --prefill a:1", "needs --decode URL"),
        ("MODE router --decode a:1", "needs --prefill URL"),
        ("MODE router --prefill a:1 --decode b:2 --page-size 1", "--page-size is for MODE"),
        ("MODE router --prefill 9 a:1 --decode b:2", "--prefill 9: a bootstrap port stands behind"),
        ("MODE router --prefill a:1 9 8 --decode b:2", "--prefill 8: a bootstrap port stands behind"),
        ("MODE router --prefill a:1 70000 --decode b:2", "must be from 1 to 65535"),
        ("MODE router --prefill a:x --decode b:2", "--prefill a:x: not a URL"),
        ("MODE router --prefill a:1 --decode ftp://b", "--decode ftp://b: not a URL"),
        ("MODE router --prefill a..b:1 --decode c:2", "--prefill a..b:1: not a URL"),
        ("MODE router --prefill 10.0.0.256:1 --decode c:2", "--prefill 10.0.0.256:1: not a URL"),
        ("MODE both", "--disaggregation-mode: invalid choice: 'both'"),
        ("--disaggregation-transfer-backend smoke", "--disaggregation-transfer-backend: invalid choice: 'smoke'"),
        (
            "--disaggregation-transfer-backend tcp --num-prefill 0",
            "--num-prefill: must be a whole number of at least 1",
        ),
        ("MODE prefill --disaggregation-waiting-timeout 0", "must be a number above 0"),
        ("--parent-link {}", "--parent-link: is set by local mode alone"),
    ],
)
def test_wrong_combinations_give_one_line(words: str, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        arguments.parse(words.replace("MODE", "--disaggregation-mode").split())
    assert message.replace("MODE", "--disaggregation-mode") in str(caught.value)
    assert "\n" not in str(caught.value)


LINK = ParentLink(name="decode 1", parent_pid=5, listener=7, status=8, bootstrap_listener=9)


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(engine=EngineConfig(model_path="m"), served_model_name="m"),
        ServerConfig(
            engine=EngineConfig(
                model_path="-m",
                disaggregation_mode="decode",
                disaggregation_transfer_backend="fake",
                disaggregation_decode_enable_radix_cache=True,
                chunked_prefill_size=-1,
                mem_fraction_static=0.1,
                disable_overlap_schedule=False,
                log_level="debug",
            ),
            served_model_name="a name",
            api_key="--secret",
            parent_link=LINK,
            log_level="debug",
        ),
        RouterConfig(
            prefill=(PrefillAddress("http://a:1", 2), PrefillAddress("http://b:1")),
            decode=("http://c:1", "http://d:1"),
            max_queued_requests=3,
            retries=0,
            log_requests=True,
            parent_link=LINK,
        ),
    ],
)
def test_words_lead_back_to_the_config(config: ServerConfig | RouterConfig) -> None:
    assert arguments.parse(arguments.words(config)) == config


def test_every_changed_field_finds_its_way_to_a_child() -> None:
    words = "--model-path m --max-queued-requests 3 --max-total-tokens 64 --disable-overlap-schedule --api-key k "
    words += "--disaggregation-transfer-backend tcp --num-reserved-decode-tokens 7 --port 1 --host ::1 --num-threads 3"
    config = local(words)
    for plan, reserved in zip(make_plans(config, {0}, 0), (512, 7), strict=True):
        child, role = plan.config, plan.role
        assert arguments.parse(arguments.words(child)) == child
        assert (child.host, child.port, child.api_key) == ("127.0.0.1", 0, "k")
        assert child.engine == EngineConfig(
            model_path="m",
            max_total_tokens=64,
            disable_overlap_schedule=True,
            disaggregation_mode=role,
            num_reserved_decode_tokens=reserved,
            num_threads=3,
        )
    assert config.router.max_queued_requests == 3


@pytest.mark.parametrize(
    ("cores", "parts", "shares"),
    [
        ({0, 1}, 2, [{0}, {1}]),
        ({3}, 3, [{3}, {3}, {3}]),
        ({0, 1}, 3, [{0}, {1}, {0}]),
        ({0, 1, 2, 5, 9}, 2, [{0, 1}, {2, 5, 9}]),
        ({0, 1, 2, 3, 4, 5, 6, 7}, 3, [{0, 1}, {2, 3, 4}, {5, 6, 7}]),
    ],
)
def test_cores_are_shared_out(cores: set[int], parts: int, shares: list[set[int]]) -> None:
    assert share_cores(cores, parts) == shares


def places(words: str, num_gpus: int) -> list[tuple[str, int, float, int]]:
    config = local(f"--disaggregation-transfer-backend tcp --mem-fraction-static 0.8 {words}")
    return [
        (plan.name, plan.config.engine.base_gpu_id, round(plan.config.engine.mem_fraction_static, 6), plan.wave)
        for plan in make_plans(config, {0, 1}, num_gpus)
    ]


def test_every_server_has_gpus_of_its_own_where_there_are_enough() -> None:
    assert places("", 0) == [("prefill 0", 0, 0.8, 0), ("decode 0", 0, 0.8, 0)]
    assert places("", 2) == [("prefill 0", 0, 0.8, 0), ("decode 0", 1, 0.8, 0)]
    assert places("--tp-size 2", 4) == [("prefill 0", 0, 0.8, 0), ("decode 0", 2, 0.8, 0)]
    assert places("--base-gpu-id 2", 2) == [("prefill 0", 2, 0.8, 0), ("decode 0", 3, 0.8, 0)]


def test_servers_on_one_gpu_start_one_after_the_other() -> None:
    """Memory fractions count what the others have taken, so the last one's is the whole."""
    assert places("", 1) == [("prefill 0", 0, 0.4, 0), ("decode 0", 0, 0.8, 1)]
    assert places("--tp-size 2", 3) == [("prefill 0", 0, 0.4, 0), ("decode 0", 0, 0.8, 1)]
    found = places("--num-decode 2", 2)
    assert found == [("prefill 0", 0, 0.4, 0), ("decode 0", 1, 0.8, 0), ("decode 1", 0, 0.8, 1)]


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert count_gpus(EngineConfig(model_path="m")) == 3
    assert count_gpus(EngineConfig(model_path="m", base_gpu_id=2)) == 1
    assert count_gpus(EngineConfig(model_path="m", device="cpu")) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus(EngineConfig(model_path="m")) == 0


def test_address_told_to_peers() -> None:
    assert reachable_host("10.0.0.7") == "10.0.0.7"
    assert reachable_host("[fd00::1]") == "fd00::1"
    assert reachable_host("0.0.0.0") not in ("", "0.0.0.0")
    assert reachable_host("::") not in ("", "::")


def test_fields_of_one_name_have_one_meaning() -> None:
    """Flags set every field of their name; types must agree where several structs have one."""
    structs = [EngineConfig, ServerConfig, RouterConfig]
    types: dict[str, set[object]] = {}
    for struct in structs:
        for field in msgspec.structs.fields(struct):
            types.setdefault(field.name, set()).add(field.type)
    assert {name for name, found in types.items() if len(found) > 1} == {"max_queued_requests"}
