"""The addresses of clients and nodes, as limits for one address count them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Network, ip_address

_TRANSLATED = IPv6Network("64:ff9b::/96")
"""The addresses as which a NAT64 shows IPv4 clients (RFC 6052)."""


def counted_address(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the /64 of an IPv6 address, all of which one client has.

    Text that is no IP address stays as it is.

    >>> counted_address("2001:db8::7:1")
    '2001:db8::/64'
    >>> counted_address("::ffff:192.0.2.1")
    '192.0.2.1'
    >>> counted_address("64:ff9b::192.0.2.1")
    '192.0.2.1'
    """
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address in _TRANSLATED:
        return str(IPv4Address(int(address) & 0xFFFFFFFF))
    return str(IPv6Network((int(address), 64), strict=False))
