"""The project's own Transformer: every switch, against an independent forward pass and its promises."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, stack_module_state, vmap

from isobasin.model import ModelConfig, Transformer
from isobasin.model.transformer import geometry

POSITIONS = ("none", "sinusoidal", "learned", "rope", "alibi")
FAMILIES = ("vit", "bert", "gpt2", "llama")
TINY = {"d_model": 12, "n_layers": 2, "n_heads": 2, "d_ff": 10}
TOKENS = TINY | {"d_vocab": 11, "n_positions": 8}
IMAGES = TINY | {"image_size": 6, "patch_size": 2, "n_channels": 3, "n_classes": 4}
CLASSIFIER = TOKENS | {"n_classes": 3}


def generic(config: ModelConfig, seed: int = 0) -> Transformer:
    """A float64 model far from its small initial weights, where every tensor matters."""
    model = Transformer(config, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        scale = 0.8 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
        gain = name.endswith("weight") and parameter.ndim == 1
        parameter.data = float(gain) + scale * noise
    return model


def draw_inputs(config: ModelConfig, n_tokens: int = 8, seed: int = 0, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if config.d_vocab is not None:
        return torch.randint(config.d_vocab, (batch, n_tokens), generator=generator)
    shape = (batch, config.n_channels, config.image_size, config.image_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    positions = draw(st.sampled_from(POSITIONS))
    n_kv_heads = draw(st.integers(1, 3))
    sizes = {
        "d_model": draw(st.integers(1, 7)),
        "n_layers": draw(st.integers(1, 2)),
        "n_heads": n_kv_heads * draw(st.integers(1, 3)),
        "n_kv_heads": n_kv_heads,
        "d_head": draw(st.integers(2 if positions == "rope" else 1, 5)),
        "d_ff": draw(st.integers(1, 4)),
    }
    if positions == "rope":
        sizes["rotary_dims"] = 2 * draw(st.integers(1, sizes["d_head"] // 2))
    switches = {name: draw(st.booleans()) for name in ("post_norm", "causal", "bias")} | {
        "norm": draw(st.sampled_from(("layer", "rms"))),
        "feed_forward": draw(st.sampled_from(("gelu", "swiglu"))),
        "rotary_layout": draw(st.sampled_from(("half", "interleaved"))),
    }
    kind = draw(st.sampled_from(("images", "classifier", "lm", "tied")))
    if kind == "images":
        patch = draw(st.integers(1, 2))
        ends = {"image_size": patch * draw(st.integers(1, 3)), "patch_size": patch, "n_channels": 2}
    else:
        ends = {
            "d_vocab": draw(st.integers(1, 5)),
            "n_positions": draw(st.integers(1, 5)),
            "tied": kind == "tied",
        }
    ends["n_classes"] = draw(st.integers(1, 3)) if kind in ("images", "classifier") else None
    return ModelConfig(positions=positions, **sizes, **switches, **ends)


def expected_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names of a checkpoint, as other parts of the project rely on them."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (c.d_model,)
        if c.norm == "layer" and c.bias:
            shapes[f"{name}.bias"] = (c.d_model,)

    if c.d_vocab is not None:
        shapes["embed.tokens.weight"] = (c.d_vocab, c.d_model)
    else:
        linear("embed.patches", c.d_model, c.n_channels * c.patch_size**2, c.bias)
    if c.positions in ("learned", "sinusoidal"):
        shapes["embed.positions.weight"] = (c.n_positions, c.d_model)
    norm("embed.norm" if c.post_norm else "norm")
    for i in range(c.n_layers):
        norm(f"blocks.{i}.norm1")
        norm(f"blocks.{i}.norm2")
        linear(f"blocks.{i}.attn.q", c.n_heads * c.d_head, c.d_model, c.bias)
        linear(f"blocks.{i}.attn.k", c.n_kv_heads * c.d_head, c.d_model, c.bias)
        linear(f"blocks.{i}.attn.v", c.n_kv_heads * c.d_head, c.d_model, c.bias)
        linear(f"blocks.{i}.attn.o", c.d_model, c.n_heads * c.d_head, c.bias)
        for name in ("up", "gate") if c.feed_forward == "swiglu" else ("up",):
            linear(f"blocks.{i}.mlp.{name}", c.d_ff, c.d_model, c.bias)
        linear(f"blocks.{i}.mlp.down", c.d_model, c.d_ff, c.bias)
    if c.n_classes is not None:
        linear("head", c.n_classes, c.d_model, c.bias)
    elif not c.tied:
        linear("head", c.d_vocab, c.d_model, False)
    return shapes


@settings(max_examples=150, deadline=None)
@given(config=configs(), seed=st.integers(0, 99), masked=st.booleans())
def test_every_combination_runs_and_agrees_with_the_reference(config, seed, masked):
    model = generic(config, seed)
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == expected_shapes(config)
    inputs = draw_inputs(config, config.n_positions, seed)
    mask = torch.ones(2, config.n_positions, dtype=torch.bool)
    if masked:
        mask = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        mask[:, seed % config.n_positions] = True  # somebody is real
    logits = model(inputs, mask if masked else None)
    out = config.n_classes or config.d_vocab
    assert logits.shape == ((2, out) if config.n_classes else (2, config.n_positions, out))
    assert logits.dtype == torch.float64
    assert logits.isfinite().all()
    assert gap(logits, reference(model, inputs, mask)) < 1e-10


def reference(model: Transformer, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The forward pass once more: numpy, float64, one sequence and one head at a time, nothing shared."""
    w = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    outs = [_reference_one(model.config, w, x, m) for x, m in zip(inputs.numpy(), mask.numpy())]
    return torch.from_numpy(np.stack(outs))


