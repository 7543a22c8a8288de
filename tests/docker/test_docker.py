"""The files in `docker/` and `scripts/atlas/`: what can be known of them without a container engine."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from langgraph.types import Command

from mongo_durable.store.roles import ROLES, privileges

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"

COMPOSE = pytest.mark.parametrize("name", ["compose.yml", "compose.three.yml"])


def _compose(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    return loaded


@COMPOSE
def test_everything_that_a_service_names_is_there(name: str) -> None:
    """Services, secrets, volumes and mounted files."""
    compose = _compose(name)
    for service in compose["services"].values():
        assert set(service.get("depends_on", ())) <= set(compose["services"])
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        if "network_mode" in service:
            assert service["network_mode"].removeprefix("service:") in compose["services"]
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", volume).partition(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in compose["volumes"], volume
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for word in service.get("entrypoint", ()):
            assert not word.startswith("/init/") or (DOCKER / word.removeprefix("/init/")).exists() or (DOCKER / "init" / Path(word).name).exists()


@COMPOSE
def test_servers_are_pinned_healthy_and_closed(name: str) -> None:
    """Every server has an exact version, authorization and a health check; nothing starts before what it needs; only this machine gets in."""
    services = _compose(name)["services"]
    servers = {each: service for each, service in services.items() if each.startswith("mongo")}
    assert len(servers) == (1 if name == "compose.yml" else 3)
    for service in servers.values():
        assert re.fullmatch(r"mongo:8\.\d+\.\d+", service["image"])
        assert service["entrypoint"] == ["/init/keyfile.sh"]
        assert "keyfile" in service["secrets"]
        assert service["healthcheck"]["test"][0] == "CMD"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert services["init"]["image"] == next(iter(servers.values()))["image"]
    assert services["init"]["depends_on"] == {each: {"condition": "service_healthy"} for each in servers}
    assert services["init"]["environment"]["HOSTS"] == ",".join(f"{each}:27017" for each in servers)
    assert services["schema"]["depends_on"] == {"init": {"condition": "service_completed_successfully"}}
    assert services["runner"]["depends_on"] == {"schema": {"condition": "service_completed_successfully"}}
    assert services["runner"]["secrets"] == ["runner_password"]
    assert services["runner"]["environment"]["MONGO_DURABLE_USER"] == "runner"


def test_the_image_is_pinned_and_runs_as_nobody_in_particular() -> None:
    """An exact Python, a user without rights, and no file that is not there."""
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    (base,) = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert re.fullmatch(r"python:3\.12\.\d+-slim-\w+", base)
    (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert user != "root"
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in lines:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert source in allowed, f"{source} does not reach the build"


def test_no_secret_is_committed(tmp_path: Path) -> None:
    """Passwords and keyfile are made on the spot, once, differ, are readable for containers, and are ignored by Git and by builds."""
    shutil.copy(DOCKER / "secrets.sh", tmp_path)

    def make() -> dict[str, str]:
        subprocess.run([tmp_path / "secrets.sh"], check=True)
        return {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}

    made = make()
    assert make() == made
    assert set(made) == set(_compose("compose.yml")["secrets"]) == set(_compose("compose.three.yml")["secrets"])
    assert len(set(made.values())) == len(made)
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert 6 <= len(made["keyfile"]) <= 1024
    assert "/docker/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    for path in DOCKER.rglob("*"):
        if path.is_file() and "secrets" not in path.relative_to(DOCKER).parts:
            assert not re.search(r"mongodb(\+srv)?://\w+:(?!\$)[^$\s{]+@", path.read_text()), path


@pytest.mark.parametrize("given", [None, "mongodb://elsewhere/"])
def test_the_entry_point_puts_the_uri_together(given: str | None, tmp_path: Path) -> None:
    """From user, secret and hosts, unless a URI is given."""
    (tmp_path / "mongo-durable").write_text('#!/bin/sh\necho "$MONGO_DURABLE_URI" "$@"\n')
    (tmp_path / "mongo-durable").chmod(0o755)
    (tmp_path / "runner_password").write_text("abc123\n")
    script = (DOCKER / "entrypoint.sh").read_text().replace("/run/secrets", str(tmp_path))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MONGO_DURABLE_USER": "runner", "MONGO_DURABLE_HOSTS": "a:1,b:2"}
    if given is not None:
        environment["MONGO_DURABLE_URI"] = given
    said = subprocess.run(["sh", "-c", script, "sh", "runner", "app:app"], env=environment, check=True, capture_output=True, text=True).stdout
    made = "mongodb://runner:abc123@a:1,b:2/?replicaSet=rs0&authSource=mongo_durable"
    assert said == f"{given or made} runner app:app\n"


def test_generated_roles_are_up_to_date() -> None:
    """`scripts/generate_roles.py` has been run since the table of roles was changed."""
    generated = runpy.run_path(str(ROOT / "scripts" / "generate_roles.py"))["files"]("mongo_durable")
    for path, text in generated.items():
        assert (ROOT / path).read_text() == text, f"{path} is not up to date: run scripts/generate_roles.py"
    assert {f"scripts/atlas/{path.name}" for path in (ROOT / "scripts" / "atlas").iterdir()} == {path for path in generated if "atlas" in path}


@pytest.mark.parametrize("role", ROLES)
def test_atlas_roles_give_the_same_rights(role: str) -> None:
    """Atlas lists collections by action; it says the same as the table."""
    made = json.loads((ROOT / "scripts" / "atlas" / f"{role}.json").read_text())
    assert made["roleName"] == f"mongo-durable-{role}"
    given = {
        (re.sub(r"_(\w)", lambda letter: letter[1].upper(), each["action"].lower()), resource["db"], resource["collection"])
        for each in made["actions"]
        for resource in each["resources"]
    }
    wanted = {
        (action, each["resource"]["db"], each["resource"]["collection"]) for each in privileges(role, "mongo_durable") for action in each["actions"]
    }
    assert given == wanted


async def test_the_example_asks_and_buys(mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the runners of the compose files execute works."""
    monkeypatch.setenv("MONGO_DURABLE_URI", mongo_uri)
    monkeypatch.setenv("MONGO_DURABLE_DATABASE", database)
    app = runpy.run_path(str(DOCKER / "example" / "app.py"))["app"]
    config = {"configurable": {"thread_id": "t"}}
    out = await app.ainvoke({"item": "desk"}, config)
    assert out["__interrupt__"][0].value == {"question": "Buy desk for 28?"}
    assert (await app.ainvoke(Command(resume=True), config))["bought"] is True
    await app.aclose()
