"""What commands write as JSON is what docs/reference/schemas says, member by member."""

import json
from pathlib import Path

import pytest

from tests.commands import run

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: mucudnn[dev]")

pytestmark = pytest.mark.usefixtures("short_searches")

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "schemas"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
NULL = ("--backend", "null", "--cache", "none")
PROBLEM = ("--problem", "n=8,c=4,h=9,w=9,k=8,r=3,s=3,pad=1")
NET = ("--device", "null", "--batch", "4")
DATA = ("--data", "synthetic:length=32,classes=10", "--batch", "8", "--epochs", "1")
TRAIN = ("train", "digits", *DATA, *NULL)
CACHE = ("--cache", "cache.sqlite")
CALLS = [
    ("tune", ("tune", *PROBLEM, *NULL, "--workspace-limit", "1KiB,1MiB")),
    ("tune", ("tune", *PROBLEM, *NULL, "--total-workspace", "1MiB")),
    ("tune", ("tune", *PROBLEM, *NULL, "--memory-limit", "1KiB")),
    ("tune", ("tune", *PROBLEM, *NULL, "--batch-policy", "undivided")),
    ("tune_plan_only", ("tune", *PROBLEM, *NULL, "--plan-only")),
    (
        "tune_plan_only",
        ("tune", *PROBLEM, *NULL, "--plan-only", "--numerics", "deterministic"),
    ),
    ("tune_list", ("tune", "--list")),
    ("explain", ("explain", *PROBLEM, *NULL, "--directions", "all")),
    ("memory", ("memory", "lenet", *NET, "--budget", "16MiB", "--curve")),
    ("memory", ("memory", "lenet", *NET, "--budget", "1MiB")),
    ("memory", ("memory", "lenet", *NET, "--split", "auto", "--policy", "planned")),
    ("memory", ("memory", "lenet", *NET, "--inference", "--policy", "keep_all")),
    (
        "memory",
        ("memory", "lenet", *NET, "--policy", "lru", "--min-budget", "--slowdown", "2"),
    ),
    (
        "memory",
        ("memory", "lenet", *NET, "--policy", "lru", "--max-batch", "--budget", "9MiB"),
    ),
    ("fleet", ("fleet", "lenet", "--devices", "k80,p100", "--batch", "8")),
    ("fleet", ("fleet", "lenet", "--devices", "k80", "--batch", "8-16")),
    ("train", (*TRAIN, "--steps", "2")),
    ("train", (*TRAIN, "--steps", "2", "--budget", "1GiB", "--split", "auto")),
    ("train", (*TRAIN, "--steps", "2", "--budget", "1GiB", "--tier", "host=1GiB")),
    ("models", ("train", "--list")),
    ("models", ("memory", "--list")),
    ("info", ("info", "--cache", "none")),
    ("doctor", ("doctor", "--cache", "none")),
    ("cache_list", ("cache", "list", *CACHE)),
    ("cache_file", ("cache", "export", "all.json", *CACHE)),
    ("cache_file", ("cache", "import", "all.json", *CACHE)),
    ("cache_path", ("cache", "path", *CACHE)),
    ("cache_clear", ("cache", "clear", *CACHE)),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def agrees(name, found):
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    assert [f"{e.json_path}: {e.message}" for e in validator.iter_errors(found)] == []


@pytest.mark.parametrize(("name", "call"), CALLS, ids=lambda x: "-".join(x)[:60])
def test_what_a_command_writes_is_documented(name, call):
    if call[0] == "cache":
        run("explain", *PROBLEM, "--backend", "null", *CACHE)
        run("cache", "export", "all.json", *CACHE)
    done = run(*call, "--json", "-")
    assert done.stdout, done.stderr
    agrees(name, json.loads(done.stdout))


def test_a_log_is_documented():
    assert run(*TRAIN, "--steps", "2", "--log", "log.jsonl").exit_code == 0
    found = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert {entry["kind"] for entry in found} == {"step", "epoch"}
    for entry in found:
        agrees("train_log", entry)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_tried_and_listed(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert name in {"train_log", *(name for name, _ in CALLS)}
    listing = (FOLDER.parent / "files.md").read_text()
    assert f"(schemas/{name}.json)" in listing


def objects(schema):
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for value in schema.values():
            yield from objects(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_member_that_is_not_documented_would_be_found(name):
    for found in objects(SCHEMAS[name]):
        assert found["additionalProperties"] is False
