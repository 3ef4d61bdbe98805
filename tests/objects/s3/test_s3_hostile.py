"""objects/ on servers, proxies and networks that answer wrongly: what is damaged is sent again, and nothing wrong is believed."""

import datetime

import pytest
from support_s3 import KEYS, Store, without_backend
from support_s3_fake import Bucket, Fake, RawFake, problem, signature_valid

pytestmark = pytest.mark.skipif(without_backend() is not None, reason=str(without_backend()))


def store(fake):
    return Store("s3://bucket/p", fake.endpoint)


def test_signatures_cover_paths_queries_and_tokens():
    """The endpoint has a path, as behind some gateways."""
    def answer(request):
        assert request.path.startswith("/storage/v1/bucket") and signature_valid(request, "a/+= secret")
        return 200, {}, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    with Fake(answer) as fake:
        settings = {"AWS_SECRET_ACCESS_KEY": "a/+= secret", "AWS_SESSION_TOKEN": "to/ken+=="}
        behind = Store("s3://bucket/p.q/r", fake.endpoint + "/storage/v1/", **settings)
        for command in (("put", "a/b-c_d.e", "x"), ("put", "empty", ""), ("put-new", "n", "x"), ("size", "a"), ("list", "a/", "a/b"), ("delete", "a")):
            behind.run(*command)
        assert len(fake.requests) == 6
        assert not signature_valid(fake.requests[0], "another")


def ranged(start, body, last=None, total=10, more=b""):
    """A 206 that says it has the bytes from `start` to `last` of `total`."""
    last = start + len(body) - 1 if last is None else last
    return b"HTTP/1.1 206 Partial\r\nContent-Range: bytes %d-%d/%s\r\n%s\r\n%s" % (start, last, str(total).encode(), more, body)


WHOLE = b"0123456789"


@pytest.mark.parametrize("damaged", [
    ranged(2, b"23", 5),  # the connection ended too early, and no length says so
    ranged(2, b"23"),  # fewer bytes than were asked for, although the object has them
    ranged(2, b"23", total="*"),
    ranged(0, b"0123"),
    ranged(4, b"4567"),
    ranged(2, b"2345", 4),
    b"HTTP/1.1 206 Partial\r\nContent-Range: nonsense\r\nContent-Length: 4\r\n\r\n2345",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n",
    b"2345",
])
def test_damaged_ranges_are_read_again(damaged):
    with RawFake(lambda request: damaged if len(fake.requests) == 1 else ranged(2, b"2345")) as fake:
        assert store(fake).run("get", "key", 2, 4) == "2345"
        assert len(fake.requests) == 2
    with RawFake(lambda request: damaged) as fake:
        failed = store(fake).try_run("get", "key", 2, 4, ATTEMPTS=2)
        assert failed.status == "IO" and "2 attempts" in failed.err, failed.err


@pytest.mark.parametrize("size, status", [(4, "CORRUPT"), (6, "IO")])
@pytest.mark.parametrize("answer", [ranged(2, b"23", total=4), b"HTTP/1.1 416 Range\r\nContent-Length: 0\r\n\r\n"])
def test_only_a_short_object_is_corrupt(answer, size, status):
    """A proxy may have sent the answer to another request."""
    with RawFake(lambda request: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size if request.method == "HEAD" else answer) as fake:
        assert store(fake).try_run("get", "key", 2, 4).status == status
        assert [r.method for r in fake.requests] == ["GET", "HEAD"]


def test_a_server_without_ranges_is_asked_once():
    with Fake(lambda request: (200, {}, WHOLE)) as fake:
        assert store(fake).run("get", "key", 0, 10) == WHOLE.decode()
        assert store(fake).try_run("get", "key", 0, 11).status == "CORRUPT"
        fake.requests.clear()
        for offset, size in ((0, 4), (2, 4), (2, 100)):
            failed = store(fake).try_run("get", "key", offset, size)
            assert failed.status == "UNSUPPORTED" and "does not read ranges" in failed.err
        assert len(fake.requests) == 3


@pytest.mark.parametrize("conditions, found", [(True, "honoured"), (False, "ignored")])
def test_a_probe_is_not_misled_by_lost_answers(conditions, found):
    for lost in ({1}, {2}, {1, 2, 3}, {3, 5, 8}, {3, 4, 5, 6, 7, 8, 9, 10}):
        def damage(request, answer):
            counts.append(request.method == "PUT")
            return problem(500, "InternalError") if request.method == "PUT" and sum(counts) in lost else answer
        counts, bucket = [], Bucket(damage, conditions)
        with Fake(bucket) as fake:
            assert store(fake).run("probe").strip() == found, lost
        assert not bucket.objects


