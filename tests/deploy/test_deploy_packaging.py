"""Images, the compose file and systemd units say what the code does: commands, folders, ports, accounts."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer

from fedquilt.cli.deploy import deploy_app
from fedquilt.deploy.project import Address
from fedquilt.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "packaging" / "systemd"
CONTAINERFILE = (ROOT / "containers" / "Containerfile").read_text()
PAGE = (ROOT / "docs" / "containers.md").read_text()


def taken(words: list[str]) -> dict[str, Any]:
    """What `fedquilt deploy` makes of a command's words, without doing it; a wrong word is an error."""
    group: Any = typer.main.get_command(deploy_app)
    name, command, rest = group.resolve_command(group.make_context("deploy", list(words)), list(words))
    return {"command": name, **command.make_context(name, rest).params}


def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / "containers" / "compose.yaml").read_text())["services"]
    return found


def unit(name: str) -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / name)
    return parser


def stages() -> dict[str, str]:
    """Each stage of the Containerfile, by its name."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", CONTAINERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_an_image_copies_what_is_there_and_starts_what_exists() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", CONTAINERFILE, flags=re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split()[:-1]), line
    assert len(re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)) == 1
    assert 'ENTRYPOINT ["fedquilt", "deploy"]' in CONTAINERFILE
    for stage, command in (("client", "client"), ("server", "server")):
        (words,) = re.findall(r"^CMD (\[.+\])$", stages()[stage], flags=re.MULTILINE)
        assert taken(list(re.findall(r'"([^"]+)"', words)))["command"] == command
    assert "nginx" in stages()["server"]
    assert f"EXPOSE {Address().port}" in stages()["server"]


def test_a_composed_federation_is_the_one_that_the_page_makes() -> None:
    services = compose()
    server = services.pop("server")
    told = taken(server["command"])
    assert f"{told['folder']}" == server["volumes"][0].partition(":")[2] == "/fed"
    outside, status = server["ports"]
    assert outside == f"{Address().port}:{Address().port}"
    assert status == f"127.0.0.1:{told['status_port']}:{told['status_port']}"
    (made,) = re.findall(r"fedquilt-server \\\n\s+(init /fed .+)", PAGE)
    words = taken(shlex.split(made))
    assert list(words["host"]) == ["server"]  # what clients call it is what the compose file calls it
    assert words["listen"] == "0.0.0.0"
    clients = SCENARIOS[words["scenario"]](clients=3).clients
    assert set(services) == {client.name for client in clients}
    assert len({tuple(sorted(client.traits.items())) for client in clients}) == 3  # unlike
    for name, service in services.items():
        place, _, inside = service["volumes"][0].partition(":")
        assert place == f"./clients/{name}"
        assert [str(folder) for folder in taken(service["command"])["folders"]] == [inside]
    for service in (server, *services.values()):
        assert service["build"]["target"] in stages()
        assert (ROOT / "containers" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", ["fedquilt-server.service", "fedquilt-client@.service"])
def test_a_unit_starts_what_exists_in_the_one_folder_that_it_may_write(name: str) -> None:
    service = unit(name)["Service"]
    program, deploy, *words = service["ExecStart"].split()
    assert (program, deploy) == ("/opt/fedquilt/bin/fedquilt", "deploy")
    told = taken(words)
    folders = [told["folder"]] if told["command"] == "server" else told["folders"]
    assert [str(folder) for folder in folders] == [f"/var/lib/{service['StateDirectory']}"]
    accounts = re.findall(r"^u (\S+) ", (UNITS / "fedquilt.sysusers").read_text(), flags=re.MULTILINE)
    assert service["User"] in accounts
    for setting in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictNamespaces"):
        assert service[setting] == "yes"
    assert (service["ProtectSystem"], service["Restart"]) == ("strict", "always")
    assert service["CapabilityBoundingSet"] == ""
    assert unit(name)["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", ["fedquilt-server.service", "fedquilt-client@.service"])
def test_systemd_has_nothing_to_say_about_a_unit(name: str, tmp_path: Path) -> None:
    file = tmp_path / name.replace("@.", "@phone-1.")
    file.write_text((UNITS / name).read_text().replace("/opt/fedquilt/bin/fedquilt", "/bin/true"))
    told = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60)
    about = [line for line in (told.stdout + told.stderr).splitlines() if "fedquilt" in line]
    assert not about


def test_commands_on_the_page_are_commands() -> None:
    joined = PAGE.replace("\\\n", " ")
    lines = [
        line for block in re.findall(r"```console\n(.*?)```", joined, flags=re.DOTALL) for line in block.splitlines()
    ]
    found = [line.partition("fedquilt deploy ")[2] for line in lines if line[0] in "$#" and "fedquilt deploy " in line]
    assert len(found) >= 4
    for words in found:
        taken(shlex.split(words, comments=True))
