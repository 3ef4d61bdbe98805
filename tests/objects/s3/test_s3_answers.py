"""objects/ on a server that says what the test wants: credentials, their renewal, errors, connections, answers without sense."""

import datetime
import json
import socket
import subprocess

import pytest
from support_s3 import KEYS, Store, without_backend
from support_s3_fake import Fake, problem, signer

pytestmark = pytest.mark.skipif(without_backend() is not None, reason=str(without_backend()))


def fine(request):
    return 200, {"ETag": '"tag"'}, b""


@pytest.fixture
def s3():
    with Fake(fine) as fake:
        yield fake


def later(seconds):
    return (datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def keys(name, seconds=3600, token="Token"):
    return json.dumps({"Version": 1, "AccessKeyId": name, "SecretAccessKey": "topsecret", token: f"token of {name}",
                       "Expiration": later(seconds)}).encode()


def put(endpoint, **settings):
    return Store("s3://bucket/p", endpoint, **settings).try_run("put", "key", "x")


def files(tmp_path, credentials="", config=""):
    (tmp_path / "credentials").write_text(credentials)
    (tmp_path / "config").write_text(config)
    return {"AWS_SHARED_CREDENTIALS_FILE": tmp_path / "credentials", "AWS_CONFIG_FILE": tmp_path / "config"}


NO_KEYS = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}


def test_the_environment(s3):
    assert put(s3.endpoint, AWS_SESSION_TOKEN="session", AWS_REGION="eu-west-9").status == "OK"
    request = s3.requests[0]
    assert request.path == "/bucket/p/key" and request.body == b"x"
    assert signer(request) == KEYS["AWS_ACCESS_KEY_ID"] and "/eu-west-9/s3/" in request.headers["Authorization"]
    assert request.headers["x-amz-security-token"] == "session"
    assert "x-amz-security-token" in request.headers["Authorization"], "the token is not signed"


def test_profiles(s3, tmp_path):
    settings = files(tmp_path, "[default]\naws_access_key_id=one\naws_secret_access_key=topsecret\n"
                               "[other]\naws_access_key_id=two\naws_secret_access_key=topsecret\n",
                     f"[profile other]\nregion=eu-west-7\nendpoint_url={s3.endpoint}\n")
    assert put(s3.endpoint, **settings, **NO_KEYS).status == "OK"
    assert put(None, **settings, **NO_KEYS, AWS_PROFILE="other").status == "OK"
    assert put(None, **settings, PROFILE="other").status == "OK"
    assert put(s3.endpoint, **settings, AWS_PROFILE="other").status == "OK"
    assert [signer(r) for r in s3.requests] == ["one", "two", "two", "testkey"]
    assert "/eu-west-7/" in s3.requests[1].headers["Authorization"]
    absent = put(s3.endpoint, **settings, **NO_KEYS, AWS_PROFILE="absent")
    assert absent.status == "NOT_FOUND" and "no profile absent" in absent.err


def test_a_process(s3, tmp_path):
    (tmp_path / "give").write_text(f"#!/bin/sh\necho '{keys('process', token='SessionToken').decode()}'\n")
    (tmp_path / "give").chmod(0o755)
    settings = files(tmp_path, config=f"[default]\ncredential_process = {tmp_path}/give --some 'thing'\n")
    assert put(s3.endpoint, **settings, **NO_KEYS).status == "OK"
    assert signer(s3.requests[0]) == "process" and s3.requests[0].headers["x-amz-security-token"] == "token of process"
    for command, words in (("exit 3", "failed with status 3"), ("echo topsecret", "no AccessKeyId"), ("yes", "wrote more than")):
        settings = files(tmp_path, config=f"[default]\ncredential_process = {command}\n")
        failed = put(s3.endpoint, **settings, **NO_KEYS)
        assert failed.status in ("IO", "CORRUPT") and words in failed.err, failed.err


