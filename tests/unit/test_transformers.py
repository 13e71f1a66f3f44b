"""nvrtc_attn in Hugging Face transformers: tiny random models against transformers' own eager attention."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import pickle
from typing import Any

import pytest
from differences import note
from transformers_models import (
    DECODERS,
    SMALL,
    Size,
    bert,
    check_generate,
    continued,
    deepseek_v32,
    gemma2,
    gemma4,
    gpt_oss,
    image,
    llama,
    minimax_m3,
    results,
    sound,
    t5,
    tokens,
    torch,
    trainer_losses,
    transformers,
    vit,
    whisper,
)

from nvrtc_attn import UnsupportedError
from nvrtc_attn.base import log
from nvrtc_attn.integrations import transformers as integration

masking_utils = transformers.masking_utils
# Deprecations inside of transformers are not this project's.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.manual_seed(0)
    integration.register()


def compare(model: Any, keep: Any = None, **inputs: Any) -> Any:
    """The output, which equals that of eager attention, and so do the gradients of all weights."""
    expected, found = (results(model, name, keep, inputs) for name in ("eager", "nvrtc_attn"))
    note("transformers", found["out"], expected["out"])
    torch.testing.assert_close(found["out"], expected["out"], atol=2e-6, rtol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        if name != "out":
            scale = max(float(expected[name].abs().max()), 1e-3)
            assert float((gradient - expected[name]).abs().max()) <= 2e-5 * scale, name
    return found["out"]


@pytest.fixture
def no_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of M x N elements fails the test. (transformers' eager path asks its own name for one.)"""

    def refuse(self: Any) -> Any:
        raise AssertionError("a mask of M x N elements was made")

    monkeypatch.setattr(integration.BandMask, "dense", refuse)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.usefixtures("no_dense_mask")
def test_decoders(name: str, padded: bool) -> None:
    """Grouped heads, softcap, windows and sinks; padding on the left; the masks stay small."""
    ids, keep = tokens()
    compare(DECODERS[name](), keep if padded else None, input_ids=ids, attention_mask=keep if padded else None)


def test_sinks_and_relative_bias_get_gradients() -> None:
    model = gpt_oss()
    ids, keep = tokens()
    compare(model, keep, input_ids=ids, attention_mask=keep)
    assert all(float(layer.self_attn.sinks.grad.abs().min()) > 0 for layer in model.model.layers)
    model = t5()
    compare(model, input_ids=ids, attention_mask=keep, decoder_input_ids=ids[:, :5])
    biases = [p for n, p in model.named_parameters() if "relative_attention_bias" in n]
    assert len(biases) == 2
    assert all(float(p.grad.abs().max()) > 0 for p in biases)


@pytest.mark.usefixtures("no_dense_mask")
def test_encoders_and_cross_attention() -> None:
    ids, keep = tokens()
    compare(t5(), input_ids=ids, attention_mask=keep, decoder_input_ids=ids[:, :5])
    compare(bert(), keep, input_ids=ids, attention_mask=keep)
    compare(vit(), pixel_values=image())
    compare(whisper(), input_features=sound(), decoder_input_ids=ids[:, :5])


