"""Hosts the store of a process group, and keeps name servers out of its way.

torch's server looks up the name of each process that connects to it, and answers no one meanwhile (2.13:
`getnameinfo` in its only thread). Its own socket takes IPv6 and IPv4, so that an IPv4 peer has an address like
``::ffff:127.0.0.1``, which no /etc/hosts knows: each connection asks the name server, and one lost packet holds up all
ranks for 5 s. A socket for IPv4 alone has addresses that /etc/hosts knows, this machine's own at least. The client does
the same look-up, always as IPv6, but holds up no other process.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

__all__ = ["ask_again_soon", "host_store"]


def ask_again_soon() -> None:
    """This process and those that it starts ask a name server that does not answer again after 1 s, five times, where
    glibc waits 5 s, and asks twice. For resolvers that have not begun yet; what the user has set stays."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


def host_store(address: str, **more: Any) -> Any:
    """A `torch.distributed.TCPStore` at any free port, of which this process is the host. `address`: the name or number
    under which the others reach this machine. `more`: for torch. Raises what torch raises."""
    import torch.distributed as dist

    ask_again_soon()
    if _is_ipv4(address):
        with suppress(OSError):  # then torch says what is wrong
            listener = socket.create_server(("0.0.0.0", 0))
            port, fd = int(listener.getsockname()[1]), listener.detach()
            try:
                return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd, **more)
            except NotImplementedError:  # torch 2.6 with its default server: a socket of torch's own, then
                os.close(fd)
    return dist.TCPStore(address, 0, None, True, wait_for_workers=False, **more)


def _is_ipv4(address: str) -> bool:
    """Whether `address` is known as one of IPv4 alone."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return {family for family, *_ in found} == {socket.AF_INET}
