"""fmoe-server as a process: its flags, its lines, its signals, its pages, its checkpoints."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fmoe_ext.remote import (
    Client,
    DeclaredExperts,
    Options,
    RemoteError,
    RemoteExpert,
    Server,
    Settings,
    StaticList,
)
from fmoe_ext.remote.server.checkpoints import Checkpoints
from fmoe_ext.remote.server.main import main, make_server
from fmoe_ext.remote.server.options import parse
from fmoe_ext.remote.server.service import NotLeader

D = 16


def step(expert, count=1):
    for _ in range(count):
        expert(torch.randn(4, D)).pow(2).sum().backward()


SIGNAL_AT_EVERY_LINE = """
import os, signal, sys, time
from fmoe_ext.remote import loop

def at_line(number):
    left = [number]
    def trace(frame, event, _):
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace
    return trace

def child(number):
    has_to_end = loop.end_signals()
    sys.settrace(at_line(number))
    os._exit(7 if has_to_end(0.05) or has_to_end(0.05) else 8)

children = {}
for number in range(1, 41):
    if (pid := os.fork()) == 0:
        child(number)
    children[pid] = number
end, codes = time.monotonic() + 60, {}
while children.keys() - codes.keys() and time.monotonic() < end:
    for pid in children.keys() - codes.keys():
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)
    time.sleep(0.01)
hung = sorted(children[pid] for pid in children.keys() - codes.keys())
for pid in children.keys() - codes.keys():
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(hung, sum(code == 7 for code in codes.values()) > 0)
"""


def test_signal_at_any_line_of_the_wait_ends_it():
    """threading.Event hung where the handler ran while its lock was held."""
    run = subprocess.run(
        [sys.executable, "-c", SIGNAL_AT_EVERY_LINE], capture_output=True, text=True, timeout=300
    )
    assert run.stdout == "[] True\n", run.stdout + run.stderr


def test_server_lives_as_hivemind_prints_and_saves_at_sigterm(expert_at, start_server, tmp_path):
    flags = ("--no_dht", "--expert_pattern", "expert.[0:5]", "--num_experts", 5, "--expert_cls", "ffn")
    flags += (
        "--checkpoint_dir",
        tmp_path / "ckpt",
        "--http_on",
        "127.0.0.1:0",
        "--stats_report_interval",
        0.5,
    )
    first = start_server(*flags)
    endpoint = first.endpoint()
    first.wait_for(r"Got 5 active experts of type ffn: \['expert.0', 'expert.1', .*'expert.4'\]")
    pages = first.wait_for(r"Status page at (\S+)")[1]
    expert = expert_at(endpoint)
    step(expert, 3)
    x = torch.randn(2, D)
    before = expert(x)
    first.wait_for(r"Processed \d+ batches in last 0.5 seconds: [1-9]\d* forward")
    status = json.loads(urllib.request.urlopen(f"{pages}status", timeout=60).read())
    assert [e["version"] for e in status["experts"]] == [3, 0, 0, 0, 0]
    assert status["calls"] >= 7
    text = urllib.request.urlopen(f"{pages}metrics", timeout=60).read().decode()
    assert 'fmoe_remote_calls_total{code="OK",method="backward"} 3' in text
    assert b"<canvas" in urllib.request.urlopen(pages, timeout=60).read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{pages}etc/passwd", timeout=60)
    assert first.end() == 0

    saved = safetensors.torch.load_file(tmp_path / "ckpt" / "expert.0.safetensors")
    assert saved["weight/norm_weight"].shape == (1, D)
    second = start_server(*flags)
    assert torch.equal(expert_at(second.endpoint())(x), before)
    assert second.end() == 0


def version_of(folder):
    """Version of expert.0 on disk, 0 if there is none."""
    state = Checkpoints(folder).load("expert.0")
    return 0 if state is None else int(state.meta["version"])


@pytest.mark.parametrize("runs", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_sigkill_at_random_moments_leaves_whole_checkpoints(expert_at, start_server, tmp_path, runs):
    rng = random.Random(0)
    folder, versions = tmp_path / "ckpt", []
    flags = ("--no_dht", "--expert_uids", "expert.0", "--checkpoint_dir", folder, "--checkpoint_period", 0.01)
    for _ in range(runs):
        process = start_server(*flags)
        expert = expert_at(process.endpoint())
        end, before = time.monotonic() + rng.uniform(0.2, 0.8), max(versions, default=0)
        while time.monotonic() < end or version_of(folder) <= before:
            step(expert)
        process.end(signal.SIGKILL)
        versions.append(version_of(folder))
    assert versions[0] > 0
    assert versions == sorted(set(versions))
    checkpoints = Checkpoints(folder)
    checkpoints.begin()  # as a server that starts
    checkpoints.end()
    assert not list(folder.glob("*.tmp-*"))


@pytest.mark.parametrize("runs", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_sigterm_at_random_moments_loses_nothing(expert_at, start_server, tmp_path, runs):
    """Every gradient that was acknowledged is on disk; at most one more, whose answer came too late."""
    rng, heard = random.Random(1), 0
    flags = ("--no_dht", "--expert_uids", "expert.0", "--checkpoint_dir", tmp_path / "ckpt")
    for _ in range(runs):
        process = start_server(*flags)
        expert = expert_at(process.endpoint())
        step(expert)
        timer = threading.Timer(rng.uniform(0.1, 0.6), os.kill, (process.pid, signal.SIGTERM))
        timer.start()
        with pytest.raises(RemoteError):
            while True:
                step(expert)
        timer.join()
        assert process.wait() == 0
        heard += expert.client.counts["gradients applied"]
        state = Checkpoints(tmp_path / "ckpt").load("expert.0").meta
        assert heard <= int(state["version"]) == int(state["requests"]) <= heard + 1
        heard = int(state["version"])
    assert heard > 0


def test_experts_without_a_leader_are_not_called_active(caplog):
    """A server printed "4 active experts" while nobody answered for two of them."""

    class Waiting:
        async def start(self, server):
            await server.add_experts(["expert.0", "expert.1", "expert.2"])

            def may_step(uid):
                if uid != "expert.1":
                    raise NotLeader(f"not the leader of {uid}")

            server.host.may_step = may_step

        def describe(self, uid):
            return {}

        async def stop(self):
            pass

    with caplog.at_level("INFO", "fmoe_ext.remote"), Server(Options(hidden_dim=D), Waiting()):
        assert "Got 1 active experts of type ffn: ['expert.1']" in caplog.text
        assert (
            "Hosts 2 more, led by another server or not yet by any: ['expert.0', 'expert.2']" in caplog.text
        )


def test_busy_port_ends_with_one_sentence(start_server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        other = start_server("--no_dht", "--expert_uids", "expert.0", "--listen_on", endpoint)
        assert other.wait() == 2
    assert f"cannot listen on {endpoint}" in other.path.read_text()
    assert "Traceback" not in other.path.read_text()


def test_server_that_did_not_start_can_be_stopped_and_one_that_did_starts_once():
    """The stop() hid why the start had failed; a second start() took another port, which stayed open."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        server = Server(Options(hidden_dim=D, listen_on=endpoint), DeclaredExperts(StaticList()))
        with pytest.raises(OSError, match=f"cannot listen on {endpoint}"):
            server.start()
        server.stop()
    try:
        server.start()  # the port is free now
        before = server.endpoint
        with pytest.raises(RuntimeError, match="a Server starts once: make another one"):
            server.start()
        assert server.endpoint == before
    finally:
        server.stop()
    with pytest.raises(RuntimeError, match="starts once"):
        server.start()


