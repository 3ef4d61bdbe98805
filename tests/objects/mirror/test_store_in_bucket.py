"""Stores at s3://, on servers that speak S3. A cache folder stands for a machine."""

import concurrent.futures
import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest
import support_cli as cli
import support_safetensors as st
from support_buckets import DUPLICATE, LEASES_OF_A_DELETION, LEASES_OF_A_SAVE, Gate, Machine, is_put, objects_read
from support_cli import state
from support_s3 import KEYS, Store, make_bucket, moto, rclone, seaweed, without_backend
from support_s3_faults import FaultProxy

QUICK = os.environ.get("CKD_TEST_LEVEL", "quick") == "quick"
pytestmark = pytest.mark.skipif(without_backend() is not None, reason=str(without_backend()))

DEAD_S = 20  # LEASE_DEAD_NS of objects/mirror/mirror.h
CLEANED = "cleaned up after a writer of a@2 that died"
WAITING = "holds the lease of s3://"  # of another machine, in a note after a second


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        make_bucket(server.endpoint, "bucket")
        yield server
    finally:
        server.stop()


@pytest.fixture
def address(request):
    return f"s3://bucket/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def machine(server, address, tmp_path):
    return Machine(tmp_path, address, server.endpoint)


@pytest.fixture
def other(server, address, tmp_path):
    return Machine(tmp_path, address, server.endpoint, "B")


def objects(machine, prefix=""):
    """What is in the bucket, by the tool of the tests: another program than the one under test."""
    return [key for key, _ in Store(machine.address, machine.endpoint).keys(prefix)[0]]


# ---------------------------------------------------------------------------------------------- what commands do

def test_checkpoints_come_back(machine):
    states = {step: state(1, step) for step in range(1, 5)}
    for step, tensors in states.items():
        machine.save(step, tensors)
    machine.save(5, state(1, 5), "--fidelity", "near")
    lossy = machine.load(5)
    for _ in range(2):
        assert all(st.same(machine.load(step), tensors) for step, tensors in states.items())
        assert st.same(machine.load(5), lossy)
        machine.forget()
    weight = np.frombuffer(lossy["layers.0.weight"][2], np.float32).reshape(64, 64)
    assert np.allclose(weight, state(1, 5)["layers.0.weight"], rtol=0, atol=0.01)
    assert machine.listed() == [("a", step) for step in range(1, 6)]
    said = machine.save(2, state(1, 9), expect=cli.FAILED)
    assert f"run 'a' {DUPLICATE} 2" in said.err
    said = machine.save(3, states[2], "--on-duplicate", "branch", expect_message="continues as run 'a~2'")
    assert st.same(machine.load(3, "a~2"), states[2]) and st.same(machine.load(3), states[3])
    assert machine.call("verify").out.endswith("no damage\n")
    folders = {key.rsplit("/", 1)[0] for key in objects(machine)}
    assert folders == {"data", "data/c", "data/m", "lease"}
    assert not any((machine.mirror() / "data/c").iterdir()), "chunk files are only in the bucket"


