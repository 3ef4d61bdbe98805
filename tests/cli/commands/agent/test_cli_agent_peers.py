"""Agents of several nodes, as processes on one machine: a node that is lost leaves its states with others."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from support_cli import COMMAND, FAILED, USAGE, check_documented, run, stop
from support_nodes import TRAINER, check_weights, cluster, until  # noqa: F401

GPT = str(Path(COMMAND).with_name("train_gpt"))


def lose_while_training(node, step=30):
    until(node.in_place)
    node.train()
    until(lambda: node.copied(step))
    reached = node.status()["sessions"][0]["copied_step"]
    node.lose()
    return reached


def test_a_lost_node(cluster):
    """Another agent at its address asks the others; the state is newer than the store's, and goes on bit for bit."""
    four = cluster("abcd", "--store-every", "1h")
    lost = four.nodes[0]
    reached = lose_while_training(lost)
    assert four.newest() < reached
    lost.start("--store-every", "1h")
    out = lost.train(reached + 300).communicate()[0].splitlines()
    resumed = int(re.fullmatch(r"resumes after step (\d+)", out[0]).group(1))
    assert resumed >= reached
    assert f"step {resumed} of run 'toy' comes from the memory of node" in lost.said()
    explained = lost.ask("--explain").out
    assert re.search(rf"toy@{resumed} at 127.0.0.1:\d+: verified, durable, chosen", explained)
    seen = set()
    check_documented(lost.status(), "`agent --status`", seen=seen)
    assert {"agent_copies", "agent_peer"} <= seen
    run("verify", four.store)
    check_weights(four, reached + 300)
    # A session that was closed leaves nothing on other nodes but the files of an empty store.
    until(lambda: lost.in_place() and not [f for node in four.nodes for f in node.held() if f.suffix == ".ckd"])
    for node in four.nodes:
        node.stop()
        assert not (node.memory / "own").exists() and not (node.memory / "held").exists()
    assert "no sign of life" not in lost.said()  # it was the first to end


def test_another_node_takes_over(cluster):
    """The restart is on a node that has had no part so far: its agent asks for the run."""
    three = cluster("abc", "--store-every", "1h")
    reached = lose_while_training(three.nodes[0])
    partner = next(i for i in (1, 2) if three.nodes[i].held())
    other = three.nodes[3 - partner]
    out = other.train(reached + 300).communicate()[0].splitlines()
    assert int(out[0].split()[-1]) >= reached
    check_weights(three, reached + 300)


def test_a_node_is_lost_twice(cluster):
    """The second life's copies are usable, though files of the first one were there."""
    two = cluster("ab", "--store-every", "1h")
    node = two.nodes[0]
    reached = lose_while_training(node)
    for _ in range(2):
        node.start("--store-every", "1h")
        node.train()
        until(lambda: node.copied(reached + 30))
        reached = node.status()["sessions"][0]["copied_step"]
        node.lose()
    node.start()
    out = node.train(reached + 300).communicate()[0].splitlines()
    assert int(out[0].split()[-1]) >= reached
    check_weights(two, reached + 300)


def test_the_partner_takes_over(cluster):
    """The restart is on the node that has the copies."""
    two = cluster("ab", "--store-every", "1h")
    reached = lose_while_training(two.nodes[0])
    out = two.nodes[1].train(reached + 300).communicate()[0].splitlines()
    assert int(out[0].split()[-1]) >= reached
    check_weights(two, reached + 300)


def test_a_partner_that_comes_back_late(cluster):
    """It shows no sign of life when the node begins its next life: what it has is not replaced before the store has it."""
    two = cluster("ab", "--store-every", "1h")
    node, partner = two.nodes
    reached = lose_while_training(node)
    partner.suspend()
    node.start()
    until(lambda: node.copies()["peers"][0]["trouble"])
    node.train(two.newest()).communicate()
    assert f"1 of 2 nodes could not be asked for a newer state than the store's: {partner.address}" in node.said()
    assert two.newest() < reached
    partner.resume()
    until(lambda: two.newest() >= reached and node.in_place())
    assert int(node.train(reached + 10).communicate()[0].splitlines()[0].split()[-1]) >= reached


def test_a_partner_that_was_silent_for_a_moment(cluster):
    """A run begins while the node that has its newest state seems to be gone. That node is waited for, and no step is lost."""
    two = cluster("ab", "--store-every", "1h")
    node, partner = two.nodes
    reached = lose_while_training(node)
    partner.suspend()
    node.start()
    until(lambda: node.copies()["peers"][0]["trouble"])
    trainer = node.train(reached + 10)
    time.sleep(1)
    assert trainer.poll() is None
    partner.resume()
    assert int(trainer.communicate()[0].splitlines()[0].split()[-1]) >= reached
    assert "could not be asked" not in node.said()


