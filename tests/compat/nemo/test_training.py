"""``nf.train``: the losses of the native trainer; several optimizers, policies, a second training (case 20 of part F2)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import ClipGradients
from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, TrainableNM
from cadenza.compat.nemo.backends.pytorch.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet
from cadenza.compat.nemo.core import Backend, DeviceType, NeuralModuleFactory, Optimization
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.utils import lr_policies
from cadenza.compat.neural.modules import loader_of
from cadenza.compat.neural.training import DrawNumbers
from cadenza.errors import CallbackError, LossError
from tests.compat.nemo.graphs import SGD, Line, LineNM, line, spoiled


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10))


def digits() -> DataLoader[Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images[:800], dtype=torch.float32) / 16, torch.tensor(labels[:800]))
    return DataLoader(data, batch_size=64, shuffle=True)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_losses_are_bit_identical_to_the_native_trainer(accumulate: int) -> None:
    seen: list[Tensor] = []
    graph_model, native_model = network(), network()

    image, label = DataLayerNM.of(digits(), ["image", "label"])()
    scores = TrainableNM.of(graph_model, ["image"], ["scores"])(image=image)
    loss = LossNM.of(nn.functional.cross_entropy, ["scores", "label"])(scores=scores, label=label)
    NeuralModuleFactory(random_seed=5, placement=DeviceType.CPU).train(
        [loss],
        "adam",
        {"lr": 0.01, "num_epochs": 3, "grad_norm_clip": 0.5},
        [nemo.on_step_end(lambda state: seen.append(state["tensors"].get_tensor("loss").detach()))],
        batches_per_step=accumulate,
    )

    native: list[Tensor] = []

    @on(Callback.on_step_end)
    def keep(run: Run) -> None:
        native.append(run.outputs["loss"].detach())

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(5)
    Trainer(
        native_model,
        torch.optim.Adam(native_model.parameters(), lr=0.01),  # a function would fuse it, which rounds differently
        digits(),
        objective,
        max_epochs=3,
        accumulate=accumulate,
        device="cpu",
        progress=False,
        callbacks=[ClipGradients(max_norm=0.5), keep, DrawNumbers(per_epoch=True)],
    ).fit()
    assert len(seen) == 3 * -(-13 // accumulate)
    assert all(map(torch.equal, seen, native))
    assert seen[-1] < 2.0 < seen[0]
    assert all(map(torch.equal, graph_model.parameters(), native_model.parameters()))


def test_the_hello_world_learns() -> None:
    factory = NeuralModuleFactory(random_seed=1, placement=DeviceType.CPU, backend=Backend.PyTorch)
    x, y = RealFunctionDataLayer(n=400, batch_size=50, x_lo=-1, x_hi=1)()
    loss = MSELoss()(predictions=TaylorNet(dim=4)(x=x), target=y)
    seen: list[float] = []
    keep = nemo.on_step_end(lambda state: seen.append(state["tensors"].get_tensor("loss").item()))
    run = factory.train([loss], "sgd", {"lr": 0.1, "num_epochs": 20}, [keep])
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert seen[-1] < 0.02 < seen[0]


@pytest.mark.parametrize("version", ["nemo", "nemo10"])
def test_the_first_script_of_nemo_s_tutorial_runs(version: str, caplog: pytest.LogCaptureFixture) -> None:
    nemo: Any = importlib.import_module(f"cadenza.compat.{version}")
    caplog.set_level("INFO", "nemo")
    nf = nemo.core.NeuralModuleFactory(placement=nemo.core.DeviceType.CPU)
    x, y = nemo.tutorials.RealFunctionDataLayer(n=400, batch_size=128)()
    loss = nemo.tutorials.MSELoss()(predictions=nemo.tutorials.TaylorNet(dim=4)(x=x), target=y)
    callback = nemo.core.SimpleLossLoggerCallback(
        tensors=[loss], print_func=lambda tensors: nemo.logging.info(f"Train Loss: {tensors[0].item()!s}")
    )
    nf.train([loss], callbacks=[callback], optimization_params={"num_epochs": 3, "lr": 0.0003}, optimizer="sgd")
    assert caplog.text.count("Train Loss: ") == 1  # 12 steps, every 25th is printed


# -- 20: several optimizers, and a second training ----------------------------------------------------


def pairs_of(factory: NeuralModuleFactory, graph: Line) -> tuple[list[Any], LineNM]:
    """Two modules in a row, each with its own optimizer. Both losses have gradients for the first one's weights."""
    second = LineNM()
    final = second(x=graph.prediction)
    loss = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=final, b=graph.y)
    first_optimizer = factory.create_optimizer("sgd", [graph.net], SGD)
    second_optimizer = factory.create_optimizer("sgd", [second], SGD)
    return [(first_optimizer, [graph.loss]), (second_optimizer, [loss])], second


