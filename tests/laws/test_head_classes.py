"""Every class that transformers has for a model type is either covered by its family, with its head, or refused."""

import os

import pytest
import torch

import isobasin as ib
import model_types as mt
import tiny
from isobasin.arch import FAMILIES
from isobasin.runtime import output_difference, outputs, quiet_transformers, random_inputs
from isobasin.symmetries.transform import scramble

pytestmark = pytest.mark.hf

_CONFIGS = {each.family: each.config for each in reversed(mt.MODEL_TYPES)}

TOO_LARGE = ("BeitForSemanticSegmentation",)  # needs twelve layers


def classes(name: str) -> list[str]:
    """The classes of transformers for a model type, from the tables behind its Auto classes, and the usual one."""
    from transformers.models.auto import modeling_auto

    found = {FAMILIES[name].model_class}
    for table in (getattr(modeling_auto, n) for n in dir(modeling_auto) if n.endswith("_MAPPING_NAMES")):
        names = table.get(name, ())
        found |= {names} if isinstance(names, str) else set(names)
    return sorted(found)


def config_of(name: str):
    transformers = quiet_transformers()
    if name in _CONFIGS:
        return transformers.CONFIG_MAPPING[name](**_CONFIGS[name])
    case = next(case for case in tiny.CASES if case.family == name and not case.name.endswith("tanh"))
    return case.build(seed=0).config


NAMES = [name for name, family in FAMILIES.items() if not family.own]
if os.environ.get("ISOBASIN_SLOW") != "1":  # a third of them, and those whose classes differ most
    NAMES = [*dict.fromkeys([*NAMES[::3], "roberta", "bert", "t5", "bart", "llama", "dinov2"])]


@pytest.mark.parametrize("name", NAMES)
def test_every_class_of_a_model_type_is_covered_or_refused(name: str) -> None:
    transformers, family = quiet_transformers(), FAMILIES[name]
    config, covered = config_of(name), []
    config.num_labels = 2  # question answering models have exactly two
    for kind in classes(name):
        model_class = getattr(transformers, kind, None)
        if getattr(model_class, "config_class", None) is not type(config):
            continue
        if not family.covers(kind) and kind in TOO_LARGE:
            continue
        with torch.random.fork_rng(devices=[]):
            model = model_class._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
        tiny.randomize(model, 0)
        if not family.covers(kind):
            with pytest.raises(ib.IsobasinError, match=f"{kind}.*, whose head is not supported; expected one of"):
                ib.load(model)
            continue
        covered.append(kind)
        a = ib.load(model)
        b = scramble(a, seed=1).apply(a)
        x = random_inputs(a, n=2)
        start = outputs(a, x)
        if kind == "RobertaForMultipleChoice":  # an input is several texts
            assert ib.equivalent(a, b).answer == "same", kind
        assert output_difference(start, outputs(b, x)) <= 1e-4, kind
    assert family.model_class in covered


def test_a_class_may_be_spelled_in_other_letters() -> None:
    a = mt.weights("mpt-tied")
    b = ib.load(mt.built("mpt-tied").state_dict(), {**a.config, "architectures": ["MPTForCausalLM"]})
    assert ib.equivalent(a, b).answer == "same"


def test_rotary_columns_that_transformers_can_not_split_are_refused() -> None:
    a = mt.weights("phi-untied")
    odd = {"rope_type": "default", "partial_rotary_factor": 3 / 8}
    with pytest.raises(ib.IsobasinError, match="makes 3 of 8 columns of a head rotate, expected an even number"):
        ib.load(mt.built("phi-untied").state_dict(), {**a.config, "rope_parameters": odd})


def test_keys_that_a_kind_of_falcon_ignores_do_not_count() -> None:
    from isobasin.config_keys import differing_settings

    a, state = mt.weights("falcon-groups"), mt.built("falcon-groups").state_dict()
    assert not differing_settings(a, ib.load(state, {**a.config, "multi_query": False}))
    b, state = mt.weights("falcon-multi-query"), mt.built("falcon-multi-query").state_dict()
    assert not differing_settings(b, ib.load(state, {**b.config, "num_ln_in_parallel_attn": 1}))
