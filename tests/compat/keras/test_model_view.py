"""``model`` in a callback: the module and the run under Keras's names. What a run does not provide is an error with advice."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate
from cadenza.compat.keras.logs import Means
from cadenza.compat.keras.model_view import ModelView
from cadenza.errors import AdapterError
from cadenza.loading import TensorBatches
from cadenza.status.outputs import Outputs
from tests.compat.keras.parts import INPUTS, TARGETS, K, acting, fit_natively, keras


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.last = nn.Linear(3, 1)
        self.scale = 2.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))  # type: ignore[no-any-return]  # modules have no types


def within(act: Callable[[Any], None], model: nn.Module | None = None, **arguments: Any) -> Run:
    """Call a function with ``model`` at the end of the second epoch of two."""

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            act(self.model)

    loader, acts = TensorBatches(INPUTS, TARGETS, batch_size=5), acting("Acts", on_epoch_end=on_epoch_end)
    return fit_natively([acts], model=model or TwoLayers(), loader=loader, max_epochs=2, **arguments)


def test_weights_are_arrays_in_the_order_of_the_state_dict() -> None:
    def check(model: Any) -> None:
        arrays, module = model.get_weights(), model._module
        assert [one.shape for one in arrays] == [tuple(one.shape) for one in module.state_dict().values()]
        assert model.count_params() == sum(one.size for one in arrays)
        before = [one.copy() for one in arrays]
        model.set_weights([one + 1 for one in arrays])
        assert all(numpy.array_equal(one, old) for one, old in zip(arrays, before, strict=True))  # they share no memory
        assert torch.equal(module.last.bias, torch.tensor(before[-1] + 1))
        model.set_weights(before)
        assert [one.path for one in model.trainable_variables] == [
            *("first/0/weight", "first/0/bias", "first/1/weight", "first/1/bias", "last/weight", "last/bias"),
        ]
        assert [one.name for one in model.non_trainable_weights] == ["running_mean", "running_var", "num_batches_tracked"]
        variable = model.variables[-1]
        assert numpy.asarray(variable.assign_add([1.0])).tolist() == module.last.bias.tolist()
        with pytest.raises(ValueError, match=r"expected 9 arrays.*got 1"):
            model.set_weights(before[:1])
        with pytest.raises(ValueError, match=r"expected an array of shape \(1,\); got \(4,\)"):
            variable.assign([1, 2, 3, 4])

    within(check)


def test_layers_and_other_attributes_are_those_of_the_module() -> None:
    def check(model: Any) -> None:
        assert [layer.name for layer in model.layers] == ["first", "last"]
        last = model.get_layer("last")
        last.set_weights([0 * one for one in last.get_weights()])
        assert model.predict(INPUTS.numpy()).tolist() == [[0.0]] * 10
        assert model(INPUTS).requires_grad
        assert model.first.training
        assert (model.scale, model.name, last.in_features) == (2.0, "two_layers", 3)
        lines: list[str] = []
        model.summary(print_fn=lines.append)
        assert "TwoLayers" in lines[0]
        assert f"{model.count_params():,}" in lines[0]
        with pytest.raises(ValueError, match="no layer is named 'middle'"):
            model.get_layer("middle")

    within(check)


@pytest.mark.parametrize("name", ["model.keras", "weights.safetensors"])
def test_saved_files_are_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    def check(model: Any) -> None:
        before = model.get_weights()
        model.save_weights(path)
        model.set_weights([0 * one for one in before])
        model.load_weights(path)
        assert all(numpy.array_equal(one, old) for one, old in zip(model.get_weights(), before, strict=True))
        assert [one.name for one in tmp_path.iterdir()] == [name]  # no part of a file
        with pytest.raises(FileExistsError, match="Pass overwrite=True"):
            model.save(path, overwrite=False)

    within(check)


def test_what_a_run_does_not_provide_is_an_error_that_names_callback_attribute_and_remedy() -> None:
    def message(act: Callable[[Any], object]) -> str:
        with pytest.raises(AdapterError) as error:
            within(act)  # type: ignore[arg-type]
        return str(error.value)

    assert message(lambda model: model.test_on_batch(1)) == (
        "Acts reads model.test_on_batch, which a native run does not provide. Call model.evaluate(inputs, targets)."
    )
    assert "Acts calls model.evaluate(sample_weight=...), which" in message(
        lambda model: model.evaluate(INPUTS, TARGETS, sample_weight=INPUTS)
    )
    assert "Acts sets model.optimizer.iterations, which" in message(lambda model: model.optimizer.iterations.assign(0))
    assert "Add LearningRateScheduler" in message(lambda model: setattr(model.optimizer, "learning_rate", lambda step: 0.1))
    assert "Acts sets layer.trainable, which a native run only lets be read. Set requires_grad" in message(
        lambda model: setattr(model.get_layer("last"), "trainable", False)
    )
    assert "Acts reads model.optimizer.clipnorm, which" in message(lambda model: model.optimizer.clipnorm)
    assert message(lambda model: model.stop_trainin).endswith("Did you mean 'stop_training'?")
    assert "Acts sets model.patience, which" in message(lambda model: setattr(model, "patience", 3))
    assert "Acts sets model.optimizer.clipnorm, which" in message(lambda model: setattr(model.optimizer, "clipnorm", 3))


def test_the_optimizer_has_a_rate_a_count_and_a_config() -> None:
    def check(model: Any) -> None:
        optimizer = model.optimizer
        assert (float(optimizer.learning_rate), optimizer.lr.numpy(), optimizer.learning_rate.value) == (
            0.1,
            numpy.float32(0.1),
            0.1,
        )
        assert (int(optimizer.iterations), optimizer.iterations.numpy(), optimizer.name) == (4, 4, "sgd")
        optimizer.learning_rate.assign(0.5)
        optimizer.weight_decay = 0.25
        config = optimizer.get_config()
        assert (config["learning_rate"], config["weight_decay"], config["name"]) == (0.5, 0.25, "sgd")
        assert not hasattr(optimizer, "optimizers")

    run = within(check)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5


def test_several_optimizers_have_names_and_rates_of_their_own() -> None:
    model, history = TwoLayers(), K.History()
    optimizers = [torch.optim.SGD(model.first.parameters(), 0.1), torch.optim.SGD(model.last.parameters(), 0.2)]
    schedule = K.LearningRateScheduler(lambda epoch, rate: rate / 2)
    settings: dict[str, Any] = {"loader": TensorBatches(INPUTS, TARGETS, batch_size=5), "max_epochs": 2, "validate": False}
    run = fit_natively([schedule, history], model=model, optimizer=optimizers, **settings)
    assert history.history["learning_rate_sgd"] == [0.05, 0.025]
    assert history.history["learning_rate_sgd_1"] == [0.1, 0.05]
    assert [one.param_groups[0]["lr"] for one in run.optimizers] == [0.025, 0.05]


class Accuracy:
    higher_is_better = True

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.value = float((predictions - targets).abs().lt(0.5).float().mean())

    def compute(self) -> float:
        return self.value

    def reset(self) -> None:
        self.value = 0.0


def test_the_direction_of_a_metric_is_known_without_a_mode() -> None:
    def compute(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, "mae": loss.detach().sqrt(), "odd": loss.detach()}

    loader = TensorBatches(INPUTS, TARGETS, batch_size=5)
    stops = [K.EarlyStopping(name, patience=9) for name in ("val_fit", "mae", "loss", "val_accuracy")]
    history = K.History()

    def predict(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"predictions": model(batch[0]), "targets": batch[1]}

    evaluate = Evaluate(loader, metrics={"fit": Accuracy(), "accuracy": Accuracy()}, compute=predict)
    fit_natively([*stops, history, evaluate], compute_loss=compute, validate=False, max_epochs=2)
    assert [one.monitor_op for one in stops] == [keras.ops.greater, keras.ops.less, keras.ops.less, keras.ops.greater]
    assert list(history.history) == ["loss", "mae", "odd", "val_fit", "val_accuracy"]
    with pytest.raises(ValueError, match="isn't able to automatically determine"):
        fit_natively([K.EarlyStopping("odd")], compute_loss=compute, validate=False)


def test_logs_are_read_from_the_device_only_when_a_callback_reads_them() -> None:
    means = Means()
    means.add(Outputs(loss=torch.tensor(2.0), rate=0.5, predictions=torch.ones(3), name="x"), None, 3)
    first = means.logs()
    means.add(Outputs(loss=torch.tensor(4.0), rate=1.5), None, 1)
    assert first.sums is not None
    assert first
    assert first.sums is not None  # neither its length nor its truth reads a value
    assert first == {"loss": 2.0, "rate": 0.5}
    assert {**means.logs()} == dict(means.logs()) == means.logs().copy() == {"loss": 2.5, "rate": 0.75}
    assert json.loads(json.dumps(means.logs())) == pickle.loads(pickle.dumps(means.logs())) == copy.copy(means.logs())
    assert "{loss:.1f}".format(**means.logs()) == "2.5"


def keras_model() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((2,)), layers.Dense(3), layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(1)]
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_model_of_keras_trains_and_is_what_callbacks_see(tmp_path: Path) -> None:
    model: Any = keras_model()
    seen: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0], training=model.training), batch[1])

    def look(self: Any, epoch: int, logs: Any = None) -> None:
        assert self.model.layers == model.layers
        assert self.model.name == model.name
        assert self.model.optimizer.iterations == 4 * (epoch + 1)
        seen.append([one.copy() for one in self.model.get_weights()])

    stop = K.EarlyStopping("loss", patience=0, mode="max", restore_best_weights=True)
    save = K.ModelCheckpoint(tmp_path / "{epoch}.keras")
    run = fit_natively([acting("Looks", on_epoch_end=look), save, stop], model=model, compute_loss=loss, max_epochs=3)
    assert [run.model] == [model]
    assert not numpy.array_equal(seen[0][0], seen[1][0])
    assert all(numpy.array_equal(one, other) for one, other in zip(model.get_weights(), seen[0], strict=True))
    again = keras.models.load_model(tmp_path / "1.keras")
    assert numpy.allclose(again.predict(INPUTS.numpy(), verbose=0), model.predict(INPUTS.numpy(), verbose=0), atol=1e-6)


def test_a_callback_without_a_run_sees_the_view_of_the_run_that_it_is_in() -> None:
    keeps = acting("Keeps", on_train_end=lambda self, logs=None: setattr(self, "kept", self.model))

    @on(Callback.on_fit_end)
    def check(run: Run) -> None:
        assert isinstance(keeps.model, ModelView)

    fit_natively([keeps, check], validate=False)
    assert keeps.kept is keeps.model