def test_20_optimizers_alternate_with_their_losses() -> None:
    graph, factory, seen = line(4), NeuralModuleFactory(), list[tuple[float, bool, bool]]()
    pairs, second = pairs_of(factory, graph)
    weights = [graph.weights, [one.detach().clone() for one in second.parameters()]]

    @nemo.on_step_end
    def look(state: State) -> None:
        now = [graph.weights, [one.detach().clone() for one in second.parameters()]]
        seen.append((state["tensors"].get_tensor("loss").item(), *(old != new for old, new in zip(weights, now, strict=True))))
        weights[:] = now

    factory.train(pairs, optimization_params={"max_steps": 4}, callbacks=[look])
    assert [changed for _, *changed in seen] == [[True, False], [False, True]] * 2
    assert len({loss for loss, *_ in seen}) == 4


def test_20_an_optimizer_may_have_several_steps_in_a_row() -> None:
    graph, factory = line(4), NeuralModuleFactory()
    (first, second), other = pairs_of(factory, graph)
    changed = list[bool]()
    weights = [one.detach().clone() for one in other.parameters()]

    @nemo.on_step_end
    def look(state: State) -> None:
        now = [one.detach().clone() for one in other.parameters()]
        changed.append(not all(map(torch.equal, weights, now)))
        weights[:] = now

    run = factory.train([second, first, first], optimization_params={"max_steps": 6}, callbacks=[look])
    assert changed == [True, False, False] * 2
    assert run.optimizers == [first[0], second[0]]  # in the order of their creation, as in the files of NeMo


def test_20_gradients_of_the_other_optimizer_s_loss_are_not_applied() -> None:
    graph, factory = line(1), NeuralModuleFactory()
    pairs, second = pairs_of(factory, graph)
    factory.train(pairs, optimization_params={"max_steps": 3})

    own, other = line(1), LineNM()
    batch = loader_of(own.data)[0]  # type: ignore[index]  # it is a list
    for step in range(3):
        prediction = own.net(batch[0])
        loss = nn.functional.mse_loss(prediction if step % 2 == 0 else other(prediction), batch[1])
        module = own.net if step % 2 == 0 else other
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(module.parameters(), gradients, strict=True):
                weight.sub_(0.1 * gradient)
    torch.testing.assert_close(graph.weights, own.weights)
    torch.testing.assert_close(list(second.parameters()), list(other.parameters()))


def test_20_alternating_optimizers_do_not_accumulate() -> None:
    factory = NeuralModuleFactory()
    pairs, _ = pairs_of(factory, line())
    with pytest.raises(ValueError, match="alternating optimizers need batches_per_step=1; got 2"):
        factory.train(pairs, optimization_params={"max_steps": 4}, batches_per_step=2)


def test_20_a_second_training_needs_a_reset() -> None:
    factory, params = NeuralModuleFactory(), {**SGD, "max_steps": 1}
    factory.train([line().loss], "sgd", params)
    with pytest.raises(ValueError, match=r"this factory has already trained\. Call reset_trainer"):
        factory.train([line().loss], "sgd", params)
    factory.train([line().loss], "sgd", params, reset=True)
    factory.reset_trainer()
    factory.train([line().loss], "sgd", params)


def test_a_training_that_failed_before_its_start_does_not_count() -> None:
    factory = NeuralModuleFactory()
    with pytest.raises(ValueError, match=r"there is no optimizer 'sdg'. Did you mean 'sgd'\?"):
        factory.train([line().loss], "sdg", {**SGD, "max_steps": 1})
    factory.train([line().loss], "sgd", {**SGD, "max_steps": 1})


