from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appliance.config import Config, load, overruled, render_markdown, render_toml
from forebay.appliance.settings import (
    Endpoint,
    format_duration,
    format_size,
    parse_duration_ms,
    parse_size_bytes,
)
from forebay.errors import ConfigInvalid

ROOT = Path(__file__).resolve().parents[2]


def from_text(tmp_path: Path, text: str, environ: dict[str, str] | None = None, **flags: object) -> Config:
    file = tmp_path / "forebay.toml"
    file.write_text(text)
    return load(file, environ=environ or {}, flags=flags)


def refused(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> ConfigInvalid:
    with pytest.raises(ConfigInvalid) as caught:
        from_text(tmp_path, text, environ)
    return caught.value


def test_defaults_need_no_file() -> None:
    config = load(environ={})
    assert config.data == Path("~/.local/share/forebay").expanduser()
    assert config.metadata_dir == config.data / "metadata"
    assert [drive.path for drive in config.drives] == [config.data / "drive0"]
    assert config.drives[0].capacity_bytes is None
    assert config.grpc.listen == Endpoint("127.0.0.1", 7470)
    assert (config.sessions.lease_ttl_ms, config.sessions.write_ttl_ms) == (10_000, 30_000)


def test_flags_stand_above_the_environment_above_the_file_above_the_defaults(tmp_path: Path) -> None:
    text = 'capacity = "1GiB"\nname = "file"\n[grpc]\nlisten = "127.0.0.1:1"\nmax_message = "2MiB"\n'
    environ = {"FOREBAY_CAPACITY": "2GiB", "FOREBAY_GRPC_LISTEN": "127.0.0.1:2"}
    config = load_with(tmp_path, text, environ, {"capacity": "3GiB", "grpc.listen": None})
    assert config.drives[0].capacity_bytes == 3 << 30
    assert config.grpc.listen.port == 2
    assert config.grpc.max_message_bytes == 2 << 20
    assert config.name == "file"
    assert config.target.rpc_timeout_ms == 10_000


def load_with(tmp_path: Path, text: str, environ: dict[str, str], flags: dict[str, object]) -> Config:
    file = tmp_path / "forebay.toml"
    file.write_text(text)
    return load(file, environ=environ, flags=flags)


def test_drives_take_the_common_capacity_unless_they_name_their_own(tmp_path: Path) -> None:
    text = 'capacity = "1GiB"\n[[drives]]\npath = "a"\n[[drives]]\npath = "/b"\ncapacity = "2GiB"\n'
    drives = from_text(tmp_path, text).drives
    assert [(drive.path, drive.capacity_bytes) for drive in drives] == [
        (tmp_path / "a", 1 << 30),
        (Path("/b"), 2 << 30),
    ]


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ('capcity = "1GiB"', "capcity", "'capacity'"),
        ('[grpc]\nlisen = "127.0.0.1:1"', "grpc.lisen", "'listen'"),
        ("[session]\nheartbeat = '1s'", "session", "'sessions'"),
        ("[[drives]]\npath = 'a'\ncapacty = 1", "drives[0].capacty", "'capacity'"),
        ("zzz = 1", "zzz", "capacity"),
        ("[[drives]]\ncapacity = '1GiB'", "drives[0].path", "no path"),
        ("drives = 'a'", "drives", "[[drives]]"),
        ("grpc = 1", "grpc", "table"),
        ("capacity = '1GiB'\ncapacity = '2GiB'", "config", "TOML"),
        ("capacity = '64G'", "capacity", "GiB"),
        ("capacity = '1MiB'", "capacity", "64MiB"),
        ("capacity = true", "capacity", "size"),
        ("capacity = '1.3B'", "capacity", "whole"),
        ("[sessions]\nlease_ttl = 10", "sessions.lease_ttl", "unit"),
        ("[sessions]\nlease_ttl = '1ms'", "sessions.lease_ttl", "100ms"),
        ("[sessions]\nheartbeat = '9s'", "sessions.expiry", "18000"),
        ("[sessions]\nmax_sessions = true", "sessions.max_sessions", "1000000"),
        ("[target]\nkind = 'spdk'", "nvmf_tgt.binary", "nvmf_tgt.socket"),
        ("[nvmf_tgt]\ncore_mask = 'all'", "nvmf_tgt.core_mask", "0x3"),
        ("[target]\nkind = 'nvmet'", "target.kind", "embedded"),
        ("[target]\nlisten = '0.0.0.0:4420'", "target.listen", "addresses"),
        ("[target]\nlisten = '[::]:4420'", "target.listen", "addresses"),
        ("[target]\nlisten = '127.0.0.1'", "target.listen", "host:port"),
        ("[target]\nlisten = '127.0.0.1:70000'", "target.listen", "host:port"),
        ("[target]\nin_capsule = 5000", "target.in_capsule", "multiple"),
        ("[target]\nmax_command = '3MiB'", "target.max_command", "power of two"),
        ("[grpc]\nlisten = '0.0.0.0:7470'", "grpc.listen", "allow_plaintext"),
        ("[grpc]\nlisten = 'storage-1:7470'", "grpc.listen", "allow_plaintext"),
        ("[http]\nlisten = '0.0.0.0:7471'", "http.listen", "allow_plaintext"),
        ("[http]\nenabled = 'maybe'", "http.enabled", "true or false"),
        ("[trace]\notlp_endpoint = '127.0.0.1:4318'", "trace.otlp_endpoint", "http://"),
        ("[trace]\notlp_endpoint = 'http://a b/'", "trace.otlp_endpoint", "http://"),
        ("[space]\nregion = '96MiB'", "space.region", "power of two"),
        ("[space]\nregion = '32MiB'", "space.region", "64MiB"),
        ("[space]\nlow_watermark = 0.99", "space.low_watermark", "0.97"),
        ("[space]\nhigh_watermark = 1.5", "space.high_watermark", "1"),
        ("capacity = '64MiB'\n[space]\nregion = '128MiB'", "capacity", "128MiB"),
        ("[[drives]]\npath = '/a'\n[[drives]]\npath = '/a'", "drives", "twice"),
        ("name = 'two words'", "name", "letters"),
        ("[log]\nlevel = 'loud'", "log.level", "debug"),
        ("[grpc]\nallow_plaintext = 'perhaps'", "grpc.allow_plaintext", "true or false"),
    ],
)
def test_what_is_wrong_is_named_with_its_limit(tmp_path: Path, text: str, field: str, hint: str) -> None:
    error = refused(tmp_path, text)
    assert error.field == field
    assert hint in str(error)


