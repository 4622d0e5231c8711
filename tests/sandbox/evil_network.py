"""Attacks by sockets: each reaches a listener of the test, or makes a socket that could."""

from __future__ import annotations

import errno
import os
import socket

from tests.sandbox.evil_calls import Target, attack, call, optional, privileged

_IPPROTO_MPTCP = 262
_AF_VSOCK, _AF_ALG, _AF_PACKET = 40, 38, 17


def _connected(family: int, kind: int, protocol: int, address: object) -> None:
    with socket.socket(family, kind, protocol) as sock:
        sock.settimeout(10)
        sock.connect(address)  # type: ignore[arg-type]


@attack
def tcp(target: Target) -> None:
    _connected(socket.AF_INET, socket.SOCK_STREAM, 0, ("127.0.0.1", target.tcp))


@optional
def mptcp(target: Target) -> None:
    _connected(socket.AF_INET, socket.SOCK_STREAM, _IPPROTO_MPTCP, ("127.0.0.1", target.tcp))


@attack
def udp(target: Target) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"evil", ("127.0.0.1", target.udp))


@attack
def unix_stream(target: Target) -> None:
    _connected(socket.AF_UNIX, socket.SOCK_STREAM, 0, target.stream)


@attack
def unix_datagram(target: Target) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"evil", target.datagram)


@attack
def unix_abstract(target: Target) -> None:
    _connected(socket.AF_UNIX, socket.SOCK_STREAM, 0, "\0" + target.abstract)


def _pair_of_datagrams() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)


@attack
def unix_datagram_of_a_pair(target: Target) -> None:
    """A socket of a pair is connected, but a datagram may go to any other address."""
    one, other = _pair_of_datagrams()
    with one, other:
        one.sendto(b"evil", target.datagram)


@attack
def unix_message_of_a_pair(target: Target) -> None:
    one, other = _pair_of_datagrams()
    with one, other:
        one.sendmsg([b"evil"], [], 0, target.datagram)


@attack
def unix_datagram_of_a_pair_with_flags(target: Target) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    with one, other:
        one.sendto(b"evil", target.datagram)


@attack
def unix_raw_pair(target: Target) -> None:
    """For UNIX sockets the kernel takes SOCK_RAW for datagrams."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)
    with one, other:
        one.sendto(b"evil", target.datagram)


@attack
def listen(target: Target) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()


@attack
def listen_on_a_path(target: Target) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(os.path.join(target.folder, "listens"))
        sock.listen()


@attack
def connect_a_socket_of_a_pair(target: Target) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        address = b"\1\0" + target.stream.encode() + b"\0"
        call("connect", one.fileno(), address, len(address), reaches=(errno.EISCONN,))


@attack
def bind_a_socket_of_a_pair(target: Target) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        address = b"\1\0" + os.path.join(target.folder, "bound").encode() + b"\0"
        call("bind", one.fileno(), address, len(address))


@attack
def netlink(target: Target) -> None:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()


@privileged
def raw_ip(target: Target) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()


@optional
def raw_packets(target: Target) -> None:
    socket.socket(_AF_PACKET, socket.SOCK_RAW, 0).close()


@optional
def vsock(target: Target) -> None:
    socket.socket(_AF_VSOCK, socket.SOCK_STREAM).close()


@optional
def crypto_sockets(target: Target) -> None:
    socket.socket(_AF_ALG, socket.SOCK_SEQPACKET).close()


@optional
def ipv6(target: Target) -> None:
    socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()


@attack
def pair_of_another_family(target: Target) -> None:
    """The kernel refuses it, too, but only after it has made the sockets."""
    call("socketpair", socket.AF_INET, socket.SOCK_STREAM, 0, bytes(8), reaches=(errno.EOPNOTSUPP,))
