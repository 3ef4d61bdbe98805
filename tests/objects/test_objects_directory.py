"""objects/ on a directory: what is stored, in which order it is listed, and that one writer wins."""

import os
import random
import time

import pytest
from support_s3 import Store


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def test_what_is_put_comes_back(store, tmp_path):
    store.run("put", "data/c/one", "hello")
    assert store.run("get", "data/c/one", 1, 3) == "ell"
    assert store.run("size", "data/c/one").strip() == "5"
    (tmp_path / "outside").write_bytes(b"0123456789")
    store.run("put-file", "from-file", tmp_path / "outside", 4)
    assert store.run("get", "from-file", 0, 6) == "456789"
    store.run("make", "large", 9_000_001, 3)
    store.run("check", "large", 0, 9_000_001, 3)
    store.run("put", "data/c/one", "other")
    assert store.run("get", "data/c/one", 0, 5) == "other"
    store.run("put", "empty", "")
    assert store.run("size", "empty").strip() == "0"


def test_what_is_not_there(store):
    store.run("put", "short", "abc")
    assert store.try_run("get", "short", 1, 3).status == "CORRUPT"
    assert store.try_run("get", "absent", 0, 1).status == "NOT_FOUND"
    assert store.try_run("size", "absent").status == "NOT_FOUND"
    store.run("delete", "absent", "short")
    assert store.try_run("size", "short").status == "NOT_FOUND"
    assert Store(store.address + "/nowhere").try_run("size", "a").status == "NOT_FOUND"


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "a/.b", "a b", "a\nb", "ä", "a" * 201, "a/" * 256 + "b", "a?b", "a%2f"])
def test_keys_that_are_refused(store, key):
    for command in (("put", key, "x"), ("put-new", key, "x"), ("get", key, 0, 1), ("size", key), ("delete", key)):
        assert store.try_run(*command).status == "INVALID"
    assert store.keys() == ([], 1)