def test_a_probe_is_not_misled_by_a_refusal_of_its_own_request():
    """A network delivers the first put twice, and the second answer comes."""
    first = []
    def damage(request, answer):
        first.append(request.method)
        return problem(412, "PreconditionFailed") if len(first) == 1 else answer
    with Fake(Bucket(damage)) as fake:
        assert store(fake).run("probe").strip() == "honoured"


def test_a_probe_that_fails_says_why_and_leaves_nothing():
    def damage(request, answer):
        return problem(503, "SlowDown") if request.method == "PUT" else answer
    bucket = Bucket(damage)
    with Fake(bucket) as fake:
        failed = store(fake).try_run("probe", ATTEMPTS=3)
        assert failed.status == "IO" and "503 SlowDown" in failed.err
        assert store(fake).try_run("probe", CANCEL_AFTER=20, ATTEMPTS=1000, PAUSE_MS=2000).status == "CANCELLED"
    assert len([r for r in fake.requests if r.method == "PUT"]) > 3 and not bucket.objects


@pytest.mark.parametrize("ahead", [-7200, 100000])
def test_a_wrong_clock_is_set_by_the_server(ahead):
    """A HEAD is refused without a code."""
    skews = []

    def demanding(request):
        now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=ahead)
        date = datetime.datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.timezone.utc)
        assert signature_valid(request, KEYS["AWS_SECRET_ACCESS_KEY"])
        skews.append(abs(date - now) > datetime.timedelta(minutes=15))
        headers = {"Date": now.strftime("%a, %d %b %Y %H:%M:%S GMT")}
        return problem(403, "RequestTimeTooSkewed", headers=headers) if skews[-1] else bucket(request)
    bucket = Bucket()
    for command in (("put", "key", "x"), ("put-new", "new", "x"), ("size", "key"), ("get", "key", 0, 1)):
        skews.clear()
        with Fake(demanding) as fake:
            store(fake).run(*command)
        assert skews == [True, False]
    with Fake(demanding) as fake:  # several are refused at the same time, and later ones know it
        store(fake).run("delete", *[f"key{i}" for i in range(40)], CONNECTIONS=4)
        assert 41 <= len(fake.requests) <= 44


def test_a_refusal_is_not_taken_for_a_wrong_clock():
    with Fake(lambda request: problem(403, "AccessDenied")) as fake:
        for command in (("put", "key", "x"), ("size", "key")):
            assert store(fake).try_run(*command).status == "READ_ONLY"
        assert len(fake.requests) == 2
    with Fake(lambda request: problem(403, "RequestTimeTooSkewed")) as fake:  # its clock is ours, so what could be tried?
        failed = store(fake).try_run("put", "key", "x")
        assert failed.status == "IO" and "by NTP" in failed.err and len(fake.requests) == 1


def test_an_address_with_a_secret_is_not_shown():
    for address in ("s3://AKIA:topsecret@bucket/p", "s3://bucket/topsecret@x"):
        failed = Store(address).try_run("size", "k")
        assert failed.status == "INVALID" and "s3://BUCKET/PREFIX" in failed.err  # try_run looks for the secret


def test_keys_with_line_breaks_are_refused():
    """Files of secrets end with one more often than not, and a token with one would add a header."""
    with Fake(Bucket()) as fake:
        for settings in ({"AWS_SECRET_ACCESS_KEY": "topsecret\n"}, {"AWS_ACCESS_KEY_ID": "id\r"}, {"AWS_SESSION_TOKEN": "t\r\nx-evil: 1"}):
            failed = store(fake).try_run("put", "key", "x", **settings)
            assert failed.status == "INVALID" and "line break" in failed.err
        assert not fake.requests


def test_a_web_identity_is_not_passed_over():
    """Else the role of the machine would be taken, which may do other things."""
    none = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn"}
    with Fake(Bucket()) as fake:
        failed = store(fake).try_run("put", "key", "x", **none)
        assert failed.status == "UNSUPPORTED" and "AWS_WEB_IDENTITY_TOKEN_FILE" in failed.err and "credential_process" in failed.err
        store(fake).run("put", "key", "x", AWS_WEB_IDENTITY_TOKEN_FILE="/token", AWS_ROLE_ARN="arn")


