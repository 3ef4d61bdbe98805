"""Ranks on several nodes: a node that is lost leaves its ranks' parts of a state with others, who store it together."""

import signal
import subprocess
import time

import pytest

from support_cli import COMMAND, run, stop
from support_nodes import cluster, until  # noqa: F401
from support_rank_jobs import EVER, Job, check_state, copied, least_copied, train_until_copied


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_node(cluster, rank):
    """The state comes from the parts that the others have: copies of the lost rank's, and their own."""
    three = cluster("abc", "--store-every", "1h")
    lost = three.nodes[rank]
    job, reached = train_until_copied(three, three.nodes)
    assert three.newest() < reached
    lost.lose()
    job.kill()
    lost.start("--store-every", "1h")
    resumed = Job(three, three.nodes, "+40").finish()
    assert resumed >= reached
    # Which node does it depends on the time: rank 0's for the new job, or the lost one's, which looks for its last life.
    came = f"step {resumed} of run 'toy' comes from the memory of the nodes of its 3 ranks"
    choosers = [node for node in three.nodes if came in node.said()]
    assert choosers
    assert f"toy@{resumed} of 3 ranks: verified, durable, chosen" in choosers[0].ask("--explain").out
    check_state(three, resumed + 40)
    until(lambda: all(n.in_place() for n in three.nodes)
          and not [f for node in three.nodes for f in node.memory.rglob("*.ckd")])
    for node in three.nodes:
        node.stop()


def test_fewer_ranks_go_on(cluster):
    """Two ranks a node, and one of two nodes is lost: the other one goes on with two ranks."""
    two = cluster("ab", "--store-every", "1h")
    nodes = [two.nodes[0], two.nodes[1]] * 2
    job, reached = train_until_copied(two, nodes)
    assert two.newest() < reached
    two.nodes[0].lose()
    job.kill()
    resumed = Job(two, [two.nodes[1]] * 2, "+20").finish()
    assert resumed >= reached
    assert "of its 4 ranks" in two.nodes[1].said()
    check_state(two, resumed + 20)


