"""KV events of DP ranks on other nodes: whose word is believed, and where the router connects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from router_harness import until

from sglang_sbs.router.signals.endforward_listener import EndForwardListener
from sglang_sbs.router.signals.kv_subscriber import KvEventSubscriber
from sglang_sbs.router.signals.kv_times import KvTimes
from sglang_sbs.router.workers.kv_addresses import (
    KvEndpoints,
    RefusedAddress,
    default_endpoints,
    reported_endpoints,
)
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import (
    KvEventsBlock,
    SbsBlock,
    WorkerInfo,
    node_of_rank,
    parse_server_info,
)
from sglang_sbs.router.workers.worker import WorkerEvents
from sglang_sbs.scheduling.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    InstanceDown,
    InstanceUp,
)
from sglang_sbs.wire import EndForward, decode_endforward, encode_endforward
from sglang_sbs.wire.curve import keys_of
from sglang_sbs.wire.endforward import KvAddress
from tools.stand_ins.kv_publisher import KvPublisher, removed, stored
from tools.stand_ins.ports import free_ports

URL = "http://127.0.0.1:30000"
SECOND_NODE = "127.0.0.2"


# What is believed ---------------------------------------------------------------------------------


def test_ranks_of_the_first_node_are_at_the_workers_own_host() -> None:
    source = KvEventsBlock(port=5557, replay_port=5657)
    expected = KvEndpoints("tcp://[fd00::1]:5560", "tcp://[fd00::1]:5660")
    assert default_endpoints("http://[fd00::1]:30000", source, 3) == expected
    source = KvEventsBlock(port=5557)
    assert default_endpoints("http://p0:30000", source, 0) == KvEndpoints("tcp://p0:5557", "")


@pytest.mark.parametrize(
    ("host", "peer", "has_key", "expected"),
    [
        ("", "10.0.0.2", False, "10.0.0.2"),
        ("", "::ffff:10.0.0.2", False, "10.0.0.2"),
        ("", "fd00::2", False, "[fd00::2]"),
        ("10.0.0.2", "::ffff:10.0.0.2", False, "10.0.0.2"),
        ("10.9.0.2", "10.0.0.2", True, "10.9.0.2"),
        ("10.9.0.2", "", True, "10.9.0.2"),
        # A router on that node itself.
        ("", "127.0.0.1", False, "127.0.0.1"),
    ],
)
def test_a_rank_on_another_node_is_where_it_speaks_from_or_says_with_a_key(
    host: str, peer: str, has_key: bool, expected: str
) -> None:
    reported = KvAddress(host, 5558, 5658)
    live, replay = f"tcp://{expected}:5558", f"tcp://{expected}:5658"
    assert reported_endpoints(reported, peer, has_key=has_key) == (live, replay)
    assert reported_endpoints(KvAddress(host, 5558), peer, has_key=has_key) == (live, "")


@pytest.mark.parametrize(
    ("reported", "peer", "has_key", "why"),
    [
        (KvAddress("10.9.0.2", 5558), "10.0.0.2", False, "sends from 10.0.0.2"),
        (KvAddress("10.9.0.2", 5558), "", False, "a local socket"),
        (KvAddress("", 5558), "", True, "not an IP address"),
        (KvAddress("metadata.internal", 5558), "10.0.0.2", True, "not an IP address"),
        (KvAddress("169.254.169.254", 80), "10.0.0.2", True, "a different machine"),
        (KvAddress("127.0.0.1", 5558), "10.0.0.2", True, "a different machine"),
        (KvAddress("::1", 5558), "10.0.0.2", True, "a different machine"),
        (KvAddress("0.0.0.0", 5558), "10.0.0.2", True, "impossible to connect"),
        (KvAddress("224.0.0.1", 5558), "10.0.0.2", True, "impossible to connect"),
        (KvAddress("", 0), "10.0.0.2", True, "port 0"),
        (KvAddress("", 65536), "10.0.0.2", True, "port 65536"),
        (KvAddress("", 5558, -1), "10.0.0.2", True, "port -1"),
    ],
)
def test_other_addresses_are_refused(
    reported: KvAddress, peer: str, has_key: bool, why: str
) -> None:
    with pytest.raises(RefusedAddress, match=why):
        reported_endpoints(reported, peer, has_key=has_key)


@pytest.mark.parametrize(
    ("says", "nodes"),
    [
        ({"attn_dp_size": 8, "nnodes": 1}, [0] * 8),
        ({"attn_dp_size": 8, "nnodes": 4}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"attn_dp_size": 2, "nnodes": 4, "tp_size": 16}, [0, 2]),
        ({"attn_dp_size": 2, "nnodes": 4, "pp_size": 2}, [0, 1]),
        ({"attn_dp_size": 2, "nnodes": 2, "pp_size": 2}, [0, 0]),
        # Before 0.5.22.
        ({"dp_size": 2, "enable_dp_attention": True, "nnodes": 2}, [0, 1]),
        # Replicas, each of which is laid over all nodes.
        ({"attn_dp_size": 1, "dp_size": 2, "nnodes": 2}, [0, 0]),
        ({"attn_dp_size": 2, "nnodes": -3}, [0, 0]),
        ({"attn_dp_size": 2, "nnodes": "4"}, [0, 0]),
    ],
)
def test_which_node_a_rank_is_on(says: dict[str, Any], nodes: list[int]) -> None:
    info = parse_server_info({"version": "0.5.23", **says}, "prefill")
    assert [node_of_rank(info, rank) for rank in range(info.dp_size)] == nodes


def test_the_address_survives_the_wire_and_older_plugins_send_none() -> None:
    report = report_of(1, kv_address=KvAddress("10.0.0.2", 5558, 5658))
    assert decode_endforward(encode_endforward(report)) == report
    assert decode_endforward(encode_endforward(report_of(1))).kv_address is None


# From the message to the sockets ------------------------------------------------------------------


def report_of(rank: int, *, boot: str = "node-1", **fields: Any) -> EndForward:
    values = {"role": "prefill", "dp_rank": rank, "dp_size": 2, "seq": 0, "kind": "heartbeat"}
    return EndForward(**{"instance_id": URL, "boot_id": boot, **values, **fields})


class System:
    """A worker whose second rank publishes on another node, and all that hears of it."""

    def __init__(self, *, nodes: int = 2, patience_s: float = 10.0) -> None:
        first = free_ports(4)[0]
        self.source = KvEventsBlock(port=first, replay_port=first + 2, block_tokens=4)
        self.info = WorkerInfo(
            dp_size=2,
            nodes=nodes,
            page_size=4,
            kv_events=self.source,
            sbs=SbsBlock(boot_id="node-0"),
        )
        self.events: list[Event] = []
        self.registry = Registry(WorkerEvents(self._emit), prefix_source="auto")
        self.listener = EndForwardListener(
            self.registry, self.events.append, lambda _rid, _role: None
        )
        self.subscriber = KvEventSubscriber(
            self.registry, self.events.append, KvTimes(tick_s=0.02, patience_s=patience_s)
        )
        self.worker = self.registry.add(URL, "prefill")
        self.described(self.info)
        self.registry.set_healthy(self.worker, True)

    def described(self, info: WorkerInfo) -> None:
        """Describe the worker like the monitor."""
        self.registry.described(self.worker, info)
        self.listener.described(self.worker, info)

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, InstanceUp):
            self.subscriber.up(self.worker)
        if isinstance(event, InstanceDown):
            self.subscriber.down(self.worker)

    def publisher(self, rank: int, host: str) -> KvPublisher:
        port, replay_port = self.source.port + rank, self.source.port + 2 + rank
        return KvPublisher(port, replay_port, dp_rank=rank, host=host)

    @property
    def address(self) -> KvAddress:
        """Return the second rank's address."""
        return KvAddress("", self.source.port + 1, self.source.port + 3)

    def says(self, peer: str = SECOND_NODE, **fields: Any) -> None:
        report = report_of(1, **{"kv_address": self.address, **fields})
        self.listener.receive(encode_endforward(report), peer)

    def connected_to(self) -> list[str]:
        return [rank.endpoints.live for rank in self.subscriber._instances[URL].ranks]

    def held(self, rank: int) -> set[int]:
        blocks: set[int] = set()
        for event in self.events:
            if isinstance(event, BlocksCleared) and event.dp_rank == rank:
                blocks.clear()
            elif isinstance(event, BlocksStored) and event.dp_rank == rank:
                blocks |= set(event.blocks)
            elif isinstance(event, BlocksRemoved) and event.dp_rank == rank:
                blocks -= set(event.blocks)
        return blocks