def test_flags_of_the_issue_and_config(tmp_path):
    line = "--expert_cls ffn --hidden_dim 512 --num_experts 5 --expert_pattern expert.[0:5] --listen_on 0.0.0.0:1337"
    flags = parse([*line.split(), "--dht_port", "1338", "--initial_peers", "localhost:1339"])
    assert (flags.num_experts, flags.dht_port, flags.initial_peers) == (5, 1338, ["localhost:1339"])
    config = tmp_path / "config.yml"
    lines = "# a comment", "hidden_dim: 64", "expert_pattern: expert.[0:9]  # nine", "lr: 0.5"
    config.write_text("\n".join([*lines, "checkpoint_dir: /x"]))
    flags = parse(["--config", str(config), "--lr", "0.25"])
    assert (flags.hidden_dim, flags.expert_pattern, flags.lr) == (64, "expert.[0:9]", 0.25)
    assert flags.checkpoint_dir.name == "x"
    assert parse(["--config", str(config)]).lr == 0.5


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--registry host:1", "etcd://"),
        ("--registry etcd://h:1 --dht_port 1", "--registry excludes --dht_port"),
        ("--registry etcd://h:1 --identity_path key --no_dht", "excludes --identity_path, --no_dht"),
        ("--no_dht --initial_peers a:1", "--no_dht excludes --initial_peers"),
        ("--relay a:1 --announce b:1", "--relay excludes --announce"),
        ("--relay_token secret", "--relay_token means nothing without --relay"),
        ("--replicas 3", "--replicas means nothing without --registry"),
        ("--replicas 2", "--replicas means nothing without --registry"),  # the default, but asked for
        ("--tls_key key.pem", "--tls_key means nothing without --tls_certificate"),
        ("--expert_uids expert.0 --num_experts 3", "but 1 --expert_uids"),
        ("--copies_of expert.0 --no_dht", "--no_dht excludes --copies_of"),
        ("--expert_uids expert.1 expert.2 expert.1", "--expert_uids has expert.1 twice"),
        ("--tls_ca ca.pem", "--tls_ca means nothing without --registry or --copies_of"),
        ("--tokens t --own_token bob", "--own_token means nothing without --registry or --copies_of"),
        ("--own_token bob --copies_of expert.0", "--own_token means nothing without --tokens"),
        ("--num_training_steps 9", "--num_training_steps means nothing without --scheduler"),
        ("--checkpoint_period 5", "--checkpoint_period means nothing without --checkpoint_dir"),
    ],
)
def test_flags_that_contradict_each_other(flags, text, capsys):
    with pytest.raises(SystemExit):
        parse(flags.split())
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--clip_grad_norm -1", "--clip_grad_norm: must be more than 0, but is -1"),  # had made steps uphill
        ("--lr nan", "--lr: must be at least 0, but is nan"),
        ("--max_waiting 0", "--max_waiting: must be at least 1"),
        ("--calls_per_second 0", "--calls_per_second: must be more than 0"),
        ("--num_experts -1", "--num_experts: must be at least 0"),
        ("--hidden_dim x", "--hidden_dim: invalid int value"),
        ("--listen_on 127.0.0.1:70000", "--listen_on: must be host:port"),  # had listened on 4464
        ("--listen_on 127.0.0.1", "--listen_on: must be host:port"),
        ("--announce me", "--announce: must be host:port"),
        ("--dht_port 70000", "--dht_port: must be a port, 0 to 65535, but is 70000"),
    ],
)
def test_values_that_make_no_sense(flags, text, capsys):
    with pytest.raises(SystemExit):
        parse(flags.split())
    assert text in capsys.readouterr().err


