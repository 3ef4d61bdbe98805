"""Groups of nodes that keep parity of each other's states: what is lost is computed from what the others have."""

import ctypes.util
import re

import pytest

from support_cli import USAGE, check_documented, run
from support_nodes import cluster, until  # noqa: F401
from support_rank_jobs import Job, check_state, copied, train_until_copied

ONE = ("--store-every", "1h", "--parity", "3+1")
TWO = ("--store-every", "1h", "--parity", "2+2")


def sums(node):
    """Files with parity for others in this node's memory."""
    return [f for f in (node.memory / "held" / "parity").rglob("*") if f.is_file()]


def kept(node):
    """Bytes of chunk files: of this node, and of parity for others."""
    return (sum(f.stat().st_size for f in (node.memory / "own").rglob("*.ckd")), sum(f.stat().st_size for f in sums(node)))


def chunks(node):
    return [f for f in node.held() if f.suffix == ".ckd"]


def needs_isal(group):
    if not group[-1].endswith("+1") and not ctypes.util.find_library("isal"):
        pytest.skip("parity of several nodes needs ISA-L (libisal2)")


@pytest.mark.parametrize("group, lost", [(ONE, [1]), (TWO, [0, 3]), (TWO, [1, 2])])
def test_lost_nodes(cluster, group, lost):
    """As many nodes as there is parity for are lost with their agents, ranks and memory: the job goes on from their newest state."""
    needs_isal(group)
    four = cluster("abcd", *group)
    job, reached = train_until_copied(four, four.nodes)
    assert four.newest() < reached
    assert all(sums(node) and not chunks(node) for node in four.nodes)  # no whole copies
    for i in lost:
        four.nodes[i].lose()
    job.kill()
    for i in lost:
        four.nodes[i].start(*group)
    resumed = Job(four, four.nodes, "+40").finish()
    assert resumed >= reached
    check_state(four, resumed + 40)
    # What a session leaves that was closed goes, and what was rebuilt with it.
    until(lambda: all(n.in_place() for n in four.nodes) and not [f for n in four.nodes for f in n.memory.rglob("*.ckd")], 100)
    until(lambda: not [f for n in four.nodes for f in sums(n)])
    for node in four.nodes:
        node.stop()
        assert list(node.memory.iterdir()) == []


def test_a_node_is_lost_twice(cluster):
    """Stripes with files of the first life are of no use to the second one: what the others had in them is brought again."""
    four = cluster("abcd", *ONE)
    lost = four.nodes[2]
    job, reached = train_until_copied(four, four.nodes)
    for step in (60, 120):
        lost.lose()
        job.kill()
        lost.start(*ONE)
        job, now = train_until_copied(four, four.nodes, reached + step)
        assert now >= reached
        reached = now
    four.nodes[0].lose()  # another one: its files are in stripes with those of the third life
    job.kill()
    four.nodes[0].start(*ONE)
    resumed = Job(four, four.nodes, "+40").finish()
    assert resumed >= reached
    check_state(four, resumed + 40)


def test_a_lone_trainer(cluster):
    """The other nodes of the group have no states. One of them takes over, on its own."""
    four = cluster("abcd", *ONE)
    node = four.nodes[3]
    job, reached = train_until_copied(four, [node])
    assert four.newest() < reached
    node.lose()
    job.kill()
    resumed = Job(four, [four.nodes[1]], "+40").finish()
    assert resumed >= reached
    check_state(four, resumed + 40)


def test_memory(cluster):
    """Nodes in step share stripes: parity takes a third of what their own files take, and nothing stays for long."""
    four = cluster("abcd", *ONE)
    job, _ = train_until_copied(four, four.nodes, 100)
    own = held = 0
    for step in range(110, 310, 20):
        until(lambda: copied(four.nodes, step))
        for node in four.nodes:
            mine, others = kept(node)
            own, held = own + mine, held + others
    job.kill()
    assert 0 < held < own * 0.6
    assert all(node.said().count("no room for two states") == 0 for node in four.nodes)