# -- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"lr": 0.1}, "optimization_params needs num_epochs or max_steps"),
        ({"max_steps": 1}, "optimization_params needs 'lr'"),
        ({"lr": 0.1, "max_steps": 1, "momentun": 0.9}, r"'sgd' has no argument 'momentun'. Did you mean 'momentum'\?"),
    ],
)
def test_wrong_parameters_are_errors(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NeuralModuleFactory().train([line().loss], "sgd", params)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"callback": []}, r"train has no argument 'callback'. Did you mean 'callbacks'\?"),
        ({"optimizer": torch.optim.Adam}, "optimizer must be a name such as 'sgd', or an optimizer; got"),
        ({"lr_policy": lr_policies.CosineAnnealing}, "lr_policy must be an instance such as CosineAnnealing"),
        ({"lr_policy": "cosine"}, "lr_policy must be an instance"),
        ({"batches_per_step": 0}, "batches_per_step must be a whole number of at least 1; got 0"),
        ({"tensors_to_optimize": ["loss"]}, "must be a list of losses, or of pairs .* got 'loss' in it"),
        ({"tensors_to_optimize": [("sgd", [])]}, "pairs .* with an optimizer of nf.create_optimizer"),
        ({"tensors_to_optimize": []}, "tensors_to_optimize must be a list of losses"),
        ({"callbacks": "abc"}, "callbacks must be a list; got 'abc'"),
        ({"callbacks": {}}, "callbacks must be a list; got {}"),
        ({"optimization_params": [1]}, r"optimization_params must be a dict such as .*; got \[1\]"),
        ({"optimization_params": {"lr": 0.1, "num_epochs": "3"}}, "num_epochs must be a number, or None; got '3'"),
        ({"optimization_params": {"lr": "0.1", "num_epochs": 3}}, "'lr' in optimization_params must be a number; got '0.1'"),
        ({"optimization_params": {"lr": 0.1, "num_epochs": 0}}, r"num_epochs must be at least 1; got 0. .* call nf.eval"),
        ({"batches_per_step": "2"}, "batches_per_step must be a whole number of at least 1; got '2'"),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_expected_ones(arguments: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"tensors_to_optimize": [line().loss], "optimization_params": {**SGD, "max_steps": 1}}
    with pytest.raises((TypeError, ValueError), match=said):
        NeuralModuleFactory().train(**{**given, **arguments})


def test_a_limit_that_is_not_whole_is_rounded_up() -> None:
    run = NeuralModuleFactory().train([line(2).loss], "sgd", {**SGD, "num_epochs": 1e1, "max_steps": 2.5})
    assert run.progress.step == 3


def test_what_is_not_a_tensor_or_a_device_type_is_an_error_at_once() -> None:
    factory = NeuralModuleFactory(placement=DeviceType.CPU)
    with pytest.raises(TypeError, match=r"placement must be a DeviceType such as DeviceType.CPU, or None; got 'cpu'"):
        NeuralModuleFactory(placement="cpu")  # type: ignore[arg-type]  # the error to test
    assert NeuralModuleFactory.get_default_factory() is factory
    with pytest.raises(ValueError, match="create_optimizer needs a list of neural modules or NmTensors; got None"):
        factory.create_optimizer("sgd", None, SGD)
    with pytest.raises(TypeError, match=r"tensors must be a list of NmTensors, .*; got \['loss'\]"):
        factory.infer(["loss"])
    with pytest.raises(TypeError, match="expected a list of NmTensors or their names; got None"):
        nemo.SimpleLossLoggerCallback(None)  # type: ignore[arg-type]  # the error to test


def test_an_attribute_of_a_native_callback_with_another_value_is_an_error_with_its_index_in_the_list() -> None:
    timer = nemo.NeMoCallback()
    timer.before = 1.5  # type: ignore[assignment]  # the time of a start, in the user's script
    with pytest.raises(CallbackError, match=r"callbacks\[1\]\.before must be a tuple of classes and phases, .*; got 1\.5"):
        NeuralModuleFactory().train([line().loss], "sgd", {**SGD, "max_steps": 1}, [nemo.SimpleLogger(), timer])


def test_an_argument_that_the_factory_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"NeuralModuleFactory has no argument 'logdir'. Did you mean 'log_dir'\?"):
        NeuralModuleFactory(logdir="work")