@pytest.mark.parametrize("there", ["at once", "later", "never"])
@pytest.mark.parametrize("body", [b"", b"   ", b"<?xml version='1.0'?><Error><Code>Inter", b"<CompleteMultipartUploadResult><ETag>&quot;t"])
def test_a_completion_without_its_end_is_no_success(body, there):
    """The status comes before the work is done, and the connection may end in between."""
    size, seen = (5 << 20) + 1, []

    def answer(request):
        seen.append(request.method)
        if request.method == "POST" and request.path.endswith("?uploads="):
            seen.append(request.headers["x-amz-meta-ckptdelta-writer"])
            return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n<A><UploadId>id</UploadId></A>"
        if request.method == "POST":
            second = there == "later" and seen.count("HEAD") > 0
            return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + (b"<B><ETag>whole</ETag></B>" if second else body)
        if request.method == "HEAD" and there == "at once":
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nx-amz-meta-ckptdelta-writer: %s\r\n\r\n" % (size, seen[1].encode())
        status = b"404 Not Found" if request.method == "HEAD" else b"200 OK"
        return b"HTTP/1.1 %s\r\nETag: tag\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status
    with RawFake(answer) as fake:
        result = store(fake).try_run("make", "key", size, 1, PART=5 << 20, ATTEMPTS=2)
    assert result.status == ("IO" if there == "never" else "OK"), result.err
    assert "HEAD" in seen and ("DELETE" in seen) == (there == "never")


def listing(*keys, truncated=False, token=""):
    items = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return 200, {}, f"<ListBucketResult>{items}<IsTruncated>{str(truncated).lower()}</IsTruncated>{more}</ListBucketResult>".encode()


def test_empty_pages_are_not_the_end_of_a_list():
    """Servers with many deleted keys send them."""
    def answer(request):
        if "continuation-token=a%2B%2F1" in request.path:
            return listing(truncated=True, token="second&amp;")
        if "continuation-token=second%26" in request.path:
            return listing("p/a", "p/b", truncated=True, token="third")
        return listing("p/c") if "start-after=p%2Fb" in request.path else listing(truncated=True, token="a+/1")
    with Fake(answer) as fake:
        assert store(fake).keys() == ([("a", "1"), ("b", "1"), ("c", "1")], 2)
        assert all(signature_valid(r, KEYS["AWS_SECRET_ACCESS_KEY"]) for r in fake.requests) and len(fake.requests) == 4
    with Fake(lambda request: listing(truncated=True, token="same")) as fake:
        failed = store(fake).try_run("list")
        assert failed.status == "CORRUPT" and len(fake.requests) == 2


def test_keys_that_were_not_asked_for_are_refused():
    """Who deletes what begins with a prefix must get nothing else."""
    with Fake(lambda request: listing("p/a/1", "p/b/1")) as fake:
        assert store(fake).keys("")[0] == [("a/1", "1"), ("b/1", "1")]
        failed = store(fake).try_run("list", "a/")
        assert failed.status == "CORRUPT" and "p/a/" in failed.err


@pytest.mark.parametrize("markers", ["<NextKeyMarker>p/a</NextKeyMarker>", "<NextKeyMarker>p/a</NextKeyMarker><NextUploadIdMarker>1</NextUploadIdMarker>"])
def test_a_list_of_uploads_that_does_not_go_on_ends(markers):
    body = ("<ListMultipartUploadsResult><Upload><Key>p/a</Key><UploadId>1</UploadId><Initiated>2026-01-02T03:04:05Z</Initiated></Upload>"
            f"<IsTruncated>true</IsTruncated>{markers}</ListMultipartUploadsResult>").encode()
    with Fake(lambda request: (200, {}, body) if request.method == "GET" else (204, {}, b"")) as fake:
        failed = store(fake).try_run("abort", 0, DEADLINE_MS=30000)
        assert failed.status == "CORRUPT" and "does not continue" in failed.err
        assert len([r for r in fake.requests if r.method == "GET"]) == 2


def test_programs_that_are_started_inherit_no_connection():
    with Fake(Bucket()) as fake:
        assert store(fake).run("inherited", "key", "x").strip() == "0"


def test_headers_without_end_are_refused():
    def answer(request):
        return b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-header-%d: %s\r\n" % (i, b"x" * 1000) for i in range(100)) + b"\r\n"
    with RawFake(answer) as fake:
        failed = store(fake).try_run("put", "key", "x", ATTEMPTS=1)
        assert failed.status == "IO" and "writing header" in failed.err


def test_a_call_waits_until_the_rate_lets_it(tmp_path):
    """The put leaves a debt of hours, for which the read waits until its deadline."""
    with Fake(Bucket()) as fake:
        for place in (store(fake), Store(str(tmp_path))):
            slow = place.try_run("storm", 1, 9, BYTES_PER_S=1, DEADLINE_MS=2000)
            assert slow.out.strip() == "right 0 failed 1 wrong 0" and "before its deadline" in slow.err
            assert place.run("storm", 1, 9, BYTES_PER_S=1 << 30).strip() == "right 1 failed 0 wrong 0"
        assert [r.method for r in fake.requests] == ["PUT", "PUT", "GET"]
