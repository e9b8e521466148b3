"""The virtual GPU node's process: takes launches, moves the timeline, answers who waits.

    python -m vgpu.device.node --state STATE --socket SOCKET --truth TRUTH

It says "ready" on its standard output, and ends on SIGTERM, SIGINT or the end of its standard
input; then it writes the truth. It sleeps until something is due: with work on the GPUs, every
TICK_NS or at the next edge; else until a client rings.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vgpu.device.desk import QUESTIONS, Client, Message, new_context
from vgpu.device.kinds import Activities
from vgpu.device.lane import FAR_NS, Lane
from vgpu.device.ledger import Ledger
from vgpu.device.machine import Device, Machine
from vgpu.device.publish import TICK_NS, Publisher
from vgpu.device.wire import Code
from vgpu.state import StateFile

# A client whose node gave no sign of life for longer rings, and learns whether it is there.
HEARTBEAT_NS = 250_000_000
_PR_SET_TIMERSLACK = 29
_BACKLOG = 64
_NS_PER_S = 1e9


class Node:
    """The GPUs of state files, one after the other, served at a socket.

    Several files are several machines to readers of NVML, and one to those who use the GPUs.
    """

    def __init__(self, states: Sequence[StateFile], listener: socket.socket, truth: Path) -> None:
        now_ns = time.monotonic_ns()
        self._listener, self._truth = listener, truth
        self._activities = Activities()
        gpus = [gpu for state in states for gpu in state.gpus]
        devices = [
            Device(
                slot=gpu.slot,
                multiprocessors=gpu.multiprocessors,
                pcie_generation=gpu.pcie_generation,
            )
            for gpu in gpus
        ]
        self._machine = Machine(devices, self._activities)
        self._publishers = [
            Publisher(gpu, device, self._activities, now_ns)
            for gpu, device in zip(gpus, devices, strict=True)
        ]
        self._ledger = Ledger()
        self._clients: dict[int, Client] = {}  # by both of their descriptors
        self._proxies: dict[tuple[int, int], Client] = {}  # by group and rank
        self._poll = select.epoll()
        self._poll.register(listener.fileno(), select.EPOLLIN)
        self._floor_ns = now_ns  # everything before is final
        self._launching = False
        self._stops: set[int] = set()
        self._stopping = False

    def stop_on(self, file: int) -> None:
        """Ends when this descriptor has something to read, or its end."""
        self._poll.register(file, select.EPOLLIN)
        self._stops.add(file)

    def serve(self) -> None:
        """Until it is told to stop; then the truth is written."""
        while not self._stopping:
            self._sleep()
            self._round()
        self._ledger.write(self._truth, self._lanes(), self._floor_ns)
        for client in self._all():
            client.close()

    def _lanes(self) -> list[Lane]:
        return [lane for context in self._machine.contexts() for lane in context.lanes.values()]

    def _all(self) -> list[Client]:
        return list(dict.fromkeys(self._clients.values()))

    def _sleep(self) -> None:
        """Until the next thing that is due, or until somebody calls."""
        now_ns = time.monotonic_ns()
        due_ns = min(publisher.due_ns for publisher in self._publishers)
        due_ns = min(due_ns, self._machine.next_arrival_ns())
        for client in self._all():
            if client.asking is not None:
                at_ns = client.due_ns(now_ns)
                due_ns = min(due_ns, FAR_NS if at_ns is None else at_ns)
        if self._launching:  # more launches are likely: take them by the tick, without doorbells
            due_ns = min(due_ns, now_ns + TICK_NS)
        elif due_ns - now_ns > TICK_NS:
            if not self._doze(now_ns):
                return
            if self._clients:
                due_ns = min(due_ns, now_ns + HEARTBEAT_NS)
        if due_ns > now_ns:
            # epoll's own timeout is in whole milliseconds, select's in microseconds.
            timeout_s = None if due_ns == FAR_NS else (due_ns - now_ns) / _NS_PER_S
            select.select([self._poll.fileno()], [], [], timeout_s)

    def _doze(self, now_ns: int) -> bool:
        """Asks for doorbells; False if a launch came in just before."""
        contexts = list(self._machine.contexts())
        for context in contexts:
            context.ring.tell(asleep=True, heartbeat_ns=now_ns, done=context.done)
        return all(context.ring.head() == context.taken for context in contexts)

    def _round(self) -> None:
        self._receive()
        now_ns = time.monotonic_ns()
        changed = self._drain(now_ns)
        self._launching = bool(changed)
        changed |= self._machine.advance(now_ns)
        clients = self._all()
        changed |= self._moved(clients, now_ns)
        for client in clients:
            if client.context is None:
                continue
            # Who uses a GPU that falls off the bus loses its context, as with the real driver.
            client.gone = client.gone or self._publishers[client.context.gpu].lost
            if client.gone or client.inbox:
                changed.add(client.context.gpu)
        self._floor_ns = now_ns
        for slot, publisher in enumerate(self._publishers):
            if publisher.due_ns <= now_ns or slot in changed:
                publisher.sweep(now_ns, self._ledger)
        for client in clients:
            if client.gone:
                self._bury(client, now_ns)
            elif client.asking is None and client.inbox:
                self._answer(client, client.inbox.popleft(), now_ns)
        for publisher in self._publishers:
            if publisher.swept_ns == now_ns:
                publisher.publish()
        self._release(clients, now_ns)

    def _receive(self) -> None:
        for file, _ in self._poll.poll(0):
            if file in self._stops:
                self._stopping = True
            elif file == self._listener.fileno():
                self._admit()
            elif (client := self._clients.get(file)) is not None:
                if file == client.life:
                    client.gone = True
                else:
                    client.read()

    def _admit(self) -> None:
        client = Client.accept(self._listener)
        if client is not None:
            for file in (client.line.fileno(), client.life):
                self._clients[file] = client
                self._poll.register(file, select.EPOLLIN)

    def _drain(self, now_ns: int) -> set[int]:
        """Takes the launches of all clients; the GPUs they are for."""
        changed = set()
        for context in self._machine.contexts():
            head = context.ring.head()
            if head == context.taken:
                continue
            ops = context.ring.take(context.taken, head)
            context.taken = head
            for op in ops:
                context.accept(op, self._floor_ns, now_ns)
            changed.add(context.gpu)
            if any(op.code == Code.MEMORY for op in ops):
                self._publishers[context.gpu].processes()
        return changed

    def _moved(self, clients: list[Client], now_ns: int) -> set[int]:
        """Hears what proxies have moved, tells them what to move; the GPUs where that matters."""
        changed: set[int] = set()
        for client in clients:
            while client.inbox and client.inbox[0].get("ask") == "moved":
                told = client.inbox.popleft()
                changed |= self._machine.moved(told["group"], told["rank"], now_ns)
        if changed:
            changed |= self._machine.advance(now_ns)
        moves, self._machine.moves = self._machine.moves, []
        for move in moves:
            proxy = self._proxies.get((move.group, move.rank))
            if proxy is not None:  # without one nothing ever moves, as with a dead proxy thread
                proxy.reply(size_bytes=move.size_bytes, passes=move.passes)
        return changed

    def _bury(self, client: Client, now_ns: int) -> None:
        """Its context and everything it had queued are gone."""
        for file in (client.line.fileno(), client.life):
            self._poll.unregister(file)
            del self._clients[file]
        for key in [key for key, proxy in self._proxies.items() if proxy is client]:
            del self._proxies[key]
        client.close()
        context = client.context
        if context is not None:
            self._ledger.leave(context, now_ns)
            self._machine.kill(context, now_ns)
            self._publishers[context.gpu].processes()

    def _answer(self, client: Client, message: Message, now_ns: int) -> None:
        ask = message.get("ask")
        context = client.context
        if ask == "hello" and context is None:
            self._welcome(client, message, now_ns)
        elif ask == "truth":
            self._ledger.write(Path(message["path"]), self._lanes(), now_ns)
            client.reply(ok=True)
        elif ask == "proxy":
            self._proxies[message["group"], message["rank"]] = client
            client.reply(ok=True)
        elif context is None:
            client.reply(error="say hello first")
        elif ask == "group":
            number = self._machine.join(context, message["name"], message["rank"], message["size"])
            self._ledger.group(number, message["name"])
            client.reply(group=number)
        elif ask == "query":
            at_ns = context.token_ns(message["token"])
            client.reply(done=at_ns is not None and at_ns <= now_ns)
        elif ask in QUESTIONS:
            client.asking = message
        else:
            client.reply(error=f"no such request: {ask!r}")

    def _welcome(self, client: Client, message: Message, now_ns: int) -> None:
        gpu = message["gpu"]
        if not 0 <= gpu < len(self._publishers):
            client.reply(error=f"there is no GPU {gpu}: this node has {len(self._publishers)}")
            return
        publisher = self._publishers[gpu]
        if publisher.lost:
            client.reply(error=f"GPU {gpu} is lost")
            return
        publisher.sweep(now_ns, self._ledger)
        context, ring_file = new_context(client, gpu, message["memory_bytes"], now_ns)
        self._machine.devices[gpu].contexts.append(context)
        self._ledger.enter(context)
        publisher.processes()
        context.ring.tell(asleep=False, heartbeat_ns=now_ns, done=0)
        client.welcome(ring_file, gpu=gpu, uuid=publisher.uuid)
        os.close(ring_file)

    def _release(self, clients: list[Client], now_ns: int) -> None:
        """Answers whoever has waited long enough, and tells all how far the node is."""
        for client in clients:
            context = client.context
            if client.gone or context is None:
                continue
            context.ring.tell(asleep=False, heartbeat_ns=now_ns, done=context.done)
            if client.asking is not None:
                at_ns = client.due_ns(now_ns)
                if at_ns is not None and at_ns <= time.monotonic_ns():
                    client.asking = None
                    client.reply(done=context.done)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _wake_on_signals() -> socket.socket:
    """A descriptor that becomes readable with SIGTERM or SIGINT."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reading


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, action="append")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with _listen(options.socket) as listener, _wake_on_signals() as signals:
        node = Node([StateFile(path) for path in options.state], listener, options.truth)
        node.stop_on(signals.fileno())
        node.stop_on(sys.stdin.fileno())
        # What is made per launch has no cycles: counting references is enough, without pauses.
        gc.collect()
        gc.freeze()
        gc.disable()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        node.serve()


if __name__ == "__main__":
    main()