def test_what_looks_at_a_store(machine, tmp_path):
    states = {step: state(1, step) for step in (1, 2, 3)}
    for step, tensors in states.items():
        machine.save(step, tensors)
    assert machine.json("show", "a@2")["checkpoints"][0]["step"] == 2
    assert len(machine.json("diff", "1", "3")["tensors"]) == 5
    machine.call("export", "a@3", "--out", tmp_path / "export")
    assert st.same(st.read(tmp_path / "export/model.safetensors")[0], states[3])
    assert machine.call("scrub", "--older-than", "0s").out.startswith("read 3 files")
    stored = machine.json("report")
    machine.call("report", "--html", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 1000 and machine.address in (tmp_path / "report.html").read_text()
    total = sum(int(size) for _, size in Store(machine.address, machine.endpoint).keys("data/c/")[0])
    assert stored["chunk_bytes"] == total and stored["unlisted_bytes"] == 0, "the chunk files of the bucket count"
    assert "a" in machine.call("timeline").out


def test_what_looks_after_a_store(machine, other):
    """Each step is done on one machine, and seen on the other one."""
    states = {step: state(1, step) for step in range(1, 7)}
    for step, tensors in states.items():
        (machine if step % 2 else other).save(step, tensors)
    machine.call("tag", "best", "a@2")
    other.call("pin", "a@1")
    machine.call("policy", "--keep-last", "2")
    assert other.json("tag")["tags"][0]["checkpoint"] == "a@2" and other.json("pin")["pins"][0]["checkpoint"] == "a@1"
    other.call("prune", "--dry-run")
    other.call("prune")
    assert machine.listed() == [("a", 1), ("a", 2), ("a", 5), ("a", 6)]
    machine.call("trash", "--restore", "a@4")
    assert ("a", 4) in other.listed() and st.same(other.load(4), states[4])
    other.call("parity", "--group", "2+1")
    assert len(objects(machine, "data/p/")) > 0
    machine.call("compact", "--max-depth", "2", "--recode-but", "1")
    other.call("rename", "a", "b")
    left = [1, 2, 4, 5, 6]
    assert machine.listed() == [("b", step) for step in left]
    machine.call("rebuild")
    other.call("trash", "--empty", "--all")
    for each in (machine, other):
        assert each.call("verify").out.endswith("no damage\n")
        assert all(st.same(each.load(step, "b"), states[step]) for step in left)
    machine.call("delete", "b@4", "--undo", "0s")
    assert ("b", 4) not in other.listed()
    assert st.same(other.load(5, "b"), states[5])


def test_copies_of_checkpoints(machine, other, server, tmp_path):
    """Between a bucket and a directory, and between buckets."""
    for step in (1, 2, 3):
        machine.save(step, state(1, step))
    there = tmp_path / "there"
    cli.run("push", machine.address, there, env=machine.env)
    assert cli.run("verify", there).out.endswith("no damage\n")
    second = Machine(tmp_path, machine.address + "-second", server.endpoint, "B")
    cli.run("pull", second.address, there, env=second.env)
    third = Machine(tmp_path, machine.address + "-third", server.endpoint, "B")
    cli.run("push", second.address, third.address, "a@2", env=second.env)
    for store, steps in ((second, (1, 2, 3)), (third, (2,))):
        assert store.listed() == [("a", step) for step in steps]
        assert all(st.same(store.load(step), state(1, step)) for step in steps)
        assert store.call("verify").out.endswith("no damage\n")


def test_versions_are_followed(machine, other, tmp_path):
    into = tmp_path / "into"
    for step in (1, 2, 3):
        weights = {"layer.weight": state(1, step)["layers.0.weight"]}
        machine.call("publish", f"w@{step}", machine.file(weights))
        other.call("follow", "w", "--into", into, "--once")
        assert st.same(st.read(into / "model.safetensors")[0], weights)


def test_damage_in_the_bucket_is_repaired(machine, other, tmp_path):
    """That is, damage of the place itself."""
    for step in (1, 2, 3):
        machine.save(step, state(1, step))
    machine.call("parity", "--group", "2+1")
    place = Store(machine.address, machine.endpoint)
    (key, size), = place.keys("data/c/", limit=1)[0][:1]
    place.run("make", key, size, 7)
    assert "DAMAGED" in other.call("verify", expect=cli.CORRUPT).out
    other.call("repair")
    assert machine.call("verify").out.endswith("no damage\n")
    place.run("delete", key)
    assert "DAMAGED" in machine.call("verify", expect=cli.CORRUPT).out
    machine.call("repair")
    assert all(st.same(other.load(step), state(1, step)) for step in (1, 2, 3))


# ---------------------------------------------------------------------------------------------- several machines

def test_machines_see_each_other(machine, other):
    for step in range(1, 9 if QUICK else 33):
        writer, reader = (machine, other) if step % 2 else (other, machine)
        writer.save(step, state(1, step))
        assert reader.listed() == [("a", s) for s in range(1, step + 1)]
        assert st.same(reader.load(step), state(1, step))
    assert other.call("verify").out.endswith("no damage\n")


def test_a_machine_reads_while_another_one_saves(machine, other):
    machine.save(1, state(1, 1))
    steps, seen = 12 if QUICK else 60, set()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        saves = pool.submit(lambda: [machine.save(step, state(1, step)) for step in range(2, steps + 1)])
        while not saves.done():
            found = [step for _, step in other.listed()]
            assert found == list(range(1, len(found) + 1)) and set(found) >= seen
            seen = set(found)
            assert st.same(other.load(found[-1]), state(1, found[-1]))
        saves.result()
    assert len(other.listed()) == steps


def test_one_of_several_writers_wins(server, address, tmp_path):
    """The losers hear what they would hear of a directory."""
    directory = cli.Store(tmp_path)
    directory.save(1, state(1, 1))
    found = directory.save(1, state(1, 2), expect=cli.FAILED).err
    assert DUPLICATE in found
    raced = "ckptdelta: another writer has committed a@1 meanwhile\n" + found.split("\n", 1)[1]  # engine/save/commit.c
    machines = [Machine(tmp_path, address, server.endpoint, f"M{i}") for i in range(8)]
    states = [state(i, 1) for i in range(8)]
    won = {}

    def save(i, step):
        done = subprocess.run([cli.COMMAND, "save", address, "--run", "a", "--step", str(step), machines[i].file(states[i])], env=machines[i].env,
                              capture_output=True, text=True, timeout=300)
        if done.returncode == cli.DONE:
            return i
        assert done.returncode == cli.FAILED
        said = re.sub(f"^ckptdelta: waiting up to 30 s: .*{WAITING}.*\n", "", done.stderr)
        assert said in (found.replace("step 1;", f"step {step};"), raced.replace("a@1", f"a@{step}")), done.stderr
        return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for step in range(1, 3 if QUICK else 13):
            results = [i for i in pool.map(save, range(8), [step] * 8) if i is not None]
            assert len(results) == 1, f"step {step}: {results} have won"
            won[step] = results[0]
    for each in machines[:3]:
        assert all(st.same(each.load(step), states[i]) for step, i in won.items())
    assert machines[7].call("verify").out.endswith("no damage\n")


def test_a_store_is_created_once(server, address, tmp_path):
    """Eight machines open a store that is not there yet. All their checkpoints are in it, each with an id of one store."""
    machines = [Machine(tmp_path, address, server.endpoint, f"M{i}") for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        said = set(pool.map(lambda i: machines[i].save(i, state(i, 1), expect_message="").err, range(8)))
    assert all(not line or WAITING in line for text in said for line in text.split("\n"))
    for each in machines[:2]:
        assert each.listed() == [("a", i) for i in range(8)]
        assert all(st.same(each.load(i), state(i, 1)) for i in range(8))


def test_the_cache_may_go_at_any_time(machine, other):
    for step in (1, 2, 3):
        machine.save(step, state(1, step))
        machine.forget()
    assert machine.listed() == [("a", step) for step in (1, 2, 3)]
    machine.call("tag", "best", "a@2")
    machine.forget()
    machine.call("delete", "a@1")
    machine.forget()
    assert machine.listed() == other.listed() == [("a", 2), ("a", 3)]
    machine.forget()
    machine.call("trash", "--restore")
    machine.forget()
    assert all(st.same(machine.load(step), state(1, step)) for step in (1, 2, 3))


def test_only_what_is_new_is_read(machine, address, tmp_path):
    for step in range(1, 6):
        machine.save(step, state(1, step))
    with FaultProxy(machine.endpoint) as proxy:
        other = Machine(tmp_path, address, proxy.endpoint, "B")
        other.listed()
        assert len(objects_read(proxy.requests, "data/m")) == 5
        proxy.requests.clear()
        other.listed()
        assert not any(objects_read(proxy.requests, folder) for folder in ("data/m", "data/t", "data/n", "data/c"))
        assert len(proxy.requests) < 12
        machine.save(6, state(1, 6))
        machine.call("delete", "a@1")
        proxy.requests.clear()
        other.listed()
        assert ["a.6.0" in line for line in objects_read(proxy.requests, "data/m")] == [True]
        assert len(objects_read(proxy.requests, "data/t")) == 1 and not objects_read(proxy.requests, "data/c")


# ---------------------------------------------------------------------------------------------- damaged caches

def flip(path):
    content = bytearray(path.read_bytes() or b"\0")
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "empty": lambda path: path.write_bytes(b""),
    "lost": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.sampled(2)
def test_damage_of_the_cache_is_none_of_the_bucket(machine, other, damage):
    """Nothing good leaves the bucket, whatever the commands find in the cache; and another machine never notices."""
    for step in (1, 2, 3, 4):
        machine.save(step, state(1, step))
    machine.call("tag", "best", "a@2")
    machine.call("delete", "a@1")
    machine.call("parity", "--group", "2+1")
    place = Store(machine.address, machine.endpoint)
    whole = {key: size for key, size in place.keys("data/")[0]}
    for name in ("data/m/a.3.0", "data/t/a.1.0", "data/n/tag.best.0", "data/store", "data/deletions"):
        DAMAGE[damage](machine.mirror() / name)
        if damage != "flipped":  # other sizes are seen when the store is opened
            assert machine.call("verify").out.endswith("no damage\n"), name
            assert all(st.same(machine.load(step), state(1, step)) for step in (2, 3, 4))
            DAMAGE[damage](machine.mirror() / name)
        for command in ("verify", "repair", "scrub", "verify"):
            subprocess.run([cli.COMMAND, command, machine.address], env=machine.env, capture_output=True, timeout=300)
        found = dict(place.keys("data/")[0])
        assert all(found.get(key) == size for key, size in whole.items()), f"{name}, {damage}: {sorted(whole.items() ^ found.items())}"
        assert other.listed() == [("a", step) for step in (2, 3, 4)]
        assert other.call("verify").out.endswith("no damage\n")
        assert all(st.same(other.load(step), state(1, step)) for step in (2, 3, 4))
    machine.forget()
    assert machine.call("verify").out.endswith("no damage\n")
    machine.call("trash", "--restore")
    assert st.same(other.load(1), state(1, 1))


@pytest.mark.parametrize("name", ["copies", "id", "probed", "address", "store/catalog.db", "store/data/lock"])
@pytest.mark.sampled(3)
def test_notes_of_the_cache_may_be_damaged(machine, other, name):
    machine.save(1, state(1, 1))
    for damage in DAMAGE.values():
        damage(machine.mirror().parent / name)
        other.save(other.count + 2, state(1, 2))
        if name == "store/catalog.db":
            machine.call("rebuild")
        assert machine.listed() == other.listed()
        machine.save(100 + machine.count, state(1, 3))
    assert machine.call("verify").out.endswith("no damage\n")


# ---------------------------------------------------------------------------------------------- the lease

@pytest.fixture
def gate(server):
    with Gate(server.endpoint) as gate:
        yield gate


@pytest.fixture
def held(gate, address, tmp_path):
    """A machine behind the gate."""
    return Machine(tmp_path, address, gate.endpoint, "C")


def test_the_same_machine_goes_on_after_a_kill(held, gate):
    held.save(1, state(1, 1))
    gate.arm_behind_lease(LEASES_OF_A_SAVE, drop=True)
    with held.started_save(2, state(1, 2)) as process:
        assert gate.reached.wait(60)
        process.kill()
        process.wait()
    gate.open.set()
    begun = time.monotonic()
    held.save(2, state(1, 3), expect_message=CLEANED)
    assert time.monotonic() - begun < DEAD_S  # it does not wait as another machine would
    assert st.same(held.load(2), state(1, 3))
    assert held.call("verify").out.endswith("no damage\n")
    assert len(objects(held, "data/c/")) == 2


@pytest.mark.parametrize("end", ["killed", "stopped"])
@pytest.mark.sampled(2)
def test_another_machine_takes_the_lease_of_a_silent_one(held, gate, other, end):
    held.save(1, state(1, 1))
    gate.arm_behind_lease(LEASES_OF_A_SAVE, drop=end == "killed")
    with held.started_save(2, state(1, 2)) as process:
        assert gate.reached.wait(60)
        if end == "killed":
            process.kill()
            process.wait()
        else:
            cli.stop(process)
        gate.open.set()
        begun = time.monotonic()
        other.save(3, state(1, 3), expect_message=WAITING)
        assert DEAD_S - 6 < time.monotonic() - begun < 3 * DEAD_S
        if end == "stopped":
            loses(process)
    for each in (held, other):
        assert each.listed() == [("a", 1), ("a", 3)]
        assert st.same(each.load(1), state(1, 1)) and st.same(each.load(3), state(1, 3))
        assert each.call("verify").out.endswith("no damage\n")
    held.save(2, state(1, 2), expect_message=CLEANED)
    assert st.same(other.load(2), state(1, 2)) and len(objects(held, "data/c/")) == 3


def loses(process):
    """A stopped process goes on. It has lost the lease, and says so."""
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == cli.FAILED and "another machine may have taken it" in err and "try again" in err, (out, err)


def test_a_stopped_holder_deletes_nothing(held, gate, other):
    """What a deletion has decided is void when another machine has had the lease."""
    for step in (1, 2, 3, 4):
        held.save(step, state(1, step))
    gate.arm_behind_lease(LEASES_OF_A_DELETION)
    with held.started("delete", "a@2", "--undo", "0s") as process:
        assert gate.reached.wait(60)
        cli.stop(process)
        gate.open.set()
        other.call("pin", "a@2", expect_message=WAITING)
        loses(process)
    assert st.same(other.load(2), state(1, 2)) and len(other.listed()) == 4
    assert held.call("verify").out.endswith("no damage\n")


def test_a_commit_that_is_late_replaces_nothing(held, gate, other):
    """It was on its way when its sender lost the lease."""
    held.save(1, state(1, 1))
    gate.arm(lambda line: is_put(line, "data/m"))
    with held.started_save(2, state(1, 2)) as process:
        assert gate.reached.wait(60)
        cli.stop(process)
        other.save(2, state(1, 5), expect_message=WAITING)
        gate.open.set()
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == cli.FAILED and err, (out, err)
    for each in (held, other):
        assert st.same(each.load(2), state(1, 5)) and each.call("verify").out.endswith("no damage\n")


@pytest.mark.skipif(QUICK, reason="it waits for the end of a lease, as another test does: full level")
def test_a_request_that_is_tried_again_ends_with_the_lease(held, gate, other):
    """The network is down while files are removed. Meanwhile another machine restores the checkpoint that they are of."""
    for step in (1, 2, 3, 4):
        held.save(step, state(1, step))
    held.call("delete", "a@2")
    gate.arm(lambda line: line.startswith("DELETE ") and "/data/m/" in line, cut=True)
    with held.started("trash", "--empty", "--all") as process:
        assert gate.reached.wait(60)
        other.call("trash", "--restore", "a@2", expect_message=WAITING)
        gate.open.set()
        out, err = process.communicate(timeout=60)
        assert process.returncode == cli.FAILED and "may have taken it" in err, (out, err)
    for each in (held, other):
        assert st.same(each.load(2), state(1, 2)) and each.call("verify").out.endswith("no damage\n")


@pytest.mark.skipif(QUICK, reason="it waits for longer than a lease lasts: full level")
def test_a_holder_that_works_keeps_the_lease(held, gate, other):
    """Its request takes long, and it renews the lease meanwhile."""
    held.save(1, state(1, 1))
    begun = len(gate.requests)
    gate.arm_behind_lease(LEASES_OF_A_SAVE)
    with held.started_save(2, state(1, 2)) as process:
        assert gate.reached.wait(60)
        with other.started_save(3, state(1, 3)) as waits:
            time.sleep(DEAD_S + 5)
            assert waits.poll() is None and process.poll() is None
            assert len(gate.leases(begun)) == LEASES_OF_A_SAVE
            assert sum(is_put(line, "lease") for line in gate.requests[begun:]) > 2 * LEASES_OF_A_SAVE
            gate.open.set()
            for each in (process, waits):
                out, err = each.communicate(timeout=60)
                assert each.returncode == cli.DONE, err
    assert all(st.same(other.load(step), state(1, step)) for step in (1, 2, 3))


# ---------------------------------------------------------------------------------------------- other servers

@pytest.fixture(scope="module", params=[moto, rclone], ids=["moto", "rclone"])
def another_server(request, tmp_path_factory):
    server = request.param(tmp_path_factory.mktemp("server"))
    server.name = request.param.__name__
    try:
        make_bucket(server.endpoint, "bucket")
        yield server
    finally:
        server.stop()


def test_servers_that_ignore_conditions_are_for_one_writer(another_server, tmp_path):
    machine = Machine(tmp_path, "s3://bucket/some/store", another_server.endpoint)
    if another_server.name == "rclone":
        said = machine.save(1, state(1, 1), expect=cli.FAILED)
        assert "ignores If-None-Match" in said.err and "CKPTDELTA_SINGLE_WRITER=1" in said.err
        assert objects(machine) == []
        machine.env["CKPTDELTA_SINGLE_WRITER"] = "1"
    for step in (1, 2, 3):
        machine.save(step, state(1, step))
    assert DUPLICATE in machine.save(2, state(1, 9), expect=cli.FAILED).err
    machine.call("delete", "a@2")
    machine.call("compact", "--max-depth", "1")
    machine.env.pop("CKPTDELTA_SINGLE_WRITER", None)
    reader = Machine(tmp_path, machine.address, machine.endpoint, "B")
    assert reader.listed() == [("a", 1), ("a", 3)], "to read, nothing needs to be declared"
    assert all(st.same(reader.load(step), state(1, step)) for step in (1, 3))
    assert reader.call("verify").out.endswith("no damage\n")


# ---------------------------------------------------------------------------------------------- faults, errors, secrets

def test_commands_work_through_faults(machine, address, tmp_path):
    with FaultProxy(machine.endpoint, share=0.1, seed=7) as proxy:
        near, far = (Machine(tmp_path, address, proxy.endpoint, name) for name in "CD")
        steps = 4 if QUICK else 16
        for step in range(1, steps + 1):
            (near if step % 2 else far).save(step, state(1, step))
        far.call("delete", "a@2")
        near.call("compact", "--max-depth", "2")
        assert sum(proxy.counts.values()) - proxy.counts[None] > steps
        assert far.call("verify").out.endswith("no damage\n")
    assert all(st.same(machine.load(step), state(1, step)) for step in range(1, steps + 1) if step != 2)


def test_no_secret_is_kept(machine):
    token = "sessiontoken/verysecret"
    machine.save(1, state(1, 1))
    machine.call("tag", "best", "a@1")
    machine.call("parity", "--group", "2+1")
    files = [p for p in machine.cache.rglob("*") if p.is_file()]
    assert any(p.name == "catalog.db" for p in files) and any(p.parent.name == "m" for p in files)
    for path in files:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in (*KEYS.values(), token)), path
    assert (machine.mirror().parent.stat().st_mode & 0o777) == 0o700
    for wrong in ({"AWS_SECRET_ACCESS_KEY": "topsecret"}, {"AWS_SESSION_TOKEN": token}):
        done = subprocess.run([cli.COMMAND, "list", machine.address], env={**machine.env, **wrong}, capture_output=True, text=True, timeout=300)
        assert not any(secret in done.stdout + done.stderr for secret in (*wrong.values(), KEYS["AWS_SECRET_ACCESS_KEY"]))


def test_errors_say_what_to_do(machine, other, server, tmp_path):
    said = machine.call("list", expect=cli.NOT_FOUND)
    assert f"no ckptdelta store at '{machine.address}'" in said.err
    assert objects(machine) == [], "a command that reads creates nothing"
    machine.save(1, state(1, 1))

    def fails(env, expect=cli.FAILED, address=machine.address, command="list"):
        changed = {**other.env, **env}
        more = [machine.file(state(1, 1)), "--run", "a", "--step", "5"] if command == "save" else []
        return cli.run(command, address, *more, expect=expect, env={k: v for k, v in changed.items() if v is not None}).err

    for command in ("list", "save"):
        said = fails({"AWS_SECRET_ACCESS_KEY": "topsecret"}, command=command)
        assert "SignatureDoesNotMatch" in said and "check the secret key" in said and "topsecret" not in said
        assert "does not know the access key" in fails({"AWS_ACCESS_KEY_ID": "nobody"}, command=command)
        said = fails({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, command=command)
        assert "credentials" in said
        said = fails({}, address="s3://no-such-bucket/a", command=command, expect=cli.NOT_FOUND)
        assert "no-such-bucket" in said and "create the bucket" in said, said
    nowhere = {"CKPTDELTA_CACHE": None, "XDG_CACHE_HOME": None, "HOME": None}
    for env in (nowhere, {"CKPTDELTA_CACHE": "relative/path"}):
        assert "CKPTDELTA_CACHE" in fails(env)
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in fails({"CKPTDELTA_CACHE": str(tmp_path / "file")})
    for address in ("s3://", "s3:///a", "s3://Bad_Bucket!/a", "s3://bucket/../a", "s3://bucket/a//b"):
        assert "s3://" in fails({}, address=address, expect=cli.USAGE)


@pytest.mark.skipif(QUICK, reason="it waits for eight attempts: full level")
def test_a_server_that_is_down_is_a_clear_error(machine):
    machine.save(1, state(1, 1))
    down = machine.env | {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}
    said = cli.run("list", machine.address, expect=cli.FAILED, env=down).err
    assert "check the endpoint" in said and "attempts" in said
    assert machine.listed() == [("a", 1)]