async def test_each_rank_is_subscribed_to_and_replayed_at_its_own_node() -> None:
    system = System()
    here, there = system.publisher(0, "127.0.0.1"), system.publisher(1, SECOND_NODE)
    await here.start()
    await there.start()
    try:
        here.publish(stored(1))
        there.publish(stored(7, 8))
        system.says()
        await until(lambda: (system.held(0), system.held(1)) == ({1}, {7, 8}))
        there.publish(removed(7), lose=True)
        there.publish(stored(9))
        await until(lambda: system.held(1) == {8, 9})
        assert there.replays >= 2
        assert system.subscriber.counts_of(URL, 1)["gaps"] == 1
        assert system.subscriber.counts_of(URL, 1)["lost"] == 0
    finally:
        await system.subscriber.close()
        here.stop()
        there.stop()


async def test_a_connection_that_stands_is_kept_and_another_boot_is_followed_anew() -> None:
    system = System()
    there = system.publisher(1, SECOND_NODE)
    own, second = f"tcp://127.0.0.1:{there.port}", f"tcp://{SECOND_NODE}:{there.port}"
    await there.start()
    try:
        system.says()
        await until(lambda: system.connected_to()[1] == second)
        await until(lambda: system.subscriber._instances[URL].ranks[1].connected)
        system.says(peer="127.0.0.3", seq=1)
        await asyncio.sleep(0.2)
        assert system.connected_to()[1] == second
        # The engine starts anew, and this node is another machine now.
        system.described(WorkerInfo(dp_size=2, sbs=SbsBlock(boot_id="node-0-again")))
        assert system.worker.kv_endpoints == {}
        assert URL not in system.subscriber._instances
        again = SbsBlock(boot_id="node-0-again")
        system.described(
            WorkerInfo(dp_size=2, nodes=2, page_size=4, kv_events=system.source, sbs=again)
        )
        system.registry.refresh(system.worker)
        assert system.connected_to()[1] == own
        system.says(peer="127.0.0.3", boot="node-1-again")
        await until(lambda: system.connected_to()[1] == f"tcp://127.0.0.3:{there.port}")
    finally:
        await system.subscriber.close()
        there.stop()