@pytest.mark.parametrize("make", [deepseek_v32, minimax_m3], ids=lambda make: make.__name__)
def test_chosen_keys(make: Any) -> None:
    """Indices of keys, or of blocks of keys, hide the others; with padding and from a cache, too."""
    if not hasattr(transformers, "DeepseekV32Config") or not hasattr(transformers, "MiniMaxM3VLTextConfig"):
        pytest.skip("this transformers has no such model")
    model = make(Size(spread=0.2)).eval()
    ids, keep = tokens(10)
    compare(model, input_ids=ids, use_cache=False)
    if make is minimax_m3:  # its indexer looks at rows of padding on the left, which are 0 here and a mean in eager
        keep = keep.flip(1)
    compare(model, keep, input_ids=ids, attention_mask=keep, use_cache=False)
    if make is minimax_m3:
        keep = torch.ones_like(keep)
    expected, out = (continued(model, implementation, ids, keep, 6) for implementation in ("eager", "nvrtc_attn"))
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_indices_that_are_none_hide_nothing_else() -> None:
    """Negative ones and those behind the keys; beside a bias, and above a mask of padding that stays small."""
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    indices = torch.tensor([[[0, 4, -1], [1, 5, 2], [3, 3, 0]]], dtype=torch.int32)
    keep = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 1, 0, 0], [1, 0, 0, 1, 0]], dtype=torch.bool)[None, None]
    bias = torch.randn(1, 2, 3, 5)
    module = torch.nn.Module()
    module.is_causal = False
    out, _ = integration.attention_forward(module, q, k, v, bias, indices=indices)
    expected, _ = integration.attention_forward(module, q, k, v, bias.masked_fill(~keep, -torch.inf))
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_layers_with_fewer_queries() -> None:
    """Gemma 4 drops queries before the layers that share keys: those left are the last ones, not the first."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    model = gemma4(Size(spread=0.2)).eval()
    ids, keep = tokens(11)
    with torch.no_grad():
        for rows, mask in itertools.product((0, 1, 3), (None, keep)):
            outs = []
            for implementation in ("eager", "nvrtc_attn"):
                model.set_attn_implementation(implementation)
                given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
                outs.append(model(**given, logits_to_keep=rows).logits[1])
            torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
        outs = []
        for implementation in ("eager", "nvrtc_attn"):  # keys that are not written yet lie behind those of the prompt
            model.set_attn_implementation(implementation)
            found = model.generate(
                ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, disable_compile=True, output_logits=True,
                cache_implementation="static", return_dict_in_generate=True,
            )  # fmt: skip
            outs.append(torch.stack(found.logits))
        torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    model.gradient_checkpointing_enable()  # the second pass over a layer has the masks of the first
    model.train()
    given = {"input_ids": ids, "attention_mask": keep, "use_cache": False}
    expected, found = (results(model, name, keep, given)["out"] for name in ("eager", "nvrtc_attn"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("no_dense_mask")
def test_last_rows_of_a_small_mask_are_small() -> None:
    mask = integration.attention_mask(1, 5, 5, mask_function=FUNCTIONS["sliding"], allow_is_causal_skip=False)
    rows = mask[:, :, slice(-2, None), :]
    assert isinstance(rows, integration.BandMask)
    assert rows.shape == (1, 1, 2, 5)
    assert rows.band == mask.band
    assert rows.band is not None


def test_writes_to_the_last_rows_count() -> None:
    """In the mask that they are of, and in the other way round."""
    for first in (True, False):
        mask = integration.attention_mask(1, 4, 4, allow_is_causal_skip=False)
        rows = mask[:, :, 2:]
        (rows[:, :, 0] if first else mask[:, :, 2]).fill_(False)
        assert rows.band is None
        assert mask.band is None
        assert not bool(mask.dense()[0, 0, 2].any())
        assert not bool(rows.dense()[0, 0, 0].any())
        assert bool(rows.dense()[0, 0, 1].all())


def test_packed_sequences_of_one_row() -> None:
    """Positions that start again are documents of their own: no plain pattern, a dense mask."""
    ids, _ = tokens(8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).expand(2, -1)
    compare(llama(), input_ids=ids, position_ids=positions)


def test_a_mask_of_the_users() -> None:
    """Four dimensions, boolean or added to the scores, is taken as it is."""
    ids, _ = tokens(6)
    keep = torch.tril(torch.ones(6, 6, dtype=torch.bool))[None, None].expand(2, 1, 6, 6).clone()
    keep[:, :, 3:, 1] = False
    added = torch.zeros(2, 1, 6, 6).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected = compare(llama_of(0), input_ids=ids, attention_mask=added)
    model = llama_of(0)
    model.set_attn_implementation("nvrtc_attn")
    torch.testing.assert_close(model(input_ids=ids, attention_mask=keep).logits, expected, atol=2e-6, rtol=1e-5)


def llama_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return llama()


@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name: str, cache: str) -> None:
    """Greedy and beam search give the tokens of eager attention, across the window of the sliding layers."""
    check_generate(name, cache, 6)


def test_continuing_from_a_cache() -> None:
    """Several new queries behind cached keys: causal from the bottom right."""
    for make in DECODERS.values():
        model = make().eval()
        ids, keep = tokens(10)
        expected, out = (continued(model, implementation, ids, keep, 6) for implementation in ("eager", "nvrtc_attn"))
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "sliding": masking_utils.sliding_window_causal_mask_function(3),
    "sliding, wide": masking_utils.sliding_window_causal_mask_function(50),
    "sliding both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunked": masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)),
    "causal or prefix": masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda batch, head, q, kv: kv < 2
    ),
}  # fmt: skip
LENGTHS = [
    (5, 5, 0, 0),
    (1, 6, 5, 0),
    (3, 7, 4, 0),
    (4, 7, 0, 0),
    (3, 5, 6, 4),
    (2, 6, 1, 0),
    (1, 6, 2, 0),
    (6, 4, 0, 0),
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("padding", [None, "none hidden", "left", "right, short"])
def test_every_pattern_is_the_dense_mask(name: str, lengths: tuple[int, ...], padding: str | None) -> None:
    """Whatever form the mask function chooses, attention under it is attention under transformers' dense mask."""
    rows, columns, q_offset, kv_offset = lengths
    total = kv_offset + columns
    keep = None if padding is None else torch.ones(2, total - (padding == "right, short"), dtype=torch.bool)
    if padding == "left":
        keep[1, : kv_offset + 1] = False
    elif padding == "right, short":
        keep[0, -1] = False
    arguments = {
        "batch_size": 2, "q_length": rows, "kv_length": columns, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[name], "attention_mask": keep,
    }  # fmt: skip
    dense = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    q, k, v = (torch.randn(2, 4, n, 8) for n in (rows, columns, columns))
    module = torch.nn.Module()
    expected, _ = integration.attention_forward(module, q, k, v, dense)
    causal_like = name not in ("bidirectional", "sliding both ways")
    module.is_causal = causal_like
    for skip, as_tensor in itertools.product((False, True), repeat=2):
        mask = integration.attention_mask(
            **arguments,
            allow_is_causal_skip=skip and name == "causal",
            allow_is_bidirectional_skip=skip and name == "bidirectional",
        )
        if mask is not None:
            assert mask.shape == dense.shape
            assert mask.dtype == torch.bool
            if as_tensor:
                mask = mask.clone()  # any operation but the last rows: the dense mask
                assert type(mask) is torch.Tensor
                assert torch.equal(mask, dense)
        out, _ = integration.attention_forward(module, q, k, v, mask)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def test_plain_patterns_hold_no_dense_mask() -> None:
    """Each of them: no M x N memory. And none at all where transformers' sdpa has none."""
    for name in ("causal", "sliding", "sliding both ways"):
        mask = integration.attention_mask(2, 5, 5, mask_function=FUNCTIONS[name], allow_is_causal_skip=False)
        assert isinstance(mask, integration.BandMask)
        assert mask.band is not None
        assert mask.band.keys is None
    assert integration.attention_mask(2, 5, 5) is None
    assert integration.attention_mask(2, 1, 5, q_offset=4) is None
    assert integration.attention_mask(2, 3, 5, q_offset=2) is not None
    assert integration.attention_mask(
        2, 5, 5, mask_function=FUNCTIONS["bidirectional"], allow_is_causal_skip=False, allow_is_bidirectional_skip=True
    ) is None  # fmt: skip