def configure(tmp_path, text, *flags):
    config = tmp_path / "config.yml"
    config.write_text(text)
    return parse(["--config", str(config), *flags])


def test_config_values_are_read_as_the_flags_are(tmp_path):
    """A list had become its characters, a text a list of letters, and False true."""
    text = """
    expert_uids: [expert.1, expert.2]
    initial_peers: host:1338
    allow_backward:
      - alice
      - "1.5"
    no_dht: False
    clip_grad_norm: null
    optimizer: adam
    ttl: 1e2
    seed: -3
    custom_module_path: ~
    """
    flags = configure(tmp_path, text)
    assert flags.expert_uids == ["expert.1", "expert.2"]
    assert flags.initial_peers == ["host:1338"]
    assert flags.allow_backward == ["alice", "1.5"]
    assert flags.no_dht is False
    assert (flags.clip_grad_norm, flags.custom_module_path) == (None, None)
    assert (flags.optimizer, flags.ttl, flags.seed) == ("adam", 100.0, -3)
    assert configure(tmp_path, "no_dht: yes").no_dht is True
    assert configure(tmp_path, "initial_peers: []").initial_peers == []
    assert configure(tmp_path, "# nothing\n").lr == 0.01
    assert configure(tmp_path, "expert_uids: [expert.7]", "--expert_uids", "expert.1").expert_uids == [
        "expert.1"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clip_grad_norm: -1", "config.yml:1: argument --clip_grad_norm: must be more than 0"),
        ("# one\noptimizer: Adam", "config.yml:2: argument --optimizer: invalid choice: 'Adam'"),
        ("no_dht: maybe", "config.yml:1: no_dht must be true or false, but is maybe"),
        ("lr: [1, 2]", "lr takes one value, but the file has a list of 2"),
        ("learning_rate: 1", "config.yml:1: unknown flag learning_rate"),
        ("config: other.yml", "unknown flag config"),
        ("lr: 1\nlr: 2", "config.yml:2: write each flag once"),
        ("lr: {a: 1}", "lr must be a value or a list of values"),
        ("- lr", "must hold `flag: value` lines"),
        ("lr: [1", "is no YAML"),
        ("num_handlers: 4", "config.yml:1: num_handlers means nothing here: one process answers all calls"),
    ],
)
def test_config_values_that_make_no_sense_are_refused_by_name(tmp_path, capsys, text, message):
    with pytest.raises(SystemExit) as ended:
        configure(tmp_path, text)
    assert message in capsys.readouterr().err + str(ended.value)