def test_damaged_parts(cluster):
    """A part in which a bit has flipped is found out, and another copy of it used; without one, an older state is."""
    three = cluster("abc", "--store-every", "1h", "--replicate", "2")
    lost = three.nodes[1]
    job, reached = train_until_copied(three, three.nodes)
    lost.lose()
    job.kill()

    def flip(node):
        chunks = [f for f in node.held() if f.suffix == ".ckd" and lost.address.replace(":", "_") in str(f)]
        for chunk in chunks:
            data = bytearray(chunk.read_bytes())
            data[len(data) // 2] ^= 16
            chunk.write_bytes(data)
        return len(chunks)

    assert flip(three.nodes[0]) > 0
    lost.start("--store-every", "1h", "--replicate", "2")
    resumed = Job(three, three.nodes, "+40").finish()
    assert resumed >= reached
    check_state(three, resumed + 40)
    job, reached = train_until_copied(three, three.nodes, reached + 70)
    stored = three.newest()
    lost.lose()
    job.kill()
    assert flip(three.nodes[0]) > 0 and flip(three.nodes[2]) > 0
    lost.start("--store-every", "1h", "--replicate", "2")
    resumed = Job(three, three.nodes, "+20").finish()
    assert resumed == stored
    assert "is not used: no sound copy of what rank 1 of 3 had" in three.nodes[0].said()


def test_what_is_only_on_other_nodes_is_stored(cluster):
    """A drain, the end of all trainers, and of one agent make it durable, though the ranks save nothing then."""
    two = cluster("ab", "--store-every", "1h")
    job, reached = train_until_copied(two, two.nodes)
    assert two.newest() < reached
    for rank in job.ranks:
        stop(rank)
    two.nodes[1].ask("--drain", "-q")
    reached = two.newest()
    assert reached >= least_copied(two.nodes)
    for rank in job.ranks:
        rank.send_signal(signal.SIGCONT)
    until(lambda: copied(two.nodes, reached + 20))
    reached = least_copied(two.nodes)
    assert two.newest() < reached
    job.kill()
    two.nodes[0].ask("--drain", "-q")
    assert two.newest() >= reached
    job, reached = train_until_copied(two, two.nodes, reached + 20)
    two.nodes[0].agent.terminate()
    two.nodes[0].agent.communicate()
    assert two.nodes[0].agent.returncode == 0
    until(lambda: two.newest() >= reached)
    step = two.newest()
    until(lambda: two.newest() > step + 10)  # all ranks save by themselves
    job.kill()


def test_an_agent_that_knows_no_others(cluster):
    """A state of ranks is deferred by all agents, or by none."""
    two = cluster("ab", "--store-every", "1h")
    node, other = two.nodes
    other.lose()
    other.start_alone()
    assert Job(two, two.nodes, 30).finish() == 0
    assert "its states are not copied to other nodes: rank 1: its agent knows no other nodes (--peers)" in node.said()
    assert {c["step"] for c in run("list", two.store, "--json").json()["checkpoints"]} == {5, 10, 15, 20, 25, 30}
    check_state(two, 30)


def test_a_drain_while_all_train_on(cluster):
    """It ends when the states of its beginning are durable, though later ones are on their way at any time."""
    two = cluster("ab", "--store-every", "1h")
    node = two.nodes[0]
    until(lambda: all(n.in_place() for n in two.nodes))
    job = Job(two, [node] * 4, EVER, every=1)
    until(lambda: copied([node] * 4, 3))
    for _ in range(3):
        reached = least_copied([node] * 4)
        subprocess.run([COMMAND, "agent", two.store, "--socket", node.socket, "--drain", "-q"], check=True, timeout=60)
        assert two.newest() >= reached
    assert [rank.poll() for rank in job.ranks] == [None] * 4
    job.kill()


@pytest.mark.parametrize("ends", ["drain", "term"])
def test_the_end_of_agents_after_a_loss(cluster, ends):
    """What the ranks that are left cannot store alone is put together by a drain; an agent that ends leaves its copies."""
    three = cluster("abc", "--store-every", "1h", "--replicate", "2")
    first, lost, last = three.nodes
    job, reached = train_until_copied(three, three.nodes)
    assert three.newest() < reached
    lost.lose()
    job.kill()
    until(lambda: all(not s["connected"] for s in first.status()["sessions"]))
    if ends == "drain":
        last.ask("--drain", "-q")
        assert three.newest() >= reached
    else:
        first.agent.terminate()
        first.agent.communicate()
        assert first.agent.returncode != 0
        assert "cannot be put together at present" in first.said()
        first.start("--store-every", "1h", "--replicate", "2")
    lost.start("--store-every", "1h", "--replicate", "2")
    resumed = Job(three, three.nodes, "+40").finish()
    assert resumed >= reached
    check_state(three, resumed + 40)


def test_a_launch_that_begins_without_an_agent(cluster):
    """It saves nothing, and the parts of the states before it stay where they are."""
    three = cluster("abc", "--store-every", "1h")
    lost = three.nodes[0]
    job, reached = train_until_copied(three, three.nodes)
    stored = three.newest()
    lost.lose()
    job.kill()
    assert Job(three, three.nodes, 1).finish() == stored  # rank 0 has no agent, which would have found it
    lost.start("--store-every", "1h")
    resumed = Job(three, three.nodes, "+40").finish()
    assert resumed >= reached
    check_state(three, resumed + 40)


def test_nodes_that_cannot_be_asked(cluster):
    """The copies of a lost node's part stay where they are until the nodes that have the other parts are there again."""
    four = cluster("abcd", "--store-every", "1h")
    first, lost, *away = four.nodes
    job, reached = train_until_copied(four, four.nodes[:3])
    lost.lose()
    job.kill()
    for node in away:
        node.suspend()
    lost.start("--store-every", "1h")
    until(lambda: "is not used: no sound copy of what rank 2 of 3 had" in lost.said())
    assert four.newest() < reached
    for node in away:
        node.resume()
    until(lambda: four.newest() >= reached)
    resumed = Job(four, four.nodes[:3], "+40").finish()
    assert resumed >= reached
    check_state(four, resumed + 40)
    until(lambda: all(n.in_place() for n in four.nodes))


LONG = 6000  # seconds: a rank that waited for so long would fail the test


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_agent(cluster, monkeypatch, rank):
    """The other agents find that its node is silent, and give up. All ranks save by themselves before it goes on."""
    monkeypatch.setenv("CKPTDELTA_AGENT_WAIT", "3")
    two = cluster("ab", "--silence", "1s")
    node = two.nodes[rank]
    job = Job(two, two.nodes, timeout=LONG)
    until(lambda: two.newest() >= 30)
    node.suspend()
    step = two.newest()
    until(lambda: two.newest() > step + 20)
    assert [r.poll() for r in job.ranks] == [None, None]
    node.resume()
    job.kill()
    resumed = Job(two, two.nodes, "+20").finish()
    assert resumed > step
    check_state(two, resumed + 20)


def test_a_stopped_agent_and_killed_ranks(cluster, monkeypatch):
    """A restart does not wait until it goes on: what it has is elsewhere, too."""
    monkeypatch.setenv("CKPTDELTA_AGENT_WAIT", "3")
    two = cluster("ab", "--silence", "1s", "--store-every", "1h")
    left, node = two.nodes
    job, reached = train_until_copied(two, two.nodes, timeout=LONG)
    node.suspend()
    assert two.newest() < reached
    job.kill()
    job = Job(two, [left] * 2, "+20", timeout=LONG)
    until(lambda: all(r.poll() is not None for r in job.ranks))
    node.resume()
    resumed = job.finish()
    assert resumed >= reached
    check_state(two, resumed + 20)
    node.ask("--drain", "-q")
    assert two.newest() == resumed + 20


def suspend_while_other_saves(node, other):
    """Stops an agent whose trainer goes on, so that the other agent waits for it with a new state. Returns the last stored step."""
    while True:
        node.suspend()
        stored = node.cluster.newest()
        for _ in range(20):
            if other.status()["sessions"][0]["newest_step"] > stored:
                return stored
            time.sleep(0.05)
        node.resume()
        time.sleep(0.05)


def test_an_agent_that_is_silent_for_a_moment(cluster):
    """It is waited for: what the killed ranks have left can only be stored by all agents."""
    two = cluster("ab", "--silence", "2s")
    left, node = two.nodes
    job = Job(two, two.nodes, timeout=LONG)
    until(lambda: two.newest() >= 30)
    stored = suspend_while_other_saves(node, left)
    time.sleep(0.5)  # the other trainer has copied this state, too, but nobody can tell
    job.kill()
    until(lambda: not left.copies()["peers"][0]["alive"])
    time.sleep(1)  # a wait that ends now would be noticed
    assert two.newest() == stored
    node.resume()
    until(lambda: all(not s["connected"] for each in two.nodes for s in each.status()["sessions"]))
    for each in two.nodes:
        each.ask("--drain", "-q")
        assert "does not come" not in each.said() and "cannot be made durable" not in each.said()
    assert two.newest() > stored