def test_writes_to_a_small_mask_count() -> None:
    """A model that edits its mask, also through a view of it, has the edited mask."""
    for edit in (lambda m: m.logical_and_(torch.tensor(False)), lambda m: m[:, :, :, 2].fill_(False)):
        mask = integration.attention_mask(1, 4, 4, allow_is_causal_skip=False)
        edit(mask)
        q = torch.randn(1, 2, 4, 8)
        out, _ = integration.attention_forward(torch.nn.Module(), q, q, q, mask)
        expected, _ = integration.attention_forward(torch.nn.Module(), q, q, q, mask.dense())
        untouched = integration.attention_mask(1, 4, 4, allow_is_causal_skip=False)
        other, _ = integration.attention_forward(torch.nn.Module(), q, q, q, untouched)
        assert torch.equal(out, expected)
        assert not torch.equal(out, other)


def test_gradient_checkpointing_and_training_dropout() -> None:
    model = gemma2()
    ids, keep = tokens()
    model.gradient_checkpointing_enable()
    model.train()
    compare(model, keep, input_ids=ids, attention_mask=keep)
    config = transformers.LlamaConfig(**SMALL.text, attention_dropout=0.5)
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation("nvrtc_attn")
    model.eval()
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("padded", [False, True])
def test_compiles_whole(padded: bool) -> None:
    """A model is one graph; while it is traced masks are dense tensors."""
    model = gemma2()
    model.set_attn_implementation("nvrtc_attn")
    ids, keep = tokens()

    def call(ids: Any) -> Any:
        return model(input_ids=ids, attention_mask=keep if padded else None, use_cache=False).logits[1]

    torch._dynamo.reset()
    out, expected = torch.compile(call, backend="aot_eager", fullgraph=True)(ids), call(ids)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    weight = model.model.layers[0].self_attn.q_proj.weight
    got, wanted = (torch.autograd.grad(x.square().sum(), weight)[0] for x in (out, expected))
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_a_mask_of_other_lengths_is_refused() -> None:
    """Its bounds alone would fit any length: a model that cut its keys without its mask must hear of it."""
    q = torch.randn(1, 2, 4, 8)
    for rows, columns in ((4, 6), (3, 4)):
        mask = integration.attention_mask(1, rows, columns, q_offset=columns - rows, allow_is_causal_skip=False)
        with pytest.raises(ValueError, match="mask: shape"):
            integration.attention_forward(torch.nn.Module(), q, q, q, mask)


