"""ckptdelta agent, with trainers that are killed: the newest complete state survives, and a restart goes on from it."""

import contextlib
import fcntl
import functools
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support_cli import COMMAND, FAILED, NOT_FOUND, USAGE, check_documented, run

TRAINER = str(Path(COMMAND).with_name("examples") / "session")
STEPS = 2000


class Node:
    """A store, its agent, and trainers. The example examples/session.c saves every fifth step."""

    def __init__(self, folder):
        self.folder, self.store, self.socket = folder, folder / "store", folder / "agent.socket"
        self.env = dict(os.environ, CKPTDELTA_AGENT=str(self.socket))
        self.agents = []

    def agent(self, *args, **options):
        return run("agent", self.store, "--socket", self.socket, *args, **options)

    def start(self, *args):
        agent = subprocess.Popen([COMMAND, "agent", self.store, "--socket", self.socket, *args], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)
        self.agents.append(agent)
        assert agent.stdout.readline() == f"listens at {self.socket}\n"
        return agent

    def stop(self):
        self.agent("--stop", "-q")
        for agent in self.agents:
            out, err = agent.communicate(timeout=60)
            assert (agent.returncode, out) == (0, "")
        return err

    def train(self, steps=STEPS, env=None):
        return subprocess.Popen([TRAINER, self.store, str(steps)], stdout=subprocess.PIPE, text=True, env=env or self.env)

    def sessions(self):
        return self.agent("--status", "--json").json()["sessions"]

    def newest(self):
        return max((c["step"] for c in run("list", self.store, "--json").json()["checkpoints"]), default=0)

    def close(self):
        for agent in self.agents:
            agent.kill()
            agent.communicate()


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.close()


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


POOL = Path("/proc/sys/vm/nr_hugepages")


def meminfo(key):
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines.get(key, "0").split()[0])


def free_pages():
    return meminfo("HugePages_Free") - meminfo("HugePages_Rsvd")


@pytest.fixture
def pool():
    """Gives the system this many huge pages that nobody uses. Tests change the pool one at a time: test_base_huge_pages.c, too."""
    with open("/tmp/ckptdelta-huge-pages.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = POOL.read_text() if POOL.exists() else ""

        def grow(pages):
            with contextlib.suppress(OSError):
                POOL.write_text(str(int(before) - free_pages() + pages))
            if free_pages() != pages or int(Path("/proc/sys/vm/nr_overcommit_hugepages").read_text()):
                pytest.skip(f"the pool of huge pages cannot be changed here ({POOL})")
        if not before:
            pytest.skip("this system has no huge pages")
        yield grow
        if POOL.read_text() != before:
            POOL.write_text(before)


def saved(node, count):
    def enough():
        sessions = node.sessions()
        return sessions and sessions[0]["saved"] >= count
    return enough


def test_killed_trainers(node):
    """Each restart goes on from the newest state, and the weights end as those of a training that nothing has stopped."""
    node.start()
    pauses = random.Random(4)
    reached = 0
    for _ in range(4):
        trainer = node.train()
        until(saved(node, 2))
        time.sleep(pauses.random() * 0.1)
        trainer.kill()
        trainer.communicate()
        session, = node.sessions()
        before = reached
        node.agent("--drain", "-q")
        assert node.sessions() == []
        reached = node.newest()
        assert reached >= session["newest_step"] > before
    assert node.train(reached + 5).communicate()[0].splitlines()[0] == f"resumes after step {reached}"
    node.stop()
    run("verify", node.store)
    # The same without interruption and without an agent.
    plain = node.folder / "plain"
    subprocess.run([TRAINER, plain, str(reached + 5)], stdout=subprocess.PIPE, check=True, env=dict(node.env, CKPTDELTA_AGENT=""))
    states = []
    for store in (node.store, plain):
        run("load", store, "--step", reached + 5, "-o", node.folder / "out.safetensors", "--force")
        states.append((node.folder / "out.safetensors").read_bytes())
    assert states[0] == states[1]


def memories(agent):
    """The descriptors of the agent's memory, as files that this user may write to."""
    folder = Path(f"/proc/{agent.pid}/fd")
    found = []
    for fd in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found += [fd] if "memfd:ckptdelta" in os.readlink(fd) else []
    return found


def test_flipped_bits_are_not_restored(node):
    agent = node.start()
    trainer = node.train()
    until(saved(node, 3))
    trainer.kill()
    trainer.communicate()
    until(lambda: not node.sessions()[0]["connected"] and node.sessions()[0]["newest_step"] == node.sessions()[0]["durable_step"])
    assert len(memories(agent)) == 2
    for memory in memories(agent):
        with open(memory, "r+b") as f:
            f.seek(-5000, os.SEEK_END)
            byte = f.read(1)
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte[0] ^ 4]))
    reached = node.newest()
    assert node.train(reached + 5).communicate()[0].startswith(f"resumes after step {reached}\n")
    node.stop()
    plain = subprocess.run([TRAINER, node.folder / "plain", str(reached + 5)], stdout=subprocess.PIPE, check=True,
                           env=dict(node.env, CKPTDELTA_AGENT=""))
    again = subprocess.run([TRAINER, node.store, "0"], stdout=subprocess.PIPE, check=True, env=dict(node.env, CKPTDELTA_AGENT=""))
    assert plain.stdout.splitlines()[1] == again.stdout.splitlines()[1]


