"""Errors of `hone serve RUN.yaml` and `hone serve key` that come before anything is served."""

import socket

from hone.cli.main import main


def test_a_taken_port_is_one_error(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = f"folder={tmp_path}"
        assert main(["serve", "recipes/serve/tiny.yaml", place, f"listen.port={port}"]) == 2
    error = capsys.readouterr().err
    assert f"listen.port={port}: Address already in use; choose another port" in error
    assert "Traceback" not in error


def test_keys_are_listed_and_removed_only_where_a_service_has_some(tmp_path, capsys):
    for arguments in (["list"], ["remove", "alice"]):
        assert main(["serve", "key", *arguments, f"folder={tmp_path}"]) == 2
        assert f"no service has kept keys in {tmp_path}" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
    assert main(["serve", "key", "add", "alice", f"folder={tmp_path}"]) == 0
    assert main(["serve", "key", "list", f"folder={tmp_path}"]) == 0
    assert "alice: " in capsys.readouterr().out