def test_too_few_nodes(cluster):
    """With fewer copies than wanted, states go to the store, those whose copies are lost later, too."""
    two = cluster("ab", "--store-every", "1h")
    node, partner = two.nodes
    until(node.in_place)
    node.train(10 ** 7)
    until(lambda: node.copied(20))
    stop(node.trainer)
    newest = node.status()["sessions"][0]["newest_step"]
    assert two.newest() < newest
    partner.lose()
    until(lambda: two.newest() >= newest)
    node.lose()
    for one in two.nodes:
        one.start("--store-every", "1h", "--replicate", "2")
    node.train(10 ** 7)
    until(lambda: two.newest() > newest + 20)
    session, = node.status()["sessions"]
    assert session["copied_step"] is None and node.copies()["states"] > 0


def test_copies_that_travel_slowly(cluster):
    """A stop waits neither for copies that are on their way nor for those that the session waits for."""
    two = cluster("ab", "--store-every", "1h", "--send-rate", "1K")
    node = two.nodes[0]
    until(node.in_place)
    node.train(10 ** 7)
    until(lambda: node.copies()["states"] >= 2)  # the second one waits: the first one's files take minutes
    reached = node.status()["sessions"][0]["newest_step"]
    node.stop()
    assert two.newest() >= reached


def flip_chunks(node):
    """Flips a bit in the middle of each chunk file that a node keeps for others."""
    chunks = [f for f in node.held() if f.suffix == ".ckd"]
    for chunk in chunks:
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 16
        chunk.write_bytes(data)
    return len(chunks)


def test_damaged_copies(cluster):
    """A copy in which a bit has flipped is found out, and another one used; if all are damaged, an older state is."""
    four = cluster("abcd", "--store-every", "1h", "--replicate", "2")
    lost = four.nodes[0]
    reached = lose_while_training(lost)
    holders = [n for n in four.nodes[1:] if any(f.suffix == ".ckd" for f in n.held())]
    assert len(holders) == 2
    assert flip_chunks(holders[0]) > 0
    lost.start("--store-every", "1h", "--replicate", "2")
    out = lost.train(reached + 300).communicate()[0].splitlines()
    assert int(out[0].split()[-1]) >= reached
    assert f"comes from the memory of node {holders[1].address}" in lost.said()
    check_weights(four, reached + 300)
    # All of them
    stored = four.newest()
    lost.train()
    until(lambda: lost.copied(stored + 30))
    lost.lose()
    assert all(flip_chunks(h) > 0 for h in holders)
    durable = four.newest()
    lost.start("--store-every", "1h", "--replicate", "2")
    out = lost.train(durable + 20).communicate()[0].splitlines()
    assert int(out[0].split()[-1]) == durable
    assert "is not used: " in lost.said() and "damaged" in lost.said()


def test_losses_of_partners(cluster):
    """A partner that is killed, and one that is stopped: said once, another one takes its place, training goes on."""
    four = cluster("aabb", "--store-every", "1h")
    node = four.nodes[0]
    node.train(10 ** 7)
    until(lambda: node.copied(20) and node.in_place())
    first, = (p["name"] for p in node.copies()["peers"] if p["partner"])
    partner = next(n for n in four.nodes if n.address == first)
    assert four.nodes.index(partner) in (2, 3)  # of the other domain
    partner.lose()
    until(lambda: [p["name"] for p in node.copies()["peers"] if p["partner"]] != [first] and node.in_place())
    second, = (p["name"] for p in node.copies()["peers"] if p["partner"])
    stopped = next(n for n in four.nodes if n.address == second)
    assert four.nodes.index(stopped) in (2, 3)
    stopped.suspend()
    until(lambda: [p["name"] for p in node.copies()["peers"] if p["partner"]] == [four.nodes[1].address] and node.in_place())
    assert node.said().count(f"node {first} shows no sign of life") == 1
    assert node.said().count(f"node {second} shows no sign of life") == 1
    last = four.nodes[1]
    last.lose()
    until(lambda: node.copies()["replicated"] == 0)
    until(lambda: "copies of this node's states are on 0 other nodes instead of 1" in node.said())
    step = node.status()["sessions"][0]["newest_step"]
    until(lambda: (node.status()["sessions"][0]["durable_step"] or 0) > step)  # to the store again
    assert node.trainer.poll() is None
    stopped.resume()
    until(node.in_place)
    until(lambda: f"node {second} is there again" in node.said() and "on 1 other nodes again" in node.said())
    assert "0 of 1 other nodes" not in node.ask("--explain").out