def test_keys_are_listed_by_their_bytes(store, tmp_path):
    keys = ["a-b", "a.b", "a/b", "a/b-c/d", "a/c", "a0", "b", "B/x", "_"]
    for key in keys:
        store.run("put", key, "1")
    (tmp_path / ".hidden").write_text("")
    (tmp_path / "no key").write_text("")
    order = sorted(keys)
    assert store.keys() == ([(key, "1") for key in order], 1)
    for limit in (1, 2, 3):
        found, pages = store.keys(limit=limit)
        assert [key for key, _ in found] == order and pages == -(-len(keys) // limit)
    for after in [*order, "a/b-", "a/", "aa"]:
        assert [key for key, _ in store.keys(after=after)[0]] == [key for key in order if key > after]
    for prefix in ("a", "a/", "a/b", "a-", "x", "B/x"):
        assert [key for key, _ in store.keys(prefix)[0]] == [key for key in order if key.startswith(prefix)]


@pytest.mark.parametrize("seed", range(4))
def test_names_that_begin_like_folders_are_listed_in_order(store, tmp_path, seed):
    draw = random.Random(seed)
    parts = ["a", "a-", "a.", "a--", "a-.", "a.-b", "a-b", "a-b.c", "a0", "a_", "b"]
    keys = sorted({"/".join(draw.choices(parts, k=draw.choice((1, 2, 2, 3)))) for _ in range(60)})
    keys = [key for key in keys if not any(other.startswith(key + "/") for other in keys)]
    for key in keys:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text("1")
    for limit in (0, 1, 7):
        assert [key for key, _ in store.keys(limit=limit)[0]] == keys
    for text in [*draw.sample(keys, 8), "a", "a-", "a/", "a-b/a"]:
        assert [key for key, _ in store.keys(after=text)[0]] == [key for key in keys if key > text]
        assert [key for key, _ in store.keys(text)[0]] == [key for key in keys if key.startswith(text)]


def test_the_longest_keys_are_listed(store):
    key = "a" * 200 + "/" + "b" * 200 + "/" + "c" * 110
    assert len(key) == 512
    store.run("put", key, "1")
    assert store.try_run("put", key + "d", "1").status == "INVALID"
    assert store.keys() == ([(key, "1")], 1)


def test_one_of_several_writers_wins(store):
    assert store.run("race", 8, 100, "commits").strip() == "one 100 none 0 several 0 stored 100 errors 0"
    assert store.try_run("put-new", "commits/0", "late").status == "EXISTS"
    assert store.run("probe").strip() == "honoured"


def test_all_operations(store):
    assert store.run("mix", 8, 200, 3).splitlines()[-1] == "right 1600 failed 0 wrong 0"


def test_without_the_library_of_s3(monkeypatch):
    monkeypatch.setenv("CKD_S3", "/nonexistent/libckptdelta_s3.so")
    result = Store("s3://bucket/a").try_run("size", "k")
    assert result.status == "UNSUPPORTED" and "libcurl" in result.err and "/nonexistent" in result.err


def test_files_of_interrupted_puts_are_removed_when_they_are_old(store, tmp_path):
    left = [tmp_path / f".unfinished-{i}" for i in range(3)]
    for path in left:
        path.write_text("x")
    hour_ago = time.time() - 3600
    os.utime(left[0], (hour_ago, hour_ago))
    store.run("put", "kept", "x")
    assert store.run("abort", 1800).strip() == "1"
    assert [path.exists() for path in left] == [False, True, True]
    assert store.run("abort", 0).strip() == "2"
    assert store.keys() == ([("kept", "1")], 1)


def test_a_call_ends_when_it_is_cancelled(store, tmp_path):
    assert store.try_run("make", "large", 20_000_000, 3, CANCEL_AFTER=3).status == "CANCELLED"
    assert store.keys() == ([], 1)
    assert not list(tmp_path.iterdir()), "a temporary file was left"
    assert store.try_run("list", CANCEL_AFTER=1).status == "CANCELLED"


def test_links_to_folders_are_folders(store, tmp_path):
    """Whoever moves a folder to another place of the disk, and links to it, finds all objects in it."""
    (tmp_path / "moved").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "data").symlink_to(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    linked = Store(str(tmp_path / "link"))
    linked.run("put", "data/c/one", "1")
    linked.run("put-new", "data/two", "22")
    assert linked.keys() == ([("data/c/one", "1"), ("data/two", "2")], 1)
    assert [path.name for path in sorted((tmp_path / "moved").iterdir())] == ["c", "two"]


def test_a_folder_is_no_object(store):
    """As on S3, but for keys that would need a file and a folder of one name."""
    store.run("put", "a/b", "x")
    assert store.try_run("get", "a", 0, 1).status == "NOT_FOUND"
    assert store.try_run("size", "a").status == "NOT_FOUND"
    store.run("delete", "a")
    for command in (("put", "a", "y"), ("put-new", "a", "y"), ("put", "a/b/c", "y"), ("put-new", "a/b/c", "y")):
        failed = store.try_run(*command)
        assert failed.status == "INVALID" and "a folder" in failed.err, failed.err
    assert store.try_run("get", "a/b/c", 0, 1).status == "NOT_FOUND"
    assert store.try_run("size", "a/b/c").status == "NOT_FOUND"
    store.run("delete", "a/b/c")
    assert store.keys() == ([("a/b", "1")], 1)


def test_an_empty_range_lies_within_the_object(store):
    store.run("put", "key", "abc")
    assert store.run("get", "key", 3, 0) == ""
    assert store.try_run("get", "key", 4, 0).status == "CORRUPT"


def test_a_probe_writes(store, tmp_path):
    assert store.run("probe").strip() == "honoured"
    assert not list(tmp_path.iterdir())
    (tmp_path / "gone").mkdir()
    gone = Store(f"/proc/{os.getpid()}/task")  # no files can be made there, not even by root
    failed = gone.try_run("probe")
    assert failed.status in ("READ_ONLY", "NOT_FOUND", "IO"), failed.err
