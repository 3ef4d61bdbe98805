"""ckptdelta run and the hosts of a job: checks, exclusion, and requeues by Slurm, with commands on PATH that only pretend."""

import os
import shlex
import signal

import pytest

from support_cli import USAGE, check_documented, run
from support_run import STOPPED, exists, job, until  # noqa: F401


class Cluster:
    """A job on hosts that are not there. What is asked of them goes to a shell script, as do questions to Slurm."""

    def __init__(self, job):  # noqa: F811
        self.job, self.hosts, self.spares = job, job.folder / "hosts", job.folder / "spares"
        self.bin = job.folder / "bin"
        self.bin.mkdir()
        for name in "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_NODEFILE":
            job.env.pop(name, None)
        job.env["PATH"] = f"{self.bin}:{job.env['PATH']}"

    def fake(self, name, script):
        path = self.bin / name
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >>{shlex.quote(str(self.job.folder))}/calls\n{script}\n')
        path.chmod(0o755)

    def calls(self):
        path = self.job.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def allocate(self, nodes):
        self.job.env.update(SLURM_JOB_ID="77", SLURM_JOB_NODELIST=nodes)

    def run(self, *options, command=("true",), expect=0):
        return self.job.run(*command, options=options, expect=expect)[1]

    def last(self):
        return self.job.attempts()[-1]


@pytest.fixture
def cluster(job):  # noqa: F811
    return Cluster(job)


FAILS = ("sh", "-c", "exit 1")

# -------------------------------------------------------------------------------------------------------- journal


def test_without_a_list_it_is_this_host(cluster):
    cluster.run()
    assert cluster.last()["hosts"] == [os.uname().nodename] and cluster.last()["bad_hosts"] is None


def test_hosts_of_slurm_and_pbs(cluster):
    (cluster.job.folder / "nodes").write_text("p1\np1\np2.domain\n")
    cluster.job.env["PBS_NODEFILE"] = str(cluster.job.folder / "nodes")
    cluster.run()
    assert cluster.last()["hosts"] == ["p1", "p2.domain"]
    cluster.allocate("n[09-10,12],gpu-[1-2]-a")
    cluster.run()
    assert cluster.last()["hosts"] == ["n09", "n10", "n12", "gpu-1-a", "gpu-2-a"]
    cluster.hosts.write_text("h1:8\nh2 slots=8\n")
    cluster.run("--hosts-file", "hosts")
    assert cluster.last()["hosts"] == ["h1", "h2"]
    assert [line["hosts"] for line in cluster.job.lines() if line["event"] == "start"][-1] == ["h1", "h2"]
    check_documented(cluster.last(), "`attempt`")
    table = run("attempts", cluster.job.store, "-v").out
    assert "RAN ON" in table and "n09 +4" in table


@pytest.mark.parametrize("nodes", ["n[1", "n;reboot", "-oProxyCommand=x"])
def test_a_list_that_is_not_understood_keeps_nothing_from_running(cluster, nodes):
    cluster.allocate(nodes)
    err = cluster.run()
    assert "the hosts of the job are not known" in err and cluster.last()["hosts"] is None


# ---------------------------------------------------------------------------------------------------------- checks

HOSTS = "a slots=8\nb:4\n# the last one\nc\n"


def check_on(cluster, bad, *options, **more):
    """The check fails on these hosts."""
    cluster.fake("rsh", f'case $1 in {bad}) exit 3;; esac; exec sh -c "$2"')
    return cluster.run("--hosts-file", "hosts", "--remote-shell", "rsh", "--node-check", "exit 0", *options, **more)


def test_without_act_a_bad_host_is_only_named(cluster):
    cluster.hosts.write_text(HOSTS)
    cluster.spares.write_text("c\ns\n")
    err = check_on(cluster, "b")
    assert sorted(cluster.calls()) == ["rsh a exit 0", "rsh b exit 0", "rsh c exit 0"]
    assert "host b is bad: its check ended with 3; it stays, as there is no spare and the job cannot do without it" in err
    assert "host b is bad: its check ended with 3; with --act, spare s takes its place in hosts" in check_on(cluster, "b", "--spares", "spares")
    assert "host b is bad: its check ended with 3; with --act, it is taken out of hosts" in check_on(cluster, "b", "--min-hosts", "2")
    assert cluster.hosts.read_text() == HOSTS
    assert [(a["hosts"], a["bad_hosts"], a["excluded"]) for a in cluster.job.attempts()] == [(["a", "b", "c"], ["b"], None)] * 3
    assert "b" in run("attempts", cluster.job.store, "-v").out.splitlines()[1].split()