def test_a_plaintext_listener_for_others_must_be_asked_for(tmp_path: Path) -> None:
    config = from_text(tmp_path, "[grpc]\nlisten = '0.0.0.0:7470'\nallow_plaintext = true")
    assert str(config.grpc.listen) == "0.0.0.0:7470"


@pytest.mark.parametrize(("grpc", "http"), [("7470", 7471), ("0", 0), ("65535", 0)])
def test_http_is_beside_grpc_unless_it_is_named(tmp_path: Path, grpc: str, http: int) -> None:
    environ = {"FOREBAY_GRPC_LISTEN": f"127.0.0.1:{grpc}"}
    assert from_text(tmp_path, "", environ).http.listen == Endpoint("127.0.0.1", http)
    named = from_text(tmp_path, "[http]\nlisten = '[::1]:80'", environ)
    assert str(named.http.listen) == "[::1]:80"


def test_a_collector_is_a_web_address(tmp_path: Path) -> None:
    address = "https://otel.example:4318/v1/traces"
    assert from_text(tmp_path, f"[trace]\notlp_endpoint = '{address}'").trace.otlp_endpoint == address
    assert from_text(tmp_path, "").trace.otlp_endpoint == ""


def test_variables_with_a_section_must_be_known_and_others_are_left_alone(tmp_path: Path) -> None:
    error = refused(tmp_path, "", {"FOREBAY_GRPC_LISTN": "127.0.0.1:1"})
    assert "FOREBAY_GRPC_LISTEN" in str(error)
    assert from_text(tmp_path, "", {"FOREBAY_CACHE": "/x", "OTHER": "y"})
    assert refused(tmp_path, "", {"FOREBAY_SESSIONS_LEASE_TTL": "soon"}).field == "FOREBAY_SESSIONS_LEASE_TTL"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"none\.toml"):
        load(tmp_path / "none.toml", environ={})


