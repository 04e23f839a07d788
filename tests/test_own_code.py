"""Strategies and networks of one's own: functions, files, modules, distributions."""

import json
import textwrap

import pytest

import mucudnn
from mucudnn import models, strategies
from mucudnn.backends import backend_names, get_backend
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.devices import get_device
from mucudnn.ir.optimizers import Adam, ConstantRate, CosineRate
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.microbatch import candidate_batches
from mucudnn.passes.ordering import depth_first
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import POLICIES, Residency, saved_tensors
from mucudnn.passes.scheduling import on_demand
from mucudnn.plugins import PluginWarning
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import StepSpec
from tests.commands import done, json_of, refused, run

NETWORK = """
    from mucudnn.ir.builder import GraphBuilder

    def tiny(batch):
        g = GraphBuilder()
        x = g.input("image", (batch, 3, 8, 8))
        label = g.input("label", (batch,), "int64")
        logits = g.linear(g.flatten(g.relu(g.conv(x, 4, 3, padding="same"))), 3)
        loss = g.softmax_cross_entropy(logits, label)
        return g.build(loss, g.accuracy(logits, label))

    def sized(batch, *, image=(3, 8, 8), classes=5, training=True):
        g = GraphBuilder(training=training)
        x = g.input("image", (batch, *image))
        label = g.input("label", (batch,), "int64")
        logits = g.linear(g.flatten(g.dropout(g.relu(g.conv(x, 4, 3)))), classes)
        loss = g.softmax_cross_entropy(logits, label)
        return g.build(loss, g.accuracy(logits, label))

    def always_drops(batch):
        return sized(batch)

    def nothing(batch):
        return None

    def raises(batch):
        return [][batch]  # line 27

    def misuses(batch):
        return GraphBuilder().relu("nowhere")  # line 30

    def wants_more(batch, depth):
        return None

    def untrained(batch):
        g = GraphBuilder()
        logits = g.flatten(g.relu(g.input("image", (batch, 3, 8, 8))))
        label = g.input("label", (batch,), "int64")
        return g.build(g.softmax_cross_entropy(logits, label))

    constant = 3
"""

