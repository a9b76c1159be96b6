"""All connections of a server, behind one selector: the server never waits for one peer while another has a message."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from minipar.server.connection import Peer, Refused
from minipar.server.framing import MOST_TEXT, Message, What

Target = Callable[[Peer, Message], memoryview]
Done = Callable[[Peer, Message], None]


class Switchboard:
    """The peers that have connected to a listening socket.

    target, done   as in Peer
    gone           called when a connection has ended
    """

    def __init__(
        self, listener: socket.socket, token: bytes, target: Target, done: Done, gone: Callable[[Peer], None]
    ) -> None:
        self.listener, self.token, self.target, self.done, self.gone = listener, token, target, done, gone
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.peers: set[Peer] = set()
        self.writing: set[Peer] = set()  # those for which the selector also waits for room to write

    def wait(self, seconds: float) -> None:
        """Wait until something arrives or can be written, at most so long, and handle it."""
        for key, events in self.selector.select(seconds):
            if key.fileobj is self.listener:
                self._accept()
            elif key.fileobj in self.peers:  # (an event before may have ended it)
                assert isinstance(key.fileobj, Peer)
                self._attend(key.fileobj, events)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        self.adopt(connection, self.token)

    def adopt(self, connection: socket.socket, token: bytes = b"") -> Peer:
        """Add a connection. Without a token it is one that this process has made itself, as a client."""
        peer = Peer(connection, token, self.target, self.done)
        self.selector.register(peer, selectors.EVENT_READ)
        self.peers.add(peer)
        self._watch(peer)
        return peer

    def _attend(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                peer.read()
        except Refused as error:
            if str(error):
                peer.send(Message(What.REFUSED), str(error).encode()[:MOST_TEXT])
            peer.ended = True
        if peer.ended:
            self.drop(peer)
            self.gone(peer)
        else:
            self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        """Let the selector wait for room to write only if something is to be written."""
        if peer.busy is not (peer in self.writing) and peer in self.peers:
            self.writing.symmetric_difference_update((peer,))
            self.selector.modify(peer, selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.busy else 0))

    def send(
        self,
        peer: Peer | None,
        message: Message,
        data: memoryview | bytes = b"",
        written: Callable[[], None] | None = None,
    ) -> None:
        """Send a message to a peer, if it is connected; see `Peer.send`."""
        if peer is not None and not peer.ended:
            peer.send(message, data, written)
            self._watch(peer)

    def drop(self, peer: Peer) -> None:
        """End a connection."""
        if peer in self.peers:
            self.selector.unregister(peer)
            self.peers.remove(peer)
            self.writing.discard(peer)
        peer.close()

    def close(self) -> None:
        for peer in list(self.peers):
            self.drop(peer)
        self.selector.close()
        self.listener.close()
