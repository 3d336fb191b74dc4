"""Event loops that wait instead of spinning, so that several engines share a few cores.

Must not change what any of them does with a request. SGLang's own `--sleep-on-idle` is no
substitute under DP attention: ranks sleep on their own sockets while a peer waits for them in a
collective.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

# How long an idle rank waits before it looks around by itself.
IDLE_WAIT_S = 0.5
# How often an idle rank runs SGLang's idle housekeeping (leak checks, metrics, load snapshot).
HOUSEKEEPING_INTERVAL_S = 1.0
# Pause between polls while a bootstrap or KV transfer is pending (SGLang polls without one). It
# lasts this share of a decode step where that is longer: each poll is a collective of all ranks.
BUSY_POLL_S = 0.001
BUSY_POLL_SHARE = 0.05
CONTROLLER_POLL_MS = 200
RING_WAIT_MS = 1000


def install(decode_step_s: float = 0.0) -> None:
    """Install the waits. A virtual decode step takes at least `decode_step_s`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    managers = "sglang.srt.managers"
    IdleWaiter.busy_poll_s = max(BUSY_POLL_S, BUSY_POLL_SHARE * decode_step_s)
    controller_loop = f"{managers}.data_parallel_controller.DataParallelController.event_loop"
    HookRegistry.register(controller_loop, run_controller_loop, HookType.REPLACE)
    HookRegistry.register(f"{managers}.scheduler.Scheduler.on_idle", wait_on_idle, HookType.AROUND)


def run_controller_loop(controller: Any) -> None:
    """`DataParallelController.event_loop` (0.5.22+) with a poll where the original spins."""
    import zmq
    from sglang.srt.managers.data_parallel_controller import sock_recv

    while True:
        controller.soft_watchdog.feed()
        if not controller.recv_from_tokenizer.poll(CONTROLLER_POLL_MS):
            continue
        while True:
            try:
                request = sock_recv(controller.recv_from_tokenizer, flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            controller._request_dispatcher(request)


def wait_on_idle(on_idle: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Around `Scheduler.on_idle`: housekeeping as often as useful, then wait for work."""
    waiter: IdleWaiter | None = getattr(scheduler, "_sglang_sbs_idle_waiter", None)
    if waiter is None:
        waiter = scheduler._sglang_sbs_idle_waiter = IdleWaiter(scheduler)
    busy = not scheduler.is_fully_idle()
    if waiter.is_housekeeping_due(busy):
        on_idle(scheduler, *args, **kwargs)
    waiter.wait(busy)


class RingBell:
    """Makes the request ring of SGLang's Rust server (`RustServer.wait_request`) pollable.

    The ring can only be waited for by blocking on it; a thread does that and writes to a pipe.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._wanted = threading.Event()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        threading.Thread(target=self._watch, name="sbs-ring-bell", daemon=True).start()

    def fileno(self) -> int:
        """Readable once requests are in the ring (or the thread has looked for a while)."""
        return self._read_end

    def listen(self) -> None:
        self._wanted.set()

    def silence(self) -> None:
        """Take back what was rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 64)

    def _watch(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            self._server.wait_request(RING_WAIT_MS)
            os.write(self._write_end, b"!")


class IdleWaiter:
    """The wait of one scheduler process between passes of an idle loop.

    Under DP attention (and with `--tp` > 1) every loop iteration has a collective, so a rank that
    got work must wake the others. Each wake-up datagram carries the number of the idle pass it is
    for: the collective keeps that number equal on all ranks, hence a wake-up for a pass already
    left is recognised and dropped.
    """

    busy_poll_s = BUSY_POLL_S

    def __init__(self, scheduler: Any) -> None:
        import zmq
        from sglang.srt.runtime_context import get_parallel, get_serving

        parallel = get_parallel()
        # Without DP attention, DP replicas of one server run their loops independently.
        replica = 0 if parallel.attn_dp_size > 1 else parallel.dp_rank or 0
        group = f"\0sglang-sbs.{os.getuid()}.{get_serving().port}.{replica}."
        ranks = range(parallel.tp_size)
        self._peer_addresses = [group + str(rank) for rank in ranks if rank != parallel.tp_rank]
        self._wake_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._wake_socket.setblocking(False)
        self._wake_socket.bind(group + str(parallel.tp_rank))
        self._poller = zmq.Poller()
        self._poller.register(self._wake_socket.fileno(), zmq.POLLIN)
        # Ranks that do not receive requests have None, or a stub without poll, here.
        source = getattr(scheduler, "recv_from_tokenizer", None)
        self._bell = RingBell(source) if hasattr(source, "wait_request") else None
        if self._bell is not None:
            # It sleeps on its own ring alone, while its peers wait for it in the collective.
            scheduler.idle_sleeper = None
        # What the poller knows requests by: a ZeroMQ socket, a file descriptor, or nothing.
        self._requests = source if hasattr(source, "poll") else None
        if self._bell is not None:
            self._requests = self._bell.fileno()
        if self._requests is not None:
            self._poller.register(self._requests, zmq.POLLIN)
        self._idle_pass = 0
        self._was_busy = True
        self._last_housekeeping_s = 0.0

    def is_housekeeping_due(self, busy: bool) -> bool:
        """True while work is pending, right after it ended, and every now and then."""
        now = time.monotonic()
        due = busy or self._was_busy or now - self._last_housekeeping_s > HOUSEKEEPING_INTERVAL_S
        if due:
            self._last_housekeeping_s = now
        self._was_busy = busy
        return due

    def wait(self, busy: bool) -> None:
        """Return when a request or a peer's wake-up arrives, or the wait is over."""
        self._idle_pass += 1
        if busy:
            self._wake_peers()
        if self._bell is not None:
            self._bell.listen()
        deadline_s = time.monotonic() + (self.busy_poll_s if busy else IDLE_WAIT_S)
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready = dict(self._poller.poll(max(1, int(left_s * 1000))))
            woken = self._drain_wake_ups()
            if self._requests is not None and self._requests in ready:
                if self._bell is not None:
                    self._bell.silence()
                self._wake_peers()
                return
            if woken:
                return

    def _drain_wake_ups(self) -> bool:
        current = False
        while True:
            try:
                message = self._wake_socket.recv(8)
            except BlockingIOError:
                return current
            current |= int.from_bytes(message, "big") >= self._idle_pass

    def _wake_peers(self) -> None:
        message = self._idle_pass.to_bytes(8, "big")
        for address in self._peer_addresses:
            try:
                self._wake_socket.sendto(message, address)
            except OSError:
                # The peer is not up yet or its queue is full of wake-ups; it polls by itself.
                continue
