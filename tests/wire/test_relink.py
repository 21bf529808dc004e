"""The Relink codec against the hand-made samples and against its plain-Python twin."""

import json
import struct
import tracemalloc
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire import relink
from tests.oracle import relink as twin

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "relink.json").read_text("utf-8"))

Seen = tuple[str, int, int, dict[str, object]]
Outcome = tuple[list[Seen], tuple[int, str] | None, int]


def decode(pieces: list[bytes], sender: str, **options: Any) -> Outcome:
    """All items of the pieces, the error that ended them, and how many bytes are left over."""
    decoder = relink.Decoder(sender, **options)
    items: list[Seen] = []
    for piece in pieces:
        try:
            for item in decoder.feed(piece):
                items.append((type(item).__name__, item.start, item.end, item.fields()))
        except relink.PacketError:
            break
    error = None if decoder.error is None else (decoder.error.position, decoder.error.kind)
    return items, error, decoder.pending


def decode_by_twin(pieces: list[bytes], sender: str, **options: Any) -> Outcome:
    decoder = twin.Decoder(sender, **options)
    items: list[Seen] = []
    for piece in pieces:
        items += [(item.name, item.start, item.end, item.fields) for item in decoder.feed(piece)]
    error = None if decoder.error is None else (decoder.error.position, decoder.error.kind)
    return items, error, len(decoder.tail)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


u8 = st.integers(0, 0xFF)
u32 = st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1), st.integers(2**32 - 9, 2**32 - 1))
u64 = st.integers(0, 2**64 - 1)
id_sizes = st.integers(0, 8)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
senders = st.sampled_from(["connector", "listener"])
parts = st.lists(st.binary(max_size=20), max_size=6)
forms = st.sampled_from([None, True])


def channels_of(size: int) -> st.SearchStrategy[Any]:
    """One id of this many bytes, or a list of them."""
    ids = st.integers(0, 2 ** (8 * size) - 1)
    return st.one_of(ids, st.lists(ids, max_size=5))


