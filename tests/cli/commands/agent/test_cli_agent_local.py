"""Copies on a disk of the node (`agent --local`): they outlive the agent, and all memory of the node."""

import re
import shutil
import time

import pytest

from support_cli import FAILED, NOT_FOUND, USAGE, check_documented, run, stop
from support_nodes import Cluster, check_weights, cluster, until  # noqa: F401
from support_rank_jobs import Job, check_state

EVER = 10 ** 7


@pytest.fixture
def alone(tmp_path):
    """A node that knows no others, with a disk; `begin` starts its agent."""
    one = Cluster(tmp_path, "a").nodes[0]
    one.disk = tmp_path / "disk"
    one.begin = lambda *args: one.start_alone("--local", one.disk, "--copies", one.memory, *args)
    yield one
    one.lose()


def local_step(node):
    return min((s["local_step"] or 0 for s in node.status()["sessions"]), default=0)


def chunk_files(node):
    """Those on the disk. Snapshots share them: each counts once."""
    return list({f.stat().st_ino: f for f in node.disk.rglob("*.ckd")}.values())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def await_disk(nodes, step=30):
    """Waits until the disks are well ahead of the store, which gets some states at the beginning. Returns the step on all disks."""
    def ahead():
        return all(node.status()["sessions"] for node in nodes) and min(map(local_step, nodes)) >= max(step, nodes[0].cluster.newest() + 10)
    until(ahead)
    return min(map(local_step, nodes))


def lose_while_training(node, step=30):
    node.train()
    reached = await_disk([node], step)
    node.lose()
    return reached


def resumed_after(node, steps):
    out = node.train(steps).communicate()[0].splitlines()
    return int(re.fullmatch(r"resumes after step (\d+)", out[0]).group(1))


def test_agent_and_trainer_are_killed(alone):
    """All memory is gone, several times. Each restart goes on from the disk, bit for bit, and the store has few states."""
    reached = 0
    for _ in range(3):
        alone.begin("--store-every", "1h")
        reached = lose_while_training(alone, reached + 30)
        assert alone.cluster.newest() < reached
    alone.begin("--store-every", "1h")
    resumed = resumed_after(alone, reached + 300)
    assert resumed >= reached
    assert f"step {resumed} of run 'toy' comes from the disk of node" in alone.said()
    assert re.search(rf"toy@{resumed} at \S+ \(disk\): verified, durable, chosen", alone.ask("--explain").out)
    check_weights(alone.cluster, reached + 300)
    alone.stop()
    assert alone.disk.exists() and not list(alone.disk.iterdir())


def test_status(alone):
    alone.begin("--store-every", "1h")
    alone.train(EVER)
    until(lambda: local_step(alone) >= 20)
    stop(alone.trainer)
    until(lambda: local_step(alone) == alone.status()["sessions"][0]["newest_step"])
    status = alone.status()
    session, = status["sessions"]
    seen = set()
    check_documented(status, "`agent --status`", seen=seen)
    assert {"agent_copies", "agent_local"} <= seen
    assert session["copied_step"] is None and session["durable_step"] < session["local_step"]
    local = status["local"]
    assert local["folder"] == str(alone.disk) and local["trouble"] is None and local["behind"] == 0
    assert local["bytes"] == sum(f.stat().st_size for f in alone.disk.rglob("*") if f.is_file()) and local["written_bytes"] > 0
    assert f"local disk {alone.disk}: snapshots take " in alone.ask("--status").out
    explained = alone.ask("--explain").out
    assert "It is on the local disk: if the agent fails now, or the node restarts, it comes from there." in explained
    assert f"If this node is lost now, step {session['durable_step']} is the newest, in the store." in explained


def test_damaged_files(alone):
    """A bit has flipped in each chunk file on the disk: nothing of it is used, and the restart goes on from the store."""
    alone.begin("--store-every", "1h")
    reached = lose_while_training(alone)
    assert chunk_files(alone)
    for chunk in chunk_files(alone):
        flip(chunk)
    durable = alone.cluster.newest()
    assert durable < reached
    alone.begin("--store-every", "1h")
    assert resumed_after(alone, durable + 20) == durable
    assert re.search(r"step \d+ of run 'toy' on the disk of node \S+ is not used: the copy is damaged", alone.said())
    check_weights(alone.cluster, durable + 20)


