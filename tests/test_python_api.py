"""The library as people write it: what its functions take, what they do by default, and how results are shown."""

import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import isobasin as ib
import tiny
from isobasin.display import MAX_ROWS, Summary, in_notebook, notebook_progress, notebook_steps
from isobasin.errors import IsobasinError
from isobasin.runtime import module_of
from isobasin.weights import Weights

CASE = tiny.case("llama-bare")  # one layer: the smallest
LM = tiny.case("llama-tied")
SCREEN = 25  # lines


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return CASE.build(seed=0), CASE.build(seed=1)


@pytest.fixture(scope="module")
def language_models() -> tuple[Any, Any]:
    return LM.build(seed=0), LM.build(seed=1)


@pytest.fixture(scope="module")
def shown(pair: tuple[Any, Any], language_models: tuple[Any, Any]) -> dict[str, Any]:
    """One of everything that functions return."""
    a, b = pair
    ids = torch.randint(1, tiny.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    found = ib.align(b, to=a)
    return {
        "weights": ib.load(a),
        "moved": ib.scramble(a).apply(a),
        "transform": found.transform,
        "alignment": found,
        "symmetry": ib.symmetry(a),
        "check": ib.check(a),
        "distance": ib.distance(a, b, null_samples=2),
        "verdict": ib.equivalent(a, ib.scramble(a).apply(a)),
        "merge": ib.merge([a, b]),
        "together": ib.align_many([a, b]),
        "fingerprint": ib.fingerprint(a),
        "task": ib.Task.from_dataloader([{"input_ids": ids, "labels": ids}]),
        "curve": ib.evaluate_path(*language_models, loss=loss_on(ids), n_points=3),
    }


def loss_on(ids: torch.Tensor) -> Any:
    return lambda model: model(input_ids=ids, labels=ids).loss


def rows(loader: Any) -> list[tuple[dict[str, Any], Any]]:
    return [(batch.inputs, batch.targets) for batch in ib.Task.from_dataloader(loader)]


# -- what functions take ----------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "matplotlib", "scipy", "IPython")
    script = (
        "import sys, json, isobasin; names = dir(isobasin); "
        f"print(json.dumps([names, [m for m in {heavy} if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names, imported = json.loads(done.stdout)
    assert imported == []
    assert {"LearnedMatching", "Task", "merge", "plot_path"} <= set(ib.__all__) <= set(names)
    assert all(getattr(ib, name) is not None for name in dir(ib))


def test_a_folder_a_model_in_memory_and_loaded_weights_are_the_same(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model = pair[0]
    model.save_pretrained(tmp_path / "a")
    sources = [str(tmp_path / "a"), tmp_path / "a", model, ib.load(model)]
    assert len({str(ib.fingerprint(source)) for source in sources}) == 1
    assert len({ib.symmetry(source).dim for source in sources}) == 1
    moved = [ib.scramble(source).apply(source) for source in sources]
    assert all(torch.equal(moved[0][name], other[name]) for other in moved for name in moved[0])
    query = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(ib.scramble(model).apply(model)[query], moved[0][query])
    assert not torch.equal(ib.scramble(model, seed=1).apply(model)[query], moved[0][query])
    found = ib.align(tmp_path / "a", to=moved[2])
    assert found.distance_after < 1e-5 < found.distance_before
    assert ib.load(moved[0]) is moved[0]
    assert ib.canonical(str(tmp_path / "a")).elements.keys() == ib.canonical(model).elements.keys()


def test_what_is_loaded_does_not_change_with_the_model() -> None:
    model = CASE.build(seed=0)
    config = model.config.to_dict() | {"architectures": ["LlamaModel"]}
    sources = {"model": ib.load(model), "tensors": ib.load(model.state_dict(), config)}
    before = {key: str(ib.fingerprint(weights)) for key, weights in sources.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    eps, model.config.rms_norm_eps = model.config.rms_norm_eps, 0.5
    for key, weights in sources.items():
        assert str(ib.fingerprint(weights)) == before[key], key
    with pytest.raises(ib.IsobasinError, match=r"variance_epsilon: is 0\.001, the config makes 0\.5 of it"):
        ib.load(model)
    model.config.rms_norm_eps = eps
    assert str(ib.fingerprint(model)) != before["model"], "the model itself did change"


WRONG: dict[str, Callable[[Any], Any]] = {
    r"align: matcher is 'weights', expected Matcher or None": lambda a: ib.align(a, to=a, matcher="weights"),  # type: ignore[arg-type]
    r"align: to is 3, expected Weights or str or Path or Mapping or PreTrainedModel": lambda a: ib.align(a, to=3),  # type: ignore[arg-type]
    r"align: device is 'xx', expected a device of this machine": lambda a: ib.align(a, to=a, device="xx"),
    r"align: device is 'meta', which holds no numbers": lambda a: ib.align(a, to=a, device="meta"),
    r"0 workers: expected at least 1": lambda a: ib.align(a, to=a, workers=0),
    r"scramble: seed is 1\.5, expected int": lambda a: ib.scramble(a, seed=1.5),  # type: ignore[arg-type]
    r"scramble: seed is 1180591620717411303424, expected int": lambda a: ib.scramble(a, seed=2**70),
    r"scramble: seed is True, expected int": lambda a: ib.scramble(a, seed=True),
    r"merge: matcher is 'weights', expected Matcher or None": lambda a: ib.merge([a, a], matcher="weights"),  # type: ignore[arg-type]
    r"merge: weights is \['a', 1\], expected Sequence of float or None": lambda a: ib.merge([a, a], weights=["a", 1]),  # type: ignore[list-item]
    r"merge: t is 'x', expected float or None": lambda a: ib.merge([a, a], t="x"),  # type: ignore[arg-type]
    r"merge: models is 'ab', expected Sequence of": lambda a: ib.merge("ab"),
    r"distance: null_samples is 'x', expected int": lambda a: ib.distance(a, a, null_samples="x"),  # type: ignore[arg-type]
    r"fingerprint: device is 'xx'": lambda a: ib.fingerprint(a, device="xx"),
    r"load_transform: path is 3, expected str or Path": lambda _: ib.load_transform(3),  # type: ignore[arg-type]
    r"save_transform: transform is 3, expected Transform": lambda _: ib.save_transform(3, "x"),  # type: ignore[arg-type]
    r"open_task: data is 3, expected Path or str": lambda a: ib.open_task(3, a),  # type: ignore[arg-type]
    r"^a: is 1, expected a tensor": lambda a: ib.load({"a": 1}, dict(a.config)),  # type: ignore[dict-item]
    r"load: config is 3, expected Mapping or None": lambda a: ib.load(dict(a), 3),  # type: ignore[arg-type]
    r"scope 'bogus' is unknown, expected one of": lambda _: ib.WeightMatching(scope="bogus"),
    r"WeightMatching: stage2 is 'half', expected 'full' or": lambda _: ib.WeightMatching(stage2="half"),  # type: ignore[arg-type]
    r"ActivationMatching: seed is '1', expected int": lambda _: ib.ActivationMatching("x", seed="1"),  # type: ignore[arg-type]
    r"scope 'x' is unknown": lambda _: ib.ReferenceMatching(scope="x"),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_of_a_wrong_type_is_one_line(message: str, pair: tuple[Any, Any]) -> None:
    with pytest.raises(IsobasinError, match=message) as found:
        WRONG[message](ib.load(pair[0]))
    assert "\n" not in str(found.value)


def test_every_argument_of_every_public_function_is_checked(pair: tuple[Any, Any]) -> None:
    weights, text = ib.load(pair[0]), "x"
    fitting = {"models": [weights, weights], "transform": ib.scramble(weights), "adapters": [text], "results": [text]}
    fitting |= dict.fromkeys(("a", "b", "to", "base", "model", "result"), weights)
    fitting |= {"found": object.__new__(ib.Lineage)}
    n_checked = 0
    for name in sorted(ib.__all__):
        function = getattr(ib, name)
        if not isinstance(function, FunctionType):
            continue
        parameters = inspect.signature(function).parameters
        needed = {key: fitting.get(key, text) for key, p in parameters.items() if p.default is p.empty}
        for key, parameter in parameters.items():
            if parameter.kind != parameter.VAR_KEYWORD:
                with pytest.raises(IsobasinError, match=rf"^{name}: \w+ is <object object"):
                    function(**{k: v for k, v in needed.items() if k != "options"} | {key: object()})
                n_checked += 1
    assert n_checked > 80


def test_a_checked_function_is_still_itself() -> None:
    assert pickle.loads(pickle.dumps(ib.align)) is ib.align is ib.align
    assert "Find the element" in str(ib.align.__doc__)
    assert list(inspect.signature(ib.scramble).parameters) == ["model", "scope", "seed"]
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        ib.scramble()  # type: ignore[call-arg]


def test_a_model_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        empty = type(CASE.build())(CASE.build().config)
    with pytest.raises(IsobasinError, match="on the device meta and has no numbers"):
        ib.load(empty)


def test_a_model_with_adapters_says_what_to_do() -> None:
    model = CASE.build()
    model.layers[0].lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2)})
    with pytest.raises(IsobasinError, match=r"adapters of PEFT .*merge_and_unload\(\)"):
        ib.load(model)


# -- what they do by default -------------------------------------------------------------------------------------------


def test_merge_aligns_unless_told_otherwise(pair: tuple[Any, Any]) -> None:
    a = ib.load(pair[0])
    copy = ib.scramble(a).apply(a)
    merged, mixed = ib.merge([a, copy]), ib.merge([a, copy], align=False)

    def change(model: Weights) -> float:
        return max(float((model[name] - a[name]).abs().max()) for name in a)

    assert change(merged.weights) < 1e-4 < 0.1 < change(mixed.weights)
    assert (merged.recipe.align, merged.recipe.matcher, mixed.recipe.align) == (True, "weights", False)
    with pytest.raises(IsobasinError, match="align=False, but a matcher"):
        ib.merge([a, copy], align=False, matcher=ib.WeightMatching())


def test_a_function_of_the_module_is_a_task(language_models: tuple[Any, Any], pair: tuple[Any, Any]) -> None:
    a, b = language_models
    ids = torch.randint(1, tiny.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    curve = ib.evaluate_path(a, b, loss=loss_on(ids), n_points=3)
    middle = ib.merge([a, b], align=False).weights
    with torch.no_grad():
        expected = [float(loss_on(ids)(module)) for module in (a, module_of(middle), b)]
    assert curve.metrics["loss"] == pytest.approx(expected, abs=1e-5)
    same = ib.evaluate_path(a, b, ib.Task.from_dataloader([{"input_ids": ids, "labels": ids}]), n_points=3)
    assert same.metrics["loss"] == pytest.approx(expected, abs=1e-5)

    def several(module: Any) -> dict[str, Any]:  # a model without a head
        states = module(input_ids=ids).last_hidden_state
        return {"loss": states.square().mean(), "largest": states.max()}

    found = ib.evaluate_path(*pair, several, n_points=2)
    assert found.metrics.keys() == {"loss", "largest"}
    assert found.metrics["loss"][0] != found.metrics["loss"][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of a task .* and a loss"),
        ({"loss": lambda m: torch.zeros(2)}, "returned Tensor .*expected a number"),
        ({"loss": lambda m: {"error": 1.0}}, "returned error, expected `loss` among the metrics"),
        ({"loss": lambda m: None}, "returned NoneType"),
    ],
)
def test_losses_that_are_no_numbers(pair: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        ib.evaluate_path(*pair, n_points=2, **options)


def test_batches_of_a_dataloader_are_those_that_models_are_trained_on() -> None:
    ids = torch.arange(1, 9).reshape(2, 4)
    labels = torch.tensor([[1, 2, 3, -100], [5, 6, 7, 8]])
    ((inputs, targets),) = rows([{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}])
    assert inputs.keys() == {"input_ids", "attention_mask"}
    assert targets.tolist() == [[2, 3, -100, -100], [6, 7, 8, -100]]
    ((_, targets),) = rows([(ids[:, :-1], ids[:, 1:])])  # targets of the outputs as they are
    assert targets.tolist() == ids[:, 1:].tolist()
    masked = torch.where(ids % 3 == 0, ids, -100)
    task = ib.Task.from_dataloader([{"input_ids": torch.where(ids % 3 == 0, 0, ids), "labels": masked}])
    assert (task.kind, next(iter(task)).targets.tolist()) == ("mlm", masked.tolist())
    images = torch.utils.data.TensorDataset(torch.randn(5, 3, 8, 8), torch.arange(5) % 3)
    task = ib.Task.from_dataloader(torch.utils.data.DataLoader(images, batch_size=2))
    assert (task.kind, task.n_samples, [len(batch) for batch in task]) == ("image", 5, [2, 2, 1])
    assert ib.Task.from_dataloader([{"input_ids": ids, "label": torch.tensor([0, 1])}]).kind == "text"
    assert ib.Task.from_dataloader([(ids, ids), (ids, ids)], max_batches=1).n_samples == 2
    other = ib.Task.from_dataloader([(ids, ids + 1)])
    assert other.fingerprint != ib.Task.from_dataloader([(ids, ids)]).fingerprint


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (iter([(torch.ones(1, 2), torch.ones(1))]), "can be read once only"),
        ([], "holds no batch"),
        ([{"input_ids": torch.ones(1, 2)}], "expected model inputs with labels"),
        ([torch.ones(2)], "a batch is a Tensor"),
        ([(torch.ones(2, 3), torch.ones(2))], "expected whole numbers"),
    ],
)
def test_loaders_that_can_not_be_measured(loader: Any, message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        ib.Task.from_dataloader(loader)


# -- how results are shown --------------------------------------------------------------------------------------------


def test_every_result_prints_in_a_screenful(shown: dict[str, Any]) -> None:
    for name, result in shown.items():
        for text in (repr(result), str(result)):
            assert text.count("\n") < SCREEN, name
            assert len(text) < 3000, name
        html = result._repr_html_()
        assert html.startswith("<div>"), name
        assert len(html) < 20_000, name
    assert "llama" in repr(shown["weights"])
    assert "1 stream" in repr(shown["transform"]) or "resid" in repr(shown["transform"])
    assert f"{shown['alignment'].distance_after:.4g}" in repr(shown["alignment"])
    assert repr(shown["verdict"]).startswith("same")
    assert "not by ==" in repr(shown["fingerprint"])


def test_a_long_table_is_cut_and_text_is_escaped() -> None:
    summary = Summary("<b>", {"name": "x" * 10_000}, ("a", "b"), [(k, "<script>") for k in range(500)])
    assert len(summary.text().splitlines()) == MAX_ROWS + 4
    assert "… 488 more rows" in summary.text()
    assert max(map(len, summary.text().splitlines())) <= 120
    assert "<script>" not in summary.html()
    assert "&lt;b&gt;" in summary.html()
    assert "488 more" in summary.html()


def test_plots_are_figures_and_are_saved_where_told(shown: dict[str, Any], tmp_path: Path) -> None:
    figure = ib.plot_path(shown["curve"])
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == []
    ib.plot_path(shown["curve"], tmp_path / "path.svg")
    assert (tmp_path / "path.svg").read_text().startswith("<?xml")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A notebook that keeps what its one changing line showed."""
    found: list[str] = []

    class ZMQInteractiveShell:
        pass

    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = ZMQInteractiveShell  # type: ignore[attr-defined]
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda first, display_id: SimpleNamespace(update=found.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return found


def test_long_calls_show_progress_in_a_notebook(lines: list[str], pair: tuple[Any, Any]) -> None:
    assert in_notebook()
    ib.align(*pair[:1], to=pair[1])
    assert any("aligning" in line and "<progress" in line for line in lines)
    assert lines[-1] == ""
    lines.clear()
    ib.evaluate_path(*pair, lambda module: 0.0, n_points=3)
    assert "3 of 3" in lines[-2]
    with notebook_steps(None) as step:
        assert step is not None
        step("a < b")
    assert "a &lt; b …" in lines
    lines.clear()
    told: list[int] = []
    with notebook_progress("work", lambda done, of: told.append(done)) as watch:
        assert watch is not None
        watch(1, 2)
    assert (told, lines) == ([1], [])


def test_nothing_is_shown_outside_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    assert not in_notebook()
    with notebook_progress("work", None) as watch, notebook_steps(None) as step:
        assert watch is None
        assert step is None
    assert capsys.readouterr().out == ""


def test_every_argument_of_every_public_method_is_checked(pair: tuple[Any, Any]) -> None:
    weights = ib.load(pair[0])
    objects = [weights, ib.scramble(weights), ib.fingerprint(weights), ib.symmetry(weights)]
    kinds = (ib.JointAlignment, ib.Adapter, ib.Task, ib.ModelConfig, ib.Transformer)
    objects += [object.__new__(kind) for kind in kinds]
    n_checked = 0
    for owner in objects:
        for name in (n for n in dir(type(owner)) if n[0] != "_"):
            found = inspect.getattr_static(owner, name)
            function = getattr(found, "__func__", found)
            ours = str(getattr(function, "__module__", "")).startswith("isobasin")
            if not ours or not hasattr(function, "__wrapped__"):
                continue
            parameters = inspect.signature(getattr(owner, name)).parameters
            needed = {key: "x" for key, p in parameters.items() if p.default is p.empty}
            for key in (k for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)):
                with pytest.raises(IsobasinError, match=r"(is <object object|is 'x').* expected"):
                    getattr(owner, name)(**needed | {key: object()})
                n_checked += 1
    assert n_checked > 20


WRONG_IN_METHODS: dict[str, Callable[[Any], Any]] = {
    r"Fingerprint\.read: text is 3, expected str": lambda _: ib.Fingerprint.read(3),  # type: ignore[arg-type]
    r"matches: other is 3, expected Fingerprint or Weights or str": lambda a: ib.fingerprint(a).matches(3),  # type: ignore[arg-type]
    r"Transformer\.__init__: config is 3, expected ModelConfig": lambda _: ib.Transformer(3),  # type: ignore[arg-type]
    r"BarrierCallback\.__init__: reference is 3, expected": lambda _: ib.BarrierCallback(3),  # type: ignore[arg-type]
    r"from_dict: settings is 3, expected Mapping": lambda _: ib.ModelConfig.from_dict(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", WRONG_IN_METHODS)
def test_an_argument_of_a_wrong_type_of_a_method_is_one_line(message: str, pair: tuple[Any, Any]) -> None:
    with pytest.raises(IsobasinError, match=message):
        WRONG_IN_METHODS[message](ib.load(pair[0]))