def test_flipped_bits(cluster):
    """A sum in which a bit has flipped is found out. The state before cannot be computed either, so the store's is used."""
    four = cluster("abcd", *ONE)
    lost = four.nodes[1]
    job, reached = train_until_copied(four, four.nodes)
    lost.lose()
    job.kill()
    stored = four.newest()
    assert stored < reached
    for f in sums(four.nodes[2]):
        data = bytearray(f.read_bytes())
        data[len(data) // 2] ^= 16
        f.write_bytes(data)
    lost.start(*ONE)
    resumed = Job(four, four.nodes, "+40").finish()
    assert resumed == stored
    said = "".join(n.said() for n in four.nodes)
    assert re.search(r"is not used: no sound copy of what rank 1 of 4 had|has changed since it arrived", said)
    assert "run 'part." not in said  # what is left of a part does not pass for a state of its own
    check_state(four, resumed + 40)


def test_a_passing_failure(cluster):
    """What cannot be computed now, as pieces of the others do not arrive, is not given up: it is when they do."""
    four = cluster("abcd", *ONE)
    lost = four.nodes[1]
    job, reached = train_until_copied(four, four.nodes)
    lost.lose()
    job.kill()
    assert four.newest() < reached
    taken = [n.memory / "held/pieces" / f"n-{n.address.replace(':', '_')}-{i}" for n in four.nodes if n is not lost for i in range(300)]
    for path in taken:
        path.mkdir()
    lost.start(*ONE)
    until(lambda: "not asked, or not for all" in lost.ask("--explain").out)
    assert four.newest() < reached
    for path in taken:
        path.rmdir()
    until(lambda: four.newest() >= reached)
    until(lambda: all(n.in_place() for n in four.nodes))


def test_a_group_that_is_not_whole(cluster):
    """Said once; all states go to the store until the node is there again."""
    four = cluster("abcd", *ONE)
    node, other = four.nodes[0], four.nodes[3]
    job, reached = train_until_copied(four, [node])
    other.lose()
    until(lambda: four.newest() >= reached)
    step = four.newest()
    until(lambda: four.newest() > step + 20)
    assert node.said().count("other nodes of the group have parity of this node's states: if a node fails now") == 1
    until(lambda: f"node {other.address} of the group: it shows no sign of life" in node.ask("--explain").out)
    other.start(*ONE)
    until(node.in_place)
    until(lambda: copied([node], four.newest() + 20))
    status = node.status()
    seen = set()
    check_documented(status, "`agent --status`", seen=seen)
    assert "agent_parity" in seen and status["copies"]["parity"] == {"data": 3, "parity": 1}
    assert "parity 3+1: 3 of 3 other nodes of the group have theirs" in node.ask("--status").out
    job.kill()
    node.lose()
    node.start(*ONE)
    resumed = Job(four, [node], "+20").finish()
    assert resumed > step
    check_state(four, resumed + 20)


def test_other_groups(cluster):
    """Nodes that were started with other values, or another list, say so, and have no part in the parity."""
    two = cluster("abc", "--store-every", "1h", "--parity", "2+1")
    node, other = two.nodes[0], two.nodes[1]
    until(node.in_place)
    other.stop()
    other.start("--store-every", "1h")
    until(lambda: "all agents need the same --parity" in node.ask("--explain").out)
    other.stop()
    two.hosts.write_text("".join(reversed(two.hosts.read_text().splitlines(keepends=True))))
    other.start("--store-every", "1h", "--parity", "2+1")
    until(lambda: "its agent has other groups" in node.ask("--explain").out)


def test_wrong_usage(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    words = ("agent", tmp_path / "s", "--socket", tmp_path / "socket", "--peers", "127.0.0.1:1,127.0.0.1:2", "--self", "127.0.0.1:1", "--secret", secret)
    for wrong in ("3", "0+1", "1+0", "+", "1+", "a+1", "1+1x"):
        assert "--parity is K+M, such as 3+1" in run(*words, "--parity", wrong, expect=USAGE).err
    assert "choose one of --replicate and --parity" in run(*words, "--parity", "1+1", "--replicate", "1", expect=USAGE).err
    assert "parity 2+1 needs 3 nodes, and the list has 2" in run(*words, "--parity", "2+1", expect=USAGE).err
    assert "of K + M nodes, at most 64" in run(*words, "--parity", "70+1", expect=USAGE).err