def test_a_disk_that_fails(alone):
    """Without the disk all states go to the store. It is said once, and once that the disk works again."""
    alone.begin("--store-every", "1h")
    alone.train(EVER)
    until(lambda: local_step(alone) >= 20)
    folder, = alone.disk.iterdir()
    alone.suspend()
    shutil.rmtree(folder)
    folder.write_text("in the way")
    alone.resume()
    until(lambda: alone.status()["local"]["trouble"])
    newest = alone.status()["sessions"][0]["newest_step"]
    until(lambda: alone.cluster.newest() > newest + 5)
    folder.unlink()
    folder.mkdir()
    until(lambda: alone.status()["local"]["trouble"] is None)
    reached = alone.status()["sessions"][0]["newest_step"]
    until(lambda: local_step(alone) > reached)
    assert alone.said().count("states are not copied to the local disk") == 1
    assert alone.said().count("states are copied to the local disk") == 1
    reached = local_step(alone)
    alone.lose()
    alone.begin("--store-every", "1h")
    assert resumed_after(alone, reached + 20) >= reached
    check_weights(alone.cluster, reached + 20)


def test_every_node_is_lost(cluster):
    """The power fails everywhere: no memory has a copy, and the disk has the last state that it got."""
    two = cluster("ab")
    node = two.nodes[0]
    for one in two.nodes:
        one.stop()
        one.disk = two.folder / f"disk-{one.address[-5:]}"
        one.start("--local", one.disk, "--store-every", "1h")
    until(node.in_place)
    reached = lose_while_training(node)
    two.nodes[1].lose()
    assert two.newest() < reached
    for one in two.nodes:
        one.start("--local", one.disk, "--store-every", "1h")
    resumed = resumed_after(node, reached + 30)
    assert resumed >= reached
    assert f"step {resumed} of run 'toy' comes from the disk of node {node.address}" in node.said()
    check_weights(two, reached + 30)


def test_time_between_copies(cluster):
    """--local-every: the disk gets the first state, and the next one when the time is over. Partners get all."""
    two = cluster("ab")
    node = two.nodes[0]
    node.stop()
    node.disk = two.folder / "disk"
    node.start("--local", node.disk, "--local-every", "3s", "--store-every", "1h")
    until(node.in_place)
    node.train(EVER)
    until(lambda: local_step(node) > 0)
    times, first = [], local_step(node)
    for _ in range(2):
        last = local_step(node)
        until(lambda: local_step(node) > last)
        times.append(time.monotonic())
    assert times[1] - times[0] > 2
    assert node.status()["sessions"][0]["copied_step"] > first


@pytest.mark.parametrize("damage", [False, True])
def test_ranks_on_one_node(alone, damage):
    """One agent serves all ranks: the disk has the parts of all. If one of them is damaged, the store's state is used."""
    alone.begin("--store-every", "1h")
    job = Job(alone.cluster, [alone] * 3)
    until(lambda: len(alone.status()["sessions"]) == 3)
    reached = await_disk([alone])
    stop(alone.agent)
    job.kill()
    alone.lose()
    durable = alone.cluster.newest()
    assert durable < reached
    if damage:
        flip(max(chunk_files(alone), key=lambda f: f.stat().st_size))
    alone.begin("--store-every", "1h")
    resumed = Job(alone.cluster, [alone] * 2, "+20").finish()
    if not damage:
        assert resumed >= reached
        assert f"step {resumed} of run 'toy' comes from the nodes of its 3 ranks, verified" in alone.said()
    assert resumed >= durable
    check_state(alone.cluster, resumed + 20)