STRATEGIES = """
    from mucudnn.passes.residency import Residency, saved_tensors
    from mucudnn.strategies import PLANNERS, POLICIES, SCHEDULERS

    def first_leaves{n}(step):
        return {{s.name: Residency.OFFLOAD for s in saved_tensors(step.graph)[:1]}}

    POLICIES.register(first_leaves{n})

    @SCHEDULERS.register
    def shortest{n}(problem):
        return problem.least()

    @PLANNERS.register
    def whole{n}(tables, limit):
        return PLANNERS.resolve("undivided")(tables, limit)
"""


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """A folder of one's own, tables and paths as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in strategies.__all__:
        table = getattr(strategies, name)
        monkeypatch.setattr(table, "_table", dict(table._table))


def write(path, text, **values):
    path.write_text(textwrap.dedent(text.format(**values) if values else text))
    return path


@pytest.fixture
def network(tmp_path):
    write(tmp_path / "net.py", NETWORK)
    return "net.py:{}".format


@pytest.fixture(scope="module")
def step():
    g = GraphBuilder()
    x = g.input("image", (4, 3, 16, 16))
    for _ in range(3):
        x = g.relu(g.conv(x, 4, 3, padding="same"))
    logits = g.linear(g.flatten(x), 3)
    loss = g.softmax_cross_entropy(logits, g.input("label", (4,), "int64"))
    return with_updates(training_graph(g.build(loss)), Adam())


@pytest.fixture(scope="module")
def profile(step):
    return estimate(step, get_device("h200"))


def everything_leaves(step):
    return {saved.name: Residency.OFFLOAD for saved in saved_tensors(step.graph)}


def shortest(problem):
    return problem.least()


def plan(step, profile, **options):
    return plan_step(StepRequest(step, profile, budget=10**9, **options))


def placed(step, profile, **options):
    return place_step(StepRequest(step, profile, budget=10**6, **options)).plan


@pytest.mark.parametrize("way", [plan, placed])
def test_a_policy_and_a_scheduler_may_be_functions(way, step, profile):
    ours = way(step, profile, policy=everything_leaves, scheduler=shortest)
    assert (ours.policy, ours.scheduler) == ("everything_leaves", "shortest")
    theirs = way(step, profile, policy="lru", scheduler=shortest)
    assert ours.residency == theirs.residency
    assert ours.schedule.instructions == theirs.schedule.instructions
    if way is plan:  # a function is as good as its name
        for name, policy in POLICIES.table.items():
            named, given = (way(step, profile, policy=p) for p in (name, policy))
            assert named.schedule == given.schedule
            assert named.policy == given.policy == name


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (lambda step: None, TypeError, "returned None; it must return a mapping"),
        (lambda step: ["x"], TypeError, "a mapping from names"),
        (
            lambda step: {"gone": Residency.KEEP},
            ValueError,
            "'gone', which is not a tensor",
        ),
        (lambda step: {"image": "offload"}, TypeError, "choose one of: Residency.KEEP"),
        (3, TypeError, "must be a name or a function, got 3"),
        (None, TypeError, "must be a name or a function"),
        ("x", ValueError, "unknown policy 'x'; choose one of: .*planned"),
    ],
)
def test_a_policy_of_ones_own_is_checked(policy, error, message, step, profile):
    for way in (plan, placed):
        with pytest.raises(error, match=message):
            way(step, profile, policy=policy)


@pytest.mark.parametrize("found", [None, [], ([1], 2), 3])
def test_a_scheduler_of_ones_own_is_checked(found, step, profile):
    with pytest.raises(TypeError, match="a list of intervals and their ledger"):
        plan(step, profile, policy="lru", scheduler=lambda problem: found)


def odd(batch):
    return range(1, batch, 2)


def one_by_one(tables, workspace_limit):
    return [ConvPlan(t.problem, (t.fastest(1),) * t.problem.batch) for t in tables]


def test_a_study_takes_functions(tmp_path):
    def tiny(batch):
        return models.get_model("lenet")(batch)

    spec = StepSpec(model=tiny, batch=2, optimizer=Adam(), order=depth_first)
    study = study_memory(
        spec,
        policies=["lru", everything_leaves],
        schedulers=[shortest, "timed"],
        budget="64MiB",
        max_batch=False,
        min_budget=True,
    )
    pairs = [(t.policy, t.scheduler) for t in study.techniques]
    assert pairs == [
        (policy, scheduler)
        for policy in ("lru", "everything_leaves")
        for scheduler in ("shortest", "timed")
    ]
    assert set(study.min_budget) == {"lru", "everything_leaves"}
    data = study.to_json()
    assert (data["model"], data["order"]) == ("tiny", "depth_first")
    json.dumps(data)
    with pytest.raises(ValueError, match="two of the policies are called '<lambda>'"):
        study_memory(spec, policies=[lambda s: {}, lambda s: {}], budget="1GiB")


def made(**options):
    graph = models.get_model("digits")(4, classes=4)
    settings = {"tuner": mucudnn.Tuner(backend="null"), "optimizer": "sgd"}
    return Trainer(graph, **settings | options)


def rate_of(**options):
    import numpy as np

    images = np.zeros((4, 1, 8, 8), np.float32)
    return made(**options).step(images, [0, 1, 2, 3]).learning_rate


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({"optimizer": "adam"}, 1e-3),
        ({"optimizer": Adam}, 1e-3),
        ({"optimizer": Adam(0.5)}, 0.5),
        ({"optimizer": lambda: Adam(0.25)}, 0.25),
        ({"learning_rate": 0.125}, 0.125),
        ({"learning_rate": lambda step: 2 + step}, 2.0),
        ({"learning_rate": "step:10,20"}, 0.1),
        ({"learning_rate": ConstantRate(0.75)}, 0.75),
        ({"learning_rate": 0}, 0.0),
    ],
)
def test_an_optimizer_and_a_rate_in_every_way(options, rate):
    assert rate_of(**options) == rate


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"optimizer": "adm"},
            ValueError,
            "unknown optimizer 'adm'; choose one of: ada",
        ),
        ({"optimizer": lambda: 3}, TypeError, "optimizer is 3; choose one of"),
        ({"learning_rate": "cosine"}, ValueError, "the total number of steps"),
        ({"learning_rate": CosineRate(0.1)}, ValueError, "lambda step: rate.at"),
        ({"learning_rate": lambda step: "x"}, TypeError, r"learning_rate\(0\) must be"),
        ({"learning_rate": [0.1]}, TypeError, "a function from a step"),
        ({"budget": "lots"}, ValueError, "'lots' is not a size"),
        ({"budget": 0.5}, TypeError, "budget must be a MemoryBudget, or a size"),
        ({"order": lambda graph, sizes: None}, TypeError, "with the same nodes"),
        ({"tuner": "cpu"}, TypeError, r"mucudnn.Tuner, such as Tuner\(\)"),
    ],
)
def test_what_a_trainer_refuses(options, error, message):
    with pytest.raises(error, match=message):
        rate_of(**options)


def test_a_budget_in_words_is_that_many_bytes():
    assert MemoryBudget(nbytes="1MiB") == MemoryBudget(nbytes=1 << 20)
    assert MemoryBudget.of("1MiB") == MemoryBudget(nbytes=1 << 20)
    assert MemoryBudget(nbytes=1, disk="there").disk.name == "there"
    trainer = made(
        budget=MemoryBudget(nbytes="8MiB", policy=everything_leaves, scheduler=shortest)
    )
    assert trainer.placed.plan.policy == "everything_leaves"
    assert trainer.peak_bytes <= 8 << 20


def test_a_planner_and_a_batch_policy_may_be_functions_and_are_checked():
    problem = mucudnn.ConvProblem(
        direction="forward", x_shape=(5, 3, 8, 8), w_shape=(4, 3, 3, 3)
    )
    tuner = mucudnn.Tuner(backend="null", planner=one_by_one, validate=False)
    (found,) = tuner.plan([problem])
    assert [step.batch for step in found.steps] == [1] * 5
    for planner, error in (
        (lambda t, w: None, TypeError),
        (lambda t, w: [], ValueError),
    ):
        tuner = mucudnn.Tuner(backend="null", planner=planner)
        with pytest.raises(error, match="planner '<lambda>' returned"):
            tuner.plan([problem])
    assert candidate_batches(6, odd) == (1, 3, 5, 6)
    with pytest.raises(ValueError, match="'<lambda>' returned for 4 is beyond"):
        candidate_batches(4, lambda batch: [8])
    tuner = mucudnn.Tuner(backend="null", batch_policy=odd)
    assert tuner.measure(problem).batches() == (1, 3, 5)


def test_a_network_of_a_file_is_planned_and_trained(network):
    data = json_of("memory", network("tiny"), "--batch", 4, "--budget", "1MiB")
    assert data["model"] == "net.py:tiny"
    for name, classes in (("tiny", 3), ("sized", 10)):
        data = json_of(
            *("train", network(name), "--steps", 1, "--epochs", 1, "--batch", 4),
            *("--backend", "null", "--cache", "none"),
        )
        assert data["settings"]["classes"] == classes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "net.py:nothing returned NoneType, not a Graph"),
        ("raises", "net.py, line 27: IndexError: list index out of range"),
        ("misuses", "net.py, line 30: ValueError: there is no tensor 'nowhere'"),
        ("wants_more", "cannot be called with a batch alone: missing a required"),
        ("untrained", "the loss depends on no parameter, so there is nothing to train"),
        ("gone", "there is no function 'gone' in net.py; it has: tiny, sized"),
        ("constant", "there is no function 'constant'"),
        ("", "net.py is a file; name a function in it"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(name, message, network):
    assert message in refused("memory", network(name).removesuffix(":"))
    assert message in refused("train", network(name).removesuffix(":"))


def test_a_step_of_pytorch_is_neither_trained_nor_shared_out(tmp_path):
    file = tmp_path / "net.py"
    file.write_text("def step(batch):\n    return 1, 2, 3, 4\n")
    for command in (("train",), ("fleet", "--devices", "p100")):
        line = refused(*command, f"{file}:step")
        assert "returned tuple, not a Graph; `mucudnn memory` studies" in line


def test_a_network_is_what_was_asked_for(network):
    assert "must use its argument `image`" in refused(
        "memory", network("tiny"), "--image", 9
    )
    assert "must take `training`" in refused(
        "train", network("always_drops"), "--backend", "null", "--cache", "none"
    )
    assert "called with classes 10" in refused(
        *("train", network("tiny"), "--data", "synthetic:classes=10"),
        *("--backend", "null", "--cache", "none"),
    )


def test_files_that_are_none(tmp_path):
    assert "gone.py does not exist" in refused("memory", "gone.py:f")
    assert "gone.py does not exist" in refused("memory", "lenet", "--import", "gone.py")
    (tmp_path / "folder.py").mkdir()
    assert "folder.py is a folder" in refused("memory", "folder.py:f")
    assert "no such module" in refused("memory", "lenet", "--import", "gone.away")
    assert "neither a module" in refused("memory", "lenet", "--import", "a-b")
    write(tmp_path / "wrong.py", "x = 1\ny = = 2\n")
    assert "wrong.py, line 2: SyntaxError" in refused("memory", "wrong.py:f")
    write(tmp_path / "leaves.py", "import sys\nsys.exit(3)\n")
    assert "leaves.py, line 2: SystemExit: 3" in refused(
        "tune", "--import", "leaves.py", "--list"
    )
    write(tmp_path / "fails.py", "import nowhere_at_all\n")
    assert "fails.py, line 1: ModuleNotFoundError" in refused(
        "train", "lenet", "--import", "fails"
    )


def test_what_is_imported_is_known_to_every_command(tmp_path):
    write(tmp_path / "mine.py", STRATEGIES, n=3)
    write(tmp_path / "other_strategies.py", STRATEGIES, n=2)
    rows = json_of(
        *("memory", "lenet", "--import", "mine.py", "--import", "other_strategies"),
        *("--budget", "1GiB", "--policy", "first_leaves3,first_leaves2"),
        *("--scheduler", "shortest3"),
    )["rows"]
    found = [(row["policy"], row["scheduler"]) for row in rows]
    assert found == [(f"first_leaves{n}", "shortest3") for n in (3, 2)]
    text = done("memory", "--import", "mine.py", "--help")
    assert "first_leaves3" in text
    assert "shortest3" in text
    problem = "n=2,c=3,h=8,w=8,k=4,r=3,s=3"
    for command in ("explain", "tune"):
        done(
            *(command, "--import", "mine.py", "--planner", "whole3"),
            *("--problem", problem, "--backend", "null", "--cache", "none"),
        )
    data = json_of(
        *("train", "digits", "--import", "mine.py", "--policy", "first_leaves3"),
        *("--scheduler", "shortest3", "--budget", "8MiB", "--steps", 1, "--epochs", 1),
        *("--backend", "null", "--cache", "none"),
    )
    assert data["memory"]["policy"] == "first_leaves3"


def test_a_strategy_that_fails_is_told_with_its_line(tmp_path):
    text = """
        from mucudnn.strategies import POLICIES

        @POLICIES.register
        def divides(step):
            return 1 / 0

        @POLICIES.register
        def refuses(step):
            raise ValueError("no")
    """
    write(tmp_path / "bad.py", text)
    common = ("memory", "lenet", "--import", "bad.py", "--budget", "1GiB", "--policy")
    assert refused(*common, "divides").endswith(
        "bad.py, line 6: ZeroDivisionError: division by zero"
    )
    for name in ("divides", "refuses"):
        POLICIES._table.pop(name)


def test_a_name_that_is_taken_is_refused_with_its_line(tmp_path):
    text = """
        from mucudnn.strategies import POLICIES

        @POLICIES.register
        def {n}(step):
            return {{}}
    """
    for name in ("lru", "planned", "all"):
        write(tmp_path / f"{name}_.py", text, n=name)
        line = refused("memory", "lenet", "--import", f"{name}_.py")
        assert f"{name!r} is already registered" in line
        assert f"{name}_.py, line " in line


def distribution(folder, name, entries, **modules):
    """A fake installed distribution."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text(entries)
    for module, text in modules.items():
        write(folder / f"{module}.py", text)


