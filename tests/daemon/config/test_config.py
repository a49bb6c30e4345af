"""Settings: what is refused, by name, value and bound; where they come from; what `kvferry config` says of them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvferry.daemon.cli import main as cli
from kvferry.daemon.cli import serve
from kvferry.daemon.config import sources as config_sources
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.sources import Loaded
from kvferry.daemon.config.values import ConfigError, parse_address, parse_size


def config_of(*words: str) -> DaemonConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.config_of(parser.parse_args(words))


def loaded(*words: str, **environ: str) -> Loaded:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return config_sources.load(parser.parse_args(words), environ)


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64MiB", 64 << 20), ("8 GiB", 8 << 30), ("2GB", 2 * 10**9), ("1kib", 1024)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5GiB", "GiB", "8 parsecs", "²", "٣MiB", 5000 * "9"])
def test_sizes_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "meant"), [("4G", "4GiB"), ("4Gi", "4GiB"), (" 64 mi ", "64MiB")])
def test_sizes_without_their_byte_are_guessed_at(text: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of("--role", "decode", "--pool-bytes", text)
    assert str(refused.value).endswith(f"like 4096, 64MiB or 8GiB; did you mean {meant}?")


def test_addresses() -> None:
    assert parse_address("127.0.0.1:7070") == ("127.0.0.1", 7070)
    assert parse_address("[::1]:7070") == ("::1", 7070)
    assert parse_address("[fe80::1%eth0]:7070") == ("fe80::1%eth0", 7070)
    assert parse_address("*:7070") == ("*", 7070)  # as ZeroMQ has it
    none = [
        "7070",
        "host",
        "host:",
        ":7070",
        "host:70700",
        "host:x",
        "host:²",
        "host:٣",
        "host:-1",
        "host:" + 9999 * "0",
    ]
    none += ["a:1,b=c:2", "a,b:1", "a b:1", "a\0b:1", "a/b:1", "user@host:1", "[host]:1", "[]:1", "[::1:1", "::1]:1"]
    none += ["[::1]:1,q=h:2", "[::1%a,b]:1", "[::1%a=b]:1", "::1:7070", "[127.0.0.1]:1"]
    for text in none:
        with pytest.raises(ConfigError, match=r"is not HOST:PORT with a port of 0 to 65535") as refused:
            parse_address(text)
        assert len(str(refused.value)) < len(text) + 200
    with pytest.raises(ConfigError, match=re.escape("of 0 to 65535 (of IPv6: [HOST]:PORT)")):
        parse_address("::1:7070")


def test_defaults_follow_the_role() -> None:
    assert config_of("--role", "decode").listen == "127.0.0.1:7070"
    assert config_of("--role", "prefill").listen == "127.0.0.1:7071"
    both = config_of("--role", "both", "--peer", "p=127.0.0.1:1", "--peer", "q=127.0.0.1:2")
    assert both.roles == ("decode", "prefill")
    assert both.peers == {"p": "127.0.0.1:1", "q": "127.0.0.1:2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "0.0.0.0:7070"], "needs --insecure"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--listen", "localhost:7070", "--metrics", "[::1]:9470"], None),
        (["--listen", "d0:7070"], "--listen is d0:7070: without --tls-cert"),
        (
            ["--metrics", "0.0.0.0:9470"],
            "--metrics is 0.0.0.0:9470: metrics are plain HTTP, without a login; an",
        ),
        (["--metrics", "d0:9470"], "that is not loopback needs --insecure-metrics or --insecure"),
        (["--metrics", "0.0.0.0:9470", "--insecure"], None),
        (["--metrics", "0.0.0.0:9470", "--insecure-metrics"], None),
        (["--listen", "0.0.0.0:7070", "--insecure-metrics"], "--listen is 0.0.0.0:7070"),
        (["--ui"], None),
        (["--ui", "--metrics", "off"], "--ui is on, but --metrics is off"),
        (["--ui", "--metrics", "0.0.0.0:9470"], "needs --insecure-metrics or --insecure"),
        (["--ui", "--ui-daemon", "d=127.0.0.1:7072"], None),
        (["--ui-daemon", "d=127.0.0.1:7072"], "--ui-daemon names d, but --ui is off"),
        (["--peer", "p0"], "NAME=HOST:PORT"),
        (["--peer", "p=127.0.0.1:1", "--peer", "p=127.0.0.1:2"], "twice"),
        (["--peer", "p/0=127.0.0.1:1"], "'p/0' must be"),
        (["--name", ""], None),
        (["--name", "x" * 200], "must be 1 to 128"),
        (["--page-size", "0"], "--page-size is 0; it must be 1 to 4096"),
        (["--slots", "5000"], "--slots is 5000; it must be 1 to 1024"),
        (["--ranks", "0"], "--ranks is 0; it must be 1 to 64"),
        (["--ranks", "65"], "--ranks is 65; it must be 1 to 64"),
        (["--ranks", "64", "--slots", "17"], "--slots is 17 of each of 64 --ranks; together they must be 1024 at most"),
        (["--device", "gpu"], "device is 'gpu'; it must be cpu, or cuda:I"),
        (["--device", "cuda:0,cuda:0"], "names a GPU twice"),
        (["--device", "cuda:0,cuda:1", "--ranks", "3"], "of 2 ranks; --ranks is 3"),
        (["--device", "cuda,cuda:0"], "names a GPU twice"),
        (["--device", "cuda:"], "device is 'cuda:'; it must be cpu, or cuda:I"),
        (["--device", "cuda"], None),
        (["--slot-bytes", "100"], "--slot-bytes is 100; it must be 4KiB to 512MiB"),
        (["--pool-bytes", "0"], "--pool-bytes is 0; it must be 1 to 256TiB"),
        (["--transfer-seconds", "0"], "--transfer-seconds is 0; it must be 0.05 to 3600"),
        (["--ucx-ports", "80-90"], "--ucx-ports: ports '80-90' are not FIRST-LAST"),
        (["--ucx-ports", "٢٠٠٠-3000"], "--ucx-ports: ports '٢٠٠٠-3000' are not FIRST-LAST"),
        (
            ["--peer-lost-seconds", "0.9"],
            "--peer-lost-seconds is 0.9; it must be at least twice --heartbeat-seconds, 0.5",
        ),
        (
            ["--ucx-tls", "rc_x,tcp"],
            "--ucx-tls is rc_x,tcp, and --listen 127.0.0.1:7070: RDMA devices",
        ),
        (["--ucx-tls", "all"], "transports without RDMA, or --insecure"),
        (["--ucx-tls", "rc,tcp", "--insecure"], None),
        (["--ucx-tls", "rc,tcp", "--listen", "10.0.0.1:7070", "--insecure"], None),
        (["--ucx-tls", "cuda_ipc,tcp"], None),
        (
            [
                "--ucx-tls",
                "rc,tcp",
                "--listen",
                "10.0.0.1:7070",
                "--insecure",
                "--rdma-ports",
                "mlx5_0:1,mlx5_bond_0:1",
            ],
            None,
        ),
        (["--rdma-ports", "mlx5_0:1"], "--rdma-ports is mlx5_0:1, and --ucx-tls not given: no transport of RDMA"),
        (["--ucx-tls", "tcp", "--rdma-ports", "mlx5_0:1"], "and --ucx-tls tcp: no transport of RDMA uses them"),
        (
            ["--ucx-tls", "rc", "--listen", "0.0.0.0:7070", "--insecure", "--rdma-ports", "mlx5_0:1"],
            "and --listen 0.0.0.0:7070: couriers on every interface use every device",
        ),
        (["--rdma-ports", "mlx5_0"], "--rdma-ports: RDMA ports 'mlx5_0' must be 1 to 64 with commas between"),
        (["--rdma-ports", ",".join(["mlx5_0:1"] * 65)], "must be 1 to 64 with commas between"),
        (["--ucx-tls", "rc;tcp"], "--ucx-tls: transports 'rc;tcp' must be 1 to 16 names with commas between"),
        (["--ucx-tls", "tcp,"], "--ucx-tls: transports 'tcp,' must be"),
        (["--ucx-tls", ",".join(["tcp"] * 17)], "must be 1 to 16 names"),
        (["--ucx-tls", "t" * 33], "each of 1 to 32"),
        (["--heartbeat-seconds", "nan"], "--heartbeat-seconds is nan; it must be 0.05 to 3600"),
        (["--slots", "many"], "--slots is many; it must be 1 to 1024"),
        (["--host-dir", "/d"], "--host-bytes is 0: there is no host tier to keep; say how large it is, --host-bytes"),
        (["--quota", "default=1:2:3:4"], "--quota default=1:2:3:4 has a quota of the host tier, but --host-bytes is 0"),
        (["--write-through-hits", "2"], "--host-bytes is 0: there is no host tier to copy to"),
        (["--quota", "abc=1:2"], "namespace 'abc' must be 64 hexadecimal digits"),
        (["--policy", "most"], "must be one of lru"),
        (["--slots", "0", "--queue", "0"], "--slots is 0; it must be 1 to 1024; --queue is 0; it must be 1 to 65536"),
    ],
)
def test_refusals_name_field_value_and_bound(words: list[str], message: str | None) -> None:
    if message is None:
        assert config_of("--role", "decode", *words).name == "decode"  # empty: the default
        return
    with pytest.raises(ConfigError) as refused:
        config_of("--role", "decode", *words)
    assert message in str(refused.value)


def test_only_decode_daemons_have_peers() -> None:
    with pytest.raises(ConfigError, match="--peer names p, q, but --role is prefill: only decode daemons dial"):
        config_of("--role", "prefill", "--peer", "p=127.0.0.1:1", "--peer", "q=127.0.0.1:2")
    assert config_of("--role", "both", "--peer", "p=127.0.0.1:1").peers == {"p": "127.0.0.1:1"}


# -- where they come from ----------------------------------------------------------------------------------------------


def test_flags_before_variables_before_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text(
        "role: decode\nslots: 4\nqueue: 7\npool_bytes: 8GiB\nreuse: off\n"
        "peers: {p0: '127.0.0.1:7071'}\nquotas:\n  default: 10:20\n"
    )
    found = loaded(
        "--config", str(file), "--slots", "8", KVFERRY_SLOTS="6", KVFERRY_QUEUE="9", KVFERRY_NAME="", HOME="/"
    )
    config, origins = found.config, found.origins
    assert (config.slots, origins["slots"]) == (8, "--slots")
    assert (config.queue, origins["queue"]) == (9, "KVFERRY_QUEUE")
    assert (config.pool_bytes, origins["pool_bytes"]) == (8 << 30, f"pool_bytes in {file}")
    assert (config.page_size, "page_size" in origins) == (64, False)
    assert config.reuse == "off"  # YAML's boolean would not do
    assert (config.quotas["default"].soft, config.quotas["default"].hard) == (10, 20)  # nor would its base 60
    assert config.peers == {"p0": "127.0.0.1:7071"}
    assert (config.name, "name" in origins) == ("decode", False)  # empty is as if not given


def test_lists_in_variables(tmp_path: Path) -> None:
    config = loaded(KVFERRY_ROLE="decode", KVFERRY_PEERS="a=h:1, b=h:2", KVFERRY_INSECURE="true").config
    assert config.peers == {"a": "h:1", "b": "h:2"}
    assert config.insecure is True
    (tmp_path / "c.yaml").write_text("insecure: on\nrole: both")
    assert loaded(KVFERRY_CONFIG=str(tmp_path / "c.yaml")).config.insecure is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pol_bytes: 8GiB", "'pol_bytes' is no setting; did you mean 'pool_bytes'?"),
        ("slots: 1\nslots: 2", "'slots' comes twice"),
        ("- slots", "is a list; it must be settings"),
        ("slots: [", "expected the node content"),
        ("slots: [", 'in "{file}", line 1, column 9'),
        ("slots: \0", 'in "{file}", position 7'),
        ("slots: 0", "slots in {file} is 0; it must be 1 to 1024"),
        ("slots: {a: 1}", "slots in {file} is {'a': '1'}; it must be 1 to 1024"),
        ("peers: [x]", "peers in {file}: peer 'x' is not NAME=HOST:PORT"),
        ("[1]: 2", "a key must be a word"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        loaded("--role", "decode", "--config", str(file))
    assert message.replace("{file}", str(file)) in str(refused.value)


def test_a_file_that_is_not_there_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        loaded("--role", "decode", KVFERRY_CONFIG=str(tmp_path / "none"))
    (tmp_path / "long").write_text("#" * (config_sources.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="has more than 1048576 characters"):
        loaded("--role", "decode", "--config", str(tmp_path / "long"))


def test_unknown_variables_are_refused_but_not_those_of_a_kubernetes_service() -> None:
    with pytest.raises(ConfigError, match="'KVFERRY_POOL_BYTE' is no setting; did you mean 'KVFERRY_POOL_BYTES'"):
        loaded("--role", "decode", KVFERRY_POOL_BYTE="1")
    service = {
        "KVFERRY_DECODE_SERVICE_HOST": "10.0.0.1",
        "KVFERRY_DECODE_SERVICE_PORT_GRPC": "7070",
        "KVFERRY_DECODE_PORT": "tcp://10.0.0.1:7070",
        "KVFERRY_DECODE_PORT_7070_TCP_ADDR": "10.0.0.1",
    }
    assert loaded("--role", "decode", **service).origins == {"role": "--role"}
    del service["KVFERRY_DECODE_SERVICE_HOST"]
    with pytest.raises(ConfigError, match="is no setting"):
        loaded("--role", "decode", **service)


def test_a_role_is_needed() -> None:
    with pytest.raises(ConfigError, match="--role is not given, and neither is KVFERRY_ROLE, nor role in a file"):
        loaded()


def test_metrics_address_follows_role_and_listen() -> None:
    assert loaded("--role", "decode").config.metrics == "127.0.0.1:9470"
    assert loaded("--role", "prefill").config.metrics == "127.0.0.1:9471"
    assert loaded("--role", "decode", "--listen", "127.0.0.1:0").config.metrics == "127.0.0.1:0"
    assert loaded("--role", "decode", "--metrics", "off").config.metrics == ""


def test_devices_and_the_ranks_that_follow() -> None:
    assert config_of("--role", "decode", "--device", "cuda").devices == (0,)
    two = config_of("--role", "decode", "--device", "cuda, cuda:1")
    assert (two.devices, two.ranks) == ((0, 1), 2)


def test_the_copies_of_the_environment_are_judged_at_the_start() -> None:
    for device in ("cpu", "cuda:0"):
        for name in ("", "auto", "staged"):
            loaded("--role", "decode", "--device", device, KVFERRY_COPY=name)
        with pytest.raises(ConfigError, match=r"KVFERRY_COPY is 'dma'; it must be auto, batch, .*pitched, memcpy"):
            loaded("--role", "decode", "--device", device, KVFERRY_COPY="dma")
    loaded("--role", "decode", KVFERRY_COPY="memcpy")
    with pytest.raises(ConfigError, match="KVFERRY_COPY is memcpy, the CPU's copies, but the pool is on GPUs"):
        loaded("--role", "decode", "--device", "cuda", KVFERRY_COPY="memcpy")


# -- the commands ------------------------------------------------------------------------------------------------------


def test_config_show_names_value_and_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_SLOTS", "5")
    flags = [
        "--role",
        "decode",
        "--pool-bytes",
        "8GiB",
        "--peer",
        "p=h:1",
        "--quota",
        "default=1:2",
        "--metrics",
        "off",
    ]
    assert cli.main(["config", "show", *flags, "--format", "json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["slots"] == {"value": "5", "from": "KVFERRY_SLOTS"}
    assert first["pool_bytes"] == {"value": "8GiB", "from": "--pool-bytes"}
    assert first["queue"] == {"value": "1024", "from": "default"}
    assert set(first) == set(DaemonConfig.model_fields)
    assert cli.main(["config", "show", *flags, "--format", "yaml"]) == 0
    file = tmp_path / "again.yaml"
    file.write_text(capsys.readouterr().out)
    assert cli.main(["config", "show", "--config", str(file), "--format", "json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {name: entry["value"] for name, entry in again.items()} == {n: e["value"] for n, e in first.items()}
    assert cli.main(["config", "show", *flags]) == 0
    assert "KVFERRY_SLOTS" in capsys.readouterr().out
    assert cli.main(["config", "show", "--slots", "0"]) == 2
    assert "--slots is 0" in capsys.readouterr().err


def test_the_schema_takes_a_good_file_and_no_bad_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    good = "{role: decode, pool_bytes: 8GiB, slots: 4, peers: {p: 'h:1'}, quotas: {default: '1:2'}, policy: lru}"
    assert not list(validator.iter_errors(yaml.safe_load(good)))
    for device, right in (("cuda", True), ("cuda:0, cuda:1", True), ("cpu", True), ("cuda:", False), ("gpu", False)):
        assert validator.is_valid({"role": "decode", "device": device}) is right
    for bad in ("{pol_bytes: 1}", "{slots: 0}", "{pool_bytes: many}", "{policy: most}", "{role: x}"):
        assert list(validator.iter_errors(yaml.safe_load(bad))), bad


def test_serve_says_its_defaults_and_names_flags_nearby(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "(default: 1GiB)",
        "(default: 8MiB, on GPUs 64MiB)",
        "(default: 21000-21063)",
        "(default: 30)",
        "(default: lru)",
    ):
        assert words in said
    assert "Undefined" not in said
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--role", "decode", "--pol-bytes", "1"])
    assert ended.value.code == 2
    assert "'--pol-bytes' is no flag of it; did you mean '--pool-bytes'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["serve", "--role", "decode", "--pool-byte", "1GiB"], ["config", "show", "--rol", "decode"]]
)
def test_abbreviated_flags_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "--pool-byte" in capsys.readouterr().err or words[0] == "config"
