"""`Trainer(compile=...)`: the model is compiled, everything else stays as it is; what breaks its graph is named.

The back ends here need no C++ compiler; what is compiled with inductor is torch's own matter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.optim.model_state import is_compiled
from cadenza.testing import Recorder, launch, tiny_loader, tiny_model, tiny_run, tiny_trainer

PLAIN = {"backend": "aot_eager"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layer(inputs)
        torch._dynamo.graph_break()  # the place that is to be named
        return hidden * 2


def bits(run: Any) -> list[Tensor]:
    return [value.clone() for value in run.model.state_dict().values()]


def test_it_learns_the_same_under_the_same_names_with_the_same_moments() -> None:
    seen, seen_plain = Recorder(), Recorder()
    model = tiny_model()
    run = tiny_run(model=model, compile=PLAIN, epochs=2, callbacks=[seen, Evaluate(tiny_loader())])
    plain = tiny_run(epochs=2, callbacks=[seen_plain, Evaluate(tiny_loader())])
    assert run.model is model
    assert list(run.model.state_dict()) == ["weight", "bias"]
    assert seen.names == seen_plain.names
    torch.testing.assert_close(bits(run), bits(plain))
    for (_, loss), (_, plain_loss) in zip(run.history["eval/loss"], plain.history["eval/loss"], strict=True):
        assert loss == pytest.approx(plain_loss)
    assert model._compiled_call_impl is not None


def test_a_run_that_is_continued_ends_with_the_same_bits_and_the_plan_says_the_mode(tmp_path: Path) -> None:
    def trainer(place: str, steps: int) -> Trainer:
        options: dict[str, Any] = {"directory": tmp_path / place, "callbacks": [Checkpoint(every="3 steps")]}
        return tiny_trainer(steps=steps, compile=PLAIN, seed=1, **options)

    whole = trainer("whole", 8).fit()
    trainer("cut", 3).fit()
    continued = trainer("cut", 8).fit(resume="auto")
    assert all(map(torch.equal, bits(continued), bits(whole)))
    headline, *_ = str(tiny_trainer(compile={"mode": "default"}).plan()).splitlines()
    assert headline.endswith("on cpu, in fp32, compiled mode=default")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look at it
def test_what_breaks_the_graph_is_named_once_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    run = tiny_run(model=Broken(), compile=PLAIN, epochs=2)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), start=1) if "the place that is" in text)
    told = [record.getMessage() for record in caplog.records if record.name == "cadenza"]
    assert len(told) == 1
    assert re.match(rf"compile: the graph of the model breaks at test_compile\.py:{line} in forward", told[0])
    assert f"test_compile.py:{line} in forward" in run.why("graph broken")


def test_regions_are_compiled_each_alone_and_the_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1))

    for regions, names in ([nn.Linear], {"0.0", "1"}), ("0*", {"0"}), (lambda name, part: name == "1", {"1"}):
        run = tiny_run(model=model(), compile={**PLAIN, "regions": regions})
        assert {name for name, part in run.model.named_modules() if is_compiled(part)} == names
        torch.testing.assert_close(bits(run), bits(tiny_run(model=model())))
        assert re.search(r"^compile: the first step took [\d.]+ [mu]?s, with the compilation$", capsys.readouterr().out, re.M)
    with pytest.raises(ValueError, match=r"compile\['regions'\]: no module of the model matches 'blocks\.\*'"):
        tiny_run(compile={"regions": "blocks.*"})
    with pytest.raises(TypeError, match=r"compile\['regions'\] must be a pattern"):
        tiny_trainer(compile={"regions": 3})


def test_on_two_ranks_it_learns_the_same_as_without() -> None:
    def learned(**arguments: Any) -> list[float]:
        run = tiny_run(driver="auto", batches=4, **arguments)
        return [float(one) for one in run.driver.unwrap(run.model).state_dict().values()]

    first, second = launch(lambda: learned(compile={"backend": "eager"}))
    plain, _ = launch(learned)
    assert first == second == pytest.approx(plain)


class _Reusing(torch.autograd.Function):
    """Multiplies by a weight, and returns gradients in the same memory in each backward pass, as a CUDA graph does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inputs: Tensor, memory: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, memory)
        return weight * inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, memory = ctx.saved_tensors
        return memory.copy_((gradient * inputs).sum(0)), None, None


class Reusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("memory", torch.zeros(1))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Tensor) -> Tensor:
        product: Tensor = _Reusing.apply(self.weight, inputs, self.memory)  # type: ignore[no-untyped-call]
        return product


def uncompiled(graph: Any, inputs: Any, **options: Any) -> Any:
    return graph.forward


@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_accumulate_although_cuda_graphs_use_their_memory_again(accumulate: int) -> None:
    options = {"backend": uncompiled, "mode": "reduce-overhead"}
    once = [(torch.tensor([[float(number)]]), torch.tensor([[0.0]])) for number in range(1, 7)]
    weights = [
        tiny_run(model=model, loader=once, accumulate=accumulate, compile=compile).model.get_parameter("weight")
        for model, compile in ((Reusing(), options), (nn.Linear(1, 1, bias=False), False))
        if model.get_parameter("weight").data.fill_(1.0) is not None
    ]
    assert weights[0].item() == pytest.approx(weights[1].item())