@st.composite
def packet_calls(draw: st.DrawFn, own: int, other: int) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """An encoder's name and arguments, of a packet by who has ids of `own` bytes."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return "encode_general", (draw(st.integers(0, 4)),), {}
    if kind == 1:
        sequence = draw(st.one_of(st.none(), u32))
        type = draw(st.integers(0, 2 if sequence is None else 1))
        return "encode_operation", (type, draw(channels_of(own)), own, sequence), {}
    if kind == 2:
        sequence = draw(st.one_of(st.none(), u32))
        type = draw(st.integers(0, 4 if sequence is None else 3))
        return "encode_acknowledgement", (type, draw(channels_of(other)), other, sequence), {}
    given = {"long_form": draw(forms), "large_form": draw(forms)}
    return "encode_message", (draw(channels_of(own)), own, draw(parts)), given


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, int, int, bytes]:
    """Who sends it, the sizes of connector's and listener's ids, and good packets."""
    sender = draw(senders)
    sizes = draw(id_sizes), draw(id_sizes)
    own, other = sizes if sender == "connector" else sizes[::-1]
    calls = draw(st.lists(packet_calls(own, other), max_size=6))
    packets = [getattr(twin, name)(*arguments, **more) for name, arguments, more in calls]
    return sender, *sizes, b"".join(packets)


# --- the samples --------------------------------------------------------------------------------------------


def said_by(vector: dict[str, Any], module: Any) -> bytes:
    """A sample, built from its parameters."""
    given: dict[str, Any] = vector["fields"]["params"]
    if "version" in given:
        return bytes(module.encode_version(given["version"]))
    if "name" in given:
        name = "n" * 255 if given["name"] == "n*255" else given["name"]
        sizes = given["connector_size"], given["listener_size"]
        return bytes(module.encode_hello(name, *sizes, given["flags"], given["epoch"], given["link"]))
    if "epoch" in given:
        return bytes(module.encode_answer(given["epoch"], given["link"]))
    if isinstance(given.get("type"), str):
        return bytes(module.encode_general(relink.GeneralType[given["type"].upper()]))
    channel = given.get("channels", given.get("channel", 0))
    if "format" in given:
        encode = module.encode_acknowledgement if given["format"] & 1 else module.encode_operation
        return bytes(encode(given["type"], channel, given["size"], given.get("seq")))
    if vector["name"] == "msg_short_small_uni_id8":
        channel = 0x0807060504030201  # the sample's bytes; its parameters do not tell
    return bytes(
        module.encode_message(
            channel,
            given["size"],
            [part.encode() for part in given["parts"]],
            long_form=given.get("long", False),
            large_form=given.get("large", False),
        )
    )


@pytest.mark.parametrize("module", [relink, twin], ids=["compiled", "twin"])
@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_sample_is_what_the_encoder_writes(vector: dict[str, Any], module: Any) -> None:
    assert said_by(vector, module).hex() == vector["hex"]


@pytest.mark.parametrize("decoding", [decode, decode_by_twin], ids=["compiled", "twin"])
@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_sample_decodes_to_its_parameters(vector: dict[str, Any], decoding: Any) -> None:
    raw = bytes.fromhex(vector["hex"])
    given: dict[str, Any] = vector["fields"]["params"]
    assert len(raw) == vector["fields"]["total_bytes"]
    handshake = vector["name"].startswith("hs_")
    size = given.get("size", 0)
    sender = given.get("sender", "connector")
    before = b"" if "version" in given or not handshake else bytes(8)
    found, error, left = decoding(
        [before + raw], sender, handshake=handshake, connector_size=size, listener_size=size
    )
    assert (error, left) == (None, 0)
    name, start, end, fields = found[-1]
    assert (start, end) == (len(before), len(before) + len(raw))
    expected = {key: given[key] for key in fields if key in given}
    if expected.get("name") == "n*255":
        expected["name"] = "n" * 255
    if isinstance(expected.get("type"), str):
        expected["type"] = relink.GeneralType[expected["type"].upper()]
    if "parts" in expected:
        expected["parts"] = tuple(part.encode() for part in expected["parts"])
    if "channels" in fields:
        expected["channels"] = tuple(given.get("channels", [given.get("channel", 0)]))
        if vector["name"] == "msg_short_small_uni_id8":
            expected["channels"] = (0x0807060504030201,)
    if "sequence" in fields:
        expected["sequence"] = given.get("seq")
    assert {key: fields[key] for key in expected} == expected
    assert name in ("Version", "Hello", "Answer", "General", "Operation", "Acknowledgement", "Message")


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_sample_has_its_fields_where_its_layout_says(vector: dict[str, Any]) -> None:
    raw = bytes.fromhex(vector["hex"])
    for field in vector["fields"]["layout"]:
        if isinstance(field["value"], int) and field["size"] <= 8:
            there = raw[field["offset"] : field["offset"] + field["size"]]
            assert int.from_bytes(there, "little") == field["value"], field


# --- both ways, all parameters ------------------------------------------------------------------------------


@given(own=id_sizes, other=id_sizes, data=st.data())
def test_encoders_write_the_same_bytes_as_the_twin(own: int, other: int, data: st.DataObject) -> None:
    name, arguments, more = data.draw(packet_calls(own, other))
    packet = getattr(relink, name)(*arguments, **more)
    assert packet == getattr(twin, name)(*arguments, **more)
    assert len(packet) % 8 == 0


@given(names, u8, u8, u8, u64, u64)
def test_handshake_is_written_as_by_the_twin(
    name: str, connector: int, listener: int, flags: int, epoch: int, link: int
) -> None:
    arguments = (name, connector, listener, flags, epoch, link)
    if len(name.encode()) > 255:
        with pytest.raises(ValueError, match="at most 255"):
            relink.encode_hello(*arguments)
    else:
        assert relink.encode_hello(*arguments) == twin.encode_hello(*arguments)
    assert relink.encode_answer(epoch, link) == twin.encode_answer(epoch, link)
    assert relink.encode_version(flags) == twin.encode_version(flags)


@given(streams(), st.lists(st.integers(0, 400), max_size=6))
def test_any_stream_in_any_pieces_decodes_as_by_the_twin(
    stream: tuple[str, int, int, bytes], at: list[int]
) -> None:
    sender, connector, listener, data = stream
    options: dict[str, Any] = {
        "handshake": False,
        "connector_size": connector,
        "listener_size": listener,
    }
    whole = decode([data], sender, **options)
    assert whole[1:] == (None, 0)
    assert whole == decode_by_twin([data], sender, **options)
    assert whole == decode(cut(data, at), sender, **options)


@given(names.filter(lambda name: len(name.encode()) < 256), id_sizes, id_sizes, u8, u64, u64, st.data())
def test_connector_tells_the_sizes_of_ids_for_what_follows(
    name: str, connector: int, listener: int, flags: int, epoch: int, link: int, data: st.DataObject
) -> None:
    call, arguments, more = data.draw(packet_calls(connector, listener))
    raw = relink.encode_version(3) + relink.encode_hello(name, connector, listener, flags, epoch, link)
    raw += getattr(relink, call)(*arguments, **more)
    at = data.draw(st.lists(st.integers(0, len(raw)), max_size=4))
    outcome = decode(cut(raw, at), "connector")
    assert outcome == decode_by_twin([raw], "connector")
    assert [seen[0] for seen in outcome[0]][:2] == ["Version", "Hello"]
    assert len(outcome[0]) == 3


@given(
    senders,
    id_sizes,
    id_sizes,
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            # near to good: every head, with few targets, parts and bytes
            st.builds(
                lambda head, short, count, rest: bytes([head, short]) + struct.pack("<HI", 0, count) + rest,
                u8,
                st.integers(0, 3),
                st.integers(0, 5),
                st.binary(max_size=60),
            ),
        ),
        max_size=4,
    ).map(b"".join),
    st.lists(st.integers(0, 150), max_size=5),
)
def test_noise_is_judged_as_by_the_twin_and_breaks_nothing(
    sender: str, connector: int, listener: int, noise: bytes, at: list[int]
) -> None:
    options: dict[str, Any] = {
        "handshake": False,
        "connector_size": connector,
        "listener_size": listener,
        "max_targets": 4,
        "max_parts": 5,
        "max_payload": 64,
    }
    whole = decode([noise], sender, **options)
    assert whole == decode_by_twin([noise], sender, **options)
    pieces = decode(cut(noise, at), sender, **options)
    assert pieces[:2] == whole[:2]


def everything(own: int, other: int) -> bytes:
    """One packet of each kind and form."""
    top = 2 ** (8 * own) - 1
    other_top = 2 ** (8 * other) - 1
    packets = [relink.encode_general(type) for type in relink.GeneralType]
    for sequence, targets in product((None, 0xFFFFFFFF), (True, False)):
        channel: Any = (top, 0, top) if targets else top
        acked: Any = (other_top, 0) if targets else other_top
        packets += [relink.encode_operation(type, channel, own, sequence) for type in (0, 1)]
        packets += [relink.encode_acknowledgement(type, acked, other, sequence) for type in range(4)]
    packets.append(relink.encode_operation(2, top, own))
    packets.append(relink.encode_acknowledgement(4, other_top, other))
    for count, is_long, is_large, targets in product((0, 1, 3), (True, False), (True, False), (True, False)):
        channel = (top, 0) if targets else top
        pieces = [bytes(range(1, 1 + size)) for size in (5, 0, 8)[:count]]
        packets.append(relink.encode_message(channel, own, pieces, long_form=is_long, large_form=is_large))
    return b"".join(packets)


@pytest.mark.parametrize("own", range(9))
def test_every_packet_survives_a_cut_at_every_place(own: int) -> None:
    other = 8 - own
    raw = everything(own, other)
    options: dict[str, Any] = {"handshake": False, "connector_size": own, "listener_size": other}
    whole = decode([raw], "connector", **options)
    assert whole == decode_by_twin([raw], "connector", **options)
    assert whole[1:] == (None, 0)
    for at in range(len(raw)):
        assert decode([raw[:at], raw[at:]], "connector", **options) == whole
    assert decode([raw[i : i + 1] for i in range(len(raw))], "connector", **options) == whole


# --- what the spec says in passing --------------------------------------------------------------------------


def test_padding_and_unused_bits_are_ignored() -> None:
    raw = bytearray(relink.encode_message(7, 1, [b"abc"]))
    raw[0] |= 0x80  # the third message flag
    raw[3] = raw[7] = raw[-1] = 0xEE
    noisy_ping = bytes([0x20 | 0x1E]) + b"\xff" * 7
    noisy_ack = bytearray(relink.encode_acknowledgement(1, 7, 1))
    noisy_ack[1] = noisy_ack[5] = 0xEE
    found, error, left = decode(
        [bytes(raw) + noisy_ping + bytes(noisy_ack)],
        "connector",
        handshake=False,
        connector_size=1,
        listener_size=1,
    )
    assert (error, left) == (None, 0)
    assert [fields for _, _, _, fields in found] == [
        {"channels": (7,), "multicast": False, "long": False, "large": False, "parts": (b"abc",)},
        {"type": 1},
        {"type": 1, "channels": (7,), "multicast": False, "sequence": None},
    ]


UNUSED = [
    *(type << 5 for type in (5, 6, 7)),  # general
    *(1 | format << 2 | type << 5 for format in (5, 6, 7) for type in range(8)),
    *(1 | type << 5 for type in range(3, 8)),  # operation
    *(1 | 1 << 2 | type << 5 for type in range(5, 8)),
    *(1 | 2 << 2 | type << 5 for type in range(2, 8)),
    *(1 | 3 << 2 | type << 5 for type in range(4, 8)),
]


@pytest.mark.parametrize("head", UNUSED, ids=[f"{head:02x}" for head in UNUSED])
def test_unused_enumeration_value_ends_the_stream_with_its_first_byte(head: int) -> None:
    decoder = relink.Decoder("connector", handshake=False)
    assert len(decoder.feed(relink.encode_general(1))) == 1
    with pytest.raises(relink.PacketError) as caught:
        decoder.feed(bytes([head]))
    assert (caught.value.kind, caught.value.position) == ("bad type", 8)
    with pytest.raises(relink.PacketError):
        decoder.feed(relink.encode_general(1))


def test_every_other_head_is_used() -> None:
    for head in set(range(256)) - {head | multicast for head in UNUSED for multicast in (0, 2)}:
        decoder = relink.Decoder("connector", handshake=False)
        if not head & 1 and head >> 5 > 4:
            continue  # general: format bits are not used, so these are the three above
        decoder.feed(bytes([head]))


def test_acknowledgements_have_ids_of_the_receivers_size() -> None:
    raw = relink.encode_message(0x1122, 2, []) + relink.encode_acknowledgement(1, 0x112233445566, 6)
    (message, ack), _, left = decode([raw], "listener", handshake=False, connector_size=6, listener_size=2)
    assert left == 0
    assert message[3]["channels"] == (0x1122,)
    assert ack[3]["channels"] == (0x112233445566,)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (struct.pack("<BBHI", 0x13, 0, 0, 0xFFFFFFFF), "bad count"),
        (struct.pack("<BBIH", 0x31, 0, 0xFFFFFFFF, 0), "bad length"),
        (struct.pack("<BBIxxQ", 0x71, 0, 1, 2**64 - 1), "bad size"),
        # two sizes whose sum, and whose padded sum, does not fit into 64 bits
        (struct.pack("<BBIxxQQ", 0x71, 0, 2, 2**63, 2**63), "bad size"),
        (struct.pack("<BBIxxQQ", 0x71, 0, 2, 60 << 20, 2**64 - 4), "bad size"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_before_anything_is_allocated(raw: bytes, kind: str) -> None:
    decoder = relink.Decoder("connector", handshake=False)
    tracemalloc.start()
    try:
        with pytest.raises(relink.PacketError) as caught:
            decoder.feed(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()
    assert caught.value.kind == kind


def test_announced_size_allocates_nothing_until_it_arrives() -> None:
    decoder = relink.Decoder("connector", handshake=False)
    tracemalloc.start()
    try:
        decoder.feed(struct.pack("<BBIxxQ", 0x71, 0, 1, 64 << 20))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()
    assert decoder.wanted == 16 + (64 << 20)
    assert decoder.pending == 16


def test_count_of_targets_without_ids_is_that_many_deliveries() -> None:
    ((_, _, _, fields),), _, _ = decode(
        [relink.encode_message([0] * 3, 0, [b"x"])], "connector", handshake=False
    )
    assert fields["channels"] == (0, 0, 0)


def test_no_targets_are_well_formed() -> None:
    ((_, _, _, fields),), _, _ = decode(
        [relink.encode_message([], 4, [b"x"])], "connector", handshake=False, connector_size=4
    )
    assert fields["channels"] == ()


@pytest.mark.parametrize(
    "call",
    [
        lambda: relink.encode_message(256, 1, []),
        lambda: relink.encode_message(1, 0, []),
        lambda: relink.encode_message(1, 9, []),
        lambda: relink.encode_message(1, 4, [b""] * 256, long_form=False),
        lambda: relink.encode_message(1, 4, [bytes(65536)], large_form=False),
        lambda: relink.encode_operation(3, 1, 4),
        lambda: relink.encode_operation(2, 1, 4, 7),
        lambda: relink.encode_acknowledgement(4, 1, 4, 7),
        lambda: relink.encode_general(5),
        lambda: relink.Decoder("client"),
    ],
)
def test_values_without_a_place_on_the_wire_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"bytes|parts|operation|acknowledgement|general|sender"):
        call()


def test_forms_are_chosen_by_need() -> None:
    def forms_of(pieces: list[bytes]) -> tuple[bool, bool]:
        raw = relink.encode_message(1, 4, pieces)
        (item,) = relink.Decoder("connector", handshake=False, connector_size=4).feed(raw)
        assert isinstance(item, relink.Message)
        assert item.parts == tuple(pieces)
        assert item.payload == b"".join(pieces)
        assert item.size == len(item.payload)
        return item.long_form, item.large_form

    assert forms_of([b"x"] * 255) == (False, False)
    assert forms_of([b"x"] * 256) == (True, False)
    assert forms_of([bytes(65535)]) == (False, False)
    assert forms_of([bytes(65536)]) == (False, True)


def test_hello_that_cannot_be_understood_ends_the_stream() -> None:
    for hello in (b"\x01\xff\x00\x00\x00", b"\x00\x09\x00\x00", b"\x00\x00\x09\x00"):
        decoder = relink.Decoder("connector")
        decoder.feed(bytes(8))
        with pytest.raises(relink.PacketError) as caught:
            decoder.feed(hello.ljust(24, b"\0"))
        assert caught.value.kind == "bad hello"