def test_the_agent_is_killed(node):
    """The trainer goes on by itself. Another agent takes the place of the socket that nobody serves."""
    agent = node.start()
    trainer = node.train(150)
    until(saved(node, 2))
    agent.kill()
    assert trainer.communicate(timeout=120)[0].startswith("resumes after step 0\n") and trainer.returncode == 0
    assert node.newest() == 150
    assert node.socket.is_socket()
    node.agent("--status", expect=NOT_FOUND)
    node.agents.clear()
    node.start()
    assert node.train(155).communicate()[0].startswith("resumes after step 150\n")
    node.stop()
    assert not node.socket.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_an_agent(node, number, request):
    request.addfinalizer(functools.partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))  # nohup ignores one
    agent = node.start()
    trainer = node.train(150)
    until(saved(node, 1))
    agent.send_signal(number)
    assert agent.wait(60) == 0
    assert trainer.communicate(timeout=120)[0].startswith("resumes") and trainer.returncode == 0
    assert node.newest() == 150
    run("verify", node.store)


def test_nobody_reads_what_an_agent_says(node):
    """A message to a pipe that is closed, whenever there is one, does not end it."""
    agent = node.start()
    agent.stderr.close()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{agent.pid}/status").read_text().splitlines())
    kept_away = int(status["SigBlk"], 16) | int(status["SigIgn"], 16)
    assert kept_away >> (signal.SIGPIPE - 1) & 1
    node.agent("--stop", "-q")
    assert agent.wait(60) == 0


