"""Errors of `hone serve RUN.yaml` and `hone serve key` that come before anything is served."""

import socket

import pytest

from hone.cli.main import main


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_one_error(host, tmp_path, capsys):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    with taken:
        address = [f"listen.host={host}", f"listen.port={taken.getsockname()[1]}"]
        assert main(["serve", "recipes/serve/tiny.yaml", f"folder={tmp_path}", *address]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{' '.join(address)}: Address already in use" in error
    assert "set listen.port to another port" in error


def test_an_address_of_no_machine_is_one_error(tmp_path, capsys):
    address = ["listen.host=192.0.2.1", "listen.behind_proxy=true"]
    assert main(["serve", "recipes/serve/tiny.yaml", f"folder={tmp_path}", *address]) == 2
    assert "listen.host=192.0.2.1" in capsys.readouterr().err


def test_keys_are_listed_and_removed_only_where_a_service_has_some(tmp_path, capsys):
    for arguments in (["list"], ["remove", "alice"]):
        assert main(["serve", "key", *arguments, f"folder={tmp_path}"]) == 2
        assert f"no service has kept keys in {tmp_path}" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
    assert main(["serve", "key", "add", "alice", f"folder={tmp_path}"]) == 0
    assert main(["serve", "key", "list", f"folder={tmp_path}"]) == 0
    assert "alice: " in capsys.readouterr().out
