"""objects/ on SeaweedFS: real signatures, real races, and the same through a proxy that damages the traffic."""

import os

import pytest
from support_s3 import KEYS, Store, make_bucket, seaweed, without_backend
from support_s3_faults import FaultProxy

QUICK = os.environ.get("CKD_TEST_LEVEL", "quick") == "quick"
pytestmark = pytest.mark.skipif(without_backend() is not None, reason=str(without_backend()))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        make_bucket(server.endpoint, "bucket")
        yield server
    finally:
        server.stop()


@pytest.fixture
def store(server, request):
    return Store(f"s3://bucket/{request.node.name.replace('[', '-').replace(']', '')}", server.endpoint)


def through(store, proxy):
    return Store(store.address, proxy.endpoint)


def test_what_is_put_comes_back(store, tmp_path):
    store.run("put", "data/c/one", "hello")
    assert store.run("get", "data/c/one", 1, 3) == "ell"
    assert store.run("size", "data/c/one").strip() == "5"
    (tmp_path / "file").write_bytes(b"0123456789")
    store.run("put-file", "from-file", tmp_path / "file", 4)
    assert store.run("get", "from-file", 0, 6) == "456789"
    store.run("put", "data/c/one", "other")
    assert store.run("get", "data/c/one", 0, 5) == "other"
    store.run("put", "empty", "")
    assert store.run("size", "empty").strip() == "0"
    assert store.try_run("get", "from-file", 1, 6).status == "CORRUPT"
    assert store.try_run("get", "from-file", 7, 6).status == "CORRUPT"
    assert store.try_run("get", "absent", 0, 1).status == "NOT_FOUND"
    assert store.try_run("size", "absent").status == "NOT_FOUND"
    store.run("delete", "from-file", "absent", "empty")
    assert store.try_run("size", "from-file").status == "NOT_FOUND"


def test_keys_are_listed_in_pages(store):
    keys = sorted([f"data/c/{i:02}" for i in range(7)] + ["data/m/run.5.0", "data/m/run.6.0", "a", "zz"])
    for key in keys:
        store.run("put", key, "1")
    assert store.keys() == ([(key, "1") for key in keys], 1)
    found, pages = store.keys(limit=4)
    assert [key for key, _ in found] == keys and pages == 3
    assert [key for key, _ in store.keys("data/m/run.")[0]] == keys[8:10]
    assert [key for key, _ in store.keys("data/", after="data/c/05")[0]] == ["data/c/06", *keys[8:10]]


def test_another_order_of_keys_is_refused(store):
    """SeaweedFS lists a folder where its name stands, not where its keys do."""
    for key in ("a-b", "a/b"):
        store.run("put", key, "1")
    result = store.try_run("list")
    assert result.status == "UNSUPPORTED" and "folder by folder" in result.err


def test_one_of_several_writers_wins(store):
    rounds = 2 if QUICK else 100  # two seconds each: its writers wait for each other's locks
    assert store.run("race", 8, rounds, "commits").strip() == f"one {rounds} none 0 several 0 stored {rounds} errors 0"
    assert store.try_run("put-new", "commits/0", "late").status == "EXISTS"
    assert store.run("probe").strip() == "honoured"
    assert [key for key, _ in store.keys("probe")[0]] == []


def test_one_of_several_writers_wins_through_faults(store):
    with FaultProxy(store.endpoint, share=0.1, seed=5) as proxy:
        rounds = 2 if QUICK else 100
        out = through(store, proxy).run("race", 8, rounds, "commits", ATTEMPTS=12).strip()
        assert out == f"one {rounds} none 0 several 0 stored {rounds} errors 0"
        assert sum(proxy.counts.values()) - proxy.counts[None] > rounds / 2


def test_puts_and_reads_through_faults(store):
    with FaultProxy(store.endpoint, share=0.1, seed=3) as proxy:
        count = 100 if QUICK else 500
        result = through(store, proxy).try_run("storm", count, 9)
        assert result.out.strip() == f"right {count} failed 0 wrong 0", result.err
        assert all(proxy.counts[fault] > 0 for fault in ("refuse", "forget", "hang_up", "cut", "twice", "slow"))


def test_all_operations_through_faults(store):
    """Eight threads, each of which knows what must be there after each of its operations."""
    with FaultProxy(store.endpoint, share=0.1, seed=11) as proxy:
        count = 40 if QUICK else 400
        result = through(store, proxy).try_run("mix", 8, count, 5, ATTEMPTS=12, PART=5 << 20)
        assert result.out.splitlines()[-1] == f"right {8 * count} failed 0 wrong 0", result.err
        assert all(proxy.counts[fault] > 0 for fault in ("refuse", "forget", "hang_up", "cut", "twice", "slow"))


def test_what_was_said_to_be_there_outlives_a_kill(store):
    with FaultProxy(store.endpoint, share=0.1, seed=12) as proxy:
        for kill in range(2 if QUICK else 10):
            other = Store(f"{store.address}/{kill}", proxy.endpoint)
            with other.started("mix", 8, 1000, kill, ATTEMPTS=12, PART=5 << 20) as program:
                lines = [program.stdout.readline() for _ in range(40 + 10 * kill)]
                program.kill()
                lines += program.stdout
            words = [line.split() for line in lines if line.endswith("\n")]
            gone = {key for what, key, *_ in words if what == "delete"}  # or about to be
            there = {key: more for what, key, *more in words if what == "put" and key not in gone}
            found = dict(other.keys("mixed/")[0])
            assert len(there) > 10 and all(found.get(key) == size for key, (size, _) in there.items())
            for key, (size, seed) in list(there.items())[:5]:
                other.run("check", key, 0, size, seed)
            other.run("abort", 0)


