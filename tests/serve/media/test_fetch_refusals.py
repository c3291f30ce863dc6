"""All that the fetcher must not fetch.

Rules
1. A test that may connect to this machine shows this in the addresses that it allows; the attacks run under the policy
   that a server has, against a server that counts its connections.
2. Names are resolved by the test (trio's own hook), so that they lead where an attacker would have them lead.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from omni_actors.serve.media.fetch import MAX_URL, Fetcher, is_public
from tests.serve.media.local_site import HOST, LOOPBACK, Names, Site, fetch, fetcher, guarded, moved, ok, refusal


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png",
        "http://files.example.org.evil.org/a.png",
        "http://evil-files.example.org/a.png",
        "http://evil.files.example.org/a.png",
        "http://files.example.org./a.png",
        "http://files.example.org:8080/a.png",
        "http://files.example.org:22/a.png",
        "http://files.example.org:0/a.png",
        "http://evil.org#files.example.org/a.png",
        "http://evil.org?files.example.org/a.png",
        "http://evil.org;files.example.org/a.png",
        "http://files。example。org/a.png",
        "http:/files.example.org/a.png",
        "http:files.example.org",
        "http:///a.png",
        "http://",
        "https:",
        "http://[::1]/a.png",
        "http://[::ffff:127.0.0.1]/a.png",
        "http://127.0.0.1/a.png",
        "http://127.1/a.png",
        "http://2130706433/a.png",
        "http://0x7f000001/a.png",
        "http://0177.0.0.1/a.png",
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1.nip.io/a.png",
        # not a URL, or one that another reader would read differently
        "http://files.example.org:port/a.png",
        "http://files.example.org:99999/a.png",
        "http://[::1/a.png",
        "http://files.example.org\\@127.0.0.1/a.png",
        "http://127.0.0.1\t@files.example.org/a.png",
        "http://files.example.org/a.png HTTP/1.1\r\nHost: evil.org",
        "http://files.example.org/a\n.png",
        " http://files.example.org/a.png",
        f"http://files.example.org/{'a' * MAX_URL}",
        # credentials
        "http://user@files.example.org/a.png",
        "http://user:password@files.example.org/a.png",
        "http://@files.example.org/a.png",
        "http://evil.org@files.example.org/a.png",
    ],
)
async def test_urls_that_are_never_requested(site: Site, names: Names, url: str) -> None:
    assert (await refusal(guarded(site), url)).startswith("invalid_{}_url: ")
    assert (names.asked, site.connections) == ([], 0)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.0.0.53", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.1"),
        *("203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
        *("::1", "::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b:1::1"),
        *("fe80::1", "fe80::1%lo", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "100::1", "2001:db8::1"),
        *("2002:7f00:1::1", "2002:808:808::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
    ],
)
async def test_an_address_that_is_not_public(site: Site, names: Names, address: str) -> None:
    assert not is_public(ip_address(address))
    names.leads_to = [[address]]
    reason = await refusal(guarded(site), site.url())
    assert reason == "invalid_{}_url: its host name resolves to no public address"
    assert site.connections == 0


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.215.14", "172.32.0.1", "100.128.0.1", "2606:4700:4700::1111", "2a00:1450:4001::200e"]
)
def test_a_public_address(address: str) -> None:
    assert is_public(ip_address(address))


async def test_this_machine_by_its_name(site: Site) -> None:
    """With the machine's own resolver."""
    reason = await refusal(guarded(site), site.url(host="localhost"))
    assert reason == "invalid_{}_url: its host name resolves to no public address"
    assert site.connections == 0


async def test_of_several_addresses_only_those_that_are_allowed_are_connected_to(site: Site, names: Names) -> None:
    names.leads_to = [["::1", "10.0.0.1", "127.0.0.1"]]
    allowing = Fetcher([f"{HOST}:{site.port}"], lambda address: address == LOOPBACK)
    site.answers[b"/a.png"] = ok(b"here")
    assert await fetch(allowing, site.url()) == b"here"


async def test_a_name_that_resolves_differently_later_has_no_effect(site: Site, names: Names) -> None:
    """The fetcher connects to the checked address: it resolves the name once."""
    names.leads_to = [["127.0.0.1"], ["127.0.0.2"]]
    seen: list[str] = []

    def only_the_first(address: Any) -> bool:
        seen.append(str(address))
        return str(address) == "127.0.0.1"

    site.answers[b"/a.png"] = ok(b"here")
    assert await fetch(Fetcher([f"{HOST}:{site.port}"], only_the_first), site.url()) == b"here"
    assert (seen, len(names.asked)) == (["127.0.0.1"], 1)


async def test_a_name_that_resolves_to_a_private_address_at_the_redirect(site: Site, names: Names) -> None:
    """Each connection is checked, also to the same host."""
    names.leads_to = [["127.0.0.1"], ["10.0.0.1"]]
    site.answers = {b"/a.png": moved("/b.png"), b"/b.png": ok(b"here")}
    allowing = Fetcher([f"{HOST}:{site.port}"], lambda address: address == LOOPBACK)
    assert "no public address" in await refusal(allowing, site.url())
    assert site.connections == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/b.png",
        "http://[::1]:{port}/b.png",
        "//localhost:{port}/b.png",
        "http://localhost:{port}/b.png",
        "http://other.example.org:{port}/b.png",
        "http://user:password@files.example.org:{port}/b.png",
        "http://files.example.org:22/b.png",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "ftp://files.example.org/b.png",
        "http://files.example.org:{port}\\@127.0.0.1/b.png",
        "http://[",
    ],
)
async def test_a_redirect_to_anywhere_else(site: Site, names: Names, location: str) -> None:
    """Also to another allowed host. The error does not reveal the target."""
    site.answers = {b"/a.png": moved(location.format(port=site.port)), b"/b.png": ok(b"here")}
    allowing = fetcher(site, f"localhost:{site.port}", f"other.example.org:{site.port}")
    reason = await refusal(allowing, site.url())
    assert reason.startswith("failed_to_download_{}: the redirect leads to ")
    assert not any(word in reason for word in ("localhost", "127", "example", "passwd", str(site.port)))
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "domain",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "1.0x7f", "[::1]", "::1", "10.0.0.1:80"),
        *("", "*", "*.example.org", ".org", "example..org", "example.org.", "http://example.org", "example.org/x"),
        *("example.org:", "example.org:0", "example.org:65536", "example.org:http", "user@example.org", "exämple.org"),
        *("example.org\n", " example.org", "a" * 64 + ".org", "a." * 127 + "org"),
    ],
)
def test_an_invalid_domain(domain: str) -> None:
    with pytest.raises(ValueError, match="is not a domain"):
        Fetcher([domain])


@pytest.mark.parametrize(
    ("domains", "url", "allowed"),
    [
        (["files.example.org"], "http://files.example.org/", True),
        (["files.example.org"], "https://files.example.org/", True),
        (["files.example.org"], "http://files.example.org:443/", True),
        (["Files.Example.Org"], "http://files.example.org/", True),
        (["files.example.org:8443"], "https://files.example.org:8443/", True),
        (["files.example.org:8443"], "https://files.example.org/", False),
        (["files.example.org:8443", "files.example.org"], "https://files.example.org/", True),
        ([], "https://files.example.org/", False),
    ],
)
async def test_a_port_goes_with_its_domain(names: Names, domains: list[str], url: str, allowed: bool) -> None:
    names.leads_to = [[]]
    reason = await refusal(Fetcher(domains), url)
    assert ("does not resolve" in reason) == allowed == bool(names.asked)