@pytest.fixture
def installed(tmp_path):
    write(tmp_path / "plugin_net.py", NETWORK)
    distribution(
        tmp_path,
        "mu-extras",
        "[mucudnn.policies]\nfrom_afar = mu_extras:policy\n"
        "[mucudnn.schedulers]\nin_time = mu_extras:scheduler\n"
        "[mucudnn.planners]\nwholly = mu_extras:planner\n"
        "[mucudnn.models]\nfar_net = plugin_net:tiny\n",
        mu_extras="""
            from mucudnn.passes.microbatch import undivided as planner
            from mucudnn.passes.scheduling import on_demand as scheduler

            def policy(step):
                return {}
        """,
    )


def test_what_is_installed_is_found_by_its_name(installed, step, profile):
    import mu_extras

    assert POLICIES.resolve("from_afar") is mu_extras.policy
    assert strategies.SCHEDULERS.resolve("in_time") is on_demand
    assert plan(step, profile, policy="from_afar").policy == "from_afar"
    assert models.get_model("far_net")(2).tensors["image"].shape == (2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"choose one of: .*from_afar"):
        POLICIES.resolve("x")
    with pytest.raises(ValueError, match=r"choose one of: .*far_net"):
        models.get_model("x")
    assert "from_afar" not in POLICIES.table


