"""Accepted values of `--sbs-election`, and the refusals of others."""

from __future__ import annotations

import re

import pytest

from sglang_sbs.router.election import ElectionTimes, parse_election

IDENTITY = "tcp://10.0.0.1:7700"


@pytest.mark.parametrize(
    "url",
    [
        "k8s://deepseek/sglang-sbs",
        "etcd://127.0.0.1:2379/sglang-sbs",
        "etcd://a,b:2380,[::1]:2379/pools/first",
        "etcds://etcd.example:2379/sglang-sbs",
    ],
)
def test_urls_that_are_understood(url: str) -> None:
    election = parse_election(url, IDENTITY, ElectionTimes())
    assert election.leader is None and not election.leads()


@pytest.mark.parametrize(
    "url",
    ["k8s://deepseek/sglang-sbs", "etcd://127.0.0.1:2379/x", "etcds://127.0.0.1:2379/x"],
)
def test_its_times_stand_in_the_url(url: str) -> None:
    election = parse_election(f"{url}?lease=6s&retry=0.5", IDENTITY, ElectionTimes(renew_s=1.9))
    assert election._times == ElectionTimes(lease_s=6, renew_s=1.9, retry_s=0.5)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("k8s://deepseek/a?lease=soon", "lease=soon is not a time, such as lease=2s"),
        ("k8s://deepseek/a?lease=1s", "the renew deadline must be shorter than the lease"),
        ("etcd://host/key?retry=1e9", "retry=1e9 is not a time"),
        ("etcd://host/key?lease=6&cacert=/etc/ca.pem", "certificates belong to etcds://"),
        ("", "write k8s://NAMESPACE/NAME or etcd://HOST:2379/KEY"),
        ("redis://localhost/x", "write k8s://NAMESPACE/NAME or etcd://HOST:2379/KEY"),
        ("k8s://deepseek", "write k8s://NAMESPACE/NAME, with names as Kubernetes allows them"),
        ("k8s:///name", "with names as Kubernetes allows them"),
        ("k8s://deepseek/a/b", "with names as Kubernetes allows them"),
        ("k8s://Deepseek/Name", "with names as Kubernetes allows them"),
        ("etcd://host:2379", "a KEY after the host, e.g. /sglang-sbs"),
        ("etcd://host:2379/", "a KEY after the host"),
        ("etcd:///key", "'' is not HOST:PORT"),
        ("etcd://a:2379,/key", "'' is not HOST:PORT"),
        ("etcd://host:port/key", "Port could not be cast"),
        ("etcd://host:99999/key", "Port out of range"),
        ("etcd://user:secret@host/key", "is not HOST:PORT"),
        ("etcd://host/key?cacert=/etc/ca.pem", "certificates belong to etcds://"),
        (
            "etcds://host/key?ca=/etc/ca.pem",
            "'ca' is not one of cacert, cert, key, lease, renew, retry",
        ),
        ("etcd://h:1/k?leese=6s", "'leese' is not one of lease, renew, retry"),
        ("k8s://a/b?leese=6s", "'leese' is not one of lease, renew, retry"),
        ("etcds://host/key?cert=/etc/cert.pem", "cert and key belong together"),
        ("etcds://host/key?cacert=/nowhere/ca.pem", "a file in it is unusable"),
    ],
)
def test_urls_that_are_not(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_election(url, IDENTITY, ElectionTimes())