def test_status_and_explain(node):
    assert "has no agent" in node.agent("--status", expect=NOT_FOUND).err
    node.start("--budget", "1G")
    empty = node.agent("--status", "--json").json()
    check_documented(empty, "`agent --status`")
    assert empty["sessions"] == [] and empty["budget_bytes"] == 2**30 and empty["memory_bytes"] == 0
    assert "No trainer uses the agent" in node.agent("--explain").out
    trainer = node.train()
    until(saved(node, 1))
    trainer.send_signal(signal.SIGSTOP)
    status = node.agent("--status", "--json").json()
    check_documented(status, "`agent --status`")
    session, = status["sessions"]
    assert session["run"] == "toy" and session["pid"] == trainer.pid and session["connected"] and session["trouble"] is None
    assert session["memory_bytes"] > 2 * 400_000
    assert "If the trainer is killed, nothing of it is lost" in node.agent("--explain").out
    assert "connected" in node.agent("--status").out
    trainer.kill()
    trainer.communicate()
    until(lambda: "the trainer is dead" in node.agent("--explain").out)
    until(lambda: "It is durable" in node.agent("--explain").out)
    assert node.agent("--drain").out == "everything complete is durable\n"
    with open("/dev/full", "w") as full:
        lost = subprocess.run([COMMAND, "agent", node.store, "--socket", node.socket, "--drain", "--json"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert lost.returncode == 0 and "nevertheless everything complete is durable" in lost.stderr
    for option, stopped in ("--drain", False), ("--stop", True):
        done = node.agent(option, "--json").json()
        check_documented(done, f"`agent {option}`")
        assert done["stopped"] is stopped
    node.agent("--stop", expect=NOT_FOUND)


def test_detached(node):
    """It has a session of its own, and the command returns when trainers can connect."""
    node.agent("--detach")
    pid = node.agent("--status", "--json").json()["pid"]
    assert os.getsid(pid) == pid != os.getsid(0)
    again = node.agent("--detach", expect=FAILED)
    assert f"has an agent already, process {pid}" in again.err and again.err.count("\n") == 1
    assert node.train(10).communicate()[0].startswith("resumes after step 0\n")
    node.agent("--stop", "-q")
    assert node.newest() == 10
    node.agent("--status", expect=NOT_FOUND)


def test_the_usual_place(node):
    """Without --socket, agents of two stores and their trainers find each other by the stores' paths."""
    stores = [node.folder / name for name in ("a", "b")]
    for store in stores:
        run("agent", store, "--detach")
    try:
        env = dict(node.env, CKPTDELTA_AGENT="auto")
        for store in stores:
            subprocess.run([TRAINER, store, "20"], stdout=subprocess.PIPE, check=True, env=env)
        for store in stores:
            folder = Path(f"/tmp/ckptdelta-{os.geteuid()}")
            assert folder.stat().st_mode & 0o777 == 0o700
            assert all(s.stat().st_mode & 0o777 == 0o600 for s in folder.glob("*.agent"))
            assert run("agent", store, "--status", "--json").json()["sessions"] == []
    finally:
        for store in stores:
            run("agent", store, "--stop", "-q")


def test_budget_too_small(node):
    node.start("--budget", "100K")
    assert node.train(20).communicate()[0].startswith("resumes after step 0\n")
    assert node.sessions() == [] and node.newest() == 20
    node.stop()


def test_huge_pages(node, pool):
    """All states are in pages of the pool, and a restart takes them over."""
    pool(8)
    node.start("--huge-pages", "on")
    for _ in range(2):
        trainer = node.train()
        until(saved(node, 1))
        status = node.agent("--status", "--json").json()
        assert status["huge_pages"] == "on" and status["huge_bytes"] == status["memory_bytes"] > 2 * 400_000
        assert free_pages() == 8 - status["huge_bytes"] // (meminfo("Hugepagesize") << 10)
        assert "in huge pages" in node.agent("--status").out
        trainer.kill()
        trainer.communicate()
        until(lambda: not node.sessions()[0]["connected"])
    assert "ordinary" not in node.stop()
    assert free_pages() == 8


def test_a_pool_that_is_too_small(node, pool):
    """An agent that needs huge pages does not begin without any. A session for which they do not suffice saves by itself."""
    pool(0)
    refused = run("agent", node.store, "--socket", node.socket, "--huge-pages", "on", expect=FAILED)
    assert "vm.nr_hugepages" in refused.err and not node.store.exists()
    pool(1)
    node.start("--huge-pages", "on")
    assert node.train(20).communicate()[0].startswith("resumes after step 0\n")
    assert node.sessions() == [] and node.newest() == 20
    assert free_pages() == 1
    node.stop()


def test_ordinary_pages_instead(node, pool):
    """The agent says once that the pool has too few."""
    pool(0)
    node.start("--huge-pages", "try")
    for steps in (20, 40):
        trainer = node.train(steps)
        trainer.communicate()
        assert trainer.returncode == 0
    assert node.newest() == 40
    status = node.agent("--status", "--json").json()
    assert status["huge_pages"] == "try" and status["huge_bytes"] == 0
    assert node.stop().count("in ordinary ones") == 1


def test_the_supervisor_waits_for_the_agent(node):
    """An attempt starts from what the one before left in memory, and begins no branch."""
    node.start()
    script = node.folder / "attempt.sh"
    script.write_text(f"""
        if [ "$CKPTDELTA_ATTEMPT" -le 4 ]; then
            "{TRAINER}" "$CKPTDELTA_STORE" 100000 >/dev/null & trainer=$!
            begun=${{CKPTDELTA_STEP:-0}}
            until [ "$("{COMMAND}" list "$CKPTDELTA_STORE" -q --json | grep -o '"step": [0-9]*' | wc -l)" -ge $((begun / 5 + 2)) ]; do
                sleep 0.05
            done
            kill -9 $trainer; wait $trainer; exit 1
        fi
        echo "$CKPTDELTA_STEP" >"{node.folder}/last"
    """)
    run("run", node.store, "--run", "toy", "--pause", "0s", "--", "sh", script, env=node.env, expect_message="")
    newest = node.newest()
    node.agent("--drain", "-q")
    assert node.newest() == newest == int((node.folder / "last").read_text())
    assert {c["run"] for c in run("list", node.store, "--json").json()["checkpoints"]} == {"toy"}
    node.stop()


def test_usage(node):
    for args in (["--budget", "0"], ["--budget", "x"], ["--huge-pages", "yes"], ["--huge-pages", "on", "--status"], ["--status", "--stop"], ["--detach", "--drain"]):
        node.agent(*args, expect=USAGE)
    run("agent", node.store, "--socket", "relative", expect=USAGE)
    run("agent", node.store, "--socket", "/" + 120 * "x", expect=USAGE)