def test_every_node_of_ranks_is_lost(cluster):
    """Each disk has its node's part of the same state, which the agents put together."""
    two = cluster("ab")
    for one in two.nodes:
        one.stop()
        one.disk = two.folder / f"disk-{one.address[-5:]}"
        one.start("--local", one.disk, "--store-every", "1h")
    until(lambda: all(node.in_place() for node in two.nodes))
    job = Job(two, [two.nodes[0], two.nodes[1], two.nodes[1]])
    reached = await_disk(two.nodes)
    for node in two.nodes:
        stop(node.agent)
    job.kill()
    for node in two.nodes:
        node.lose()
    assert two.newest() < reached
    for node in two.nodes:
        node.start("--local", node.disk, "--store-every", "1h")
    resumed = Job(two, [two.nodes[1], two.nodes[0]], "+20").finish()
    assert resumed >= reached
    assert any(f"step {resumed} of run 'toy' comes from the nodes of its 3 ranks, verified" in node.said() for node in two.nodes)
    check_state(two, resumed + 20)


def test_an_agent_without_a_disk(cluster):
    """The parts of some ranks are of no use: the disk gets nothing, and that is said."""
    two = cluster("ab")
    node = two.nodes[0]
    node.stop()
    node.disk = two.folder / "disk"
    node.start("--local", node.disk, "--store-every", "1h")
    until(lambda: all(node.in_place() for node in two.nodes))
    job = Job(two, two.nodes)
    until(lambda: two.newest() > 0 and node.status()["sessions"][0]["newest_step"] > 20)
    assert local_step(node) == 0 and not chunk_files(node)
    assert "states of run 'toy' are not copied to the local disk: rank 1: its agent has no local disk (--local)" in node.said()
    job.kill()


def test_a_closed_session_leaves_nothing(alone):
    """A state that the store has, and that somebody deletes there, does not come back from the disk."""
    alone.begin("--store-every", "1h")
    alone.train(60).communicate()
    assert alone.cluster.newest() == 60
    until(lambda: not chunk_files(alone))
    run("delete", alone.cluster.store, "toy@60")
    durable = alone.cluster.newest()
    assert durable < 60
    alone.lose()
    alone.begin("--store-every", "1h")
    assert resumed_after(alone, 70) == durable
    check_weights(alone.cluster, 70)


def test_ranks_of_two_agents(tmp_path):
    """Agents that do not know each other cannot put a state together: it goes to the store, and that is said."""
    nodes = Cluster(tmp_path, "ab").nodes
    try:
        for number, node in enumerate(nodes):
            node.start_alone("--local", tmp_path / f"disk{number}", "--copies", node.memory, "--store-every", "1h")
        job = Job(nodes[0].cluster, nodes)
        until(lambda: nodes[0].cluster.newest() > 5)
        job.kill()
        assert "saves to the store alone" in nodes[0].said() + nodes[1].said()
    finally:
        for node in nodes:
            node.lose()


def test_another_store(alone, tmp_path):
    """Stores may share the folder, and do not see each other's states. Two agents of one store may not."""
    alone.begin("--store-every", "1h")
    reached = lose_while_training(alone)
    (tmp_path / "other").mkdir()
    other = Cluster(tmp_path / "other", "a").nodes[0]
    try:
        other.start_alone("--local", alone.disk, "--copies", other.memory, "--store-every", "1h")
        out = other.train(10).communicate()[0].splitlines()
        assert out[0] == "resumes after step 0"
        alone.begin("--store-every", "1h")
        assert resumed_after(alone, reached + 20) >= reached
        twice = run("agent", alone.cluster.store, "--local", alone.disk, "--socket", tmp_path / "second", "--copies", tmp_path / "memory2", expect=FAILED)
        assert "another agent of this store has its copies in" in twice.err and "give each node a folder of its own" in twice.err
    finally:
        other.lose()


def test_usage(tmp_path):
    store = tmp_path / "store"
    for words, says in (
            (["--local", "disk"], "--local is an absolute path, not 'disk'"),
            (["--local", "/d", "--local-every", "1m"], "--local-every goes with --local and --peers"),
            (["--local", "/d", "--replicate", "1"], "go with --peers"),
            (["--store-every", "1m"], "go with --peers or --local"),
            (["--status", "--local", "/d"], "go with the start of an agent")):
        assert says in run("agent", store, *words, expect=USAGE).err
    assert not store.exists()
    lost = run("agent", store, "--local", tmp_path / "no" / "disk", expect=NOT_FOUND).err
    assert f"{tmp_path / 'no'} does not exist. Is the disk mounted?" in lost