def test_what_is_only_on_other_nodes_is_stored(cluster):
    """A drain, the end of the trainer and the end of the agent make it durable."""
    two = cluster("ab", "--store-every", "1h")
    node = two.nodes[0]
    until(node.in_place)
    node.train(10 ** 7)
    until(lambda: two.newest() > 0)  # the first state, whichever that is, is stored at once
    stored = two.newest()
    until(lambda: node.copied(stored + 20))
    assert two.newest() == stored
    stop(node.trainer)
    node.ask("--drain", "-q")
    session, = node.status()["sessions"]
    assert session["durable_step"] == session["newest_step"] == two.newest() >= stored + 20
    node.trainer.send_signal(signal.SIGCONT)
    until(lambda: node.copied(session["newest_step"] + 20))
    reached = node.status()["sessions"][0]["copied_step"]
    node.trainer.kill()
    node.trainer.communicate()
    node.ask("--drain", "-q")
    assert two.newest() >= reached
    node.train(10 ** 7)
    until(lambda: node.copied(reached + 20))
    session, = node.status()["sessions"]
    node.agent.terminate()
    node.agent.communicate()
    assert node.agent.returncode == 0 and two.newest() >= session["copied_step"]


def test_a_drain_that_cannot_succeed(cluster):
    """A live session's state is on another node, and the store is away: a drain says so, and the next one succeeds."""
    two = cluster("ab", "--store-every", "1h")
    node, away = two.nodes[0], two.folder / "away"
    until(node.in_place)
    node.train(10 ** 7)
    until(lambda: node.copied(20))
    node.trainer.send_signal(signal.SIGSTOP)
    until(lambda: node.status()["sessions"][0]["copied_step"] == node.status()["sessions"][0]["newest_step"])
    two.store.rename(away)
    for action in ("--drain", "--stop", "--drain"):
        assert "is only in memory and cannot be made durable: " in node.ask(action, "-q", expect=FAILED).err
    assert node.said().count("cannot be stored, the agent tries again: ") == 1
    away.rename(two.store)
    node.ask("--drain", "-q")
    session, = node.status()["sessions"]
    assert session["durable_step"] == session["newest_step"] == two.newest() >= 20


def test_the_example_gpt(cluster):
    """The losses after a node was lost are those of a training that was not stopped."""
    two = cluster("ab", "--store-every", "1h")
    node, text = two.nodes[0], two.folder / "text"
    text.write_bytes(bytes(range(32, 127)) * 2200)
    command = [GPT, f"--text={text}", "--width=32", "--heads=2", "--layers=1", "--batch=2", "--context=16", "--threads=1", "--steps=40",
               f"--store={two.store}", "--save-every=1", "--background=copy", "--resume", f"--losses={two.folder / 'losses'}"]
    until(node.in_place)
    node.train(command=command)
    until(lambda: node.copied(12))
    reached = node.status()["sessions"][0]["copied_step"]
    node.lose()
    node.start("--store-every", "1h")
    node.train(command=command).communicate()
    assert f"comes from the memory of node {two.nodes[1].address}" in node.said()
    assert node.trainer.returncode == 0 and two.newest() == 40
    losses = {}
    for line in (two.folder / "losses").read_text().splitlines():
        assert losses.setdefault(line.split()[0], line) == line  # also of the steps that were made twice
    assert reached < 40 and len(losses) == 40
    plain = [a.replace(str(two.store), str(two.folder / "plain")).replace("/losses", "/plain_losses") for a in command]
    subprocess.run(plain, check=True, stdout=subprocess.PIPE, env=dict(os.environ, CKPTDELTA_AGENT=""))
    assert list(losses.values()) == (two.folder / "plain_losses").read_text().splitlines()


