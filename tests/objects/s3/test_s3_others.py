"""objects/ on servers that differ: moto (no signatures checked), and rclone, which ignores the condition of a put."""

import pytest
from support_s3 import Store, make_bucket, moto, rclone, without_backend

pytestmark = pytest.mark.skipif(without_backend() is not None, reason=str(without_backend()))


@pytest.fixture(scope="module", params=[moto, rclone], ids=["moto", "rclone"])
def server(request, tmp_path_factory):
    server = request.param(tmp_path_factory.mktemp("server"))
    server.name = request.param.__name__
    try:
        make_bucket(server.endpoint, "bucket")
        yield server
    finally:
        server.stop()


def test_objects(server):
    store = Store("s3://bucket/some/prefix", server.endpoint)
    keys = sorted(["data/c/1", "data/c/2", "data/m/run.1.0", "x"])
    for key in keys:
        store.run("put", key, "hello")
    assert store.run("get", "data/c/1", 1, 3) == "ell"
    assert store.keys() == ([(key, "5") for key in keys], 1)
    assert [key for key, _ in store.keys("data/c/", after="data/c/1")[0]] == ["data/c/2"]
    store.run("delete", "x", "data/c/2", "absent")
    assert store.try_run("get", "x", 0, 1).status == "NOT_FOUND"
    size = (5 << 20) * 2 + 1
    store.run("make", "large", size, 7, PART=5 << 20)
    store.run("check", "large", 0, size, 7)
    absent = Store("s3://no-such-bucket/a", server.endpoint)
    for command in (("put", "k", "x"), ("put-new", "k", "x"), ("list",), ("delete", "k")):
        result = absent.try_run(*command)
        assert result.status == "NOT_FOUND" and "create the bucket" in result.err


def test_keys_are_listed_by_their_bytes(server):
    store = Store("s3://bucket/order", server.endpoint)
    keys = ["a-b", "a.b", "a/b", "a/c/d", "a0"]
    if server.name == "moto":
        keys.append("a")  # rclone keeps objects as files, and a file is no folder
    for key in keys:
        store.run("put", key, "1")
    for limit in (0, 1, 4):
        assert [key for key, _ in store.keys(limit=limit)[0]] == sorted(keys)


def test_the_probe_finds_out_whether_conditions_are_honoured(server):
    store = Store("s3://bucket/probe", server.endpoint)
    assert store.run("probe").strip() == ("honoured" if server.name == "moto" else "ignored")
    assert store.keys() == ([], 1)