def test_spares_are_checked_as_well(cluster):
    cluster.hosts.write_text(HOSTS)
    cluster.spares.write_text("a\ns1\ns2 slots=2\n")
    cluster.hosts.chmod(0o640)
    err = check_on(cluster, "b|s1", "--spares", "spares", "--act")
    assert "host b is bad: its check ended with 3; spare s1 takes its place in hosts" in err and "spare s2 takes its place" in err
    assert cluster.hosts.read_text() == "a slots=8\ns2:4\n# the last one\nc\n" and cluster.hosts.stat().st_mode & 0o777 == 0o640
    a = cluster.last()
    assert (a["hosts"], a["bad_hosts"], a["excluded"]) == (["a", "s2", "c"], ["b", "s1"], ["b", "s1"])
    assert len(cluster.calls()) == 5
    # A host that was bad is no spare.
    check_on(cluster, "c", "--spares", "spares", "--act")
    assert cluster.last()["excluded"] is None and cluster.last()["bad_hosts"] == ["c"]
    assert sorted(p.name for p in cluster.job.folder.glob("hosts*")) == ["hosts"]


def test_never_below_the_least_number_of_hosts(cluster):
    cluster.hosts.write_text(HOSTS)
    err = check_on(cluster, "a|b", "--min-hosts", "2", "--act")
    assert "host a is bad: its check ended with 3; it is taken out of hosts" in err and "host b is bad: its check ended with 3; it stays" in err
    assert cluster.hosts.read_text() == "b:4\n# the last one\nc\n"
    assert (cluster.last()["hosts"], cluster.last()["excluded"]) == (["b", "c"], ["a"])


def test_a_check_that_takes_too_long(cluster):
    cluster.hosts.write_text("a\nb\n")
    cluster.fake("rsh", '[ "$1" = a ] || exec sleep 600')
    err = cluster.run("--hosts-file", "hosts", "--remote-shell", "rsh", "--node-check", "exit 0", "--node-check-limit", "1s")
    assert "host b is bad: its check has not ended after 1 s" in err and cluster.last()["bad_hosts"] == ["b"]


def test_a_check_that_fails_everywhere_says_nothing(cluster):
    cluster.hosts.write_text(HOSTS)
    err = cluster.run("--hosts-file", "hosts", "--remote-shell", "absent-shell", "--node-check", "exit 0", "--min-hosts", "1", "--act")
    assert "the check of the hosts fails on each of 3, so it says nothing about them" in err
    assert cluster.hosts.read_text() == HOSTS and cluster.last()["bad_hosts"] is None


def test_a_remote_shell_that_reaches_nobody_says_nothing(cluster):
    """The check on this host needs none."""
    own = os.uname().nodename
    cluster.hosts.write_text(f"{own}\n{HOSTS}")
    err = cluster.run("--hosts-file", "hosts", "--remote-shell", "absent-shell", "--node-check", "exit 0", "--min-hosts", "1", "--act")
    assert "the check of the hosts fails on each of 3 other hosts, so it says nothing about them" in err
    assert cluster.hosts.read_text() == f"{own}\n{HOSTS}" and cluster.last()["bad_hosts"] is None
    cluster.fake("rsh", '[ "$1" = c ] || exit 3')
    cluster.run("--hosts-file", "hosts", "--remote-shell", "rsh", "--node-check", "exit 1")
    assert cluster.last()["bad_hosts"] == [own, "a", "b"]


def test_the_own_host_needs_no_remote_shell(cluster):
    cluster.fake("ssh", "exit 1")
    err = cluster.run("--node-check", "touch checked; exit 9")
    assert (cluster.job.folder / "checked").exists() and cluster.calls() == []
    assert "its check ended with 9; exclude it from the job" in err and cluster.last()["bad_hosts"] == [os.uname().nodename]


def test_a_signal_ends_the_check(cluster):
    process = cluster.job.begin("touch", "started", options=["--node-check", "touch checks; exec sleep 600"])
    assert until(exists(cluster.job.folder / "checks"))
    process.send_signal(signal.SIGTERM)
    cluster.job.finish(process, STOPPED)
    assert not (cluster.job.folder / "started").exists()


def test_a_host_that_was_taken_out_excuses_what_failed_before(cluster):
    """The same exit status twice would be enough to give up."""
    cluster.hosts.write_text("a\nb\n")
    cluster.spares.write_text("s\n")
    err = check_on(cluster, "$(cat bad)", "--spares", "spares", "--act", command=("sh", "-c", "echo b >bad; [ $CKPTDELTA_ATTEMPT = 3 ] || exit 1"))
    assert "spare s takes its place" in err
    assert [(a["hosts"], a["status"]) for a in cluster.job.attempts()] == [(["a", "b"], None), (["a", "s"], None), (["a", "s"], 0)]


# ----------------------------------------------------------------------------------------------------- blame, Slurm