def test_config_flags_exclude_flags_of_the_command_line(tmp_path, capsys):
    assert configure(tmp_path, "no_dht: false\ndht_port: 1338\n").dht_port == 1338
    with pytest.raises(SystemExit):
        configure(tmp_path, "dht_port: 1338\n", "--no_dht")
    assert "--no_dht excludes --dht_port" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"nowhere\.yml does not exist"):
        parse(["--config", "nowhere.yml"])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--num_handlers 4", "--num_handlers means nothing here: one process answers all calls"),
        ("--host_maddrs /ip4/0.0.0.0/tcp/0", "--host_maddrs means nothing here: write --listen_on host:port"),
        ("--compression=FLOAT16", "--compression means nothing here: each client chooses"),
        ("--expiration 300", "--expiration means nothing here: write --ttl"),
        ("--learning_rate 1", "unrecognized arguments: --learning_rate"),
        ("--check /x", "unrecognized arguments: --check"),  # no abbreviations
    ],
)
def test_flags_of_hivemind_that_mean_nothing_are_named(flags, text, capsys):
    with pytest.raises(SystemExit):
        parse(flags.split())
    assert text in capsys.readouterr().err


def test_commands_and_config_files_of_the_documentation_are_accepted(tmp_path):
    text = (Path(__file__).parents[2] / "docs/remote.md").read_text().replace("\\\n", " ")
    fenced = re.split(r"^```.*\n", text, flags=re.MULTILINE)
    blocks = fenced[1::2]
    files = [block for block in blocks if re.match(r"\w+: ", block)]
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("fmoe-server")]
    assert len(files) == 2 and len(commands) >= 6
    (tmp_path / "server.yml").write_text(files[0])
    for block in files:
        configure(tmp_path, block)
    for line in commands:
        words = shlex.split(line, comments=True)[1:]
        parse([str(tmp_path / word) if word.endswith(".yml") else word for word in words])


def test_every_flag_reaches_the_server_it_describes():
    """Flags are declared once; a value on the command line arrives in the option of that name."""
    flags = (
        "--no_dht --hidden_dim 8 --seed 3 --max_waiting 5 --max_rows 9 --clip_grad_norm 2 --scheduler linear"
    )
    flags += " --num_training_steps 4 --num_warmup_steps 1 --allow_backward bob --calls_per_second 7 --announce a:1"
    server = make_server(parse(flags.split()))
    options, training, security = server.options, server.options.training, server.options.security
    assert (options.hidden_dim, options.seed, options.max_waiting, options.max_rows) == (8, 3, 5, 9)
    assert options.announce == "a:1"
    assert (training.max_grad_norm, training.scheduler) == (2.0, "linear")
    assert (training.num_training_steps, training.num_warmup_steps) == (4, 1)
    assert (security.backward, security.calls_per_second) == (["bob"], 7.0)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--device nothing", "--device nothing cannot be used here"),
        ("--custom_module_path nowhere.py", "--custom_module_path nowhere.py is no Python file"),
    ],
)
def test_missing_files_and_devices_are_named(flags, text):
    with pytest.raises(SystemExit, match=text):
        main(flags.split())


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "raise KeyError('x')",
            r"--custom_module_path \S+module.py failed: KeyError: 'x' \(\S+module.py:1\)",
        ),
        (
            "import fmoe_ext.remote.server.main as main\ndef fail(flags): return {}['uid']\nmain.make_server = fail",
            r"the server cannot start: KeyError: 'uid' \(\S+module.py:2\)",
        ),
    ],
)
def test_error_that_nobody_expected_ends_the_start_in_one_line(start_server, tmp_path, code, text):
    module = tmp_path / "module.py"
    module.write_text(code)
    process = start_server("--no_dht", "--expert_uids", "expert.0", "--custom_module_path", module)
    assert process.wait() != 0
    lines = process.path.read_text().splitlines()
    assert not any("Traceback" in line for line in lines)
    if "make_server" in code:
        assert re.search(text, lines[-1])
    else:
        with pytest.raises(SystemExit, match=text):
            main(["--no_dht", "--custom_module_path", str(module)])


def test_custom_module_with_dataclasses(start_server, tmp_path):
    """They look for the types of their fields in sys.modules, where it was not."""
    module = tmp_path / "module.py"
    module.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Sizes:\n    hidden_dim: int\n"
    )
    process = start_server("--no_dht", "--expert_uids", "expert.0", "--custom_module_path", module)
    process.endpoint()
    assert process.end() == 0


def test_idle_connections_beyond_the_limit_of_files_do_not_stop_a_client(ends, start_server, tmp_path):
    """1,200 of them against a limit of 1,024 did."""
    module = tmp_path / "few.py"
    module.write_text("import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n")
    process = start_server("--no_dht", "--expert_uids", "expert.0", "--custom_module_path", module)
    endpoint = process.endpoint()
    host, port = endpoint.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        client = ends(Client(settings=Settings(forward_timeout=60, patience=60)))
        expert = RemoteExpert("expert.0", endpoint, client)
        assert expert(torch.ones(1, D)).shape == (1, D)
    assert process.end() == 0