def test_a_loss_is_one_number() -> None:
    graph = line()
    with pytest.raises(LossError, match=r"'y_pred' of linenm\d+ has shape \(2, 1\)"):
        NeuralModuleFactory().train([graph.prediction], "sgd", {**SGD, "max_steps": 1})
    plain = LossNM.of(lambda a, b: 1.0, ["a", "b"])(a=graph.prediction, b=graph.y)
    with pytest.raises(LossError, match=r"'loss' of lossnm\d+ is a float"):
        NeuralModuleFactory().train([plain], "sgd", {**SGD, "max_steps": 1})
    kept = LossNM.of(lambda a, b: (a - b).abs().mean(0), ["a", "b"])(a=graph.prediction, b=graph.y)
    run = NeuralModuleFactory().train([graph.loss, kept], "sgd", {**SGD, "max_steps": 1})  # of shape (1,), which NeMo accepts
    assert run.progress.step == 1


def test_a_training_without_trainable_weights_is_an_error() -> None:
    graph = line()
    graph.net.freeze()
    with pytest.raises(ValueError, match="no module has a trainable weight"):
        NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, "max_steps": 1})


def test_arguments_without_effect_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    factory = NeuralModuleFactory()
    factory.train([line().loss], "sgd", {**SGD, "max_steps": 1}, synced_batchnorm=True)
    assert "these arguments have no effect here: synced_batchnorm" in caplog.text


def test_sgd_has_momentum_by_default_and_an_optimizer_instance_is_used_unchanged() -> None:
    graph = line()
    run = NeuralModuleFactory().train([graph.loss], optimization_params={"lr": 0.1, "max_steps": 1})
    assert run.optimizers[0].defaults["momentum"] == 0.9
    own = torch.optim.Adagrad(graph.net.parameters())
    assert NeuralModuleFactory().train([graph.loss], own, {"max_steps": 1}).optimizers == [own]


def test_mixed_precision_is_the_native_one() -> None:
    assert NeuralModuleFactory(optimization_level=Optimization.mxprO1).precision == "fp16"


def test_trainings_that_never_end_in_nemo_end() -> None:
    # An epoch has fewer batches than a step, or all losses are NaN; and only max_steps limits the training.
    short = NeuralModuleFactory().train([line(2).loss], "sgd", {**SGD, "max_steps": 3}, batches_per_step=4)
    assert (short.progress.step, short.progress.epoch) == (3, 3)
    graph = line(loader=spoiled(1, 0))
    assert NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, "max_steps": 3}).progress.step == 3
    assert graph.weights == line().weights


# -- policies -----------------------------------------------------------------------------------------


def test_a_policy_sets_the_rate_of_each_batch_after_on_batch_start() -> None:
    asked, seen = list[tuple[float, int, int]](), list[float]()

    def policy(initial_lr: float, step: int, epoch: int) -> float:
        asked.append((initial_lr, step, epoch))
        return initial_lr / (step + 2)

    def rate(state: State) -> None:
        seen.append(round(state["optimizers"][0].param_groups[0]["lr"], 6))

    params = {**SGD, "max_steps": 3}
    callbacks = [nemo.on_batch_start(rate), nemo.on_batch_end(rate)]
    NeuralModuleFactory().train([line(4).loss], "sgd", params, callbacks, lr_policy=policy, batches_per_step=2)
    assert asked == [(0.1, 0, 0), (0.1, 0, 0), (0.1, 1, 0), (0.1, 1, 0), (0.1, 2, 1), (0.1, 2, 1)]
    assert seen == [0.1, 0.05, 0.05, 0.05, 0.05, 0.033333, 0.033333, 0.033333, 0.033333, 0.025, 0.025, 0.025]


def test_a_policy_needs_the_initial_rate() -> None:
    graph, policy = line(), lr_policies.CosineAnnealing(4)
    own = torch.optim.SGD(graph.net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="lr_policy needs 'lr'"):
        NeuralModuleFactory().train([graph.loss], own, {"max_steps": 1}, lr_policy=policy)


def test_nothing_is_written_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    NeuralModuleFactory().train([line().loss], "sgd", {**SGD, "max_steps": 1})
    assert list(tmp_path.iterdir()) == []