def test_what_is_installed_is_known_to_the_command_line(installed, short_search):
    rows = json_of(
        *("memory", "far_net", "--policy", "all", "--scheduler", "in_time"),
        *("--budget", "1GiB"),
    )["rows"]
    assert "from_afar" in [row["policy"] for row in rows]
    assert "far_net" in run("memory", "--list").stdout
    assert "far_net" in run("train", "--list").stdout
    assert "from_afar" in run("train", "--help").stdout
    assert "wholly" in run("tune", "--help").stdout
    assert "wholly" in refused("tune", "--planner", "x")


BROKEN = "[{group}]\nhopeless = hopeless_plugin{attribute}\n"


@pytest.mark.parametrize(
    ("attribute", "module", "why"),
    [
        (":policy", "import nowhere_at_all", "ModuleNotFoundError"),
        (":policy", "raise RuntimeError('boom')", "RuntimeError: boom"),
        (":policy", "import sys; sys.exit(1)", "SystemExit"),
        (":gone", "", "AttributeError"),
        (":policy", "policy = 3", "no function but 3|a function of the batch"),
    ],
)
def test_a_broken_entry_point_is_a_warning_that_names_it(
    attribute, module, why, tmp_path, monkeypatch
):
    import sys

    for group, resolve in (
        ("mucudnn.policies", POLICIES.resolve),
        ("mucudnn.models", models.get_model),
    ):
        name = f"sad-{group[8:]}"
        entries = BROKEN.format(group=group, attribute=attribute)
        distribution(tmp_path, name, entries, hopeless_plugin=module)
        monkeypatch.delitem(sys.modules, "hopeless_plugin", raising=False)
        with (
            pytest.warns(PluginWarning, match=why) as caught,
            pytest.raises(ValueError, match=r"unknown .* 'hopeless'"),
        ):
            resolve("hopeless")
        assert len(caught) == 1
        assert name in str(caught[0].message)
        monkeypatch.delitem(sys.modules, "hopeless_plugin", raising=False)