def test_lossy_sessions(cluster):
    """Copies have the fidelity of the session, and are as small as its checkpoints. A restart has what the store would have."""
    two = cluster("ab", "--store-every", "1h")
    node, text = two.nodes[0], two.folder / "text"
    text.write_bytes(bytes(range(32, 127)) * 2200)
    command = [GPT, f"--text={text}", "--width=64", "--heads=2", "--layers=1", "--batch=2", "--context=16", "--threads=1", "--steps=60",
               f"--store={two.store}", "--save-every=1", "--background=copy", "--resume", "--fidelity=near"]
    until(node.in_place)
    node.train(command=command)
    until(lambda: node.copied(30))
    copies = node.copies()
    assert copies["own_bytes"] < 0.7 * copies["state_bytes"] / copies["states"]  # an exact base alone takes .9
    reached = node.status()["sessions"][0]["copied_step"]
    node.lose()
    assert two.newest() < reached
    node.start("--store-every", "1h")
    out = node.train(command=command).communicate()[0]
    resumed = int(re.search(r"resumed from gpt at step (\d+)", out).group(1))
    assert resumed >= reached and f"step {resumed} of run 'gpt' comes from the memory of node" in node.said()
    listed = run("list", two.store, "--json").json()["checkpoints"]
    assert two.newest() == 60 and {c["fidelity"] for c in listed} == {"near"} and resumed in [c["step"] for c in listed]
    run("verify", two.store)


def test_exact_states_travel_as_deltas(cluster):
    """A base, seven deltas, and so on. A second base within such a chain would be sent in vain: the file before has the values."""
    two = cluster("ab", "--store-every", "1h")
    node, text = two.nodes[0], two.folder / "text"
    text.write_bytes(bytes(range(32, 127)) * 2200)
    until(node.in_place)
    node.train(command=[GPT, f"--text={text}", "--width=128", "--heads=2", "--layers=1", "--batch=2", "--context=16", "--threads=1", "--steps=24",
                        f"--store={two.store}", "--save-every=1", "--background=copy"]).communicate()
    copies = node.copies()
    assert copies["states"] == 24 and copies["replicated"] == 1
    assert 0.25 < sum(p["sent_bytes"] for p in copies["peers"]) / copies["state_bytes"] < 0.345


def test_a_small_budget(cluster):
    """Old states make room, here and at the partner, but not before the store has them. A state that does not fit is said."""
    two = cluster("ab", "--store-every", "1h", "--copies-budget", "1200K")
    node = two.nodes[0]  # its states take 400 KB
    until(node.in_place)
    node.train(10 ** 7)
    until(lambda: "no room for two states" in node.said())
    first = two.newest()
    until(lambda: two.newest() > first + 20)
    assert node.copies()["own_bytes"] <= 1300 * 1024 and two.nodes[1].copies()["held_bytes"] <= 1200 * 1024
    node.lose()
    assert node.said().count("no room for two states") == 1
    reached = two.newest()
    node.start("--copies-budget", "300K")
    out = node.train(reached + 300).communicate()[0].splitlines()
    assert int(out[0].split()[-1]) >= reached
    assert node.said().count("is not copied to other nodes") == 1 and two.newest() == reached + 300
    check_weights(two, reached + 300)


def test_a_folder_of_another_agent(cluster):
    """A second agent in a folder for copies would remove what the first one keeps there."""
    two = cluster("ab", "--store-every", "1h")
    node, partner = two.nodes
    until(node.in_place)
    kept = sorted(partner.held())
    assert kept
    other = run("agent", two.folder / "other", "--socket", two.folder / "socket", "--peers", two.hosts, "--self", node.address, "--secret",
                two.secret, "--copies", partner.memory, expect=FAILED)
    assert f"has an agent already, process {partner.agent.pid}: give each agent a folder of its own (--copies)" in other.err
    assert sorted(partner.held()) == kept
    partner.stop()
    assert list(partner.memory.iterdir()) == []
    partner.start()


def test_wrong_usage(tmp_path):
    secret = tmp_path / "secret"
    assert "--peers needs --secret" in run("agent", tmp_path / "s", "--peers", "127.0.0.1:1", expect=USAGE).err
    assert "go with --peers" in run("agent", tmp_path / "s", "--replicate", "2", expect=USAGE).err
    assert "from 1 to 64" in run("agent", tmp_path / "s", "--replicate", "0", expect=USAGE).err
    secret.write_text("0123456789abcdef")
    secret.chmod(0o644)
    arguments = ("agent", tmp_path / "s", "--socket", tmp_path / "socket", "--peers", "127.0.0.1:1", "--secret", secret)
    assert "chmod 600" in run(*arguments, expect=FAILED).err
    secret.chmod(0o600)
    nothing = run(*arguments, env=dict(os.environ, CKD_UCX_TLS="nothing"), expect=FAILED).err
    assert "CKD_UCX_TLS" in nothing