def test_too_many_faults_are_clear_errors(store):
    with FaultProxy(store.endpoint, share=0.6, seed=4) as proxy:
        result = through(store, proxy).try_run("storm", 60, 9, ATTEMPTS=2)
        words = result.out.split()
        assert int(words[3]) > 0 and words[5] == "0"
        assert len(result.err.splitlines()) == int(words[3])
        assert all("attempts" in line for line in result.err.splitlines())


@pytest.mark.parametrize("fault", ["refuse", "forget", "hang_up", "cut", "twice", "conflict", "flip"])
def test_a_new_object_is_known_to_be_ours(store, fault):
    with FaultProxy(store.endpoint, plan=[fault]) as proxy:
        through(store, proxy).run("put-new", "commit", "ours")
        assert proxy.counts[fault] == 1
    assert store.run("get", "commit", 0, 4) == "ours"
    with FaultProxy(store.endpoint, plan=[fault]) as proxy:
        assert through(store, proxy).try_run("put-new", "commit", "them").status == "EXISTS"
    assert store.run("get", "commit", 0, 4) == "ours"


def test_whether_a_new_object_was_written_may_stay_open(store):
    with FaultProxy(store.endpoint, plan=["hang_up"] * 100) as proxy:
        result = through(store, proxy).try_run("put-new", "commit", "ours", ATTEMPTS=2)
        assert result.status == "IO" and "may have been written" in result.err
    with FaultProxy(store.endpoint, plan=["refuse"] * 100) as proxy:
        result = through(store, proxy).try_run("put", "other", "ours", ATTEMPTS=3)
        assert result.status == "IO" and "503 SlowDown at the last of 3 attempts (made by the test)" in result.err
        assert len(proxy.requests) == 3


def test_large_objects_go_in_parts(store, tmp_path):
    size = (5 << 20) * 3 + 17
    store.run("make", "large", size, 7, PART=5 << 20)
    assert store.run("size", "large").strip() == str(size)
    store.run("check", "large", 0, size, 7)
    store.run("check", "large", (5 << 20) - 9, 20, 7)
    part = lambda line: line.startswith("PUT") and "partNumber" in line
    completion = lambda line: line.startswith("POST") and "uploadId" in line
    faults = ("refuse", "forget", "cut", "twice")
    for only, kinds in ((part, (*faults, "flip")), (completion, faults)):
        for fault in kinds:
            with FaultProxy(store.endpoint, plan=[fault], only=only) as proxy:
                through(store, proxy).run("make", "damaged", size, 8, PART=5 << 20)
                assert proxy.counts[fault] == 1
            store.run("check", "damaged", 0, size, 8)
    assert store.run("abort", 0).strip() == "0"


def test_an_interrupted_upload_leaves_nothing(store):
    size = (5 << 20) * 3
    third = lambda line: "partNumber=3" in line
    with FaultProxy(store.endpoint, plan=["refuse"] * 100, only=third) as proxy:
        result = through(store, proxy).try_run("make", "large", size, 7, PART=5 << 20, ATTEMPTS=2)
        assert result.status == "IO" and "write a part of it" in result.err
        assert any(line.startswith("DELETE") for line in proxy.requests)
    assert store.keys() == ([], 1)
    assert store.run("abort", 0).strip() == "0"
    with FaultProxy(store.endpoint, plan=["refuse"] * 10000, only=third) as proxy:
        result = through(store, proxy).try_run("make", "large", size, 7, PART=5 << 20, ATTEMPTS=10000, CANCEL_AFTER=150)
        assert result.status == "CANCELLED"
        assert any(line.startswith("DELETE") for line in proxy.requests)
    assert store.run("abort", 0).strip() == "0"


def test_left_uploads_are_aborted_when_they_are_old(store):
    """A proxy that also refuses to abort them leaves them."""
    size = (5 << 20) + 1
    with FaultProxy(store.endpoint, plan=["refuse"] * 100, only=lambda line: "uploadId" in line) as proxy:
        assert through(store, proxy).try_run("make", "large", size, 7, PART=5 << 20, ATTEMPTS=2).status == "IO"
    assert store.run("abort", 3600).strip() == "0"
    assert store.run("abort", 0).strip() == "1"
    assert store.run("abort", 0).strip() == "0"


def test_calls_end_at_deadlines_and_cancellations(store):
    with FaultProxy(store.endpoint, plan=["refuse"] * 1000) as proxy:
        far = through(store, proxy)
        assert far.try_run("put", "a", "x", DEADLINE_MS=300, ATTEMPTS=1000, PAUSE_MS=50).status == "BUSY"
        assert far.try_run("put-new", "a", "x", DEADLINE_MS=300, ATTEMPTS=1000, PAUSE_MS=50).status == "BUSY"
        assert far.try_run("put", "a", "x", CANCEL_AFTER=5, ATTEMPTS=1000, PAUSE_MS=50).status == "CANCELLED"


def test_errors_say_what_to_do(store, server):
    wrong = store.try_run("put", "a", "x", AWS_SECRET_ACCESS_KEY="topsecret")
    assert wrong.status == "READ_ONLY" and "SignatureDoesNotMatch" in wrong.err and "check the secret key" in wrong.err
    assert store.try_run("size", "a", AWS_SECRET_ACCESS_KEY="topsecret").status == "READ_ONLY"
    unknown = store.try_run("put", "a", "x", AWS_ACCESS_KEY_ID="nobody")
    assert unknown.status == "READ_ONLY" and "does not know the access key" in unknown.err
    nobody = Store(store.address, "http://127.0.0.1:1").try_run("put", "a", "x", ATTEMPTS=2)
    assert nobody.status == "IO" and "2 attempts" in nobody.err and "check the endpoint" in nobody.err
    assert KEYS["AWS_ACCESS_KEY_ID"] not in nobody.err