def _reference_one(c: ModelConfig, w: dict, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    def affine(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True) if c.norm == "layer" else x
        x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + c.norm_eps)
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)

    def rotated(x):  # (T, d_head), as complex numbers
        r = c.rotary_dims
        half = c.rotary_layout == "half"
        first, second = (np.arange(r // 2), np.arange(r // 2, r)) if half else (np.arange(0, r, 2), np.arange(1, r, 2))
        theta = c.rope_theta ** (-2 * np.arange(r // 2) / r)
        z = (x[:, first] + 1j * x[:, second]) * np.exp(1j * np.outer(np.arange(len(x)), theta))
        x = x.copy()
        x[:, first], x[:, second] = z.real, z.imag
        return x

    def attention(name, x):
        total = w.get(f"{name}.o.bias", 0.0) + np.zeros_like(x)
        for h in range(c.n_heads):
            mine = slice(h * c.d_head, (h + 1) * c.d_head)
            kv = h // (c.n_heads // c.n_kv_heads)
            theirs = slice(kv * c.d_head, (kv + 1) * c.d_head)
            q, k = affine(f"{name}.q", x)[:, mine], affine(f"{name}.k", x)[:, theirs]
            if c.positions == "rope":
                q, k = rotated(q), rotated(k)
            scores = q @ k.T / math.sqrt(c.d_head)
            for m in range(len(x)):
                for n in range(len(x)):
                    if c.positions == "alibi":
                        scores[m, n] -= 2 ** (-8 * (h + 1) / c.n_heads) * abs(m - n)
                    # A padded query sees itself.
                    if m != n and (not mask[n] or (c.causal and n > m)):
                        scores[m, n] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            total = total + p @ affine(f"{name}.v", x)[:, theirs] @ w[f"{name}.o.weight"][:, mine].T
        return total

    def feed_forward(name, x):
        up = affine(f"{name}.up", x)
        if c.feed_forward == "gelu":
            return affine(f"{name}.down", up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2))))
        gate = affine(f"{name}.gate", x)
        return affine(f"{name}.down", gate / (1 + np.exp(-gate)) * up)

    if c.d_vocab is not None:
        x = w["embed.tokens.weight"][x]
    else:
        p, n = c.patch_size, c.image_size // c.patch_size
        cells = [x[:, i * p : (i + 1) * p, j * p : (j + 1) * p].ravel() for i in range(n) for j in range(n)]
        x = affine("embed.patches", np.stack(cells))
    x = x + w["embed.positions.weight"][: len(x)] if "embed.positions.weight" in w else x
    x = norm("embed.norm", x) if c.post_norm else x
    for i in range(c.n_layers):
        b = f"blocks.{i}"
        if c.post_norm:
            x = norm(f"{b}.norm1", x + attention(f"{b}.attn", x))
            x = norm(f"{b}.norm2", x + feed_forward(f"{b}.mlp", x))
        else:
            x = x + attention(f"{b}.attn", norm(f"{b}.norm1", x))
            x = x + feed_forward(f"{b}.mlp", norm(f"{b}.norm2", x))
    x = x if c.post_norm else norm("norm", x)
    if c.n_classes is not None:
        return affine("head", x[mask].mean(0) if mask.any() else np.zeros(c.d_model))
    return x @ w["embed.tokens.weight" if c.tied else "head.weight"].T


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_is_float64_and_the_reference_can_tell(family):
    sizes = (IMAGES if family == "vit" else TOKENS) | {"n_kv_heads": 1}
    model = generic(ModelConfig.preset(family, positions="rope", **sizes))
    inputs = draw_inputs(model.config)
    mask = torch.ones(2, model.config.n_positions, dtype=torch.bool)
    logits, expected = model(inputs), reference(model, inputs, mask)
    assert gap(logits, expected) < 1e-12
    single = model.float()(inputs.float() if family == "vit" else inputs)
    assert single.dtype == torch.float32
    assert 1e-9 < gap(single.double(), logits) < 1e-4
    for change in ({"rotary_layout": "interleaved"}, {"rope_theta": 9000.0}, {"norm_eps": 2e-5}):
        other = Transformer(dataclasses.replace(model.config, **change)).double()
        other.load_state_dict(model.state_dict())
        assert gap(other(inputs), expected) > 1e-8


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_causal_is_causal(positions, masked):
    config = ModelConfig.preset("gpt2", positions=positions, **TOKENS)
    before = draw_inputs(config)
    after = before.clone()
    after[:, 5] = (after[:, 5] + 1) % config.d_vocab
    mask = torch.ones_like(before, dtype=torch.bool) if masked else None
    model = generic(config)
    assert gap(model(before, mask)[:, :5], model(after, mask)[:, :5]) < 1e-12
    assert gap(model(before, mask)[:, 5:], model(after, mask)[:, 5:]) > 1e-3
    both_ways = generic(dataclasses.replace(config, causal=False))
    assert gap(both_ways(before, mask)[:, :5], both_ways(after, mask)[:, :5]) > 1e-3


@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_grouped_queries_are_repeated_kv_heads(n_kv_heads):
    config = ModelConfig.preset("bert", positions="rope", **(TOKENS | {"n_heads": 6, "n_kv_heads": n_kv_heads}))
    grouped = generic(config)
    full = Transformer(dataclasses.replace(config, n_kv_heads=6)).double()

    def with_kv_heads(chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = grouped.state_dict()
        for name in [name for name in weights if ".attn.k." in name or ".attn.v." in name]:
            weights[name] = weights[name].unflatten(0, (n_kv_heads, config.d_head))[chosen].flatten(0, 1)
        return weights

    ids = draw_inputs(config)
    heads = torch.arange(n_kv_heads).repeat_interleave(6 // n_kv_heads)
    full.load_state_dict(with_kv_heads(heads))
    assert gap(grouped(ids), full(ids)) < 1e-12
    if n_kv_heads > 1:
        full.load_state_dict(with_kv_heads(torch.arange(6) % n_kv_heads))
        assert gap(grouped(ids), full(ids)) > 1e-3


@pytest.mark.parametrize("positions", POSITIONS)
def test_relative_positions_do_not_feel_a_shift(positions):
    config = ModelConfig.preset("bert", positions=positions, **CLASSIFIER)
    model = generic(config)
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.bool)
    ids[:, :5], mask[:, :5] = draw_inputs(config, 5), True
    shifted = model(ids.roll(3, 1), mask.roll(3, 1))
    if positions in ("none", "rope", "alibi"):
        assert gap(model(ids, mask), shifted) < 1e-12
    else:
        assert gap(model(ids, mask), shifted) > 1e-3
    order = torch.tensor([4, 2, 0, 1, 3, 5, 6, 7])
    permuted = gap(model(ids, mask), model(ids[:, order], mask))
    assert permuted < 1e-12 if positions == "none" else permuted > 1e-3


def test_alibi_is_a_slope_on_distance_alone():
    """With Q = 0 head h attends by softmax(-2^(-8(h+1)/n) |m - n|); values that name their place show it."""
    config = ModelConfig.preset("gpt2", positions="alibi", **(TOKENS | {"causal": False, "n_layers": 1}))
    attention = generic(config).blocks[0].attn
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.zero_()
        for matrix in (attention.v, attention.o):
            matrix.weight.copy_(torch.eye(12))
    places = torch.eye(6, dtype=torch.float64)
    x = torch.cat((places, places), 1)[None]  # (1, T=6, d=12): each head reads its own copy of the places
    found = attention(x, geometry(config, x, None))[0].unflatten(-1, (2, 6))  # (T, H, T)
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs().double()
    for h, slope in enumerate((2.0**-4, 2.0**-8)):
        assert gap(found[:, h], torch.softmax(-slope * distance, -1)) < 1e-12
    assert gap(found[:, 0], found[:, 1]) > 1e-3


def test_a_compiler_sees_rotary_angles_as_constants():
    """Else it would fuse their cosines, in float64, into whatever turns queries and keys."""
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    model = Transformer(ModelConfig.preset("gpt2", positions="rope", **TOKENS)).double()
    tokens = torch.arange(6).reshape(2, 3)
    found = torch.compile(model, backend=backend, fullgraph=True)(tokens)
    torch.testing.assert_close(found, model(tokens), rtol=1e-14, atol=1e-14)
    assert any("scaled_dot_product" in name for name in seen)
    assert [name for name in seen if "cos" in name or "sin" in name] == []


@pytest.mark.parametrize("rotary_dims", [2, 4, 6])
def test_rotary_layouts_differ_by_a_permutation_of_columns(rotary_dims):
    config = ModelConfig.preset("gpt2", positions="rope", **TOKENS, rotary_dims=rotary_dims)
    half = generic(config)
    other = Transformer(dataclasses.replace(config, rotary_layout="interleaved")).double()
    ids = draw_inputs(config)
    other.load_state_dict(half.state_dict())
    unpermuted = gap(half(ids), other(ids))
    assert unpermuted > 1e-3 if rotary_dims > 2 else unpermuted < 1e-12  # one pair is (0, 1) in both

    columns = torch.arange(config.d_head)
    columns[:rotary_dims] = columns[:rotary_dims].unflatten(0, (2, -1)).T.flatten()  # 0, r/2, 1, r/2 + 1, ...
    weights = half.state_dict()
    for name in [name for name in weights if ".attn.q." in name or ".attn.k." in name]:
        weights[name] = weights[name].unflatten(0, (config.n_heads, -1))[:, columns].flatten(0, 1)
    other.load_state_dict(weights)
    assert gap(half(ids), other(ids)) < 1e-12


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_does_not_matter(family, positions):
    config = ModelConfig.preset(family, positions=positions, **TOKENS)
    model = generic(config)
    ids = draw_inputs(config)
    mask = (torch.arange(8) < 5).expand(2, 8)
    other = torch.where(mask, ids, (ids + 1) % config.d_vocab)
    real = slice(None) if config.n_classes else slice(0, 5)
    assert gap(model(ids, mask)[:, real], model(other, mask)[:, real]) < 1e-12
    assert gap(model(ids, mask)[:, real], model(ids[:, :5])[:, real]) < 1e-12
    if not config.causal:
        assert gap(model(ids), model(other)) > 1e-3
    assert model(ids, ~mask).isfinite().all()  # left padding: the first queries have no real key
    assert model(ids, torch.zeros_like(mask)).isfinite().all()


def test_patches_are_a_convolution():
    config = ModelConfig.preset("vit", positions="none", **IMAGES)
    model, images = generic(config), draw_inputs(config)
    weight = model.embed.patches.weight.unflatten(1, (3, 2, 2))
    expected = F.conv2d(images, weight, model.embed.patches.bias, stride=2).flatten(2).transpose(1, 2)
    assert gap(model.embed(images), expected) < 1e-12
    assert gap(model.embed(images.transpose(2, 3)), expected) > 1e-3


def test_sinusoidal_table_is_frozen_and_in_the_checkpoint():
    model = Transformer(ModelConfig.preset("vit", **IMAGES | {"position_scale": 0.5}))
    table = 2 * model.state_dict()["embed.positions.weight"].double()
    assert gap(table[:, 2], torch.sin(torch.arange(9) * 10000 ** (-2 / 12)).double()) < 1e-6
    assert gap(table[:, 3], torch.cos(torch.arange(9) * 10000 ** (-2 / 12)).double()) < 1e-6
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["embed.positions.weight"]
    assert all(p.requires_grad for p in Transformer(ModelConfig.preset("gpt2", **TOKENS)).parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_seeds_train_at_once(family):
    config = ModelConfig.preset(family, **(IMAGES if family == "vit" else TOKENS))
    models = [generic(config, seed) for seed in range(3)]
    parameters, buffers = stack_module_state(models)
    inputs = draw_inputs(config)

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(models[0], (weights, buffers), (inputs,)).square().mean()

    found = vmap(grad(loss))({name: tensor.detach() for name, tensor in parameters.items()})
    for i, model in enumerate(models):
        model(inputs).square().mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert gap(found[name][i], parameter.grad) < 1e-10, name
    assert gap(found["blocks.0.attn.q.weight"][0], found["blocks.0.attn.q.weight"][1]) > 1e-6


@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_compiles_as_one_graph(positions):
    config = ModelConfig.preset("llama", positions=positions, **TOKENS)
    model, ids = generic(config), draw_inputs(config)
    mask = torch.ones_like(ids, dtype=torch.bool)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert gap(compiled(ids, mask), model(ids, mask)) < 1e-12
    assert gap(compiled(ids + 0, mask), model((ids + 1) % 11, mask)) > 1e-3