ALWAYS_ANOTHER = ("sh", "-c", "exit 1$CKPTDELTA_ATTEMPT")  # the same status twice would be futile


def test_the_only_host_in_common_is_blamed_and_left_out(cluster):
    """Each job has other nodes, and one is always among them."""
    cluster.fake("scontrol", "case $1 in show) echo 'JobId=77 ReqNodeList=(null) ExcNodeList=old[1-2] Comment=x';; esac")
    for nodes in "n[1-2]", "n[2-3]":
        cluster.allocate(nodes)
        err = cluster.run("--max-restarts", "0", "--act", command=ALWAYS_ANOTHER, expect=1)
        assert "requeues the job: scontrol requeue 77" in err
    cluster.allocate("n[2,4]")
    err = cluster.run("--act", command=ALWAYS_ANOTHER, expect=1)
    assert "host n2 is bad: the only one common to the last attempts, which made no newer checkpoint; a requeue will exclude it" in err
    assert "gave up: exit status 13; without n2 the job may get further" in err
    assert cluster.calls() == ["scontrol requeue 77"] * 2 + ["scontrol show job -o 77", "scontrol requeue 77", "scontrol update JobId=77 ExcNodeList=n2,old1,old2"]
    assert (cluster.last()["bad_hosts"], cluster.last()["excluded"], cluster.last()["status"]) == (["n2"], ["n2"], 1)
    # It was the host: the count begins anew.
    cluster.allocate("n[4-5]")
    cluster.run("--act", command=("sh", "-c", "[ $CKPTDELTA_ATTEMPT = 5 ]"))


def test_without_act_a_requeue_is_only_named(cluster):
    cluster.fake("scontrol", "")
    cluster.allocate("n[1-2]")
    err = cluster.run("--max-restarts", "0", command=FAILS, expect=1)
    assert "a requeue may help: scontrol requeue 77\n" in err and cluster.calls() == []
    cluster.fake("ssh", '[ "$3" != n2 ]')
    err = cluster.run("--max-restarts", "0", "--node-check", "true", "--max-futile", "9", command=("sh", "-c", "exit 3"), expect=1)
    assert "a requeue should exclude it" in err
    assert "a requeue may help: scontrol requeue 77 && scontrol update JobId=77 ExcNodeList=n2\n" in err
    assert "-o BatchMode=yes n1 true" in "".join(cluster.calls()) and not any("requeue" in call for call in cluster.calls())


@pytest.mark.parametrize("command, status", [(("true",), 0), (FAILS, 93), (("sh", "-c", "exit 2"), 2), (("./absent",), 127)])
def test_results_that_no_requeue_helps(cluster, command, status):
    cluster.fake("scontrol", "")
    cluster.allocate("n[1-2]")
    err = cluster.run("--act", command=command, expect=status)
    assert "requeue" not in err and cluster.calls() == []


@pytest.mark.parametrize("number, calls", [(signal.SIGTERM, ["scontrol requeue 77"]), (signal.SIGINT, [])])
def test_the_end_of_the_job_s_time(cluster, number, calls):
    """Slurm sends SIGTERM. While it ends the job it sends it again."""
    cluster.fake("scontrol", "kill -TERM $$ $PPID; sleep 0.2; echo done >>calls")
    cluster.allocate("n1")
    process = cluster.job.begin("sh", "-c", "touch ready; exec sleep 600", options=["--act"])
    assert until(exists(cluster.job.folder / "ready"))
    process.send_signal(number)
    cluster.job.finish(process, 128 + number)
    assert cluster.calls() == calls + ["done"] * len(calls)


def test_a_requeue_that_fails(cluster):
    cluster.fake("scontrol", "exit 5")
    cluster.allocate("n1")
    out, err = cluster.job.run(*FAILS, options=["--max-restarts", "0", "--act", "--json"], expect=1)
    assert "the job is not requeued: exit status 5" in err and '"requeue":true' in out.replace(" ", "")


@pytest.mark.parametrize("options", [["--spares", "s"], ["--min-hosts", "2"], ["--min-hosts", "0", "--hosts-file", "h"], ["--node-check-limit", "0s"]])
def test_wrong_options(job, options):  # noqa: F811
    run("run", job.store, "--run", "gpt", *options, "--", "true", expect=USAGE)


def test_hostile_names_in_the_journal(cluster):
    cluster.run()
    with open(cluster.job.store / "attempts.jsonl", "a") as to:
        to.write('{"event":"start","run":"gpt","attempt":2,"hosts":["a b","-x",1,null,"ok"],"bad_hosts":"x","excluded":{}}\n')
    assert (cluster.last()["hosts"], cluster.last()["bad_hosts"], cluster.last()["excluded"]) == (["ok"], None, None)
