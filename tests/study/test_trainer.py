"""Training: reproducible from the seed, inputs unchanged, the loss falls, the schedule is as documented."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.model import ModelConfig, Transformer
from isobasin.study import TrainingRecipe, scope_parameters, shifted, train
from isobasin.study.trainer import LabelledExamples, TokenStream, empty_queue, model_inputs
from isobasin.tasks.datasets import augmentation, dropped, flipped_and_cropped

CLASSIFIER = ModelConfig(
    d_model=16, n_layers=1, n_heads=2, d_ff=16, d_vocab=6, n_positions=5, n_classes=2, positions="rope"
)
LANGUAGE = ModelConfig.preset("llama", d_model=16, n_layers=1, n_heads=2, d_ff=16, d_vocab=7, n_positions=8)
SHORT = TrainingRecipe(steps=4, batch_size=8, peak_lr=1e-2)


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem(n: int = 64) -> tuple[Tensor, Tensor]:
    """Rows of tokens; the class says whether the token 0 occurs."""
    tokens = torch.randint(6, (n, 5), generator=torch.Generator().manual_seed(3))
    return tokens, (tokens == 0).any(1).long()


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_seed_gives_one_model_whatever_the_global_generator_says() -> None:
    model = Transformer(CLASSIFIER, seed=0)
    torch.manual_seed(1)
    first = train(model, *problem(), SHORT, seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = train(model, *problem(), SHORT, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(weights(first.model), weights(second.model))
    assert first.losses == second.losses
    other = train(model, *problem(), SHORT, seed=6)
    assert not same(weights(first.model), weights(other.model))


def test_what_was_lent_stays_as_it_was() -> None:
    model, (tokens, classes) = Transformer(CLASSIFIER, seed=0), problem()
    before, inputs = weights(model), tokens.clone()
    model.blocks[0].norm1.weight.requires_grad_(False)
    trained = train(model, tokens, classes, SHORT, seed=0)
    assert same(weights(model), before)
    assert torch.equal(tokens, inputs)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not same(weights(trained.model), before)
    assert not trained.model.training
    moved = {n for n, p in trained.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, _ in model.named_parameters()} - {"blocks.0.norm1.weight"}


def test_the_loss_falls_below_chance_and_the_classes_are_learned() -> None:
    tokens, classes = problem(256)
    recipe = TrainingRecipe(epochs=40, batch_size=64, peak_lr=1e-2)
    trained = train(Transformer(CLASSIFIER, seed=0), tokens, classes, recipe, seed=0)
    assert len(trained.losses) == 160
    assert abs(trained.losses[0] - math.log(2)) < 0.1
    assert sum(trained.losses[-10:]) / 10 < 0.1
    assert F.cross_entropy(trained.model(tokens), classes).item() < 0.1
    wrong = train(Transformer(CLASSIFIER, seed=0), tokens, classes.roll(1), recipe, seed=0)
    assert sum(wrong.losses[-10:]) / 10 > 0.2  # labels that do not belong can not be learned so
    assert str(trained).startswith("160 steps, loss 0.6")


def test_a_language_model_learns_what_follows() -> None:
    tokens = torch.arange(300) % 7
    trained = train(
        Transformer(LANGUAGE, seed=0), tokens, None, TrainingRecipe(steps=60, batch_size=16, peak_lr=1e-2), seed=0
    )
    assert abs(trained.losses[0] - math.log(7)) < 0.1
    assert trained.losses[-1] < 0.1
    assert trained.model(torch.tensor([[2, 3, 4]])).argmax(-1).tolist() == [[3, 4, 5]]


def test_only_the_named_parameters_move() -> None:
    model = Transformer(CLASSIFIER, seed=0)
    only = scope_parameters(model, "all-attention")
    trained = train(model, *problem(), SHORT, seed=0, only=only).model
    before, after = weights(model), weights(trained)
    assert {name for name in before if not torch.equal(before[name], after[name])} == only
    assert all(p.requires_grad for p in trained.parameters())
    with pytest.raises(IsobasinError, match=r"only: head\.wait: no such trainable parameter"):
        train(model, *problem(), SHORT, seed=0, only=["head.wait"])


def test_gains_and_biases_are_not_decayed() -> None:
    """Examples that are not scored give no gradient: what moves then moves by decay alone."""
    model = Transformer(LANGUAGE, seed=0)
    with torch.no_grad():
        model.blocks[0].norm1.weight.fill_(2.0)
    inputs, targets = torch.zeros(4, 8, dtype=torch.long), torch.full((4, 8), -100)
    targets[0, 0] = 0  # one token, whose gradient the clip makes vanish
    recipe = TrainingRecipe(steps=1, batch_size=4, peak_lr=0.1, warmup=1.0, weight_decay=0.5, grad_clip=1e-30)
    trained = train(model, inputs, targets, recipe, seed=0).model
    before, after = weights(model), weights(trained)
    assert torch.equal(after["blocks.0.norm1.weight"], before["blocks.0.norm1.weight"])
    torch.testing.assert_close(after["blocks.0.attn.q.weight"], (1 - 0.1 * 0.5) * before["blocks.0.attn.q.weight"])


def test_the_rate_rises_and_falls_as_said() -> None:
    recipe = TrainingRecipe(steps=100, peak_lr=2.0, warmup=0.1)
    rates = [recipe.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == pytest.approx(2.0)
    assert rates[54] == pytest.approx(1.0)  # half-way down: (55 − 10) / 90
    assert rates[32] == pytest.approx(1 + math.cos(math.pi * 23 / 90))
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    flat = TrainingRecipe(steps=4, peak_lr=1.0, warmup=0.0)
    assert flat.rate(0, 4) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert TrainingRecipe(steps=4, peak_lr=1.0, warmup=1.0).rate(3, 4) == pytest.approx(1.0)
    assert TrainingRecipe(epochs=2, batch_size=100).n_steps(n_examples=8000) == 160


def test_the_rate_is_the_one_that_is_used() -> None:
    """One step of AdamW moves every weight by about the rate."""
    model = Transformer(CLASSIFIER, seed=0)
    recipe = TrainingRecipe(steps=1, batch_size=64, peak_lr=1e-3, warmup=1.0, weight_decay=0.0)
    moved = train(model, *problem(), recipe, seed=0).model.head.weight - model.head.weight
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 1e-3), rtol=1e-2, atol=0)
    still = TrainingRecipe(steps=1, batch_size=64, peak_lr=1e-3, warmup=0.0, weight_decay=0.0)  # already at zero
    assert same(weights(train(model, *problem(), still, seed=0).model), weights(model))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "exactly one"),
        ({"steps": 1, "epochs": 1.0}, "exactly one"),
        ({"steps": -1}, "steps or epochs is -1"),
        ({"steps": 1, "batch_size": 0}, "batch_size is 0"),
        ({"steps": 1, "peak_lr": 0.0}, "peak_lr is 0.0"),
        ({"steps": 1, "warmup": 1.5}, "warmup is 1.5"),
        ({"steps": 1, "weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"steps": 1, "betas": (0.9, 1.0)}, "betas is"),
        ({"steps": 1, "label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"steps": 1, "grad_clip": 0.0}, "grad_clip is 0.0"),
        ({"steps": 1, "peak_lr": math.nan}, "peak_lr is nan"),
    ],
)
def test_a_recipe_that_can_not_be_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        TrainingRecipe(**wrong)  # type: ignore[arg-type]


def test_no_steps_give_the_model_back() -> None:
    model = Transformer(CLASSIFIER, seed=0)
    trained = train(model, *problem(), TrainingRecipe(steps=0), seed=0)
    assert trained.losses == ()
    assert same(weights(trained.model), weights(model))
    assert str(trained) == "0 steps"


def batches(data: LabelledExamples | TokenStream, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    queue, generator = empty_queue(), torch.Generator().manual_seed(0)
    while True:
        x, y, queue = data.draw(size, queue, generator)
        yield x, y


def test_every_example_once_per_epoch_and_in_another_order_each_time() -> None:
    rows = torch.arange(10)
    drawn = batches(LabelledExamples(rows, rows), 5)
    epochs = [torch.cat([next(drawn)[0], next(drawn)[0]]) for _ in range(3)]
    assert all(epoch.sort().values.tolist() == list(range(10)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist() != epochs[2].tolist()
    over = batches(LabelledExamples(rows, rows), 4)
    joined = torch.cat([next(over)[0] for _ in range(5)])
    assert joined.tolist() == torch.cat(epochs[:2]).tolist()


def test_windows_are_shifted_by_one_and_reach_both_ends() -> None:
    stream = TokenStream(torch.arange(12), 4)
    assert len(stream) == 2
    x, y = next(batches(stream, 200))
    assert torch.equal(y, x + 1)
    assert sorted(set(x[:, 0].tolist())) == list(range(8))
    assert int(y.max()) == 11


def test_augmentation_draws_from_the_seed_and_is_seen() -> None:
    model, (tokens, classes) = Transformer(CLASSIFIER, seed=0), problem()

    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x + torch.randint(6, x.shape, generator=generator)) % 6

    plain, first, second = (
        train(model, tokens, classes, SHORT, seed=1, augment=change).losses for change in (None, noisy, noisy)
    )
    assert first == second
    assert first != plain


def test_watch_is_told_of_every_step() -> None:
    seen: list[tuple[int, int]] = []
    train(Transformer(CLASSIFIER), *problem(), SHORT, seed=0, watch=lambda *step: seen.append(step))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_mixed_precision_trains_float32_weights() -> None:
    model = Transformer(CLASSIFIER, seed=0)
    mixed = train(model, *problem(), SHORT, seed=0, autocast=torch.bfloat16)
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}
    exact = train(model, *problem(), SHORT, seed=0)
    assert mixed.losses == pytest.approx(exact.losses, rel=0.05)
    assert mixed.losses != exact.losses


@pytest.mark.parametrize(
    ("config", "inputs", "targets", "message"),
    [
        (CLASSIFIER, torch.zeros(4, 5, dtype=torch.long), None, "a classifier needs targets"),
        (LANGUAGE, torch.zeros(8, dtype=torch.long), None, "more than n_positions=8"),
        (LANGUAGE, torch.zeros(4, 9, dtype=torch.long), None, r"shape \(4, 9\) without targets"),
        (CLASSIFIER, torch.zeros(4, 5, dtype=torch.long), torch.zeros(3, dtype=torch.long), "4 inputs and 3 targets"),
        (CLASSIFIER, torch.zeros(0, 5, dtype=torch.long), torch.zeros(0, dtype=torch.long), "0 inputs and 0 targets"),
        (CLASSIFIER, torch.zeros(2, 5, dtype=torch.long), torch.tensor([0, 2]), "from 0 to 2, but the model has 2"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    config: ModelConfig, inputs: Tensor, targets: Tensor | None, message: str
) -> None:
    with pytest.raises(IsobasinError, match=message):
        train(Transformer(config), inputs, targets, SHORT, seed=0)


def test_shifts_move_whole_pictures_by_the_pixels_said() -> None:
    images = torch.arange(1.0, 37).reshape(1, 1, 6, 6).repeat(64, 1, 1, 1)
    moved = shifted(by=1)(images, torch.Generator().manual_seed(0))
    again = shifted(by=1)(images, torch.Generator().manual_seed(0))
    assert torch.equal(moved, again)
    wide = F.pad(images[:1], (1, 1, 1, 1), value=-1.0)
    allowed = [wide[0, :, i : i + 6, j : j + 6] for i in range(3) for j in range(3)]
    seen = [[torch.equal(picture, option) for option in allowed] for picture in moved]
    assert all(sum(row) == 1 for row in seen)  # each is exactly one of the nine
    assert all(any(column) for column in zip(*seen))  # and all nine occur
    with pytest.raises(IsobasinError, match="shift by 0 pixels"):
        shifted(by=0)


def test_mirrored_pictures_are_the_shifted_ones_turned() -> None:
    images = torch.arange(1.0, 37).reshape(1, 1, 6, 6).repeat(200, 1, 1, 1)
    moved = flipped_and_cropped(by=1)(images, torch.Generator().manual_seed(0))
    both = [F.pad(picture, (1, 1, 1, 1), value=-1.0) for picture in (images[:1], images[:1].flip(-1))]
    allowed = [[wide[0, :, i : i + 6, j : j + 6] for i in range(3) for j in range(3)] for wide in both]
    seen = [[any(torch.equal(picture, option) for option in options) for options in allowed] for picture in moved]
    assert all(sum(row) == 1 for row in seen)
    assert 70 < sum(mirrored for _, mirrored in seen) < 130


def test_words_are_dropped_at_the_share_said_and_padding_never() -> None:
    tokens = torch.arange(2, 10_002).reshape(100, 100)
    tokens[:, 50:] = 0
    some = dropped(0.3)(tokens, torch.Generator().manual_seed(0))
    assert 0.28 < float((some[:, :50] == 1).float().mean()) < 0.32
    assert torch.equal(some[some != 1], tokens[some != 1])
    assert torch.equal(some[:, 50:], tokens[:, 50:])
    assert augmentation("none", "lm") is None
    assert augmentation("drop-words", "text") is not None
    with pytest.raises(IsobasinError, match="augment 'shift' changes image data, but these are text"):
        augmentation("shift", "text")
    with pytest.raises(IsobasinError, match=r"drop a share of 1\.0"):
        dropped(1.0)


def test_bytes_of_pictures_are_scaled_and_small_numbers_are_ids() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 1, 1, 3)
    assert model_inputs(pixels).flatten().tolist() == pytest.approx([-1.0, -0.6, 1.0])
    assert model_inputs(torch.tensor([[3, 255]], dtype=torch.uint8)).tolist() == [[3, 255]]
    kept = torch.rand(1, 1, 2, 2)
    assert model_inputs(kept) is kept
    narrow, wide = TokenStream(torch.arange(12, dtype=torch.uint8), 4), TokenStream(torch.arange(12), 4)
    drawn = [next(batches(s, 9))[0] for s in (narrow, wide)]
    assert torch.equal(*drawn)


def test_padding_is_not_seen() -> None:
    """More of it on the right changes nothing; without a mask it does."""
    config = ModelConfig.preset("bert", d_model=16, n_layers=1, n_heads=2, d_ff=16, d_vocab=9, n_positions=8)
    tokens, classes = problem()
    narrow = tokens + 1  # no padding in these
    wide = F.pad(narrow, (0, 3))
    masked, plain, blind = (
        train(Transformer(config), rows, classes, SHORT, seed=0, pad=pad).losses
        for rows, pad in ((wide, 0), (narrow, None), (wide, None))
    )
    assert masked == pytest.approx(plain, rel=1e-6)
    assert blind != pytest.approx(plain, rel=1e-4)