def test_what_is_left_to_a_process(s3, tmp_path):
    settings = files(tmp_path, config="[default]\nrole_arn = arn:x\nsource_profile = y\n")
    failed = put(s3.endpoint, **settings, **NO_KEYS)
    assert failed.status == "UNSUPPORTED" and "credential_process" in failed.err


def test_a_container(s3, tmp_path):
    def service(request):
        ok = request.path == "/keys" and request.headers.get("Authorization") == "the token"
        return (200, {}, keys("container")) if ok else (403, {}, b"")
    (tmp_path / "token").write_text("the token\n")
    with Fake(service) as fake:
        uri = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": fake.endpoint + "/keys"}
        assert put(s3.endpoint, **NO_KEYS, **uri, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=tmp_path / "token").status == "OK"
        assert put(s3.endpoint, **NO_KEYS, **uri, AWS_CONTAINER_AUTHORIZATION_TOKEN="the token").status == "OK"
        assert [signer(r) for r in s3.requests] == ["container", "container"]
        refused = put(s3.endpoint, **NO_KEYS, **uri, AWS_CONTAINER_AUTHORIZATION_TOKEN="another")
        assert refused.status == "IO" and "answered 403" in refused.err
    for elsewhere in ("http://192.0.2.1/keys", "http://127.0.0.1.evil.example/", "http://local:1/", "http://localhost@192.0.2.1/", "file:///etc/passwd"):
        refused = put(s3.endpoint, **NO_KEYS, AWS_CONTAINER_CREDENTIALS_FULL_URI=elsewhere)
        assert refused.status == "INVALID" and "neither on this machine nor reached over https" in refused.err


def test_an_instance(s3):
    def service(request):
        if request.method == "PUT" and request.path == "/latest/api/token":
            return 200, {}, b"session of the instance"
        if request.headers.get("X-aws-ec2-metadata-token") != "session of the instance":
            return 401, {}, b""
        role = request.path.removeprefix("/latest/meta-data/iam/security-credentials/")
        return 200, {}, b"some-role\n" if role == "" else keys("instance") if role == "some-role" else b""
    with Fake(service) as fake:
        settings = {"AWS_EC2_METADATA_DISABLED": None, "AWS_EC2_METADATA_SERVICE_ENDPOINT": fake.endpoint + "/"}
        assert put(s3.endpoint, **NO_KEYS, **settings).status == "OK"
    assert signer(s3.requests[0]) == "instance"


def test_no_credentials(s3):
    failed = put(s3.endpoint, **NO_KEYS)
    assert failed.status == "STATE" and not s3.requests
    for place in ("AWS_ACCESS_KEY_ID", "~/.aws/credentials", "container", "AWS_EC2_METADATA_DISABLED"):
        assert place in failed.err


def test_keys_are_renewed_before_they_expire_and_when_they_are_refused():
    given = []

    def service(request):
        given.append(f"keys{len(given)}")
        return 200, {}, keys(given[-1], -1 if len(given) == 1 else 3600)

    def demanding(request):
        return fine(request) if signer(request) == "keys2" else problem(400, "ExpiredToken")
    with Fake(service) as fake, Fake(demanding) as s3:
        for command in (("put", "key", "x"), ("put-new", "key", "x")):
            given.clear()
            s3.requests.clear()
            Store("s3://bucket/p", s3.endpoint, **NO_KEYS, AWS_CONTAINER_CREDENTIALS_FULL_URI=fake.endpoint).run(*command)
            assert [signer(r) for r in s3.requests] == ["keys1", "keys2"], "keys that expire were used, or refused ones kept"


@pytest.mark.parametrize("answer", [
    lambda request: problem(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-north-1"}),
    lambda request: problem(400, "AuthorizationHeaderMalformed", "<Region>eu-north-1</Region>", {"x-amz-bucket-region": "eu-north-1"}),
])
def test_another_region_is_named(answer):
    with Fake(answer) as fake:
        for command in (("put", "key", "x"), ("size", "key"), ("get", "key", 0, 1), ("list",), ("put-new", "key", "x")):
            failed = Store("s3://bucket/p", fake.endpoint).try_run(*command)
            assert failed.status == "INVALID" and "set AWS_REGION=eu-north-1" in failed.err
        assert len(fake.requests) == 5, "what cannot succeed was sent again"


def make_certificate(tmp_path):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
                    "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
                   check=True, capture_output=True)