def test_a_broken_entry_point_harms_no_command(tmp_path, short_search):
    entries = "[mucudnn.policies]\nhopeless = gone_plugin:f\n"
    entries += "[mucudnn.models]\nsad_net = gone_plugin:f\n"
    distribution(tmp_path, "sad-thing", entries)
    shown = run("memory", "lenet", "--policy", "all", "--budget", "1GiB", "--json", "-")
    assert "hopeless" not in [r["policy"] for r in json.loads(shown.stdout)["rows"]]
    assert "sad-thing" in shown.stderr
    shown = run("memory", "--list")
    assert shown.exit_code == 0
    assert shown.stderr.count("sad-thing") == 1
    assert "sad_net" not in shown.stdout
    line = refused("memory", "lenet", "--policy", "hopeless")
    assert "unknown residency policy 'hopeless'" in line


def test_a_damaged_list_of_entry_points_is_passed_over(tmp_path):
    distribution(tmp_path, "torn", "[mucudnn.policies]\nno equals sign\n")
    with pytest.warns(PluginWarning, match="distribution torn cannot be read"):
        assert "cpu" in backend_names()
    with (
        pytest.warns(PluginWarning, match="torn"),
        pytest.raises(ValueError, match="unknown residency policy"),
    ):
        POLICIES.resolve("x")
    assert POLICIES.resolve("lru")
    for name in ("one-thing", "other-thing"):
        distribution(tmp_path, name, "[mucudnn.policies]\ntwin = os:getcwd\n")
    with (
        pytest.warns(PluginWarning, match="torn"),
        pytest.raises(ValueError, match=r"(one|other)-thing and (one|other)-thing"),
    ):
        POLICIES.resolve("twin")


@pytest.mark.parametrize("module", ["raise RuntimeError('boom')", "x = 1"])
def test_a_backend_that_is_broken_says_whose_it_is(module, tmp_path):
    entries = "[mucudnn.backends]\nhopeless = hopeless_backend\n"
    distribution(tmp_path, "sad-backend", entries, hopeless_backend=module)
    with pytest.raises(BackendUnavailableError, match="distribution sad-backend"):
        get_backend("hopeless")
    assert "hopeless: unavailable" in done("info", "--cache", "none")
