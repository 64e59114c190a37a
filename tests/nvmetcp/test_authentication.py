"""DH-HMAC-CHAP: golden bytes from the figures of NVMe Base 2.0 §8.13.5, both ends together, and hostile peers."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import InvalidArgument
from forebay.ids import HostIdentity
from forebay.nvmetcp import groups, spec
from forebay.nvmetcp.authentication import (
    ALL_GROUPS,
    ALL_HASHES,
    AuthenticationFailed,
    ControllerAuthentication,
    HostAuthentication,
    Step,
)
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import AuthenticationFailure, DhchapHash, DhGroup

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
SUBSYSTEM = "nqn.2026-01.io.forebay:n1:acme"
KEY, OTHER_KEY = bytes(range(32)), bytes(range(64, 96))
ONE_WAY = HostSecrets(Secret(KEY))
BOTH_WAYS = HostSecrets(Secret(KEY), Secret(OTHER_KEY, DhchapHash.SHA512))
NULL = (DhGroup.NULL,)


def octets(text: str) -> bytes:
    return bytes.fromhex(text)


def counted(first: int) -> Callable[[int], bytes]:
    """Bytes that count up from ``first``, each call from where the last one ended."""
    numbers = itertools.count(first)
    return lambda length: bytes(next(numbers) & 0xFF for _ in range(length))


def pair(
    host: HostSecrets, controller: HostSecrets, *, transaction: int = 7, **options: object
) -> tuple[HostAuthentication, ControllerAuthentication]:
    return (
        HostAuthentication(host, HOST, SUBSYSTEM, transaction, random=counted(0x80), **options),  # type: ignore[arg-type]
        ControllerAuthentication(controller, HOST, SUBSYSTEM, random=counted(0x10), **options),  # type: ignore[arg-type]
    )


def fetch(controller: ControllerAuthentication) -> bytes:
    message = controller.due
    assert message is not None
    controller.delivered()
    return message


def run(host: HostAuthentication, controller: ControllerAuthentication) -> None:
    """The whole transaction, as queues carry it."""
    controller.received(host.start())
    while True:
        try:
            answer = host.received(fetch(controller))
        except AuthenticationFailed as failed:
            if failed.answer is not None:
                controller.received(failed.answer)
            raise
        if answer is None:
            return
        controller.received(answer)
        if host.step is Step.AUTHENTICATED:
            return


# --- secrets (Base §8.13.5.8) ---------------------------------------------------------------------------------------


def test_a_secret_is_written_with_its_hash_and_checksum() -> None:
    text = "DHHC-1:01:" + base64.b64encode(KEY + zlib.crc32(KEY).to_bytes(4, "little")).decode() + ":"
    assert Secret(KEY).text() == text
    assert Secret.parse(text + "\n") == Secret(KEY)
    assert Secret.parse(Secret(bytes(48), None).text()) == Secret(bytes(48), None)


def test_a_secret_is_bound_to_the_name_that_uses_it() -> None:
    assert Secret(KEY, None).bound_to(HOST) == KEY
    wanted = hmac.new(KEY, HOST.encode() + b"NVMe-over-Fabrics", hashlib.sha384).digest()
    assert Secret(KEY, DhchapHash.SHA384).bound_to(HOST) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "DHHC-1:",
        "DHHC-1:01:",
        Secret(KEY).text()[:-1],
        Secret(KEY).text().replace("DHHC-1", "DHHC-2"),
        Secret(KEY).text().replace(":01:", ":04:"),
        Secret(KEY).text().replace(":01:", ":1:"),
        Secret(KEY).text().replace(":01:", ":xx:"),
        "DHHC-1:01:" + base64.b64encode(KEY + bytes(4)).decode() + ":",
        "DHHC-1:01:" + base64.b64encode(KEY[:16] + zlib.crc32(KEY[:16]).to_bytes(4, "little")).decode() + ":",
        "DHHC-1:01:!" + Secret(KEY).text()[11:],
    ],
)
def test_what_is_no_secret_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Secret.parse(text)
    assert text.removeprefix("DHHC-1:01:")[:8] not in str(caught.value) or len(text) < 20


def test_no_key_is_shown() -> None:
    shown = repr(HostIdentity(HOST, "x", BOTH_WAYS)) + repr(BOTH_WAYS) + str(Secret(KEY))
    assert KEY.hex() not in shown and repr(KEY)[2:10] not in shown and "DHHC" not in shown


def test_a_new_secret_is_another_one_each_time() -> None:
    assert len({Secret.generate().key for _ in range(4)}) == 4
    assert all(len(Secret.generate().key) == 32 for _ in range(4))


# --- groups (RFC 7919) ----------------------------------------------------------------------------------------------

#: The last 32 bits above the 64 ones that each prime ends with, and its strength. RFC 7919 §A.
_TAILS = {
    DhGroup.FFDHE2048: 0x61285C97,
    DhGroup.FFDHE3072: 0x66C62E37,
    DhGroup.FFDHE4096: 0x5E655F6A,
    DhGroup.FFDHE6144: 0xD0E40E65,
    DhGroup.FFDHE8192: 0xC5C6424C,
}


@pytest.mark.parametrize("group", _TAILS)
def test_primes(group: DhGroup) -> None:
    prime = groups._prime(group)
    bits = int(group.name.removeprefix("FFDHE"))
    assert prime.bit_length() == bits == 8 * groups.public_bytes(group)
    assert prime >> (bits - 192) == 0xFFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1
    assert prime & ((1 << 96) - 1) == _TAILS[group] << 64 | (1 << 64) - 1


def test_the_smallest_prime_is_a_safe_one() -> None:
    prime = groups._prime(DhGroup.FFDHE2048)
    for base in (2, 3, 5, 7):
        assert pow(base, prime - 1, prime) == 1
        assert pow(base, (prime - 1) // 2 - 1, (prime - 1) // 2) == 1


@pytest.mark.parametrize("group", _TAILS)
def test_values_outside_the_group_are_refused(group: DhGroup) -> None:  # RFC 7919 §5.1
    exchange, prime, size = groups.Exchange(group), groups._prime(group), groups.public_bytes(group)
    for value in (0, 1, prime - 1, prime):
        assert exchange.shared(value.to_bytes(size, "big")) is None
    assert exchange.shared(b"") is None
    assert exchange.shared(b"\0" + exchange.public) is None


@pytest.mark.parametrize("group", _TAILS)
def test_both_ends_of_an_exchange_agree(group: DhGroup) -> None:
    one, other = groups.Exchange(group), groups.Exchange(group)
    assert one.shared(other.public) == other.shared(one.public)
    assert one.public != other.public


# --- golden messages ------------------------------------------------------------------------------------------------


def test_negotiate() -> None:  # §8.13.5.2
    host, _ = pair(ONE_WAY, ONE_WAY, transaction=0x1234)
    assert host.start() == octets("00 00 0000 3412 00 01") + octets("01 00 03 06 010203") + bytes(27) + octets(
        "000102030405"
    ) + bytes(24)


def test_one_way_transcript() -> None:  # §8.13.5.3 to §8.13.5.5
    host, controller = pair(ONE_WAY, ONE_WAY, hashes=(DhchapHash.SHA256,), groups=NULL)
    controller.received(host.start())
    challenge = fetch(controller)
    c1 = bytes(range(0x10, 0x30))
    assert challenge == octets("01 01 0000 0700 20 00 01 00 0000 30313233") + c1
    reply = host.received(challenge)
    assert reply is not None
    key = hmac.new(KEY, HOST.encode() + b"NVMe-over-Fabrics", hashlib.sha256).digest()
    message = c1 + octets("30313233 0700 00") + b"HostHost" + HOST.encode() + b"\0" + SUBSYSTEM.encode()
    r1 = hmac.new(key, message, hashlib.sha256).digest()
    assert reply == octets("01 02 0000 0700 20 00 00 00 0000 00000000") + r1 + bytes(32)
    controller.received(reply)
    success = fetch(controller)
    assert success == octets("01 03 0000 0700 20 00 00") + bytes(7)
    assert host.received(success) is None
    assert [host.step, controller.step] == [Step.AUTHENTICATED] * 2


def test_transcript_both_ways_in_a_group() -> None:  # §8.13.5.3 to §8.13.5.6
    host, controller = pair(BOTH_WAYS, BOTH_WAYS, hashes=(DhchapHash.SHA512,), groups=(DhGroup.FFDHE2048,))
    controller.received(host.start())
    challenge = fetch(controller)
    assert challenge[:16] == octets("01 01 0000 0700 40 00 03 01 0001 50515253")
    c1, gx = challenge[16:80], challenge[80:]
    assert (c1, len(gx)) == (bytes(range(0x10, 0x50)), 256)
    reply = host.received(challenge)
    assert reply is not None
    assert reply[:12] == octets("01 02 0000 0700 40 00 01 00 0001")
    s2, r1, c2, gy = reply[12:16], reply[16:80], reply[80:144], reply[144:]
    # The exchange's exponent is the first thing that each end draws from its counter after the challenge's parts.
    prime = groups._prime(DhGroup.FFDHE2048)
    x = int.from_bytes(bytes(range(0x54, 0x54 + 29)), "big") % (1 << 224) | 1 << 224
    assert int.from_bytes(gx, "big") == pow(2, x, prime)
    shared = pow(int.from_bytes(gy, "big"), x, prime).to_bytes(256, "big")
    hashed = hashlib.sha512(shared).digest()

    def response(key: bytes, challenge: bytes, sequence: bytes, names: bytes) -> bytes:
        augmented = hmac.new(hashed, challenge, hashlib.sha512).digest()
        return hmac.new(key, augmented + sequence + octets("0700 00") + names, hashlib.sha512).digest()

    kh = hmac.new(KEY, HOST.encode() + b"NVMe-over-Fabrics", hashlib.sha256).digest()
    assert r1 == response(kh, c1, octets("50515253"), b"HostHost" + HOST.encode() + b"\0" + SUBSYSTEM.encode())
    controller.received(reply)
    success = fetch(controller)
    kc = hmac.new(OTHER_KEY, SUBSYSTEM.encode() + b"NVMe-over-Fabrics", hashlib.sha512).digest()
    r2 = response(kc, c2, s2, b"Controller" + SUBSYSTEM.encode() + b"\0" + HOST.encode())
    assert success == octets("01 03 0000 0700 40 00 01") + bytes(7) + r2
    assert controller.step.value == "success2"
    last = host.received(success)
    assert last == octets("01 04 0000 0700") + bytes(10)
    controller.received(last)
    assert controller.step is Step.AUTHENTICATED


def test_failure() -> None:  # §8.13.5.7
    _, controller = pair(ONE_WAY, ONE_WAY)
    controller.received(octets("00 00 0000 3412 00 00"))
    assert fetch(controller) == octets("00 f1 0000 3412 01 02")
    assert controller.step is Step.FAILED


# --- both ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hash_id", ALL_HASHES)
@pytest.mark.parametrize("group", ALL_GROUPS)
def test_every_hash_and_group(hash_id: DhchapHash, group: DhGroup) -> None:
    host, controller = pair(BOTH_WAYS, BOTH_WAYS, hashes=(hash_id,), groups=(group,))
    run(host, controller)
    assert [host.step, controller.step] == [Step.AUTHENTICATED] * 2


def test_the_controller_takes_its_own_first_choice_that_the_host_offers() -> None:
    host = HostAuthentication(ONE_WAY, HOST, SUBSYSTEM, 1, hashes=(DhchapHash.SHA256, DhchapHash.SHA384))
    controller = ControllerAuthentication(
        ONE_WAY, HOST, SUBSYSTEM, hashes=(DhchapHash.SHA512, DhchapHash.SHA384), groups=(DhGroup.FFDHE3072, *NULL)
    )
    controller.received(host.start())
    assert fetch(controller)[8:10] == bytes((DhchapHash.SHA384, DhGroup.FFDHE3072))


@pytest.mark.parametrize(
    ("host_has", "controller_has"),
    [
        (HostSecrets(Secret(OTHER_KEY)), ONE_WAY),
        (HostSecrets(Secret(KEY, None)), ONE_WAY),
        (BOTH_WAYS, ONE_WAY),  # asked to prove itself with nothing to do it by
        (BOTH_WAYS, HostSecrets(Secret(KEY), Secret(KEY))),
    ],
)
def test_other_secrets_do_not_do(host_has: HostSecrets, controller_has: HostSecrets) -> None:
    host, controller = pair(host_has, controller_has, groups=NULL)
    with pytest.raises(AuthenticationFailed):
        run(host, controller)
    assert (host.step, controller.step) == (Step.FAILED, Step.FAILED)
    assert controller.why


def test_a_name_is_proven_not_only_a_secret() -> None:
    controller = ControllerAuthentication(ONE_WAY, HOST + "0", SUBSYSTEM, groups=NULL)
    host, _ = pair(ONE_WAY, ONE_WAY, groups=NULL)
    with pytest.raises(AuthenticationFailed, match="does not take this host's secret"):
        run(host, controller)


def test_a_challenge_that_is_sent_back_is_not_answered() -> None:
    """Whoever has the host's secret as the controller's too must not be made to answer for itself."""
    both = HostSecrets(Secret(KEY, None), Secret(KEY, None))
    host, controller = pair(both, both, hashes=(DhchapHash.SHA256,), groups=NULL)
    controller.received(host.start())
    challenge = fetch(controller)
    reply = host.received(challenge)
    assert reply is not None
    controller.received(reply[:48] + challenge[16:48] + reply[80:])
    assert fetch(controller)[-1] == AuthenticationFailure.FAILED


def changed(message: bytes, at: int, to: int) -> bytes:
    return message[:at] + bytes((to,)) + message[at + 1 :]


@pytest.mark.parametrize(
    ("change", "explanation"),
    [
        (lambda m: b"", AuthenticationFailure.INCORRECT_PAYLOAD),
        (lambda m: m[:5], AuthenticationFailure.INCORRECT_PAYLOAD),
        (lambda m: m[:70], AuthenticationFailure.INCORRECT_PAYLOAD),
        (lambda m: changed(m, 0, 1), AuthenticationFailure.INCORRECT_MESSAGE),
        (lambda m: changed(m, 1, 2), AuthenticationFailure.INCORRECT_MESSAGE),
        (lambda m: changed(m, 6, 1), AuthenticationFailure.SECURE_CHANNEL_MISMATCH),
        (lambda m: changed(m, 7, 255), AuthenticationFailure.INCORRECT_PAYLOAD),
        (lambda m: changed(m, 8, 9), AuthenticationFailure.PROTOCOL_NOT_USABLE),
        (lambda m: changed(m, 10, 31), AuthenticationFailure.INCORRECT_PAYLOAD),
        (lambda m: changed(m, 10, 0), AuthenticationFailure.HASH_NOT_USABLE),
        (lambda m: changed(m, 11, 0), AuthenticationFailure.GROUP_NOT_USABLE),
    ],
)
def test_a_bad_offer(change: Callable[[bytes], bytes], explanation: AuthenticationFailure) -> None:
    host, controller = pair(ONE_WAY, ONE_WAY)
    controller.received(change(host.start()))
    assert fetch(controller)[6:] == bytes((1, explanation))


@pytest.mark.parametrize(
    ("at", "to", "explanation"),
    [
        (4, 8, AuthenticationFailure.INCORRECT_PAYLOAD),  # T_ID
        (6, 48, AuthenticationFailure.INCORRECT_PAYLOAD),  # HL
        (10, 1, AuthenticationFailure.INCORRECT_PAYLOAD),  # DHVLEN
        (16, 0x00, AuthenticationFailure.FAILED),  # R1
        (272, 0xFF, AuthenticationFailure.FAILED),  # g^y
    ],
)
def test_a_bad_reply(at: int, to: int, explanation: AuthenticationFailure) -> None:
    host, controller = pair(ONE_WAY, ONE_WAY, groups=(DhGroup.FFDHE2048,), hashes=(DhchapHash.SHA256,))
    controller.received(host.start())
    reply = host.received(fetch(controller))
    assert reply is not None and reply[at] != to
    controller.received(changed(reply, at, to))
    assert fetch(controller)[-1] == explanation
    assert controller.step is Step.FAILED


@pytest.mark.parametrize(("at", "to"), [(0, 0), (4, 8), (6, 31), (8, 4), (9, 6), (9, 0), (10, 1), (11, 2), (48, 0xFF)])
def test_a_bad_challenge(at: int, to: int) -> None:
    host, controller = pair(ONE_WAY, ONE_WAY, groups=(DhGroup.FFDHE2048,), hashes=(DhchapHash.SHA256,))
    controller.received(host.start())
    challenge = fetch(controller)
    if at == 48:
        challenge = challenge[:48] + b"\xff" * 256  # not of the group
    else:
        assert challenge[at] != to
        challenge = changed(challenge, at, to)
    with pytest.raises(AuthenticationFailed) as caught:
        host.received(challenge)
    assert caught.value.answer is not None and caught.value.answer[:2] == octets("00f0")


def test_a_target_that_proves_nothing_is_not_believed() -> None:
    host, controller = pair(BOTH_WAYS, BOTH_WAYS, groups=NULL)
    controller.received(host.start())
    reply = host.received(fetch(controller))
    assert reply is not None
    controller.received(reply)
    success = fetch(controller)
    for lie in (changed(success, 8, 0), changed(success, 20, success[20] ^ 1), success[:16]):
        other, again = pair(BOTH_WAYS, BOTH_WAYS, groups=NULL)
        again.received(other.start())
        other.received(fetch(again))
        with pytest.raises(AuthenticationFailed, match="does not prove"):
            other.received(lie)


# --- hostile peers --------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=5), st.booleans())
def test_a_controller_takes_any_bytes(messages: list[bytes], fetches: bool) -> None:
    controller = ControllerAuthentication(ONE_WAY, HOST, SUBSYSTEM)
    for message in messages:
        if controller.step is Step.FAILED:
            break
        controller.received(message)
        assert controller.step is not Step.AUTHENTICATED
        if fetches and controller.due is not None:
            controller.delivered()


@given(st.integers(0, 1 << 32), st.booleans())
def test_whoever_lacks_a_secret_gets_nowhere_by_changing_what_is_sent(seed: int, impostor_is_host: bool) -> None:
    dice = random.Random(seed)
    wrong = HostSecrets(Secret(OTHER_KEY), Secret(KEY))
    host, controller = pair(*((wrong, BOTH_WAYS) if impostor_is_host else (BOTH_WAYS, wrong)), groups=NULL)

    def edited(message: bytes, *, mine: bool) -> bytes:
        if mine and dice.random() < 0.5:
            at = dice.randrange(len(message))
            message = changed(message, at, dice.randrange(256))
        return message

    try:
        controller.received(edited(host.start(), mine=impostor_is_host))
        for _ in range(2):
            answer = host.received(edited(fetch(controller), mine=not impostor_is_host))
            if answer is None or controller.step is Step.FAILED:
                break
            controller.received(edited(answer, mine=impostor_is_host))
    except AuthenticationFailed:
        pass
    assert (controller if impostor_is_host else host).step is not Step.AUTHENTICATED


@given(st.binary(max_size=300))
def test_a_host_takes_any_bytes(message: bytes) -> None:
    host, _ = pair(BOTH_WAYS, BOTH_WAYS)
    host.start()
    with pytest.raises(AuthenticationFailed):
        host.received(message)


def test_what_was_changed_on_the_way_is_seen_where_it_matters() -> None:
    """Each bit of a reply's response and of a success's proof."""
    for bit in range(256):
        host, controller = pair(BOTH_WAYS, BOTH_WAYS, groups=NULL, hashes=(DhchapHash.SHA256,))
        controller.received(host.start())
        reply = host.received(fetch(controller))
        assert reply is not None
        at = 16 + bit // 8
        controller.received(changed(reply, at, reply[at] ^ 1 << bit % 8))
        assert controller.step is Step.FAILURE


def test_layouts_hold_what_a_descriptor_lists() -> None:
    assert spec.DHCHAP_DESCRIPTOR.size == 4 + 2 * spec.DHCHAP_IDS