def test_certificates_are_verified(tmp_path):
    both = tmp_path / "both.pem"
    make_certificate(tmp_path)
    both.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "cert.pem").read_text())
    with Fake(fine, both) as fake:
        refused = put(fake.endpoint)
        assert refused.status == "IO" and "AWS_CA_BUNDLE" in refused.err and not fake.requests
        assert put(fake.endpoint, AWS_CA_BUNDLE=tmp_path / "cert.pem").status == "OK"
        assert len(fake.requests) == 1
        make_certificate(tmp_path)
        assert put(fake.endpoint, AWS_CA_BUNDLE=tmp_path / "cert.pem").status == "IO", "another authority is trusted"


@pytest.mark.parametrize("ours", [True, False])
def test_an_upload_may_be_complete_although_the_answer_was_lost(ours):
    size, seen = (5 << 20) + 1, []

    def answer(request):
        if request.method == "POST" and request.path.endswith("?uploads="):
            seen.append(request.headers["x-amz-meta-ckptdelta-writer"])
            return 200, {}, b"<InitiateMultipartUploadResult><UploadId>id</UploadId></InitiateMultipartUploadResult>"
        if request.method == "POST":
            seen.append("completion")
            return problem(500, "InternalError") if seen.count("completion") == 1 else problem(404, "NoSuchUpload")
        if request.method == "HEAD":
            return 200, {"x-amz-meta-ckptdelta-writer": seen[0] if ours else "somebody"}, b"x" * size
        return fine(request)
    with Fake(answer) as fake:
        result = Store("s3://bucket/p", fake.endpoint).try_run("make", "key", size, 1, PART=5 << 20)
        assert result.status == ("OK" if ours else "IO")
        assert ours or "404 NoSuchUpload" in result.err
        assert len([r for r in fake.requests if r.method == "DELETE"]) == (0 if ours else 1)


@pytest.mark.parametrize("there, status", [(b"ours", "OK"), (b"them", "EXISTS"), (b"longer", "EXISTS")])
def test_where_no_metadata_is_kept_the_bytes_tell_who_wrote(there, status):
    def answer(request):
        return problem(500, "InternalError") if request.method == "PUT" else (200, {}, there)
    with Fake(answer) as fake:
        assert Store("s3://bucket/p", fake.endpoint).try_run("put-new", "key", "ours").status == status
        assert [r.method for r in fake.requests][:2] == ["PUT", "HEAD"]


def test_connections_are_used_again():
    with Fake(lambda request: (404, {}, b"")) as fake:
        Store("s3://bucket/p", fake.endpoint).run("delete", *[f"key{i}" for i in range(40)], CONNECTIONS=3)
        assert len(fake.requests) == 40 and 1 <= fake.connections <= 3


def test_a_forked_child_leaves_the_connections_alone(s3):
    Store("s3://bucket/p", s3.endpoint).run("fork", "key", "x")
    assert len(s3.requests) == 2 and s3.connections == 1


def test_answers_without_sense_are_errors():
    for body in (b"", b"<html>", b"<Error></Error>", b"\0\1\2", b"<!DOCTYPE a [<!ENTITY b 'c'>]><ListBucketResult/>", b"<a>" * 1000):
        with Fake(lambda request, body=body: (200, {}, body)) as fake:
            assert Store("s3://bucket/p", fake.endpoint).try_run("list").status == "CORRUPT"


def test_a_server_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        failed = Store("s3://bucket/p", endpoint).try_run("size", "k", STALL_MS=1000, ATTEMPTS=1)
        assert failed.status == "IO" and "no complete answer" in failed.err