def test_a_mask_can_be_read_copied_and_kept() -> None:
    keep = torch.ones(1, 6, dtype=torch.bool)
    keep[:, :2] = False

    def made() -> Any:
        mask = integration.attention_mask(1, 6, 6, attention_mask=keep, allow_is_causal_skip=False)
        assert isinstance(mask, integration.BandMask)
        return mask

    dense = made().dense()
    assert made().tolist() == dense.tolist()
    assert (made().numpy() == dense.numpy()).all()
    file = io.BytesIO()
    torch.save(made(), file)
    file.seek(0)
    for found in (copy.deepcopy(made()), pickle.loads(pickle.dumps(made())), torch.load(file)):
        assert torch.equal(found, dense)


def test_what_is_said_once_is_said_by_a_compiled_program(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_said", set())

    def call(q: Any) -> Any:
        return integration.attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=True)[0]

    q = torch.randn(1, 2, 4, 8)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
        for _ in range(2):
            torch.testing.assert_close(compiled(q), call(q))
    assert len([record for record in caplog.records if "no attention weights" in record.message]) == 1


def test_refusals(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError) as caught:
        integration.attention_forward(torch.nn.Module(), q, q, q, None, cache=object(), head_mask=torch.ones(2))
    assert len(caught.value.reasons) == 2
    with pytest.raises(UnsupportedError, match="sinks: a sink has one logit for a head"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, sinks=torch.ones(1, 2, 4, 1))
    for dtype in (torch.int64, torch.uint8):  # ones and zeros, added to the scores, would hide nothing
        keep = torch.ones(1, 1, 4, 4, dtype=dtype).tril()
        with pytest.raises(UnsupportedError, match=rf"attention_mask: dtype {dtype}\..*attention_mask\.bool\(\)"):
            integration.attention_forward(torch.nn.Module(), q, q, q, keep)
    for name in ("my_flash", "sdpa2", "paged|x"):
        with pytest.raises(ValueError, match="name: got"):
            integration.register(name)
    monkeypatch.setattr(log, "_said", set())
    with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=True)
        integration.attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=True)
    assert [record.message for record in caplog.records if "weights" in record.message] == [
        'attn_implementation="nvrtc_attn" returns no attention weights; "eager" does.'
    ]


def test_trainer(tmp_path: Any) -> None:
    """Two steps of Hugging Face's Trainer, with padding, have the losses of eager attention."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
    losses = [trainer_losses(name, tmp_path, use_cpu=True) for name in ("eager", "nvrtc_attn")]
    note("transformers, Trainer", losses[1], losses[0], relative=True)
    assert len(losses[0]) == 2
    assert losses[0][1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)  # as they are logged, to four digits