def test_the_printed_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    text = (
        "capacity = '3GiB'\nname = 'n1'\n[[drives]]\npath = '/d \"x\" é'\n"
        "[target]\nlisten = '[::1]:0'\non_stop = 'keep'\n"
        "[space]\nhigh_watermark = 0.9\nlow_watermark = 0.8\n[log]\nformat = 'json'\n"
    )
    for config in (from_text(tmp_path, text), load(environ={})):
        printed = tmp_path / "printed.toml"
        printed.write_text(render_toml(config))
        assert load(printed, environ={}) == config


def test_the_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == render_markdown(), "run: .venv/bin/python -m forebay.appliance.config > docs/config.md"


@given(st.integers(0, 1 << 60))
def test_sizes_read_back(size_bytes: int) -> None:
    assert parse_size_bytes(format_size(size_bytes)) == size_bytes


@given(st.integers(0, 1 << 50))
def test_durations_read_back(duration_ms: int) -> None:
    assert parse_duration_ms(format_duration(duration_ms)) == duration_ms


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("64GB", 64 * 10**9), ("64 gib", 64 << 30), ("1.5KiB", 1536), ("7", 7), (7, 7)]
)
def test_sizes_are_written_as_people_write_them(text: str | int, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@given(st.text(max_size=40))
def test_no_text_makes_the_reader_fail_otherwise(text: str) -> None:
    for environ in ({"FOREBAY_CAPACITY": text}, {"FOREBAY_TARGET_LISTEN": text}, {"FOREBAY_SPACE_LOW_WATERMARK": text}):
        try:
            load(environ=environ)
        except ConfigInvalid as error:
            assert error.field


def test_attached_hosts_are_a_list_or_one_text(tmp_path: Path) -> None:
    nqn = "nqn.2014-08.org.nvmexpress:uuid:0aa508fa-d5a0-47ad-8ad2-ed1e833f60f8"
    listed = from_text(tmp_path, f'[target]\nattached_hosts = ["acme/{nqn}", "b.c/nqn.2026-01.x:y"]\n')
    assert [str(host) for host in listed.target.attached_hosts] == [f"acme/{nqn}", "b.c/nqn.2026-01.x:y"]
    texted = from_text(tmp_path, "", {"FOREBAY_TARGET_ATTACHED_HOSTS": f"acme/{nqn}, b.c/nqn.2026-01.x:y"})
    assert texted.target.attached_hosts == listed.target.attached_hosts
    assert from_text(tmp_path, render_toml(listed)).target == listed.target
    for wrong in ("7", f'["{nqn}"]', '["acme/host"]', '["acme/nqn.2026-01.a b"]', "[1]"):
        error = refused(tmp_path, f"[target]\nattached_hosts = {wrong}\n")
        assert error.field == "target.attached_hosts"


def test_what_goes_before_the_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "forebay.toml"
    path.write_text('data = "here"\n[target]\nlisten = "127.0.0.1:1"\n')
    environ = {
        "FOREBAY_DATA": "/there",
        "FOREBAY_TARGET_LISTEN": "127.0.0.1:2",
        "FOREBAY_GRPC_LISTEN": "127.0.0.1:3",  # of which the file says nothing
    }
    data, listen = overruled(path, environ=environ)
    assert "FOREBAY_DATA" in data and "data of" in data
    assert "FOREBAY_TARGET_LISTEN" in listen and "target.listen of" in listen
    assert overruled(path, environ=environ, typed={"data"}) == [listen]
    assert overruled(path, environ={"FOREBAY_DATA": ""}) == []  # set to nothing is not set
