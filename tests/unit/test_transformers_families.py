"""nvrtc_attn in models of transformers with images, sound or two stacks, against transformers' own eager attention."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from differences import note
from transformers_families import FAMILIES, OWN_ATTENTION, Family, text, two_texts
from transformers_models import generated, results, torch, transformers

from nvrtc_attn.base import log
from nvrtc_attn.integrations import transformers as integration

# Deprecations inside of transformers are not this project's.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.manual_seed(0)
    integration.register()


def compare(model: Any, keep: Any, given: dict[str, Any]) -> None:
    """The output is eager attention's, and so are the gradients of all weights, without dropout."""
    model.eval()
    expected, found = (results(model, name, keep, given) for name in ("eager", "nvrtc_attn"))
    note("transformers", found["out"], expected["out"])
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for name, gradient in expected.items() if name != "out")
    for name, x in found.items():
        # Of a bias of keys the gradient is zero but for rounding of the others.
        scale = max(float(expected[name].abs().max()), 0 if name == "out" else 1e-2 * largest)
        assert float((x - expected[name]).abs().max()) <= (1e-5 if name == "out" else 5e-5) * scale, name


def made(make: Any) -> Any:
    try:
        return make()
    except AttributeError as error:
        if "module transformers has no attribute" not in str(error):
            raise
        pytest.skip(f"{error}: this transformers has no such model")


def padding(ids: Any, side: str) -> Any:
    keep = torch.ones_like(ids)
    if side == "left":
        keep[0, :2] = 0
    elif side == "right":
        keep[0, -1:] = 0
    return keep


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    family: Family = FAMILIES[name]
    model, given = made(family.make), family.given()
    compare(model, None, given)
    for side in ("left", "right") if family.padded else ():
        keep = padding(given["input_ids"], side)
        compare(model, None if "decoder_input_ids" in given else keep, {**given, "attention_mask": keep})


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.generates])
def test_families_generate(name: str) -> None:
    """Greedy and beam search, and a static cache, give the tokens of eager attention, with padding on the left."""
    family: Family = FAMILIES[name]
    model, given = made(family.make).eval(), family.given()
    given = {word: x for word, x in given.items() if word not in ("decoder_input_ids", "use_cache")}
    if family.padded:
        given["attention_mask"] = padding(given["input_ids"], "left")
    for more in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        eager, ours = generated(model, given, 5, **more)
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_own_attention_has_its_own_masks(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that does not use the interface computes what it does under "eager", and a line says that it is its own.

    `set_attn_implementation` refuses such models the name, but `from_config` and `from_pretrained` do not.
    """
    monkeypatch.setattr(log, "_said", set())
    model = made(OWN_ATTENTION[name]).eval()
    given = two_texts() if name == "MVP" else text()
    for keep in (None, padding(given["input_ids"], "right")):
        outs = []
        for implementation in ("eager", "nvrtc_attn"):
            other = type(model)._from_config(model.config, attn_implementation=implementation).eval()
            assert other.config._attn_implementation == implementation
            other.load_state_dict(model.state_dict())
            with caplog.at_level(logging.WARNING, logger="nvrtc_attn"), torch.no_grad():
                outs.append(other(**given, attention_mask=keep).last_hidden_state)
        assert torch.equal(outs[1], outs[0])
    said = [record.message for record in caplog.records if "on their own" in record.message]
    assert len(said) == 1
    assert f"models of {type(model.config).__name__} compute attention on their own" in said[0]


def test_a_module_that_does_not_say_whether_it_is_causal() -> None:
    """transformers' own is not, without a mask; another's is, as in transformers' sdpa."""
    q = torch.randn(1, 2, 4, 8)
    module = transformers.SplinterModel(FAMILIES["Splinter"].make().config).encoder.layer[0].attention.self
    assert not hasattr(module, "is_causal")
    out, _ = integration.attention_forward(module, q, q, q, None)
    other, _ = integration.attention_forward(torch.nn.Module(), q, q, q, None)
    torch.testing.assert_close(out[:, -1], other[:, -1])
    assert not torch.allclose(out[:, 0], other[:, 0])
    module.is_causal = True
    assert torch.equal(integration.attention_forward(module, q, q, q, None)[0], other)
