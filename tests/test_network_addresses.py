"""What counts as one address."""

from __future__ import annotations

import pytest

from omni_actors.network_addresses import counted_address


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1:2:3", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("a name", "a name"),
    ],
)
def test_the_counted_address(host: str, counted: str) -> None:
    assert counted_address(host) == counted