async def test_where_nothing_answers_the_next_word_is_followed() -> None:
    system = System()
    try:
        system.says(peer="127.0.0.3")
        await until(lambda: "127.0.0.3" in system.connected_to()[1])
        system.says(seq=1)
        await until(lambda: SECOND_NODE in system.connected_to()[1])
    finally:
        await system.subscriber.close()


async def test_an_engine_on_one_node_cannot_send_the_router_elsewhere() -> None:
    system = System(nodes=1)
    try:
        system.says()
        await asyncio.sleep(0.1)
        assert system.connected_to()[1] == f"tcp://127.0.0.1:{system.source.port + 1}"
        assert system.worker.kv_endpoints == {}
    finally:
        await system.subscriber.close()


async def test_a_message_that_is_not_believed_tells_nothing() -> None:
    system = System()
    try:
        system.says()
        # Another boot, while the present one speaks.
        system.says(peer="127.0.0.3", boot="forged", seq=1)
        assert system.worker.kv_endpoints[1].live == f"tcp://{SECOND_NODE}:{system.source.port + 1}"
    finally:
        await system.subscriber.close()


@pytest.mark.parametrize(
    ("host", "hint"),
    [
        (None, "it needs the plugin and SGLANG_SBS_ROUTERS"),
        ("10.9.0.2", "ENDFORWARD_KEY_FILE"),
    ],
)
async def test_what_cannot_be_had_is_named_with_its_rank_and_node(
    host: str | None, hint: str
) -> None:
    system = System(patience_s=0.2)
    here = system.publisher(0, "127.0.0.1")
    await here.start()
    try:
        system.says(kv_address=None if host is None else KvAddress(host, 5558))
        await until(lambda: "kv_events" in system.worker.problems)
        problem = system.worker.problems["kv_events"]
        assert f"rank 1 at tcp://127.0.0.1:{system.source.port + 1}" in problem
        assert "rank 0" not in problem
        assert "on node 1" in problem
        assert hint in problem
    finally:
        await system.subscriber.close()
        here.stop()


# Who speaks, from the socket ----------------------------------------------------------------------


@contextmanager
def speaking(endpoint: str, secret: str = "") -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.PUB)
    sock.setsockopt(zmq.LINGER, 0)
    if secret:
        keys_of(secret).connect(sock)
    # libzmq's way to choose the address to connect from.
    sock.connect(endpoint.replace("tcp://", f"tcp://{SECOND_NODE}:0;"))
    try:
        yield sock
    finally:
        sock.close(0)
        context.term()


@pytest.mark.parametrize(
    ("host", "secret", "expected"),
    [
        ("", "", SECOND_NODE),
        (SECOND_NODE, "", SECOND_NODE),
        ("10.9.0.2", "", None),
        ("10.9.0.2", "s" * 40, "10.9.0.2"),
    ],
)
async def test_the_listener_sees_where_messages_come_from(
    host: str, secret: str, expected: str | None
) -> None:
    system = System()
    keys = keys_of(secret) if secret else None
    endpoint = system.listener.open(f"tcp://127.0.0.1:{free_ports(1)[0]}", keys)
    assert endpoint is not None
    reported = KvAddress(host, system.source.port + 1, system.source.port + 3)
    try:
        with speaking(endpoint, secret) as sock:
            async with asyncio.timeout(20):
                seq = 0
                while not (system.worker.kv_endpoints or system.worker.kv_refused):
                    sock.send_multipart(
                        encode_endforward(report_of(1, seq=seq, kv_address=reported))
                    )
                    seq += 1
                    await asyncio.sleep(0.01)
        if expected is None:
            assert "sends from 127.0.0.2" in system.worker.kv_refused[1]
        else:
            live = f"tcp://{expected}:{system.source.port + 1}"
            assert system.worker.kv_endpoints[1].live == live
    finally:
        system.listener.close()
        await system.subscriber.close()
